"""The names of a checkpoint's tensors, and the rule that each is used exactly once or named in an error.

Parameters are a plain nested dict of jax arrays in the shape that the flax module's `init` gives, under Hugging
Face's names. Both loaders (safetensors, GGUF) speak Hugging Face's tensor names and end in `build_params`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models.config import ModelConfig, check_float_dtype

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


def build_params(
    config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]], dtype: str, progress: bool = False
) -> Params:
    """Puts the tensors of a checkpoint on the default device, as the nested dict that the model is applied with.

    `tensors` is a stream of (Hugging Face name, array in the file's layout); one is converted at a time, so the host
    holds one tensor beside the finished parameters. Raises one ValueError that lists every tensor that is missing,
    unknown, given twice or of the wrong shape.
    """
    check_float_dtype(dtype)
    expected, problems = expected_tensors(config), []
    params: Params = {}
    seen: set[str] = set()
    for name, array in _with_progress(tensors, len(expected), progress):
        if name in seen:
            problems.append(f"given twice: {name}")
            continue
        seen.add(name)
        if name not in expected:
            if not is_ignorable(name, config):
                problems.append(f"not used: {name} {list(array.shape)}")
            continue
        path, shape, transpose = expected[name]
        file_shape = shape[::-1] if transpose else shape
        if array.shape != file_shape:
            problems.append(f"wrong shape: {name} is {list(array.shape)}, expected {list(file_shape)}")
        elif not problems:  # once something is wrong, only the list of problems is of use
            _insert(params, path, _to_device(array, dtype, transpose))
    problems += [f"missing: {name} {list(spec.shape)}" for name, spec in expected.items() if name not in seen]
    if problems:
        raise ValueError(f"checkpoint does not fit its {config.model_type} config: " + "; ".join(problems))
    return params


def _to_device(array: np.ndarray, dtype: str, transpose: bool) -> jax.Array:
    # Converted on the host, so that the device never holds a wider copy; transposed on the device, because numpy
    # takes four times as long for bf16. The result never shares the file's memory: jnp.asarray copies.
    value = jnp.asarray(np.asarray(array, dtype=jnp.dtype(dtype)))
    return value.T if transpose else value


def _insert(params: Params, path: tuple[str, ...], array: jax.Array) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = array


def _with_progress(
    tensors: Iterable[tuple[str, np.ndarray]], total: int, progress: bool
) -> Iterable[tuple[str, np.ndarray]]:
    if not progress:
        return tensors
    from tqdm import tqdm

    return tqdm(tensors, total=total, desc="Loading weights", unit=" tensors")
