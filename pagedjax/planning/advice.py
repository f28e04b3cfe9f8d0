"""What to change so that an engine, or more requests, fit: each line with the numbers that come of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagedjax.models.config import ModelConfig
from pagedjax.planning.bounds import block_bytes, program_bounds, weight_bytes
from pagedjax.planning.memory import jax_share_of_gpu
from pagedjax.planning.plan import MemoryPlan, size


def changes_for(plan: MemoryPlan, model: ModelConfig) -> tuple[str, ...]:
    """Changes of a plan that does not fit, those that are enough by themselves first; empty for one that fits."""
    if plan.fits:
        return ()
    if plan.fits_requests:
        return (*_fewer_blocks(plan, model), *_less_memory(plan, model))
    if plan.context > plan.max_context:
        return (f"context={plan.max_context} at most: the model was made for no more",)
    grown = _grown(plan, model)
    options = ", ".join(f"{name}={value}" for name, value in _differences(plan, grown))
    pool = f"a pool of {size(grown.pool_bytes)}, {size(grown.required_bytes)} together"
    if grown.fits_memory:
        return (f"{options}: {pool}, {size(grown.left_bytes)} left", *_fewer_requests(plan))
    missing = f"{size(-(grown.left_bytes or 0))} more than there are"
    enough = f"{options} for all of them: {pool}, {missing}; then also one of"
    return (*_fewer_requests(plan), enough, *_fewer_blocks(grown, model), *_less_memory(grown, model))


def _grown(plan: MemoryPlan, model: ModelConfig) -> MemoryPlan:
    """The plan with just enough blocks, rows and length for the requests."""
    num_requests, config = plan.num_requests or 1, plan.config
    config = replace(
        config,
        num_blocks=max(config.num_blocks, plan.num_blocks_for(num_requests, plan.context)),
        max_num_seqs=max(config.max_num_seqs, num_requests),
        max_num_batched_tokens=max(config.max_num_batched_tokens, num_requests),
        max_model_len=max(config.max_model_len, plan.context),
    )
    return _with(plan, model, config=config)


def _with(plan: MemoryPlan, model: ModelConfig, **changes: Any) -> MemoryPlan:
    """The plan with another config or dtype, its sizes anew and in closed form."""
    new = replace(plan, programs={}, **changes)
    block = block_bytes(model, new.config, new.dtype)
    bounds = program_bounds(model, new.config, new.dtype, new.memory.platform)
    weights = plan.weight_bytes
    if new.dtype != plan.dtype:
        weights = weight_bytes(model, new.dtype, plan.quantization)
    return replace(
        new,
        weight_bytes=weights,
        block_bytes=block,
        pool_bytes=(new.config.num_blocks + 1) * block,
        host_pool_bytes=new.config.num_swap_blocks * block,
        step_bytes=bounds.step + bounds.per_block * new.config.num_blocks,
        extras_bytes=bounds.extras,
    )


def _fewer_blocks(plan: MemoryPlan, model: ModelConfig) -> list[str]:
    """The largest pool that the memory has room for, if it is a smaller one."""

    def with_blocks(num_blocks: int) -> MemoryPlan:
        return _with(plan, model, config=replace(plan.config, num_blocks=num_blocks))

    most = _largest(plan.config.num_blocks, lambda num_blocks: with_blocks(num_blocks).fits_memory)
    if not most:
        return []
    new = with_blocks(most)
    holds = f", with room for {new.max_requests(plan.context):,} of {plan.context:,} tokens" * bool(plan.num_requests)
    return [f"num_blocks={most}: {size(new.required_bytes)} together{holds}"]


def _less_memory(plan: MemoryPlan, model: ModelConfig) -> list[str]:
    """What takes less memory or finds more, for a plan that does not fit it; not what would hardly help."""
    config, found = plan.config, []
    missing = -(plan.left_bytes or 0)

    def tell(option: str, new: MemoryPlan) -> None:
        left = new.left_bytes or 0
        result = f"{size(left)} left" if new.fits_memory else f"{size(-left)} still missing"
        if new.fits_memory or missing + left > missing // 10:
            found.append((not new.fits_memory, f"{option}: {size(new.required_bytes)} together, {result}"))

    if plan.dtype == "float32" and not plan.weights_in_place:
        tell('dtype="bfloat16"', _with(plan, model, dtype="bfloat16"))
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        for value in (2**k for k in reversed(range(getattr(config, name).bit_length()))):
            if (plan.num_requests or 1) <= value < getattr(config, name):
                new = _with(plan, model, config=replace(config, **{name: value}))
                if new.fits_memory or value == max(16, plan.num_requests or 1):
                    tell(f"{name}={value}", new)
                    break
    lines = [line for _, line in sorted(found)]
    if plan.memory.platform == "gpu":
        share = f"XLA_PYTHON_CLIENT_MEM_FRACTION (now {jax_share_of_gpu():g}, read when JAX starts)"
        lines.append(f"gpu_memory_utilization, up to 1, or {share}: a larger share of the GPU")
    return lines or ["a smaller model, or a machine with more memory"]


def _fewer_requests(plan: MemoryPlan) -> list[str]:
    """What the pool as it is has room for."""
    num_requests, changes = plan.num_requests or 1, []
    if shorter := plan.max_context_for(num_requests):
        changes.append(f"context={shorter}: as many tokens can each of {num_requests:,} requests have in this pool")
    if fewer := plan.max_requests(plan.context):
        others = num_requests - fewer
        waiting = f"the other {others:,} wait, or are preempted and go on later"
        num_swapped = others * plan.blocks_per_request(plan.context)
        if plan.memory.platform == "gpu" and plan.config.num_swap_blocks < num_swapped:
            on_host = f"num_swap_blocks={num_swapped} ({size(num_swapped * plan.block_bytes)} of the host)"
            waiting += f'; preemption="swap", {on_host} keeps their KV'
        changes.append(f"num_requests={fewer}: so many of {plan.context:,} tokens run at once; {waiting}")
    return changes


def _differences(old: MemoryPlan, new: MemoryPlan) -> list[tuple[str, int]]:
    names = ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    pairs = ((name, getattr(new.config, name)) for name in names)
    return [(name, value) for name, value in pairs if value != getattr(old.config, name)]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n below `most` that fits, if all below it do; 0 if none does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
