"""Data movement of the KV pool: the slot rule, padding, and that a donated pool is updated where it lies."""

from collections.abc import Callable
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pallas_kernels.pool_ops import copy_blocks, gather_blocks, scatter_blocks, write_kv

BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def rows(num_tokens: int, first: float = 1.0) -> jax.Array:
    """Token t is `first + t` throughout."""
    values = first + jnp.arange(num_tokens, dtype=jnp.float32)
    return jnp.broadcast_to(values[:, None, None], (num_tokens, NUM_KV_HEADS, HEAD_DIM))


def empty(num_blocks: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    return jnp.zeros((num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), dtype)


def random(*shape: int) -> np.ndarray:
    """Different whenever the shape is."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def slots(pool: jax.Array) -> np.ndarray:
    """The pool as [slot, head, dimension], slot = block * block_size + offset."""
    return np.asarray(pool).swapaxes(1, 2).reshape(-1, pool.shape[1], pool.shape[3])


def test_golden_slots():
    # A request with block table [3, 1] writes positions 3 to 5, another one with [2] position 0; two padding tokens.
    slot_mapping = np.array([3 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 2 * 4 + 0, 0, 0], np.int32)
    expected = np.array([[0, 0, 0, 0], [2, 3, 0, 0], [4, 0, 0, 0], [0, 0, 0, 1]])
    pools = jax.jit(write_kv)(empty(4), empty(4), rows(6), rows(6, first=11), slot_mapping)
    for pool, raised in zip(pools, (0, 10), strict=True):
        written = slots(pool)
        np.testing.assert_array_equal(written[:, 0, 0].reshape(4, BLOCK_SIZE), expected + raised * (expected > 0))
        np.testing.assert_array_equal(written, np.broadcast_to(written[:, :1, :1], written.shape))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("index", [0, -1, -BLOCK_SIZE, 3 * BLOCK_SIZE, 2**31 - 1])
def test_padding_and_whatever_is_outside_the_pool_touch_nothing(num_tokens, index):
    before = jnp.full_like(empty(3), 7.0)
    nan, index = jnp.full_like(rows(num_tokens), jnp.nan), np.full(num_tokens, index, np.int32)
    after = (
        *jax.jit(write_kv)(before, before, nan, nan, index),
        *jax.jit(copy_blocks)(before.at[1].set(jnp.nan), before, np.ones(num_tokens, np.int32), index),
        jax.jit(scatter_blocks)(before, index, jnp.full((num_tokens, *before.shape[1:]), jnp.nan)),
    )
    for pool in after:
        np.testing.assert_array_equal(pool[jnp.array([0, 2])], before[:2])


@pytest.mark.parametrize("slot", [4, 11])
def test_one_token(slot):
    written, _ = jax.jit(write_kv)(empty(3), empty(3), rows(1), rows(1), np.array([slot], np.int32))
    expected = np.zeros((3 * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    expected[slot] = 1
    np.testing.assert_array_equal(slots(written), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_converted_to_the_pools_dtype(dtype):
    new, two = rows(2, first=1 / 3), np.array([1, 2], np.int32)
    k_pool, v_pool = write_kv(empty(2, dtype), empty(2, dtype), new, 2 * new, np.array([4, 5], np.int32))
    np.testing.assert_array_equal(slots(k_pool)[4:6], new.astype(dtype))
    np.testing.assert_array_equal(slots(v_pool)[4:6], (2 * new).astype(dtype))
    blocks = jnp.full((2, *empty(1).shape[1:]), 1 / 3)
    pool = scatter_blocks(empty(3, dtype), two, blocks)
    np.testing.assert_array_equal(gather_blocks(pool, two), blocks.astype(dtype))
    assert k_pool.dtype == v_pool.dtype == pool.dtype == gather_blocks(pool, two).dtype == dtype


@jax.jit
def every_op(k_pool, v_pool, k, v, slot_mapping, src, dst, values):
    moved = write_kv(k_pool, v_pool, k, v, slot_mapping), copy_blocks(k_pool, v_pool, src, dst)
    return *moved, gather_blocks(k_pool, src), scatter_blocks(k_pool, dst, values)


BLOCK_SIZES, HEAD_DIMS = (1, 12, 16, 128), (64, 80, 96, 128, 256)
EVERY_TWO_SIZES = [  # of head_dim, block size and number of KV heads: every two, not every three
    (head_dim, block_size, (1, 3, 8)[(i + j) % 3])
    for i, head_dim in enumerate(HEAD_DIMS)
    for j, block_size in enumerate(BLOCK_SIZES)
]


@pytest.mark.parametrize(("head_dim", "block_size", "num_kv_heads"), EVERY_TWO_SIZES)
def test_equals_a_loop(head_dim, block_size, num_kv_heads):
    """NaN wherever nothing was put yet, the null block included: what is not moved stays NaN."""
    num_blocks, num_tokens = 9, 5
    pools = list(random(2, num_blocks, num_kv_heads, block_size, head_dim))
    for pool in pools:
        pool[[0, 5, 6, 7, 8]] = np.nan
    k, v = random(2, num_tokens, num_kv_heads, head_dim)
    last = num_blocks * block_size - 1
    slot_mapping = np.array([last, block_size, 0, 5 * block_size + block_size // 2, 0], np.int32)
    src, dst = np.array([1, 4, 1, 2, 0], np.int32), np.array([5, 8, 7, 3, 0], np.int32)
    values = random(len(dst), num_kv_heads, block_size, head_dim)

    written, copied, scattered = ([pool.copy() for pool in pools] for _ in range(3))
    for which, new in enumerate((k, v)):
        for token, slot in enumerate(slot_mapping):
            if slot:
                written[which][slot // block_size, :, slot % block_size] = new[token]
        for pair in range(len(dst)):
            if dst[pair]:
                copied[which][dst[pair]] = pools[which][src[pair]]
                scattered[which][dst[pair]] = values[pair]
    expected = tuple(written), tuple(copied), pools[0][src], scattered[0]
    jax.tree.map(np.testing.assert_array_equal, every_op(*pools, k, v, slot_mapping, src, dst, values), expected)


@hypothesis.given(st.lists(st.integers(BLOCK_SIZE, 8 * BLOCK_SIZE - 1), min_size=1, max_size=20, unique=True))
def test_any_slots_equal_a_loop(chosen):
    num_tokens = 20
    slot_mapping = np.array(chosen + [0] * (num_tokens - len(chosen)), np.int32)
    before, new = random(*empty(8).shape), random(num_tokens, NUM_KV_HEADS, HEAD_DIM)
    expected = slots(jnp.asarray(before)).copy()
    for token, slot in enumerate(chosen):
        expected[slot] = new[token]
    for pool in jax.jit(write_kv)(before, before, new, new, slot_mapping):
        np.testing.assert_array_equal(slots(pool), expected)


@hypothesis.given(st.permutations(range(1, 8)), st.integers(0, 3), st.data())
def test_any_blocks_equal_a_loop(order, num_pairs, data):
    dst, sources = order[:num_pairs], order[num_pairs:]
    src = data.draw(st.lists(st.sampled_from(sources), min_size=num_pairs, max_size=num_pairs))
    before = random(*empty(8).shape)
    expected = before.copy()
    for source, destination in zip(src, dst, strict=True):
        expected[destination] = before[source]
    src, dst = (np.array(blocks + [0] * (4 - num_pairs), np.int32) for blocks in (src, dst))
    for pool in jax.jit(copy_blocks)(before, before, src, dst):
        np.testing.assert_array_equal(pool, expected)
    scattered = jax.jit(scatter_blocks)(before, dst, gather_blocks(jnp.asarray(before), src))
    np.testing.assert_array_equal(scattered, expected)


def test_a_chain_of_copies_sees_the_pool_as_it_was():
    before = jnp.broadcast_to(jnp.arange(4.0)[:, None, None, None], empty(4).shape)
    pools = jax.jit(copy_blocks)(before, before, np.array([1, 2], np.int32), np.array([2, 3], np.int32))
    for pool in pools:
        np.testing.assert_array_equal(pool, before[jnp.array([0, 1, 1, 2])])


def struct(*shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def writers(count: int, num_kv_heads: int, dtype: str) -> dict[str, tuple[Callable, int, tuple]]:
    """Per op that writes: itself, how many pools it takes and returns, and its arguments, which move `count` things."""
    array = partial(struct, dtype=dtype)
    pool, new, index = array(4096, num_kv_heads, 16, 64), array(count, num_kv_heads, 64), struct(count)
    blocks = array(count, num_kv_heads, 16, 64)
    return {
        "write_kv": (write_kv, 2, (pool, pool, new, new, index)),
        "copy_blocks": (copy_blocks, 2, (pool, pool, index, index)),
        "scatter_blocks": (scatter_blocks, 1, (pool, index, blocks)),
    }


@pytest.mark.parametrize("op", ["write_kv", "copy_blocks", "scatter_blocks"])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 300])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_pool_is_updated_in_place(op, count, num_kv_heads, dtype):
    """Aliasing alone proves nothing: XLA may copy the pool aside and back, which takes a pool of extra memory."""
    if dtype == "bfloat16" and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
        pytest.skip("XLA:CPU of jax 0.10 widens a bf16 pool to scatter into it: the pool on a CPU is f32 there")
    function, num_pools, args = writers(count, num_kv_heads, dtype)[op]
    memory = jax.jit(function, donate_argnums=range(num_pools)).lower(*args).compile().memory_analysis()
    assert memory is not None
    pool_bytes = args[0].size * args[0].dtype.itemsize
    assert memory.alias_size_in_bytes == num_pools * pool_bytes
    moved_bytes = num_pools * count * pool_bytes // (4096 * 16 if op == "write_kv" else 4096)
    assert memory.temp_size_in_bytes <= 2 * moved_bytes + 4096 < num_pools * pool_bytes // 4


@pytest.mark.parametrize("op", ["write_kv", "copy_blocks", "scatter_blocks"])
def test_no_atomics_on_a_gpu(op):
    """XLA:GPU stores without compare-and-swap loops only if it is promised that no index occurs twice."""
    function, num_pools, args = writers(16, 8, "bfloat16")[op]
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count('"stablehlo.scatter"') == lowered.count("unique_indices = true") == num_pools


def test_swapping_out_and_in_again_restores_the_blocks():
    before = jnp.asarray(random(*empty(8).shape))
    out, back = np.array([[3, 1, 0], [2, 6, 0]], np.int32)
    host = np.asarray(jax.jit(gather_blocks)(before, out))
    pool = jax.jit(scatter_blocks, donate_argnums=0)(jnp.full_like(before, jnp.nan), back, jnp.asarray(host))
    np.testing.assert_array_equal(pool[jnp.array([2, 6])], before[jnp.array([3, 1])])
    assert jnp.isnan(pool[jnp.array([0, 1, 3, 4, 5, 7])]).all()
