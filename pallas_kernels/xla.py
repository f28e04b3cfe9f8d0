"""Paged attention in plain JAX: online softmax over chunks of keys with dynamic trip counts. The CPU's fast path.

Queries are cut into tiles that belong to one request each. A loop takes a few tiles at a time; inside it, another
loop walks over their contexts chunk by chunk (online softmax, arXiv 2205.14135, algorithm 1). So the work grows with
the tokens that are there, never with the widest table, and what is gathered stays in the cache.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pagedjax.pallas_kernels.metadata import AttentionMetadata

MASKED = -1e30
"""A score that no real one reaches: finite, so that masked minus masked is 0 and not NaN."""


class Tiling(NamedTuple):
    """How much one turn of the loops takes; the values measured best on two AVX-512 cores (docs/decisions.md)."""

    num_tiles: int
    """Tiles per turn of the outer loop."""
    num_queries: int
    """Tokens of one request per tile."""
    num_keys: int
    """Keys of 4 bytes per number in a turn of the inner loop, more if they are narrower, in whole blocks."""

    def blocks_per_chunk(self, pool: Float[Array, "N K bs D"]) -> int:
        """Blocks per turn of the inner loop: what stays in the cache counts, so bytes."""
        return max(1, self.num_keys * 4 // pool.dtype.itemsize // pool.shape[2])


DECODE = Tiling(num_tiles=4, num_queries=1, num_keys=64)
CHUNK = Tiling(num_tiles=1, num_queries=32, num_keys=64)


class _Options(NamedTuple):
    """What is done to the scores: see `pagedjax.pallas_kernels.attention.paged_attention`. Static."""

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


class _Tiles(NamedTuple):
    """Tiles of Q tokens, G of them; tokens beyond their request's end have index T and position -1."""

    row: Int32[Array, "G"]
    token: Int32[Array, "G Q"]
    position: Int32[Array, "G Q"]


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`."""
    args = (q, k_pool, v_pool, meta, _Options(scale, sliding_window, logits_soft_cap))
    out = _attend_rows(jnp.zeros_like(q), *args, lambda query_lens: query_lens == 1, DECODE)
    if meta.max_query_len > 1:
        out = _attend_rows(out, *args, lambda query_lens: query_lens > 1, CHUNK)
    return out


def _attend_rows(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    options: _Options,
    selects: Callable[[Array], Array],
    tiling: Tiling,
) -> Float[Array, "T H D"]:
    """Fills the rows of `out` that belong to the requests that `selects` chooses by their number of new tokens."""
    group = min(tiling.num_tiles, len(meta.context_lens))
    num_tiles, tiles = _cut_into_tiles(meta, len(q), selects, tiling.num_queries, group)

    def attend_group(index: Int32[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        row, token, position = (lax.dynamic_slice_in_dim(x, index * group, group) for x in tiles)
        queries = q.at[token].get(mode="fill", fill_value=0)
        tables = meta.block_tables[row]
        if options.sliding_window is not None:
            tables, position = _skip_to_window(tables, position, options.sliding_window, k_pool.shape[2])
        result = _attend_tiles(queries, k_pool, v_pool, tables, position, options, tiling.blocks_per_chunk(k_pool))
        return out.at[token].set(result.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, -(-num_tiles // group), attend_group, out)


def _cut_into_tiles(
    meta: AttentionMetadata, num_tokens: int, selects: Callable[[Array], Array], num_queries: int, group: int
) -> tuple[Int32[Array, ""], _Tiles]:
    """How many tiles there are, and all of them, padded to a multiple of `group` that always suffices."""
    query_lens = jnp.diff(meta.query_start_loc)
    tiles_per_row = jnp.where(selects(query_lens), -(-query_lens // num_queries), 0)
    ends = jnp.cumsum(tiles_per_row)
    most = num_tokens // num_queries + min(len(query_lens), num_tokens) if num_queries > 1 else len(query_lens)
    tile = jnp.arange(-(-most // group) * group)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), len(ends) - 1)
    first = (tile - (ends[row] - tiles_per_row[row])) * num_queries
    offset = first[:, None] + jnp.arange(num_queries)[None, :]
    is_real = (tile < ends[-1])[:, None] & (offset < query_lens[row][:, None])
    token = jnp.where(is_real, meta.query_start_loc[row][:, None] + offset, num_tokens)
    position = jnp.where(is_real, (meta.context_lens - query_lens)[row][:, None] + offset, -1)
    return ends[-1], _Tiles(row, token, position)


def _skip_to_window(
    block_tables: Int32[Array, "G B"], position: Int32[Array, "G Q"], sliding_window: int, block_size: int
) -> tuple[Int32[Array, "G b"], Int32[Array, "G Q"]]:
    """The tables and positions as if each context began at the first block that a token of the tile sees."""
    # Only distances between positions matter to the attention, and the first token of a tile sees farthest back.
    first_block = jnp.maximum(position[:, 0] - sliding_window + 1, 0) // block_size
    most_keys = sliding_window + position.shape[1] - 1
    width = min(block_tables.shape[1], -(-(most_keys - 1) // block_size) + 1)
    block_index = first_block[:, None] + jnp.arange(width)[None, :]
    tables = jnp.take_along_axis(block_tables, block_index, axis=1, mode="clip")
    return tables, position - first_block[:, None] * block_size


def _attend_tiles(
    q: Float[Array, "G Q H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    block_tables: Int32[Array, "G B"],
    position: Int32[Array, "G Q"],
    options: _Options,
    blocks_per_chunk: int,
) -> Float[Array, "G Q H D"]:
    """Online softmax of a group of tiles over the chunks of their contexts, as many as the longest has."""
    num_tiles, num_queries, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_pool.shape
    num_keys = blocks_per_chunk * block_size
    # The R query heads of a KV head and the Q tokens of a tile are the rows of one product: [G, K, Q R, D].
    q = q.reshape(num_tiles, num_queries, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    shape = q.shape[:-1]
    q = q.reshape(num_tiles, num_kv_heads, -1, head_dim)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # or a GPU takes TF32: 3e-4 off
    einsum = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def gather(pool: Float[Array, "N K bs D"], blocks: Int32[Array, "G b"]) -> Float[Array, "G K C D"]:
        # One head of a block is a flat row: XLA:CPU copies rows, where other forms go element by element.
        rows = blocks[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]
        flat = pool.reshape(num_blocks * num_kv_heads, block_size * head_dim)
        return flat.at[rows].get(mode="clip").reshape(num_tiles, num_kv_heads, num_keys, head_dim)

    def chunk(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, total = carry
        block_index = index * blocks_per_chunk + jnp.arange(blocks_per_chunk)
        blocks = block_tables.at[:, block_index].get(mode="clip")  # beyond the table nothing is visible
        key_position = index * num_keys + jnp.arange(num_keys)
        visible = key_position[None, None, :] <= position[:, :, None]
        if options.sliding_window is not None:
            visible &= key_position[None, None, :] > position[:, :, None] - options.sliding_window
        # A slot that nobody sees may hold NaN, and 0 * NaN = NaN: zero weights do not suffice.
        v = jnp.where(visible.any(axis=1)[:, None, :, None], gather(v_pool, blocks), 0)
        visible = jnp.broadcast_to(visible[:, None, :, None, :], (*shape, num_keys)).reshape(*q.shape[:-1], num_keys)

        scores = einsum("gkqd,gkcd->gkqc", q, gather(k_pool, blocks))
        scores = scores * options.scale
        if options.logits_soft_cap is not None:
            scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        rescale = jnp.exp(peak - new_peak)
        attended = einsum("gkqc,gkcd->gkqd", weights.astype(v.dtype), v)
        return out * rescale[..., None] + attended, new_peak, total * rescale + weights.sum(axis=-1)

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    init = (jnp.zeros(q.shape, jnp.float32), jnp.full_like(zeros, MASKED), zeros)
    num_chunks = -(-(position.max() + 1) // num_keys)
    out, _, total = lax.fori_loop(0, num_chunks, chunk, init)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(*shape, head_dim).swapaxes(1, 2).reshape(num_tiles, num_queries, num_heads, head_dim)
