"""The sampler against exact distributions and a plain sort; and random streams: a row never feels its neighbours."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_cases import candidates, distribution, kept_by_sorting, normal_logits, sampling_input
from scipy.stats import chisquare
from tiny_engine import greedy, prompt_of, reference, run_all, tiny_engine, unchecked

from pagedjax.model_input import SamplingInput
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.sampler import sample

OPTIMISED = {"xla_backend_optimization_level": 3}
"""Compiler options for millions of logits: without LLVM's optimisations they take longer than to compile with them."""
jit_sample = jax.jit(sample)
jit_sample_many = jax.jit(sample, compiler_options=OPTIMISED)
UncheckedParams = unchecked("pagedjax.sampling.params").SamplingParams

PROBS = np.array([0.5, 0.3, 0.15, 0.05])


def draw(logits: np.ndarray, num_draws: int, **columns: Any) -> np.ndarray:
    """`num_draws` tokens from one row of logits, in batches of 4,096 rows."""
    batch = 4096
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (batch, len(logits)))
    drawn = [
        jit_sample_many(rows, sampling_input(batch, num_outputs=np.arange(start, start + batch), **columns))
        for start in range(0, num_draws, batch)
    ]
    return np.concatenate(drawn)[:num_draws]


# Greedy.


@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 1000])
def test_greedy_is_the_first_largest(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, (16, vocab_size)).astype(np.float32)
    logits[4:8] = rng.integers(-2, 3, (4, vocab_size))  # many ties
    logits[8:12] -= 1e6  # below the fill of the last group, if that were 0
    logits[12] = 0
    logits[13, -1] = logits[14, 0] = 50
    logits[15] = -np.inf
    logits[15, vocab_size // 2] = -1e30
    tokens = np.asarray(jit_sample(jnp.asarray(logits), sampling_input(16, temperature=0.0)))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == logits.argmax(axis=-1).tolist()


def test_greedy_rows_beside_random_ones():
    logits = normal_logits(300 * 8).reshape(8, 300)
    temperature = np.array([0, 1, 0, 5, 0, 0, 1, 0])
    tokens = np.stack(
        [
            jit_sample(jnp.asarray(logits), sampling_input(8, temperature=temperature, top_k=top_k, num_outputs=k))
            for k in range(20)
            for top_k in (0, 5)
        ]
    )
    is_greedy = (tokens == logits.argmax(axis=-1)).all(axis=0)
    assert is_greedy.tolist() == (temperature == 0).tolist()


# B24: top_p.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("top_p", [0, 1e-45, 1e-8, 1e-4, 1e-3])
def test_b24_a_tiny_top_p_is_the_argmax(top_p, dtype):
    logits = np.array(jnp.asarray(normal_logits(4096), dtype), np.float32)
    assert (logits == logits.max()).sum() == 1
    assert np.exp(logits - logits.max()).sum() < 1 / 1e-3, "the largest has more than top_p"
    kept = candidates(logits[None], top_p=top_p)
    assert np.flatnonzero(kept[0]).tolist() == [logits.argmax()]
    assert set(draw(logits, 4096, top_p=top_p).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.3, 1), (0.6, 2), (0.85, 3), (0.97, 4), (1.0, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_b24_the_token_that_crosses_is_kept(top_p, num_kept, order):
    logits = np.log(PROBS)[order].astype(np.float32)
    kept = candidates(logits[None], top_p=top_p)[0]
    assert kept.tolist() == [rank < num_kept for rank in order]
    tokens = draw(logits, 4096, top_p=top_p)
    assert set(tokens.tolist()) == set(np.flatnonzero(kept).tolist())


def test_b24_top_p_of_1_removes_nothing():
    logits = normal_logits(2 * 50_257, scale=8.0).reshape(2, -1)  # some weights vanish beside the sum
    assert np.exp(logits - logits.max()).min() < 1e-20
    assert candidates(logits, top_p=np.array([1.0, 0.5]))[0].all()
    assert not candidates(logits, top_p=np.array([1.0, 0.5]))[1].all()
    assert candidates(logits, top_p=np.array([1.0, 0.5]), top_k=50_257)[0].all()


def test_b24_top_p_acts_on_what_top_k_left():
    # Of the two best, the first alone has 0.5 / 0.8 = 0.625.
    logits = np.log(PROBS).astype(np.float32)[None]
    assert candidates(logits, top_k=2, top_p=0.6)[0].tolist() == [True, False, False, False]
    assert candidates(logits, top_k=2, top_p=0.65)[0].tolist() == [True, True, False, False]
    assert candidates(logits, top_k=2, top_p=0.99)[0].tolist() == [True, True, False, False]


def test_b24_top_p_acts_after_the_temperature():
    logits = np.log(PROBS).astype(np.float32)[None]
    assert candidates(logits, top_p=0.6)[0].sum() == 2
    assert candidates(logits, top_p=0.6, temperature=0.5)[0].sum() == 1  # squares: 0.68
    assert candidates(logits, top_p=0.6, temperature=100.0)[0].sum() == 3  # nearly uniform


# Candidate sets and distributions.


@given(
    seed=st.integers(0, 2**32 - 1),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 50, 299, 300, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.999]) | st.floats(0, 1, width=32),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(2**-13, 1, width=32),
)
def test_candidates_are_those_of_a_plain_sort(seed, is_coarse, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-4, 5, 300) if is_coarse else rng.normal(0, rng.uniform(0.1, 8), 300)).astype(np.float32)
    expected, margin = kept_by_sorting(logits, temperature, top_k, top_p, min_p)
    assume(margin > 1e-5)
    other = normal_logits(300, seed + 1)
    for row in range(2):  # beside another row, on either side
        rows = np.stack([logits, other] if row == 0 else [other, logits])
        columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        mixed = {name: np.array([value, 1] if row == 0 else [1, value]) for name, value in columns.items()}
        assert np.array_equal(candidates(rows, **mixed)[row], expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.sampled_from([1, 3, 8, 11, 24]),
    kind=st.sampled_from(["normal", "bfloat16", "uniform", "tied", "masked", "peaked"]),
)
def test_candidates_of_batches_of_all_kinds(seed, num_rows, kind):
    """Tiles of rows, the last of them filled up; logits with ties, without any, and with -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (num_rows, 700)).astype(np.float32)
    if kind == "bfloat16":
        logits = np.array(jnp.asarray(logits, jnp.bfloat16), np.float32)
    elif kind == "uniform":
        logits = rng.uniform(-1e-3, 1e-3, logits.shape).astype(np.float32)
    elif kind == "tied":
        logits[:] = rng.choice([-7.5, 1.0], (num_rows, 1))
    elif kind == "masked":
        logits[:, rng.random(700) < 0.97] = -np.inf
    elif kind == "peaked":
        logits[:, 300] += 200
    columns = {
        "temperature": rng.choice([0.3, 1.0, 2.0], num_rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 40, 2000], num_rows),
        "top_p": rng.choice([0.2, 0.71, 0.97, 1.0], num_rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.013, 0.31], num_rows).astype(np.float32),
    }
    kept = candidates(logits, **columns)
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float64))
    for row in range(num_rows):
        options: dict[str, Any] = {name: float(column[row]) for name, column in columns.items()}
        expected, margin = kept_by_sorting(logits[row], **options | {"top_k": int(columns["top_k"][row])})
        if margin > 1e-5:
            is_possible = weights[row] > 0
            assert np.array_equal(kept[row] & is_possible, expected & is_possible), (row, options)


def test_the_last_ulp_of_a_logit_counts():
    """Neighbouring floats, of either sign and around 0: the bisection has to go through all bits."""
    for base in (-3.0, -1e-30, 1e-30, 0.5, 3.0):
        low = np.float32(base)
        logits = np.full((1, 300), low)
        logits[0, [7, 290]] = np.nextafter(low, np.float32(np.inf))
        logits[0, 100] = np.nextafter(logits[0, 7], np.float32(np.inf))
        assert np.flatnonzero(candidates(logits, top_k=1)[0]).tolist() == [100]
        assert np.flatnonzero(candidates(logits, top_k=2)[0]).tolist() == [7, 100, 290]
        assert candidates(logits, top_k=4)[0].all()
        assert np.flatnonzero(candidates(logits, top_p=0.002)[0]).tolist() == [100]
        assert np.flatnonzero(candidates(logits, top_p=0.009)[0]).tolist() == [7, 100, 290]
        assert candidates(logits, top_p=0.02)[0].all()


# min_p.


@pytest.mark.parametrize(("min_p", "num_kept"), [(0.0, 4), (0.05, 4), (0.2, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_min_p_keeps_a_share_of_the_largest(min_p, num_kept, order):
    logits = np.log(PROBS)[order].astype(np.float32)
    kept = candidates(logits[None], min_p=min_p)[0]
    assert kept.tolist() == [rank < num_kept for rank in order]
    assert set(draw(logits, 4096, min_p=min_p).tolist()) == set(np.flatnonzero(kept).tolist())


def test_min_p_acts_after_the_temperature_and_beside_the_other_filters():
    logits = np.log(PROBS).astype(np.float32)[None]
    assert candidates(logits, min_p=0.5)[0].sum() == 2
    assert candidates(logits, min_p=0.5, temperature=0.5)[0].sum() == 1  # squares: 0.36
    assert candidates(logits, min_p=0.5, temperature=100.0)[0].sum() == 4
    assert candidates(logits, min_p=0.2, top_k=2)[0].sum() == 2
    assert candidates(logits, min_p=0.2, top_p=0.6)[0].sum() == 2
    assert candidates(logits, min_p=0.5, top_p=0.97, top_k=3)[0].sum() == 2


def test_min_p_of_1_keeps_what_ties_with_the_largest():
    logits = np.array([[0, 5, 2, 5]], np.float32)
    assert candidates(logits, min_p=1.0)[0].tolist() == [False, True, False, True]
    assert set(draw(logits[0], 200, min_p=1.0).tolist()) == {1, 3}


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-square statistic; tokens that are too rare for it are one class together, or with the likeliest."""
    assert not counts[expected == 0].any(), "drawn from outside the candidates"
    wanted = expected * counts.sum()
    is_rare = wanted < 10
    observed, wanted, rest = counts[~is_rare], wanted[~is_rare], (counts[is_rare].sum(), wanted[is_rare].sum())
    if rest[1] >= 10:
        observed, wanted = np.append(observed, rest[0]), np.append(wanted, rest[1])
    else:
        observed[wanted.argmax()] += rest[0]
        wanted[wanted.argmax()] += rest[1]
    return chisquare(observed, wanted).pvalue


@partial(jax.jit, static_argnums=2, compiler_options=OPTIMISED)
def count_draws(logits: jax.Array, options: SamplingInput, num_batches: int) -> jax.Array:
    """How often each token comes in `num_batches` x 4,096 draws; `options` are those of a batch."""
    rows = jnp.broadcast_to(logits, (4096, len(logits)))

    def tokens_of(batch: jax.Array) -> jax.Array:
        return sample(rows, replace(options, num_outputs=options.num_outputs + 4096 * batch))

    tokens = jax.lax.map(tokens_of, jnp.arange(num_batches, dtype=jnp.uint32))
    return jnp.bincount(tokens.reshape(-1), length=len(logits))


@pytest.mark.parametrize(
    ("vocab_size", "options"),
    [
        (50, {}),
        (50, {"temperature": 0.5}),
        (50, {"temperature": 2.0}),
        (50, {"top_k": 7}),
        (50, {"top_p": 0.8}),
        (50, {"min_p": 0.1}),
        (50, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}),
        (50, {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.05}),
        (4, {}),
        (300, {}),
        (300, {"temperature": 1.5, "top_k": 40, "top_p": 0.7}),
        (1000, {"temperature": 1.5, "min_p": 0.02, "top_p": 0.95}),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(vocab_size, options):
    """204,800 draws; from two levels where there is more than one group of 256."""
    logits = normal_logits(vocab_size, seed=4, scale=1.5)
    counts = np.asarray(count_draws(jnp.asarray(logits), sampling_input(4096, seed=11, **options), 50))
    assert counts.sum() == 204_800
    assert (counts > 0).sum() > 3, "hardly any candidates"
    assert p_value(counts.copy(), distribution(logits, **options)) > 1e-3


def test_the_statistic_sees_a_temperature_that_is_off():
    logits = normal_logits(300, seed=3, scale=2.0)
    counts = np.bincount(draw(logits, 20_480, seed=11, temperature=1.06), minlength=300)
    assert p_value(counts, distribution(logits)) < 1e-6


def test_draws_of_one_request_are_independent_of_each_other():
    """Streams of 64 seeds, pairs of neighbours in a stream: their joint distribution is the product."""
    logits = np.log(PROBS)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (4096, 4))
    seeds, numbers = np.divmod(np.arange(4096), 64)
    tokens = np.asarray(jit_sample_many(rows, sampling_input(4096, seed=seeds, num_outputs=numbers))).reshape(64, 64)
    for first, second in ((tokens[:, :-1], tokens[:, 1:]), (tokens[:-1], tokens[1:])):
        counts = np.bincount((first * 4 + second).ravel(), minlength=16)
        assert chisquare(counts, np.outer(PROBS, PROBS).ravel() * counts.sum()).pvalue > 1e-3


def test_nothing_without_weight_is_ever_drawn():
    """Groups of nothing, before, between and behind those that have something."""
    logits = np.full(1500, -np.inf, np.float32)
    allowed = [256, 511, 700, 1279]
    logits[allowed] = np.log(PROBS)
    assert set(draw(logits, 8192).tolist()) == set(allowed)
    assert set(draw(logits, 8192, top_k=3).tolist()) == set(allowed[:3])
    assert set(draw(logits, 8192, top_k=1000, top_p=0.6).tolist()) == set(allowed[:2])
    far = normal_logits(1500) - 200  # exp(-200) is 0 in f32
    far[allowed] = np.log(PROBS)
    assert set(draw(far, 8192).tolist()) == set(allowed)


# B26: temperatures.


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-45, 1e-40, 1.1e-38, 1.2e-38, 1e-30, 1e-6, 1e-5, 1e-4])
def test_b26_a_tiny_temperature_is_greedy(temperature):
    params = SamplingParams(temperature=float(temperature))
    logits = np.stack([np.array(jnp.asarray(normal_logits(300, seed), jnp.bfloat16), np.float32) for seed in range(8)])
    logits += (logits == logits.max(axis=-1, keepdims=True)) * np.float32(0.01)  # no ties, and gaps of 0.01
    column = np.where(np.arange(8) % 2, 1.0, params.temperature)  # beside rows of temperature 1
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (5, 0.9, 0.02)):
        sampling = sampling_input(8, temperature=column, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens = np.asarray(jit_sample(jnp.asarray(logits), sampling))
        assert tokens[::2].tolist() == logits.argmax(axis=-1)[::2].tolist()
        assert (tokens[1::2] != logits.argmax(axis=-1)[1::2]).any()


@pytest.mark.parametrize("temperature", [1e6, 1e30, 3.4e38])
def test_b26_a_huge_temperature_is_uniform(temperature):
    logits = normal_logits(300, scale=5.0)
    SamplingParams(temperature=temperature)
    counts = np.bincount(draw(logits, 20_480, temperature=temperature), minlength=300)
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [math.inf, -math.inf, math.nan, -1, -1e-9, "0.7", True, None, 1e39, [1.0]])
def test_b26_what_is_no_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature must be a (finite )?number"):
        UncheckedParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [0, 1, 0.7, np.float32(0.7), np.float64(2), 5e-324])
def test_b26_what_is_one_is_taken(temperature):
    assert UncheckedParams(temperature=temperature).temperature == temperature


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str
)
def test_b26_mixed_temperatures_in_one_batch(options):
    """Each row of a batch with everything in it draws what it draws alone."""
    logits = normal_logits(300 * 8, scale=3.0).reshape(8, 300)
    temperatures = [0.0, 1e-40, 1e-5, 0.7, 1.0, 3.0, 1e30, 3.4e38]
    together = jit_sample(jnp.asarray(logits), sampling_input(8, temperature=temperatures, seed=5, **options))
    for row in range(8):
        columns = {"temperature": temperatures[row], "seed": 5, "num_outputs": row, **options}
        alone = jit_sample(jnp.asarray(logits[row : row + 1]), sampling_input(1, **columns))
        assert alone.tolist() == [together[row]]


# B28: seeded streams.


STUB_LOGITS = normal_logits(16 * 300, seed=9).reshape(16, 300)
"""The logits of step t, whatever the tokens before were."""


def stream(num_rows: int, row: int, neighbours: dict[str, Any] | None = None) -> list[int]:
    """16 tokens of the request of seed 42 in row `row`; `neighbours` are the other rows' columns."""
    columns = {"temperature": 1.0, "seed": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "sample_index": 0}
    columns |= neighbours or {}
    tokens = []
    for step in range(16):
        logits = normal_logits(num_rows * 300, seed=100 * num_rows + row + step).reshape(num_rows, 300)
        logits[row] = STUB_LOGITS[step]
        mine = {"temperature": 1.0, "seed": 42, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "sample_index": 0}
        mine["num_outputs"] = step
        mixed = {}
        for name, value in {**columns, "num_outputs": 3 * step + 1}.items():
            mixed[name] = np.array([mine[name] if i == row else value for i in range(num_rows)])
        tokens.append(int(jit_sample(jnp.asarray(logits), sampling_input(num_rows, **mixed))[row]))
    return tokens


def test_b28_a_seeded_row_does_not_feel_its_neighbours():
    alone = stream(1, 0)
    assert len(set(alone)) > 8
    assert alone != STUB_LOGITS.argmax(axis=-1).tolist()
    for num_rows, row in ((2, 0), (2, 1), (4, 0), (4, 3), (8, 0), (8, 3), (8, 7)):
        for neighbours in (
            {"seed": 42},
            {"seed": 2**63 + 5, "sample_index": 2},
            {"temperature": 0.0},
            {"temperature": 5.0, "top_k": 3},
            {"top_p": 0.5, "seed": 7},
            {"min_p": 0.5, "top_k": 5},
        ):
            assert stream(num_rows, row, neighbours) == alone


ENGINE_PARAMS = SamplingParams(temperature=20.0, seed=42, max_tokens=16, ignore_eos=True)
"""The tiny model's logits have a standard deviation of 24."""


def test_b28_a_seeded_request_in_the_engine():
    prompt = prompt_of(10)
    expected = reference(prompt, ENGINE_PARAMS)
    assert expected != reference(prompt, greedy(16))
    assert len(set(expected)) > 8

    def run(num_blocks: int = 64, position: int = 0, others: Any = (), **options: Any) -> int:
        """Checks the request's tokens; the number of times that it was preempted."""
        engine = tiny_engine(num_blocks, **options)
        for i, params in enumerate(others):
            if i == position:
                engine.add_request(prompt, ENGINE_PARAMS, "x")
            engine.add_request(prompt_of(5 + 3 * i, i), params)
        if position >= len(others):
            engine.add_request(prompt, ENGINE_PARAMS, "x")
        (request,) = engine.scheduler.waiting["x"].requests
        assert run_all(engine)["x"].outputs[0].token_ids == expected
        return request.num_preemptions

    unseeded = SamplingParams(temperature=20.0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=9.0, max_tokens=20, seed=42, top_k=9, ignore_eos=True)
    assert run() == 0
    for others in ([unseeded] * 3, [seeded] * 3, [greedy(9)] * 3, [unseeded, seeded, greedy(5), seeded, unseeded]):
        for position in (0, 3):
            assert run(position=position, others=others) == 0
    assert run(max_num_batched_tokens=3) == 0  # chunks
    assert run(max_num_batched_tokens=4, position=1, others=[unseeded]) == 0
    assert run(12, position=2, others=[greedy(30), greedy(30)]) >= 1
    assert run(12, position=2, others=[greedy(30), greedy(30)], max_num_batched_tokens=3) >= 1


def test_b28_unseeded_requests_differ():
    engine = tiny_engine()
    for i in range(2):
        engine.add_request(prompt_of(10), SamplingParams(temperature=20.0, ignore_eos=True), str(i))
    finished = run_all(engine)
    assert finished["0"].outputs[0].token_ids != finished["1"].outputs[0].token_ids


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_b79_what_neighbours_hold_changes_no_bit_and_neither_does_the_place(options):
    """The same shapes: a row in every place of a batch of 11, beside neighbours that want something else each time."""
    mine = normal_logits(700, seed=1, scale=3.0)
    fixed = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "num_outputs": 3, **options}
    kept, tokens = [], []
    for place in range(11):
        rng = np.random.default_rng(place)
        columns = {
            "temperature": rng.choice([0.0, 0.5, 2.0], 11),
            "top_k": rng.choice([0, 1, 300], 11),
            "top_p": rng.choice([0.0, 0.5, 1.0], 11),
            "min_p": rng.choice([0.0, 0.5], 11),
            "seed": rng.integers(0, 9, 11),
            "num_outputs": rng.integers(0, 9, 11),
        }
        for name, value in fixed.items():
            columns[name][place] = value
        logits = rng.normal(0, 5, (11, 700)).astype(np.float32)
        logits[place] = mine
        kept.append(candidates(logits, **columns)[place])
        tokens.append(int(jit_sample(jnp.asarray(logits), sampling_input(11, **columns))[place]))
    assert len(set(tokens)) == 1
    assert (np.stack(kept) == kept[0]).all()


# B29: seeds and n.


def test_b29_completions_differ_and_come_back():
    params = SamplingParams(temperature=20.0, seed=1, n=4, max_tokens=8, ignore_eos=True)
    runs = []
    for neighbours in (0, 3):
        engine = tiny_engine()
        for i in range(neighbours):
            engine.add_request(prompt_of(4, i), greedy(10))
        engine.add_request(prompt_of(10), params, "x")
        runs.append([completion.token_ids for completion in run_all(engine)["x"].outputs])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 4
    alone = SamplingParams(temperature=20.0, seed=1, max_tokens=8, ignore_eos=True)
    assert runs[0][0] == reference(prompt_of(10), alone)


def test_b29_all_64_bits_of_a_seed_count():
    seeds = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**33 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    streams = set()
    for seed in seeds:
        params = SamplingParams(temperature=20.0, seed=seed, max_tokens=8, ignore_eos=True)
        streams.add(tuple(reference(prompt_of(10), params)))
    assert len(streams) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70, 1.5, 1.0, True, False, "1", math.nan])
def test_b29_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be an int in \[0, 18446744073709551615\], got"):
        UncheckedParams(seed=seed)


def test_b29_what_is_one_is_taken():
    for seed in (0, 2**63 - 1, 2**63, 2**64 - 1, np.int64(7), np.uint64(2**63)):
        assert UncheckedParams(seed=seed).seed == seed


def test_a_large_temperature_does_not_widen_top_k():
    logits = np.linspace(0, 0.7, 8, dtype=np.float32)[None]
    drawn = {int(jit_sample(logits, sampling_input(1, temperature=3e38, top_k=2, seed=seed))[0]) for seed in range(40)}
    assert drawn == {6, 7}


def test_top_p_0_is_greedy_among_tied_tokens():
    logits = np.array([[0, 1, 2, 5, 1, 0, 5, 2]], np.float32)
    drawn = {int(jit_sample(logits, sampling_input(1, temperature=1.0, top_p=0.0, seed=seed))[0]) for seed in range(40)}
    assert drawn == {3}


def test_how_jax_makes_random_bits_does_not_change_a_seeds_tokens():
    logits = np.random.default_rng(0).normal(0, 2, (3, 300)).astype(np.float32)
    sampling = sampling_input(3, temperature=1.0, top_k=50, seed=[1, 2**40, 2**64 - 1])
    expected = np.asarray(jax.jit(sample)(logits, sampling)).tolist()
    with jax.threefry_partitionable(False):
        assert np.asarray(jax.jit(sample)(logits, sampling)).tolist() == expected


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_ints_that_no_float_holds_are_refused_as_others(value):
    with pytest.raises(ValueError, match="temperature must be"):
        UncheckedParams(temperature=value)


def test_the_last_bits_of_the_logits_hardly_ever_change_a_draw():
    """Batch sizes differ in them. A cumulative sum over a real vocabulary changes one draw in 200."""
    rng = np.random.default_rng(0)
    num_rows, vocab_size = 1024, 49_152
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    other = (logits * (1 + rng.normal(0, 1e-6, logits.shape))).astype(np.float32)
    sampling = sampling_input(num_rows, temperature=1.0, seed=np.arange(num_rows))
    changed = np.asarray(jit_sample_many(logits, sampling)) != np.asarray(jit_sample_many(other, sampling))
    assert changed.sum() <= 1
