"""Time on the device: calls one after another without a wait, the wait at the end; and the device's two ceilings."""

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Json = dict[str, Any]
SAMPLE_SECONDS = 0.02
"""A sample takes at least that long, so that the wait at its end does not count."""
SHORT_CALL = 2e-3
"""Seconds: calls shorter than this are timed several to a program, as launching a program costs the host some 50 µs."""


class Sample(NamedTuple):
    """Seconds per call."""

    median: float
    least: float
    num_calls: int
    """In each of the samples."""


def seconds_per_call(run: Callable[[int], Any], num_calls: int, repeat: int, per_call: int = 1) -> Sample:
    """Times `run(0)` to `run(num_calls - 1)` as one sample, `repeat` times; each does `per_call` pieces of work."""
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        for index in range(num_calls):
            result = run(index)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / (num_calls * per_call))
    return Sample(statistics.median(samples), min(samples), num_calls * per_call)


def time_over_sets(
    function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], *, repeat: int, budget: float
) -> tuple[Sample, str]:
    """Seconds per call of a jitted `function`, over sets of arguments in turn so that no cache helps; and the method.

    The function must have run once on the first set. About `budget` seconds in all.
    """
    first = seconds_per_call(lambda index: function(*sets[index % len(sets)]), 2, 2).least
    if first < SHORT_CALL and len(sets) > 1:

        @jax.jit
        def all_sets(sets: Sequence[tuple[Any, ...]]) -> list[Any]:
            return [function(*args) for args in sets]

        jax.block_until_ready(all_sets(sets))
        first = seconds_per_call(lambda _: all_sets(sets), 2, 2, len(sets)).least
        run, per_call, method = (lambda _: all_sets(sets)), len(sets), f"{len(sets)} sets in one program"
    else:
        run, per_call = (lambda index: function(*sets[index % len(sets)])), 1
        method = f"{len(sets)} sets in turn, a program each"
    num_calls = math.ceil(SAMPLE_SECONDS / (first * per_call))
    num_calls = min(max(num_calls, 1 if per_call > 1 else len(sets)), max(1, int(budget / (first * per_call))))
    repeat = max(1, min(repeat, int(budget / (first * per_call * num_calls))))
    return seconds_per_call(run, num_calls, repeat, per_call), method


def copy_bandwidth(num_bytes: int, repeat: int = 5) -> float:
    """Bytes per second of a large copy on the device, read plus written: the better of a copy and a small kernel."""
    arrays = [jax.random.bits(jax.random.key(i), (num_bytes // 4,), jnp.uint32) for i in range(2)]
    kernels = (jax.jit(jnp.copy), jax.jit(lambda x: x ^ jnp.uint32(1)))
    best = math.inf
    for kernel in kernels:
        jax.block_until_ready([kernel(x) for x in arrays])
        sample, _ = time_over_sets(kernel, [(x,) for x in arrays], repeat=repeat, budget=1.0)
        best = min(best, sample.median)
    return 2 * arrays[0].nbytes / best


def matmul_rate(size: int, dtype: jax.typing.DTypeLike, repeat: int = 5) -> float:
    """Operations per second of a large product of random matrices."""
    pairs = [tuple(jax.random.normal(jax.random.key(2 * i + j), (size, size), dtype) for j in range(2)) for i in (0, 1)]
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(*pairs[0]))
    sample, _ = time_over_sets(product, pairs, repeat=repeat, budget=1.0)
    return 2 * size**3 / sample.median


def ceilings(dtype: jax.typing.DTypeLike) -> Json:
    """Both, measured now; small on a CPU."""
    is_cpu = jax.default_backend() == "cpu"
    return {
        "copy_bytes_per_s": copy_bandwidth(2**26 if is_cpu else 2**31),
        "matmul_flops_per_s": matmul_rate(512 if is_cpu else 8192, dtype),
    }


def environment() -> Json:
    """What a figure depends on besides the code."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": nvidia_driver() if device.platform == "gpu" else None,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def nvidia_driver() -> str | None:
    """The driver's version, as nvidia-smi says it."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def write_results(result: Json, table: str, json_file: Path | None, markdown_file: Path | None) -> None:
    """Writes new files and puts them in place: a run that is killed leaves the last whole ones."""
    for file, text in ((json_file, json.dumps(result, indent=1)), (markdown_file, table)):
        if file is not None:
            new = file.with_name(f"{file.name}.new")
            new.write_text(f"{text}\n")
            os.replace(new, file)
