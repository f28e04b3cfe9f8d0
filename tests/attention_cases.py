"""What the tests of paged attention share: how they call it, and what they compare it with."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks/ is in no package: it is found from the root
from benchmarks.attention_shapes import Case
from pagedjax.pallas_kernels import reference
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

# Largest error over largest output. f32: the same sums in another order; one ulp is 1.2e-7, and a softmax over some
# hundred keys rounds a few times ten of them. bf16: inputs are the same bf16 numbers, but weights and outputs are
# rounded to 8 bits (2**-8 = 4e-3 each). f16 rounds them to 11 bits, and is held to the same.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2, jnp.float16: 1e-2}

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
"""Compiler options for tests of hundreds of shapes: half the time of a compilation goes into LLVM's optimisations."""
if jax.__version_info__ < (0, 11):  # of XLA's two ways to make loops the one without MLIR; later there is but one
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = False


def attend(
    implementation: str | None,
    case: Case,
    max_query_len: int | None = None,
    compiler_options: dict[str, int] | None = None,
) -> np.ndarray:
    """The op under jit, as f32; skips what the Pallas kernels say they cannot do. The others have no excuse."""
    q, k_pool, v_pool, meta = case.arrays
    meta = AttentionMetadata(
        meta.slot_mapping,
        meta.block_tables,
        meta.context_lens,
        meta.query_start_loc,
        max_query_len or meta.max_query_len,
    )
    run = jax.jit(paged_attention, static_argnames=(*case.options, "implementation"), compiler_options=compiler_options)
    try:
        out = run(q, k_pool, v_pool, meta, **case.options, implementation=implementation)
    except NotImplementedError as error:
        if implementation != "pallas_triton":
            raise
        pytest.skip(str(error))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    return np.asarray(out, np.float32)


def attend_reference(case: Case, compiler_options: dict[str, int] | None = None) -> np.ndarray:
    run = jax.jit(reference.paged_attention, static_argnames=tuple(case.options), compiler_options=compiler_options)
    return np.asarray(run(*case.arrays, **case.options), np.float32)


def assert_close(actual: np.ndarray, expected: np.ndarray, case: Case, tolerance: float | None = None) -> None:
    """Within the tolerance relative to the largest output, and exactly zero where there is no token."""
    num_real = int(case.meta.query_start_loc[-1])
    assert np.isfinite(actual).all()
    assert not actual[num_real:].any()
    assert np.abs(expected[:num_real]).max() > 0.1  # there is something to compare
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= (tolerance or TOLERANCE[case.q.dtype.type])
