"""What requests ask for becomes arrays: compared with a slow reference that edits logits token by token."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import ascii_tokenizer

from pagedjax.sampling.edits import LogitEdits, bits_of, build_edits, tokenize_bad_words
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.request import Request

V = 40  # more than a word of bits, and not a multiple of 32
NUM_ROWS = 4


def make_request(
    prompt: Sequence[int] = (1,), outputs: Sequence[int] = (), *, eos: Sequence[int] = (), **options: Any
) -> Request:
    """As the engine makes them."""
    params = SamplingParams(max_tokens=None, **options)
    request = Request(
        request_id="x",
        prompt_token_ids=list(prompt),
        params=params,
        arrival=(0,),
        max_num_tokens=1000,
        seed=0,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset(eos),
        ignored_eos_token_ids=frozenset(eos) if params.ignore_eos else frozenset(),
        stop_token_ids=frozenset(params.stop_token_ids),
        bad_word_ids=tokenize_bad_words(params.bad_words, None, V),
    )
    request.token_ids += outputs
    return request


def mask_of(allowed: Sequence[int]) -> np.ndarray:
    return bits_of(allowed, V)


def edits_of(*requests: Request, vocab_size: int = V) -> LogitEdits:
    edits, failed = build_edits(requests, NUM_ROWS, vocab_size)
    assert not failed
    return edits


def allowed_in(edits: LogitEdits, row: int = 0) -> set[int]:
    if edits.allowed is None:
        return set(range(V))
    bits = np.unpackbits(edits.allowed[row].astype("<u4").view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:V]).tolist())


def apply(edits: LogitEdits, logits: np.ndarray) -> np.ndarray:
    """What the device is meant to do with the arrays, one entry at a time."""
    out = logits.astype(np.float64)
    if edits.bias is not None:
        for row, token, value in zip(edits.bias.row, edits.bias.token, edits.bias.value, strict=True):
            out[row, token] += value
    if edits.history is not None:
        history = edits.history
        entries = list(zip(history.row.tolist(), history.token.tolist(), history.is_output.tolist(), strict=True))
        for row, token in {(row, token) for row, token, _ in entries}:
            penalty = np.float64(history.repetition[row])
            out[row, token] *= 1 / penalty if out[row, token] > 0 else penalty
        for row, token, is_output in entries:
            out[row, token] -= history.frequency[row] * is_output
        for row, token in {(row, token) for row, token, is_output in entries if is_output}:
            out[row, token] -= history.presence[row]
    for row in range(len(out)):
        out[row, sorted(set(range(V)) - allowed_in(edits, row))] = -np.inf
    return out


def reference_row(request: Request, logits: np.ndarray, eos: Sequence[int]) -> np.ndarray:
    """The documented order, from the options alone."""
    vocab = range(len(logits))
    params, outputs, out = request.params, request.output_token_ids, logits.astype(np.float64)
    for token, value in (params.logit_bias or {}).items():
        out[int(token)] += value
    for token in vocab:
        if token in request.prompt_token_ids or token in outputs:
            penalty = np.float64(np.float32(params.repetition_penalty))
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= np.float32(params.frequency_penalty) * np.float64(outputs.count(token))
        out[token] -= np.float32(params.presence_penalty) if token in outputs else 0
    base = set(vocab if params.allowed_token_ids is None else params.allowed_token_ids)
    mask = None if params.token_mask is None else params.token_mask(request.prompt_token_ids, outputs)
    if mask is not None:
        base &= {token for token in vocab if mask[token // 32] >> (token % 32) & 1}
    banned = {*eos, *params.stop_token_ids} if len(outputs) < params.min_tokens else set()
    for word in params.bad_words:
        *begin, last = map(int, word)
        if request.token_ids[len(request.token_ids) - len(begin) :] == begin:
            banned.add(last)
    kept = base - banned or base or set(vocab)
    return np.where([token in kept for token in vocab], out, -np.inf)


token_ids = st.integers(0, V - 1)
few_ids = st.integers(0, 3)  # so that histories repeat and bad words match
penalties = st.sampled_from([0.0, 0.5, -1.25, 2.0])


@st.composite
def request_options(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_request`, not the request: run-time type checks pick elements at random, not in a strategy."""
    options = {
        "logit_bias": st.none() | st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3),
        "presence_penalty": penalties,
        "frequency_penalty": penalties,
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "bad_words": st.lists(st.lists(few_ids, min_size=1, max_size=3), max_size=4),
        "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1, max_size=5),
        "masked_ids": st.none() | st.lists(token_ids, max_size=4) | st.just(list(range(V))),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(few_ids, max_size=2),
        "ignore_eos": st.booleans(),
    }
    chosen = draw(st.fixed_dictionaries({}, optional=options))
    chosen["eos"] = draw(st.lists(few_ids, max_size=2))
    chosen["prompt"] = draw(st.lists(few_ids, min_size=1, max_size=6))
    return {**chosen, "outputs": draw(st.lists(few_ids, max_size=6))}


@given(
    options=st.lists(request_options(), max_size=NUM_ROWS),
    later=st.lists(few_ids, max_size=3),
    seed=st.integers(0, 99),
)
def test_any_options_do_what_the_plain_loop_does(options, later, seed):
    batch = []
    for chosen in options:
        masked_ids = chosen.pop("masked_ids", None)
        hook = None if masked_ids is None else partial(lambda mask, prompt, outputs: mask, mask_of(masked_ids))
        batch.append((make_request(token_mask=hook, **chosen), chosen["eos"]))
    logits = np.random.default_rng(seed).normal(0, 3, (NUM_ROWS, V)).astype(np.float32)
    for new_token in [None, *later]:  # what is kept between steps goes on as if it were built anew
        for request, _ in batch:
            request.token_ids += [] if new_token is None else [new_token]
        edited = apply(edits_of(*(request for request, _ in batch)), logits)
        for row, (request, eos) in enumerate(batch):
            np.testing.assert_allclose(edited[row], reference_row(request, logits[row], eos), rtol=1e-9)
        np.testing.assert_array_equal(edited[len(batch) :], logits[len(batch) :])  # padding


def test_requests_without_options_have_no_edits():
    edits = edits_of(make_request(), make_request(temperature=0.5, top_k=3, stop_token_ids=[3]))
    assert not edits
    assert edits == LogitEdits()


def test_only_what_is_asked_for_is_built():
    edits = edits_of(make_request(), make_request(logit_bias={3: 1.0}))
    assert edits.bias is not None
    assert edits.bias.row.tolist() == [1]
    assert edits.history is edits.allowed is None
    edits = edits_of(make_request([5, 5, 6], [7, 7], presence_penalty=0.5))
    assert edits.history is not None
    assert edits.history.token.tolist() == [7, 7]  # no repetition penalty, so no prompt
    assert edits.bias is edits.allowed is None


def test_b30_which_tokens_count():
    penalized = make_request(
        [3, 3, 3, 7], [9, 9, 3], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
    )
    logits = np.zeros((NUM_ROWS, V), np.float32)
    logits[:, [3, 9]], logits[:, 7] = 2, -2
    # A neighbour without penalties, one of another length, and padding.
    edited = apply(edits_of(make_request([3, 9]), penalized, make_request([0], repetition_penalty=2.0)), logits)
    assert edited[1, [3, 7, 9]] == pytest.approx(
        [2 / 1.3 - 0.5 - 0.5, -2 * 1.3, 2 / 1.3 - 2 * 0.5 - 0.5], rel=1e-5
    )  # 1.3 in f32
    edited[1, [3, 7, 9]] = logits[1, [3, 7, 9]]
    np.testing.assert_array_equal(edited, logits)


def test_b30_outputs_are_outputs_after_a_preemption_too():
    request = make_request([3], [4, 5], presence_penalty=0.5, min_tokens=3, eos=[2])
    before = edits_of(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1  # all that it changes of what is read here
    after = edits_of(request)
    assert before.history is not None
    assert after.history is not None
    assert after.history.is_output.tolist() == before.history.is_output.tolist() == [True, True]
    assert allowed_in(after) == allowed_in(before) == set(range(V)) - {2}


def test_b34_no_end_before_min_tokens():
    request = make_request(range(10), min_tokens=3, eos=[2, 5], stop_token_ids=[9])  # the prompt does not count
    for _ in range(3):
        assert allowed_in(edits_of(request)) == set(range(V)) - {2, 5, 9}
        request.token_ids.append(1)
    assert not edits_of(request)


def test_b34_ignored_ends_do_not_come_before_min_tokens_either():
    request = make_request(min_tokens=1, eos=[2, 5], stop_token_ids=[9], ignore_eos=True)
    assert allowed_in(edits_of(request)) == set(range(V)) - {2, 5, 9}
    request.token_ids.append(1)
    assert not edits_of(request)


def test_bad_words_look_at_prompt_and_output():
    words = [[7], [1, 2, 3], [2, 4]]
    banned = {(1, 2): {3, 4, 7}, (2,): {4, 7}, (1, 2, 3): {7}, (5, 1): {7}}
    for tokens, expected in banned.items():
        for num_prompt in range(1, len(tokens) + 1):  # wherever the prompt ends
            edits = edits_of(make_request(tokens[:num_prompt], tokens[num_prompt:], bad_words=words))
            assert allowed_in(edits) == set(range(V)) - expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, {3}),
        ({"allowed_token_ids": [2], "min_tokens": 1}, {2}),
        ({"allowed_token_ids": [2, 3], "bad_words": [[2], [3]]}, {2, 3}),
        ({"allowed_token_ids": [2, 3], "token_mask": lambda p, o: mask_of([3, 4])}, {3}),
        ({"allowed_token_ids": [2], "token_mask": lambda p, o: mask_of([3])}, set(range(V))),
        ({"token_mask": lambda p, o: mask_of([]), "bad_words": [[5]]}, set(range(V))),
        ({"token_mask": lambda p, o: mask_of([2]), "min_tokens": 1}, {2}),  # a grammar that is at its end
        ({"bad_words": [[i] for i in range(V)]}, set(range(V))),
    ],
)
def test_no_row_is_left_without_a_token(options, expected):
    neighbour = make_request(allowed_token_ids=[6])
    edits = edits_of(make_request(eos=[2], **options), neighbour)
    assert allowed_in(edits, 0) == expected
    assert allowed_in(edits, 1) == {6}


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64])
def test_a_mask_with_bits_behind_the_vocabulary_allows_nothing_there(vocab_size):
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    if vocab_size % 32:
        mask[-1] = 1 << (vocab_size % 32)
    request = make_request([0], token_mask=lambda prompt, outputs: mask)
    assert edits_of(request, vocab_size=vocab_size).allowed is None


def test_the_token_mask_sees_prompt_and_outputs_and_may_reuse_its_array():
    seen, array = [], np.zeros(2, np.uint32)

    def one_more(prompt: Sequence[int], outputs: Sequence[int]) -> np.ndarray:
        seen.append((list(prompt), list(outputs)))
        array[:] = mask_of([prompt[-1] + 1])
        return array

    edits = edits_of(make_request([3, 4], [5], token_mask=one_more), make_request([8], token_mask=one_more))
    assert seen == [([3, 4], [5]), ([8], [])]
    assert (allowed_in(edits, 0), allowed_in(edits, 1), allowed_in(edits, 2)) == ({5}, {9}, set(range(V)))


def raises(prompt: Sequence[int], outputs: Sequence[int]) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raises, "planted"),
        (lambda p, o: np.zeros(3, np.uint32), r"token_mask must return uint32\[2\] or None, got uint32\[3\]"),
        (lambda p, o: np.zeros((1, 2), np.uint32), r"got uint32\[1, 2\]"),
        (lambda p, o: np.zeros(2, np.int32), r"got int32\[2\]"),
        (lambda p, o: np.ones(V, bool), r"got bool\[40\]"),
        (lambda p, o: [1, 2], "got list"),
        (lambda: None, "positional argument"),
    ],
)
def test_a_token_mask_that_fails_is_its_requests_alone(hook, message):
    neighbours = [make_request(token_mask=lambda p, o: mask_of([6])), make_request(logit_bias={3: 1.0})]
    broken = make_request(token_mask=hook)
    edits, failed = build_edits([neighbours[0], broken, neighbours[1]], NUM_ROWS, V)
    assert list(failed) == [broken]
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        raise failed[broken]
    assert (allowed_in(edits, 0), allowed_in(edits, 1)) == ({6}, set(range(V)))
    assert edits.bias is not None
    assert edits.bias.row.tolist() == [2]


def test_an_interrupted_token_mask_is_not_swallowed():
    def interrupted(prompt: Sequence[int], outputs: Sequence[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_edits([make_request(token_mask=interrupted)], NUM_ROWS, V)


def test_bad_words_as_text_are_banned_with_and_without_a_space():
    def ids(text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    words = ["ab", " cd", "\n", [5, 6], "ab"]
    expected = (ids("ab"), ids(" ab"), ids("cd"), ids(" cd"), ids("\n"), (5, 6))
    assert tokenize_bad_words(words, ascii_tokenizer(), 128) == expected
    with pytest.raises(ValueError, match=r"bad_words: 'xyz' must have tokens, all of the model's vocabulary"):
        tokenize_bad_words(["xyz"], ascii_tokenizer(), 121)
