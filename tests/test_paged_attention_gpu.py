"""Paged attention on an NVIDIA GPU: every implementation against the reference, sizes of real models, contexts of 8k.

The check itself runs on the CPU too, with contexts 1/64 as long, so that it cannot rot.
"""

import functools
import itertools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attend, attend_reference

from benchmarks.attention_shapes import MODELS, Case, Row, Shape, make_case
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS
from pagedjax.pallas_kernels.metadata import AttentionMetadata

# Largest error over largest output, of each request by itself: a long context averages much, so its outputs are small
# and hide behind those of a short one. f32: the GPU's exp2 and tanh are off by 2 ulp, and a score of 20 has an ulp of
# 2e-6. bf16 and f16: weights and outputs are rounded to 8 bits (2**-8 = 4e-3 each) or more.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 1e-2}
LONGEST = 8192


def decodes(longest: int) -> list[Row]:
    near = {longest // 2 - 1, longest // 2, longest // 2 + 1, longest - 1, longest}
    return [(context, 1) for context in sorted({1, 15, 16, 17, longest // 8 + 5} | near)]


def one_decode(longest: int) -> list[Row]:
    return [(longest, 1)]


def drafts(longest: int) -> list[Row]:
    return [(longest, 8), (33, 2), (longest // 2 + 3, 5), (9, 0), (8, 8)]


def mixed(longest: int) -> list[Row]:
    """Decodes between whole prompts and chunks."""
    chunk = longest // 16
    return [(longest // 2, 1), (2 * chunk - 3, 2 * chunk - 3), (longest, chunk), (17, 1), (longest // 2 + 7, chunk - 1)]


BATCHES = [decodes, one_decode, drafts, mixed]


def check(implementation: str | None, rows: list[Row], shape: Shape, dtype: jax.typing.DTypeLike) -> None:
    """Every request within the tolerance, and zeros for padding. Slots that no token sees hold NaN."""
    case, expected = case_and_expected(tuple(rows), shape, dtype)
    # Case B77: a GPU multiplies f32 as TF32, with 11 bits, unless it is told not to.
    with jax.default_matmul_precision("highest"):
        actual = attend(implementation, case)
    assert np.isfinite(actual).all()
    assert not actual[len(expected) :].any()
    for row, (start, end) in enumerate(itertools.pairwise(case.meta.query_start_loc[: len(rows) + 1])):
        if start < end:
            largest = np.abs(expected[start:end]).max()
            assert largest > 0.01  # an average over 8192 values is about as large
            assert np.abs(actual[start:end] - expected[start:end]).max() <= TOLERANCE[dtype] * largest, rows[row]


@functools.lru_cache(maxsize=1)
def case_and_expected(rows: tuple[Row, ...], shape: Shape, dtype: jax.typing.DTypeLike) -> tuple[Case, np.ndarray]:
    """With padding, and without; kept for the next implementation, since 8k contexts of many heads take seconds."""
    case = make_case(rows, shape, dtype=dtype, num_tokens=sum(new for _, new in rows) + 3, num_rows=len(rows) + 1)
    expected = np.concatenate([attend_reference(part)[: part.meta.query_start_loc[-1]] for part in parts(case)])
    return case, expected


def parts(case: Case, num_tokens: int = 8) -> Iterator[Case]:
    """The same attention, a few tokens of one request at a time: the reference gathers a context for each token."""
    meta = case.meta
    for row, context in enumerate(meta.context_lens):
        row_start, row_end = map(int, meta.query_start_loc[row : row + 2])
        for start in range(row_start, row_end, num_tokens):
            end = min(start + num_tokens, row_end)
            part = AttentionMetadata(
                slot_mapping=np.zeros(num_tokens, np.int32),
                block_tables=meta.block_tables[row : row + 1],
                context_lens=np.array([context - (row_end - end)], np.int32),
                query_start_loc=np.array([0, end - start], np.int32),
                max_query_len=num_tokens,
            )
            # as many queries each time, or every size is a program of its own
            token = np.minimum(np.arange(start, start + num_tokens), len(case.q) - 1)
            yield case._replace(q=case.q[token], meta=part)


def sizes() -> list:
    """Every model in bf16, which they are served in; the other dtypes for the smallest and for the one with options."""
    others = itertools.product(["smollm2 135m", "gemma 2 2b"], [jnp.float32, jnp.float16])
    every = [*((model, jnp.bfloat16) for model in MODELS), *others]
    return [pytest.param(model, dtype, id=f"{model}-{dtype.__name__}") for model, dtype in every]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])  # varies fastest
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("model", "dtype"), sizes())
def test_equals_the_reference_on_a_gpu(implementation, model, dtype, batch):
    check(implementation, batch(LONGEST), MODELS[model], dtype)


def small(model: str) -> Shape:
    """As many query heads per KV head, but one KV head, and a window that goes with contexts of 1/64."""
    shape = MODELS[model]
    window = shape.sliding_window and shape.sliding_window // 64
    return shape._replace(num_heads=shape.num_heads // shape.num_kv_heads, num_kv_heads=1, sliding_window=window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("model", "batch", "dtype"),
    [
        ("smollm2 135m", decodes, jnp.float32),
        ("llama 3.2 1b", one_decode, jnp.bfloat16),
        ("mistral 7b", drafts, jnp.float16),
        ("gemma 2 2b", mixed, jnp.float32),
    ],
)
def test_the_check_itself(implementation, model, batch, dtype):
    check(implementation, batch(LONGEST // 64), small(model), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_check_misses_no_key(monkeypatch, dtype):
    """One key too few in the longest context makes it fail, between requests that are right."""

    real = attend

    def attend_to_fewer(implementation: str | None, case: Case) -> np.ndarray:
        return real(implementation, case._replace(sliding_window=LONGEST // 64 - 1))

    monkeypatch.setattr(sys.modules[__name__], "attend", attend_to_fewer)
    with pytest.raises(AssertionError, match=rf"\({LONGEST // 64}, 1\)"):
        check("xla", decodes(LONGEST // 64), small("llama 3.2 1b"), dtype)
