"""Reads a Hugging Face model folder: `config.json` and one or many safetensors files."""

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.models.host_arrays import aligned_empty

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    code: str
    """Its type, as the format writes it."""
    shape: tuple[int, ...]
    start: int
    """Where its data begins in the file, in bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError that names the file when it is absent or holds something else."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def shard_names(folder: Path) -> dict[str, frozenset[str]]:
    """Which tensors each safetensors file of the folder holds, checked against the files themselves.

    With a `model.safetensors.index.json` the index is the authority: a file that it names and that is not there, a
    tensor that it places in a file that lacks it, and a tensor in a file that it does not name there, are all errors.
    """
    if not (folder / INDEX_NAME).is_file():
        return {SINGLE_NAME: _names_in(folder / SINGLE_NAME)}
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    known = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not (known and weight_map):
        raise ValueError(f"{folder / INDEX_NAME} has no weight_map from tensor names to file names")
    shards: dict[str, frozenset[str]] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ValueError(f"{INDEX_NAME} names {file!r}, expected a file in the same folder")
        indexed = frozenset(name for name, where in weight_map.items() if where == file)
        held = _names_in(folder / file)
        if indexed != held:
            absent, extra = sorted(indexed - held), sorted(held - indexed)
            raise ValueError(f"{INDEX_NAME} and {file} differ: missing in the file {absent}, not in the index {extra}")
        shards[file] = held
    return shards


def iter_tensors(folder: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a model folder, (name, array in the file's own float type), one at a time, a file's largest first:
    what is needed beside the finished parameters is then needed while there are few of them.

    Those that `skip` is true of are left out, of whatever type they are. The others are read, not mapped: pages of a
    mapped file stay in memory until the whole file is closed.
    """
    for file in shard_names(folder):
        with (folder / file).open("rb") as stream:
            for name, tensor in _read_header(stream).items():
                if skip(name):
                    continue
                if tensor.code not in FLOAT_CODES:
                    codes = ", ".join(FLOAT_CODES)
                    raise ValueError(f"tensor {name} is of type {tensor.code}, expected one of {codes}")
                stream.seek(tensor.start)
                values = aligned_empty(tensor.shape, _DTYPES[tensor.code])
                if stream.readinto(values.reshape(-1).view(np.uint8).data) != values.nbytes:
                    raise ValueError(f"{file} ends within tensor {name}")
                yield name, values
                del values  # or it would be in memory beside the next


def stored_dtype(folder: Path) -> str:
    """The float type of the first tensor that has one: what a checkpoint is in whose config names no dtype."""
    file = next(iter(shard_names(folder)))
    with (folder / file).open("rb") as stream:
        codes = [tensor.code for _, tensor in sorted(_read_header(stream).items())]
    code = next((code for code in codes if code in FLOAT_CODES), None)
    if code is None:
        raise ValueError(f"the tensors of {file} are of types {sorted(set(codes))}, expected {', '.join(FLOAT_CODES)}")
    return FLOAT_CODES[code]


def _read_header(stream: BinaryIO) -> dict[str, StoredTensor]:
    """Where the tensors of an open file lie, the largest first.

    The format: eight bytes with the header's length, the header as JSON, the data. `_names_in` has had the package
    check it.
    """
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    found = {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return dict(sorted(found.items(), key=lambda item: -prod(item[1].shape)))


def _names_in(path: Path) -> frozenset[str]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        with safe_open(path, framework="np") as shard:
            return frozenset(shard.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
