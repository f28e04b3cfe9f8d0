"""Rotary position embedding as numbers: the frequencies of every kind of scaling, and their reading from HF files.

Host only, no jax. Each kind equals transformers' (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`) to 1e-6.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32

from pagedjax.models.checks import as_float, is_count, is_positive, require

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how its frequencies are stretched for long contexts.

    The frequencies of "dynamic" and "longrope" depend on the length of the context. Here they are those of
    `served_length`, the longest context that an engine serves, at every position and for every request: keys stay in
    the cache under the frequencies with which they were written, so frequencies must not change while a text grows.
    """

    theta: float = 10000.0
    """Base of the geometric series of frequencies."""
    rope_type: str = "default"
    """One of ROPE_TYPES. "linear" divides all frequencies by `factor` (arXiv 2306.15595); "dynamic" raises the base
    with the served length (NTK); "yarn" divides those that turn seldom (arXiv 2309.00071); "longrope" divides each by a
    number of its own (arXiv 2402.13753); "llama3" is the wavelength-dependent stretch of Llama 3.1."""
    rotary_share: float = 1.0
    """How much of each head is rotated: its first dimensions; the rest has no position (`partial_rotary_factor`)."""
    factor: float = 1.0
    """How much the longest wavelengths are stretched."""
    original_max_position_embeddings: int = 8192
    """The context length before stretching, in tokens."""
    attention_factor: float = 1.0
    """Multiplies cos and sin, and so the attention scores of what is rotated by its square (yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone."""
    beta_fast: float = 32.0
    """yarn: pairs that turn at least so often over the original context are left alone."""
    beta_slow: float = 1.0
    """yarn: pairs that turn at most so often over the original context are stretched fully."""
    truncate: bool = True
    """yarn: the limits between the two are whole pairs."""
    short_factor: tuple[float, ...] = ()
    """longrope: divides the frequencies, one number each, while no more than the original context is served."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same when more is served."""
    served_length: int | None = None
    """dynamic, longrope: the longest context that is served, in tokens; None: no longer than the original."""
    freq_factors: tuple[float, ...] | None = None
    """Divides the frequencies, one number each: the `rope_freqs.weight` of a GGUF file."""

    def __post_init__(self) -> None:
        require(self.rope_type in ROPE_TYPES, "rope_type", self.rope_type, f"one of {', '.join(ROPE_TYPES)}")
        require(is_positive(self.theta), "rope theta", self.theta, "a finite number > 0")
        share_ok = is_positive(self.rotary_share) and self.rotary_share <= 1
        require(share_ok, "partial_rotary_factor", self.rotary_share, "a number in (0, 1]")
        for name in ("factor", "attention_factor", "low_freq_factor", "beta_slow"):
            require(is_positive(getattr(self, name)), f"rope {name}", getattr(self, name), "a finite number > 0")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            require(is_positive(most) and most > least, high, most, f"a number > {low} = {least}")
        for name in ("original_max_position_embeddings", "served_length"):
            length = getattr(self, name)
            require(is_count(length) or (name == "served_length" and length is None), name, length, "an int >= 1")
        for name in ("freq_factors", "short_factor", "long_factor"):
            factors = getattr(self, name)
            require(all(map(is_positive, factors or ())), name, factors, "finite numbers > 0")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are those of a served length."""
        return self.rope_type in ("dynamic", "longrope")

    def served_up_to(self, max_model_len: int) -> "RopeConfig":
        """The rope of an engine that serves contexts of at most so many tokens; itself when that changes nothing."""
        return replace(self, served_length=max_model_len) if self.depends_on_length else self

    def longest_context(self, max_position_embeddings: int) -> int:
        """The longest context, in tokens, that a model with this rope is made for.

        It is the file's `max_position_embeddings`, or `factor` times the original length where that is more: files
        with "dynamic" state the length before stretching, and so do some with "yarn". It is never more for "linear",
        as files state the length before or after stretching and do not say which.
        """
        if self.rope_type not in ("dynamic", "yarn"):
            return max_position_embeddings
        return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated, always the first; ValueError if that is no even number >= 2."""
        dim = int(head_dim * self.rotary_share)
        shown = f"{self.rotary_share} of head_dim = {head_dim}"
        require(dim >= 2 and dim % 2 == 0, "partial_rotary_factor", shown, "an even number of dimensions, at least 2")
        return dim

    def inv_freq(self, head_dim: int) -> Float32[np.ndarray, " pairs"]:
        """Radians per position of each rotated pair, f32 [rotary_dim(head_dim) // 2].

        Raises ValueError when factors that go with single frequencies are of another number.
        """
        dim = self.rotary_dim(head_dim)
        inv_freq = _geometric(self._theta(dim), dim)
        if self.rope_type == "linear":
            inv_freq = inv_freq / self.factor
        elif self.rope_type == "llama3":
            inv_freq = self._stretch_llama3(inv_freq)
        elif self.rope_type == "yarn":
            inv_freq = self._stretch_yarn(inv_freq)
        elif self.rope_type == "longrope":
            short = _one_each("short_factor", self.short_factor, dim // 2)
            long = _one_each("long_factor", self.long_factor, dim // 2)
            inv_freq = inv_freq / (long if self._is_longer else short)
        if self.freq_factors is not None:
            inv_freq = inv_freq / _one_each("freq_factors", self.freq_factors, dim // 2)
        return inv_freq.astype(np.float32)

    @property
    def _is_longer(self) -> bool:
        return self.served_length is not None and self.served_length > self.original_max_position_embeddings

    def _theta(self, dim: int) -> float:
        if self.rope_type != "dynamic" or self.served_length is None or not self._is_longer:
            return self.theta
        require(dim > 2, "rotary dimensions", dim, "more than 2 with dynamic rope")
        stretch = self.factor * self.served_length / self.original_max_position_embeddings - (self.factor - 1)
        return self.theta * stretch ** (dim / (dim - 2))

    def _stretch_llama3(self, inv_freq: np.ndarray) -> np.ndarray:
        # Llama 3.1: 0 where the wavelength is long (stretch by `factor`), 1 where it is short, linear between, in
        # the number of turns that a pair makes over the original context.
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq

    def _stretch_yarn(self, inv_freq: np.ndarray) -> np.ndarray:
        # As llama3, but linear in the number of the pair, between the pairs that turn beta_fast and beta_slow times.
        num_pairs, log_theta = len(inv_freq), math.log(self.theta)
        require(log_theta > 0, "rope theta", self.theta, "more than 1 with yarn")
        first, last = (
            num_pairs * math.log(self.original_max_position_embeddings / (2 * math.pi * turns)) / log_theta
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper limit is transformers' own: it counts dimensions, of which there are two to a pair.
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        width = last - first if last != first else 0.001
        keep = 1 - np.clip((np.arange(num_pairs) - first) / width, 0.0, 1.0)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq


def _geometric(theta: float, dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _one_each(name: str, factors: tuple[float, ...], num_pairs: int) -> np.ndarray:
    require(len(factors) == num_pairs, f"len({name})", len(factors), f"one for each of {num_pairs} rotated pairs")
    return np.asarray(factors, np.float64)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """yarn's recommended factor of cos and sin (arXiv 2309.00071, equation 22); with both scales, DeepSeek's ratio."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """longrope's factor of cos and sin for a context `factor` times the original (arXiv 2402.13753)."""
    if factor <= 1:
        return 1.0
    require(original_length > 1, "original_max_position_embeddings", original_length, "more than 1")
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def rope_from_hf(values: Mapping[str, Any], layer_type: str | None = None) -> RopeConfig:
    """The rope of a parsed `config.json`: `rope_scaling` (older files) or `rope_parameters` (newer), with the name
    under `type` or `rope_type`, beside `rope_theta`, `partial_rotary_factor` and `max_position_embeddings`.

    Newer files may hold one object for each type of layer: then `layer_type` says which. Raises ValueError for an
    unknown type, for numbers that are missing, contradict each other, or that the type does not know.
    """
    max_length: Any = values.get("max_position_embeddings")
    require(is_count(max_length), "max_position_embeddings", max_length, "an int >= 1")
    rope = _merged(values, layer_type)
    rope_type = rope["rope_type"]
    # As in transformers: "dynamic" counts from the model's own length, and a length beside rope wins (Phi-3).
    original: Any = values.get("original_max_position_embeddings")
    original = rope.get("original_max_position_embeddings") if original is None else original
    known = original is None or is_count(original)
    require(known, "original_max_position_embeddings", original, "an int >= 1")
    if rope_type == "longrope" and original is not None:
        rope.setdefault("factor", max_length / original)
    original = max_length if original is None or rope_type == "dynamic" else original
    required, optional = _KEYS[rope_type]
    missing = [key for key in required if key not in rope]
    require(not missing, "rope_type", rope_type, f"{', '.join(missing)} beside it")
    unknown = sorted(rope.keys() - {*required, *optional, *_ANY_TYPE})
    require(not unknown, "rope values", unknown, f"only what rope_type {rope_type!r} knows")

    read: dict[str, Any] = {key: as_float(f"rope {key}", rope[key]) for key in _FLOATS if key in rope}
    for key in ("short_factor", "long_factor"):
        if key in rope:
            require(isinstance(rope[key], list | tuple), key, rope[key], "a list of numbers")
            read[key] = tuple(as_float(key, number) for number in rope[key])
    if "truncate" in rope:
        require(isinstance(rope["truncate"], bool), "truncate", rope["truncate"], "true or false")
        read["truncate"] = rope["truncate"]
    if rope_type != "default":
        read["original_max_position_embeddings"] = original
    theta = as_float("rope_theta", rope.get("rope_theta", 10000.0))
    share = as_float("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    config = RopeConfig(theta=theta, rope_type=rope_type, rotary_share=share, **read).served_up_to(max_length)
    return replace(config, attention_factor=_attention_factor(config, rope))


def _attention_factor(config: RopeConfig, rope: Mapping[str, Any]) -> float:
    """What the file states, or what its type recommends."""
    if "attention_factor" in rope:
        return as_float("attention_factor", rope["attention_factor"])
    if config.rope_type == "yarn":
        scales = [as_float(key, rope[key]) if rope.get(key) else None for key in ("mscale", "mscale_all_dim")]
        return yarn_attention_factor(config.factor, *scales)
    if config.rope_type == "longrope":
        return longrope_attention_factor(config.factor, config.original_max_position_embeddings)
    return 1.0


_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of each type: what it needs, and what it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
}
_ANY_TYPE = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned")
_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


def _merged(values: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """All that a file says of rope in one flat dict without nulls, with a known `rope_type`."""
    both: list[Any] = [values.get(name) for name in ("rope_scaling", "rope_parameters")]
    scaling, parameters = ({} if value is None else value for value in both)
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        require(isinstance(value, Mapping), name, value, "an object, or null")
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        nested = any(isinstance(inner, Mapping) for inner in value.values())
        require(not nested, name, value, "one flat object (rope per layer type is not implemented for this model)")
    beside = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    clashes = [key for key in scaling if key in parameters and scaling[key] != parameters[key]]
    require(not clashes, "rope_scaling", scaling, f"the same {', '.join(clashes)} as in rope_parameters")
    rope = {**beside, **{key: value for key, value in {**parameters, **scaling}.items() if value is not None}}
    spelled = rope.pop("type", None)
    rope_type = rope.setdefault("rope_type", "default" if spelled is None else spelled)
    require(spelled in (None, rope_type), "rope type", spelled, f"the same as rope_type = {rope_type!r}")
    require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    return rope
