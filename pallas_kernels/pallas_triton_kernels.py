"""The Pallas kernels behind `pallas_triton`: one attends a tile, in three launch forms, and one merges partial results.

They are written for Triton: every array has powers of two on its sides, and whatever is not loaded is masked.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float32, Int32

from pagedjax.pallas_kernels.tuning import Tile

MASKED = float(jnp.finfo(jnp.float32).min)
"""A score that no real one reaches: finite, so that masked minus masked is 0 and not NaN."""
MIN_DIM = 16
"""Inner dimension of the smallest product on tensor cores. Triton fills a smaller one up with copies, and sums them."""
LOG2_E = math.log2(math.e)

Scalar = Int32[Array, ""]
Ref = Any
"""A reference to an array in the GPU's memory."""


class Spec(NamedTuple):
    """What a kernel is specialised for."""

    tile: Tile
    num_tokens: int
    """Most tokens of a request in a tile. Its rows are (token, query head) pairs, the heads of a token together."""
    group: int
    """Query heads per KV head."""
    head_dim: int
    block_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    num_splits: int
    """Most stretches that a context is cut into."""
    min_split_keys: int

    @property
    def padded_dim(self) -> int:
        """D rounded up: every array has powers of two on its sides."""
        return max(MIN_DIM, pl.next_power_of_2(self.head_dim))


class Inputs(NamedTuple):
    """The arguments of the op, as arrays or as references to them. D is q's and may be odd, Triton's sizes may not."""

    q: Ref
    k_pool: Ref
    v_pool: Ref
    block_tables: Ref
    context_lens: Ref
    query_start_loc: Ref


class Rows(NamedTuple):
    """The M rows of a tile. Those that are not real belong to no token: nothing is stored for them."""

    is_real: Bool[Array, "M"]
    token: Int32[Array, "M"]
    head: Int32[Array, "M"]
    position: Int32[Array, "M"]


class Keys(NamedTuple):
    """The positions that at least one row of a tile sees, [first, end), and what a program takes of them: the tiles of
    keys [start, stop), where tile i has the positions from i x num_keys on."""

    first: Scalar
    end: Scalar
    start: Scalar
    stop: Scalar


def paged_attention_short(spec: Spec, *refs: Ref) -> None:
    """Grid (request, KV head, 1): all of a short request."""
    *inputs, _, out_ref = refs
    inputs = Inputs(*inputs)
    request, kv_head = pl.program_id(0), pl.program_id(1)
    query_len = _query_len(inputs.query_start_loc, request)

    @pl.when((query_len > 0) & (query_len <= spec.num_tokens))
    def _() -> None:
        rows, keys = _rows(spec, inputs, request, jnp.int32(0), kv_head)
        out, _, total = _attend(spec, inputs, request, kv_head, rows, keys)
        _store(spec, out_ref, rows, _normalise(out, total))


def paged_attention_split(spec: Spec, *refs: Ref) -> None:
    """Grid (request, KV head, split): the partial result of one stretch of the context of a short request."""
    *inputs, out_ref, peak_ref, total_ref = refs
    inputs = Inputs(*inputs)
    request, kv_head, split = (pl.program_id(i) for i in range(3))
    query_len = _query_len(inputs.query_start_loc, request)
    rows, keys = _rows(spec, inputs, request, jnp.int32(0), kv_head)
    keys = _stretch(spec, keys, split)

    @pl.when((query_len > 0) & (query_len <= spec.num_tokens) & (keys.start < keys.stop))
    def _() -> None:
        out, peak, total = _attend(spec, inputs, request, kv_head, rows, keys)
        row = jnp.arange(spec.tile.num_rows, dtype=jnp.int32)
        plt.store(peak_ref.at[split, request, kv_head, row], peak, mask=rows.is_real)
        plt.store(total_ref.at[split, request, kv_head, row], total, mask=rows.is_real)
        dims, mask = _dims(spec, rows.is_real)
        plt.store(out_ref.at[split, request, kv_head, row[:, None], dims], out, mask=mask)


def paged_attention_merge(spec: Spec, *refs: Ref) -> None:
    """Grid (request, KV head, row): the weighted mean of a row over the stretches of its context."""
    partial_ref, peak_ref, total_ref, lens_ref, start_ref, _, out_ref = refs
    request, kv_head, row = (pl.program_id(i) for i in range(3))
    query_len = _query_len(start_ref, request)

    @pl.when((query_len <= spec.num_tokens) & (row < query_len * spec.group))
    def _() -> None:
        keys = _keys(spec, lens_ref[request], query_len, jnp.int32(0))
        split = jnp.arange(pl.next_power_of_2(spec.num_splits), dtype=jnp.int32)
        stretch = _stretch(spec, keys, split)
        is_used = (split < spec.num_splits) & (stretch.start < stretch.stop)
        index = (split, request, kv_head, row)
        peak = plt.load(peak_ref.at[index], mask=is_used, other=MASKED)
        total = plt.load(total_ref.at[index], mask=is_used, other=0.0)
        dims, mask = _dims(spec, is_used)
        out = plt.load(partial_ref.at[split[:, None], request, kv_head, row, dims], mask=mask, other=0.0)
        weight = _weight(spec, peak - peak.max())
        total = (total * weight).sum()
        out = (out * weight[:, None]).sum(axis=0) / jnp.where(total == 0, 1, total)
        offset, head = _divmod(row, spec.group)
        token, head = start_ref[request] + offset, kv_head * spec.group + head
        dims = jnp.arange(spec.padded_dim, dtype=jnp.int32)
        plt.store(out_ref.at[token, head, dims], out.astype(out_ref.dtype), mask=dims < spec.head_dim)


def paged_attention_long(spec: Spec, *refs: Ref) -> None:
    """Grid (tile, KV head): a tile of a prompt or chunk."""
    *inputs, request_ref, first_ref, _, out_ref = refs
    inputs = Inputs(*inputs)
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    request, first = request_ref[tile], first_ref[tile]

    @pl.when(first < _query_len(inputs.query_start_loc, request))
    def _() -> None:
        rows, keys = _rows(spec, inputs, request, first, kv_head)
        out, _, total = _attend(spec, inputs, request, kv_head, rows, keys, skip_masks=True)
        _store(spec, out_ref, rows, _normalise(out, total))


def _divmod(x: Int32[Array, "*n"], divisor: int) -> tuple[Int32[Array, "*n"], Int32[Array, "*n"]]:
    """Quotient and remainder for x >= 0: Python's, which round down, take a dozen instructions to look at the sign."""
    if divisor & (divisor - 1) == 0:
        return x >> (divisor.bit_length() - 1), x & (divisor - 1)
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))


def _ceil_div(x: Int32[Array, "*n"], divisor: int) -> Int32[Array, "*n"]:
    """x / divisor rounded up, x >= 0, in 32 bits under jax_enable_x64 too."""
    return _divmod(x + (divisor - 1), divisor)[0]


def _query_len(start_ref: Ref, request: Scalar) -> Scalar:
    return start_ref[request + 1] - start_ref[request]


def _rows(spec: Spec, inputs: Inputs, request: Scalar, first: Scalar, kv_head: Scalar) -> tuple[Rows, Keys]:
    """The tile from the `first` new token of a request on."""
    query_len, context_len = _query_len(inputs.query_start_loc, request), inputs.context_lens[request]
    row = jnp.arange(spec.tile.num_rows, dtype=jnp.int32)
    offset, head = _divmod(row, spec.group)
    token = first + offset
    rows = Rows(
        is_real=(offset < spec.num_tokens) & (token < query_len),
        token=inputs.query_start_loc[request] + token,
        head=kv_head * spec.group + head,
        position=context_len - query_len + token,
    )
    return rows, _keys(spec, context_len, query_len, first)


def _keys(spec: Spec, context_len: Scalar, query_len: Scalar, first: Scalar) -> Keys:
    """What the tile from the `first` new token on sees."""
    num_computed = context_len - query_len
    first_key = jnp.int32(0)
    if spec.sliding_window is not None:
        first_key = jnp.maximum(num_computed + first - spec.sliding_window + 1, 0)
    end = num_computed + jnp.minimum(first + spec.num_tokens, query_len)
    return Keys(first_key, end, first_key // spec.tile.num_keys, _ceil_div(end, spec.tile.num_keys))


def _stretch(spec: Spec, keys: Keys, split: Int32[Array, "*n"]) -> Keys:
    """The part of the keys that a split takes: none of them, if `start` is not before `stop`."""
    shortest = -(-spec.min_split_keys // spec.tile.num_keys)
    length = jnp.maximum(_ceil_div(keys.stop - keys.start, spec.num_splits), shortest)
    start = keys.start + split * length
    return keys._replace(start=start, stop=jnp.minimum(start + length, keys.stop))


def _attend(
    spec: Spec, inputs: Inputs, request: Scalar, kv_head: Scalar, rows: Rows, keys: Keys, *, skip_masks: bool = False
) -> tuple[Float32[Array, "M D2"], Float32[Array, "M"], Float32[Array, "M"]]:
    """Weighted sum of the values, largest score and sum of the weights of each row. D2 is D rounded up.

    With `skip_masks` there is another loop without masks for the tiles of keys that every row sees.
    """
    num_keys, window = spec.tile.num_keys, spec.sliding_window
    dims, mask = _dims(spec, rows.is_real)
    q = plt.load(inputs.q.at[rows.token[:, None], rows.head[:, None], dims], mask=mask, other=0.0)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # or Triton takes TF32: 3e-4 off
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def load_blocks(index: Scalar) -> Int32[Array, "C"]:
        position = index * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        in_range = (position >= keys.first) & (position < keys.end)
        block_index, _ = _divmod(position, spec.block_size)
        return plt.load(inputs.block_tables.at[request, block_index], mask=in_range, other=0)

    def attend_keys(masked: bool, index: Scalar, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        out, peak, total, block = carry
        next_block = load_blocks(index + 1)  # a turn ahead: the loads of keys need not wait for it
        position = index * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        # What is not loaded is 0, not NaN: a slot that nobody sees may hold anything, and 0 * NaN = NaN.
        in_range = (position >= keys.first) & (position < keys.end) if masked else None
        dims, mask = _dims(spec, in_range)
        _, offset = _divmod(position, spec.block_size)
        slots = (block[:, None], kv_head, offset[:, None], dims)
        other = None if mask is None else 0.0
        k = plt.load(inputs.k_pool.at[slots], mask=mask, other=other)
        scores = dot(q, k, (((1,), (1,)), ((), ())))
        if spec.logits_soft_cap is not None:
            scores = jnp.tanh(scores * (spec.scale / spec.logits_soft_cap))
        if masked:
            visible = position[None, :] <= rows.position[:, None]
            if window is not None:
                visible &= position[None, :] > rows.position[:, None] - window
            scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weights = _weight(spec, scores - new_peak[:, None])
        if masked:
            weights = jnp.where(visible, weights, 0)  # a row that has seen nothing yet has weights of 1
        rescale = _weight(spec, peak - new_peak)
        v = plt.load(inputs.v_pool.at[slots], mask=mask, other=other)
        out = out * rescale[:, None] + dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        return out, new_peak, total * rescale + weights.sum(axis=1), next_block

    num_rows = spec.tile.num_rows
    carry = (
        jnp.zeros((num_rows, spec.padded_dim), jnp.float32),
        jnp.full(num_rows, MASKED, jnp.float32),
        jnp.zeros(num_rows, jnp.float32),
        load_blocks(keys.start),
    )
    if not skip_masks:
        return lax.fori_loop(keys.start, keys.stop, partial(attend_keys, True), carry)[:3]
    start, stop = _seen_by_all(spec, rows, keys)
    if window is not None:
        carry = lax.fori_loop(keys.start, start, partial(attend_keys, True), carry)
    carry = lax.fori_loop(start, stop, partial(attend_keys, False), carry)
    return lax.fori_loop(stop, keys.stop, partial(attend_keys, True), carry)[:3]


def _seen_by_all(spec: Spec, rows: Rows, keys: Keys) -> tuple[Scalar, Scalar]:
    """The tiles of keys, [start, stop), that every row of a tile sees whole."""
    last = keys.end - 1
    first = jnp.min(rows.position)
    start = keys.start
    if spec.sliding_window is not None:
        start = jnp.minimum(_ceil_div(jnp.maximum(last - spec.sliding_window + 1, 0), spec.tile.num_keys), keys.stop)
    return start, jnp.clip((first + 1) // spec.tile.num_keys, start, keys.stop)


def _weight(spec: Spec, difference: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """exp of a difference of two scores, which are not scaled before: so large scores lose nothing to rounding."""
    factor = spec.scale if spec.logits_soft_cap is None else spec.logits_soft_cap
    return jnp.exp2(difference * (factor * LOG2_E))  # exp2 is what the GPU has


def _dims(spec: Spec, mask: Bool[Array, "n"] | None) -> tuple[Int32[Array, "1 D2"], Bool[Array, "n D2"] | None]:
    """Indices of the last axis, a power of two of them, and the mask for rows and dimensions that exist."""
    padded = spec.padded_dim
    dims = jnp.arange(padded, dtype=jnp.int32)[None, :]
    if padded == spec.head_dim:
        return dims, None if mask is None else jnp.broadcast_to(mask[:, None], (len(mask), padded))
    exists = dims < spec.head_dim
    if mask is None:
        return dims, jnp.broadcast_to(exists, (spec.tile.num_keys, padded))
    return dims, mask[:, None] & exists


def _normalise(out: Float32[Array, "M D2"], total: Float32[Array, "M"]) -> Float32[Array, "M D2"]:
    return out / jnp.where(total == 0, 1, total)[:, None]


def _store(spec: Spec, out_ref: Ref, rows: Rows, out: Float32[Array, "M D2"]) -> None:
    dims, mask = _dims(spec, rows.is_real)
    plt.store(out_ref.at[rows.token[:, None], rows.head[:, None], dims], out.astype(out_ref.dtype), mask=mask)
