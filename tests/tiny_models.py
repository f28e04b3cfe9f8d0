"""Tiny random checkpoints on disk, for the tests of loading: Hugging Face folders and GGUF files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

from pagedjax.models.config import ModelConfig
from pagedjax.models.families import config_from_hf
from pagedjax.models.weights import expected_tensors

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "sliding_window": None,
}

Tensors = dict[str, np.ndarray]


def tiny(**changes: Any) -> dict[str, Any]:
    """A config.json; a value of `...` leaves the key out."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not ...}


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """Random values for every tensor, in the file's layout; norms and biases are not ones and zeros."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (path, shape, transpose) in expected_tensors(config).items():
        mean = 1.0 if path[-1] == "scale" and not config.norm_offset else 0.0
        values = rng.normal(mean, 0.2, shape[::-1] if transpose else shape)
        tensors[name] = values.astype(np.float32)
    return tensors


def save_folder(folder: Path, raw: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Writes config.json and the tensors, in one file or in several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[index::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_tiny(folder: Path, seed: int = 0, **changes: Any) -> tuple[Path, Tensors]:
    raw = tiny(**changes)
    tensors = random_tensors(config_from_hf(raw), seed)
    return save_folder(folder, raw, tensors), tensors


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


def interleave_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of llama's q and k rows, row by row: half-rotated pairs (i, i + d/2) become neighbours."""
    head_dim = array.shape[0] // num_heads
    out = np.empty_like(array)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * pair] = array[start + pair]
            out[start + 2 * pair + 1] = array[start + head_dim // 2 + pair]
    return out


def write_gguf(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Tensors,
    kind: str = "F32",
    extra: Tensors | None = None,
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes what llama.cpp's converter would: matrices quantised as `kind`, vectors in f32, llama's q and k permuted.

    `metadata` adds to the header; `extra` are tensors under their GGUF names.
    """
    arch = raw["model_type"]
    writer = GGUFWriter(path, arch)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    metadata(writer)
    for name, value in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = interleave_rows(value, heads)
        quant = GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(value, quant), raw_dtype=quant)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
