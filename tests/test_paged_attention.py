"""Paged attention: every implementation against the plain reference, and the reference against a loop per token.

Each slot that no context covers holds NaN unless a test says otherwise, the null block too (cases B70, B71).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pallas_kernels import reference
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

# Largest error over largest output. f32: the same sums in another order; one ulp is 1.2e-7, and a softmax over some
# hundred keys rounds a few times ten of them. bf16: inputs are the same bf16 numbers, but weights and outputs are
# rounded to 8 bits (2**-8 = 4e-3 each).
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


class Shape(NamedTuple):
    """What a kernel is compiled for, apart from the number of tokens and requests."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


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

Row = tuple[int, int]
"""Tokens of a request in the pool, and how many of them are new."""


class Case(NamedTuple):
    """The arguments of the op."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    meta: AttentionMetadata


def make_case(
    rows: Sequence[Row],
    shape: Shape,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    fill: float = math.nan,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    table_width: int | None = None,
    num_blocks: int | None = None,
    q_size: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random queries, and contexts in blocks in random order; `num_tokens` and `num_rows` count padding too."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    rng = np.random.default_rng(seed)
    query_lens = np.array([new for _, new in rows])
    ends = np.cumsum(query_lens)
    num_tokens = num_tokens or int(ends[-1])
    num_rows = num_rows or len(rows)
    blocks_per_row = [-(-context // block_size) for context, _ in rows]
    num_blocks = num_blocks or sum(blocks_per_row) + 3
    free = iter(rng.permutation(np.arange(1, num_blocks)))

    pools = np.full((2, num_blocks, num_kv_heads, block_size, head_dim), fill, np.float32)
    tables = np.zeros((num_rows, table_width or max(blocks_per_row) + 1), np.int32)
    for row, (context, _) in enumerate(rows):
        for index in range(blocks_per_row[row]):
            tables[row, index] = block = next(free)
            used = min(block_size, context - index * block_size)
            pools[:, block, :, :used] = rng.normal(size=(2, num_kv_heads, used, head_dim))
    q = q_size * rng.normal(size=(num_tokens, num_heads, head_dim))

    last = int(ends[-1])
    meta = AttentionMetadata(
        slot_mapping=np.zeros(num_tokens, np.int32),  # attention only reads
        block_tables=tables,
        context_lens=np.pad([context for context, _ in rows], (0, num_rows - len(rows))).astype(np.int32),
        query_start_loc=np.array([0, *ends, *[last] * (num_rows - len(rows))], np.int32),
        max_query_len=1 if max(query_lens) == 1 else num_tokens,
    )
    return Case(jnp.asarray(q, dtype), jnp.asarray(pools[0], dtype), jnp.asarray(pools[1], dtype), meta)


def attend(implementation: str | None, case: Case, max_query_len: int | None = None) -> np.ndarray:
    """The op under jit, as f32; skips what an implementation says it cannot do. "xla" has no excuse."""
    q, k_pool, v_pool, meta = case
    meta = AttentionMetadata(
        meta.slot_mapping,
        meta.block_tables,
        meta.context_lens,
        meta.query_start_loc,
        max_query_len or meta.max_query_len,
    )
    run = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
    try:
        out = run(q, k_pool, v_pool, meta, scale=q.shape[-1] ** -0.5, implementation=implementation)
    except NotImplementedError as error:
        if implementation in (None, "xla"):
            raise
        pytest.skip(str(error))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    return np.asarray(out, np.float32)


def attend_reference(case: Case) -> np.ndarray:
    out = jax.jit(reference.paged_attention, static_argnames="scale")(*case, scale=case.q.shape[-1] ** -0.5)
    return np.asarray(out, np.float32)


def assert_close(actual: np.ndarray, expected: np.ndarray, case: Case, tolerance: float | None = None) -> None:
    """Within the tolerance relative to the largest output, and exactly zero where there is no token."""
    num_real = int(case.meta.query_start_loc[-1])
    assert np.isfinite(actual).all()
    assert not actual[num_real:].any()
    assert np.abs(expected[:num_real]).max() > 0.1  # there is something to compare
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= (tolerance or TOLERANCE[case.q.dtype.type])


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


@each_implementation
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(decodes, jnp.float32), (mixed, jnp.float32), (mixed, jnp.bfloat16)],
    ids=["decodes-f32", "mixed-f32", "mixed-bf16"],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(implementation, shape, batch, dtype):
    rows = batch(shape.block_size)
    num_tokens = sum(new for _, new in rows)
    case = make_case(rows, shape, dtype=dtype, num_tokens=num_tokens + 3, num_rows=len(rows) + 2)
    assert_close(attend(implementation, case), attend_reference(case), case)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Shape, list[Row]]:
    """Up to 6 requests with up to 200 tokens in the pool and 160 new ones in all: two compiled programs a shape."""
    rows: list[Row] = []
    budget, decodes_only = 160, draw(st.booleans())
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.integers(1, 1 if decodes_only else min(70, budget - 6)))
        rows.append((new + draw(st.integers(0, 200 - new)), new))
        budget -= new
        if budget < 7:
            break
    return draw(st.sampled_from(list(SHAPES.values()))), rows


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
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f32", "bf16"])
@pytest.mark.parametrize("batch", [decodes, mixed])
@pytest.mark.parametrize("fill", [math.nan, 1e30, -math.inf])
def test_unused_slots_change_no_bit(implementation, fill, batch, dtype):
    rows = batch(16)
    dirty, clean = (
        make_case(rows, SHAPES["smollm2"], dtype=dtype, fill=value, num_rows=len(rows) + 1) for value in (fill, 0.0)
    )
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


# --- which implementation


def test_the_default_works():
    case = make_case(mixed(16), SHAPES["smollm2"])
    assert_close(attend(None, case), attend_reference(case), case)


def test_an_unknown_implementation_is_refused():
    case = make_case([(3, 1)], SHAPES["tiny"])
    with pytest.raises(NotImplementedError, match=r"no paged attention named 'no_such': there is .*xla"):
        paged_attention(*case, scale=1.0, implementation="no_such")


# --- the reference against a loop


def attend_by_hand(case: Case) -> np.ndarray:
    """Token by token and head by head in f64, straight from the definition."""
    q, k_pool, v_pool = (np.asarray(x, np.float64) for x in case[:3])
    meta, (_, num_kv_heads, block_size, _) = case.meta, k_pool.shape
    group = q.shape[1] // num_kv_heads
    out = np.zeros_like(q)
    for row, context in enumerate(meta.context_lens):
        start, end = meta.query_start_loc[row : row + 2]
        for token in range(start, end):
            position = context - end + token
            slots = [(meta.block_tables[row, p // block_size], p % block_size) for p in range(position + 1)]
            for head in range(q.shape[1]):
                k = np.array([k_pool[block, head // group, offset] for block, offset in slots])
                v = np.array([v_pool[block, head // group, offset] for block, offset in slots])
                scores = k @ q[token, head] / math.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("name", ["smollm2", "blocks of one", "no groups, odd blocks"])
def test_the_reference_equals_a_loop(name):
    shape = SHAPES[name]
    rows = [(1, 1), (17, 1), (130, 1), (13, 13), (65, 9), (40, 0), (shape.block_size, 1)]
    case = make_case(rows, shape, num_tokens=30, num_rows=9)
    assert_close(attend_reference(case), attend_by_hand(case), case)
