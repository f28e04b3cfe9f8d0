"""GGUF files of Gemma and GPT-2 (cases B52, B55): the same config, parameters and logits as from Hugging Face's files.

They are written as llama.cpp's converter writes them: names by the `gguf` package's own map, 1 added to Gemma's norms,
GPT-2's kernels turned around.
"""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from benchmark_scripts import load
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny_models import Tensors, random_tensors, save_folder

from pagedjax.models.families import config_from_hf
from pagedjax.models.gguf_loader import config_from_gguf, open_gguf
from pagedjax.models.load import Checkpoint, load_checkpoint

parity = load("model_parity")
GEMMA2 = {**parity.CASES["Gemma 2"], "query_pre_attn_scalar": 16, "rms_norm_eps": 2.0**-16}
GEMMA3 = {**parity.CASES["Gemma 3"], "query_pre_attn_scalar": 16, "rms_norm_eps": 2.0**-16}
del GEMMA3["sliding_window_pattern"], GEMMA3["rope_local_base_freq"]  # 6 and 10000, as no key of the file says
GPT2 = {**parity.GPT2, "layer_norm_epsilon": 2.0**-16}
CASES: dict[str, dict[str, Any]] = {
    "gemma": {**parity.CASES["Gemma"], "rms_norm_eps": 2.0**-16},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3 with a final cap": {**GEMMA3, "final_logit_softcapping": 3.0},
    "gpt2": GPT2,
    "gpt2 with a head": {**GPT2, "tie_word_embeddings": False},
}


def add_metadata(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    config = config_from_hf(raw)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    if raw["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.rope_type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)
    if config.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_soft_cap)
    if config.final_soft_cap is not None:
        writer.add_final_logit_softcapping(config.final_soft_cap)
    if config.layer_windows:
        writer.add_sliding_window(raw["sliding_window"])


def write(path: Path, raw: dict[str, Any], tensors: Tensors, kind: str = "F32", skip: str = "", **extra: Any) -> Path:
    """Writes a file; `skip` is a key that it shall lack, `extra` are keys of numbers, with "__" for the dots."""
    arch = raw["model_type"].removesuffix("_text")
    writer = GGUFWriter(path, arch)
    add_metadata(writer, raw)
    for key, value in extra.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    writer.kv_data[0].pop(f"{arch}.{skip}", None)
    model_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(model_arch, config_from_hf(raw).num_layers)
    for name, value in tensors.items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            value = np.ascontiguousarray(value.T)
        quant = GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        writer.add_tensor(own_name, quantize(value, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(raw: dict[str, Any]) -> Tensors:
    """As a file of the hub has them: GPT-2's queries, keys and values side by side."""
    tensors = random_tensors(config_from_hf(raw))
    for name in [name for name in tensors if "[q]" in name]:
        parts = [tensors.pop(name.replace("[q]", f"[{part}]")) for part in "qkv"]
        tensors[name.replace("[q]", "")] = np.concatenate(parts, axis=-1)
    return tensors


def both(tmp_path: Path, raw: dict[str, Any], kind: str = "F32") -> tuple[Checkpoint, Checkpoint]:
    tensors = tensors_of(raw)
    folder = save_folder(tmp_path / "hf", raw, tensors)
    return load_checkpoint(folder, dtype="float32"), load_checkpoint(write(tmp_path / "m.gguf", raw, tensors, kind))


@pytest.mark.parametrize("raw", CASES.values(), ids=CASES.keys())
def test_config_parameters_and_logits_equal_safetensors(tmp_path, raw):
    expected, actual = both(tmp_path, raw)
    original = expected.config.rope.original_max_position_embeddings  # of no use to linear scaling, and not in the file
    rope = dataclasses.replace(actual.config.rope, original_max_position_embeddings=original)
    assert dataclasses.replace(actual.config, rope=rope, dtype=expected.config.dtype) == expected.config
    # 1 + w - 1 is w up to a rounding, and 1 more makes the same number of it again.
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2.0**-23, rtol=0),
        actual.params,
        expected.params,
    )
    token_ids = parity.random_ids(1, 60)
    logits = [parity.dense_logits(each.config, each.params, token_ids) for each in (actual, expected)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_quantised_files_stay_near(tmp_path, name):
    raw = {**CASES[name], **({"n_embd": 64} if name == "gpt2" else {"hidden_size": 64})}  # whole blocks of 32
    expected, actual = both(tmp_path, raw, "Q8_0")
    for ours, theirs in zip(jax.tree.leaves(actual.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.01)


@pytest.mark.oracle
def test_gpt2_equals_transformers_reading_the_same_file(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import AutoModelForCausalLM

    raw = {**GPT2, "n_positions": 1024, "vocab_size": 50257}  # it reads neither from the file
    path = write(tmp_path / "m.gguf", raw, tensors_of(raw))
    oracle: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    config, params, _ = load_checkpoint(path)
    token_ids = parity.random_ids(1, 60)
    logits = parity.dense_logits(config, params, token_ids)
    np.testing.assert_allclose(logits, parity.logits_of(oracle, token_ids), atol=5e-5, rtol=0)


def test_the_largest_scale_scores_by_another_number(tmp_path):
    """No key says so: llama.cpp goes by the number of layers, 46 in Gemma 2 27B and 62 in Gemma 3 27B."""
    raw = {**GEMMA2, "num_hidden_layers": 46, "intermediate_size": 8, "layer_types": None}
    config = config_from_gguf(open_gguf(write(tmp_path / "m.gguf", raw, tensors_of(raw))))
    assert config.attention_scale == pytest.approx((48 / 4) ** -0.5)
    assert config.layer_windows == (8, None) * 23


REFUSED = {
    "no window": ({"skip": "attention.sliding_window"}, "attention.sliding_window: got None, expected an int >= 1"),
    "no cap": ({"skip": "attn_logit_softcapping"}, "attn_logit_softcapping: got None, expected a number"),
    "another pattern": ({"attention__sliding_window_pattern": 3}, "sliding_window_pattern: got 3, expected none, or 2"),
    "experts": ({"expert_count": 4}, "expert_count: got 4"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_implemented_is_refused(tmp_path, changes, message):
    path = write(tmp_path / "m.gguf", GEMMA2, tensors_of(GEMMA2), **changes)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_a_file_without_a_tensor_names_it(tmp_path):
    tensors = tensors_of(GEMMA3)
    del tensors["model.layers.2.self_attn.k_norm.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.self_attn\.k_norm\.weight \[16\]"):
        load_checkpoint(write(tmp_path / "m.gguf", GEMMA3, tensors))
