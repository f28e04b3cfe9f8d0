"""What weights, pool and programs take, in closed form: from shapes alone, before anything is loaded or compiled."""

from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from pagedjax.config import EngineConfig
from pagedjax.kv_cache import bytes_per_block
from pagedjax.models.config import ModelConfig, Quantization
from pagedjax.models.quantization import is_to_quantize, quantized_bytes
from pagedjax.models.weights import expected_tensors, parameter_shapes
from pagedjax.planning.memory import Memory
from pagedjax.sampling.rows import PROMPT_LOGPROBS_ROWS

CPU_POOL_BYTES = 2**30
"""KV pool on a CPU unless `num_blocks` says otherwise: 22,000 tokens of SmolLM2-135M in f32."""
CPU_SLACK_BYTES, GPU_SLACK_BYTES = 2**24, 2**26
"""What programs take whatever the model's size: tiles of attention, the work space of libraries (32 MiB on Hopper)."""
SAMPLER_COPIES = 6
"""[rows, vocabulary] arrays in f32 that the head and the sampler have at once: 5.6 on a CPU (docs/decisions.md)."""
EXTRAS_COPIES = 9
"""The same with edits of the logits and log-probabilities: the model's own, those edited, those drawn from and what
the sampler makes of them, or the ids and log-probabilities of a whole vocabulary."""
CPU_HEAD_ROWS = 64
"""Rows that go through the head at a time on a CPU: the runner's own number."""
SWAP_TILE = 8
"""Blocks that are swapped at a time: the host pool's own number."""


class ProgramBounds(NamedTuple):
    """Most bytes that a step takes beside weights and pool."""

    step: int
    """Any step, with plain sampling."""
    extras: int
    """On top of that if all its rows ask for penalties, masks and log-probabilities."""
    per_block: int
    """On top of that for each block of the pool: XLA on a CPU turns the part of the pool that a program writes to, a
    layer's, into float32 and back (bfloat16 on jax 0.10.2)."""


def num_params(model: ModelConfig) -> int:
    """Numbers in the weights of a model."""
    return sum(prod(tensor.shape) for tensor in expected_tensors(model).values())


def weight_bytes(model: ModelConfig, dtype: str, quantization: Quantization | None = None) -> int:
    """Bytes of the loaded weights, from the config alone: exactly the tensors that a checkpoint must have."""
    return sum(
        quantized_bytes(path, shape, dtype)
        if is_to_quantize(path, quantization)
        else prod(shape) * jnp.dtype(dtype).itemsize
        for path, shape in parameter_shapes(model).items()
    )


def block_bytes(model: ModelConfig, config: EngineConfig, dtype: str) -> int:
    """Bytes of a KV block, all layers of a group together."""
    return bytes_per_block(
        num_pools=model.layer_groups.num_pools,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def host_pool_bytes(model: ModelConfig, config: EngineConfig, dtype: str) -> int:
    """Bytes of the pool on the host that swapped requests wait in."""
    return config.num_swap_blocks * block_bytes(model, config, dtype)


def program_bounds(model: ModelConfig, config: EngineConfig, dtype: str, platform: str) -> ProgramBounds:
    """Upper bounds: `tests/test_memory_plan.py` holds them against what XLA says of the compiled programs.

    The largest step computes `max_num_batched_tokens` tokens and samples `max_num_running` rows. Of a layer's
    activations every one counts twice, as if none were ever given back: in f32 on Hopper XLA takes 1.1 of them.
    """
    is_narrow_on_cpu = platform == "cpu" and dtype != "float32"
    num_tokens = max(config.mixed_buckets[-1], config.decode_buckets[-1])
    num_rows = config.num_rows_for(num_tokens)
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width = 4 * model.hidden_size + 3 * (q_size + 2 * kv_size) + 3 * model.intermediate_size
    activations = 2 * jnp.dtype(dtype).itemsize * num_tokens * width
    num_groups, num_pools = len(config.windows), model.layer_groups.num_pools
    tables = 4 * 4 * num_groups * num_rows * config.table_len(config.max_model_len)
    block = block_bytes(model, config, dtype)
    copied = 2 * config.max_num_running * num_groups * block // num_pools  # before a step, layer by layer
    swapped = 3 * SWAP_TILE * block if config.preemption != "recompute" else 0
    forward = max(activations, copied, swapped) + tables
    if is_narrow_on_cpu:  # there products take f32 copies of a layer's weights
        forward += 4 * num_params(model) // model.num_layers
    head_rows = min(CPU_HEAD_ROWS, num_rows) if platform == "cpu" else num_rows
    vocab = 4 * model.vocab_size
    head = SAMPLER_COPIES * head_rows * vocab
    slack = CPU_SLACK_BYTES if platform == "cpu" else GPU_SLACK_BYTES
    # Several decodes in one program have their head in it as well.
    step = (forward + head if config.num_decode_steps > 1 else max(forward, head)) + slack
    with_extras = max(EXTRAS_COPIES * config.max_num_running, 4 * PROMPT_LOGPROBS_ROWS) * vocab
    per_block = block * 4 // jnp.dtype(dtype).itemsize // num_pools if is_narrow_on_cpu else 0
    return ProgramBounds(step, max(0, with_extras + slack - step), per_block)


def num_blocks_that_fit(model: ModelConfig, config: EngineConfig, dtype: str, memory: Memory, weights: int) -> int:
    """Blocks of a pool that leaves room for `weights` bytes that are still to come, for programs, and on a CPU for the
    host pool. At least 1: whether even that fits is for `MemoryPlan.check`.

    On a CPU the pool takes no more than `CPU_POOL_BYTES`, and where little is left it takes half of it, whatever a full
    step with extras might need: nearly nobody runs one there, and memory that is never touched is never taken.
    """
    block, bounds = block_bytes(model, config, dtype), program_bounds(model, config, dtype, memory.platform)
    if memory.available_bytes is None:
        return max(1, CPU_POOL_BYTES // block)
    room = memory.available_bytes - weights - bounds.step
    if memory.platform == "cpu":
        room -= host_pool_bytes(model, config, dtype)
        room = max(room - bounds.extras, room // 2)
    else:
        room -= bounds.extras
    num_blocks = room // (block + bounds.per_block) - 1  # the null block
    return max(1, min(num_blocks, CPU_POOL_BYTES // block) if memory.platform == "cpu" else num_blocks)


def num_swap_blocks_that_fit(model: ModelConfig, config: EngineConfig, dtype: str, memory: Memory, weights: int) -> int:
    """Blocks of a host pool: as many as the pool has, if that many fit what an engine with this config leaves on a CPU,
    or half of what the host of a GPU has free."""
    block = block_bytes(model, config, dtype)
    if memory.platform == "gpu":
        room = None if memory.host_bytes is None else memory.host_bytes // 2
    else:
        bounds = program_bounds(model, config, dtype, "cpu")
        taken = weights + (config.num_blocks + 1) * block + bounds.step + bounds.per_block * config.num_blocks
        room = None if memory.available_bytes is None else memory.available_bytes - taken
    return config.num_blocks if room is None else max(0, min(config.num_blocks, room // block))
