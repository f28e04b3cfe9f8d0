"""Reads a GGUF file (llama.cpp's format): metadata to ModelConfig, quantised tensors to Hugging Face's layout.

Source of the format: the `gguf` package and its key names (`<arch>.attention.head_count`, ...).
"""

import mmap
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from jaxtyping import Float, Float32

from pagedjax.models.config import ModelConfig, as_token_ids, head_dim_or_default
from pagedjax.models.families import FAMILIES, family_of
from pagedjax.models.gguf_rope import rope_from_gguf
from pagedjax.models.host_arrays import aligned_empty
from pagedjax.models.rope import RopeConfig

ARCHITECTURES = {arch: family for family in FAMILIES for arch in family.gguf_types}
QUANT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
ROPE_FREQS = "rope_freqs.weight"
DEQUANTIZE_VALUES = 2**20
"""Dequantised at a time."""
# What ends a text: the end of a text, of a turn, of a message that waits for a tool.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# The names of modules, as `Family.module_name` takes them.
_TOP_NAMES = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES_OF_BOTH_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class _FastReader(GGUFReader):
    """The package's reader, three times faster on vocabularies: it slices once per string, and a slice of a memmap
    costs far more than one of the plain array over the same memory."""

    @property
    def data(self) -> np.ndarray:
        return self._plain_data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._mapping = mapped.base
        self._plain_data = np.asarray(mapped)

    def forget_pages(self) -> None:
        """Gives back the memory of what was read so far; reading it again reads the file again."""
        if isinstance(self._mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


def open_gguf(path: Path) -> GGUFReader:
    """The file's reader (tensors are memory-mapped); ValueError when it is not a whole GGUF file."""
    try:
        reader = _FastReader(path)
    except (ValueError, IndexError, KeyError) as error:  # what the reader raises for foreign or cut-off files
        raise ValueError(f"{path} is not a valid GGUF file: {error}") from error
    if metadata_value(reader, "split.count", 1) > 1:
        raise ValueError(f"{path} is one part of a split GGUF file; merge the parts first")
    return reader


def metadata_value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """A metadata value as a Python object (int, float, bool, str or a list of them), or `default` when absent."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def config_from_gguf(reader: GGUFReader) -> ModelConfig:
    """The ModelConfig of an open GGUF file.

    What the metadata leaves open is read off the tensors: the vocabulary from the embedding table, a tied head from
    the absence of `output.weight`, biases from their presence. Raises ValueError for anything not implemented.
    """
    arch = metadata_value(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"general.architecture: got {arch!r}, expected one of {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[arch]
    _refuse_unsupported(reader, arch)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing in the GGUF file")
    hidden_size, num_heads = _number(reader, arch, "embedding_length"), _number(reader, arch, "attention.head_count")
    key_length = metadata_value(reader, f"{arch}.attention.key_length")
    head_dim = head_dim_or_default(key_length, hidden_size, num_heads)
    rotated = metadata_value(reader, f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{arch}.rope.dimension_count: got {rotated}, expected head_dim = {head_dim}")

    def any_bias(*names: str) -> bool:
        pattern = re.compile(rf"blk\.\d+\.({'|'.join(names)})\.bias")
        return any(pattern.fullmatch(name) for name in tensors)

    has_rms = metadata_value(reader, f"{arch}.attention.layer_norm_rms_epsilon") is not None
    fields = {
        "model_type": family.gguf_types[arch],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),  # GGUF lists dimensions innermost first
        "hidden_size": hidden_size,
        "intermediate_size": _number(reader, arch, "feed_forward_length"),
        "num_layers": _number(reader, arch, "block_count"),
        "num_heads": num_heads,
        "num_kv_heads": metadata_value(reader, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _number(reader, arch, "context_length"),
        "norm_eps": _number(reader, arch, f"attention.layer_norm{'_rms' if has_rms else ''}_epsilon"),
        "rope": _rope(reader, arch, tensors.get(ROPE_FREQS)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any_bias("attn_q", "attn_k", "attn_v"),
        "attention_out_bias": any_bias("attn_output"),
        "mlp_bias": any_bias("ffn_gate", "ffn_up", "ffn_down"),
        "qk_norm": False,
        "dtype": _stored_dtype(tensors["token_embd.weight"]),
        "eos_token_ids": gguf_eos_token_ids(reader),
    }
    return ModelConfig(**fields | family.read_gguf(fields, lambda key: metadata_value(reader, f"{arch}.{key}")))


def gguf_eos_token_ids(reader: GGUFReader) -> tuple[int, ...]:
    """The ids that the file says end a text: eos, end of turn, end of message; each once, in this order."""
    found = [metadata_value(reader, f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    return tuple(dict.fromkeys(token for value in found for token in as_token_ids(value, "tokenizer.ggml eos ids")))


def iter_gguf_tensors(reader: GGUFReader, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The file's tensors one at a time as (Hugging Face name, f32 array in Hugging Face's layout), the largest
    first, as `safetensors_loader.iter_tensors` has them.

    A name that this mapping does not know is passed on as it is, for `build_params` to refuse.
    """
    family = family_of(config.model_type)
    for tensor in sorted(reader.tensors, key=lambda tensor: -int(tensor.n_elements)):
        if tensor.name == ROPE_FREQS:
            continue  # used by config_from_gguf
        array = dequantize_tensor(tensor)
        if config.norm_offset and tensor.name.endswith("norm.weight"):
            array -= 1  # llama.cpp's converter adds it
        if not family.transposes_kernels and tensor.name.startswith("blk.") and array.ndim == 2:
            array = array.T  # the converter makes [out, in] of every kernel
        if config.model_type == "llama" and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", tensor.name)):
            num_heads = config.num_heads if match[1] == "q" else config.num_kv_heads
            if array.shape[0] == num_heads * config.head_dim:  # else build_params names the wrong shape
                array = unpermute_rows(array, num_heads)
        if isinstance(reader, _FastReader):
            reader.forget_pages()
        yield hf_name(tensor.name, config), array
        del array  # or it would be in memory beside the next


def hf_name(name: str, config: ModelConfig) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    family = family_of(config.model_type)
    layer_names = _LAYER_NAMES | (_NAMES_OF_BOTH_NORMS if config.norm_placement == "both" else {})
    if (match := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and match[1] in _TOP_NAMES:
        return f"{family.module_name(_TOP_NAMES[match[1]])}.{match[2]}"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in layer_names:
        return f"{family.module_name(layer_names[match[2]], match[1])}.{match[3]}"
    return name


def dequantize_tensor(tensor: ReaderTensor) -> Float32[np.ndarray, "..."]:
    """A tensor's values in f32, axes as in numpy (outermost first); ValueError for a type not in QUANT_TYPES."""
    kind = GGMLQuantizationType(tensor.tensor_type).name
    if kind not in QUANT_TYPES:
        raise ValueError(
            f"tensor {tensor.name} is of quantisation type {kind}, expected one of {', '.join(QUANT_TYPES)}"
        )
    values = aligned_empty(tuple(int(size) for size in tensor.shape[::-1]), np.dtype(np.float32))
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    out = values.reshape(len(rows), -1)
    # A few rows at a time: the package makes two more copies of what it is given.
    step = max(1, DEQUANTIZE_VALUES // out.shape[1])
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return values


def unpermute_rows(array: Float[np.ndarray, "rows ..."], num_heads: int) -> Float[np.ndarray, "rows ..."]:
    """Undoes llama.cpp's row order of llama's q and k, [num_heads * head_dim, ...].

    Its rope rotates neighbouring rows (2i, 2i+1) of a head; Hugging Face's, and ours, rotates the rows (i,
    i + head_dim/2). The converter interleaves the two halves of each head, and this takes them apart again.
    """
    rest = array.shape[1:]
    return array.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def _rope(reader: GGUFReader, arch: str, freqs: ReaderTensor | None) -> RopeConfig:
    factors = None if freqs is None else tuple(dequantize_tensor(freqs).tolist())
    return rope_from_gguf(partial(metadata_value, reader), arch, _number(reader, arch, "context_length"), factors)


def _refuse_unsupported(reader: GGUFReader, arch: str) -> None:
    def refuse_unless(key: str, *allowed: Any) -> None:
        value = metadata_value(reader, f"{arch}.{key}")
        if value is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{arch}.{key}: got {value!r}, expected it absent or {expected}: not implemented")

    refuse_unless("expert_count", 0)
    key_length = metadata_value(reader, f"{arch}.attention.key_length")
    value_length = metadata_value(reader, f"{arch}.attention.value_length", key_length)
    if value_length != key_length:
        raise ValueError(f"{arch}.attention.value_length: got {value_length}, expected key_length = {key_length}")


def _number(reader: GGUFReader, arch: str, key: str) -> Any:
    value = metadata_value(reader, f"{arch}.{key}")
    if not isinstance(value, int | float):  # a list would be one number per layer
        raise ValueError(f"{arch}.{key}: got {value!r}, expected one number")
    return value


def _stored_dtype(embedding: ReaderTensor) -> str:
    """Quantised blocks carry more precision in their scales than bf16 holds, so they count as float32."""
    return {"F16": "float16", "BF16": "bfloat16"}.get(embedding.tensor_type.name, "float32")
