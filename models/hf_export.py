"""Writes a model as a Hugging Face folder (config.json, safetensors, tokenizer), for engines that read nothing else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from pagedjax.models.config import FLOAT_DTYPES, ModelConfig
from pagedjax.models.families import config_from_hf
from pagedjax.models.folders import check_free, written_whole
from pagedjax.models.safetensors_loader import INDEX_NAME, SINGLE_NAME
from pagedjax.models.weights import expected_tensors

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SHARD_BYTES = 2**31
"""A file ends with the tensor that fills it, so that no more than this is copied at a time."""


def export_hf(path: str | Path, config: ModelConfig, params: Mapping[str, Any], tokenizer: Any = None) -> None:
    """Writes weights (in their own dtype), config and tokenizer to a new folder, which is there whole or not at all.

    Raises ValueError for a config that has no such form here, for int8 weights, and for a path that is taken.
    """
    path = check_free(path, overwrite=False)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1 or not dtypes <= {*FLOAT_DTYPES}:
        raise ValueError(f"dtype: got {sorted(dtypes)}, expected one of {', '.join(FLOAT_DTYPES)} for all weights")
    raw = hf_config(replace(config, dtype=dtypes.pop()))
    with written_whole(path) as folder:
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(_shards(config, params), start=1):
            file = f"model-{number:05}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            del tensors  # or it would be in memory beside the next
        if len({*weight_map.values()}) == 1:
            (folder / file).rename(folder / SINGLE_NAME)
        else:
            (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        (folder / "config.json").write_text(json.dumps(raw, indent=1))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The same numbers under Hugging Face's names; ValueError for a config that they do not give back."""
    if config.model_type not in CLASSES:
        raise ValueError(f"model_type: got {config.model_type!r}, expected one of {', '.join(CLASSES)} for safetensors")
    raw = {
        "architectures": [CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": config.rope.rope_type, "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": next((window for window in config.layer_windows if window is not None), None),
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
    try:
        same = config_from_hf(raw) == config
    except ValueError:
        same = False
    if not same:
        raise ValueError(f"config: got {config}, expected one that config.json can hold: not implemented for this one")
    return raw


def _shards(config: ModelConfig, params: Mapping[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    tensors: dict[str, np.ndarray] = {}
    for name, (path, _, transpose) in expected_tensors(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        tensors[name] = np.array(leaf.T if transpose else leaf, order="C")
        if sum(array.nbytes for array in tensors.values()) >= SHARD_BYTES:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors
