"""Paged attention in plain JAX: online softmax over chunks of keys with dynamic trip counts. The CPU's fast path.

Queries are cut into tiles that belong to one request each. A loop takes a few tiles at a time; inside it, another
loop walks over their contexts chunk by chunk (online softmax, arXiv 2205.14135, algorithm 1). So the work grows with
the tokens that are there, never with the widest table, and what is gathered stays in the cache.

Chunks begin at the same positions in every tile and for every request, and a chunk of which a query sees nothing
changes nothing of it: with sums that are always taken in one order (`xla_invariant`) what a query gets has the same
bits in whatever tile, batch or step it comes.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
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


DECODE = Tiling(num_tiles=4, num_queries=1)
CHUNK = Tiling(num_tiles=1, num_queries=32)
NUM_KEYS = 64
"""Keys of 4 bytes per number in a turn of the inner loop, more if they are narrower, in whole blocks."""


def blocks_per_chunk(pool: Float[Array, "N K bs D"]) -> int:
    """Blocks per turn of the inner loop: what stays in the cache counts, so bytes."""
    return max(1, NUM_KEYS * 4 // pool.dtype.itemsize // pool.shape[2])


class Arithmetic(NamedTuple):
    """How products and sums are taken: where XLA leaves the order of the sums open, that is a choice."""

    einsum: Callable[..., Array] = jnp.einsum
    """Of [G, K, M, *] and [G, K, *, *], M rows of queries in each product."""
    sum: Callable[[Array], Array] = partial(jnp.sum, axis=-1)


FASTEST = Arithmetic()


class _Options(NamedTuple):
    """What is done to the scores: see `pagedjax.pallas_kernels.attention.paged_attention`. Static."""

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    arithmetic: Arithmetic


class _Tiles(NamedTuple):
    """Tiles of Q tokens, G of them; tokens beyond their request's end have index T and position -1."""

    row: Int32[Array, "G"]
    token: Int32[Array, "G Q"]
    position: Int32[Array, "G Q"]


class _Partial(NamedTuple):
    """What M queries of each of G tiles and K heads have of the keys so far."""

    out: Float[Array, "G K M D"]
    """Values times weights, not yet divided by the sum of these."""
    peak: Float[Array, "G K M"]
    """The largest score: weights are exp(score - peak)."""
    total: Float[Array, "G K M"]


class _Prefix(NamedTuple):
    """What each row has of the keys that it shares with others."""

    num_chunks: Int32[Array, "S"]
    partial: _Partial


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    arithmetic: Arithmetic = FASTEST,
) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`."""
    args = (q, k_pool, v_pool, meta, _Options(scale, sliding_window, logits_soft_cap, arithmetic))
    shares = meta.shared_lens is not None and sliding_window is None
    prefix = _attend_shared(*args) if shares else None
    out = _attend_rows(jnp.zeros_like(q), *args, lambda query_lens: query_lens == 1, DECODE, prefix)
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
    prefix: _Prefix | None = None,
) -> Float[Array, "T H D"]:
    """Fills the rows of `out` that belong to the requests that `selects` chooses by their number of new tokens."""
    group = min(tiling.num_tiles, len(meta.context_lens))
    num_tiles, tiles = _cut_into_tiles(meta, len(q), selects, tiling.num_queries, group)
    num_blocks = blocks_per_chunk(k_pool)

    def attend_group(index: Int32[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        row, token, position = (lax.dynamic_slice_in_dim(x, index * group, group) for x in tiles)
        queries = _by_kv_head(q.at[token].get(mode="fill", fill_value=0), k_pool.shape[1])
        tables, skipped, begun = meta.block_tables[row], None, _no_keys(queries)
        if options.sliding_window is not None:
            tables, position = _skip_to_window(tables, position, options.sliding_window, k_pool.shape[2], num_blocks)
        if prefix is not None:
            skipped, begun = jax.tree.map(lambda x: x[row], prefix)
        part = _attend_keys(queries, k_pool, v_pool, tables, position, options, begun, skipped)
        result = part.out / jnp.where(part.total == 0, 1, part.total)[..., None]
        result = _by_token(result, position.shape[1])
        return out.at[token].set(result.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, -(-num_tiles // group), attend_group, out)


def _attend_shared(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    options: _Options,
) -> _Prefix:
    """What decodes have of the whole chunks that they share: these are read once for all rows of a run, whose queries
    make one tile."""
    assert meta.shared_lens is not None
    num_rows, num_runs = len(meta.context_lens), len(meta.shared_lens)
    num_chunks = meta.shared_lens // (blocks_per_chunk(k_pool) * k_pool.shape[2])
    last = num_chunks * blocks_per_chunk(k_pool) * k_pool.shape[2] - 1
    queries = q[:num_rows].reshape(num_runs, -1, *q.shape[1:])
    grouped = _by_kv_head(queries, k_pool.shape[1])
    tables = meta.block_tables[:: num_rows // num_runs]

    def attend_run(run: Int32[Array, ""], parts: _Partial) -> _Partial:
        own, table, last_key = (lax.dynamic_slice_in_dim(x, run, 1) for x in (grouped, tables, last))
        position = jnp.broadcast_to(last_key[:, None], (1, queries.shape[1]))
        part = _attend_keys(own, k_pool, v_pool, table, position, options, _no_keys(own))
        return jax.tree.map(lambda x, one: lax.dynamic_update_slice_in_dim(x, one, run, 0), parts, part)

    parts = lax.fori_loop(0, num_runs, attend_run, _no_keys(grouped))
    by_row = jax.tree.map(partial(_split_tiles, num_queries=queries.shape[1]), parts)
    return _Prefix(jnp.repeat(num_chunks, queries.shape[1]), by_row)


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
    block_tables: Int32[Array, "G B"],
    position: Int32[Array, "G Q"],
    sliding_window: int,
    block_size: int,
    blocks_per_chunk: int,
) -> tuple[Int32[Array, "G b"], Int32[Array, "G Q"]]:
    """The tables and positions as if each context began at the first chunk that a token of the tile sees."""
    # Only distances between positions matter to the attention, and the first token of a tile sees farthest back.
    num_keys = blocks_per_chunk * block_size
    first_chunk = jnp.maximum(position[:, 0] - sliding_window + 1, 0) // num_keys
    most_keys = sliding_window + position.shape[1] - 1
    width = min(block_tables.shape[1], -(-(num_keys - 1 + most_keys) // block_size))
    block_index = first_chunk[:, None] * blocks_per_chunk + jnp.arange(width)[None, :]
    tables = jnp.take_along_axis(block_tables, block_index, axis=1, mode="clip")
    return tables, position - first_chunk[:, None] * num_keys


def _by_kv_head(q: Float[Array, "G Q H D"], num_kv_heads: int) -> Float[Array, "G K M D"]:
    """The R query heads of a KV head and the Q tokens of a tile are the M = Q R rows of one product."""
    num_tiles, num_queries, _, head_dim = q.shape
    q = q.reshape(num_tiles, num_queries, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    return q.reshape(num_tiles, num_kv_heads, -1, head_dim)


def _by_token(out: Float[Array, "G K M D"], num_queries: int) -> Float[Array, "G Q H D"]:
    """The inverse."""
    num_tiles, num_kv_heads, _, head_dim = out.shape
    out = out.reshape(num_tiles, num_kv_heads, num_queries, -1, head_dim).swapaxes(1, 2)
    return out.reshape(num_tiles, num_queries, -1, head_dim)


def _split_tiles(x: Float[Array, "G K M *D"], num_queries: int) -> Float[Array, "S K R *D"]:
    """Tiles of Q queries as S = G Q tiles of one each."""
    num_tiles, num_kv_heads = x.shape[:2]
    x = x.reshape(num_tiles, num_kv_heads, num_queries, -1, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(num_tiles * num_queries, num_kv_heads, *x.shape[3:])


def _no_keys(q: Float[Array, "G K M D"]) -> _Partial:
    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    return _Partial(jnp.zeros(q.shape, jnp.float32), jnp.full_like(zeros, MASKED), zeros)


def _attend_keys(
    q: Float[Array, "G K M D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    block_tables: Int32[Array, "G B"],
    position: Int32[Array, "G Q"],
    options: _Options,
    begun: _Partial,
    skipped: Int32[Array, "G"] | None = None,
) -> _Partial:
    """Online softmax of a group of tiles over the chunks of their contexts, as many as the longest has, but for the
    first ones of each tile that are `skipped`: `begun` has those."""
    num_tiles, num_kv_heads, num_rows, head_dim = q.shape
    num_blocks, _, block_size, _ = k_pool.shape
    num_keys = blocks_per_chunk(k_pool) * block_size
    by_query = (num_tiles, 1, position.shape[1], num_rows // position.shape[1], num_keys)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # or a GPU takes TF32: 3e-4 off
    einsum = partial(options.arithmetic.einsum, precision=precision, preferred_element_type=jnp.float32)

    def gather(pool: Float[Array, "N K bs D"], blocks: Int32[Array, "G b"]) -> Float[Array, "G K C D"]:
        # One head of a block is a flat row: XLA:CPU copies rows, where other forms go element by element.
        rows = blocks[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]
        flat = pool.reshape(num_blocks * num_kv_heads, block_size * head_dim)
        return flat.at[rows].get(mode="clip").reshape(num_tiles, num_kv_heads, num_keys, head_dim)

    def attend_chunk(index: Int32[Array, ""], part: _Partial) -> _Partial:
        block_index = index * blocks_per_chunk(k_pool) + jnp.arange(blocks_per_chunk(k_pool))
        blocks = block_tables.at[:, block_index].get(mode="clip")  # beyond the table nothing is visible
        key_position = index * num_keys + jnp.arange(num_keys)
        visible = key_position[None, None, :] <= position[:, :, None]
        if options.sliding_window is not None:
            visible &= key_position[None, None, :] > position[:, :, None] - options.sliding_window
        if skipped is not None:
            visible &= index >= skipped[:, None, None]
        # A slot that nobody sees may hold NaN, and 0 * NaN = NaN: zero weights do not suffice.
        v = jnp.where(visible.any(axis=1)[:, None, :, None], gather(v_pool, blocks), 0)
        visible = jnp.broadcast_to(visible[:, None, :, None, :], by_query).reshape(num_tiles, 1, num_rows, num_keys)

        scores = einsum("gkqd,gkcd->gkqc", q, gather(k_pool, blocks))
        scores = scores * options.scale
        if options.logits_soft_cap is not None:
            scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.maximum(part.peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0)
        rescale = jnp.exp(part.peak - peak)
        attended = einsum("gkqc,gkcd->gkqd", weights.astype(v.dtype), v)
        out = part.out * rescale[..., None] + attended
        return _Partial(out, peak, part.total * rescale + options.arithmetic.sum(weights))

    first = 0 if skipped is None else skipped.min()
    return lax.fori_loop(first, -(-(position.max() + 1) // num_keys), attend_chunk, begun)
