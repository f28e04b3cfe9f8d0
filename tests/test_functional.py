"""`functional.generate` samples what `LLM.generate` samples, token for token, however its rows are cut and padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import MODEL, prompt_of, tiny_params

from pagedjax import functional
from pagedjax.llm import LLM
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.sampling.params import SamplingParams

MAX_NEW_TOKENS = 9
TOLERANCE = 1e-3
"""Of logprobs, where logits are up to 100 and move by 6e-4 between batches: see `tiny_engine`."""
LENGTHS = (13, 1, 8, 4)  # partial last blocks, a single token, full blocks
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]
SEEDS = [3, 2**63 + 5, 0, 2**32]


def padded(prompts: list[list[int]], width: int | None = None, pad: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """[B, T] ids and [B] lengths."""
    width = max(map(len, prompts)) if width is None else width
    ids = np.array([prompt + [pad] * (width - len(prompt)) for prompt in prompts], np.int32)
    return ids, np.array([len(prompt) for prompt in prompts], np.int32)


def engine_outputs(
    prompts: list[list[int]],
    *,
    model: CausalLM = MODEL,
    params: Params | None = None,
    eos_ids: tuple[int, ...] = (),
    seeds: list[int] = SEEDS,
    **options: Any,
) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Tokens and logprobs of each sample of each prompt, from an LLM."""
    params = tiny_params() if params is None else params
    sizes: dict[str, Any] = {
        "block_size": 4,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "num_blocks": 160,
        "max_model_len": 64,
    }
    llm = LLM(model, params=params, tokenizer=None, warm_up=False, **sizes)
    sampling = [
        SamplingParams(
            seed=seed, max_tokens=MAX_NEW_TOKENS, logprobs=0, stop_token_ids=list(eos_ids), ignore_eos=True, **options
        )
        for seed in seeds[: len(prompts)]
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [[list(c.token_ids) for c in output.outputs] for output in outputs]
    logprobs = [
        [[entry[t].logprob for entry, t in zip(c.logprobs or [], c.token_ids, strict=True)] for c in output.outputs]
        for output in outputs
    ]
    return tokens, logprobs


def assert_same(rollout: functional.Rollout, expected: tuple[list, list], tolerance: float = TOLERANCE) -> None:
    tokens, logprobs = expected
    token_ids, lengths = np.asarray(rollout.token_ids), np.asarray(rollout.lengths)
    for row, samples in enumerate(tokens):
        for index, sample in enumerate(samples):
            length = lengths[row, index]
            assert token_ids[row, index, :length].tolist() == sample
            said = np.asarray(rollout.logprobs)[row, index]
            np.testing.assert_allclose(said[:length], logprobs[row][index], atol=tolerance, rtol=0)
            assert (said[length:] == 0).all()
            assert (token_ids[row, index, length:] == -1).all()


def rollout_of(prompts: list[list[int]], width: int | None = None, seeds: list[int] = SEEDS, **options: Any) -> Any:
    ids, lens = padded(prompts, width)
    keys = functional.request_keys(seeds[: len(prompts)])
    defaults = {"max_new_tokens": MAX_NEW_TOKENS, "pad_id": -1, "block_size": 4}
    return functional.generate(MODEL, tiny_params(), ids, lens, keys, **{**defaults, **options})


@pytest.mark.parametrize("num_samples", [1, 3, 8])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_it_samples_what_the_engine_samples(num_samples, block_size):
    expected = engine_outputs(PROMPTS, n=num_samples, temperature=30.0)
    rollout = rollout_of(PROMPTS, num_samples=num_samples, block_size=block_size, temperature=30.0, chunk_size=8)
    assert rollout.token_ids.shape == (4, num_samples, MAX_NEW_TOKENS)
    assert_same(rollout, expected)
    assert len({tuple(sample) for sample in expected[0][0]}) == num_samples, "samples that differ"


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.05}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9}],
    ids=str,
)
def test_the_filters_are_the_engines(options):
    options = {"temperature": 40.0, **options}
    assert_same(rollout_of(PROMPTS, num_samples=2, **options), engine_outputs(PROMPTS, n=2, **options))


def test_rows_end_with_an_eos_and_the_loop_with_the_last_row():
    free, _ = engine_outputs(PROMPTS, n=3, temperature=30.0)
    eos_ids = (free[0][0][0], free[1][2][4])  # the very first token of a sample, and one in its middle
    expected = engine_outputs(PROMPTS, n=3, temperature=30.0, eos_ids=eos_ids)
    rollout = rollout_of(PROMPTS, num_samples=3, temperature=30.0, eos_ids=eos_ids)
    assert_same(rollout, expected)
    lengths = np.asarray(rollout.lengths)
    assert lengths[0, 0] == 1
    assert lengths.max() == MAX_NEW_TOKENS
    ends = [[sample[-1] in eos_ids for sample in samples] for samples in expected[0]]
    assert np.asarray(rollout.is_finished).tolist() == ends
    assert np.asarray(rollout.mask).sum(axis=-1).tolist() == lengths.tolist()


def test_padding_and_chunks_change_nothing():
    options = {"num_samples": 2, "temperature": 30.0}
    expected = rollout_of(PROMPTS, **options)
    for width, chunk_size in ((13, 5), (29, 7), (29, 512)):
        got = rollout_of(PROMPTS, width, chunk_size=chunk_size, **options)
        assert np.array_equal(got.token_ids, expected.token_ids)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)


def test_greedy_is_the_naive_loop():
    def naive(prompt: list[int]) -> list[int]:
        token_ids = list(prompt)
        for _ in range(4):
            logits: Any = MODEL.apply({"params": tiny_params()}, jnp.array([token_ids], jnp.int32))
            token_ids.append(int(logits[0, -1].argmax()))
        return token_ids[len(prompt) :]

    rollout = rollout_of(PROMPTS, max_new_tokens=4, temperature=0.0)
    assert np.asarray(rollout.token_ids)[:, 0].tolist() == [naive(prompt) for prompt in PROMPTS]


def test_one_program_serves_all_lengths():
    num_traces = 0

    @jax.jit
    def run(ids, lens, key, temperature):
        nonlocal num_traces
        num_traces += 1
        return functional.generate(
            MODEL, tiny_params(), ids, lens, key, max_new_tokens=3, num_samples=2, temperature=temperature
        ).token_ids

    ids, lens = padded(PROMPTS)
    key = jax.random.key(0)
    for lengths in (lens, lens[::-1].copy(), np.ones_like(lens)):
        plain = functional.generate(MODEL, tiny_params(), ids, lengths, key, max_new_tokens=3, num_samples=2)
        assert np.array_equal(run(ids, lengths, key, 1.0), plain.token_ids)
    assert num_traces == 1


def test_a_prompt_without_lengths_is_all_real():
    prompts = [prompt_of(8, seed=1), prompt_of(8, seed=2)]
    ids, lens = padded(prompts)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_samples": 3, "block_size": 3, "temperature": 30.0}
    key = jax.random.key(5)
    known = functional.generate(MODEL, tiny_params(), ids, None, key, **options)
    given = functional.generate(MODEL, tiny_params(), ids, lens, key, **options)
    assert np.array_equal(known.token_ids, given.token_ids)


def test_a_key_is_split_by_rows():
    ids, lens = padded(PROMPTS)
    key = jax.random.key(7)
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(4))
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 30.0}
    one, many, old = (
        functional.generate(MODEL, tiny_params(), ids, lens, k, **options).token_ids
        for k in (key, rows, jax.random.PRNGKey(7))
    )
    assert np.array_equal(one, many)
    assert np.array_equal(one, old)
    other = functional.generate(MODEL, tiny_params(), ids, lens, jax.random.key(8), **options).token_ids
    assert not np.array_equal(one, other)


def test_each_prompt_may_have_its_own_options():
    temperature = np.array([0.0, 30.0, 60.0, 30.0], np.float32)
    mixed = rollout_of(PROMPTS, temperature=temperature, num_samples=2)
    for value in (0.0, 30.0, 60.0):
        alone = rollout_of(PROMPTS, temperature=value, num_samples=2)
        rows = np.flatnonzero(temperature == value)
        assert np.array_equal(np.asarray(mixed.token_ids)[rows], np.asarray(alone.token_ids)[rows])


def test_a_processor_sees_what_was_said():
    def no_repeats(logits, generated):
        rows = jnp.arange(len(logits))[:, None]
        steps = jnp.arange(generated.token_ids.shape[1])[None, :]
        said = jnp.where(steps < generated.num_tokens[:, None], generated.token_ids, logits.shape[1])
        return logits.at[rows, said].set(-jnp.inf, mode="drop")

    free = rollout_of([[5] * 6], max_new_tokens=30, temperature=0.0)
    bound = rollout_of([[5] * 6], max_new_tokens=30, temperature=0.0, logits_processors=[no_repeats])
    assert len(set(np.asarray(free.token_ids)[0, 0].tolist())) < 30, "the test needs a model that repeats itself"
    assert len(set(np.asarray(bound.token_ids)[0, 0].tolist())) == 30
