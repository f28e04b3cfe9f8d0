"""Attention of whole sequences with the sampler's own arithmetic: its kernel forward, the obvious formula backward."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pagedjax.models.layers import dense_attention
from pagedjax.pallas_kernels.attention import paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

Attend = Callable[..., Float[Array, "B T H D"]]
"""Called as `dense_attention`, which is one."""


@cache
def sampler_attention(block_size: int, implementation: str | None) -> Attend:
    """An attention that gives what `paged_attention` gives over blocks of this size. Differentiable."""

    def attend(
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
    ) -> Float[Array, "B T H D"]:
        dense = partial(dense_attention, scale=scale, window=window, cap=cap)
        options = {"scale": scale, "sliding_window": window, "logits_soft_cap": cap, "implementation": implementation}

        @jax.custom_vjp
        def over_blocks(q: Array, k: Array, v: Array) -> Array:
            meta = _metadata(k.shape[0], k.shape[1], block_size)
            k_pool, v_pool = _as_pool(k, block_size), _as_pool(v, block_size)
            return paged_attention(q.reshape(-1, *q.shape[2:]), k_pool, v_pool, meta, **options).reshape(q.shape)

        over_blocks.defvjp(
            lambda q, k, v: (over_blocks(q, k, v), (q, k, v)),
            lambda saved, cotangent: jax.vjp(dense, *saved)[1](cotangent),
        )
        return over_blocks(q, k, v)

    return attend


def _as_pool(x: Float[Array, "B T K D"], block_size: int) -> Float[Array, "N K bs D"]:
    """Each sequence in blocks of its own, one behind the other."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_size), (0, 0), (0, 0)))
    return padded.reshape(-1, block_size, *x.shape[2:]).swapaxes(1, 2)


def _metadata(num_rows: int, length: int, block_size: int) -> AttentionMetadata:
    row = jnp.arange(num_rows, dtype=jnp.int32)
    num_blocks = -(-length // block_size)
    return AttentionMetadata(
        slot_mapping=jnp.zeros(num_rows * length, jnp.int32),
        block_tables=row[:, None] * num_blocks + jnp.arange(num_blocks, dtype=jnp.int32)[None, :],
        context_lens=jnp.full(num_rows, length, jnp.int32),
        query_start_loc=jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        max_query_len=length,
    )
