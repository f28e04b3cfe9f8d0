"""What `pagedjax.save` writes of a model beside its arrays, as a JSON file and back, field by field. Host only."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from pagedjax.models.checks import is_finite
from pagedjax.models.config import ModelConfig, Quantization

CONFIG_NAME = "pagedjax.json"
"""The file that makes a folder one of ours."""
FORMAT_VERSION = 1
"""Rises with every change of the folder or of ModelConfig's fields: a file of another version is refused."""


def write_config(folder: Path, config: ModelConfig, quantization: Quantization | None) -> None:
    """Writes them into the folder."""
    value = {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "quantization": None if quantization is None else dataclasses.asdict(quantization),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_config(folder: Path) -> tuple[ModelConfig, Quantization | None]:
    """What `write_config` wrote; ValueError that names what is missing, unknown or of another type."""
    path = folder / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object")
    if raw.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format_version: got {raw.get('format_version')!r} in {path}, expected {FORMAT_VERSION}")
    try:
        config = _decode(ModelConfig, raw.get("config"), "config")
        return config, _decode(Quantization | None, raw.get("quantization"), "quantization")
    except ValueError as error:
        raise ValueError(f"{path} is not a valid config: {error}") from error


def _decode(kind: Any, value: Any, field: str) -> Any:
    """`value`, as JSON has it, as the type of a dataclass' field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, field)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (kind,) = (arg for arg in args if arg is not type(None))
        return _decode(kind, value, field)
    if origin is tuple:
        assert args[1:] == (...,), f"{field} is a {kind}"
        _require(isinstance(value, list), field, value, "a list")
        return tuple(_decode(args[0], item, f"{field}[{index}]") for index, item in enumerate(value))
    if kind is float:
        _require(is_finite(value), field, value, "a number, and finite")
        return float(value)
    assert kind in (int, str, bool), f"{field} is a {kind}"
    _require(type(value) is kind, field, value, f"of type {kind.__name__}")
    return value


def _decode_fields(kind: Any, value: Any, field: str) -> Any:
    _require(isinstance(value, dict), field, value, "an object")
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    missing, unknown = sorted(set(names) - set(value)), sorted(set(value) - set(names))
    _require(not missing and not unknown, field, f"missing {missing}, unknown {unknown}", "every field and no other")
    return kind(**{name: _decode(hints[name], value[name], f"{field}.{name}") for name in names})


def _require(ok: bool, field: str, got: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{field}: got {got!r}, expected {expected}")
