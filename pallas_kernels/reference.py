"""Paged attention the obvious way: gather everything, one dense softmax in f32. The oracle for every implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pagedjax.pallas_kernels.metadata import AttentionMetadata


def paged_attention(
    q: Float[Array, "T H D"],
    k_pool: Float[Array, "N K bs D"],
    v_pool: Float[Array, "N K bs D"],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`. In f32 throughout, the result too.

    Memory grows as T x B x block_size: for tests only.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    token = jnp.arange(num_tokens)
    start = meta.query_start_loc
    row = jnp.clip(jnp.searchsorted(start, token, side="right") - 1, 0, len(meta.context_lens) - 1)
    position = meta.context_lens[row] - start[row + 1] + token

    blocks = meta.block_tables[row]
    k, v = (  # [T, B, K, bs, D] -> [T, B bs, K, D]
        pool[blocks].swapaxes(2, 3).reshape(num_tokens, -1, num_kv_heads, head_dim).astype(jnp.float32)
        for pool in (k_pool, v_pool)
    )
    visible = (jnp.arange(k.shape[1])[None, :] <= position[:, None]) & (token < start[-1])[:, None]
    if sliding_window is not None:
        visible &= jnp.arange(k.shape[1])[None, :] > position[:, None] - sliding_window
    # A slot that a token does not see may hold NaN, and 0 * NaN = NaN: its rows are cleared, not only its scores.
    k = jnp.where(visible[:, :, None, None], k, 0)
    v = jnp.where(visible[:, :, None, None], v, 0)

    q = q.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,tckd->tkgc", q, k, precision=highest) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    visible = visible[:, None, None, :]
    peak = jnp.max(scores, axis=-1, keepdims=True, where=visible, initial=-1e30)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)  # a padding token sees nothing: zeros, not NaN
    out = jnp.einsum("tkgc,tckd->tkgd", weights, v, precision=highest)
    return out.reshape(num_tokens, num_heads, head_dim)
