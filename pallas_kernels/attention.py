"""The paged attention op: one typed function, dispatched to an implementation by name."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pagedjax.pallas_kernels import xla
from pagedjax.pallas_kernels.metadata import AttentionMetadata

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {"xla": xla.paged_attention}
"""An implementation raises NotImplementedError, and says why, for what it cannot do."""


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request's new tokens over its context in the pool (arXiv 2309.06180, section 4.1).

    The KV of this step's tokens must be in the pool already (`write_kv`).

    Args:
      q: queries of T tokens, H heads, rotary embedding applied. H is a multiple of the pool's K heads.
      k_pool, v_pool: N blocks of bs slots, the slots of one head together. Slots that no context covers may hold
        anything, NaN included.
      meta: who owns which token, and where each context lies.
      scale: multiplies the scores, usually head_dim**-0.5.
      implementation: a name from `IMPLEMENTATIONS`; None picks one that works here.

    Returns:
      One row per token in q's dtype; zeros for padding tokens. Softmax and sums are in f32.

    Raises:
      NotImplementedError: the named implementation does not exist or cannot do this.
    """
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise NotImplementedError(f"no paged attention named {name!r}: there is {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](q, k_pool, v_pool, meta, scale=scale)
