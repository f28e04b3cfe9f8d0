"""Paged attention in plain JAX: online softmax over chunks of keys with dynamic trip counts. The CPU's fast path.

Queries are cut into tiles that belong to one request each. A loop takes a few tiles at a time; inside it, another
loop walks over their contexts chunk by chunk (online softmax, arXiv 2205.14135, algorithm 1), so that the work grows
with the tokens that are there and never with the widest table, and memory stays at a few tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pagedjax.pallas_kernels.metadata import AttentionMetadata

MASKED = -1e30
"""A score that no real one reaches: finite, so that masked minus masked is 0 and not NaN."""


class Tiling(NamedTuple):
    """How much one turn of the loops takes; what measured best on two AVX-512 cores (docs/decisions.md)."""

    num_tiles: int
    num_queries: int
    num_keys: int


DECODE = Tiling(num_tiles=8, num_queries=1, num_keys=64)
CHUNK = Tiling(num_tiles=1, num_queries=64, num_keys=128)


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N bs K D"],
    v_pool: Float[Array, "N bs K D"],
    meta: AttentionMetadata,
    *,
    scale: float,
) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`."""
    args = (q, k_pool, v_pool, meta, scale)
    out = _attend_rows(jnp.zeros_like(q), *args, lambda query_lens: query_lens == 1, DECODE)
    if meta.max_query_len > 1:
        out = _attend_rows(out, *args, lambda query_lens: query_lens > 1, CHUNK)
    return out


class _Tiles(NamedTuple):
    """The queries of G tiles of Q tokens; tokens beyond a request's end have index T and position -1."""

    row: Int32[Array, "G"]
    token: Int32[Array, "G Q"]
    position: Int32[Array, "G Q"]


def _attend_rows(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N bs K D"],
    v_pool: Float[Array, "N bs K D"],
    meta: AttentionMetadata,
    scale: float,
    selects: Callable[[Array], Array],
    tiling: Tiling,
) -> Float[Array, "T H D"]:
    """Fills the rows of `out` that belong to the requests that `selects` chooses by their number of new tokens."""
    num_tokens = len(q)
    num_tiles = min(tiling.num_tiles, len(meta.context_lens))
    query_lens = jnp.diff(meta.query_start_loc)
    tiles_per_row = jnp.where(selects(query_lens), -(-query_lens // tiling.num_queries), 0)
    tile_ends = jnp.cumsum(tiles_per_row)
    total = tile_ends[-1]

    def tiles_from(first: Int32[Array, ""]) -> _Tiles:
        tile = first + jnp.arange(num_tiles)
        row = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), len(tile_ends) - 1)
        index_in_row = tile - (tile_ends[row] - tiles_per_row[row])
        offset = index_in_row[:, None] * tiling.num_queries + jnp.arange(tiling.num_queries)[None, :]
        real = (tile < total)[:, None] & (offset < query_lens[row][:, None])
        token = jnp.where(real, meta.query_start_loc[row][:, None] + offset, num_tokens)
        position = jnp.where(real, (meta.context_lens - query_lens)[row][:, None] + offset, -1)
        return _Tiles(row, token, position)

    def attend_group(index: Int32[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        tiles = tiles_from(index * num_tiles)
        q_tiles = q.at[tiles.token].get(mode="fill", fill_value=0)
        result = _attend_tiles(q_tiles, k_pool, v_pool, meta.block_tables[tiles.row], tiles, scale, tiling.num_keys)
        return out.at[tiles.token].set(result.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, -(-total // num_tiles), attend_group, out)


def _attend_tiles(
    q: Float[Array, "G Q H D"],
    k_pool: Float[Array, "N bs K D"],
    v_pool: Float[Array, "N bs K D"],
    block_tables: Int32[Array, "G B"],
    tiles: _Tiles,
    scale: float,
    num_keys: int,
) -> Float[Array, "G Q H D"]:
    """Online softmax of G tiles over the chunks of their contexts, as many as the longest one has."""
    num_tiles, num_queries, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_pool.shape
    blocks_per_chunk = max(1, num_keys // block_size)
    num_keys = blocks_per_chunk * block_size
    q = _heads_first(q, num_kv_heads)
    last_position = tiles.position.max(axis=1)

    def gather(pool: Float[Array, "N bs K D"], blocks: Int32[Array, "G b"]) -> Float[Array, "G C KD"]:
        # Whole blocks as flat rows: XLA:CPU copies those, and walks element by element otherwise.
        flat = pool.reshape(num_blocks, block_size * num_kv_heads * head_dim)
        return flat[blocks].reshape(num_tiles, num_keys, num_kv_heads * head_dim)

    def chunk(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, total = carry
        block_index = index * blocks_per_chunk + jnp.arange(blocks_per_chunk)
        blocks = block_tables.at[:, block_index].get(mode="clip")  # beyond the table nothing is visible
        key_position = index * num_keys + jnp.arange(num_keys)
        k = gather(k_pool, blocks)
        in_context = key_position[None, :] <= last_position[:, None]
        v = jnp.where(in_context[:, :, None], gather(v_pool, blocks), 0)  # 0 * NaN = NaN: masked weights do not suffice
        visible = (key_position[None, None, :] <= tiles.position[:, :, None])[:, None, :, None, :]

        scores = _scores(q, k) * scale
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        rescale = jnp.exp(peak - new_peak)
        out = out * rescale[..., None] + _weighted_sum(weights.astype(v.dtype), v)
        return out, new_peak, total * rescale + weights.sum(axis=-1)

    shape = q.shape[:-1]
    zeros = jnp.zeros(shape, jnp.float32)
    init = (jnp.zeros(q.shape, jnp.float32), jnp.full(shape, MASKED, jnp.float32), zeros)
    num_chunks = -(-(last_position.max() + 1) // num_keys)
    out, _, total = lax.fori_loop(0, num_chunks, chunk, init)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(num_tiles, num_queries, num_heads, head_dim)


def _heads_first(q: Float[Array, "G Q H D"], num_kv_heads: int) -> Float[Array, "G K Q R D"]:
    """Groups the R query heads that share a KV head."""
    num_tiles, num_queries, num_heads, head_dim = q.shape
    grouped = q.reshape(num_tiles, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.transpose(0, 2, 1, 3, 4)


def _scores(q: Float[Array, "G K Q R D"], k: Float[Array, "G C KD"]) -> Float[Array, "G K Q R C"]:
    num_tiles, num_kv_heads, num_queries, group, head_dim = q.shape
    k = k.reshape(num_tiles, -1, num_kv_heads, head_dim)
    return jnp.einsum("gkqrd,gckd->gkqrc", q, k, preferred_element_type=jnp.float32)


def _weighted_sum(weights: Float[Array, "G K Q R C"], v: Float[Array, "G C KD"]) -> Float[Array, "G K Q R D"]:
    num_tiles, num_kv_heads, *_ = weights.shape
    v = v.reshape(num_tiles, v.shape[1], num_kv_heads, -1)
    return jnp.einsum("gkqrc,gckd->gkqrd", weights, v, preferred_element_type=jnp.float32)
