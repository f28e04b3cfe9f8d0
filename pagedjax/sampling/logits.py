"""What is done to logits before a token is drawn: biases, penalties, masks. Pure functions of whole batches.

A row's result depends on that row's entries alone. Tables of entries have a fixed length; entries of a row beyond the
last are padding, and dropped.
"""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pagedjax.model_input import SamplingInput
from pagedjax.sampling.sampler import candidates, is_filtered, scaled


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """What the rows' requests have seen and said so far."""

    output_counts: Int32[Array, "S V"]
    """How often each token is among the outputs."""
    is_seen: Bool[Array, "S V"]
    """Whether it is in the prompt or among the outputs."""


def add_bias(
    logits: Float32[Array, "S V"], row: Int32[Array, "n"], token: Int32[Array, "n"], value: Float32[Array, "n"]
) -> Float32[Array, "S V"]:
    """Adds n values, each to one logit; those of the same logit add up."""
    return logits.at[row, token].add(value, mode="drop")


def no_counts(logits: Float32[Array, "S V"]) -> TokenCounts:
    """The counts of rows of this shape before any token."""
    return TokenCounts(output_counts=jnp.zeros(logits.shape, jnp.int32), is_seen=jnp.zeros(logits.shape, jnp.bool_))


def count_tokens(
    counts: TokenCounts, row: Int32[Array, "n"], token: Int32[Array, "n"], is_output: Bool[Array, "n"]
) -> TokenCounts:
    """Counts n more tokens, so that a long history comes in pieces of one length."""
    return TokenCounts(
        output_counts=counts.output_counts.at[row, token].add(is_output.astype(jnp.int32), mode="drop"),
        is_seen=counts.is_seen.at[row, token].set(True, mode="drop"),
    )


def penalise(
    logits: Float32[Array, "S V"],
    counts: TokenCounts,
    presence: Float32[Array, "S"],
    frequency: Float32[Array, "S"],
    repetition: Float32[Array, "S"],
) -> Float32[Array, "S V"]:
    """Repetition first, once per token of prompt and outputs; then presence and frequency, of outputs alone.

    0, 0 and 1 change no bit of a row.
    """
    factor = repetition[:, None]
    logits = jnp.where(counts.is_seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - frequency[:, None] * counts.output_counts.astype(jnp.float32)
    return logits - presence[:, None] * (counts.output_counts > 0).astype(jnp.float32)


def keep_allowed(logits: Float32[Array, "S V"], bits: UInt32[Array, "S W"]) -> Float32[Array, "S V"]:
    """-inf for token i where bit i % 32 of word i // 32 is 0. A row that this would leave without a finite logit stays
    as it was: something has to be drawn."""
    num_rows, vocab_size = logits.shape
    is_allowed = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    is_allowed = is_allowed.reshape(num_rows, -1)[:, :vocab_size] == 1
    is_possible = jnp.any(is_allowed & jnp.isfinite(logits), axis=-1, keepdims=True)
    return jnp.where(is_allowed | ~is_possible, logits, -jnp.inf)


def processed_logits(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Float32[Array, "S V"]:
    """The logits that a row is drawn from: over its temperature, -inf for what its filters leave out, the largest 0.

    Greedy rows come without temperature and filters, as in vLLM. top_p = 0 leaves the most likely tokens.
    """
    temperature = jnp.asarray(sampling.temperature)
    is_greedy = temperature < jnp.finfo(jnp.float32).tiny
    processed = scaled(logits, jnp.where(is_greedy, 1, temperature))
    needs_filter = ~is_greedy & is_filtered(sampling)

    def filtered() -> Float32[Array, "S V"]:
        is_kept = candidates(logits, jnp.exp(processed), sampling) | ~needs_filter[:, None]
        return jnp.where(is_kept, processed, -jnp.inf)

    return lax.cond(jnp.any(needs_filter), filtered, lambda: processed)
