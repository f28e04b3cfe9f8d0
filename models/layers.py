"""The parts of a decoder in flax.linen, configured by its ModelConfig: norms, products, rope, attention, MLP, layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pagedjax.models.config import LayerKind, ModelConfig
from pagedjax.models.quantization import int8_dot, is_quantized, look_up
from pagedjax.models.rope import RopeConfig
from pagedjax.pallas_kernels.attention import paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.pallas_kernels.pool_ops import write_kv

LayerKV = tuple[Array, Array]
Rope = tuple[Float32[Array, "*B T 1 d"], Float32[Array, "*B T 1 d"]]

ACTIVATIONS = {
    "silu": nn.silu,
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_tanh": partial(nn.gelu, approximate=True),
}


EMBEDDING_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Linear(nn.Module):
    """x W + b. Every dense product with parameters of the model is one of these, but for a tied head.

    A kernel in int8, with its scales beside it, takes the place of a float one: see `quantization`.
    """

    num_features: int
    use_bias: bool = False
    out_dtype: Any = None
    """Of the sums and of the result; None: that of input and kernel."""

    @nn.compact
    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.num_features))
        if is_quantized(kernel):
            y = int8_dot(x, kernel, self.get_variable("params", "scale"), out_dtype=self.out_dtype)
        else:
            contracted = (((x.ndim - 1,), (0,)), ((), ()))
            y = lax.dot_general(x, kernel, contracted, preferred_element_type=self.out_dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.num_features,))
            y = y + jnp.expand_dims(bias.astype(y.dtype), range(y.ndim - 1))
        return y


class Embedding(nn.Module):
    """A table with a row for each token, which may be the head as well. It may be in int8 with a scale for each row."""

    num_rows: int
    width: int

    def setup(self) -> None:
        self.embedding = self.param("embedding", EMBEDDING_INIT, (self.num_rows, self.width))

    def __call__(self, token_ids: Int32[Array | np.ndarray, "*B"]) -> Float[Array, "*B D"]:
        """The rows of these tokens."""
        if is_quantized(self.embedding):
            return look_up(self.embedding, self.get_variable("params", "scale"), token_ids)
        return self.embedding.at[token_ids].get(mode="clip")

    def read_out(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """The product with every row: the logits of a tied model."""
        if is_quantized(self.embedding):
            scale = self.get_variable("params", "scale")
            return int8_dot(hidden, self.embedding, scale, axis=1, out_dtype=jnp.float32)
        contracted = (((hidden.ndim - 1,), (1,)), ((), ()))
        return lax.dot_general(hidden, self.embedding, contracted, preferred_element_type=jnp.float32)


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), in f32.

    Rounded to the input's dtype before the scale, as LLaMA was trained; with `offset` 1 + scale multiplies, and the
    product is rounded, as Gemma was.
    """

    epsilon: float
    offset: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = jnp.expand_dims(self.param("scale", init, (x.shape[-1],)), range(x.ndim - 1))
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        if self.offset:
            return (normed * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * scale


class LayerNorm(nn.Module):
    """Layer norm with a bias (arXiv 1607.06450), in f32 and rounded once."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        axes = range(x.ndim - 1)
        scale = jnp.expand_dims(self.param("scale", nn.initializers.ones, (x.shape[-1],)), axes)
        bias = jnp.expand_dims(self.param("bias", nn.initializers.zeros, (x.shape[-1],)), axes)
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centered * lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def make_norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    """The norm of a model's residual stream."""
    if config.norm == "layer":
        return LayerNorm(config.norm_eps, name=name)
    return RMSNorm(config.norm_eps, config.norm_offset, name=name)


def rope_tables(rope: RopeConfig, head_dim: int, positions: Int32[Array | np.ndarray, "*B T"]) -> Rope:
    """cos and sin of every position's angles times `attention_factor`, d = rotary_dim / 2, with an axis for the heads.
    Always in f32; computed from the positions, so that they are as long as any context."""
    inv_freq = jnp.asarray(rope.inv_freq(head_dim))
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(inv_freq, range(positions.ndim))
    scale = rope.attention_factor
    return jnp.cos(angles)[..., None, :] * scale, jnp.sin(angles)[..., None, :] * scale


def apply_rope(x: Float[Array, "*B T H D"], rope: Rope) -> Float[Array, "*B T H D"]:
    """Rotary position embedding (arXiv 2104.09864) of the first 2 d dimensions; pairs i with i + d, as HF does."""
    cos, sin = rope
    num_pairs = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [num_pairs, 2 * num_pairs], axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def soft_cap(x: Float32[Array, "..."], cap: float | None) -> Float32[Array, "..."]:
    """cap * tanh(x / cap) (arXiv 2408.00118); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dense_attention(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B T K D"],
    v: Float[Array, "*B T K D"],
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Float[Array, "*B T H D"]:
    """Causal attention of whole sequences, differentiable: the obvious formula, softmax and sums in f32.

    `window` and `cap` are those of `paged_attention`.
    """
    *_, T, H, D = q.shape
    grouped = q.reshape(*k.shape[:-1], H // k.shape[-2], D)
    scores = jnp.einsum("...tkgd,...skd->...kgts", grouped, k, preferred_element_type=jnp.float32)
    scores = soft_cap(scores * scale, cap)
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    visible = (distance >= 0) & (distance < (T if window is None else window))
    scores = jnp.where(jnp.expand_dims(visible, range(scores.ndim - 2)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("...kgts,...skd->...tkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


class Attention(nn.Module):
    """Grouped-query attention; with a layer's KV pool over paged blocks, without one causal over whole sequences."""

    config: ModelConfig
    kind: LayerKind
    implementation: str | None = None
    """Of the attention over paged blocks: see `paged_attention`."""
    attend: Callable[..., Any] = dense_attention
    """The attention of whole sequences."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        rope: Rope | None,
        meta: AttentionMetadata | None = None,
        kv: LayerKV | None = None,
    ) -> tuple[Float[Array, "*B T D"], LayerKV | None]:
        config, (window, scale) = self.config, self.kind

        def heads(name: str, num_heads: int) -> Float[Array, "*B T H d"]:
            flat = Linear(num_heads * config.head_dim, config.attention_bias, name=name)(x)
            return flat.reshape(*x.shape[:-1], num_heads, config.head_dim)

        q = heads("q_proj", config.num_heads)
        k = heads("k_proj", config.num_kv_heads)
        v = heads("v_proj", config.num_kv_heads)
        if config.qk_norm:
            q = RMSNorm(config.norm_eps, config.norm_offset, name="q_norm")(q)
            k = RMSNorm(config.norm_eps, config.norm_offset, name="k_norm")(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)

        cap = config.attention_soft_cap
        if kv is None or meta is None:
            out = self.attend(q, k, v, scale=scale, window=window, cap=cap)
        else:
            kv = write_kv(*kv, k, v, meta.slot_mapping)
            options = {"scale": scale, "sliding_window": window, "logits_soft_cap": cap}
            out = paged_attention(q, *kv, meta, **options, implementation=self.implementation)
        out = out.reshape(*x.shape[:-1], config.num_heads * config.head_dim)
        return Linear(config.hidden_size, config.attention_out_bias, name="o_proj")(out), kv


class MLP(nn.Module):
    """Feed-forward network, gated (arXiv 2002.05202) or not."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        config, activate = self.config, ACTIVATIONS[self.config.activation]
        hidden = Linear(config.intermediate_size, config.mlp_bias, name="up_proj")(x)
        if config.gated_mlp:
            hidden = activate(Linear(config.intermediate_size, config.mlp_bias, name="gate_proj")(x)) * hidden
        else:
            hidden = activate(hidden)
        return Linear(config.hidden_size, config.mlp_bias, name="down_proj")(hidden)


class DecoderLayer(nn.Module):
    """Attention and MLP around the residual stream, with norms where the config places them."""

    config: ModelConfig
    kind: LayerKind
    implementation: str | None = None
    attend: Callable[..., Any] = dense_attention

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        rope: Rope | None,
        meta: AttentionMetadata | None = None,
        kv: LayerKV | None = None,
    ) -> tuple[Float[Array, "*B T D"], LayerKV | None]:
        config = self.config
        norms: Any = [make_norm(config, name) for name in config.layer_norms]
        attention: Any = Attention(config, self.kind, self.implementation, self.attend, name="self_attn")
        mlp: Any = MLP(config, name="mlp")
        if config.norm_placement == "post":
            after_attention, after_mlp = norms
            attended, kv = attention(x, rope, meta, kv)
            x = after_attention(x + attended)
            return after_mlp(x + mlp(x)), kv
        if config.norm_placement == "both":
            before_attention, after_attention, before_mlp, after_mlp = norms
            attended, kv = attention(before_attention(x), rope, meta, kv)
            x = x + after_attention(attended)
            return x + after_mlp(mlp(before_mlp(x))), kv
        before_attention, before_mlp = norms
        attended, kv = attention(before_attention(x), rope, meta, kv)
        x = x + attended
        return x + mlp(before_mlp(x)), kv
