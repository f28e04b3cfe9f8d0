"""The KV pool on the device: per layer, keys and values in fixed-size blocks."""

from dataclasses import dataclass
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pagedjax.pallas_kernels.pool_ops import copy_blocks

MAX_INT32 = 2**31 - 1


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values: of each layer of a group, N blocks of K heads of bs slots.

    A block belongs to one group of layers (see `models.layer_groups`), mostly the only one, and lies in all arrays, one
    for each of its layers. They are separate, as each is donated and updated in place by itself. The slots of one head
    of a block lie together: that is what attention reads at a time.
    """

    k: tuple[Float[Array, "N K bs D"], ...]
    v: tuple[Float[Array, "N K bs D"], ...]


def init_kv_cache(
    *, num_pools: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """A zeroed pool of `num_blocks` usable blocks, for groups of `num_pools` layers, and in front of them the null
    block, block 0.

    Raises ValueError for one whose slots, or heads of blocks, int32 cannot count. Elements may be any number: they are
    addressed with 64 bits where it takes them.
    """
    shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
    for name, size in (("slots", block_size), ("KV heads", num_kv_heads)):
        if shape[0] * size > MAX_INT32:
            raise ValueError(
                f"num_blocks={num_blocks}: {shape[0]} blocks, with the null block, x {size} {name} are more "
                f"than the {MAX_INT32} that int32 indices reach; use larger blocks, or fewer"
            )
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(num_pools)) for _ in range(2))
    return KVCache(k, v)


def copy_cache_blocks(
    tile: int,
    kv_cache: KVCache,
    source: Int32[Array | np.ndarray, "n"],
    target: Int32[Array | np.ndarray, "n"],
    num_tiles: int | Int32[Array | np.ndarray, ""],
) -> KVCache:
    """The pool with block source[i] copied to target[i] in all layers, for the first `num_tiles` tiles of pairs.

    Tile by tile, so that a few copies do not take the time of the most there can be. n is a multiple of `tile`; pairs
    with target 0 are padding. No target may be the source of an earlier pair's tile. DONATES the pool. As `paged_step`,
    it may be called inside a jit or as it is.
    """
    layers = zip(kv_cache.k, kv_cache.v, strict=True)
    keys, values = zip(*(_copy_layer_blocks(tile, k, v, source, target, num_tiles) for k, v in layers), strict=True)
    return KVCache(keys, values)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _copy_layer_blocks(
    tile: int,
    k: Float[Array, "N K bs D"],
    v: Float[Array, "N K bs D"],
    source: Int32[Array | np.ndarray, "n"],
    target: Int32[Array | np.ndarray, "n"],
    num_tiles: int | Int32[Array | np.ndarray, ""],
) -> tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]:
    def copy_tile(
        index: Int32[Array, ""], pools: tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]
    ) -> tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]:
        pairs = (lax.dynamic_slice_in_dim(x, index * tile, tile) for x in (source, target))
        return copy_blocks(*pools, *pairs)

    return lax.fori_loop(0, num_tiles, copy_tile, (k, v))


def bytes_per_block(
    *, num_pools: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> int:
    """Bytes of one block, keys and values of all layers of a group together."""
    return 2 * num_pools * block_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
