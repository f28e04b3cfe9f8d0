"""The rope of a GGUF file, from its `<arch>.rope.*` keys. Host only, no jax.

Source: the key names of the `gguf` package, and what llama.cpp takes for a key that is not there.
"""

from collections.abc import Callable
from typing import Any

from pagedjax.models.checks import as_float, require
from pagedjax.models.rope import RopeConfig, yarn_attention_factor

SCALING_TYPES = ("none", "linear", "yarn")
NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys under `rope.scaling.` that are not implemented, with the values that change nothing."""


def rope_from_gguf(
    read: Callable[[str], Any], arch: str, context_length: int, freq_factors: tuple[float, ...] | None = None
) -> RopeConfig:
    """The rope of a file of `arch` whose metadata `read` gives by key, None for what is not there.

    `freq_factors` are the values of its `rope_freqs.weight`. Raises ValueError for a scaling that is not implemented or
    half given.
    """

    def value(key: str) -> Any:
        return read(f"{arch}.rope.{key}")

    theta = value("freq_base")
    theta = 10000.0 if theta is None else as_float(f"{arch}.rope.freq_base", theta)
    plain: dict[str, Any] = {"theta": theta, "freq_factors": freq_factors}
    name, old, factor = f"{arch}.rope.scaling.type", value("scale_linear"), value("scaling.factor")
    factor = old if factor is None else factor
    kind = value("scaling.type")
    kind = "linear" if kind is None and factor is not None else kind or "none"
    require(kind in SCALING_TYPES, name, kind, f"one of {', '.join(SCALING_TYPES)}")
    if kind == "none":
        return RopeConfig(**plain)
    require(factor is not None, name, kind, f"{arch}.rope.scaling.factor beside it")
    factor = as_float(f"{arch}.rope.scaling.factor", factor)
    if kind == "linear":
        return RopeConfig(rope_type="linear", factor=factor, **plain) if factor != 1.0 else RopeConfig(**plain)
    for key, neutral in NEUTRAL.items():
        got = value(f"scaling.{key}")
        require(got in (None, neutral), f"{arch}.rope.scaling.{key}", got, f"none, or {neutral}: not implemented")
    betas = {key: value(f"scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    return RopeConfig(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=value("scaling.original_context_length") or context_length,
        attention_factor=yarn_attention_factor(factor),
        **{key: as_float(f"{arch}.rope.scaling.yarn_{key}", beta) for key, beta in betas.items() if beta is not None},
        **plain,
    )
