"""A model as a folder that `pagedjax.load` reads back: its arrays by Orbax, its config, its tokenizer.

    pagedjax.json    the config (models/config_file.py)
    params/          the arrays, each in its own dtype
    tokenizer/       if there is one

Arrays are restored straight into any sharding, whatever they were saved from.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from pagedjax.models.config import ModelConfig
from pagedjax.models.config_file import write_config
from pagedjax.models.decoder import CausalLM
from pagedjax.models.folders import check_free, written_whole
from pagedjax.models.placement import Path as ParamPath
from pagedjax.models.placement import Placement, progress_bar, sharding_for, sharding_of_scale
from pagedjax.models.quantization import is_quantized, quantization_in
from pagedjax.models.weights import Params, parameter_shapes

PARAMS_FOLDER, TOKENIZER_FOLDER = "params", "tokenizer"
CHUNK_BYTES = 2**26
"""Most of a piece that an array is stored in: a device that takes a part of the array reads the pieces it lies in."""

Array = jax.Array | np.ndarray


def save(
    path: str | Path, model: CausalLM, params: Mapping[str, Any], tokenizer: Any = None, *, overwrite: bool = False
) -> None:
    """Writes a model to a new folder, from which `pagedjax.load(path)` and `LLM(path)` take it.

    `params` are those that `model` is applied with, on one device or on many, each array in its own dtype (int8 too).
    The folder is there whole or not at all. One that exists and is not empty is refused; with `overwrite` it is
    replaced if `save` wrote it. Raises ValueError for a path that is taken and for params that are not the model's.
    """
    path = check_free(path, overwrite)
    arrays = dict(_flatten(params))
    for where, array in arrays.items():
        if not isinstance(array, Array):
            raise ValueError(f"params: got a {type(array).__name__} at {'/'.join(where)}, expected an array")
    _check(model.config, arrays, "params")
    own = [arrays[path].dtype for path in parameter_shapes(model.config)]
    config = replace(model.config, dtype=str(next(dtype for dtype in own if jnp.issubdtype(dtype, jnp.floating))))
    with written_whole(path) as folder:
        with _checkpointer() as checkpointer:
            pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
            checkpointer.save(folder / PARAMS_FOLDER, args=ocp.args.PyTreeSave(params, save_args=pieces))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / TOKENIZER_FOLDER))
        write_config(folder, config, quantization_in(params))


def restore_params(
    folder: Path,
    config: ModelConfig,
    dtype: str | None = None,
    progress: bool = False,
    sharding: Placement | None = None,
) -> Params:
    """The arrays of a folder that `save` wrote, a layer at a time, each restored straight into its place.

    The model's float arrays are converted to `dtype`, or keep their own with None; what is in int8 stays so. `sharding`
    is that of `placement.build_params`. Raises ValueError for a folder that is damaged or lacks an array.
    """
    source = folder.absolute() / PARAMS_FOLDER  # Orbax takes no other
    with _checkpointer() as checkpointer, _damage_named(source):
        metadata = checkpointer.metadata(source).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata of its arrays")
        tree = metadata.tree
    stored = dict(_flatten(tree))
    _check(config, stored, str(source))
    own = parameter_shapes(config)
    default = jnp.zeros(()).sharding

    def target(path: ParamPath) -> jax.ShapeDtypeStruct:
        shape, kept = tuple(stored[path].shape), stored[path].dtype
        # The scales of a table are in the model's dtype, those of kernels are not.
        is_models = path in own or path == ("embed_tokens", "scale")
        converted = dtype is not None and is_models and jnp.issubdtype(kept, jnp.floating)
        where = sharding_for(sharding, path, shape) if path in own else place_of_scale(path)
        where = where or default
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype) if converted else kept, sharding=where)

    def place_of_scale(path: ParamPath) -> Sharding | None:
        kernel = next(each for each in stored if each[:-1] == path[:-1] and is_quantized(stored[each]))
        return sharding_of_scale(sharding_for(sharding, kernel, tuple(stored[kernel].shape)), kernel)

    targets = {path: target(path) for path in stored}
    num_bytes = sum(prod(array.shape) * array.dtype.itemsize for array in targets.values())
    params: Params = {}
    with progress_bar(num_bytes, progress) as advance, _checkpointer() as checkpointer:
        for key, part in tree.items():
            item = jax.tree_util.tree_map_with_path(lambda path, _: targets[_keys(path)], {key: part})
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            request = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            with _damage_named(source):
                params |= checkpointer.restore(source, args=request)
            advance(sum(leaf.nbytes for leaf in jax.tree.leaves(params[key])))
    return params


def _check(config: ModelConfig, arrays: Mapping[ParamPath, Any], where: str) -> None:
    """Every parameter of the model is there once in its shape, and nothing else but the scales of integer arrays."""
    expected = parameter_shapes(config)
    for path, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.integer):
            scale = (*path[:-1], "scale")
            expected[scale] = tuple(arrays[scale].shape) if scale in arrays else ()
    problems = [f"missing: {'/'.join(path)}" for path in expected if path not in arrays]
    for path, array in arrays.items():
        name, shape = "/".join(path), tuple(array.shape)
        if path not in expected:
            problems.append(f"not used: {name} {list(shape)}")
        elif shape != expected[path]:
            problems.append(f"wrong shape: {name} is {list(shape)}, expected {list(expected[path])}")
    if problems:
        raise ValueError(f"{where} do not fit the {config.model_type} config: " + "; ".join(problems))


def _flatten(tree: Any, path: ParamPath = ()) -> Iterator[tuple[ParamPath, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, (*path, str(key)))
    else:
        yield path, tree


def _keys(path: tuple[Any, ...]) -> ParamPath:
    return tuple(key.key for key in path)


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


@contextmanager
def _damage_named(source: Path) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError:  # such as no memory on the device
        raise
    except Exception as error:  # of damaged files Orbax and its store raise many kinds, bare Exception too
        raise ValueError(f"{source} is damaged or incomplete: {' '.join(str(error).split())[:300]}") from error
