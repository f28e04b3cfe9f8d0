"""Paged attention: every implementation against the plain reference, and the reference against a loop per token.

Each slot that no token sees holds NaN unless a test says otherwise, the null block too (cases B70, B71).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import UNOPTIMISED, assert_close, attend, attend_reference, each_implementation
from jax import lax

from benchmarks.attention_shapes import Case, Row, Shape, first_seen, make_case
from pagedjax.pallas_kernels import xla
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

# Between them: head_dim 16, 64, 80, 96, 128; blocks of 1, 8, 12, 16, 32, 64, 128; groups of 1, 3, 4, 7 query heads.
SHAPES = {
    "smollm2": Shape(9, 3, 64, 16),
    "smollm2, blocks of 64": Shape(9, 3, 64, 64),
    "llama3": Shape(8, 2, 128, 32),
    "qwen2 0.5b": Shape(14, 2, 64, 8),
    "no groups, odd blocks": Shape(3, 3, 80, 12),
    "blocks of one": Shape(4, 1, 16, 1),
    "one KV head": Shape(7, 1, 96, 16),
    "large blocks": Shape(3, 1, 16, 128),
    "tiny": Shape(2, 2, 16, 8),
}


def lengths(block_size: int) -> list[int]:
    """Context lengths at the edges of blocks and of the tiles of keys that kernels take: 64 and 128."""
    near = {block_size - 1, block_size, block_size + 1, 2 * block_size}
    return sorted(length for length in {1, 2, 63, 64, 65, 127, 128, 129, 333} | near if length > 0)


def decodes(block_size: int) -> list[Row]:
    return [(length, 1) for length in lengths(block_size)]


def mixed(block_size: int) -> list[Row]:
    """Decodes; whole prompts and chunks at the edges; a request without new tokens in the middle."""
    whole = [(length, length) for length in (2, block_size, block_size + 1, 63, 65)]
    chunks = [(64, 63), (129, 2), (130, 65), (200, 64), (333, 7), (300, 129)]
    return [*decodes(block_size), *whole, (50, 0), *chunks, (5, 1)]


# --- every implementation against the reference


def shapes_and_batches() -> Iterator[Any]:
    """Mixed batches in f32 of every shape, and of every second one decodes, of the others mixed batches in bf16."""
    for i, (name, shape) in enumerate(SHAPES.items()):
        yield pytest.param(shape, mixed, jnp.float32, id=f"{name}-mixed-f32")
        if i % 2:
            yield pytest.param(shape, mixed, jnp.bfloat16, id=f"{name}-mixed-bf16")
        else:
            yield pytest.param(shape, decodes, jnp.float32, id=f"{name}-decodes-f32")


@each_implementation
@pytest.mark.parametrize(("shape", "batch", "dtype"), list(shapes_and_batches()))
def test_equals_the_reference(implementation, shape, batch, dtype):
    rows = batch(shape.block_size)
    num_tokens = sum(new for _, new in rows)
    case = make_case(rows, shape, dtype=dtype, num_tokens=num_tokens + 3, num_rows=len(rows) + 2)
    assert_close(attend(implementation, case), attend_reference(case), case)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Shape, list[Row]]:
    """Up to 6 requests with up to 200 tokens in the pool and 160 new ones in all: two compiled programs a shape.

    Three shapes, whose blocks are of one token, of no power of two, and as long as a tile of keys.
    """
    rows: list[Row] = []
    budget, decodes_only = 160, draw(st.booleans())
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.integers(1, 1 if decodes_only else min(70, budget - 6)))
        rows.append((new + draw(st.integers(0, 200 - new)), new))
        budget -= new
        if budget < 7:
            break
    return SHAPES[draw(st.sampled_from(["blocks of one", "no groups, odd blocks", "smollm2, blocks of 64"]))], rows


@each_implementation
@hypothesis.given(batches(), st.integers(0, 2**32 - 1))
def test_equals_the_reference_on_any_batch(implementation, batch, seed):
    shape, rows = batch
    width = -(-200 // shape.block_size)
    case = make_case(rows, shape, num_tokens=160, num_rows=7, table_width=width, num_blocks=1 + 6 * width, seed=seed)
    assert_close(attend(implementation, case), attend_reference(case), case)


@each_implementation
@pytest.mark.parametrize("rows", [[(1, 1)], [(1, 1), (40, 1)], [(130, 1)], [(17, 17)]], ids=str)
def test_smallest_batches(implementation, rows):
    case = make_case(rows, SHAPES["smollm2"])
    assert_close(attend(implementation, case), attend_reference(case), case)


@each_implementation
def test_large_scores(implementation):
    """Scores of some hundreds, the largest in any chunk: the online softmax has to rescale, and must not overflow."""
    case = make_case(mixed(16), SHAPES["smollm2"], q_size=50.0)
    # exp(x) with x rounded at 2**-16 (|x| up to 256) is off by 1.5e-5
    assert_close(attend(implementation, case), attend_reference(case), case, tolerance=5e-5)


@each_implementation
def test_scores_far_below_zero(implementation):
    """Every score near -3000: a peak that starts at 0 would lose them all."""
    case = make_case(mixed(16), SHAPES["tiny"], fill=0.0)
    case = case._replace(q=jnp.full_like(case.q, -100.0), k_pool=jnp.full_like(case.k_pool, 10.0))
    assert_close(attend(implementation, case), attend_reference(case), case)


@each_implementation
def test_one_query_is_a_special_case_of_many(implementation):
    """The program for decodes alone (max_query_len=1) and the general one agree."""
    rows = decodes(16)
    case = make_case(rows, SHAPES["smollm2"], num_rows=len(rows) + 2, num_tokens=len(rows) + 2)
    assert case.meta.max_query_len == 1
    assert_close(attend(implementation, case), attend(implementation, case, max_query_len=len(case.q)), case)


# --- what must not matter


@each_implementation
@pytest.mark.parametrize(
    ("batch", "window", "dtype"),
    [  # every two of them
        (decodes, None, jnp.float32),
        (decodes, 20, jnp.bfloat16),
        (mixed, None, jnp.bfloat16),
        (mixed, 20, jnp.float32),
    ],
    ids=["decodes-f32", "decodes-window-bf16", "mixed-bf16", "mixed-window-f32"],
)
@pytest.mark.parametrize("fill", [math.nan, 1e30, -math.inf])
def test_unused_slots_change_no_bit(implementation, fill, batch, window, dtype):
    """Slots that no context covers, those before the window, and the queries of padding."""
    rows = batch(16)
    sizes = {"num_tokens": sum(new for _, new in rows) + 2, "num_rows": len(rows) + 1}
    shape = SHAPES["smollm2"]._replace(sliding_window=window)
    dirty, clean = (make_case(rows, shape, dtype=dtype, fill=value, **sizes) for value in (fill, 0.0))
    np.testing.assert_array_equal(attend(implementation, dirty), attend(implementation, clean))


@each_implementation
@pytest.mark.parametrize("batch", [decodes, mixed])
def test_neighbours_content_changes_no_bit(implementation, batch):
    """Case B79: same program, same rows; all but one request's queries and blocks hold other values."""
    rows = batch(16)
    case = make_case(rows, SHAPES["smollm2"])
    mine = len(rows) // 2
    start, end = case.meta.query_start_loc[mine : mine + 2]
    expected = attend(implementation, case)[start:end]
    others = np.setdiff1d(np.arange(len(case.k_pool)), case.meta.block_tables[mine])
    changed = Case(
        q=case.q.at[:start].multiply(3.0).at[end:].multiply(-2.0),
        k_pool=case.k_pool.at[others].multiply(-2.0),
        v_pool=case.v_pool.at[others].set(1e6),
        meta=case.meta,
    )
    np.testing.assert_array_equal(attend(implementation, changed)[start:end], expected)


@each_implementation
def test_where_blocks_lie_changes_no_bit(implementation):
    case = make_case(mixed(16), SHAPES["smollm2"])
    order = np.random.default_rng(1).permutation(np.arange(1, len(case.k_pool)))
    moved_to = np.array([0, *order])
    k_pool, v_pool = (pool.at[moved_to].set(pool) for pool in (case.k_pool, case.v_pool))
    meta = AttentionMetadata(
        case.meta.slot_mapping,
        np.asarray(moved_to[case.meta.block_tables], np.int32),
        case.meta.context_lens,
        case.meta.query_start_loc,
        case.meta.max_query_len,
    )
    moved = Case(case.q, k_pool, v_pool, meta)
    np.testing.assert_array_equal(attend(implementation, moved), attend(implementation, case))


@each_implementation
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
@pytest.mark.parametrize("decodes_only", [True, False])
def test_a_batch_of_padding_gives_zeros(implementation, num_tokens, decodes_only):
    shape = SHAPES["smollm2"]
    pool = jnp.full((4, shape.num_kv_heads, shape.block_size, shape.head_dim), math.nan, jnp.float32)
    meta = AttentionMetadata(
        slot_mapping=np.zeros(num_tokens, np.int32),
        block_tables=np.zeros((num_tokens, 5), np.int32),
        context_lens=np.zeros(num_tokens, np.int32),
        query_start_loc=np.zeros(num_tokens + 1, np.int32),
        max_query_len=1 if decodes_only else num_tokens,
    )
    case = Case(jnp.ones((num_tokens, shape.num_heads, shape.head_dim)), pool, pool, meta)
    assert not attend(implementation, case).any()
    assert not attend_reference(case).any()


@each_implementation
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("fill", [0.0, math.nan])
def test_nothing_to_see_gives_zeros_and_no_nan(implementation, fill, window):
    """Case B71: rows without a context or without new tokens, padding, whole tiles of keys before the window."""
    rows = [(0, 0), (1, 1), (0, 0), (150, 140), (40, 0), (5, 5), (333, 1), (0, 0)]
    case = make_case(rows, SHAPES["tiny"]._replace(sliding_window=window), fill=fill, num_tokens=150, num_rows=10)
    expected = attend_reference(case)
    with jax.debug_nans(True):
        assert_close(attend(implementation, case), expected, case)


# --- windows and soft caps


@each_implementation
@pytest.mark.parametrize("window", [1, 5, 16, 37, 64, 100, 10_000])
def test_sliding_windows(implementation, window):
    """Of one key, within a block, of a block, ending in the middle of a tile, shorter than chunks, beyond contexts."""
    rows = mixed(16)
    shape = SHAPES["smollm2"]._replace(sliding_window=window)
    case = make_case(rows, shape, num_tokens=sum(new for _, new in rows) + 3, num_rows=len(rows) + 2)
    actual = attend(implementation, case, compiler_options=UNOPTIMISED)
    assert_close(actual, attend_reference(case, UNOPTIMISED), case)


@each_implementation
@pytest.mark.parametrize("batch", [decodes, mixed])
def test_a_window_as_long_as_the_contexts_is_none(implementation, batch):
    case = make_case(batch(16), SHAPES["smollm2"])
    expected = attend(implementation, case)
    assert_close(attend(implementation, case._replace(sliding_window=333)), expected, case)


@each_implementation
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("cap", "q_size"), [(50.0, 1.0), (50.0, 50.0), (0.5, 1.0)], ids=["idle", "hard", "small"])
def test_soft_caps(implementation, cap, q_size, window):
    """Scores of a few and of some hundreds under a cap of 50, and of a few under one of 0.5."""
    shape = SHAPES["smollm2"]._replace(sliding_window=window, logits_soft_cap=cap)
    case = make_case(mixed(16), shape, q_size=q_size)
    # exp(x) with x rounded at 2**-19 (|x| up to 50), by a multiplication and a tanh, is off by 6e-6
    tolerance = 1e-5 if q_size > 1 else None
    assert_close(attend(implementation, case), attend_reference(case), case, tolerance)


@pytest.mark.parametrize("batch", [decodes, mixed])
def test_xla_reads_no_more_than_a_window_reaches(monkeypatch, batch):
    """The loop over chunks of keys turns as often as the window is long, whatever the contexts of a group of tiles."""
    trips = []

    def count(lower, upper, body, init):
        jax.debug.callback(lambda trip: trips.append(int(trip)), jnp.asarray(upper - lower))
        return loop(lower, upper, body, init)

    loop = lax.fori_loop
    monkeypatch.setattr(lax, "fori_loop", count)
    case = make_case([*batch(16), (20 * 333, 1)], SHAPES["smollm2"]._replace(sliding_window=20))
    jax.jit(lambda *arrays: xla.paged_attention(*arrays, **case.options))(*case.arrays)
    jax.effects_barrier()
    num_outer_loops = 1 if batch is decodes else 2
    inner = sorted(trips)[:-num_outer_loops]
    # Of 64 keys each, of which the first begins at a multiple of 64: a tile of 32 tokens sees 20 + 31.
    assert set(inner) == {1, 2}


@each_implementation
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("block_size", [4, 3])
def test_chunks_under_a_window_whose_blocks_are_freed(implementation, block_size, budget):
    """Case B10: a prompt of 12 in chunks, then 8 decodes, as in one dense pass; what no later token sees is gone."""
    whole = make_case([(20, 20)], SHAPES["tiny"]._replace(block_size=block_size, sliding_window=4))
    expected = attend_by_hand(whole)
    ends = [*range(budget, 12, budget), *range(12, 21)]
    start = 0
    for end in ends:
        case = chunk_of(whole, start, end)
        actual = attend(implementation, case, compiler_options=UNOPTIMISED)
        assert_close(actual[: end - start], expected[start:end], case)
        start = end


def chunk_of(whole: Case, start: int, end: int) -> Case:
    """The step that computes tokens `start` to `end` of a case of one request. Only slots that it sees are not NaN."""
    context, num_tokens, block_size = len(whole.q), 12, whole.k_pool.shape[2]
    (table,), first = whole.meta.block_tables, first_seen((end, end - start), whole.sliding_window)
    unseen = np.array([position for position in range(context) if not first <= position < end])
    q, k_pool, v_pool = (np.array(x) for x in whole.arrays[:3])
    for pool in (k_pool, v_pool):
        pool[table[unseen // block_size], :, unseen % block_size] = math.nan
    q = np.pad(q[start:end], ((0, num_tokens - (end - start)), (0, 0), (0, 0)), constant_values=math.nan)
    table = np.where(np.arange(len(table)) < first // block_size, 0, table)
    meta = AttentionMetadata(
        slot_mapping=np.zeros(num_tokens, np.int32),
        block_tables=np.asarray(table[None], np.int32),
        context_lens=np.array([end], np.int32),
        query_start_loc=np.array([0, end - start], np.int32),
        max_query_len=1 if end - start == 1 else num_tokens,
    )
    return whole._replace(q=jnp.asarray(q), k_pool=jnp.asarray(k_pool), v_pool=jnp.asarray(v_pool), meta=meta)


# --- drawn shapes and options, all of case B76


class Drawn(NamedTuple):
    """One choice of each thing that makes another program."""

    head_dim: int
    block_size: int
    group: int
    num_kv_heads: int
    dtype: str
    batch: str
    window: str
    cap: float | None


CHOICES = {
    "head_dim": (64, 80, 96, 128, 256),
    "block_size": (1, 8, 12, 16, 32, 128),
    "group": (1, 3, 4, 7, 8),
    "num_kv_heads": (1, 2),
    "dtype": ("float32", "bfloat16", "float16"),
    "batch": ("decodes", "drafts", "mixed"),
    "window": ("none", "one", "half a block", "a block", "37", "all"),
    "cap": (None, 50.0, 1.5),
}
NUM_DRAWN, NUM_QUICK = 60, 20
"""45 draws hold every two choices, 8 of them every choice."""


def pairs(drawn: tuple) -> set:
    """Every two of its choices."""
    return set(itertools.combinations(enumerate(drawn), 2))


def draw(num_drawn: int) -> list[Drawn]:
    """The same ones each time. Each is the best of 100: it brings the most pairs of choices that were not there yet."""
    rng, seen, drawn = np.random.default_rng(0), set(), []
    for _ in range(num_drawn):
        candidates = [tuple(values[rng.integers(len(values))] for values in CHOICES.values()) for _ in range(100)]
        best = max(candidates, key=lambda candidate: len(pairs(candidate) - seen))
        seen |= pairs(best)
        drawn.append(Drawn(*best))
    return drawn


DRAWN = draw(NUM_DRAWN)


def drawn_rows(drawn: Drawn) -> list[Row]:
    """Decodes at the edges of blocks, rows without new tokens; drafts; whole prompts and chunks; shuffled."""
    bs = drawn.block_size
    edges = sorted({n for n in (1, bs - 1, bs, bs + 1, 5 * bs) if n > 0})
    rows = [(0, 0), *((context, 1) for context in edges), (bs, 0)]
    if drawn.batch != "decodes":
        rows += [(max(context, new), new) for context, new in zip(edges, (2, 8, 3, 5, 4), strict=False)]
    if drawn.batch == "mixed":
        rows += [(n, n) for n in (bs - 1, bs, bs + 1) if 1 < n <= 33] or [(20, 20)]
        rows += [(max(5 * bs, 33), 33), (5 * bs + 9, 9)]
    return [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]


def drawn_case(drawn: Drawn) -> Case:
    bs = drawn.block_size
    windows = {"none": None, "one": 1, "half a block": -(-bs // 2), "a block": bs, "37": 37, "all": 10 * bs}
    heads = drawn.num_kv_heads * drawn.group, drawn.num_kv_heads
    shape = Shape(*heads, drawn.head_dim, bs, windows[drawn.window], drawn.cap)
    rows = drawn_rows(drawn)
    num_tokens = sum(new for _, new in rows) + 3
    case = make_case(rows, shape, dtype=drawn.dtype, num_tokens=num_tokens, num_rows=len(rows) + 2)
    if drawn.batch == "drafts":
        case = case._replace(meta=dataclasses.replace(case.meta, max_query_len=8))
    return case


def quick_or_slow() -> Iterator[Any]:
    """The quick draws for every implementation, the others for all but "xla", which every other test runs too."""
    for (index, drawn), implementation in itertools.product(enumerate(DRAWN), IMPLEMENTATIONS):
        if index < NUM_QUICK or implementation != "xla":
            marks = [] if index < NUM_QUICK else [pytest.mark.slow]
            name = "-".join([*map(str, drawn), implementation]).replace(" ", "_")
            yield pytest.param(implementation, drawn, marks=marks, id=name)


@pytest.mark.parametrize(("implementation", "drawn"), list(quick_or_slow()))
def test_drawn_shapes_and_options(implementation, drawn):
    case = drawn_case(drawn)
    actual = attend(implementation, case, compiler_options=UNOPTIMISED)
    assert_close(actual, attend_reference(case, UNOPTIMISED), case)


def test_what_is_drawn_covers_everything():
    """Every choice among the quick ones, every two choices among all."""
    for name, values in CHOICES.items():
        assert {getattr(drawn, name) for drawn in DRAWN[:NUM_QUICK]} == set(values)
    names = enumerate(CHOICES.values())
    every_choice = [[(i, value) for value in values] for i, values in names]
    every_pair = {pair for two in itertools.combinations(every_choice, 2) for pair in itertools.product(*two)}
    assert set().union(*map(pairs, DRAWN)) == every_pair


# --- which implementation


def test_the_default_works():
    case = make_case(mixed(16), SHAPES["smollm2"])
    assert_close(attend(None, case), attend_reference(case), case)


def test_an_unknown_implementation_is_refused():
    case = make_case([(3, 1)], SHAPES["tiny"])
    with pytest.raises(ValueError, match=r"implementation must be None or one of xla, .*, got 'no_such'"):
        paged_attention(*case.arrays, scale=1.0, implementation="no_such")


# --- the reference against a loop


def is_seen(key: int, position: int, window: int | None) -> bool:
    """Whether the token at `position` sees the key: as many keys as the window is long, its own included."""
    return key <= position and (window is None or position - window < key)


def attend_by_hand(case: Case) -> np.ndarray:
    """Token by token and head by head in f64, straight from the definition."""
    q, k_pool, v_pool = (np.asarray(x, np.float64) for x in case.arrays[:3])
    meta, (_, num_kv_heads, block_size, _) = case.meta, k_pool.shape
    group = q.shape[1] // num_kv_heads
    out = np.zeros_like(q)
    for row, context in enumerate(meta.context_lens):
        start, end = meta.query_start_loc[row : row + 2]
        for token in range(start, end):
            position = context - end + token
            keys = [key for key in range(context) if is_seen(key, position, case.sliding_window)]
            slots = [(meta.block_tables[row, key // block_size], key % block_size) for key in keys]
            for head in range(q.shape[1]):
                k = np.array([k_pool[block, head // group, offset] for block, offset in slots])
                v = np.array([v_pool[block, head // group, offset] for block, offset in slots])
                scores = k @ q[token, head] / math.sqrt(q.shape[2])
                if case.logits_soft_cap is not None:
                    scores = case.logits_soft_cap * np.tanh(scores / case.logits_soft_cap)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 20, 200])
@pytest.mark.parametrize("name", ["smollm2", "blocks of one", "no groups, odd blocks"])
def test_the_reference_equals_a_loop(name, window, cap):
    shape = SHAPES[name]._replace(sliding_window=window, logits_soft_cap=cap)
    rows = [(1, 1), (17, 1), (130, 1), (13, 13), (65, 9), (40, 0), (shape.block_size, 1)]
    case = make_case(rows, shape, num_tokens=30, num_rows=9)
    assert_close(attend_reference(case), attend_by_hand(case), case)


@pytest.mark.oracle
@pytest.mark.parametrize("window", [1, 4, 19, 20, 21])
def test_the_window_is_that_of_transformers(window):
    """Case B10: in the mask that eager attention adds to the scores of the installed version, 0 is to be seen."""
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = MistralConfig(sliding_window=window)
    config._attn_implementation = "eager"
    mask = create_sliding_window_causal_mask(config, torch.zeros(1, 20, 8), attention_mask=None, cache=None)
    ours = [[is_seen(key, position, window) for key in range(20)] for position in range(20)]
    np.testing.assert_array_equal(np.asarray(mask)[0, 0] == 0, ours)
