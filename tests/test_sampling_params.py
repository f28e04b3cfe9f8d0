"""Every sampling option is checked by itself: what is refused, in which words, and what is taken."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_engine import VOCAB_SIZE, ascii_tokenizer, assert_clean, greedy, prompt_of, unchecked, unchecked_engine

from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.processors import LogitsProcessor

UncheckedParams = unchecked("pagedjax.sampling.params").SamplingParams

REFUSED: dict[str, list[Any]] = {
    "min_p": [-0.1, 1.1, math.nan, math.inf, "0.5", True, None, 10**400],
    "presence_penalty": [-2.1, 2.1, math.nan, -math.inf, "1", False, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, math.inf, "1", True, None],
    "repetition_penalty": [0, -1.0, 1e-46, math.nan, math.inf, 1e300, "1", True, None],
    "logit_bias": [
        *([], "5", [(5, 1.0)]),
        *({"a": 1}, {-1: 100}, {"-1": 5}, {1.0: 1}, {True: 1}, {None: 1}, {2**31: 1}),
        *({"": 1}, {" 5": 1}, {"٣": 1}, {"9" * 5000: 1}, {"5": 1, 5: 2}),
        *({5: "x"}, {5: math.nan}, {5: 1000}, {5: -100.1}, {5: math.inf}, {5: True}, {5: None}),
    ],
    "bad_words": ["word", b"word", None, 5, [""], [[]], [5], [b"word"], [[1, -1]], [[True]], [["a"]], [[1.0]], {"a"}],
    "allowed_token_ids": [[], "5", 5, [-1], [True], [1.0], {5}, [2**31]],
    "token_mask": [5, "mask", np.zeros(4, np.uint32)],
    "logits_processors": [None, 5, "abc", [len], [None], LogitsProcessor(len)],
    "min_tokens": [-1, 1.0, True, None, "1", 17, math.nan],
    "max_tokens": [-1, 1.0, True, "1", math.nan],
    "logprobs": [-2, 1.0, True, "1", math.nan],
    "prompt_logprobs": [-2, 1.0, True, "1", math.nan],
    "stop": [b"a", [""], "", 5, [5], None, ["a", b"b"]],
    "stop_token_ids": ["5", b"5", 5, [-1], [True], [1.0], None],
}
TAKEN: dict[str, list[Any]] = {
    "min_p": [0, 1, 0.05, np.float32(0.5)],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2, 2, 0.5],
    "repetition_penalty": [1, 1e-3, 1.3, 1e3],
    "bad_words": [(), [], ["a", " b", [1, 2]], ("a",), [(1,), [np.int64(2)]]],
    "allowed_token_ids": [None, [0], (1, 2), [np.int32(3)]],
    "token_mask": [None, lambda prompt_ids, output_ids: None],
    "logits_processors": [(), [], [LogitsProcessor(len)]],
    "min_tokens": [0, 1, 16, np.int64(3)],
    "max_tokens": [None, 0, 1, 2**31 - 1],
    "logprobs": [None, 0, 5, -1],
    "prompt_logprobs": [None, 0, 5, -1],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_what_is_refused_is_named_with_what_it_got(name, value):
    with pytest.raises(ValueError, match=rf"^{name}.* (must|got) .*"):
        UncheckedParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(TAKEN))
def test_what_is_taken(name, value):
    taken = getattr(UncheckedParams(**{name: value}), name)
    assert taken is value or list(map(as_plain, taken)) == list(map(as_plain, value))


def as_plain(value):
    return value if isinstance(value, str) or not isinstance(value, Sequence) else list(value)


def test_what_was_checked_stays_so():
    """The caller goes on with his lists and dicts."""
    ids, word = [1, 2], [3, 4]
    bias: dict[int | str, float] = {5: 1.0}
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=ids, bad_words=[word], logit_bias=bias)
    ids.append(10**6)
    word.append(10**6)
    bias[10**6] = 1.0
    assert (list(params.allowed_token_ids or ()), list(params.stop_token_ids)) == ([1, 2], [1, 2])
    assert (list(map(list, params.bad_words)), dict(params.logit_bias or {})) == ([[3, 4]], {5: 1.0})
    with pytest.raises(AttributeError):
        params.logit_bias.update({7: 2.0})  # type: ignore


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_limits_hold_for_half_precision_too(name):
    with pytest.raises(ValueError, match=name):
        UncheckedParams(**{name: np.float16("inf")})


def test_the_values_of_the_defaults_ask_for_nothing():
    assert not SamplingParams().edits_logits
    assert not SamplingParams().has_extras
    assert not SamplingParams(logit_bias={}).edits_logits


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 0.0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"min_tokens": 1},
        {"token_mask": lambda prompt_ids, output_ids: None},
    ],
)
def test_every_edit_is_one(options):
    params = SamplingParams(**options)
    assert params.edits_logits
    assert params.has_extras


@pytest.mark.parametrize(
    "options", [{"logprobs": 0}, {"prompt_logprobs": 0}, {"logits_processors": [LogitsProcessor(len)]}]
)
def test_extras_that_are_no_edits(options):
    params = SamplingParams(**options)
    assert params.has_extras
    assert not params.edits_logits


def test_b31_keys_of_logit_bias_may_be_strings_of_digits():
    given = {"12": 3, 5: -100, np.int64(7): 100.0}
    params = UncheckedParams(logit_bias=given)
    assert params.logit_bias == {12: 3.0, 5: -100.0, 7: 100.0}
    assert [(type(key), type(value)) for key, value in params.logit_bias.items()] == [(int, float)] * 3
    given["13"] = 1
    assert 13 not in params.logit_bias  # a copy: it has been checked


def test_min_tokens_and_max_tokens():
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=4, max_tokens=None).min_tokens == 4
    assert SamplingParams(max_tokens=0).max_tokens == 0
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_minus_one_is_the_vocabulary():
    params = SamplingParams(logprobs=-1, prompt_logprobs=3)
    assert (params.num_logprobs(50), params.num_prompt_logprobs(50)) == (50, 3)
    assert SamplingParams().num_logprobs(50) is None


# What only an engine can tell.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 5.0}}, "logit_bias must be below the vocabulary size 128, got 128"),
        ({"logit_bias": {"1000": 5.0}}, "logit_bias must be below the vocabulary size 128, got 1000"),
        ({"stop_token_ids": [5, VOCAB_SIZE + 3]}, "stop_token_ids must be below the vocabulary size 128, got 131"),
        ({"allowed_token_ids": [5, VOCAB_SIZE]}, "allowed_token_ids must be below the vocabulary size 128, got 128"),
        ({"bad_words": [[5], [6, VOCAB_SIZE]]}, "bad_words must be below the vocabulary size 128, got 128"),
        ({"bad_words": ["word"]}, "bad_words as text need a tokenizer"),
        ({"logprobs": 129}, "logprobs must be at most the vocabulary size 128, got 129"),
        ({"prompt_logprobs": 129}, "prompt_logprobs must be at most the vocabulary size 128, got 129"),
    ],
)
def test_b31_what_the_vocabulary_does_not_have_is_refused(options, message):
    engine = unchecked_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt_of(5), SamplingParams(**options))
    assert_clean(engine)


@pytest.mark.parametrize("word", ["\ud800", "é"])
def test_bad_words_that_the_tokenizer_has_no_ids_for_are_refused(word):
    engine = unchecked_engine(tokenizer=ascii_tokenizer())
    with pytest.raises(ValueError, match="bad_words: "):
        engine.add_request(prompt_of(5), greedy(bad_words=["fine", word]))
    assert_clean(engine)
