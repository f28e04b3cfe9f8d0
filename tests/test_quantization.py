"""int8 weights and activations: against integers in numpy, and models in int8 against themselves in float."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_scripts import load
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import CONFIG, dense_logits, prompt_of, tiny_params

from pagedjax.models.decoder import CausalLM
from pagedjax.models.quantization import (
    Quantization,
    float_dtype,
    int8_dot,
    is_quantized,
    look_up,
    quantize_kernel,
    quantize_like,
    quantize_params,
    quantize_rows,
    quantize_table,
    rotate,
    rotation,
)


def hadamard_blocks(num_channels: int) -> np.ndarray:
    """The whole rotation as a matrix, entry by entry: the sign is the parity of the bits that two numbers share."""
    size = min(64, num_channels & -num_channels)
    out = np.zeros((num_channels, num_channels))
    for i in range(num_channels):
        for j in range(num_channels):
            if i // size == j // size:
                out[i, j] = (-1) ** bin((i % size) & (j % size)).count("1") / np.sqrt(size)
    return out


def int8_product(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The product that `int8_dot` is to give, from float operands, row by row in numpy integers."""
    turn = hadamard_blocks(kernel.shape[0])
    x, kernel = x.astype(np.float64) @ turn, turn.T @ kernel.astype(np.float64)
    column_scale = np.abs(kernel).max(axis=0) / 127
    columns = np.rint(kernel / column_scale).astype(np.int64)
    out = []
    for row in x:
        scale = np.abs(row).max() / 127
        out.append((np.rint(row / scale).astype(np.int64) @ columns) * scale * column_scale)
    return np.array(out)


@pytest.mark.parametrize("num_channels", [1, 6, 16, 24, 64, 192, 576])
def test_rotation_is_orthogonal_and_its_own_inverse(num_channels):
    matrix = rotation(num_channels)
    assert num_channels % len(matrix) == 0
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(len(matrix)), atol=1e-6)
    x = np.random.default_rng(0).normal(size=(3, num_channels)).astype(np.float32)
    np.testing.assert_allclose(rotate(jnp.asarray(x)), x @ hadamard_blocks(num_channels), atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(jnp.asarray(x))), x, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 16, 8), (5, 64, 24), (7, 96, 5), (2, 6, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_dot_equals_integers_in_numpy(shape, dtype):
    rows, num_in, num_out = shape
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, num_in)), dtype)
    kernel = jnp.asarray(rng.normal(size=(num_in, num_out)), dtype)
    quantized, scale = quantize_kernel(kernel)
    assert (quantized.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    y = int8_dot(x, quantized, scale, out_dtype=jnp.float32)
    expected = int8_product(np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    # Where a number falls between two integers, f32 may round it to the other one: a step of one of the operands.
    exact = np.isclose(np.asarray(y), expected, rtol=1e-4, atol=1e-4)
    assert exact.mean() > 0.9
    step = np.abs(np.asarray(x, np.float32)).max() * np.abs(np.asarray(kernel, np.float32)).max() * 64 / 127
    np.testing.assert_allclose(y, expected, atol=2 * step / 8)
    assert int8_dot(x, quantized, scale).dtype == jnp.dtype(dtype)


def test_int8_dot_is_near_the_float_product_despite_outliers():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(32, 256)).astype(np.float32), rng.normal(size=(256, 64)).astype(np.float32)
    x[:, 17] *= 300.0
    exact = x @ kernel
    y = int8_dot(jnp.asarray(x), *quantize_kernel(jnp.asarray(kernel)))
    spread = np.abs(x).max(axis=-1, keepdims=True) / 127
    columns = np.rint(kernel / (np.abs(kernel).max(axis=0) / 127)) * (np.abs(kernel).max(axis=0) / 127)
    unrotated = (np.rint(x / spread) * spread) @ columns

    def error(of: Any) -> float:
        others = exact - np.outer(x[:, 17], kernel[17])  # what a scale for the outlier alone would lose
        return float(np.linalg.norm(np.asarray(of) - exact) / np.linalg.norm(others))

    assert error(y) < 0.5 * error(unrotated)


def test_the_table_serves_look_up_and_head():
    rng = np.random.default_rng(0)
    table, hidden = rng.normal(size=(40, 96)).astype(np.float32), rng.normal(size=(5, 96)).astype(np.float32)
    quantized, scale = quantize_table(jnp.asarray(table))
    ids = np.array([[3, 0], [39, 100]], np.int32)  # ids beyond the table are clamped, as in float
    rows = np.asarray(look_up(quantized, scale, ids))
    assert rows.shape == (2, 2, 96)
    # Half a step of the rotated row in each channel, so no further than that for the whole row.
    distance = np.linalg.norm(rows - table[[[3, 0], [39, 39]]], axis=-1)
    assert np.all(distance <= 0.5 * np.sqrt(96) * np.asarray(scale)[[[3, 0], [39, 39]]])
    logits = int8_dot(jnp.asarray(hidden), quantized, scale, axis=1, out_dtype=jnp.float32)
    np.testing.assert_allclose(logits, int8_product(hidden, table.T), atol=0.02)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20]))
def test_rows_are_near_what_they_were(seed, size):
    x = (np.random.default_rng(seed).normal(size=(4, 24)) * size).astype(np.float32)
    quantized, scale = quantize_rows(jnp.asarray(x))
    assert np.all(np.abs(np.asarray(quantized, np.int32)).max(axis=-1) == 127)
    assert np.all(np.abs(np.asarray(quantized, np.float32) * scale - x) <= 0.5001 * np.asarray(scale))


def test_rows_of_zeros_and_of_nan():
    x = jnp.asarray([[0.0] * 16, [float("nan")] + [1.0] * 15, [1.0] * 16])
    y = np.asarray(int8_dot(x, *quantize_kernel(jnp.ones((16, 3)))))
    np.testing.assert_array_equal(y[0], 0.0)
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[2], 16.0, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(64, 64)).astype(np.float32), rng.normal(size=(64, 48)).astype(np.float32)
    x[:, 5] *= np.linspace(1, 1000, 64)
    operands = quantize_kernel(jnp.asarray(kernel))
    whole = np.asarray(int8_dot(jnp.asarray(x), *operands))
    alone = np.concatenate([int8_dot(jnp.asarray(x[i : i + 1]), *operands) for i in range(64)])
    np.testing.assert_allclose(alone, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize_embeddings", [False, True])
def test_params_in_int8(quantize_embeddings):
    params = tiny_params()
    quantized = quantize_params(params, Quantization(quantize_embeddings))
    paths = dict(jax.tree_util.tree_leaves_with_path(quantized))
    int8 = {jax.tree_util.keystr(path) for path, leaf in paths.items() if is_quantized(leaf)}
    kernels = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    expected = {path for path in kernels if path.endswith("['kernel']") and "lm_head" not in path}
    if quantize_embeddings:
        expected |= {path for path in kernels if "lm_head" in path or "embed_tokens" in path}
    assert int8 == expected
    assert quantized["norm"]["scale"] is params["norm"]["scale"]
    assert float_dtype(quantized) == float_dtype(params) == jnp.float32
    again = quantize_params(quantized, Quantization(quantize_embeddings))
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(quantized), strict=True))
    like = quantize_like(params, quantized)
    assert jax.tree.structure(like) == jax.tree.structure(quantized)
    assert quantize_like(params, params) is params


@pytest.mark.parametrize("quantize_embeddings", [False, True])
def test_a_model_in_int8_is_near_the_float_one(quantize_embeddings):
    ids = prompt_of(60)
    params = quantize_params(tiny_params(), Quantization(quantize_embeddings))
    logits = np.asarray(CausalLM(CONFIG).apply({"params": params}, jnp.asarray([ids], jnp.int32)))[0]
    exact = dense_logits(ids)
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.1


def test_the_text_of_the_benchmark_is_cut_into_whole_windows():
    quantization = load("quantization")
    windows = quantization.windows_of(list(range(1300)), None)
    assert windows == [list(range(512)), list(range(512, 1024))]
    assert quantization.windows_of(list(range(1300)), 1) == windows[:1]
    text = quantization.TEXT.read_text()
    assert text.isascii()
    assert len(text) == 148_480
