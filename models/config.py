"""What a model is, as numbers: read from a Hugging Face `config.json`, validated once. Host only, no jax.

The same dataclass serves every Llama-like family (llama, mistral, qwen2, qwen3); what differs between them is a
field here, not a class. A setting that this engine does not implement is refused, never ignored: a model that runs
with half of its configuration gives fluent, wrong text.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax.models.checks import as_float, is_count, is_positive, require
from pagedjax.models.rope import RopeConfig, rope_from_hf

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-like decoder. Hashable: it is a static attribute of the flax module."""

    model_type: str
    """Family: one of MODEL_TYPES."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Its own number: `num_heads * head_dim` need not be `hidden_size`."""
    max_position_embeddings: int
    """The longest context the model was made for, in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    """The output head is the embedding table."""
    attention_bias: bool
    """q_proj, k_proj and v_proj have a bias."""
    attention_out_bias: bool
    """o_proj has a bias."""
    mlp_bias: bool
    """gate_proj, up_proj and down_proj have a bias."""
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before rope (Qwen3)."""
    dtype: str
    """The checkpoint's own float type: one of FLOAT_DTYPES."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text."""

    def __post_init__(self) -> None:
        require(self.model_type in MODEL_TYPES, "model_type", self.model_type, f"one of {', '.join(MODEL_TYPES)}")
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*counts, "head_dim", "max_position_embeddings"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "an int >= 1")
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rope rotates pairs)")
        require(is_positive(self.rms_norm_eps), "rms_norm_eps", self.rms_norm_eps, "a finite number > 0")
        for name in ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qk_norm"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        check_float_dtype(self.dtype)
        ids_ok = all(isinstance(token, int) and token >= 0 for token in self.eos_token_ids)
        require(ids_ok, "eos_token_ids", self.eos_token_ids, "a tuple of ints >= 0")
        self.rope.inv_freq(self.head_dim)  # refuses factors of another length

    def served_up_to(self, max_model_len: int) -> "ModelConfig":
        """The config of an engine that serves contexts of at most so many tokens; itself unless rope depends on it."""
        rope = self.rope.served_up_to(max_model_len)
        return self if rope == self.rope else dataclasses.replace(self, rope=rope)


def check_float_dtype(dtype: str) -> str:
    """`dtype` itself when it is one of FLOAT_DTYPES, else ValueError."""
    require(dtype in FLOAT_DTYPES, "dtype", dtype, f"one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`.

    A missing key takes the default of transformers' own config class for that model type, so a checkpoint means here
    what it means there. Only `eos_token_id` has no default: a file that names none states none. Raises ValueError for
    a model type, activation, rope type, sliding window or quantisation that is not implemented.
    """
    model_type: str = raw.get("model_type") or ""
    require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    values = {**_transformers_defaults(model_type), **raw}
    _refuse_unsupported(model_type, values)
    num_heads, hidden_size = values["num_attention_heads"], values["hidden_size"]
    num_kv_heads = values.get("num_key_value_heads")
    attention_bias = model_type == "qwen2" or bool(values.get("attention_bias", False))
    return ModelConfig(
        model_type=model_type,
        vocab_size=values["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim_or_default(values.get("head_dim"), hidden_size, num_heads),
        max_position_embeddings=values["max_position_embeddings"],
        rms_norm_eps=as_float("rms_norm_eps", values["rms_norm_eps"]),
        rope=rope_from_hf(values),
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=attention_bias,
        attention_out_bias=attention_bias and model_type != "qwen2",
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=as_token_ids(raw.get("eos_token_id"), "eos_token_id"),
    )


def head_dim_or_default(head_dim: int | None, hidden_size: int, num_heads: int) -> int:
    """`head_dim`, or `hidden_size / num_heads` when it is None; ValueError when that is not a whole number."""
    if head_dim is not None:
        return head_dim
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", num_heads)):
        require(is_count(value), name, value, "an int >= 1")
    whole = hidden_size % num_heads == 0
    require(whole, "hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}, or a head_dim")
    return hidden_size // num_heads


def as_token_ids(value: Any, field: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as they stand in configs, as a tuple of ints; ValueError otherwise."""
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    ok = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values)
    require(ok, field, value, "a token id, a list of token ids, or null")
    return tuple(values)


def _transformers_defaults(model_type: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _refuse_unsupported(model_type: str, values: Mapping[str, Any]) -> None:
    require(values["hidden_act"] == "silu", "hidden_act", values["hidden_act"], "silu")
    method = values.get("quantization_config")
    require(method is None, "quantization_config", method, "none: quantised safetensors are not read")
    window = values.get("sliding_window")
    if model_type.startswith("qwen"):
        layer_types = values.get("layer_types")
        for name in ("num_hidden_layers", "max_window_layers"):
            require(isinstance(values[name], int), name, values[name], "an int")
        windowed = values["num_hidden_layers"] > values["max_window_layers"]
        if layer_types is not None:
            require(isinstance(layer_types, list | tuple), "layer_types", layer_types, "a list or null")
            windowed = "sliding_attention" in layer_types
        window = window if values["use_sliding_window"] and windowed else None
    # A window as long as the longest context never cuts anything.
    longest = values["max_position_embeddings"]
    require(is_count(longest), "max_position_embeddings", longest, "an int >= 1")
    inactive = window is None or (is_count(window) and window >= longest)
    require(inactive, "sliding_window", window, "null: sliding-window attention is not implemented for this model")
