"""KV blocks in the host's memory, where preempted requests leave theirs: copied out of the pool and back, by tiles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pagedjax.kv_cache import KVCache
from pagedjax.pallas_kernels.pool_ops import gather_blocks, scatter_blocks

TILE = 8
"""Blocks per program: one program for all numbers of them, and little padding."""

HostBlock = Float[Array, "L K bs D"]
"""Keys of all layers of one block, and then its values."""


class HostPool:
    """Blocks by their numbers, each an array of its own: the host's memory holds what is swapped out, and no more.

    On a GPU they are in pinned memory, and the copies run beside the steps: a copy out is queued behind the step before
    and reads blocks that no later step writes before it is done; a copy in is waited for by the step that it is for.
    """

    def __init__(self, whole_step: bool = False) -> None:
        """`whole_step`: one program for all layers, as GPUs like it, instead of one that they share."""
        self._blocks: dict[int, HostBlock] = {}
        self._scatter: Any = jax.jit(scatter_tile, donate_argnums=0) if whole_step else scatter_tile

    def copy_out(self, kv_cache: KVCache, moves: Mapping[int, int]) -> None:
        """Copies blocks to the host: {host block: block}."""
        for hosts, blocks in _tiles(moves):
            gathered = list(_gather(kv_cache, _padded(blocks))[: len(blocks)])
            pinned = gathered[0].sharding.with_memory_kind("pinned_host")
            self._blocks.update(zip(hosts, jax.device_put(gathered, pinned), strict=True))

    def copy_in(self, kv_cache: KVCache, moves: Mapping[int, int]) -> KVCache:
        """The pool with blocks that were copied out, which the host forgets: {block: host block}. DONATES the pool."""
        sharding = kv_cache.k[0].sharding
        for blocks, hosts in _tiles(moves):
            values = jax.device_put([self._blocks.pop(host) for host in hosts], sharding)
            values += [values[0]] * (TILE - len(values))
            kv_cache = self._scatter(kv_cache, _stack(values), _padded(blocks))
        return kv_cache

    def warm_up(self, kv_cache: KVCache) -> KVCache:
        """Compiles both programs. DONATES the pool."""
        self.copy_out(kv_cache, {0: 0})
        return self.copy_in(kv_cache, {0: 0})

    def clear(self) -> None:
        """Forgets all blocks."""
        self._blocks.clear()

    def retain(self, num_used: int, is_used: Callable[[int], Any]) -> None:
        """Forgets the blocks that are of no use any more; all but `num_used` are."""
        if len(self._blocks) > num_used:
            self._blocks = {host: block for host, block in self._blocks.items() if is_used(host)}

    @property
    def num_bytes(self) -> int:
        """The host's memory that is in use."""
        return sum(block.nbytes for block in self._blocks.values())


def _tiles(moves: Mapping[int, int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    targets, sources = list(moves), list(moves.values())
    for start in range(0, len(moves), TILE):
        yield targets[start : start + TILE], sources[start : start + TILE]


def _padded(blocks: Sequence[int]) -> Int32[np.ndarray, "n"]:
    return np.array([*blocks, *[0] * (TILE - len(blocks))], np.int32)


@jax.jit
def _gather(kv_cache: KVCache, blocks: Int32[Array | np.ndarray, "n"]) -> list[HostBlock]:
    gathered = jnp.stack([gather_blocks(pool, blocks) for pool in (*kv_cache.k, *kv_cache.v)], axis=1)
    return list(gathered)


@jax.jit
def _stack(values: list[HostBlock]) -> Float[Array, "n L K bs D"]:
    return jnp.stack(values)


@partial(jax.jit, donate_argnums=(0, 1))
def _scatter_layer(
    k: Float[Array, "N K bs D"],
    v: Float[Array, "N K bs D"],
    tile: Float[Array, "n L K bs D"],
    layer: int | Int32[Array | np.ndarray, ""],
    blocks: Int32[Array | np.ndarray, "n"],
) -> tuple[Float[Array, "N K bs D"], Float[Array, "N K bs D"]]:
    new_k, new_v = (lax.dynamic_index_in_dim(tile, i, 1, keepdims=False) for i in (layer, layer + tile.shape[1] // 2))
    return scatter_blocks(k, blocks, new_k), scatter_blocks(v, blocks, new_v)


def scatter_tile(
    kv_cache: KVCache, tile: Float[Array, "n L K bs D"], blocks: Int32[Array | np.ndarray, "n"]
) -> KVCache:
    """The pool with a tile of blocks put back. DONATES the pool.

    As `paged_step`, it may be called inside a jit or as it is: then all layers share a program.
    """
    layers = enumerate(zip(kv_cache.k, kv_cache.v, strict=True))
    keys, values = zip(*(_scatter_layer(k, v, tile, np.int32(i), blocks) for i, (k, v) in layers), strict=True)
    return KVCache(keys, values)
