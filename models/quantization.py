"""Weights and activations in int8 (W8A8): how arrays are quantised, and the product of what is quantised.

A kernel becomes int8 with a scale for each output channel, at load; activations become int8 with a scale for each
token, in the step; products are int8 x int8 with exact sums in int32. Some channels of the activations are a hundred
times as large as others and would take the scale for themselves. So both sides are rotated first, by the same
orthogonal matrix, which leaves the product as it is and spreads each channel over its neighbours (arXiv 2404.00456).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from pagedjax.models.checks import require
from pagedjax.models.config import Quantization

QUANTIZATIONS = ("int8",)
MAX_BLOCK = 64
"""Channels that are rotated among themselves, at most."""
LARGEST = 127
TINIEST = 1e-30
"""Largest number of a row, at least: the scale of a row of zeros must not be 0."""


def quantization_of(quantization: Any, quantize_embeddings: Any = False) -> Quantization | None:
    """The options of `pagedjax.LLM` as one; ValueError for an unknown kind, and for embeddings of none."""
    known = quantization is None or quantization in QUANTIZATIONS
    require(known, "quantization", quantization, f"None or one of {', '.join(QUANTIZATIONS)}")
    require(isinstance(quantize_embeddings, bool), "quantize_embeddings", quantize_embeddings, "True or False")
    together = quantization is not None or not quantize_embeddings
    require(together, "quantize_embeddings", quantize_embeddings, "False without a quantization")
    return None if quantization is None else Quantization(quantize_embeddings)


def quantization_in(params: Mapping[str, Any]) -> Quantization | None:
    """What of these params is in int8; None if nothing is. They may be shapes."""
    if not any(map(is_quantized, jax.tree.leaves(params))):
        return None
    table, head = params["embed_tokens"]["embedding"], params.get("lm_head")
    return Quantization(is_quantized(table) or (head is not None and is_quantized(head["kernel"])))


def is_quantized(array: Any) -> bool:
    """Whether a kernel or an embedding is int8 with a scale beside it."""
    return array.dtype == jnp.int8


@cache
def rotation(num_channels: int) -> Float32[np.ndarray, "n n"]:
    """The symmetric orthogonal matrix for each block of n channels: Hadamard's (Sylvester's construction), n the
    largest power of two that divides their number, at most MAX_BLOCK."""
    size = min(MAX_BLOCK, num_channels & -num_channels)
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def rotate(x: Float[Array, "*B I"]) -> Float32[Array, "*B I"]:
    """Each block of channels rotated, in f32; rotated twice it is itself again."""
    matrix = rotation(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, len(matrix))
    return jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)


def quantize_rows(
    x: Float[Array, "*B I"], scale_dtype: Any = jnp.float32
) -> tuple[Int8[Array, "*B I"], Float[Array, "*B 1"]]:
    """Each row as int8 and a scale, x = q * scale: a row's largest number is 127. NaN in a row makes its scale NaN."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = (jnp.maximum(largest, TINIEST) / LARGEST).astype(scale_dtype)
    scaled = x.astype(jnp.float32) / scale.astype(jnp.float32)
    return jnp.clip(jnp.round(scaled), -LARGEST, LARGEST).astype(jnp.int8), scale


@jax.jit
def quantize_kernel(kernel: Float[Array, "I O"]) -> tuple[Int8[Array, "I O"], Float32[Array, "O"]]:
    """A kernel, rotated, as int8 and a scale for each output channel: what `int8_dot` takes."""
    quantized, scale = quantize_rows(rotate(kernel.T))
    return quantized.T, scale[:, 0]


@jax.jit
def quantize_table(table: Float[Array, "V D"]) -> tuple[Int8[Array, "V D"], Float[Array, "V"]]:
    """An embedding table, rotated, as int8 and a scale for each row in the table's dtype, which is the model's own: see
    `float_dtype`. A tied one serves `look_up` and `int8_dot` alike."""
    quantized, scale = quantize_rows(rotate(table), table.dtype)
    return quantized, scale[:, 0]


def int8_dot(
    x: Float[Array, "*B I"],
    kernel: Int8[Array, "..."],
    scale: Float[Array, "O"],
    *,
    axis: int = 0,
    out_dtype: Any = None,
) -> Float[Array, "*B O"]:
    """x W for a kernel that was quantised, whose input channels are on `axis` of [I, O] or of [O, I].

    Each row of x is quantised for itself, so no row depends on its batch. `out_dtype` is None for that of x.
    """
    quantized, row_scale = quantize_rows(rotate(x))
    contracted = (((x.ndim - 1,), (axis,)), ((), ()))
    sums = lax.dot_general(quantized, kernel, contracted, preferred_element_type=jnp.int32)
    wide_scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (sums.astype(jnp.float32) * row_scale * wide_scale).astype(out_dtype or x.dtype)


def look_up(table: Int8[Array, "V D"], scale: Float[Array, "V"], ids: Any) -> Float[Array, "*B D"]:
    """Rows of a table that was quantised, in the dtype of its scales."""
    rows = table.at[ids].get(mode="clip").astype(jnp.float32)
    return rotate(rows * scale.at[ids].get(mode="clip").astype(jnp.float32)[..., None]).astype(scale.dtype)


def is_to_quantize(path: tuple[str, ...], quantization: Quantization | None) -> bool:
    """Whether the parameter at `path` becomes int8: every kernel, but the head and the embedding table by choice."""
    if quantization is None or path[-1] not in ("kernel", "embedding"):
        return False
    if path[0] in ("lm_head", "embed_tokens"):
        return quantization.embeddings
    return path[-1] == "kernel"  # learned positions stay


def quantize_leaf(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """What takes the place of a kernel or table: it under its own name, and its "scale"."""
    quantized, scale = (quantize_table if path[-1] == "embedding" else quantize_kernel)(value)
    return {path[-1]: quantized, "scale": scale}


def quantize_params(params: Mapping[str, Any], quantization: Quantization) -> dict[str, Any]:
    """Params with every dense kernel in int8 and its scale beside it; arrays that stay are shared, not copied.

    What is in int8 already stays as it is.
    """

    def inside(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in tree.items():
            here = (*path, name)
            if isinstance(value, Mapping):
                out[name] = inside(value, here)
            elif is_to_quantize(here, quantization) and value.ndim == 2 and not is_quantized(value):
                out |= quantize_leaf(here, jnp.asarray(value))
            else:
                out[name] = value
        return out

    return inside(params, ())


def quantize_like(params: Mapping[str, Any], old: Mapping[str, Any]) -> Mapping[str, Any]:
    """Float params quantised as `old` are, and as they are if `old` are float."""
    quantization = quantization_in(old)
    return params if quantization is None else quantize_params(params, quantization)


def quantized_bytes(path: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of what takes the place of a kernel or table of this shape and dtype: see `quantize_leaf`."""
    if path[-1] == "embedding":
        return shape[0] * shape[1] + shape[0] * jnp.dtype(dtype).itemsize
    return shape[0] * shape[1] + 4 * shape[1]


def float_dtype(params: Mapping[str, Any]) -> np.dtype:
    """The dtype that a model with these params runs in."""
    table = params["embed_tokens"]
    return jnp.dtype(table.get("scale", table["embedding"]).dtype)
