"""The Llama family (arXiv 2302.13971): LLaMA, Mistral with its window (arXiv 2310.06825), Qwen2, Qwen3, SmolLM2."""

from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.models.checks import as_float, require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families.family import Family, activation, count, flag, sizes, windows_of
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
    num_layers = count(values, "num_hidden_layers")
    if model_type.startswith("qwen"):
        first: Any = values["max_window_layers"]
        require(isinstance(first, int), "max_window_layers", first, "an int")
        if layer_types is None:
            layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
        return windows_of(layer_types, window if flag(values, "use_sliding_window") else None)
    require(layer_types is None, "layer_types", layer_types, f"none: a {model_type} has one type of layer")
    if model_type == "mistral":
        return windows_of(["sliding_attention"] * num_layers, window)
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
