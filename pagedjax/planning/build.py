"""Makes the memory plan of an engine from its options: the same ones that `pagedjax.LLM` takes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pagedjax.models.config import Quantization, check_float_dtype
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.load import Header, read_header
from pagedjax.models.quantization import float_dtype, quantization_in, quantization_of, quantize_params
from pagedjax.pallas_kernels.attention import implementation_for
from pagedjax.planning.advice import changes_for
from pagedjax.planning.bounds import block_bytes, host_pool_bytes, num_params, program_bounds, weight_bytes
from pagedjax.planning.memory import memory_for
from pagedjax.planning.options import check_options, decide_options
from pagedjax.planning.plan import MemoryPlan
from pagedjax.planning.programs import compiled_bytes


def plan_memory(
    model: str | Path | CausalLM,
    params: Params | None = None,
    *,
    dtype: str = "auto",
    seed: Any = 0,
    gpu_memory_utilization: Any = 0.9,
    attention_implementation: str | None = None,
    allow_longer_context: Any = False,
    batch_invariant: Any = False,
    quantization: Any = None,
    quantize_embeddings: Any = False,
    num_requests: int | None = None,
    context: int | None = None,
    memory_bytes: int | None = None,
    platform: str | None = None,
    compile: bool = False,
    with_tensors: bool = False,
    **options: Any,
) -> tuple[MemoryPlan, Header | None]:
    """The plan of an engine with these options, those of `decide_options`, and the opened checkpoint if there is one.

    With `with_tensors` the whole checkpoint is there afterwards, not only what the plan needs of it; the other
    arguments are those of `pagedjax.LLM.plan`. Raises ValueError for a bad option, before anything is read; a plan that
    does not fit is returned.
    """
    names = ("block_size", "num_blocks", "max_num_batched_tokens", "max_model_len", "max_num_seqs")
    sizes = {name: options[name] for name in names} | {"num_requests": num_requests, "context": context}
    sizes = {name: value for name, value in sizes.items() if value is not None or name == "max_num_seqs"}
    choices = {name: value for name, value in options.items() if name not in names}
    if options["num_swap_blocks"] is None:
        del choices["num_swap_blocks"]
    check_options(sizes, choices, seed, gpu_memory_utilization)
    switches = {"allow_longer_context": allow_longer_context, "batch_invariant": batch_invariant}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    implementation = implementation_for(attention_implementation, batch_invariant)
    kind = quantization_of(quantization, quantize_embeddings)
    if dtype != "auto":
        check_float_dtype(dtype)
    memory = memory_for(platform, memory_bytes, float(gpu_memory_utilization))
    if isinstance(model, CausalLM):
        header, config = None, model.config
    else:
        header = read_header(model, with_tensors=with_tensors)
        config, stored = header.config, header.quantization
        if stored is not None:
            kind = Quantization(embeddings=stored.embeddings or (kind is not None and kind.embeddings))
    if params is not None:
        if kind is not None:  # a copy is to be made; the float arrays in it count too, though they are shared
            params = dict(jax.eval_shape(partial(quantize_params, quantization=kind), params))
        kind, dtype = quantization_in(params), str(float_dtype(params))
    elif dtype == "auto":
        dtype = "float32" if memory.platform == "cpu" else "bfloat16"
    in_place = params is not None and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    leaves = jax.tree.leaves(params)
    weights = weight_bytes(config, dtype, kind) if params is None else sum(x.size * x.dtype.itemsize for x in leaves)
    options |= {**switches, "quantization": kind}
    engine = decide_options(config, dtype=dtype, memory=memory, weight_bytes=0 if in_place else weights, **options)
    config = config.served_up_to(engine.max_model_len)
    bounds, block = program_bounds(config, engine, dtype, memory.platform), block_bytes(config, engine, dtype)
    step = bounds.step + bounds.per_block * engine.num_blocks
    is_here = memory.platform == ("cpu" if jax.default_backend() == "cpu" else "gpu")
    programs = compiled_bytes(config, engine, dtype, implementation, kind) if compile and is_here else {}
    asks = num_requests is not None or context is not None
    plan = MemoryPlan(
        dtype=dtype,
        config=engine,
        memory=memory,
        num_params=num_params(config),
        weight_bytes=weights,
        quantization=kind,
        weights_in_place=in_place,
        block_bytes=block,
        pool_bytes=(engine.num_blocks + 1) * block,
        host_pool_bytes=host_pool_bytes(config, engine, dtype),
        step_bytes=max([step, *programs.values()]),
        extras_bytes=bounds.extras,
        programs=programs,
        num_requests=(num_requests or 1) if asks else None,
        context=context or engine.max_model_len,
        max_context=max(config.longest_context, engine.max_model_len),
    )
    return replace(plan, changes=changes_for(plan, config)), header
