"""The decoder of every family in flax.linen: what differs between models stands in their ModelConfig.

One module, two ways to run it on the same params: densely, for training and as the oracle, and over paged KV blocks.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pagedjax.kv_cache import KVCache
from pagedjax.model_input import ModelInput
from pagedjax.models.config import LayerKind, ModelConfig
from pagedjax.models.layers import DecoderLayer, Embedding, LayerKV, Linear, Rope, make_norm, rope_tables, soft_cap
from pagedjax.pallas_kernels.metadata import AttentionMetadata

Params = dict[str, Any]
Ropes = tuple[Rope, ...]
"""Of all layers, or of those without a window and of those with one; none where positions are learned."""
EMBED = ("embed_tokens", "embed_positions", "project_in")
"""The params, as far as a model has them, that come before the layers."""
HEAD = ("embed_tokens", "norm", "project_out", "lm_head")
"""Those that `read_out` needs."""


def embed_params(params: Params) -> Params:
    """The params that come before the layers."""
    return {name: params[name] for name in EMBED if name in params}


def head_params(params: Params) -> Params:
    """The params that `read_out` needs."""
    return {name: params[name] for name in HEAD if name in params}


def position_tables(config: ModelConfig, positions: Int32[Array | np.ndarray, "*B T"]) -> Ropes:
    """The rope tables of a model at these positions."""
    if config.position_embedding != "rope":
        return ()
    ropes = (config.rope, config.local_rope)
    return tuple(rope_tables(rope, config.head_dim, positions) for rope in ropes if rope is not None)


def rope_for(kind: LayerKind, ropes: Ropes) -> Rope | None:
    """The rope of a layer."""
    return ropes[0 if kind.window is None else -1] if ropes else None


@partial(jax.jit, static_argnums=0)
def _embed(config: ModelConfig, params: Params, batch: ModelInput) -> tuple[Float[Array, "T D"], Ropes]:
    x: Any = CausalLM(config).apply({"params": params}, batch.token_ids, batch.positions, method="embed")
    return x, position_tables(config, batch.positions)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="kv")
def _paged_layer(
    config: ModelConfig,
    kind: LayerKind,
    implementation: str | None,
    params: Params,
    x: Float[Array, "T D"],
    rope: Rope | None,
    meta: AttentionMetadata,
    kv: LayerKV,
) -> tuple[Float[Array, "T D"], LayerKV]:
    layer = DecoderLayer(config, kind, implementation, parent=None)
    result: Any = layer.apply({"params": params}, x, rope, meta, kv)
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

    Each layer reads the tables of its group, and of the pool the arrays that are its own in that group's blocks.

    It may be called inside a jit, which makes one program of it, or as it is: then each part is a program of its own,
    and all layers of a kind share one, which compiles as many times faster as the model has layers.
    """
    x, ropes = _embed(config, embed_params(params), batch)
    # Each layer is compiled apart, in a program for all of them too: fused with its neighbours it would not round to
    # bf16 between them, and one step's bits would depend on how it is called. Nor is the computation of the rope's
    # tables fused into it: it would be contracted with what follows.
    pools = list(zip(kv_cache.k, kv_cache.v, strict=True))
    for i, (kind, (group, pool)) in enumerate(zip(config.layer_kinds, config.layer_groups.places, strict=True)):
        layer, rope, meta = params[f"layers_{i}"], rope_for(kind, ropes), batch.groups[group]
        x, rope = lax.optimization_barrier((x, rope))
        x, pools[pool] = _paged_layer(config, kind, implementation, layer, x, rope, meta, pools[pool])
    keys, values = zip(*pools, strict=True)
    return lax.optimization_barrier(x), KVCache(keys, values)


def read_out(config: ModelConfig, params: Params, hidden: Float[Array, "S D"]) -> Float32[Array, "S V"]:
    """Logits of hidden states that `paged_step` gave."""
    logits: Any = CausalLM(config).apply({"params": params}, hidden, method="logits")
    return lax.optimization_barrier(logits)  # what comes after a soft cap would be fused with it


class CausalLM(nn.Module):
    """A language model of any family; everything runs in the dtype of its params, logits in f32.

    `model.apply({"params": params}, token_ids)` gives the logits of whole sequences, for training; `method="step"`
    runs one step over paged blocks, and `method="logits"` reads its hidden states out.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = Embedding(config.vocab_size, config.embedding_width)
        if config.position_embedding == "learned":
            num_positions = config.max_position_embeddings + config.position_offset
            self.embed_positions = nn.Embed(num_positions, config.hidden_size)
        if config.embedding_size is not None:
            self.project_in = Linear(config.hidden_size)
            self.project_out = Linear(config.embedding_size)
        self.layers = [DecoderLayer(config, kind) for kind in config.layer_kinds]
        if config.final_norm:
            self.norm = make_norm(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.vocab_size, out_dtype=jnp.float32)

    def __call__(self, token_ids: Int32[Array, "B T"]) -> Float32[Array, "B T V"]:
        """Logits of every position, causal attention without a cache. ValueError if positions are learned and the
        sequences are longer than their table."""
        length, longest = token_ids.shape[1], self.config.max_position_embeddings
        if self.config.position_embedding == "learned" and length > longest:
            raise ValueError(f"token_ids: got sequences of {length} tokens, expected at most {longest} positions")
        positions = jnp.broadcast_to(jnp.arange(length)[None, :], token_ids.shape)
        ropes = position_tables(self.config, positions)
        x = self.embed(token_ids, positions)
        for kind, layer in zip(self.config.layer_kinds, self.layers, strict=True):
            x, _ = layer(x, rope_for(kind, ropes))
        return self.logits(x)

    def step(self, batch: ModelInput, kv_cache: KVCache) -> tuple[Float[Array, "T D"], KVCache]:
        """See `paged_step`."""
        return paged_step(self.config, dict(self.variables["params"]), batch, kv_cache)

    def embed(
        self, token_ids: Int32[Array | np.ndarray, "*B T"], positions: Int32[Array | np.ndarray, "*B T"]
    ) -> Float[Array, "*B T D"]:
        """What goes into the first layer. A learned position that the table lacks gives NaN."""
        config = self.config
        x = self.embed_tokens(token_ids)
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if config.embedding_size is not None:
            x = self.project_in(x)
        if config.position_embedding == "learned":
            rows = positions + config.position_offset
            x = x + self.embed_positions.embedding.at[rows].get(mode="fill", fill_value=jnp.nan)
        return x

    def logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Reads hidden states out: the last norm and the head, which may be the embedding."""
        config = self.config
        if config.final_norm:
            hidden = self.norm(hidden)
        if config.embedding_size is not None:
            hidden = self.project_out(hidden)
        if config.tie_word_embeddings:
            logits = self.embed_tokens.read_out(hidden)
        else:
            logits = self.lm_head(hidden)
        return soft_cap(logits, config.final_soft_cap)
