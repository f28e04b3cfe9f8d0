"""Log-probabilities of chosen tokens and of the most likely ones."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pagedjax.sampling.sampler import GROUP, grouped


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Of one position per row: the token that was chosen, and the K most likely ones."""

    logprob: Float32[Array, "S"]
    rank: Int32[Array, "S"]
    """1 for the most likely token: one more than there are tokens with a larger logit."""
    top_ids: Int32[Array, "S K"]
    """Most likely first; of equal ones the lower id first."""
    top_logprobs: Float32[Array, "S K"]


def token_logprobs(logits: Float32[Array, "S V"], token_ids: Int32[Array, "S"], num_top: int) -> TokenLogprobs:
    """Log-softmax over the whole vocabulary, of each row's token and of its `num_top` most likely ones (0 to V).

    A row needs one finite logit. `num_top` is static: callers round it up to few sizes.
    """
    peak = logits.max(axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    # A sum of floats, as XLA:CPU does not vectorise counts; exact below 2**24.
    num_larger = jnp.sum(jnp.where(logits > chosen, jnp.float32(1), 0), axis=-1)
    top, top_ids = _top(logits, num_top)
    return TokenLogprobs(
        logprob=(chosen - peak - log_sum)[:, 0],
        rank=num_larger.astype(jnp.int32) + 1,
        top_ids=top_ids,
        top_logprobs=top - peak - log_sum,
    )


def _top(logits: Float32[Array, "S V"], num_top: int) -> tuple[Float32[Array, "S K"], Int32[Array, "S K"]]:
    """The largest logits of each row, descending, and where they are; of equal ones the first.

    They are in the `num_top` groups with the largest maxima: any other group's tokens have one before them in each of
    these. Few groups are searched in less time than the row.
    """
    groups = grouped(logits, -jnp.inf)
    if num_top == 0 or num_top * 4 > groups.shape[1]:
        top, top_ids = lax.top_k(logits, num_top)
        return top, top_ids
    _, best = lax.top_k(groups.max(axis=-1), num_top)
    best = jnp.sort(best, axis=-1)  # so that position in `tokens` is in the order of ids
    tokens = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(len(logits), -1)
    top, index = lax.top_k(tokens, num_top)
    return top, jnp.take_along_axis(best, index // GROUP, axis=-1) * GROUP + index % GROUP
