"""What XLA says that the programs of a step take, from shapes alone: nothing is loaded, and nothing runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.batch import padding_batch
from pagedjax.config import EngineConfig
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.models import decoder
from pagedjax.models.config import ModelConfig, Quantization
from pagedjax.models.quantization import quantize_params
from pagedjax.models.weights import expected_tensors
from pagedjax.planning.bounds import CPU_HEAD_ROWS
from pagedjax.sampling.rows import sample_rows


def abstract_params(model: ModelConfig, dtype: str, quantization: Quantization | None = None) -> decoder.Params:
    """The pytree of a model's params, as shapes."""
    params: decoder.Params = {}
    for path, shape, _ in expected_tensors(model).values():
        inner = params
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if quantization is None:
        return params
    return jax.eval_shape(partial(quantize_params, quantization=quantization), params)


def abstract_pool(model: ModelConfig, config: EngineConfig, dtype: str) -> KVCache:
    """The pool, as shapes."""
    sizes = {"num_pools": model.layer_groups.num_pools, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    sizes |= {"num_blocks": config.num_blocks, "block_size": config.block_size}
    return jax.eval_shape(partial(init_kv_cache, **sizes, dtype=jnp.dtype(dtype)))


def compiled_bytes(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    attention_implementation: str | None = None,
    quantization: Quantization | None = None,
) -> dict[str, int]:
    """Compiles the largest programs of a step and gives what each takes beside weights and pool, by name.

    On a CPU those are one layer and the head, on a GPU the whole of the model and the head: as the runner has them, and
    in the same compilation cache. SmolLM2 on two CPU cores takes 5 s, and less than 1 s once they are in the cache; a
    whole step of a large model takes minutes. Programs of which the backend says nothing are left out.
    """
    params, pool = abstract_params(model, dtype, quantization), abstract_pool(model, config, dtype)
    num_tokens = config.mixed_buckets[-1]
    is_decode = num_tokens < config.decode_buckets[-1]
    num_tokens = config.decode_buckets[-1] if is_decode else num_tokens
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype),
        padding_batch(config, num_tokens, 1 if is_decode else num_tokens),
    )
    hidden, ropes = jax.eval_shape(partial(decoder._embed, model), decoder.embed_params(params), batch)
    is_cpu = jax.default_backend() == "cpu"
    if is_cpu:
        layer_pool = (pool.k[0], pool.v[0])
        given = (hidden, ropes[0] if ropes else None, batch.attn)  # all ropes are of one shape
        args = (model, model.layer_kinds[0], attention_implementation, params["layers_0"], *given, layer_pool)
        forward = decoder._paged_layer.lower(*args), given
    else:
        step: Any = jax.jit(
            partial(decoder.paged_step, implementation=attention_implementation), static_argnums=0, donate_argnums=3
        )
        forward = step.lower(model, params, batch, pool), batch
    head_params = decoder.head_params(params)
    head_rows = CPU_HEAD_ROWS if is_cpu else config.max_num_running
    head = sample_rows.lower(model, head_params, hidden, batch, head_rows), (hidden, batch)
    programs = {"layer" if is_cpu else "model": forward, "head": head}
    taken = {name: _bytes_of(lowered, given) for name, (lowered, given) in programs.items()}
    return {name: value for name, value in taken.items() if value is not None}


def _bytes_of(lowered: Any, given: Any) -> int | None:
    """What a program takes: its temporaries, its results but for those that lie where a donated argument lay, and what
    it was given beside weights and pool. None if the backend does not say."""
    memory: Any = lowered.compile().memory_analysis()
    if not all(hasattr(memory, f"{name}_size_in_bytes") for name in ("temp", "output", "alias")):
        return None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + results + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given))
