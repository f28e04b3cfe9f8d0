"""The names of a checkpoint's tensors, and the rule that each is used exactly once or named in an error.

Parameters are a plain nested dict of jax arrays in the shape that the flax module's `init` gives, under Hugging
Face's names. Both loaders (safetensors, GGUF) speak Hugging Face's tensor names; `placement.py` does the placing.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedjax.models.config import ModelConfig
from pagedjax.models.families import family_of

Params = dict[str, Any]


class ExpectedTensor(NamedTuple):
    """Where one tensor of a file belongs."""

    path: tuple[str, ...]
    """Keys into the nested dict of parameters."""
    shape: tuple[int, ...]
    """Its shape there."""
    transpose: bool
    """The file holds it as [out, in]; flax kernels are [in, out]."""

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return self.shape[::-1] if self.transpose else self.shape


def parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path and shape of every parameter: what the flax module's `init` gives, without running it."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        ("embed_tokens", "embedding"): (config.vocab_size, config.embedding_width)
    }

    def norm(*path: str) -> None:
        shapes[*path, "scale"] = (hidden,)
        if config.norm == "layer":
            shapes[*path, "bias"] = (hidden,)

    def linear(*path: str, num_in: int, num_out: int, bias: bool = False) -> None:
        shapes[*path, "kernel"] = (num_in, num_out)
        if bias:
            shapes[*path, "bias"] = (num_out,)

    if config.position_embedding == "learned":
        num_positions = config.max_position_embeddings + config.position_offset
        shapes["embed_positions", "embedding"] = (num_positions, hidden)
    if config.embedding_size is not None:
        linear("project_in", num_in=config.embedding_size, num_out=hidden)
        linear("project_out", num_in=hidden, num_out=config.embedding_size)
    for layer in (f"layers_{index}" for index in range(config.num_layers)):
        for name in config.layer_norms:
            norm(layer, name)
        for proj, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(layer, "self_attn", proj, num_in=hidden, num_out=size, bias=config.attention_bias)
        linear(layer, "self_attn", "o_proj", num_in=q_size, num_out=hidden, bias=config.attention_out_bias)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[layer, "self_attn", name, "scale"] = (config.head_dim,)
        for proj in ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",):
            linear(layer, "mlp", proj, num_in=hidden, num_out=ffn, bias=config.mlp_bias)
        linear(layer, "mlp", "down_proj", num_in=ffn, num_out=hidden, bias=config.mlp_bias)
    if config.final_norm:
        norm("norm")
    if not config.tie_word_embeddings:
        linear("lm_head", num_in=config.embedding_width, num_out=config.vocab_size)
    return shapes


def check_params(config: ModelConfig, params: Any) -> None:
    """Raises a ValueError that names every array of the model that a nested dict lacks or has in another shape."""
    if not isinstance(params, Mapping) or "embed_tokens" not in params:
        raise ValueError('params: expected the pytree of `load`, or what `model.init` gives under "params"')
    problems = []
    for path, shape in parameter_shapes(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf.get(key) if isinstance(leaf, Mapping) else None
        name = "/".join(path)
        if leaf is None:
            problems.append(f"missing: {name} {list(shape)}")
        elif tuple(getattr(leaf, "shape", ())) != shape:
            problems.append(f"wrong shape: {name} is {list(getattr(leaf, 'shape', ()))}, expected {list(shape)}")
    if problems:
        raise ValueError(f"params do not fit the model's {config.model_type} config: " + "; ".join(problems))


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Every tensor that a checkpoint of this shape must have, by its Hugging Face name."""
    family = family_of(config.model_type)

    def is_transposed(path: tuple[str, ...]) -> bool:
        return path[-1] == "kernel" and (family.transposes_kernels or path[0] == "lm_head")

    return {
        family.file_name(path): ExpectedTensor(path, shape, is_transposed(path))
        for path, shape in parameter_shapes(config).items()
    }


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may lie in a file without being used. There are three kinds, and no others:

    - `lm_head.weight` of a tied model: the embedding is the head, whatever the copy holds (as in transformers);
    - `...rotary_emb.inv_freq`, a buffer of old checkpoints that follows from the config;
    - what the model's family names: causal masks (GPT-2), what sees images (Gemma 3).
    """
    if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
        return True
    return re.fullmatch(family_of(config.model_type).ignorable, name) is not None
