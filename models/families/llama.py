"""The Llama family (arXiv 2302.13971): LLaMA, Mistral with its window (arXiv 2310.06825), Qwen2, Qwen3, SmolLM2."""

from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.models.checks import as_float, require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families.family import Family, activation, count, flag, layer_count, sizes, windows_of
from pagedjax.models.rope import rope_from_hf


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    model_type = values["model_type"]
    values = {"attention_bias": False, "mlp_bias": False, **values}
    attention_bias = model_type == "qwen2" or flag(values, "attention_bias")
    return ModelConfig(
        **sizes(values),
        intermediate_size=count(values, "intermediate_size"),
        norm_eps=as_float("rms_norm_eps", values["rms_norm_eps"]),
        rope=rope_from_hf(values),
        activation=activation(values, "hidden_act"),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias and model_type != "qwen2",
        mlp_bias=flag(values, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        layer_windows=_layer_windows(values),
    )


def _layer_windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    model_type, window, layer_types = values["model_type"], values.get("sliding_window"), values.get("layer_types")
    num_layers = layer_count(values)
    if model_type.startswith("qwen"):
        first: Any = values["max_window_layers"]
        require(type(first) is int and first >= 0, "max_window_layers", first, "an int >= 0")
        window = window if flag(values, "use_sliding_window") else None
        if layer_types is None:
            has_window = [window is not None and i >= first for i in range(num_layers)]
            layer_types = ["sliding_attention" if has else "full_attention" for has in has_window]
        return windows_of(layer_types, window, num_layers)
    require(layer_types is None, "layer_types", layer_types, f"none: a {model_type} has one type of layer")
    if model_type == "mistral":
        kind = "full_attention" if window is None else "sliding_attention"
        return windows_of([kind] * num_layers, window, num_layers)
    require(window is None, "sliding_window", window, f"null: a {model_type} has none")
    return ()


def read_gguf(fields: Mapping[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    window = read("attention.sliding_window")
    require(window in (None, 0), "attention.sliding_window", window, "none: not implemented for this architecture")
    bias = {"attention_bias": True} if fields["model_type"] == "qwen2" else {}
    return {**bias, "qk_norm": fields["model_type"] == "qwen3"}


FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    read_config=read_config,
    gguf_types={"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    read_gguf=read_gguf,
)
