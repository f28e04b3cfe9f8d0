"""Loading a GGUF file (case B55): block formats, llama's q/k row order, side tensors, what is refused."""

import struct

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tiny_models import interleave_rows, random_tensors, save_folder, tiny, write_gguf

from pagedjax.models.families import config_from_hf
from pagedjax.models.gguf_loader import QUANT_TYPES, config_from_gguf, dequantize_tensor, open_gguf, unpermute_rows
from pagedjax.models.load import load_checkpoint
from pagedjax.models.rope import RopeConfig

# --- block formats: one scalar reading of each, straight from the format


def f16(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def read_q4(block: bytes, has_min: bool) -> list[float]:
    scale, low = f16(block, 0), f16(block, 2) if has_min else -8 * f16(block, 0)
    nibbles = block[4 if has_min else 2 :]
    return [scale * (byte & 15) + low for byte in nibbles] + [scale * (byte >> 4) + low for byte in nibbles]


def read_q5(block: bytes, has_min: bool) -> list[float]:
    scale, low = f16(block, 0), f16(block, 2) if has_min else -16 * f16(block, 0)
    start = 4 if has_min else 2
    high = int.from_bytes(block[start : start + 4], "little")
    nibbles = block[start + 4 :]
    quants = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
    return [scale * (quant + 16 * (high >> index & 1)) + low for index, quant in enumerate(quants)]


def read_q8(block: bytes) -> list[float]:
    return [f16(block, 0) * quant for quant in struct.unpack_from("<32b", block, 2)]


def read_k(block: bytes, has_high: bool) -> list[float]:
    """Q4_K and Q5_K: 8 groups of 32 with 6-bit scales and minima, packed in 12 bytes."""
    scale, low, packed = f16(block, 0), f16(block, 2), block[4:16]
    high = block[16:48] if has_high else bytes(32)
    nibbles = block[48:] if has_high else block[16:]
    values = []
    for group in range(8):
        if group < 4:
            group_scale, group_low = packed[group] & 63, packed[group + 4] & 63
        else:
            group_scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            group_low = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for index in range(32):
            quant = nibbles[group // 2 * 32 + index] >> 4 * (group % 2) & 15
            quant += 16 * (high[index] >> group & 1)
            values.append(scale * group_scale * quant - low * group_low)
    return values


def read_q6_k(block: bytes) -> list[float]:
    scales, scale = struct.unpack_from("<16b", block, 192), f16(block, 208)
    values = []
    for index in range(256):
        half, quarter, lane = index // 128, index % 128 // 32, index % 32
        quant = block[64 * half + lane + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
        quant |= (block[128 + 32 * half + lane] >> 2 * quarter & 3) << 4
        values.append(scale * scales[index // 16] * (quant - 32))
    return values


READERS = {
    "F32": (lambda block: list(struct.unpack("<f", block)), ()),
    "F16": (lambda block: [f16(block, 0)], (0,)),
    "BF16": (lambda block: list(struct.unpack("<f", b"\0\0" + block)), ()),
    "Q4_0": (lambda block: read_q4(block, False), (0,)),
    "Q4_1": (lambda block: read_q4(block, True), (0, 2)),
    "Q5_0": (lambda block: read_q5(block, False), (0,)),
    "Q5_1": (lambda block: read_q5(block, True), (0, 2)),
    "Q8_0": (read_q8, (0,)),
    "Q4_K": (lambda block: read_k(block, False), (0, 2)),
    "Q5_K": (lambda block: read_k(block, True), (0, 2)),
    "Q6_K": (read_q6_k, (208,)),
}


def random_blocks(kind: str, num_rows: int, blocks_per_row: int) -> np.ndarray:
    """Random bytes with sane f16 numbers where a block has them, uint8 [num_rows, bytes per row]."""
    rng = np.random.default_rng(0)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = rng.integers(0, 256, (num_rows * blocks_per_row, size), np.uint8)
    for at in READERS[kind][1]:
        blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    if kind in ("F32", "BF16"):  # any exponent but the one of infinities and NaN
        blocks[:, -1] &= 0xBF
    return blocks.reshape(num_rows, -1)


def write_one_tensor(path, data: np.ndarray, kind: str):
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path).tensors[0]


def test_every_type_has_a_reader():
    assert set(READERS) == set(QUANT_TYPES)


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_dequantised_blocks(tmp_path, kind):
    data = random_blocks(kind, num_rows=3, blocks_per_row=2)
    reader, _ = READERS[kind]
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    raw = data.tobytes()
    expected = [value for at in range(0, len(raw), size) for value in reader(raw[at : at + size])]
    stored = data.view("<f4") if kind == "F32" else data.view("<f2") if kind == "F16" else data
    values = dequantize_tensor(write_one_tensor(tmp_path / "t.gguf", stored, kind))
    assert (values.shape, values.dtype) == ((3, len(expected) // 3), np.float32)
    # a few f32 roundings of a difference of two terms as large as the largest value
    np.testing.assert_allclose(values.ravel(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_values_stay_near(tmp_path, kind):
    values = np.random.default_rng(0).uniform(-1, 1, (4, 64)).astype(np.float32)
    quantised = quantize(values, GGMLQuantizationType[kind])
    step = 2 / 2 ** int(kind[1]) if kind != "Q8_0" else 1 / 127
    result = dequantize_tensor(write_one_tensor(tmp_path / "t.gguf", quantised, kind))
    assert 0 < np.abs(result - values).max() < 1.1 * step


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "TQ1_0"])
def test_other_types_are_refused_by_name(tmp_path, kind):
    values_per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    tensor = write_one_tensor(tmp_path / "t.gguf", np.zeros((2, size), np.uint8), kind)
    assert list(tensor.shape) == [values_per_block, 2]
    with pytest.raises(ValueError, match=f"tensor t is of quantisation type {kind}, expected one of F32"):
        dequantize_tensor(tensor)


# --- the same parameters as from safetensors


def both(tmp_path, kind="F32", metadata=lambda writer: None, **changes):
    raw = tiny(**changes)
    tensors = random_tensors(config_from_hf(raw))
    if kind != "F32":  # what the quantised file can hold exactly
        quant = GGMLQuantizationType[kind]
        for name, value in tensors.items():
            if value.ndim == 2:
                tensors[name] = dequantize_tensor(write_one_tensor(tmp_path / "t", quantize(value, quant), kind))
    folder = save_folder(tmp_path / "hf", raw, tensors)
    return load_checkpoint(folder), write_gguf(tmp_path / "m.gguf", raw, tensors, kind, metadata=metadata)


FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama head_dim key": {"hidden_size": 96},
    "llama no head_dim key": {"head_dim": ...},
    "qwen2": {"model_type": "qwen2", "head_dim": ...},
    "qwen3": {"model_type": "qwen3", "hidden_size": 96},
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_parameters_equal_safetensors(tmp_path, changes, kind):
    expected, path = both(tmp_path, kind, rms_norm_eps=2.0**-16, **changes)
    config, params, tokenizer = load_checkpoint(path, dtype="float32")
    assert tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)
    for name in ("model_type", "vocab_size", "hidden_size", "head_dim", "num_heads", "num_kv_heads", "num_layers"):
        assert getattr(config, name) == getattr(expected.config, name)
    for name in ("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "norm_eps"):
        assert getattr(config, name) == getattr(expected.config, name)
    assert config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


@pytest.mark.parametrize("shape", [(64, 5), (64,)])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_unpermute_undoes_the_interleaving(shape, num_heads):
    array = np.arange(np.prod(shape)).reshape(shape).astype(np.float32)
    mixed = interleave_rows(array, num_heads)
    assert not np.array_equal(mixed, array)
    np.testing.assert_array_equal(unpermute_rows(mixed, num_heads), array)


# Without llama's biases and qwen3's head_dim: transformers reads neither from a GGUF file.
ORACLE_FAMILIES = ["llama", "llama tied", "llama head_dim key", "llama no head_dim key", "qwen2"]


@pytest.mark.oracle
@pytest.mark.parametrize("family", ORACLE_FAMILIES)
def test_logits_equal_transformers_gguf(tmp_path, family):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    import jax.numpy as jnp
    from transformers import AutoModelForCausalLM

    from pagedjax.models.decoder import CausalLM

    def metadata(writer):  # transformers has no other source for these two
        writer.add_vocab_size(96)
        writer.add_rope_dimension_count(16)

    _, path = both(tmp_path, metadata=metadata, **FAMILIES[family])
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    token_ids = np.random.default_rng(1).integers(0, 96, (1, 60))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(token_ids)).logits.numpy()
    config, params, _ = load_checkpoint(path)
    logits = CausalLM(config).apply({"params": params}, jnp.asarray(token_ids, jnp.int32))
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-4, rtol=2e-4)


# --- side tensors and the header


def write(tmp_path, metadata=lambda writer: None, extra=None, **changes):
    raw = tiny(**changes)
    tensors = random_tensors(config_from_hf(raw))
    return write_gguf(tmp_path / "m.gguf", raw, tensors, extra=extra, metadata=metadata)


def test_rope_freqs_divide_the_frequencies(tmp_path):
    factors = np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32)
    path = write(tmp_path, lambda writer: writer.add_rope_freq_base(500.0), {"rope_freqs.weight": factors})
    config = load_checkpoint(path).config
    assert config.rope == RopeConfig(theta=500.0, freq_factors=tuple(factors.tolist()))
    np.testing.assert_allclose(config.rope.inv_freq(16), RopeConfig(theta=500.0).inv_freq(16) / factors, rtol=1e-6)
    assert load_checkpoint(write(tmp_path)).config.rope == RopeConfig()


def test_unknown_tensors_are_named(tmp_path):
    path = write(tmp_path, extra={"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(ValueError, match=r"not used: blk.0.ffn_gate_inp.weight \[2, 32\]"):
        load_checkpoint(path)


def test_missing_tensors_are_named(tmp_path):
    raw = tiny(attention_bias=True)
    tensors = random_tensors(config_from_hf(raw))
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.bias"):
        del tensors[name]
    path = write_gguf(tmp_path / "m.gguf", raw, tensors)
    with pytest.raises(ValueError, match=r"missing: model.layers.1.self_attn.k_proj.bias \[32\]; missing: model.norm"):
        load_checkpoint(path)


REFUSED = {
    "yarn": (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "rope.scaling.type: got 'yarn'"),
    "linear": (lambda writer: writer.add_string("llama.rope.scaling.type", "linear"), "rope.scaling.type"),
    "experts": (lambda writer: writer.add_expert_count(8), "expert_count: got 8"),
    "window": (lambda writer: writer.add_sliding_window(32), "sliding_window: got 32"),
    "partial rope": (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count: got 8, expected head_d"),
    "split": (lambda writer: writer.add_uint16("split.count", 2), "one part of a split GGUF file"),
}


@pytest.mark.parametrize(("metadata", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_implemented_is_refused(tmp_path, metadata, message):
    path = write(tmp_path, metadata)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_scaling_type_none_is_fine(tmp_path):
    path = write(tmp_path, lambda writer: writer.add_string("llama.rope.scaling.type", "none"))
    assert config_from_gguf(open_gguf(path)).rope == RopeConfig()


def test_unknown_architecture_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_one_tensor(path, np.ones((1, 4), np.float32), "F32")
    with pytest.raises(ValueError, match=r"token_embd.weight is missing"):
        load_checkpoint(path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ValueError, match=r"general.architecture: got 'mamba', expected one of llama, qwen2, qwen3"):
        load_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 400])
def test_a_cut_off_file_is_an_error(tmp_path, keep):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is not a valid GGUF file"):
        load_checkpoint(path)


def test_a_file_cut_off_in_its_tensors_is_an_error(tmp_path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not a valid GGUF file"):
        load_checkpoint(path)


def test_every_end_of_text_id_counts(tmp_path):
    def metadata(writer):
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)
        writer.add_eom_token_id(7)

    assert load_checkpoint(write(tmp_path, metadata)).config.eos_token_ids == (7, 9)
