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
    method = raw.get("quantization_config")
    require(method is None, "quantization_config", method, "none: quantised safetensors are not read")
    if model_type in family.text_models:  # the text model inside one of text and images
        return config_from_hf(_text_config(raw, model_type, family.text_models[model_type]))
    values, aliases = _transformers_defaults(model_type)
    values |= {aliases.get(key, key): value for key, value in raw.items()}
    values["eos_token_id"] = raw.get("eos_token_id")
    values["dtype"] = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return family.read_config(values)


def _text_config(raw: Mapping[str, Any], model_type: str, text_type: str) -> dict[str, Any]:
    """The config of the text model in one of text and images, with what the outer object says for both."""
    inner: Any = raw.get("text_config")
    require(isinstance(inner, Mapping), "text_config", inner, "an object")
    given = inner.get("model_type")
    require(given in (None, text_type), "text_config.model_type", given, text_type)
    shared = {key: value for key, value in raw.items() if key in ("dtype", "torch_dtype", "eos_token_id")}
    defaults, _ = _transformers_defaults(model_type)
    tied = raw.get("tie_word_embeddings", defaults["tie_word_embeddings"])  # the head is the outer model's
    return {**shared, **inner, "model_type": text_type, "tie_word_embeddings": tied}


def _transformers_defaults(model_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The defaults of its config class, and the other names that the class knows its keys by; none for a type that
    transformers does not know."""
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    if model_type not in CONFIG_MAPPING:
        return {}, {}
    config_class = CONFIG_MAPPING[model_type]
    fields = dataclasses.fields(config_class)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return defaults, config_class.attribute_map
