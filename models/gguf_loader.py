"""Reads a GGUF file (llama.cpp's format): metadata to ModelConfig, quantised tensors to Hugging Face's layout.

Source of the format: the `gguf` package and its key names (`<arch>.attention.head_count`, ...).
"""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from jaxtyping import Float, Float32

from pagedjax.models.config import ModelConfig, RopeConfig, as_token_ids, head_dim_or_default

ARCHITECTURES = ("llama", "qwen2", "qwen3")
QUANT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
ROPE_FREQS = "rope_freqs.weight"
DEQUANTIZE_VALUES = 2**20
"""Dequantised at a time."""
# What ends a text: the end of a text, of a turn, of a message that waits for a tool.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
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

    return ModelConfig(
        model_type=arch,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),  # GGUF lists dimensions innermost first
        hidden_size=hidden_size,
        intermediate_size=_number(reader, arch, "feed_forward_length"),
        num_layers=_number(reader, arch, "block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata_value(reader, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=_number(reader, arch, "context_length"),
        norm_eps=_number(reader, arch, "attention.layer_norm_rms_epsilon"),
        rope=_rope(reader, arch, tensors.get(ROPE_FREQS)),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=arch == "qwen2" or any_bias("attn_q", "attn_k", "attn_v"),
        attention_out_bias=any_bias("attn_output"),
        mlp_bias=any_bias("ffn_gate", "ffn_up", "ffn_down"),
        qk_norm=arch == "qwen3",
        dtype=_stored_dtype(tensors["token_embd.weight"]),
        eos_token_ids=gguf_eos_token_ids(reader),
    )


def gguf_eos_token_ids(reader: GGUFReader) -> tuple[int, ...]:
    """The ids that the file says end a text: eos, end of turn, end of message; each once, in this order."""
    found = [metadata_value(reader, f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    return tuple(dict.fromkeys(token for value in found for token in as_token_ids(value, "tokenizer.ggml eos ids")))


def iter_gguf_tensors(reader: GGUFReader, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The file's tensors one at a time as (Hugging Face name, f32 array in Hugging Face's layout).

    A name that this mapping does not know is passed on as it is, for `build_params` to refuse.
    """
    for tensor in reader.tensors:
        if tensor.name == ROPE_FREQS:
            continue  # used by config_from_gguf
        array = dequantize_tensor(tensor)
        if config.model_type == "llama" and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", tensor.name)):
            num_heads = config.num_heads if match[1] == "q" else config.num_kv_heads
            if array.shape[0] == num_heads * config.head_dim:  # else build_params names the wrong shape
                array = unpermute_rows(array, num_heads)
        if isinstance(reader, _FastReader):
            reader.forget_pages()
        yield hf_name(tensor.name), array
        del array  # or it would be in memory beside the next


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.weight"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def dequantize_tensor(tensor: ReaderTensor) -> Float32[np.ndarray, "..."]:
    """A tensor's values in f32, axes as in numpy (outermost first); ValueError for a type not in QUANT_TYPES."""
    kind = GGMLQuantizationType(tensor.tensor_type).name
    if kind not in QUANT_TYPES:
        raise ValueError(
            f"tensor {tensor.name} is of quantisation type {kind}, expected one of {', '.join(QUANT_TYPES)}"
        )
    values = np.empty([int(size) for size in tensor.shape[::-1]], np.float32)
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
    # llama.cpp takes 10000 for a file that does not name a base
    return RopeConfig(theta=float(metadata_value(reader, f"{arch}.rope.freq_base", 10000.0)), freq_factors=factors)


def _refuse_unsupported(reader: GGUFReader, arch: str) -> None:
    def refuse_unless(key: str, *allowed: Any) -> None:
        value = metadata_value(reader, f"{arch}.{key}")
        if value is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{arch}.{key}: got {value!r}, expected it absent or {expected}: not implemented")

    refuse_unless("rope.scaling.type", "none")
    refuse_unless("rope.scale_linear", 1.0)
    refuse_unless("expert_count", 0)
    refuse_unless("attention.sliding_window", 0)
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
