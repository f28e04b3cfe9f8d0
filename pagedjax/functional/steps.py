"""The building blocks of a sampling loop inside a user's own jit: a paged cache, prefill, fork, decode step."""

from dataclasses import dataclass, field, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pagedjax.config import invariant_tokens
from pagedjax.functional import checks
from pagedjax.functional.layout import Layout
from pagedjax.kv_cache import KVCache, copy_cache_blocks
from pagedjax.kv_cache import init_kv_cache as init_pool
from pagedjax.model_input import ModelInput, SamplingInput
from pagedjax.models.decoder import CausalLM, Params, embed_params, head_params, paged_step, read_out
from pagedjax.pallas_kernels.attention import implementation_for
from pagedjax.pallas_kernels.metadata import AttentionMetadata

DEFAULT_CHUNK = 512
"""Tokens of the prompts that go through the model at a time. What lies in memory beside the pool grows with them."""


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedState:
    """The KV of R rows: prompts before `fork`, and samples after it. A pytree, fit to be carried by a loop."""

    kv_cache: KVCache
    block_tables: Int32[Array, "G R W"]
    """Of each group of layers, the blocks of each row in order of position; 0 is the null block."""
    context_lens: Int32[Array, "R"]
    """Tokens of each row in the pool."""
    layout: Layout = field(metadata={"static": True})
    shared_lens: Int32[Array, "B"] | None = None
    """After `fork`, tokens of each prompt in blocks that its samples share."""


def init_kv_cache(
    model: CausalLM,
    *,
    num_prompts: int,
    prompt_len: int,
    max_new_tokens: int,
    num_samples: int = 1,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = jnp.float32,
    exact_lens: bool = False,
    batch_invariant: bool = False,
) -> PagedState:
    """An empty paged cache for `num_prompts` prompts of at most `prompt_len` tokens, and of each `num_samples` samples
    of at most `max_new_tokens` tokens, the last of which is never read: room for `max_new_tokens` - 1 decode steps.

    `dtype` is the KV's, mostly that of the params. With `exact_lens` all prompts have `prompt_len` tokens, which may
    save a block per sample. With `batch_invariant`, on a CPU alone, no bit of a row depends on the others, as in
    `LLM(batch_invariant=True)`: steps are padded to 64 tokens or more. Raises ValueError for sizes below 1, for more
    positions than the model has, and for `batch_invariant` on a GPU.
    """
    layout = Layout(
        num_prompts=checks.count("num_prompts", num_prompts),
        prompt_len=checks.count("prompt_len", prompt_len),
        max_new_tokens=checks.count("max_new_tokens", max_new_tokens),
        num_samples=checks.count("num_samples", num_samples),
        block_size=checks.count("block_size", block_size),
        num_groups=len(model.config.layer_groups.windows),
        exact_lens=checks.flag("exact_lens", exact_lens),
        min_tokens=invariant_tokens(model.config.narrowest) if checks.batch_invariant(batch_invariant) else 1,
    )
    checks.positions(model.config, prompt_len, max_new_tokens)
    pool = init_pool(
        num_pools=model.config.layer_groups.num_pools,
        num_blocks=layout.num_blocks,
        block_size=block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
    )
    return PagedState(pool, layout.prompt_tables(), jnp.zeros(num_prompts, jnp.int32), layout)


def prefill(
    model: CausalLM,
    params: Params,
    state: PagedState,
    prompt_ids: Int[Array | np.ndarray, "B T"],
    prompt_lens: Int[Array | np.ndarray, "B"] | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK,
    implementation: str | None = None,
) -> tuple[Float32[Array, "B V"], PagedState]:
    """Computes the prompts into an empty cache: the logits after the last token of each, and the cache.

    `prompt_ids` is padded on the right with anything; `prompt_lens`, 1 to T each, says how much of it is real (None:
    all). The real tokens go through the model one behind the other, `chunk_size` at a time, so padding costs nothing.
    `implementation` is that of `paged_attention`. Raises ValueError for shapes that are not the cache's.
    """
    layout = state.layout
    if state.block_tables.shape[1] != layout.num_prompts:
        raise ValueError(f"state: expected one before fork, with {layout.num_prompts} rows, got {_rows_of(state)}")
    checks.prompts(prompt_ids, prompt_lens, layout)
    chunk = max(min(checks.count("chunk_size", chunk_size), prompt_ids.size), layout.min_tokens)
    token_ids = jnp.asarray(prompt_ids, jnp.int32)
    full = jnp.full(layout.num_prompts, layout.prompt_len, jnp.int32)
    lens = full if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)
    ends = jnp.cumsum(lens, dtype=jnp.int32)
    starts, total = ends - lens, ends[-1]

    def compute_chunk(index: Int32[Array, ""], carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        last_hidden, kv_cache = carry
        first = index * chunk
        token = first + jnp.arange(chunk, dtype=jnp.int32)
        is_real = token < total
        row = jnp.minimum(jnp.searchsorted(ends, token, side="right"), layout.num_prompts - 1)
        position = jnp.where(is_real, token - starts[row], 0)
        batch = _model_input(
            token_ids=token_ids[row, position],
            positions=position,
            slots=_slots_of(state.block_tables[:, row, position // layout.block_size], position, is_real, layout),
            block_tables=state.block_tables,
            context_lens=jnp.clip(first + chunk - starts, 0, lens),
            query_start_loc=jnp.clip(jnp.append(starts, total) - first, 0, chunk),
            max_query_len=chunk,
        )
        hidden, kv_cache = paged_step(model.config, params, batch, kv_cache, implementation=implementation)
        last = ends - 1 - first
        is_here = (last >= 0) & (last < chunk)
        return jnp.where(is_here[:, None], hidden[jnp.clip(last, 0, chunk - 1)], last_hidden), kv_cache

    implementation = implementation_for(implementation, layout.batch_invariant)
    dtype = jax.eval_shape(lambda: _embed_one(model, params)).dtype
    last_hidden = jnp.zeros((layout.num_prompts, model.config.hidden_size), dtype)
    num_chunks = -(-total // chunk)
    last_hidden, kv_cache = lax.fori_loop(0, num_chunks, compute_chunk, (last_hidden, state.kv_cache))
    logits = _read_out(model, params, last_hidden, layout)
    return logits, replace(state, kv_cache=kv_cache, context_lens=lens)


def fork(state: PagedState) -> PagedState:
    """From rows of prompts to rows of samples, B x N: row b * N + n is sample n of prompt b.

    The samples of a prompt share its full blocks, and each gets a copy of the last one if that is not full. With one
    sample there is nothing to do.
    """
    layout = state.layout
    if state.block_tables.shape[1] != layout.num_prompts:
        raise ValueError(f"state: expected one before fork, with {layout.num_prompts} rows, got {_rows_of(state)}")
    if layout.num_samples == 1:
        return state
    tables = jnp.repeat(state.block_tables, layout.num_samples, axis=1)
    lens = jnp.repeat(state.context_lens, layout.num_samples)
    shared_lens = state.context_lens // layout.block_size * layout.block_size
    if layout.sample_blocks == 0:
        return replace(state, block_tables=tables, context_lens=lens, shared_lens=shared_lens)
    own, num_shared = layout.own_blocks(), lens // layout.block_size
    index = jnp.arange(layout.table_len, dtype=jnp.int32)[None, :] - num_shared[:, None]
    from_own = jnp.take_along_axis(own, jnp.clip(index, 0, layout.sample_blocks - 1)[None], axis=2)
    from_own = jnp.where(index < layout.sample_blocks, from_own, 0)
    forked = jnp.where(index[None] < 0, tables, from_own)
    # Without this copy the samples of a prompt would write over each other behind its last token.
    partial = jnp.minimum(num_shared, layout.table_len - 1)[None, :, None]
    source = jnp.take_along_axis(tables, partial, axis=2)[..., 0].reshape(-1)
    is_copied = jnp.tile(lens % layout.block_size > 0, layout.num_groups)
    target = jnp.where(is_copied, own[:, :, 0].reshape(-1), 0)
    kv_cache = copy_cache_blocks(len(source), state.kv_cache, source, target, 1)
    return replace(state, kv_cache=kv_cache, block_tables=forked, context_lens=lens, shared_lens=shared_lens)


def decode_step(
    model: CausalLM,
    params: Params,
    state: PagedState,
    token_ids: Int[Array | np.ndarray, "R"],
    is_active: Bool[Array | np.ndarray, "R"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float32[Array, "R V"], PagedState]:
    """Appends one token to each row: the logits after it, and the cache with its KV.

    Rows that are not active write nothing, and their logits mean nothing. A row without room for its token, one step
    more than `max_new_tokens` - 1, gets NaN: a loop that goes too far must not go unnoticed.
    """
    layout, num_rows = state.layout, _rows_of(state)
    implementation = implementation_for(implementation, layout.batch_invariant)
    if np.shape(token_ids) != (num_rows,):
        raise ValueError(f"token_ids: expected one for each of the {num_rows} rows, got shape {np.shape(token_ids)}")
    position = state.context_lens
    active = jnp.ones(num_rows, jnp.bool_) if is_active is None else jnp.asarray(is_active)
    index = jnp.broadcast_to((position // layout.block_size)[None, :, None], (layout.num_groups, num_rows, 1))
    blocks = jnp.take_along_axis(state.block_tables, index, axis=2, mode="fill", fill_value=0)[..., 0]
    has_room = jnp.all(blocks > 0, axis=0)
    writes = active & has_room
    more = writes.astype(jnp.int32)
    context_lens = position + more
    batch = _model_input(
        token_ids=layout.filled_up(jnp.asarray(token_ids, jnp.int32)),
        positions=layout.filled_up(jnp.where(writes, position, 0)),
        slots=layout.filled_up(_slots_of(blocks, position, writes, layout), axis=1),
        block_tables=state.block_tables,
        # A row that waits attends to what it has, but for a token: any other length would do as well.
        context_lens=jnp.maximum(context_lens, 1),
        query_start_loc=jnp.arange(num_rows + 1, dtype=jnp.int32),
        max_query_len=1,
        shared_lens=state.shared_lens,
    )
    hidden, kv_cache = paged_step(model.config, params, batch, state.kv_cache, implementation=implementation)
    logits = read_out(model.config, head_params(params), hidden)[:num_rows]
    logits = jnp.where((active & ~has_room)[:, None], jnp.nan, logits)
    return logits, replace(state, kv_cache=kv_cache, context_lens=context_lens)


def _rows_of(state: PagedState) -> int:
    return state.block_tables.shape[1]


def _read_out(model: CausalLM, params: Params, hidden: Float[Array, "R D"], layout: Layout) -> Float32[Array, "R V"]:
    return read_out(model.config, head_params(params), layout.filled_up(hidden))[: len(hidden)]


def _embed_one(model: CausalLM, params: Params) -> Any:
    one = jnp.zeros(1, jnp.int32)
    return model.apply({"params": embed_params(params)}, one, one, method="embed")


def _slots_of(
    blocks: Int32[Array, "G T"], position: Int32[Array, "T"], is_written: Bool[Array, "T"], layout: Layout
) -> Int32[Array, "G T"]:
    """Slot 0, which is written nowhere, for those that are not to be written."""
    offset = position % layout.block_size
    return jnp.where(is_written[None, :], blocks * layout.block_size + offset[None, :], 0)


def _model_input(
    *,
    token_ids: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    slots: Int32[Array, "G T"],
    block_tables: Int32[Array, "G R W"],
    context_lens: Int32[Array, "R"],
    query_start_loc: Int32[Array, "R+1"],
    max_query_len: int,
    shared_lens: Int32[Array, "B"] | None = None,
) -> ModelInput:
    """A step of which every hidden state is read: what says who samples is left empty."""
    groups = tuple(
        AttentionMetadata(slots[group], block_tables[group], context_lens, query_start_loc, max_query_len, shared_lens)
        for group in range(len(slots))
    )
    nobody = SamplingInput(*[jnp.zeros(0, jnp.float32)] * 4, *[jnp.zeros(0, jnp.uint32)] * 3)
    return ModelInput(token_ids, positions, groups, jnp.zeros(0, jnp.int32), jnp.int32(0), nobody)
