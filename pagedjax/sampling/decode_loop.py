"""Several decodes of a batch without the host in between: tokens are sampled, fed back, and rows stopped on the device.

Host part: `build_decode_rows`. Device part: `next_decode` and what loops over it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from pagedjax.kv_cache import KVCache
from pagedjax.model_input import ModelInput
from pagedjax.pallas_kernels.metadata import AttentionMetadata

MAX_STOP_IDS = 8
"""Token ids per row that stop it on the device. A row with more of them goes on for nothing: the host looks at all."""


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeRows:
    """When each row of a batch of decodes ends."""

    num_decodes: Int32[Array | np.ndarray, "S"]
    """Tokens that it may get; 0 for padding."""
    stop_ids: Int32[Array | np.ndarray, "S E"]
    """Tokens after which it gets no more; -1 for padding."""


def build_decode_rows(num_decodes: Sequence[int], stop_ids: Sequence[frozenset[int]], num_rows: int) -> DecodeRows:
    """The rows of a step, padded to `num_rows`."""
    ids = np.full((num_rows, MAX_STOP_IDS), -1, np.int32)
    for row, stops in enumerate(stop_ids):
        first = sorted(stops)[:MAX_STOP_IDS]
        ids[row, : len(first)] = first
    counts = np.zeros(num_rows, np.int32)
    counts[: len(num_decodes)] = num_decodes
    return DecodeRows(counts, ids)


@jax.jit
def feed_tokens(token_ids: Int32[Array, "T"], last_tokens: Int32[Array, "R"]) -> Int32[Array, "T"]:
    """Puts the last tokens of the step before in the places of their placeholders: -1 - i stands for row i's."""
    return jnp.where(token_ids < 0, last_tokens[jnp.clip(-1 - token_ids, 0, len(last_tokens) - 1)], token_ids)


@partial(jax.jit, static_argnums=1)
def pad_tokens(tokens: Int32[Array, "S"], num_rows: int) -> Int32[Array, "R"]:
    """Tokens in a shape that does not depend on the batch, for `feed_tokens`."""
    return jnp.pad(tokens, (0, num_rows - len(tokens)))


@partial(jax.jit, static_argnums=4)
def next_decode(
    batch: ModelInput, tokens: Int32[Array, "S"], rows: DecodeRows, step: int | Int32[Array, ""], block_size: int
) -> tuple[ModelInput, Bool[Array, "S"]]:
    """The batch after its decode number `step`, which sampled `tokens`, and which of its rows go on.

    The others keep their last token and write it nowhere: into the null block.
    """
    is_stop = (tokens[:, None] == rows.stop_ids).any(axis=1)
    is_running = jnp.asarray(batch.attn.slot_mapping) > 0
    goes_on = is_running & ~is_stop & (step + 1 < rows.num_decodes)
    more = goes_on.astype(jnp.int32)
    positions = batch.positions + more

    def moved(attn: AttentionMetadata) -> AttentionMetadata:
        blocks = jnp.take_along_axis(attn.block_tables, positions[:, None] // block_size, axis=1)[:, 0]
        slots = jnp.where(goes_on, blocks * block_size + positions % block_size, 0)
        return replace(attn, slot_mapping=slots, context_lens=attn.context_lens + more)

    groups = tuple(map(moved, batch.groups))
    sampling = replace(batch.sampling, num_outputs=batch.sampling.num_outputs + goes_on.astype(jnp.uint32))
    token_ids = jnp.where(is_running, tokens, batch.token_ids)
    return replace(batch, token_ids=token_ids, positions=positions, groups=groups, sampling=sampling), goes_on


Decode = Callable[[ModelInput, KVCache], tuple[Int32[Array, "S"], KVCache]]
"""One step: the tokens it samples, and the pool."""


def decode_in_turn(
    decode: Decode, batch: ModelInput, rows: DecodeRows, kv_cache: KVCache, num_steps: int
) -> tuple[list[Int32[Array, "S"]], ModelInput, KVCache]:
    """`num_steps` decodes as programs of their own, one behind the other: the tokens of each, and the last batch, whose
    token ids are the last ones of all rows. Nothing is waited for. DONATES the pool."""
    tokens = []
    for step in range(num_steps):
        sampled, kv_cache = decode(batch, kv_cache)
        tokens.append(sampled)
        batch, _ = next_decode(batch, sampled, rows, np.int32(step), kv_cache.k[0].shape[2])
    return tokens, batch, kv_cache


def decode_in_loop(
    decode: Decode, batch: ModelInput, rows: DecodeRows, kv_cache: KVCache, num_steps: int
) -> tuple[Int32[Array, "N S"], ModelInput, KVCache]:
    """The same as one loop, for a program of a whole step; it ends when no row goes on. DONATES the pool."""

    def is_going(state: tuple[Any, ...]) -> Bool[Array, ""]:
        step, goes_on = state[0], state[1]
        return (step < num_steps) & goes_on.any()

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, _, batch, tokens, kv_cache = state
        sampled, kv_cache = decode(batch, kv_cache)
        tokens = lax.dynamic_update_index_in_dim(tokens, sampled, step, 0)
        batch, goes_on = next_decode(batch, sampled, rows, step, kv_cache.k[0].shape[2])
        return step + 1, goes_on, batch, tokens, kv_cache

    tokens = jnp.zeros((num_steps, len(batch.logits_indices)), jnp.int32)
    start = (jnp.int32(0), rows.num_decodes > 0, jax.tree.map(jnp.asarray, batch), tokens, kv_cache)
    _, _, batch, tokens, kv_cache = lax.while_loop(is_going, turn, start)
    return tokens, batch, kv_cache
