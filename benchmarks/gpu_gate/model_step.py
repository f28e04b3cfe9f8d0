"""Whole steps of models with the shapes of Llama 3 8B and Gemma 2 9B, in bfloat16: what a GPU runs between two turns of
the host, and what brings swapped blocks back."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Abstract

from benchmarks.gpu_gate.cases import CONTEXT, Case, num_bytes
from benchmarks.model_shapes import GEMMA_2_9B, LLAMA_3_8B
from pagedjax.batch import padding_batch
from pagedjax.blocks.host_pool import TILE, scatter_tile
from pagedjax.config import EngineConfig
from pagedjax.kv_cache import KVCache, bytes_per_block, init_kv_cache
from pagedjax.model_input import ModelInput
from pagedjax.models.config import ModelConfig, Quantization
from pagedjax.models.decoder import CausalLM, Params, paged_step, read_out
from pagedjax.models.quantization import quantize_params
from pagedjax.sampling.decode_loop import DecodeRows, build_decode_rows, decode_in_loop
from pagedjax.sampling.sampler import sample

ENGINE = EngineConfig(num_blocks=8192, max_model_len=8192, block_size=16, max_num_seqs=64)
"""A pool of 16 GiB: 64 requests of 2,048 tokens."""


def step_cases() -> list[Case]:
    """A step of 64 decodes, one of a single decode, and one with a chunk of a prompt."""
    return [
        step("step, decode, 64 rows", num_tokens=64, max_query_len=1),
        step("step, decode, 1 row", num_tokens=1, max_query_len=1),
        step("step, mixed, 512 tokens", num_tokens=512, max_query_len=512),
        step("step in XLA, decode, 64 rows", num_tokens=64, max_query_len=1, implementation="xla"),
        step("step, decodes in a loop, 64 rows", num_tokens=64, max_query_len=1, num_decodes=4),
        step(
            "step in int8, decode, 64 rows", num_tokens=64, max_query_len=1, quantization=Quantization(embeddings=False)
        ),
        step("step with windows, decode, 64 rows", model=GEMMA_2_9B, num_tokens=64, max_query_len=1),
        step("step with windows, mixed, 512 tokens", model=GEMMA_2_9B, num_tokens=512, max_query_len=512),
        swap_in("blocks swapped in"),
    ]


def step(
    name: str,
    *,
    num_tokens: int,
    max_query_len: int,
    implementation: str = "pallas_triton",
    model: ModelConfig = LLAMA_3_8B,
    num_decodes: int = 1,
    quantization: Quantization | None = None,
) -> Case:
    """One step as the engine runs it, or several decodes as one, the pool donated."""
    config = model

    def run(params: Params, kv_cache: KVCache, batch: ModelInput) -> tuple[Any, KVCache]:
        hidden, kv_cache = paged_step(config, params, batch, kv_cache, implementation=implementation)
        logits = read_out(config, params, hidden[batch.logits_indices])
        return sample(logits, batch.sampling), kv_cache

    def run_loop(params: Params, kv_cache: KVCache, batch: ModelInput, rows: DecodeRows) -> tuple[Any, KVCache]:
        def decode(batch: ModelInput, kv_cache: KVCache) -> tuple[Any, KVCache]:
            return run(params, kv_cache, batch)

        tokens, _, kv_cache = decode_in_loop(decode, batch, rows, kv_cache, num_decodes)
        return tokens, kv_cache

    params, kv_cache = _abstract_params(config), _abstract_pool(config)
    if quantization is not None:
        params = dict(jax.eval_shape(partial(quantize_params, quantization=quantization), params))
    batch = padding_batch(replace(ENGINE, windows=config.layer_groups.windows), num_tokens, max_query_len)
    num_rows = len(batch.logits_indices)
    embedding = num_bytes(params["embed_tokens"])  # of which a step reads a row per token
    kv_bytes_per_token = bytes_per_block(
        num_pools=config.num_layers,
        block_size=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.bfloat16,
    )
    rows = build_decode_rows([num_decodes] * num_rows, [frozenset()] * num_rows, num_rows)
    return Case(
        name=name,
        function=run_loop if num_decodes > 1 else run,
        args=(params, kv_cache, batch, *([rows] if num_decodes > 1 else [])),
        pool=(1,),
        donates_pool=True,
        moved_bytes=num_bytes(params) - embedding + kv_bytes_per_token * (num_rows * CONTEXT + num_tokens),
        temp_fraction=1.0,  # of one layer's keys: f32 logits and what the sampler makes of them are half of that
    )


def swap_in(name: str) -> Case:
    """A tile of blocks into the pool of all layers, which is donated."""
    kv_cache = _abstract_pool(LLAMA_3_8B)
    shape = (TILE, 2 * LLAMA_3_8B.num_layers, *kv_cache.k[0].shape[1:])
    tile, blocks = Abstract(shape, jnp.bfloat16), Abstract((TILE,), jnp.int32)
    return Case(
        name=name,
        function=scatter_tile,
        args=(kv_cache, tile, blocks),
        pool=(0,),
        donates_pool=True,
        moved_bytes=2 * num_bytes(tile),
        temp_fraction=1.0,
    )


def _abstract_params(config: ModelConfig) -> Params:
    tokens = Abstract((1, 8), jnp.int32)
    init = jax.eval_shape(CausalLM(config).init, jax.eval_shape(lambda: jax.random.key(0)), tokens)
    return jax.tree.map(lambda leaf: Abstract(leaf.shape, jnp.bfloat16), init["params"])


def _abstract_pool(config: ModelConfig) -> KVCache:
    return jax.eval_shape(
        lambda: init_kv_cache(
            num_pools=config.layer_groups.num_pools,
            num_blocks=ENGINE.num_blocks,
            block_size=ENGINE.block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.bfloat16,
        )
    )
