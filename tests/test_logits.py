"""Edits of logits against slow numpy loops; and with the filters against transformers' own processors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_cases import candidates, kept_by_sorting, normal_logits, sampling_input

from pagedjax.sampling import logits as ops

add_bias, keep_allowed, penalise, processed_logits = map(
    jax.jit, (ops.add_bias, ops.keep_allowed, ops.penalise, ops.processed_logits)
)
count_tokens = jax.jit(ops.count_tokens)


def rows_of(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return normal_logits(num_rows * vocab_size, seed, scale=3.0).reshape(num_rows, vocab_size)


def counted(shape: tuple[int, int], entries: list[tuple[int, int, bool]], chunk: int = 4) -> ops.TokenCounts:
    """The counts of (row, token, is_output) entries, in chunks that are filled up with a row beyond the last."""
    counts = ops.no_counts(jnp.zeros(shape))
    for start in range(0, len(entries), chunk):
        part = entries[start : start + chunk]
        part = part + [(shape[0], 0, True)] * (chunk - len(part))
        row, token, is_output = (np.array(column) for column in zip(*part, strict=True))
        counts = count_tokens(counts, row.astype(np.int32), token.astype(np.int32), is_output)
    return counts


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], options: dict[str, float]) -> np.ndarray:
    """One row, the slow way, in f64."""
    row = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        row[token] = row[token] / options["repetition"] if row[token] > 0 else row[token] * options["repetition"]
    for token in set(output):
        row[token] -= options["frequency"] * output.count(token) + options["presence"]
    return row


def column(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


# Biases.


def test_bias_adds_up_and_touches_nothing_else():
    logits = rows_of(3, 70)
    entries = [(0, 5, 1.5), (0, 5, 2.0), (2, 69, -3.0), (2, 0, -np.inf), (3, 5, 100.0), (9, 0, 100.0), (3, 69, 1.0)]
    row, token, value = (np.array(values) for values in zip(*entries, strict=True))
    out = np.array(add_bias(logits, row.astype(np.int32), token.astype(np.int32), value.astype(np.float32)))
    expected = logits.copy()
    expected[0, 5] += np.float32(3.5)
    expected[2, 69] -= 3
    expected[2, 0] = -np.inf
    # 3.5 may be added in two steps.
    np.testing.assert_allclose(out[0, 5], expected[0, 5], rtol=1e-6)
    out[0, 5] = expected[0, 5]
    assert np.array_equal(out, expected)


# Penalties.


def test_b30_which_tokens_count():
    """Prompt [3, 3, 3, 7] with logits of 2 and -2, outputs 7, 9, 9; beside a longer row, and one without penalties."""
    logits = np.zeros((3, 12), np.float32)
    logits[:, 3], logits[:, 7], logits[:, 9], logits[:, 0] = 2, -2, 1, 0.25
    entries = [(0, t, False) for t in (3, 3, 3, 7)] + [(0, t, True) for t in (7, 9, 9)]
    entries += [(1, t, False) for t in (1, 2, 3, 4, 5, 6, 7, 8)] + [(2, 3, False), (2, 9, True)]
    counts = counted((3, 12), entries, chunk=5)
    options = column([0.5, 0.0, 0.0]), column([0.25, 0.0, 0.0]), column([1.25, 2.0, 1.0])
    out = np.asarray(penalise(logits, counts, *options))
    assert out[0, 3] == np.float32(2) / np.float32(1.25)  # once per id; the prompt has no presence or frequency
    assert out[0, 7] == -2 * 1.25 - 0.25 - 0.5  # repetition once for prompt and output
    assert out[0, 9] == np.float32(1) / np.float32(1.25) - 0.25 * 2 - 0.5
    assert out[0, 0] == 0.25, "padding counted as token 0"
    assert (out[1, 3], out[1, 7], out[1, 9], out[1, 0]) == (1, -4, 1, 0.25)
    assert out[2].tobytes() == logits[2].tobytes()


@given(seed=st.integers(0, 2**32 - 1), chunk=st.sampled_from([1, 3, 16]))
def test_penalties_are_those_of_a_plain_loop(seed, chunk):
    rng = np.random.default_rng(seed)
    logits, num_rows, vocab_size = rows_of(4, 40, seed), 4, 40
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in range(num_rows)]
    outputs = [rng.integers(0, vocab_size, rng.integers(0, 9)).tolist() for _ in range(num_rows)]
    options = {
        "presence": rng.choice([0, -2, 0.5, 2], num_rows).astype(np.float32),
        "frequency": rng.choice([0, -2, 0.5, 2], num_rows).astype(np.float32),
        "repetition": rng.choice([1, 0.5, 1.3, 2], num_rows).astype(np.float32),
    }
    entries = [(row, token, False) for row in range(num_rows) for token in prompts[row]]
    entries += [(row, token, True) for row in range(num_rows) for token in outputs[row]]
    rng.shuffle(entries)
    entries = [(int(row), int(token), bool(is_output)) for row, token, is_output in entries]
    out = np.asarray(penalise(logits, counted((num_rows, vocab_size), entries, chunk), *options.values()))
    for row in range(num_rows):
        mine = {name: float(values[row]) for name, values in options.items()}
        expected = penalised(logits[row], prompts[row], outputs[row], mine)
        # Up to 16 is subtracted from up to 40: a few roundings of numbers of that size.
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=2e-5)
        untouched = np.setdiff1d(np.arange(vocab_size), prompts[row] + outputs[row])
        assert np.array_equal(out[row, untouched], logits[row, untouched])


def test_rows_without_penalties_keep_every_bit():
    logits = rows_of(2, 300)
    logits[0, :4] = 0.0, -0.0, -np.inf, 1e-37
    entries = [(0, token, True) for token in range(8)] + [(0, token, False) for token in range(8)]
    out = np.asarray(penalise(logits, counted((2, 300), entries), *map(column, ([0.0, 1], [0.0, 1], [1.0, 2]))))
    assert np.array_equal(out[0], logits[0])


# Masks.


def bits_of(is_allowed: np.ndarray) -> np.ndarray:
    """bool[S, V] as words, bit i % 32 of word i // 32; what is behind the vocabulary is set."""
    num_rows, vocab_size = is_allowed.shape
    padded = np.ones((num_rows, -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = is_allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_only_what_is_allowed_stays(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits, is_allowed = rows_of(6, vocab_size), rng.random((6, vocab_size)) < 0.3
    is_allowed[0], is_allowed[1] = True, False
    is_allowed[2:, -1] = True
    logits[3] = np.where(is_allowed[3], -np.inf, logits[3])  # a bias has forbidden all that is allowed
    out = np.asarray(keep_allowed(logits, bits_of(is_allowed)))
    expected = np.where(is_allowed, logits, -np.inf)
    expected[[1, 3]] = logits[[1, 3]]
    assert np.array_equal(out, expected)


# The logits that are drawn from.


def test_processed_logits_are_those_drawn_from():
    logits = rows_of(7, 300)
    columns: dict[str, Any] = {
        "temperature": np.array([0.0, 1e-40, 0.5, 0.5, 2.0, 1.0, 1.0]),
        "top_k": np.array([5, 5, 0, 7, 0, 0, 0]),
        "top_p": np.array([0.5, 0.5, 1.0, 1.0, 0.8, 1.0, 0.0]),
        "min_p": np.array([0.5, 0.5, 0.0, 0.0, 0.0, 0.1, 0.0]),
    }
    out = np.asarray(processed_logits(logits, sampling_input(7, **columns)))
    for row in range(7):
        options: dict[str, Any] = {name: float(values[row]) for name, values in columns.items()}
        kept = np.ones(300, bool)
        if options["temperature"] < 1e-30:
            options["temperature"] = 1.0  # greedy: no temperature, no filters
        elif options["top_p"] == 0:
            kept = logits[row] == logits[row].max()
        else:
            kept, _ = kept_by_sorting(logits[row], **options | {"top_k": int(options["top_k"])})
        expected = (logits[row].astype(np.float64) - logits[row].max()) / options["temperature"]
        assert np.array_equal(out[row] > -np.inf, kept)
        np.testing.assert_allclose(out[row][kept], expected[kept], rtol=1e-5, atol=1e-6)  # two roundings


def test_processed_logits_without_any_filter_are_scaled_alone():
    logits = rows_of(3, 50)
    out = np.asarray(processed_logits(logits, sampling_input(3, temperature=[0.0, 1.0, 2.0])))
    peak = logits.max(axis=-1, keepdims=True)
    assert np.array_equal(out, (logits - peak) / column([1, 1, 2])[:, None])


# Everything against transformers.


def warped(logits: np.ndarray, history: list[int], options: dict[str, float]) -> np.ndarray:
    """What transformers' own processors leave, in the order in which its `generate` runs them."""
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    import transformers

    makers = {
        "repetition": lambda value: transformers.RepetitionPenaltyLogitsProcessor(value),
        "temperature": lambda value: transformers.TemperatureLogitsWarper(value),
        "top_k": lambda value: transformers.TopKLogitsWarper(int(value)),
        "top_p": lambda value: transformers.TopPLogitsWarper(value),
        "min_p": lambda value: transformers.MinPLogitsWarper(value),
    }
    scores = torch.tensor(logits)[None]
    for name, make in makers.items():
        if name in options:
            scores = make(options[name])(torch.tensor(history)[None], scores)
    return scores[0].numpy()


OPTIONS = {
    "repetition": st.sampled_from([0.5, 1.3, 2.0]),
    "temperature": st.sampled_from([0.1, 0.7, 1.7, 20.0]),
    "top_k": st.sampled_from([1, 2, 7, 50, 299, 300]),
    "top_p": st.floats(2**-10, 1 - 2**-10, width=32),
    "min_p": st.floats(2**-10, 1 - 2**-10, width=32),
}


@pytest.mark.oracle
@given(
    seed=st.integers(0, 2**32 - 1),
    options=st.one_of(
        *(st.fixed_dictionaries({name: values}) for name, values in OPTIONS.items()),
        st.fixed_dictionaries({}, optional=OPTIONS),
        st.fixed_dictionaries(OPTIONS),
    ),
)
def test_candidates_are_those_of_transformers(seed, options):
    rng = np.random.default_rng(seed)
    logits = rng.permutation(np.linspace(-1, 1, 300) ** 3 * rng.uniform(1, 20)).astype(np.float32)[None]
    assert len(set(logits[0].tolist())) == 300, "ties"
    history = rng.integers(0, 300, 20).tolist()
    expected = warped(logits[0], history, options)

    counts = counted((1, 300), [(0, token, bool(i > 9)) for i, token in enumerate(history)], chunk=20)
    penalties = column([0]), column([0]), column([options.get("repetition", 1.0)])
    edited = np.asarray(penalise(logits, counts, *penalties))
    filters = {name: value for name, value in options.items() if name != "repetition"}
    _, margin = kept_by_sorting(edited[0], **filters)
    assume(margin > 1e-5 and len(set(edited[0].tolist())) == 300)

    kept = candidates(edited, **filters)[0]
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(np.isfinite(expected)).tolist()
    greedy = candidates(edited, **filters, top_p=0.0)[0] if "top_p" not in filters else edited[0] == edited[0].max()
    assert np.flatnonzero(greedy).tolist() == [expected.argmax()]
    processed = np.asarray(processed_logits(edited, sampling_input(1, **filters)))[0]
    shift = expected.max()  # ours have a maximum of 0; two roundings of numbers of up to 200
    np.testing.assert_allclose(processed[kept], expected[kept] - shift, rtol=1e-5, atol=2e-5)


# Neighbours.


def test_b79_what_other_rows_ask_for_changes_no_bit():
    """Every edit at once, on a row in each place of a batch of 5 whose other rows want something else each time."""
    mine = rows_of(1, 300, seed=1)[0]
    is_allowed = np.random.default_rng(0).random(300) < 0.5
    results = []
    for place in range(5):
        rng = np.random.default_rng(place)
        logits = rng.normal(0, 3, (5, 300)).astype(np.float32)
        logits[place] = mine
        others = [row for row in range(5) if row != place]
        row = np.array([place, place, *rng.choice(others, 6)], np.int32)
        token = np.array([7, 8, *rng.integers(0, 300, 6)], np.int32)
        logits = add_bias(logits, row, token, np.array([1, 2, *rng.normal(0, 9, 6)], np.float32))
        entries = [(place, 7, True), (place, 9, False)]
        entries += [(int(rng.choice(others)), int(rng.integers(300)), True) for _ in range(10)]
        options = rng.uniform(0.5, 2, (3, 5)).astype(np.float32)
        options[:, place] = 0.5, 0.25, 1.3
        logits = penalise(logits, counted((5, 300), entries), *options)
        allowed = rng.random((5, 300)) < 0.5
        allowed[place] = is_allowed
        logits = keep_allowed(logits, bits_of(allowed))
        columns = {
            "temperature": rng.choice([0, 0.5, 2], 5).astype(np.float32),
            "top_k": rng.choice([0, 9], 5),
            "top_p": rng.choice([0.3, 1], 5),
            "min_p": rng.choice([0.1, 0], 5),
        }
        for name, value in {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}.items():
            columns[name][place] = value
        results.append(np.asarray(processed_logits(logits, sampling_input(5, **columns)))[place].tobytes())
    assert len(set(results)) == 1
