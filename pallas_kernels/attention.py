"""The paged attention op: one typed function, dispatched to an implementation by name."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pagedjax.pallas_kernels import pallas_triton, xla, xla_invariant
from pagedjax.pallas_kernels.metadata import AttentionMetadata


class Implementation(NamedTuple):
    """One way to compute the op. Adding one is a file with these functions, and a line in `IMPLEMENTATIONS`."""

    attend: Callable[..., Float[Array, "T H D"]]
    """Called as `attend(q, k_pool, v_pool, meta, scale=..., sliding_window=..., logits_soft_cap=...)`."""
    why_not: Callable[..., str | None] = lambda q, k_pool: None
    """Called as `why_not(q, k_pool)`: the reason that it cannot attend with such arrays, or None."""


IMPLEMENTATIONS = {
    "xla": Implementation(xla.paged_attention),
    "pallas_triton": Implementation(pallas_triton.paged_attention, pallas_triton.why_not),
    "xla_invariant": Implementation(xla_invariant.paged_attention),
}
BATCH_INVARIANT = "xla_invariant"
"""The one that gives a query the same bits whatever else is computed with it, on a CPU."""
PREFERRED_ON_CUDA = ("pallas_triton", "xla")


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request's new tokens over its context in the pool (arXiv 2309.06180, section 4.1).

    The KV of this step's tokens must be in the pool already (`write_kv`). Not differentiable: train without a pool.

    Args:
      q: queries of T tokens, H heads, rotary embedding applied. H is a multiple of the pool's K heads.
      k_pool, v_pool: N blocks of bs slots, the slots of one head together. Slots that nobody sees may hold anything,
        NaN included; a value that is not finite may spread to other tokens of the request that sees it.
      meta: who owns which token, and where each context lies.
      scale: multiplies the scores, usually head_dim**-0.5.
      sliding_window: a token sees that many tokens, itself included, and not all before it (arXiv 2310.06825). Blocks
        wholly before the window are not read: a table may hold 0 there.
      logits_soft_cap: scores become cap * tanh(scores / cap) (Gemma 2, arXiv 2408.00118).
      implementation: a name from `IMPLEMENTATIONS`; None picks one that works where it is compiled for. On a CPU
        "pallas_triton" runs in Pallas' interpreter, which is for tests.

    Returns:
      One row per token in q's dtype; zeros for padding tokens. Softmax and sums are in f32.

    Raises:
      ValueError: an option out of its range, an unknown implementation, or shapes that do not belong together.
      NotImplementedError: the named implementation cannot do this.
    """
    _check_shapes(q, k_pool, v_pool)
    _check_options(scale, sliding_window, logits_soft_cap)
    max_context_len = meta.block_tables.shape[1] * k_pool.shape[2]
    if sliding_window is not None and sliding_window >= max_context_len:
        sliding_window = None  # it holds every context that there can be
    if len(q) == 0 or max_context_len == 0 or len(meta.context_lens) == 0:
        return jnp.zeros_like(q)
    # numpy's arrays cannot be indexed by traced ones, and under jax_enable_x64 they may have 64 bits.
    meta = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), meta)

    def attend(name: str) -> Callable[..., Float[Array, "T H D"]]:
        options = {"scale": float(scale), "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        return lambda *args: IMPLEMENTATIONS[name].attend(*args, **options)

    args = (q, k_pool, v_pool, meta)
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")
        if (reason := why_not(implementation, q, k_pool)) is not None:
            raise NotImplementedError(f"paged attention {implementation!r}: {reason}")
        return attend(implementation)(*args)
    if jax.default_backend() == "cpu":
        return attend("xla")(*args)
    # The computation may yet be compiled for the CPU of a GPU machine: only the lowering knows.
    on_cuda = next(name for name in PREFERRED_ON_CUDA if why_not(name, q, k_pool) is None)
    return lax.platform_dependent(*args, cuda=attend(on_cuda), default=attend("xla"))


def _check_shapes(q: Array, k_pool: Array, v_pool: Array) -> None:
    """Shapes are checked in the tests of this package alone, and a GPU would read beyond an array without a word."""
    if (k_pool.shape, k_pool.dtype) != (v_pool.shape, v_pool.dtype):
        pools = f"{k_pool.dtype}{k_pool.shape} and {v_pool.dtype}{v_pool.shape}"
        raise ValueError(f"k_pool and v_pool must have one shape and dtype, got {pools}")
    if q.ndim != 3 or k_pool.ndim != 4 or q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(
            f"q must be [T, H, D] and the pools [N, K, bs, D], H a multiple of K, got {q.shape} and {k_pool.shape}"
        )


def _check_options(scale: float, sliding_window: int | None, logits_soft_cap: float | None) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a finite number above 0, got {scale}")
    if sliding_window is not None and not (isinstance(sliding_window, int) and sliding_window >= 1):
        raise ValueError(f"sliding_window must be an int of at least 1 or None, got {sliding_window}")
    if logits_soft_cap is not None and not 0 < logits_soft_cap < math.inf:
        raise ValueError(f"logits_soft_cap must be a finite number above 0 or None, got {logits_soft_cap}")


def implementation_for(name: str | None, batch_invariant: bool) -> str | None:
    """The implementation to take if this one is asked for, or None. ValueError for one that is not batch-invariant."""
    if batch_invariant and name not in (None, BATCH_INVARIANT):
        raise ValueError(f"batch_invariant: expected False with the attention {name!r}: only {BATCH_INVARIANT!r} is so")
    return BATCH_INVARIANT if batch_invariant else name


def why_not(name: str, q: Any, k_pool: Any) -> str | None:
    """Why the named implementation cannot attend with such arrays (only shape and dtype count); None if it can."""
    if name not in IMPLEMENTATIONS:
        return f"there is none of this name, but {', '.join(IMPLEMENTATIONS)}"
    return IMPLEMENTATIONS[name].why_not(q, k_pool)
