"""OPT (arXiv 2205.01068), the models of the PagedAttention paper: learned positions, layer norms with biases, ReLU.

The 350M model norms after attention and MLP instead of before them, and its embeddings are narrower than its layers.
"""

from collections.abc import Mapping
from typing import Any

from pagedjax.models.checks import require
from pagedjax.models.config import ModelConfig
from pagedjax.models.families.family import Family, activation, count, flag, sizes


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    affine = values["layer_norm_elementwise_affine"]
    require(affine is True, "layer_norm_elementwise_affine", affine, "true: norms without weights are not implemented")
    bias, before = flag(values, "enable_bias"), flag(values, "do_layer_norm_before")
    has_width = values["word_embed_proj_dim"] is not None
    width = count(values, "word_embed_proj_dim" if has_width else "hidden_size")
    return ModelConfig(
        **sizes(values),
        intermediate_size=count(values, "ffn_dim"),
        norm="layer",
        norm_eps=1e-5,  # torch's default: no file states it
        norm_placement="pre" if before else "post",
        final_norm=before and not flag(values, "_remove_final_layer_norm"),
        activation=activation(values, "activation_function"),
        gated_mlp=False,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        position_embedding="learned",
        position_offset=2,
        embedding_size=None if width == values["hidden_size"] else width,
    )


_NAMES = {
    "norm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
}
FAMILY = Family(
    model_types=("opt",),
    read_config=read_config,
    prefix="model.decoder",
    names=_NAMES,
    renames=(("decoder.", "model.decoder."),),
)
