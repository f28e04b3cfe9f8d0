"""The Llama family (arXiv 2302.13971) in flax.linen: LLaMA, Qwen2 (q, k, v biases), Qwen3 (q/k norms), SmolLM2.

One module, two ways to run it on the same params: densely, for training and as the oracle, and over paged KV blocks.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pagedjax.kv_cache import KVCache
from pagedjax.model_input import ModelInput
from pagedjax.models.config import ModelConfig
from pagedjax.models.rope import RopeConfig
from pagedjax.pallas_kernels.attention import paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.pallas_kernels.pool_ops import write_kv

Params = dict[str, Any]
LayerKV = tuple[Array, Array]
_f32_dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
Rope = tuple[Float32[Array, "*B T 1 d"], Float32[Array, "*B T 1 d"]]


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), in f32; rounded to the input's dtype before the scale, as trained."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype)
        return normed * jnp.expand_dims(scale, range(x.ndim - 1))


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


class Attention(nn.Module):
    """Grouped-query attention; with a layer's KV pool over paged blocks, without one densely and causally."""

    config: ModelConfig
    implementation: str | None = None
    """Of the attention over paged blocks: see `paged_attention`."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "*B T D"], rope: Rope, meta: AttentionMetadata | None = None, kv: LayerKV | None = None
    ) -> tuple[Float[Array, "*B T D"], LayerKV | None]:
        config = self.config

        def heads(name: str, num_heads: int) -> Float[Array, "*B T H d"]:
            flat = nn.Dense(num_heads * config.head_dim, use_bias=config.attention_bias, name=name)(x)
            return flat.reshape(*x.shape[:-1], num_heads, config.head_dim)

        q = heads("q_proj", config.num_heads)
        k = heads("k_proj", config.num_kv_heads)
        v = heads("v_proj", config.num_kv_heads)
        if config.qk_norm:
            q = RMSNorm(config.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(config.rms_norm_eps, name="k_norm")(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)

        scale = config.head_dim**-0.5
        if kv is None or meta is None:
            with jax.numpy_dtype_promotion("standard"):  # inside, JAX mixes bfloat16 and float32
                out = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)
        else:
            kv = write_kv(*kv, k, v, meta.slot_mapping)
            out = paged_attention(q, *kv, meta, scale=scale, implementation=self.implementation)
        out = out.reshape(*x.shape[:-1], config.num_heads * config.head_dim)
        return nn.Dense(config.hidden_size, use_bias=config.attention_out_bias, name="o_proj")(out), kv


class MLP(nn.Module):
    """Gated feed-forward network, SwiGLU (arXiv 2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        def dense(name: str, num_features: int) -> nn.Dense:
            return nn.Dense(num_features, use_bias=self.config.mlp_bias, name=name)

        gate = dense("gate_proj", self.config.intermediate_size)(x)
        up = dense("up_proj", self.config.intermediate_size)(x)
        return dense("down_proj", self.config.hidden_size)(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around the residual stream."""

    config: ModelConfig
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*B T D"], rope: Rope, meta: AttentionMetadata | None = None, kv: LayerKV | None = None
    ) -> tuple[Float[Array, "*B T D"], LayerKV | None]:
        normed = RMSNorm(self.config.rms_norm_eps, name="input_layernorm")(x)
        attended, kv = Attention(self.config, self.implementation, name="self_attn")(normed, rope, meta, kv)
        x = x + attended
        normed = RMSNorm(self.config.rms_norm_eps, name="post_attention_layernorm")(x)
        return x + MLP(self.config, name="mlp")(normed), kv


@partial(jax.jit, static_argnums=0)
def _embed(config: ModelConfig, params: Params, batch: ModelInput) -> tuple[Float[Array, "T D"], Rope]:
    embedding = params["embed_tokens"]["embedding"]
    hidden = embedding.at[batch.token_ids].get(mode="clip")
    return hidden, rope_tables(config.rope, config.head_dim, batch.positions)


@partial(jax.jit, static_argnums=(0, 1), donate_argnames="kv")
def _paged_layer(
    config: ModelConfig,
    implementation: str | None,
    params: Params,
    x: Float[Array, "T D"],
    rope: Rope,
    meta: AttentionMetadata,
    kv: LayerKV,
) -> tuple[Float[Array, "T D"], LayerKV]:
    result: Any = DecoderLayer(config, implementation, parent=None).apply({"params": params}, x, rope, meta, kv)
    return result


def paged_step(
    config: ModelConfig,
    params: Params,
    batch: ModelInput,
    kv_cache: KVCache,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], KVCache]:
    """One step over paged blocks: the hidden states that `CausalLM.logits` reads out, and the pool with the
    step's KV written. DONATES the pool. `implementation` is that of `paged_attention`.

    It may be called inside a jit, which makes one program of it, or as it is: then each part is a program of its own,
    and all layers share one, which compiles as many times faster as the model has layers.
    """
    x, rope = _embed(config, {"embed_tokens": params["embed_tokens"]}, batch)
    layers = []
    for i, kv in enumerate(zip(kv_cache.k, kv_cache.v, strict=True)):
        x, kv = _paged_layer(config, implementation, params[f"layers_{i}"], x, rope, batch.attn, kv)
        layers.append(kv)
    keys, values = zip(*layers, strict=True)
    return x, KVCache(keys, values)


def read_out(config: ModelConfig, params: Params, hidden: Float[Array, "S D"]) -> Float32[Array, "S V"]:
    """Logits of hidden states that `paged_step` gave."""
    logits: Any = CausalLM(config).apply({"params": params}, hidden, method="logits")
    return logits


class CausalLM(nn.Module):
    """A Llama-family language model; everything runs in the dtype of its params, logits in f32.

    `model.apply({"params": params}, token_ids)` gives the logits of whole sequences, for training; `method="step"`
    runs one step over paged blocks, and `method="logits"` reads its hidden states out.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Dense(config.vocab_size, use_bias=False, dot_general=_f32_dot)

    def __call__(self, token_ids: Int32[Array, "B T"]) -> Float32[Array, "B T V"]:
        """Logits of every position, causal attention without a cache."""
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None, :], token_ids.shape)
        rope = rope_tables(self.config.rope, self.config.head_dim, positions)
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x, _ = layer(x, rope)
        return self.logits(x)

    def step(self, batch: ModelInput, kv_cache: KVCache) -> tuple[Float[Array, "T D"], KVCache]:
        """See `paged_step`."""
        return paged_step(self.config, dict(self.variables["params"]), batch, kv_cache)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Reads hidden states out: the last norm and the head, which may be the embedding."""
        hidden = self.norm(hidden)
        if not self.config.tie_word_embeddings:
            return self.lm_head(hidden)
        return _f32_dot(hidden, self.embed_tokens.embedding, (((hidden.ndim - 1,), (1,)), ((), ())))
