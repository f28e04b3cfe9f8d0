"""Log-probabilities against numpy in f64: values, ranks, the most likely tokens, and ties among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.sampling.logprobs import TokenLogprobs, token_logprobs

jit_logprobs = jax.jit(token_logprobs, static_argnums=2)


def check(logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> TokenLogprobs:
    """Compares with a plain computation in f64; ids and ranks exactly."""
    out = jax.tree.map(np.asarray, jit_logprobs(logits, token_ids.astype(np.int32), num_top))
    rows = np.arange(len(logits))
    peak = logits.max(axis=-1, keepdims=True)
    shifted = logits.astype(np.float64) - peak
    expected = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :num_top]
    assert (out.top_ids.dtype, out.rank.dtype, out.logprob.dtype) == (np.int32, np.int32, np.float32)
    assert np.array_equal(out.top_ids, order)
    assert np.array_equal(out.rank, 1 + (logits > logits[rows, token_ids][:, None]).sum(axis=-1))
    # f32: a sum over the vocabulary, and differences of the size of the logits' range.
    atol = 1e-5
    np.testing.assert_allclose(out.logprob, expected[rows, token_ids], rtol=1e-6, atol=atol)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, 1), rtol=1e-6, atol=atol)
    return out


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 64, 255, 4999, 5000])
def test_b32_every_count_up_to_the_vocabulary(num_top):
    rng = np.random.default_rng(num_top)
    logits = rng.normal(0, 4, (3, 5000)).astype(np.float32)
    out = check(logits, rng.integers(0, 5000, 3), num_top)
    assert out.top_ids.shape == out.top_logprobs.shape == (3, num_top)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 7, 256, 257, 2000, 9000]),
    num_top=st.sampled_from([0, 1, 3, 8]),
    kind=st.sampled_from(["normal", "coarse", "equal", "masked", "falling"]),
)
def test_ids_ranks_and_values(seed, vocab_size, num_top, kind):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.uniform(0.1, 20), (4, vocab_size)).astype(np.float32)
    if kind == "coarse":
        logits = rng.integers(-2, 3, logits.shape).astype(np.float32)
    elif kind == "equal":
        logits[:] = rng.normal()
    elif kind == "masked":
        logits[:, rng.random(vocab_size) < 0.99] = -np.inf
        logits[:, rng.integers(vocab_size)] = 1
    elif kind == "falling":  # all of the most likely tokens in one group
        logits = -np.sort(logits, axis=-1)
    check(logits, rng.integers(0, vocab_size, 4), min(num_top, vocab_size))


def test_b32_values_do_not_depend_on_how_many_are_wanted():
    logits = np.random.default_rng(0).normal(0, 3, (2, 6000)).astype(np.float32)
    token_ids = np.array([5, 5999], np.int32)
    wide = jit_logprobs(logits, token_ids, 6000)
    for num_top in (0, 1, 5, 20):
        out = jit_logprobs(logits, token_ids, num_top)
        assert np.array_equal(out.top_ids, wide.top_ids[:, :num_top])
        # Two programs may round the sum over the vocabulary differently.
        np.testing.assert_allclose(out.top_logprobs, wide.top_logprobs[:, :num_top], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(out.logprob, wide.logprob, rtol=1e-6, atol=1e-6)


def test_one_row_and_large_logits():
    for shift in (0.0, 1e4, -1e4):
        logits = np.random.default_rng(1).normal(0, 3, (1, 300)).astype(np.float32) + np.float32(shift)
        check(logits, np.array([17]), 4)


def test_the_chosen_token_may_be_impossible():
    logits = np.array([[1.0, -np.inf, 2.0, -np.inf]], np.float32)
    out = jit_logprobs(logits, jnp.array([3], jnp.int32), 4)
    assert (float(out.logprob[0]), int(out.rank[0])) == (-np.inf, 3)
    assert out.top_ids[0].tolist() == [2, 0, 1, 3]
    assert out.top_logprobs[0, 2:].tolist() == [-np.inf, -np.inf]


def test_b79_other_rows_change_no_bit():
    mine = np.random.default_rng(1).normal(0, 3, 3000).astype(np.float32)
    results = set()
    for place in range(7):
        logits = np.random.default_rng(place).normal(0, 9, (7, 3000)).astype(np.float32)
        logits[place] = mine
        out = jit_logprobs(logits, np.full(7, 12, np.int32), 3)
        results.add(b"".join(np.asarray(leaf)[place].tobytes() for leaf in jax.tree.leaves(out)))
    assert len(results) == 1
