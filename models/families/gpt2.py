"""GPT-2 (Radford et al., 2019): learned positions, layer norms, one product for queries, keys and values.

Its files store kernels as [in, out], and the causal mask of each layer as a buffer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.models.checks import as_float, require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families.family import Family, activation, count, flag, layer_count, sizes


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    crossed = values["add_cross_attention"]
    require(not crossed, "add_cross_attention", crossed, "false: there is no encoder to attend to")
    hidden = count(values, "n_embd")
    names = {
        "hidden_size": hidden,
        "num_hidden_layers": layer_count(values, "n_layer"),
        "num_attention_heads": count(values, "n_head"),
        "max_position_embeddings": count(values, "n_positions"),
    }
    return ModelConfig(
        **sizes({**values, **names}),
        intermediate_size=4 * hidden if values["n_inner"] is None else count(values, "n_inner"),
        norm="layer",
        norm_eps=as_float("layer_norm_epsilon", values["layer_norm_epsilon"]),
        activation=activation(values, "activation_function"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        position_embedding="learned",
        attention_scale=None if flag(values, "scale_attn_weights") else 1.0,
        attention_scale_by_layer=flag(values, "scale_attn_by_inverse_layer_idx"),
    )


def read_gguf(fields: Mapping[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
    }


_PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    **{f"self_attn.{ours}": f"attn.c_attn[{part}]" for ours, part in _PARTS.items()},
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
FAMILY = Family(
    model_types=("gpt2",),
    read_config=read_config,
    gguf_types={"gpt2": "gpt2"},
    read_gguf=read_gguf,
    prefix="transformer",
    layers="h",
    names=_NAMES,
    transposes_kernels=False,
    fused={".attn.c_attn": tuple(_PARTS.values())},
    renames=tuple((f"{module}.", f"transformer.{module}.") for module in ("h", "wte", "wpe", "ln_f")),
    ignorable=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
