"""What moves KV into, within and out of one layer's pool: pure functions, in place when the pool is donated.

Plain JAX on every platform. On a GPU the scatters take the rotary embedding, the conversion and the split of the QKV
product into their kernels, where a Pallas kernel would have each of these written out first (docs/decisions.md).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32


def write_kv(
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int32[Array | np.ndarray, "T"],
) -> tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]:
    """Puts row t of `k` and `v` into slot `slot_mapping[t]` (= block * bs + offset) of their pools, all heads.

    Slots of the null block, which padding tokens have, are not written. All others must be distinct.
    """
    block_size = k_pool.shape[2]
    block, offset = _drop_null(slot_mapping // block_size, k_pool), slot_mapping % block_size

    expected = (len(slot_mapping), k_pool.shape[1], k_pool.shape[3])
    if not k.shape == v.shape == expected:  # a scatter would repeat one row or head for all
        raise ValueError(f"k and v must be {expected}, tokens x KV heads x head_dim, got {k.shape} and {v.shape}")

    # A block and an offset per token, and not a flat row per token and head: with one head XLA:CPU would copy the pool.
    def write(pool: Float[Array, "N K bs D"], new: Float[Array, "T K D"]) -> Float[Array, "N K bs D"]:
        return pool.at[block, :, offset].set(new.astype(pool.dtype), mode="drop", unique_indices=True)

    return write(k_pool, k), write(v_pool, v)


def copy_blocks(
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    src: Int32[Array | np.ndarray, "n"],
    dst: Int32[Array | np.ndarray, "n"],
) -> tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]:
    """Copies block src[i] to dst[i] in both pools (copy-on-write). All copies see the pools as they were before.

    Pairs with destination 0 are padding and copy nothing. All other destinations must be distinct.
    """
    blocks = gather_blocks(k_pool, src), gather_blocks(v_pool, src)
    # A scatter that itself reads the pool cannot run in place: the barrier keeps XLA from fusing the gather into it.
    k_blocks, v_blocks = lax.optimization_barrier(blocks)
    return scatter_blocks(k_pool, dst, k_blocks), scatter_blocks(v_pool, dst, v_blocks)


def gather_blocks(pool: Float[Array, "N K bs D"], blocks: Int32[Array | np.ndarray, "n"]) -> Float[Array, "n K bs D"]:
    """The named blocks, in that order; padding (index 0) gives the null block."""
    return pool.at[jnp.maximum(blocks, 0)].get(mode="clip")


def scatter_blocks(
    pool: Float[Array, "N K bs D"], blocks: Int32[Array | np.ndarray, "n"], values: Float[Array, "n K bs D"]
) -> Float[Array, "N K bs D"]:
    """Puts values[i] into block blocks[i]. Padding (index 0) is not written; all other blocks must be distinct."""
    if values.shape != (len(blocks), *pool.shape[1:]):  # one block would be repeated for all
        raise ValueError(f"values must be {(len(blocks), *pool.shape[1:])}, got {values.shape}")
    # Whole blocks, not flat rows, for XLA:CPU: see write_kv.
    return pool.at[_drop_null(blocks, pool)].set(values.astype(pool.dtype), mode="drop", unique_indices=True)


def _drop_null(blocks: Int32[Array | np.ndarray, "n"], pool: Float[Array, "N K bs D"]) -> Int32[Array, "n"]:
    """The same blocks, but in place of the null block (and of anything negative) ones beyond the pool, each its own.

    So no index occurs twice, and XLA may be told. Otherwise XLA:GPU stores each element of 2 bytes by a loop around an
    atomic compare-and-swap of its word, in which neighbours and all padding rows compete.
    """
    return jnp.where(blocks > 0, blocks, len(pool) + jnp.arange(len(blocks), dtype=jnp.int32))
