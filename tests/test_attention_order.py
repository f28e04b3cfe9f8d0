"""Which keys are read together, and in which order sums are taken, changes nothing, or no bit (`xla_invariant`)."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, attend

from benchmarks.attention_shapes import Case, Shape, make_case
from pagedjax.pallas_kernels.attention import paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

SHAPES = {
    "blocks of 16": Shape(6, 2, 64, 16),
    "a window": Shape(6, 2, 64, 16, sliding_window=70),
    "bfloat16, a soft cap": Shape(4, 4, 96, 32, logits_soft_cap=20.0),
    "blocks of 256, wide heads": Shape(2, 1, 192, 256),
    "blocks of 512": Shape(2, 1, 80, 512),
}


def dtype_of(name: str) -> jax.typing.DTypeLike:
    return jnp.bfloat16 if name.startswith("bfloat16") else jnp.float32


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_has_the_same_bits_in_every_tile_chunk_and_batch(name):
    whole = make_case([(300, 300)], SHAPES[name], dtype=dtype_of(name))
    expected = attend("xla_invariant", whole)
    for start, end in [(0, 1), (0, 64), (37, 300), (130, 133), (250, 290), (299, 300)]:
        for num_others in (0, 5):
            case = chunk_of(whole, start, end, num_others)
            actual = attend("xla_invariant", case)[num_others:]
            assert np.array_equal(actual, expected[start:end])


def chunk_of(whole: Case, start: int, end: int, num_others: int) -> Case:
    """The step that computes tokens `start` to `end` of a request, behind so many other requests that decode."""
    others = range(20, 20 + num_others)
    lens = np.array([*others, end], np.int32)
    query_lens = [1] * num_others + [end - start]
    meta = AttentionMetadata(
        slot_mapping=np.zeros(sum(query_lens), np.int32),
        block_tables=np.repeat(whole.meta.block_tables, len(lens), axis=0),
        context_lens=lens,
        query_start_loc=np.array([0, *itertools.accumulate(query_lens)], np.int32),
        max_query_len=max(query_lens),
    )
    q = np.concatenate([whole.q[:num_others], whole.q[start:end]])
    return whole._replace(q=jnp.asarray(q), meta=meta)


def share(case: Case, shared_lens: list[int], num_samples: int) -> Case:
    """Rows one behind the other read the blocks of the first of them for so many tokens; their own are NaN."""
    tables = np.array(case.meta.block_tables)
    k_pool, v_pool = (np.array(x) for x in (case.k_pool, case.v_pool))
    for run, shared in enumerate(shared_lens):
        rows = range(run * num_samples, (run + 1) * num_samples)
        num_blocks = shared // k_pool.shape[2]
        for row in rows[1:]:
            k_pool[tables[row, :num_blocks]] = v_pool[tables[row, :num_blocks]] = math.nan
            tables[row, :num_blocks] = tables[rows[0], :num_blocks]
    meta = dataclasses.replace(case.meta, block_tables=tables, shared_lens=np.array(shared_lens, np.int32))
    return case._replace(k_pool=jnp.asarray(k_pool), v_pool=jnp.asarray(v_pool), meta=meta)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("implementation", ["xla", "xla_invariant"])
def test_blocks_that_rows_share_may_be_read_once(name, implementation):
    """Runs that share nothing, less than a chunk of keys, some chunks, and all but the last token."""
    block_size = SHAPES[name].block_size
    whole = 2 * block_size if block_size > 200 else 320
    shared = [0, block_size, whole, whole]
    contexts = [5, 40, 1, block_size + 7, block_size + 1, 3 * block_size, *range(whole + 1, whole + 7)]
    case = share(
        make_case([(context, 1) for context in contexts], SHAPES[name], dtype=dtype_of(name)), shared, num_samples=3
    )
    run = jax.jit(paged_attention, static_argnames=(*case.options, "implementation"))
    together = np.asarray(run(*case.arrays, **case.options, implementation=implementation), np.float32)
    apart = attend(implementation, case)
    assert_close(together, apart, case)
    if implementation == "xla_invariant":
        assert np.array_equal(together, apart)
