"""Puts the arrays of a checkpoint where they are to live, one at a time; each is used once or named in an error.

The host holds one or two arrays beside the finished parameters, whatever the size of the model.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from pagedjax.models.config import ModelConfig, check_float_dtype
from pagedjax.models.weights import Params, expected_tensors, is_ignorable

Path = tuple[str, ...]
"""Keys into the nested dict of parameters."""

Placement = Sharding | Callable[[Path, tuple[int, ...]], Sharding] | Mapping[str, Any]
"""Where parameters live: one sharding for all, a function of (path, shape), or a tree of them like the parameters'."""


def build_params(
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    progress: bool = False,
    sharding: Placement | None = None,
) -> Params:
    """The nested dict that the model is applied with, from a stream of (Hugging Face name, array in the file's layout).

    Each array is converted and sent to its place (see `sharding_for`; the default device without `sharding`) before the
    next is read. Raises one ValueError that lists every tensor that is missing, unknown, given twice or of the wrong
    shape.
    """
    check_float_dtype(dtype)
    expected = expected_tensors(config)
    params: Params = {}
    problems: list[str] = []
    seen: set[str] = set()

    def take(name: str, array: np.ndarray) -> None:
        if name in seen:
            problems.append(f"given twice: {name}")
        elif name in expected:
            path, shape, transpose = expected[name]
            file_shape = shape[::-1] if transpose else shape
            if array.shape != file_shape:
                problems.append(f"wrong shape: {name} is {list(array.shape)}, expected {list(file_shape)}")
            elif not problems:  # once something is wrong, only the list of problems is of use
                value = _to_device(array, dtype, transpose, sharding_for(sharding, path, shape))
                insert(params, path, value)
                advance(value.nbytes)
        elif not is_ignorable(name, config):
            problems.append(f"not used: {name} {list(array.shape)}")
        seen.add(name)

    num_bytes = jnp.dtype(dtype).itemsize * sum(prod(tensor.shape) for tensor in expected.values())
    with progress_bar(num_bytes, progress) as advance:
        for name, array in tensors:
            take(name, array)
            del array  # or it would be in memory beside the next
    problems += [f"missing: {name} {list(spec.shape)}" for name, spec in expected.items() if name not in seen]
    if problems:
        raise ValueError(f"checkpoint does not fit its {config.model_type} config: " + "; ".join(problems))
    return params


def sharding_for(placement: Placement | None, path: Path, shape: tuple[int, ...]) -> Sharding | None:
    """The sharding of the parameter at `path`, None for the default device; ValueError if there is none that fits."""
    if placement is None:
        return None
    where: Any = placement
    if isinstance(placement, Mapping):
        for key in path:
            where = where.get(key) if isinstance(where, Mapping) else None
    elif not isinstance(placement, Sharding):
        where = placement(path, shape)
    name = "/".join(path)
    if not isinstance(where, Sharding):
        raise ValueError(f"sharding of {name}: got {where!r}, expected a jax.sharding.Sharding")
    try:
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)  # refuses another rank
        where.shard_shape(shape)  # and sizes that it does not divide
    except ValueError as error:
        raise ValueError(
            f"sharding of {name}: got {where}, expected one for the shape {list(shape)}: {error}"
        ) from error
    return where


def insert(params: Params, path: Path, value: Any) -> None:
    """Puts `value` at `path` of a nested dict."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


@contextlib.contextmanager
def progress_bar(num_bytes: int, shown: bool) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr over the bytes of the parameters, as a function that takes how many more there are."""
    with tqdm(total=num_bytes, desc="Loading weights", unit="B", unit_scale=True, disable=not shown) as bar:
        yield bar.update


def _to_device(array: np.ndarray, dtype: str, transpose: bool, sharding: Sharding | None) -> jax.Array:
    # Converted on the host, so that the device never holds a wider copy. The result never shares the file's memory.
    if sharding is not None:  # each device gets its part alone, so it is laid out on the host; device_put may not copy
        host = np.array(array.T if transpose else array, dtype=jnp.dtype(dtype), order="C")
        return jax.block_until_ready(jax.device_put(host, sharding))
    # Transposed on the device, because numpy takes four times as long for bf16; jnp.asarray copies.
    value = jnp.asarray(np.asarray(array, dtype=jnp.dtype(dtype)))
    # Waits, or the arrays of several tensors would be in memory at once.
    return jax.block_until_ready(value.T if transpose else value)
