"""The model families: one file each, and the registry. `models/README.md` says how to add one. Host only, no jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pagedjax.models.checks import require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families import gemma, gpt2, llama, opt
from pagedjax.models.families.family import Family

FAMILIES = (llama.FAMILY, gemma.FAMILY, gpt2.FAMILY, opt.FAMILY)
MODEL_TYPES = tuple(model_type for family in FAMILIES for model_type in family.model_types)


def family_of(model_type: str) -> Family:
    """The family that a model type belongs to; ValueError if it is none of MODEL_TYPES."""
    require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    return next(family for family in FAMILIES if model_type in family.model_types)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`.

    A missing key takes the default of transformers' own config class for that model type, so a checkpoint means here
    what it means there. Only `eos_token_id` has no default: a file that names none states none. Raises ValueError for
    a model type, activation, rope type or quantisation that is not implemented.
    """
    model_type: Any = raw.get("model_type") or ""
    require(isinstance(model_type, str), "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    family = family_of(model_type)
    if model_type in family.text_models:  # the text model inside one of text and images
        inner = raw.get("text_config")
        require(isinstance(inner, Mapping), "text_config", inner, "an object")
        shared = {key: value for key, value in raw.items() if key in ("dtype", "torch_dtype", "eos_token_id")}
        raw = {**shared, **(inner or {}), "model_type": family.text_models[model_type]}
        return config_from_hf(raw)
    method = raw.get("quantization_config")
    require(method is None, "quantization_config", method, "none: quantised safetensors are not read")
    values, aliases = _transformers_defaults(model_type)
    values |= {aliases.get(key, key): value for key, value in raw.items()}
    values["eos_token_id"] = raw.get("eos_token_id")
    values["dtype"] = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return family.read_config(values)


def _transformers_defaults(model_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The defaults of its config class, and the other names that the class knows its keys by."""
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    config_class = CONFIG_MAPPING[model_type]
    fields = dataclasses.fields(config_class)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return defaults, config_class.attribute_map
