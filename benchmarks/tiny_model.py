"""A tiny random model with large gaps between its best tokens, for benchmarks of what does not depend on the model."""

from functools import cache
from typing import Any

import numpy as np

TINY = "tiny"
VOCAB_SIZE = 128
SCALES = {"embedding": 1.0, "q_proj": 0.3, "k_proj": 0.3, "v_proj": 0.2, "o_proj": 0.2, "lm_head": 3.0}
"""Attention weighs as much as the token itself, so that each token depends on all before it; logits are up to 100."""


@cache
def checkpoint() -> tuple[Any, Any]:
    """Module and params, the same at every call and on every machine."""
    import jax
    import jax.numpy as jnp

    from pagedjax.models.config import ModelConfig
    from pagedjax.models.decoder import CausalLM
    from pagedjax.models.rope import RopeConfig

    model = CausalLM(
        ModelConfig(
            model_type="llama",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            norm_eps=1e-5,
            rope=RopeConfig(),
            tie_word_embeddings=False,
            attention_bias=False,
            attention_out_bias=False,
            mlp_bias=False,
            qk_norm=False,
            dtype="float32",
        )
    )
    rng = np.random.default_rng(0)

    def values(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [key.key for key in path]
        if names[-1] == "scale":
            return jnp.asarray(rng.uniform(0.8, 1.2, leaf.shape), jnp.float32)
        scale = next((scale for name, scale in SCALES.items() if name in names), 0.12)
        return jnp.asarray(rng.normal(0, scale, leaf.shape), jnp.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return model, jax.tree_util.tree_map_with_path(values, shapes)


def new_llm(model: str, **options: Any) -> Any:
    """An engine on params that all engines share: of "tiny", or of what `pagedjax.load` takes. Its programs compile
    when they are first needed, unless it is told to warm up."""
    if model != TINY:
        from sharing import new_llm

        return new_llm(model, **options)
    import pagedjax

    module, params = checkpoint()
    return pagedjax.LLM(module, params=params, **{"warm_up": False, **options})
