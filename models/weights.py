"""The names of a checkpoint's tensors, and the rule that each is used exactly once or named in an error.

Parameters are a plain nested dict of jax arrays in the shape that the flax module's `init` gives, under Hugging
Face's names. Both loaders (safetensors, GGUF) speak Hugging Face's tensor names; `placement.py` does the placing.
"""

from typing import Any, NamedTuple

from pagedjax.models.config import ModelConfig

Params = dict[str, Any]


class ExpectedTensor(NamedTuple):
    """Where one tensor of a file belongs."""

    path: tuple[str, ...]
    """Keys into the nested dict of parameters."""
    shape: tuple[int, ...]
    """Its shape there."""
    transpose: bool
    """The file holds it as [out, in]; flax kernels are [in, out]."""


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Every tensor that a checkpoint of this shape must have, by its Hugging Face name."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = ExpectedTensor(("embed_tokens", "embedding"), (config.vocab_size, hidden), False)
    tensors = {"model.embed_tokens.weight": table}

    def norm(name: str, path: tuple[str, ...], size: int) -> None:
        tensors[f"{name}.weight"] = ExpectedTensor((*path, "scale"), (size,), False)

    def linear(name: str, path: tuple[str, ...], num_in: int, num_out: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = ExpectedTensor((*path, "kernel"), (num_in, num_out), True)
        if bias:
            tensors[f"{name}.bias"] = ExpectedTensor((*path, "bias"), (num_out,), False)

    for index in range(config.num_layers):
        name, layer = f"model.layers.{index}", f"layers_{index}"
        norm(f"{name}.input_layernorm", (layer, "input_layernorm"), hidden)
        norm(f"{name}.post_attention_layernorm", (layer, "post_attention_layernorm"), hidden)
        for proj, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(f"{name}.self_attn.{proj}", (layer, "self_attn", proj), hidden, size, config.attention_bias)
        linear(f"{name}.self_attn.o_proj", (layer, "self_attn", "o_proj"), q_size, hidden, config.attention_out_bias)
        if config.qk_norm:
            norm(f"{name}.self_attn.q_norm", (layer, "self_attn", "q_norm"), config.head_dim)
            norm(f"{name}.self_attn.k_norm", (layer, "self_attn", "k_norm"), config.head_dim)
        for proj in ("gate_proj", "up_proj"):
            linear(f"{name}.mlp.{proj}", (layer, "mlp", proj), hidden, ffn, config.mlp_bias)
        linear(f"{name}.mlp.down_proj", (layer, "mlp", "down_proj"), ffn, hidden, config.mlp_bias)

    norm("model.norm", ("norm",), hidden)
    if not config.tie_word_embeddings:
        linear("lm_head", ("lm_head",), hidden, config.vocab_size, bias=False)
    return tensors


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may lie in a file without being used. There are two kinds, and no others:

    - `lm_head.weight` of a tied model: the embedding is the head, whatever the copy holds (as in transformers);
    - `...rotary_emb.inv_freq`, a buffer of old checkpoints that follows from the config.
    """
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
