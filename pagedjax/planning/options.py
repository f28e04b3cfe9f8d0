"""What an engine's options become on this machine: checked, and every None decided."""

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from pagedjax.config import EngineConfig, check_positive_int, invariant_tokens
from pagedjax.models.config import ModelConfig, Quantization
from pagedjax.planning.bounds import num_blocks_that_fit, num_swap_blocks_that_fit
from pagedjax.planning.memory import Memory

CPU_TOKEN_BUDGET = 256
"""Tokens per step on a CPU: from here on larger products are no faster per token, only later."""
TOKEN_BUDGET = 2048
"""Tokens per step on an accelerator."""
CPU_BLOCK_SIZE, BLOCK_SIZE = 64, 16
"""Tokens per block. On a CPU one head of a block is then 16 KiB of SmolLM2's KV, which comes from memory at nearly
twice the rate of 4 KiB (docs/decisions.md)."""


def check_options(sizes: Mapping[str, Any], choices: Mapping[str, Any], seed: Any, gpu_memory_utilization: Any) -> None:
    """Raises ValueError for a bad option, before the checkpoint is looked at.

    `choices` are those fields of `EngineConfig` that are no sizes.
    """
    for name, value in sizes.items():
        check_positive_int(name, value)
    EngineConfig(num_blocks=1, max_model_len=2**31, **choices)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
    share: Any = gpu_memory_utilization if isinstance(gpu_memory_utilization, Real) else 0
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization!r}")


def decide_options(
    model: ModelConfig,
    *,
    dtype: str,
    memory: Memory,
    weight_bytes: int,
    block_size: int | None,
    num_blocks: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    logprobs_mode: str,
    enable_prefix_caching: bool,
    preemption: str,
    num_swap_blocks: int | None,
    scheduling_policy: str,
    priority_aging_s: float,
    num_decode_steps: int,
    async_scheduling: bool,
    batch_invariant: bool,
    check_integrity: bool,
    allow_longer_context: bool,
    quantization: Quantization | None,
) -> EngineConfig:
    """The options of `LLM` with every None decided, for a machine with this memory, of which weights that are still to
    be loaded will take `weight_bytes`."""
    is_cpu = memory.platform == "cpu"
    if max_model_len is None:
        max_model_len = model.max_position_embeddings
    block_size = block_size if block_size is not None else CPU_BLOCK_SIZE if is_cpu else BLOCK_SIZE
    model.check_context(max_model_len, allow_longer_context)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = CPU_TOKEN_BUDGET if is_cpu else TOKEN_BUDGET
    # XLA:CPU has no fast product of one row in the narrow types (docs/decisions.md).
    min_tokens = 2 if is_cpu and (dtype != "float32" or quantization is not None) else 1
    if batch_invariant:
        if not is_cpu:
            raise ValueError("batch_invariant: expected False on a GPU, where it is not known how to have it")
        min_tokens = invariant_tokens(model.narrowest)
    config = EngineConfig(
        num_blocks=num_blocks or len(model.layer_groups.windows),
        block_size=block_size,
        windows=model.layer_groups.windows,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        min_tokens=min_tokens,
        logprobs_mode=logprobs_mode,
        enable_prefix_caching=enable_prefix_caching,
        preemption=preemption,
        num_swap_blocks=num_swap_blocks or 0,
        scheduling_policy=scheduling_policy,
        priority_aging_s=priority_aging_s,
        num_decode_steps=num_decode_steps,
        async_scheduling=async_scheduling,
        check_integrity=check_integrity,
    )
    if num_blocks is None:
        config = replace(config, num_blocks=max_num_seqs * config.num_blocks_for(max_model_len))
        num_blocks = min(config.num_blocks, num_blocks_that_fit(model, config, dtype, memory, weight_bytes))
    config = replace(config, num_blocks=num_blocks)
    if num_swap_blocks is None and preemption in ("swap", "auto"):
        num_swap_blocks = num_swap_blocks_that_fit(model, config, dtype, memory, weight_bytes)
    if preemption == "swap" and not num_swap_blocks:
        raise ValueError(f'num_swap_blocks must be at least 1 with preemption="swap", got {num_swap_blocks}')
    return replace(config, num_swap_blocks=num_swap_blocks or 0)
