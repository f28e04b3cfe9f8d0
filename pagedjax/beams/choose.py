"""The best continuations of a step's beams on the device: a group of beams for each request, all groups at once."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The C best continuations of each group, best first."""

    scores: Float32[Array, "G C"]
    """Log-probability of the beam with the token; -inf is padding."""
    beams: Int32[Array, "G C"]
    """Places in the group, 0 to W - 1."""
    tokens: Int32[Array, "G C"]


def choose_candidates(
    top_logprobs: Float32[Array, "R K"],
    top_ids: Int32[Array, "R K"],
    rows: Int32[Array, "G W"],
    scores: Float32[Array, "G W"],
    num_candidates: int,
) -> Candidates:
    """The best of each group's beams x tokens, of equal ones the lower beam first, then its more likely token.

    Beam w of group g has the K most likely tokens of row rows[g, w], most likely first, and the log-probability
    scores[g, w] so far: -inf for padding, whose row is any. With K >= num_candidates, or the whole vocabulary, this is
    the exact top over beams x vocabulary, as no beam has more among the best than there are. `num_candidates`, at most
    W * K, is static.
    """
    num_groups, num_tokens = len(rows), top_ids.shape[1]
    beam_scores = scores[:, :, None]
    # Not the sum for padding: the row of another, or of nobody, may have NaN.
    totals = jnp.where(beam_scores == -jnp.inf, -jnp.inf, beam_scores + top_logprobs[rows])
    best, index = lax.top_k(totals.reshape(num_groups, -1), num_candidates)
    beams, ranks = index // num_tokens, index % num_tokens
    return Candidates(scores=best, beams=beams, tokens=top_ids[jnp.take_along_axis(rows, beams, axis=1), ranks])
