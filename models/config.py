"""What a model is, as numbers: read from a Hugging Face `config.json`, validated once. Host only, no jax.

The same dataclass serves every Llama-like family (llama, mistral, qwen2, qwen3); what differs between them is a
field here, not a class. A setting that this engine does not implement is refused, never ignored: a model that runs
with half of its configuration gives fluent, wrong text.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "llama3")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how its frequencies are stretched for long contexts."""

    theta: float = 10000.0
    """Base of the geometric series of frequencies."""
    rope_type: str = "default"
    """"default", or "llama3": the wavelength-dependent stretch of Llama 3.1. The next four fields are llama3's."""
    factor: float = 1.0
    """How much the longest wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched fully."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone."""
    original_max_position_embeddings: int = 8192
    """The context length before stretching, in tokens."""
    freq_factors: tuple[float, ...] | None = None
    """Divides the frequencies, one number each: the `rope_freqs.weight` of a GGUF file."""

    def __post_init__(self) -> None:
        _require(self.rope_type in ROPE_TYPES, "rope_type", self.rope_type, f"one of {', '.join(ROPE_TYPES)}")
        _require(_is_positive(self.theta), "rope theta", self.theta, "a finite number > 0")
        if self.rope_type == "llama3":
            _require(_is_positive(self.factor), "rope factor", self.factor, "a finite number > 0")
            _require(_is_positive(self.low_freq_factor), "low_freq_factor", self.low_freq_factor, "a number > 0")
            ordered = _is_positive(self.high_freq_factor) and self.high_freq_factor > self.low_freq_factor
            _require(ordered, "high_freq_factor", self.high_freq_factor, f"more than {self.low_freq_factor=}")
            length = self.original_max_position_embeddings
            _require(_is_count(length), "original_max_position_embeddings", length, "an int >= 1")
        if self.freq_factors is not None:
            ok = all(_is_positive(factor) for factor in self.freq_factors)
            _require(ok, "freq_factors", self.freq_factors, "finite numbers > 0")

    def inv_freq(self, head_dim: int) -> Float32[np.ndarray, " half_head_dim"]:
        """Radians per position of each rotated pair, f32 [head_dim // 2]; equals transformers' to 1e-6.

        Raises ValueError when `freq_factors` has another length.
        """
        inv_freq = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.rope_type == "llama3":
            inv_freq = self._stretch_llama3(inv_freq)
        if self.freq_factors is not None:
            fits = len(self.freq_factors) == head_dim // 2
            _require(fits, "len(freq_factors)", len(self.freq_factors), f"head_dim // 2 = {head_dim // 2}")
            inv_freq = inv_freq / np.asarray(self.freq_factors, np.float64)
        return inv_freq.astype(np.float32)

    def _stretch_llama3(self, inv_freq: np.ndarray) -> np.ndarray:
        # Llama 3.1: 0 where the wavelength is long (stretch by `factor`), 1 where it is short, linear between, in
        # the number of turns that a pair makes over the original context.
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq


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
        _require(self.model_type in MODEL_TYPES, "model_type", self.model_type, f"one of {', '.join(MODEL_TYPES)}")
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*counts, "head_dim", "max_position_embeddings"):
            _require(_is_count(getattr(self, name)), name, getattr(self, name), "an int >= 1")
        divides = self.num_heads % self.num_kv_heads == 0
        _require(divides, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rope rotates pairs)")
        _require(_is_positive(self.rms_norm_eps), "rms_norm_eps", self.rms_norm_eps, "a finite number > 0")
        for name in ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qk_norm"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        check_float_dtype(self.dtype)
        ids_ok = all(isinstance(token, int) and token >= 0 for token in self.eos_token_ids)
        _require(ids_ok, "eos_token_ids", self.eos_token_ids, "a tuple of ints >= 0")
        self.rope.inv_freq(self.head_dim)  # refuses freq_factors of another length


def check_float_dtype(dtype: str) -> str:
    """`dtype` itself when it is one of FLOAT_DTYPES, else ValueError."""
    _require(dtype in FLOAT_DTYPES, "dtype", dtype, f"one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`.

    A missing key takes the default of transformers' own config class for that model type, so a checkpoint means here
    what it means there. Only `eos_token_id` has no default: a file that names none states none. Raises ValueError for
    a model type, activation, rope type, sliding window or quantisation that is not implemented.
    """
    model_type: str = raw.get("model_type") or ""
    _require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
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
        rms_norm_eps=_as_float("rms_norm_eps", values["rms_norm_eps"]),
        rope=_rope_from_hf(values),
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
        _require(_is_count(value), name, value, "an int >= 1")
    whole = hidden_size % num_heads == 0
    _require(whole, "hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}, or a head_dim")
    return hidden_size // num_heads


def as_token_ids(value: Any, field: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as they stand in configs, as a tuple of ints; ValueError otherwise."""
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    ok = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values)
    _require(ok, field, value, "a token id, a list of token ids, or null")
    return tuple(values)


def _transformers_defaults(model_type: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _refuse_unsupported(model_type: str, values: Mapping[str, Any]) -> None:
    _require(values["hidden_act"] == "silu", "hidden_act", values["hidden_act"], "silu")
    partial = values.get("partial_rotary_factor")
    _require(partial in (None, 1.0), "partial_rotary_factor", partial, "1.0 (partial rotation is not implemented)")
    method = values.get("quantization_config")
    _require(method is None, "quantization_config", method, "none: quantised safetensors are not read")
    window = values.get("sliding_window")
    if model_type.startswith("qwen"):
        layer_types = values.get("layer_types")
        for name in ("num_hidden_layers", "max_window_layers"):
            _require(isinstance(values[name], int), name, values[name], "an int")
        windowed = values["num_hidden_layers"] > values["max_window_layers"]
        if layer_types is not None:
            _require(isinstance(layer_types, list | tuple), "layer_types", layer_types, "a list or null")
            windowed = "sliding_attention" in layer_types
        window = window if values["use_sliding_window"] and windowed else None
    # A window as long as the longest context never cuts anything.
    longest = values["max_position_embeddings"]
    _require(_is_count(longest), "max_position_embeddings", longest, "an int >= 1")
    inactive = window is None or (_is_count(window) and window >= longest)
    _require(inactive, "sliding_window", window, "null: sliding-window attention is not implemented for this model")


def _rope_from_hf(values: Mapping[str, Any]) -> RopeConfig:
    """Rope from `rope_scaling` (older files) and `rope_parameters` (newer), with `type` or `rope_type` inside."""
    scaling, parameters = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        flat = isinstance(value, Mapping) and not any(isinstance(inner, Mapping) for inner in value.values())
        _require(flat, name, value, "one flat object (rope per layer type is not implemented)")
    clashes = [key for key in scaling if key in parameters and scaling[key] != parameters[key]]
    _require(not clashes, "rope_scaling", scaling, f"the same {', '.join(clashes)} as in rope_parameters")
    rope = {**parameters, **scaling}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    same = rope.get("type", rope_type) == rope_type
    _require(same, "rope type", rope.get("type"), f"the same as rope_type = {rope_type!r}")
    _require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", 1.0)
    _require(partial == 1.0, "partial_rotary_factor", partial, "1.0 (partial rotation is not implemented)")
    theta = rope.get("rope_theta", values.get("rope_theta"))
    theta = 10000.0 if theta is None else _as_float("rope_theta", theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    missing = [name for name in ("factor", "low_freq_factor", "high_freq_factor") if name not in rope]
    _require(not missing, "rope_type", rope_type, f"{', '.join(missing)} beside it")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=_as_float("factor", rope["factor"]),
        low_freq_factor=_as_float("low_freq_factor", rope["low_freq_factor"]),
        high_freq_factor=_as_float("high_freq_factor", rope["high_freq_factor"]),
        original_max_position_embeddings=rope.get(
            "original_max_position_embeddings", values["max_position_embeddings"]
        ),
    )


def _require(ok: bool, field: str, got: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{field}: got {got!r}, expected {expected}")


def _as_float(field: str, value: Any) -> float:
    _require(_is_positive(value), field, value, "a finite number > 0")
    return float(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
