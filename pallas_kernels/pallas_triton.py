"""Paged attention as Pallas kernels for NVIDIA GPUs, through Pallas' Triton backend.

One kernel attends one tile: some new tokens of one request, with the query heads of one KV head, against a stretch of
the context, `num_keys` keys at a time (online softmax, arXiv 2205.14135, algorithm 1). A request with few new tokens
(a decode, a draft) is one tile, and where there are few requests, its context is cut into several stretches, which a
second kernel merges (flash-decoding). A prompt or chunk is many tiles, each against all that it may see.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from pagedjax.pallas_kernels import pallas_triton_kernels as kernels
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.pallas_kernels.tuning import Tile, Tuning, current_gpu, max_group_for, tuning_for

MAX_HEAD_DIM = 256


def why_not(q: Any, k_pool: Any) -> str | None:
    """The reason that these kernels cannot attend with such arrays, or None."""
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim is at most {MAX_HEAD_DIM}, got {q.shape[-1]}"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it takes bfloat16, float16 and float32, got {q.dtype}"
    if k_pool.dtype != q.dtype:
        # Beware with pools of 1 byte per number: Pallas counts 32-bit offsets up to 2**32 bytes, which then wrap.
        return f"queries and pool have the same dtype, got {q.dtype} and {k_pool.dtype}"
    group, max_group = q.shape[1] // k_pool.shape[1], max_group_for(head_dim=q.shape[-1], itemsize=q.dtype.itemsize)
    if group > max_group:
        return f"at most {max_group} query heads share a KV head at head_dim {q.shape[-1]} in {q.dtype}, got {group}"
    return _why_not_here()


def _why_not_here() -> str | None:
    """On a CPU the interpreter runs them, or they are compiled for a GPU elsewhere."""
    if jax.default_backend() == "cpu":
        return None
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", device.platform))  # "9.0"; on ROCm a name
    is_enough = capability.replace(".", "").isdigit() and float(capability) >= 8.0
    return None if is_enough else f"it needs an NVIDIA GPU of compute capability 8.0, got {capability}"


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`. On a CPU it runs in Pallas' interpreter."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    num_rows, table_width = meta.block_tables.shape
    group, most = num_heads // num_kv_heads, min(meta.max_query_len, num_tokens)
    tuning = tuning or tuning_for(current_gpu(), head_dim=head_dim, itemsize=k_pool.dtype.itemsize)
    options = (group, head_dim, block_size, scale, sliding_window, logits_soft_cap)

    inputs = kernels.Inputs(
        q, k_pool, v_pool, *map(jnp.asarray, (meta.block_tables, meta.context_lens, meta.query_start_loc))
    )
    tile = tuning.short_tile(group, most)
    short_len = min(tile.num_rows // group, most)
    num_splits = tuning.num_splits(num_rows * num_kv_heads, table_width * block_size)
    out = jnp.zeros_like(q)  # what belongs to no token stays zero
    out = _attend_short(kernels.Spec(tile, short_len, *options, num_splits, tuning.min_split_keys), inputs, out)
    if most > short_len:
        tile = tuning.long_tile(group)
        long_len = min(tile.num_rows // group, most)
        out = _attend_long(kernels.Spec(tile, long_len, *options, 1, 0), short_len, inputs, out)
    return out


def _attend_short(spec: kernels.Spec, inputs: kernels.Inputs, out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
    """Fills the rows of `out` of requests with at most `spec.num_tokens` new tokens, in place."""
    num_requests, num_kv_heads = len(inputs.context_lens), inputs.k_pool.shape[1]
    grid = (num_requests, num_kv_heads, spec.num_splits)
    if spec.num_splits == 1:
        return _call(
            partial(kernels.paged_attention_short, spec), grid, spec.tile, [*inputs, out], aliases={len(inputs): 0}
        )[0]
    rows = (spec.num_splits, num_requests, num_kv_heads, spec.num_tokens * spec.group)
    partials = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*rows, spec.head_dim), rows, rows)]
    results = _call(partial(kernels.paged_attention_split, spec), grid, spec.tile, inputs, outs=partials)
    grid = (num_requests, num_kv_heads, spec.num_tokens * spec.group)
    merge = partial(kernels.paged_attention_merge, spec)
    tables = [inputs.context_lens, inputs.query_start_loc]
    return _call(merge, grid, spec.tile, [*results, *tables, out], aliases={len(results) + len(tables): 0})[0]


def _attend_long(
    spec: kernels.Spec, short_len: int, inputs: kernels.Inputs, out: Float[Array, "T H D"]
) -> Float[Array, "T H D"]:
    """Fills the rows of `out` of requests with more than `short_len` new tokens, in place."""
    tiles = _cut_into_tiles(inputs.query_start_loc, len(out), short_len, spec.num_tokens)
    grid = (len(tiles[0]), inputs.k_pool.shape[1])
    kernel = partial(kernels.paged_attention_long, spec)
    return _call(kernel, grid, spec.tile, [*inputs, *tiles, out], aliases={len(inputs) + len(tiles): 0})[0]


def _cut_into_tiles(
    query_start_loc: Int32[Array, "starts"], num_tokens: int, short_len: int, tile_len: int
) -> tuple[Int32[Array, "G"], Int32[Array, "G"]]:
    """Request and first token, counted in the request, of each tile of `tile_len` tokens of the requests with more than
    `short_len`; G of them always suffice. The first token of a tile that is not needed lies beyond every request."""
    query_lens = jnp.diff(query_start_loc)
    tiles_per_request = jnp.where(query_lens > short_len, (query_lens + tile_len - 1) // tile_len, 0)
    ends = jnp.cumsum(tiles_per_request, dtype=jnp.int32)
    most_requests = min(len(query_lens), num_tokens // (short_len + 1))
    tile = jnp.arange(num_tokens // tile_len + most_requests, dtype=jnp.int32)
    # compare_all: one fused kernel; a binary search would be a loop of launches.
    request = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    request = jnp.minimum(request, len(ends) - 1).astype(jnp.int32)
    first = (tile - (ends - tiles_per_request)[request]) * tile_len
    return request, jnp.where(tile < ends[-1], first, num_tokens)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    tile: Tile,
    args: Any,
    *,
    outs: list[jax.ShapeDtypeStruct] | None = None,
    aliases: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Launches a kernel over whole arrays; where `aliases` names arguments, the results replace them in place."""
    outs = outs or [jax.ShapeDtypeStruct(args[i].shape, args[i].dtype) for i in aliases or {}]

    def call(*args: Array, interpret: bool) -> tuple[Array, ...]:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=outs,
            input_output_aliases=aliases or {},
            compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
            interpret=interpret,
            name=kernel.func.__name__,
        )(*args)

    return lax.platform_dependent(*args, cpu=partial(call, interpret=True), default=partial(call, interpret=False))
