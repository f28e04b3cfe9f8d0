"""Puts the arrays of a checkpoint where they are to live, one at a time; each is used once or named in an error.

The host holds one array beside the finished parameters, whatever the size of the model.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from tqdm import tqdm

from pagedjax.models.config import ModelConfig, Quantization, check_float_dtype
from pagedjax.models.quantization import is_to_quantize, quantize_leaf
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
    quantization: Quantization | None = None,
) -> Params:
    """The nested dict that the model is applied with, from a stream of (Hugging Face name, array in the file's layout).

    Each array is converted, sent to its place (see `sharding_for`; the default device without `sharding`) and, where
    `quantization` wants it, quantised before the next is read. Raises one ValueError that lists every tensor that is
    missing, unknown, given twice or of the wrong shape.
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
            if array.shape != expected[name].file_shape:
                expected_shape = list(expected[name].file_shape)
                problems.append(f"wrong shape: {name} is {list(array.shape)}, expected {expected_shape}")
            elif not problems:  # once something is wrong, only the list of problems is of use
                where = sharding_for(sharding, path, shape)
                value = _to_device(array, jnp.dtype(dtype), transpose, where)
                advance(value.nbytes)
                leaves = {path[-1]: value}
                if is_to_quantize(path, quantization):
                    leaves = quantize_leaf(path, value)
                    if where is not None:
                        places = {path[-1]: where, "scale": sharding_of_scale(where, path)}
                        leaves = {key: jax.device_put(leaf, places[key]) for key, leaf in leaves.items()}
                for key, leaf in leaves.items():
                    insert(params, (*path[:-1], key), jax.block_until_ready(leaf))  # or several would be under way
        elif not is_ignorable(name, config):
            problems.append(f"not used: {name} {list(array.shape)}")
        seen.add(name)

    num_bytes = jnp.dtype(dtype).itemsize * sum(prod(tensor.shape) for tensor in expected.values())
    with progress_bar(num_bytes, progress) as advance:
        for name, array in tensors:
            take(name, array)
            del array  # or it would be in memory beside the next
            gc.collect(0)  # jax lets go of host arrays when garbage is collected
    problems += [f"missing: {name} {list(spec.file_shape)}" for name, spec in expected.items() if name not in seen]
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


def sharding_of_scale(where: Sharding | None, path: Path) -> Sharding | None:
    """Of the scales of an int8 array at `path` that lives at `where`: of a table's rows, or of a kernel's columns."""
    if not isinstance(where, NamedSharding):
        return where
    axes = (*where.spec, None, None)
    return NamedSharding(where.mesh, PartitionSpec(axes[0 if path[-1] == "embedding" else 1]))


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


def _to_device(array: np.ndarray, dtype: np.dtype, transpose: bool, sharding: Sharding | None) -> jax.Array:
    """The array as a parameter, in memory that is not the stream's."""
    if sharding is not None:  # each device gets its part alone, so it is laid out on the host; device_put may not copy
        return jax.device_put(np.array(array.T if transpose else array, dtype=dtype, order="C"), sharding)
    # Converted on the host, so that the device never holds a wider copy; but a CPU's memory is the host's.
    if jnp.zeros(()).sharding.device_set.pop().platform != "cpu":
        array = np.asarray(array, dtype=dtype)
    if not transpose and array.dtype == dtype:
        return jnp.asarray(array)  # copies
    # A CPU takes aligned memory without a copy. XLA transposes, because numpy takes four times as long for bf16.
    return _lay_out(jax.device_put(array), dtype, transpose)


@partial(jax.jit, static_argnums=(1, 2))
def _lay_out(array: jax.Array, dtype: np.dtype, transpose: bool) -> jax.Array:
    return (array.T if transpose else array).astype(dtype)
