"""What an engine's options become on this machine: checked, and every None decided."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import jax

from pagedjax.config import EngineConfig, check_positive_int
from pagedjax.kv_cache import bytes_per_block
from pagedjax.models.config import ModelConfig

CPU_POOL_BYTES = 2**30
"""KV pool on a CPU unless `num_blocks` says otherwise: 22,000 tokens of SmolLM2-135M in f32."""
CPU_TOKEN_BUDGET = 256
"""Tokens per step on a CPU: from here on larger products are no faster per token, only later."""
TOKEN_BUDGET = 2048
"""Tokens per step on an accelerator."""
CPU_BLOCK_SIZE, BLOCK_SIZE = 64, 16
"""Tokens per block. On a CPU one head of a block is then 16 KiB of SmolLM2's KV, which comes from memory at nearly
twice the rate of 4 KiB (docs/decisions.md)."""


def check_options(sizes: Mapping[str, Any], seed: Any, gpu_memory_utilization: Any) -> None:
    """Raises ValueError for a bad option, before the checkpoint is loaded."""
    for name, value in sizes.items():
        check_positive_int(name, value)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
    share: Any = gpu_memory_utilization if isinstance(gpu_memory_utilization, Real) else 0
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization!r}")


def decide_options(
    model: ModelConfig,
    *,
    dtype: str,
    block_size: int | None,
    num_blocks: int | None,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    logprobs_mode: str,
    enable_prefix_caching: bool,
    check_integrity: bool,
) -> EngineConfig:
    """The options of `LLM` with every None decided."""
    is_cpu = jax.default_backend() == "cpu"
    if max_model_len is None:
        max_model_len = model.max_position_embeddings
    block_size = block_size if block_size is not None else CPU_BLOCK_SIZE if is_cpu else BLOCK_SIZE
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len must be at most the model's {model.max_position_embeddings}, got {max_model_len}"
        )
    if num_blocks is None:
        most_used = max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(most_used, _num_blocks_that_fit(model, dtype, block_size, gpu_memory_utilization))
    if max_num_batched_tokens is None:
        max_num_batched_tokens = CPU_TOKEN_BUDGET if is_cpu else TOKEN_BUDGET
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        # XLA:CPU has no fast product of one row in the narrow types (docs/decisions.md).
        min_decode_bucket=2 if is_cpu and dtype != "float32" else 1,
        logprobs_mode=logprobs_mode,
        enable_prefix_caching=enable_prefix_caching,
        check_integrity=check_integrity,
    )


def _num_blocks_that_fit(config: ModelConfig, dtype: str, block_size: int, gpu_memory_utilization: float) -> int:
    block = bytes_per_block(
        num_layers=config.num_layers,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats is None:
        return max(1, CPU_POOL_BYTES // block)
    budget = int(stats["bytes_limit"] * gpu_memory_utilization) - stats["bytes_in_use"]
    if budget < block:
        raise ValueError(
            f"no memory for the KV pool: {gpu_memory_utilization:.0%} of {stats['bytes_limit'] / 2**30:.1f} GiB less "
            f"{stats['bytes_in_use'] / 2**30:.1f} GiB in use leaves less than one block of {block / 2**20:.1f} MiB"
        )
    return budget // block
