"""A device step: padding never matters, the pool is updated in place, nothing compiles late, no lost pool is final."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
    BUDGET,
    CONFIG,
    LOGIT_TOLERANCE,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    assert_clean,
    assert_greedy,
    dense_logits,
    fill_pool,
    greedy,
    naive_greedy,
    pool_of,
    prompt_of,
    run_all,
    step_with_logits,
    tiny_config,
    tiny_engine,
    tiny_llm,
    tiny_params,
)

from pagedjax import kv_cache, model_runner
from pagedjax.batch import build_batch
from pagedjax.beams.params import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.kv_cache import KVCache, bytes_per_block, init_kv_cache
from pagedjax.model_runner import ModelRunner, padding_batch
from pagedjax.models import decoder
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS
from pagedjax.sampling import rows
from pagedjax.sampling.params import SamplingParams

MARKER = 12345.0


# B69: nothing outside a request's own blocks is written.


@pytest.mark.parametrize("length", [1, 3, 5, 13, 30])
def test_b69_blocks_that_nobody_owns_keep_their_contents(length, monkeypatch):
    engine = tiny_engine(8, pool_blocks=64)
    fill_pool(engine, MARKER)
    engine.add_request(prompt_of(length), greedy(3))
    (request,) = engine.scheduler.requests(engine.scheduler.waiting)
    run, owned = engine.runner.run, {0}

    def run_and_note(batch):
        owned.update(request.block_table.blocks)
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", run_and_note)
    run_all(engine)
    assert len(owned) == 1 + -(-(length + 2) // 4)
    assert max(owned) <= 8
    for pool in pool_of(engine):
        is_marked = (pool == MARKER).all(axis=(1, 2))
        assert not is_marked[sorted(owned - {0})].any()
        assert np.delete(is_marked, sorted(owned)).all(), "a block that nobody owns was written"


def test_b69_slots_behind_a_context_are_not_written():
    engine = tiny_engine()
    fill_pool(engine, MARKER)
    engine.add_request(prompt_of(6), greedy(9))
    engine.step()
    (request,) = engine.scheduler.requests(engine.scheduler.running)
    first, second = request.block_table.blocks
    for pool in pool_of(engine):
        is_marked = (pool == MARKER).all(axis=2)
        assert not is_marked[first].any()
        assert is_marked[second].tolist() == [False, False, True, True]


def test_b69_no_index_is_ever_negative_or_outside(monkeypatch):
    engine = tiny_engine(12)
    batches = []
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: (batches.append(batch), run(batch))[1])
    for i, length in enumerate((1, 30, 7, 16, 3)):
        engine.add_request(prompt_of(length, i), greedy(12))
    run_all(engine)
    assert {batch.attn.max_query_len == 1 for batch in batches} == {True, False}
    for batch in batches:
        num_tokens, num_rows = len(batch.token_ids), len(batch.attn.context_lens)
        for values, limit in (
            (batch.token_ids, VOCAB_SIZE),
            (batch.positions, MAX_MODEL_LEN),
            (batch.attn.slot_mapping, 13 * 4),
            (batch.attn.block_tables, 13),
            (batch.attn.context_lens, MAX_MODEL_LEN + 1),
            (batch.attn.query_start_loc, num_tokens + 1),
            (batch.logits_indices, num_tokens),
            (batch.num_samples, num_rows + 1),
        ):
            assert values.dtype == np.int32
            assert ((values >= 0) & (values < limit)).all()


@pytest.mark.parametrize("spoil", ["block", "negative block", "missing block", "token"])
def test_b69_integrity_checks_refuse_what_would_leave_the_pool(spoil):
    engine = tiny_engine()
    engine.add_request(prompt_of(6), greedy(9))
    scheduled = engine.scheduler.schedule()
    (request,) = scheduled.sampling
    match spoil:
        case "block":
            request.block_table.rows[0][0] = engine.config.num_blocks + 1
        case "negative block":
            request.block_table.rows[0][1] = -1
        case "missing block":
            request.block_table.rows[0].pop()
        case "token":
            request.token_ids[2] = -1
    with pytest.raises(AssertionError):
        build_batch(scheduled, engine.config)


# B70: what is in the pool before does not matter, nor do padding rows.


def logits_of_run(prompts: list[list[int]], fill: float, max_tokens: int = 6, **options: Any) -> dict[str, np.ndarray]:
    """The logits of all tokens of all requests, in order."""
    engine = tiny_engine(**options)
    fill_pool(engine, fill)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(max_tokens), str(i))
    seen: dict[str, list[np.ndarray]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_unfinished():
        for name, logits in step_with_logits(engine).items():
            seen[name].append(logits)
    assert_clean(engine)
    return {name: np.stack(rows) for name, rows in seen.items()}


@pytest.mark.parametrize("num_requests", [1, 3, 5, 7, 8])
def test_b70_outputs_are_bit_equal_whatever_was_in_the_pool(num_requests):
    prompts = [prompt_of(3 + 4 * i, i) for i in range(num_requests)]
    zeros = logits_of_run(prompts, 0.0)
    for fill in (np.nan, 1e30, -1e30, np.inf):
        filled = logits_of_run(prompts, fill)
        for name, logits in zeros.items():
            assert np.array_equal(logits, filled[name])


def test_b70_freed_blocks_are_used_again():
    """A pool of 9 blocks serves 6 requests after one another, each in blocks full of other requests' KV."""
    prompts = [prompt_of(10, i) for i in range(6)]
    logits = logits_of_run(prompts, np.nan, num_blocks=9, max_tokens=10)
    for name, prompt in enumerate(prompts):
        expected = naive_greedy(prompt, 10)
        assert logits[str(name)].argmax(axis=-1).tolist() == expected


@pytest.mark.parametrize("max_query_len", [1, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 8])
def test_b70_real_rows_of_a_padded_bucket(num_rows, max_query_len):
    """Bucket 8 with fewer real rows: the hidden states of those are the same bits whatever else is in the pool."""
    results = []
    for fill in (0.0, np.nan, 1e30):
        engine = tiny_engine()
        fill_pool(engine, fill)
        for i in range(num_rows):
            engine.add_request(prompt_of(2 + i, i), greedy(9))
        engine.step()
        while len(engine.scheduler.running) < num_rows or any(
            request.num_left > 1 for request in engine.scheduler.requests(engine.scheduler.running)
        ):
            engine.step()
        batch = in_bucket(build_batch(engine.scheduler.schedule(), engine.config), 8, max_query_len)
        hidden, _ = decoder.paged_step(CONFIG, tiny_params(), batch, engine.runner.kv_cache)
        results.append(np.asarray(hidden))
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        assert np.array_equal(results[0][:num_rows], other[:num_rows])
        assert np.isfinite(other[num_rows:]).all(), "NaN in padding rows"


def in_bucket(batch: Any, size: int, max_query_len: int) -> Any:
    """A batch of decodes, padded on to a larger bucket."""

    def grown(values: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
        widths = [(0, length - len(values))] + [(0, 0)] * (values.ndim - 1)
        return np.pad(values, widths, constant_values=fill)

    attn = batch.attn
    attn = dataclasses.replace(
        attn,
        slot_mapping=grown(attn.slot_mapping, size),
        block_tables=grown(attn.block_tables, size),
        context_lens=grown(attn.context_lens, size),
        query_start_loc=grown(attn.query_start_loc, size + 1, fill=int(attn.query_start_loc[-1])),
        max_query_len=max_query_len,
    )
    return dataclasses.replace(
        batch,
        token_ids=grown(batch.token_ids, size),
        positions=grown(batch.positions, size),
        groups=(attn,),
        logits_indices=grown(batch.logits_indices, size),
        sampling=jax.tree.map(lambda x: grown(x, size), batch.sampling),
    )


# B71: rows that attend to nothing.


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_b71_batches_of_padding_alone_are_finite(fill):
    engine = tiny_engine()
    fill_pool(engine, fill)
    for batch in engine.runner.padding_batches():
        hidden, engine.runner.kv_cache = decoder.paged_step(CONFIG, tiny_params(), batch, engine.runner.kv_cache)
        assert np.isfinite(hidden).all()
        tokens = engine.runner.run(batch)
        assert tokens.dtype == np.int32
        assert not tokens.any()


def test_b71_no_nan_appears_anywhere():
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x: x / x)(jnp.zeros(3))
        engine = tiny_engine(12)
        params = SamplingParams(temperature=20.0, top_k=9, top_p=0.8, seed=1, max_tokens=8, ignore_eos=True)
        for i, length in enumerate((1, 30, 7, 16, 3)):
            engine.add_request(prompt_of(length, i), greedy(8) if i % 2 else params)
        assert len(run_all(engine)) == 5
        engine.runner.warm_up()


# B73: after warm-up nothing compiles.

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counting_compiles() -> Iterator[Callable[[], int]]:
    """Counts programs that are compiled, or read from the persistent cache."""
    events = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            events.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def programs_in_caches() -> int:
    programs: tuple[Any, ...] = (decoder._embed, decoder._paged_layer, rows.sample_rows)
    return sum(program._cache_size() for program in programs)


def test_b73_the_counter_counts():
    with counting_compiles() as num_compiles:
        f = jax.jit(lambda x: x * 3 + 1)
        f(np.float32(1))
        assert num_compiles() == 1
        f(np.float32(2))
        assert num_compiles() == 1
        f(np.zeros(5, np.float32))
        assert num_compiles() == 2
    f(np.zeros(6, np.float32))
    assert num_compiles() == 2


@pytest.mark.parametrize(("max_num_batched_tokens", "max_num_seqs"), [(317, 13), (24, 8), (7, 13), (1, 1), (40, 3)])
def test_b73_the_buckets_cover_the_limits(max_num_batched_tokens, max_num_seqs):
    config = tiny_config(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    assert config.decode_buckets[-1] == min(max_num_seqs, max_num_batched_tokens)
    assert config.mixed_buckets[-1] == max_num_batched_tokens
    runner = ModelRunner(MODEL, tiny_params(), config, kv_dtype=jnp.float32)
    shapes = {(len(batch.token_ids), batch.attn.max_query_len) for batch in runner.padding_batches()}
    for num_tokens in range(1, max_num_batched_tokens + 1):
        if num_tokens <= config.max_num_running:
            bucket = next(size for size in config.decode_buckets if size >= num_tokens)
            assert (bucket, 1) in shapes, f"{num_tokens} requests that decode"
        if num_tokens > 1:
            bucket = next(size for size in config.mixed_buckets if size >= num_tokens)
            assert (bucket, bucket) in shapes, f"{num_tokens} tokens"


def random_params(rng: np.random.Generator) -> SamplingParams | BeamSearchParams:
    if rng.random() < 0.1:
        return BeamSearchParams(beam_width=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 12)))
    extras: dict[str, Any] = {}
    if rng.random() < 0.3:
        extras = {
            "presence_penalty": float(rng.choice([0.0, 0.5])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "logit_bias": {int(rng.integers(VOCAB_SIZE)): 1.0} if rng.random() < 0.5 else None,
            "bad_words": [[int(rng.integers(VOCAB_SIZE))]] if rng.random() < 0.5 else (),
            "logprobs": [None, 0, 5, 20][rng.integers(4)],
            "prompt_logprobs": [None, 0, 5][rng.integers(3)],
        }
    return SamplingParams(
        **extras,
        n=int(rng.choice([1, 1, 1, 2, 5])),
        temperature=float(rng.choice([0.0, 1e-40, 0.7, 20.0])),
        top_k=int(rng.choice([0, 0, 1, 7, 500])),
        top_p=float(rng.choice([0.0, 0.5, 1.0, 1.0])),
        seed=int(rng.integers(0, 2**63)) if rng.random() < 0.5 else None,
        max_tokens=int(rng.integers(1, 24)),
        stop_token_ids=rng.integers(0, VOCAB_SIZE, int(rng.integers(0, 3))).tolist(),
        ignore_eos=bool(rng.random() < 0.5),
    )


def test_b73_nothing_compiles_after_warm_up():
    engine = tiny_engine(
        30,
        pool_blocks=60,
        block_size=8,
        max_model_len=128,
        max_num_batched_tokens=317,
        max_num_seqs=13,
        eos_token_ids=(5,),
    )
    rng = np.random.default_rng(0)
    engine.runner.warm_up(extras=True)
    assert engine.runner.num_programs == len(list(engine.runner.padding_batches()))
    before = programs_in_caches()
    batch_sizes, late = set(), []
    with counting_compiles() as num_compiles:
        for mix in range(200):
            for _ in range(int(rng.integers(1, 6) if mix % 10 else 20)):
                length = int(rng.choice([1, 3, 8, 30, 64, 100, 120])) + int(rng.integers(0, 4))
                engine.add_request(rng.integers(0, VOCAB_SIZE, length).tolist(), random_params(rng))
            for _ in range(int(rng.integers(1, 10))):
                compiled = num_compiles()
                engine.step()
                batch_sizes.add(len(engine.scheduler.requests(engine.scheduler.running)))
                if num_compiles() > compiled:
                    late.append(len(engine.scheduler.requests(engine.scheduler.running)))
            if rng.random() < 0.2 and engine.outputs.groups:
                engine.abort(str(rng.choice(list(engine.outputs.groups))))
        while engine.has_unfinished():
            compiled = num_compiles()
            engine.step()
            if num_compiles() > compiled:
                late.append(len(engine.scheduler.requests(engine.scheduler.running)))
        total = num_compiles()
    assert engine.stats().num_block_copies > 100
    assert total == 0, f"{total} compiles, in steps after which so many were running: {late}"
    assert programs_in_caches() == before
    assert batch_sizes >= set(range(1, 14))
    assert engine.stats().num_preemptions > 0
    assert_clean(engine)


# B74: failures inside a step.


def fail_in_layer_1(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's program raises: the first layer's pool has been donated to the one before."""
    layer, calls = decoder._paged_layer, []

    def planted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return layer(*args)

    monkeypatch.setattr(decoder, "_paged_layer", planted)


def fail_in_sampling(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_rows, calls = model_runner.sample_rows, []

    def planted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return sample_rows(*args)

    monkeypatch.setattr(model_runner, "sample_rows", planted)


def fail_around_the_step(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    run, calls = engine.runner.run, []

    def planted(batch: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return run(batch)
        if moment == "after":
            run(batch)
        if moment == "pool deleted":
            for pool in jax.tree.leaves(engine.runner.kv_cache):
                pool.delete()
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner, "run", planted)


FAILURES: dict[str, Callable[[LLMEngine, pytest.MonkeyPatch], None]] = {
    "before": partial(fail_around_the_step, moment="before"),
    "after": partial(fail_around_the_step, moment="after"),
    "pool deleted": partial(fail_around_the_step, moment="pool deleted"),
    "in layer 1": fail_in_layer_1,
    "in sampling": fail_in_sampling,
}


@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 5])
@pytest.mark.parametrize("failure", FAILURES)
def test_b74_a_failed_step_is_recomputed(failure, num_steps_before, monkeypatch):
    engine = tiny_engine(40)
    prompts = {str(i): prompt_of(length, i) for i, length in enumerate((5, 30, 9, 17))}
    seeded = SamplingParams(temperature=20.0, seed=3, max_tokens=9, ignore_eos=True)
    alone = tiny_engine()
    alone.add_request(prompts["2"], seeded)
    (reference,) = run_all(alone).values()

    for name, prompt in prompts.items():
        engine.add_request(prompt, seeded if name == "2" else greedy(9), name)
    for _ in range(num_steps_before):
        engine.step()
    running = engine.scheduler.requests(engine.scheduler.running)
    FAILURES[failure](engine, monkeypatch)
    old = jax.tree.leaves(engine.runner.kv_cache)
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    monkeypatch.undo()
    if failure in ("pool deleted", "in layer 1"):
        assert any(pool.is_deleted() for pool in old), "the test does not lose the pool"
    assert not any(pool.is_deleted() for pool in jax.tree.leaves(engine.runner.kv_cache))
    assert not engine.scheduler.running
    assert all(request.num_computed_tokens == 0 for request in running)
    engine.scheduler.check_integrity()
    fill_pool(engine, np.nan)  # nothing of the failed step is read again

    finished = run_all(engine)
    for name, prompt in prompts.items():
        expected = reference.outputs[0].token_ids if name == "2" else naive_greedy(prompt, 9)
        assert finished[name].outputs[0].token_ids == expected
    engine.add_request(prompts["0"], greedy(4))
    (output,) = run_all(engine).values()
    assert output.outputs[0].token_ids == naive_greedy(prompts["0"], 4)


def test_b74_a_pool_whose_step_failed_unwaited_for_is_made_anew(monkeypatch):
    """The arrays are there, and waiting for them raises the step's error, as on a GPU; a CPU raises it in the call."""
    engine = tiny_engine()
    runner, old = engine.runner, engine.runner.kv_cache
    runner.restore_kv_cache()
    assert runner.kv_cache is old

    def fails(_: Any) -> Any:
        raise RuntimeError("in the middle of a step")

    monkeypatch.setattr(jax, "block_until_ready", fails)
    runner.restore_kv_cache()
    assert runner.kv_cache is not old


def test_b74_keys_and_values_share_no_array():
    cache = init_kv_cache(num_pools=3, num_blocks=4, block_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.float32)
    pools = jax.tree.leaves(cache)
    assert len(pools) == 6
    assert len({pool.unsafe_buffer_pointer() for pool in pools}) == 6
    assert not any(np.asarray(pool).any() for pool in pools)
    assert sum(pool.nbytes for pool in pools) == 5 * bytes_per_block(
        num_pools=3, block_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.float32
    )


def test_b74_the_pool_is_donated():
    engine = tiny_engine()
    old = jax.tree.leaves(engine.runner.kv_cache)
    engine.add_request(prompt_of(5), greedy(2))
    engine.step()
    assert all(pool.is_deleted() for pool in old)


# B79: neighbours.


@pytest.mark.parametrize("position", [0, 2, 4])
def test_b79_the_content_of_neighbours_changes_no_bit(position):
    """The same lengths, so the same shapes and the same blocks; only the neighbours' tokens differ."""
    lengths = [5, 19, 9, 26, 12]
    runs = []
    for content in range(3):
        prompts = [prompt_of(length, 10 * content + i) for i, length in enumerate(lengths)]
        prompts[position] = prompt_of(lengths[position], 99)
        runs.append(logits_of_run(prompts, 0.0, max_tokens=12))
    mine, others = str(position), [str(i) for i in range(5) if i != position]
    for run in runs[1:]:
        assert np.array_equal(run[mine], runs[0][mine])
        assert not any(np.array_equal(run[name], runs[0][name]) for name in others), "the neighbours are the same"


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 14}], ids=str)
def test_b79_alone_and_in_a_batch_agree_within_rounding(options):
    prompts = [prompt_of(length, length) for length in (1, 5, 9, 16, 26)]
    logits = logits_of_run(prompts, np.nan, max_tokens=10, **options)
    largest = 0.0
    for name, prompt in enumerate(prompts):
        output = logits[str(name)].argmax(axis=-1).tolist()
        assert_greedy(prompt, output)
        dense = dense_logits([*prompt, *output])[len(prompt) - 1 : -1]
        largest = max(largest, float(np.abs(dense - logits[str(name)]).max()))
        best = np.sort(dense)
        is_clear = best[:, -1] - best[:, -2] > LOGIT_TOLERANCE
        assert is_clear.all(), "a near tie: choose another prompt"
        assert output == naive_greedy(prompt, 10)
    assert 0 < largest < LOGIT_TOLERANCE


# The pool in place, and the step as one program.

LARGE_NUM_BLOCKS = 2**16 - 1
LARGE_POOL_BYTES = 2**16 * 4 * 2 * 16 * 4
"""Of the keys, or of the values, of one layer: 32 MiB. Never allocated."""


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def large_cache() -> KVCache:
    return jax.eval_shape(
        partial(
            init_kv_cache,
            num_pools=2,
            num_blocks=LARGE_NUM_BLOCKS,
            block_size=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=jnp.float32,
        )
    )


def assert_in_place(compiled: Any, num_pools: int) -> None:
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_pools * LARGE_POOL_BYTES
    assert memory.temp_size_in_bytes < LARGE_POOL_BYTES / 8, f"{memory.temp_size_in_bytes:,} bytes: the pool is copied"


BATCH_SHAPES = [(1, 1), (2, 1), (2, 2), (8, 1), (8, 8), (BUDGET, BUDGET)]


@pytest.mark.parametrize(("num_tokens", "max_query_len"), BATCH_SHAPES)
def test_a_layer_updates_the_pool_in_place(num_tokens, max_query_len):
    batch = shapes_of(padding_batch(tiny_config(LARGE_NUM_BLOCKS), num_tokens, max_query_len))
    x, (rope,) = jax.eval_shape(partial(decoder._embed, CONFIG), tiny_params(), batch)
    kv = large_cache().k  # as keys and values
    layer, kind = shapes_of(tiny_params()["layers_0"]), CONFIG.layer_kinds[0]
    lowered = decoder._paged_layer.lower(CONFIG, kind, None, layer, x, rope, batch.attn, kv=kv)
    assert_in_place(lowered.compile(), 2)


@pytest.mark.parametrize("tile", [1, 8, 256])
def test_copies_of_blocks_are_in_place(tile):
    kv, pairs = large_cache().k, jax.ShapeDtypeStruct((256,), jnp.int32)
    assert_in_place(kv_cache._copy_layer_blocks.lower(tile, *kv, pairs, pairs, 3).compile(), 2)


@pytest.mark.parametrize(("num_tokens", "max_query_len"), [(1, 1), (8, 1), (8, 8)])
def test_the_whole_step_updates_the_pool_in_place(num_tokens, max_query_len):
    runner = tiny_engine(whole_step=True).runner
    batch = shapes_of(padding_batch(tiny_config(LARGE_NUM_BLOCKS), num_tokens, max_query_len))
    lowered = runner._forward.lower(CONFIG, shapes_of(tiny_params()), batch, large_cache())
    assert_in_place(lowered.compile(), 4)


def test_a_copy_of_the_pool_would_be_seen():
    def copies(pool, index):
        return pool.at[index].set(1.0), pool[::-1] + 1  # the second needs the old pool while the first is written

    pool, index = large_cache().k[0], jax.ShapeDtypeStruct((3,), jnp.int32)
    not_donating = jax.jit(lambda pool, index: pool.at[index].set(1.0))
    for copying in (jax.jit(copies, donate_argnums=0), not_donating):
        with pytest.raises(AssertionError):
            assert_in_place(copying.lower(pool, index).compile(), 1)


def test_the_whole_step_gives_the_same_tokens():
    runs = []
    for whole_step in (False, True, None):
        engine = tiny_engine(14, whole_step=whole_step)
        fill_pool(engine, np.nan)
        for i, length in enumerate((5, 19, 9)):
            engine.add_request(prompt_of(length, i), greedy(12), str(i))
        engine.add_request(prompt_of(4), SamplingParams(temperature=20.0, seed=1, ignore_eos=True), "seeded")
        finished = run_all(engine)
        runs.append({name: output.outputs[0].token_ids for name, output in finished.items()})
        assert engine.stats().num_preemptions > 0
    assert runs[0] == runs[1] == runs[2]
    assert [runs[0][str(i)] for i in range(3)] == [
        naive_greedy(prompt_of(length, i), 12) for i, length in enumerate((5, 19, 9))
    ]


def test_every_attention_gives_the_same_tokens():
    """Greedy and seeded, with preemption, over a pool of NaN; the Pallas kernels run in the interpreter."""
    runs = []
    for name in IMPLEMENTATIONS:
        engine = tiny_engine(14, whole_step=True, attention_implementation=name)
        fill_pool(engine, np.nan)
        for i, length in enumerate((5, 19, 9)):
            engine.add_request(prompt_of(length, i), greedy(12), str(i))
        engine.add_request(prompt_of(4), SamplingParams(temperature=20.0, seed=1, ignore_eos=True), "seeded")
        runs.append({name: output.outputs[0].token_ids for name, output in run_all(engine).items()})
        assert engine.stats().num_preemptions > 0
    assert all(run == runs[0] for run in runs)


def test_an_unknown_attention_is_refused_before_anything_compiles():
    with pytest.raises(ValueError, match=r"attention_implementation='flash': there is none of this name, but xla"):
        tiny_llm(attention_implementation="flash")


@pytest.mark.parametrize(("block_size", "num_kv_heads", "what"), [(16, 1, "slots"), (1, 16, "KV heads")])
def test_a_pool_beyond_int32_is_refused_before_it_is_made(block_size, num_kv_heads, what):
    sizes = {"num_pools": 1, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": 1}
    with pytest.raises(ValueError, match=rf"num_blocks={2**27}: .* x 16 {what} are more than the 2147483647"):
        init_kv_cache(num_blocks=2**27, dtype=jnp.float32, **sizes)


def test_the_whole_step_survives_a_lost_pool():
    engine = tiny_engine(whole_step=True)
    engine.add_request(prompt_of(9), greedy(8), "x")
    engine.step()
    for pool in jax.tree.leaves(engine.runner.kv_cache):
        pool.delete()
    with pytest.raises(RuntimeError, match="delete"):
        engine.step()
    assert run_all(engine)["x"].outputs[0].token_ids == naive_greedy(prompt_of(9), 8)


def test_run_with_logits_samples_the_same_tokens():
    engines = [tiny_engine() for _ in range(2)]
    for engine in engines:
        for i, length in enumerate((5, 14, 9)):
            params = SamplingParams(temperature=20.0, seed=i, max_tokens=6, ignore_eos=True)
            engine.add_request(prompt_of(length, i), params if i else greedy(6), str(i))
    for _ in range(3):
        batches = [build_batch(engine.scheduler.schedule(), engine.config) for engine in engines]
        tokens = engines[0].runner.run(batches[0])
        same, logits = engines[1].runner.run_with_logits(batches[1])
        num_samples = int(batches[0].num_samples)
        assert tokens[:num_samples].tolist() == same[:num_samples].tolist()
        assert logits.shape == (8, VOCAB_SIZE)
        assert tokens[0] == logits[0].argmax() or num_samples == 0
        for engine in engines:
            engine.scheduler.preempt_all()
