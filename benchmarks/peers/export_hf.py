"""Writes any model that pagedjax loads as a Hugging Face folder in f32, for engines that read nothing else.

python benchmarks/peers/export_hf.py smollm2-135m-instruct OUT_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pagedjax.models.config import ModelConfig
from pagedjax.models.load import load_checkpoint
from pagedjax.models.weights import expected_tensors

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export(name_or_path: str, folder: Path) -> Path:
    """Weights, config and tokenizer; returns the folder."""
    config, params, tokenizer = load_checkpoint(name_or_path, dtype="float32")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (path, _, transpose) in expected_tensors(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        tensors[name] = np.array(leaf.T if transpose else leaf, order="C")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The same numbers under Hugging Face's names."""
    if config.rope.rope_type != "default" or config.rope.freq_factors:
        raise ValueError(f"rope: got {config.rope}, expected the plain one: no other is exported")
    return {
        "architectures": [CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": "float32",
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(export(sys.argv[1], Path(sys.argv[2])))
