"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786); of the last, the text model.

Norms multiply by 1 + w, embeddings are scaled. From Gemma 2 on norms stand on both sides of attention and MLP, and some
layers have a window; Gemma 2 caps scores and logits, Gemma 3 normalises queries and keys and has a second rope for the
layers with a window.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.models.checks import as_float, is_count, require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families.family import LAYER_TYPES, Family, activation, count, flag, layer_count, sizes, windows_of
from pagedjax.models.rope import RopeConfig, rope_from_hf

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
"""Gemma 3's, where a file names none."""


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    bidirectional = values.get("use_bidirectional_attention")
    require(not bidirectional, "use_bidirectional_attention", bidirectional, "false: attention is causal")
    own = {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3}[values["model_type"]]
    attention_bias = flag(values, "attention_bias")
    return ModelConfig(
        **sizes(values),
        **own(values),
        intermediate_size=count(values, "intermediate_size"),
        norm_eps=as_float("rms_norm_eps", values["rms_norm_eps"]),
        norm_offset=True,
        embedding_scale=math.sqrt(count(values, "hidden_size")),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=False,
        qk_norm=values["model_type"] == "gemma3_text",
    )


def _gemma(values: Mapping[str, Any]) -> dict[str, Any]:
    # The first files say "gelu" and mean its approximation: so transformers reads them.
    own = "gelu_tanh" if values["hidden_act"] == "gelu" else activation(values, "hidden_act")
    return {"activation": own, "rope": rope_from_hf(values)}


def _gemma2(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_two_kinds_of_layers(values, every=2),
        "rope": rope_from_hf(values),
        "attention_soft_cap": _soft_cap(values, "attn_logit_softcapping"),
    }


def _gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    cap = values["attn_logit_softcapping"]
    require(cap is None, "attn_logit_softcapping", cap, "null: Gemma 3 has none, and transformers ignores it")
    pattern = count({"sliding_window_pattern": 6, **values}, "sliding_window_pattern")
    ropes: Any = {} if values.get("rope_parameters") is None else values["rope_parameters"]
    nested = isinstance(ropes, Mapping) and all(
        kind in LAYER_TYPES and (rope is None or isinstance(rope, Mapping)) for kind, rope in ropes.items()
    )
    require(nested, "rope_parameters", ropes, "an object for full_attention and one for sliding_attention")
    whole = {**values, "rope_theta": _theta(values, "rope_theta", THETA)}
    local = {
        "max_position_embeddings": values["max_position_embeddings"],
        "rope_theta": _theta(values, "rope_local_base_freq", LOCAL_THETA),
    }
    return {
        **_two_kinds_of_layers(values, every=pattern),
        "rope": rope_from_hf({**whole, "rope_parameters": ropes.get("full_attention")}),
        "local_rope": rope_from_hf({**local, "rope_parameters": ropes.get("sliding_attention")}),
    }


def _two_kinds_of_layers(values: Mapping[str, Any], every: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; each `every`th layer has no window, unless the file lists the layers."""
    layer_types, num_layers = values["layer_types"], layer_count(values)
    if layer_types is None:
        layer_types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    scalar = as_float("query_pre_attn_scalar", values["query_pre_attn_scalar"])
    return {
        "norm_placement": "both",
        "activation": activation(values, "hidden_activation"),
        "layer_windows": windows_of(layer_types, values["sliding_window"], num_layers),
        "attention_scale": scalar**-0.5,
        "final_soft_cap": _soft_cap(values, "final_logit_softcapping"),
    }


def _theta(values: Mapping[str, Any], key: str, default: float) -> float:
    return default if values.get(key) is None else as_float(key, values[key])


def _soft_cap(values: Mapping[str, Any], key: str) -> float | None:
    return None if values[key] is None else as_float(key, values[key])


LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the 27B models, which scale scores by another number than head_dim: no key of a GGUF file says so."""


def read_gguf(fields: Mapping[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    model_type, num_layers = fields["model_type"], layer_count({"block_count": fields["num_layers"]}, "block_count")
    shared = {
        "norm_offset": True,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(fields["hidden_size"]),
    }
    if model_type == "gemma":
        return shared
    is_gemma3 = model_type == "gemma3_text"
    every, pattern = 6 if is_gemma3 else 2, read("attention.sliding_window_pattern")
    require(pattern in (None, every), "attention.sliding_window_pattern", pattern, f"none, or {every}")
    window = read("attention.sliding_window")
    require(is_count(window), "attention.sliding_window", window, "an int >= 1")
    caps = {}
    for ours, key in (("attention_soft_cap", "attn_logit_softcapping"), ("final_soft_cap", "final_logit_softcapping")):
        cap = read(key)
        require(cap is not None or is_gemma3, key, cap, "a number")
        caps[ours] = None if cap is None else as_float(key, cap)
    local_theta = read("rope.freq_base_swa")
    local = RopeConfig(theta=LOCAL_THETA if local_theta is None else as_float("rope.freq_base_swa", local_theta))
    is_largest = num_layers == LARGEST[model_type]
    scalar = fields["hidden_size"] / fields["num_heads"] if is_largest else float(fields["head_dim"])
    return {
        **shared,
        **caps,
        "norm_placement": "both",
        "qk_norm": is_gemma3,
        "layer_windows": tuple(window if (i + 1) % every else None for i in range(num_layers)),
        "attention_scale": scalar**-0.5,
        "local_rope": local if is_gemma3 else None,
    }


FAMILY = Family(
    model_types=("gemma", "gemma2", "gemma3_text", "gemma3"),
    read_config=read_config,
    gguf_types={"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text"},
    read_gguf=read_gguf,
    text_models={"gemma3": "gemma3_text"},
    renames=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignorable=r"(model\.)?(vision_tower|multi_modal_projector)\..+",
)
