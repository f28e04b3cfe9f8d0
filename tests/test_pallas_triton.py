"""The Pallas Triton attention beyond the common suite: splits and their merge, tiles, tuning, what it refuses."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, attend_reference

from benchmarks.attention_shapes import Case, Row, Shape, make_case
from pagedjax.pallas_kernels import pallas_triton
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention, why_not
from pagedjax.pallas_kernels.pallas_triton_kernels import Spec
from pagedjax.pallas_kernels.tuning import Tile, Tuning, max_group_for, tuning_for

TUNING = tuning_for("NVIDIA H200", head_dim=64, itemsize=4)
SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=64, block_size=12)
ROWS: list[Row] = [(1, 1), (31, 1), (32, 1), (33, 1), (400, 1), (700, 1), (50, 0), (90, 5), (300, 3), (130, 40)]


def attend(case: Case, tuning: Tuning, max_query_len: int | None = None) -> np.ndarray:
    q, k_pool, v_pool, meta = case.arrays
    meta = replace(meta, max_query_len=max_query_len or meta.max_query_len)
    run = partial(pallas_triton.paged_attention, **case.options, tuning=tuning)
    return np.asarray(jax.jit(run)(q, k_pool, v_pool, meta), np.float32)


# --- splits


@pytest.mark.parametrize(("num_splits", "window"), [(1, 100), (2, None), (3, 100), (5, None), (16, None), (16, 100)])
def test_any_number_of_splits(num_splits, window):
    case = make_case(ROWS, SHAPE._replace(sliding_window=window), num_rows=len(ROWS) + 1)
    tuning = replace(TUNING, min_split_keys=16, num_programs=10**6, max_splits=num_splits)
    assert_close(attend(case, tuning), attend_reference(case), case)


@pytest.mark.parametrize("min_split_keys", [1, 48, 1000])
def test_short_contexts_take_fewer_splits(min_split_keys):
    """Programs beyond a context write nothing, and what lies in their place is not merged."""
    case = make_case(ROWS[:6], SHAPE, dtype=jnp.bfloat16)
    tuning = replace(TUNING, min_split_keys=min_split_keys, num_programs=10**6, max_splits=16)
    assert_close(attend(case, tuning), attend_reference(case), case)


def test_drafts_are_split_too():
    rows = [(300, 4), (17, 2), (64, 3), (700, 1)]
    case = make_case(rows, SHAPE, num_tokens=16)
    tuning = replace(TUNING, min_split_keys=16, num_programs=10**6, max_splits=7)
    assert_close(attend(case, tuning, max_query_len=4), attend_reference(case), case)


def test_a_draft_of_any_length_may_be_short_or_long():
    """Whether a request counts as short depends on the program; its result does not."""
    case = make_case([(90, 5), (300, 3), (700, 1)], SHAPE)
    results = [attend(case, replace(TUNING, max_draft_rows=rows), max_query_len=8) for rows in (16, 64)]
    for result in results:
        assert_close(result, attend_reference(case), case)


def test_the_tiles_of_a_group_larger_than_a_tile():
    """71 query heads with one KV head, as Falcon has: a tile is one token."""
    case = make_case([(40, 1), (30, 9), (17, 17)], Shape(71, 1, 16, 16), dtype=jnp.bfloat16)
    assert_close(attend(case, TUNING), attend_reference(case), case)


# --- tiles


@pytest.mark.parametrize("short_len", [1, 4])
@pytest.mark.parametrize("tile_len", [5, 16])
def test_tiles_cover_every_long_request_once(short_len, tile_len):
    rng = np.random.default_rng(tile_len)
    cut = jax.jit(pallas_triton._cut_into_tiles, static_argnums=(1, 2, 3))
    for _ in range(20):
        query_lens = rng.integers(0, 30, 7) * (rng.random(7) < 0.7)
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        request, first = map(np.asarray, cut(starts, 256, short_len, tile_len))
        tiles = {(r, f) for r, f in zip(request.tolist(), first.tolist(), strict=True) if f < query_lens[r]}
        expected = {(r, f) for r, n in enumerate(query_lens) if n > short_len for f in range(0, n, tile_len)}
        assert tiles == expected
        assert (first < query_lens[request]).sum() == len(expected)  # none twice


def test_there_are_always_tiles_enough():
    """The worst case: every request has one token more than a whole number of tiles."""
    starts = np.arange(0, 33 * 6, 33, dtype=np.int32)
    request, first = pallas_triton._cut_into_tiles(jnp.asarray(starts), int(starts[-1]), 1, 16)
    assert (np.asarray(first) < 33).sum() == 5 * 3
    chex.assert_equal_shape([request, first])


# --- tuning


def test_splits_fill_the_gpu_and_no_more():
    tuning = tuning_for("NVIDIA H200", head_dim=128, itemsize=2)
    assert tuning.num_programs == 4 * 132
    assert tuning.num_splits(1 * 8, max_context_len=131072) == 64  # 66 would fill it, but 64 can be merged
    assert tuning.num_splits(8 * 8, max_context_len=131072) == 9
    assert tuning.num_splits(64 * 8, max_context_len=131072) == 2
    assert tuning.num_splits(256 * 8, max_context_len=131072) == 1
    assert tuning.num_splits(8, max_context_len=1000) == 3  # each has 256 keys at least
    assert tuning.num_splits(8, max_context_len=100) == 1


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L4", "cpu"])
@pytest.mark.parametrize("head_dim", [1, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_tuning_is_one_that_triton_takes(gpu, head_dim, itemsize):
    tuning = tuning_for(gpu, head_dim=head_dim, itemsize=itemsize)
    for group in {1, 3, 4, 7, 8, max_group_for(head_dim=head_dim, itemsize=itemsize)}:
        for tile in (tuning.short_tile(group, 1), tuning.short_tile(group, 5), tuning.long_tile(group)):
            assert tile.num_rows >= max(16, group)
            assert tile.num_keys >= 16
            assert all(n & (n - 1) == 0 for n in (tile.num_rows, tile.num_keys, tile.num_warps))


def test_unknown_gpus_get_tiles_for_99_kib():
    """Of shared memory, the least of any since Ampere. The queries' tile and the stages' keys and values lie there."""
    for head_dim in (64, 128, 256):
        long = tuning_for("NVIDIA L4", head_dim=head_dim, itemsize=2).long
        stages = long.num_stages - 1
        assert (long.num_rows + 2 * stages * long.num_keys) * head_dim * 2 <= 99 * 1024


def test_a_tile_grows_with_the_rows_it_needs():
    assert Tile(16, 64, 4, 3).with_rows(5) == Tile(16, 64, 4, 3)
    assert Tile(16, 64, 4, 3).with_rows(20) == Tile(32, 64, 4, 3)
    assert Tile(16, 64, 4, 3).with_rows(71) == Tile(128, 64, 8, 3)


# --- what it refuses, and what the op does


@pytest.mark.parametrize("head_dim", [1, 2, 8, 15])
def test_products_have_an_inner_dimension_of_16(head_dim):
    """Below, Triton fills the operands of a tensor core up with copies of themselves: the interpreter does not."""
    spec = Spec(TUNING.short, 1, 1, head_dim, 16, 1.0, None, None, 1, 1)
    assert spec.padded_dim == 16
    case = make_case(ROWS[:4], Shape(4, 2, head_dim, 16))
    assert_close(attend(case, TUNING), attend_reference(case), case)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "pool_dtype", "reason"),
    [
        (257, jnp.float32, jnp.float32, "head_dim is at most 256, got 257"),
        (64, jnp.float64, jnp.float64, "bfloat16, float16 and float32, got float64"),
        (64, jnp.bfloat16, jnp.float32, "same dtype, got bfloat16 and float32"),
    ],
)
def test_what_it_cannot_do(head_dim, dtype, pool_dtype, reason):
    q = jax.ShapeDtypeStruct((1, 2, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((4, 1, 16, head_dim), pool_dtype)
    assert reason in (why_not("pallas_triton", q, pool) or "")
    assert why_not("xla", q, pool) is None


def test_the_op_refuses_by_name():
    case = make_case([(3, 1)], Shape(2, 1, 300, 16))
    with pytest.raises(NotImplementedError, match=r"'pallas_triton': head_dim is at most 256, got 300"):
        paged_attention(*case.arrays, scale=1.0, implementation="pallas_triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be an int of at least 1 or None, got 0"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a finite number above 0 or None, got 0.0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap must be a finite number above 0 or None, got nan"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap must be a finite number above 0 or None, got inf"),
        ({"scale": -1.0}, "scale must be a finite number above 0, got -1.0"),
    ],
)
def test_the_op_refuses_bad_options(options, message):
    case = make_case([(3, 1)], SHAPE)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.arrays, **{"scale": 1.0, **options})


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "fits"),
    [
        (jnp.bfloat16, 64, 71, True),
        (jnp.bfloat16, 256, 33, False),
        (jnp.float32, 64, 16, True),
        (jnp.float32, 64, 17, False),
    ],
)
def test_groups_that_fit_a_tile(dtype, head_dim, group, fits):
    q, pool = jax.ShapeDtypeStruct((1, group, head_dim), dtype), jax.ShapeDtypeStruct((4, 1, 16, head_dim), dtype)
    reason = why_not("pallas_triton", q, pool)
    assert (reason is None) == fits
    assert fits or "query heads share a KV head" in (reason or "")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [("9.0", None), ("8.0", None), ("12.0", None), ("7.5", "got 7.5"), ("gfx942", "got gfx942"), (None, "got tpu")],
)
def test_only_nvidia_gpus_since_ampere(monkeypatch, capability, reason):
    """Else the default falls back to plain JAX instead of failing."""
    device = (
        SimpleNamespace(platform="tpu")
        if capability is None
        else SimpleNamespace(platform="gpu", compute_capability=capability)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    answer = pallas_triton._why_not_here()
    assert (answer is None) if reason is None else reason in (answer or "")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "message"),
    [
        ((2, 5, 16), (4, 2, 8, 16), (4, 2, 8, 16), "H a multiple of K"),
        ((2, 4, 32), (4, 2, 8, 16), (4, 2, 8, 16), r"got \(2, 4, 32\) and \(4, 2, 8, 16\)"),
        ((2, 4, 16), (4, 2, 8, 16), (3, 2, 8, 16), "k_pool and v_pool must have one shape and dtype"),
        ((2, 4, 16), (4, 2, 8, 16), (4, 1, 8, 16), "k_pool and v_pool must have one shape and dtype"),
    ],
)
def test_shapes_that_do_not_belong_together(implementation, q_shape, k_shape, v_shape, message):
    """Without the shape checks of these tests, as users call it."""
    meta = make_case([(3, 1), (4, 1)], SHAPE).meta
    arrays = (jnp.ones(shape) for shape in (q_shape, k_shape, v_shape))
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(paged_attention)(*arrays, meta, scale=1.0, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_batches_and_wide_windows(implementation):
    case = make_case(ROWS[:3], SHAPE)
    q, k_pool, v_pool, meta = case.arrays
    out = paged_attention(q[:0], k_pool, v_pool, meta, scale=1.0, implementation=implementation)
    assert out.shape == (0, 6, 64)
    wide, none = (
        paged_attention(*case.arrays, scale=1.0, sliding_window=window, implementation=implementation)
        for window in (2**40, None)
    )
    np.testing.assert_array_equal(wide, none)


def test_float32_is_float32_on_a_gpu_too():
    """Case B77: without a precision a GPU multiplies in TF32."""
    case = make_case(ROWS, SHAPE)
    for name in IMPLEMENTATIONS:
        run = jax.jit(partial(paged_attention, scale=1.0, implementation=name))
        products = [line for line in run.lower(*case.arrays).as_text().splitlines() if "dot_general" in line]
        assert products
        assert all("HIGHEST" in line for line in products), name


X64 = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from pagedjax.pallas_kernels import reference
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention
from benchmarks.attention_shapes import Shape, make_case
case = make_case([(40, 1), (30, 9), (17, 17)], Shape(6, 2, 64, 5))
expected = reference.paged_attention(*case.arrays, scale=0.125)
for name in IMPLEMENTATIONS:
    out = jax.jit(partial(paged_attention, scale=np.float64(0.125), implementation=name))(*case.arrays)
    assert out.dtype == jnp.float32
    assert np.abs(out - expected).max() < 1e-5, name
"""


@pytest.mark.slow
def test_with_64_bit_types_switched_on():
    root = Path(__file__).parents[1]
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", X64], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
