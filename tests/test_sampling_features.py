"""Sampling options end to end: an engine against a plain loop over the dense model, whatever else is in the batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_edits import reference_row
from tiny_engine import (
    LOGIT_TOLERANCE,
    VOCAB_SIZE,
    ascii_tokenizer,
    dense_logits,
    greedy,
    naive_greedy,
    prompt_of,
    run_all,
    text_of,
    tiny_engine,
)

from pagedjax.engine import LLMEngine
from pagedjax.outputs import CompletionOutput
from pagedjax.request import Request
from pagedjax.sampling.edits import bits_of, tokenize_bad_words
from pagedjax.sampling.params import SamplingParams

PROMPT = prompt_of(10)


def deterministic(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def assert_edited_greedy(params: SamplingParams, output: Sequence[int], eos: Sequence[int] = ()) -> None:
    """Each token is the best of the dense model's logits, edited token by token, or ties with it."""
    words = tokenize_bad_words(params.bad_words, ascii_tokenizer(), VOCAB_SIZE)
    logits = dense_logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
    for i, token in enumerate(output):
        request = Request("x", list(PROMPT), params, arrival=0, max_num_tokens=64, seed=0, bad_word_ids=words)
        request.token_ids += output[:i]
        edited = reference_row(request, logits[i], eos)
        # A repetition penalty scales what rounding does to a logit.
        tolerance = LOGIT_TOLERANCE * max(1, params.repetition_penalty)
        assert edited.max() - edited[token] <= tolerance, f"token {i} of {output} is not the best"


def run(
    params: SamplingParams, eos: Sequence[int] = (), *, num_neighbours: int = 3, engine: LLMEngine | None = None
) -> CompletionOutput:
    """One request among ordinary neighbours of other lengths, whose greedy tokens must stay what they are."""
    engine = engine or tiny_engine(tokenizer=ascii_tokenizer(), eos_token_ids=eos)
    for i in range(num_neighbours):
        engine.add_request(prompt_of(3 + i, i), greedy(12), f"neighbour {i}")
    engine.add_request(PROMPT, params, "x")
    finished = run_all(engine)
    for i in range(num_neighbours):
        assert finished[f"neighbour {i}"].outputs[0].token_ids == naive_greedy(prompt_of(3 + i, i), 12)
    return finished["x"].outputs[0]


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"3": 10.0}},
]


@pytest.mark.parametrize("options", PENALTIES)
def test_b30_penalties(options):
    params = greedy(16, **options)
    output = run(params)
    assert len(output.token_ids) == 16
    assert_edited_greedy(params, output.token_ids)


@pytest.mark.parametrize("options", PENALTIES)
def test_b30_a_preemption_changes_nothing(options):
    params = greedy(16, **options)
    engine = tiny_engine()
    engine.add_request(PROMPT, params, "x")
    while not any(request.num_output_tokens == 4 for request in engine.scheduler.running.values()):
        engine.step()
    engine.scheduler.preempt_all()
    (output,) = run_all(engine)["x"].outputs
    assert engine.scheduler.num_preemptions == 1
    assert output.token_ids == run(params).token_ids
    assert_edited_greedy(params, output.token_ids)


def test_b31_a_bias_reaches_its_own_row_alone():
    ids = naive_greedy(PROMPT, 8)
    params = greedy(8, logit_bias={ids[0]: -100.0, str(VOCAB_SIZE - 1): 100.0, 0: 5.5})
    output = run(params)
    assert output.token_ids != ids
    assert_edited_greedy(params, output.token_ids)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_b34_min_tokens(ignore_eos, min_tokens):
    """The only tokens: 5, then 9, then 2 are preferred, all of which may end it, and 7 last of all."""
    bias = {5: 100.0, 9: 0.0, 2: -50.0, 7: -100.0}
    eos, allowed = [2, 5], [2, 5, 7, 9]
    params = deterministic(
        6,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=[9],
        logit_bias=bias,
        allowed_token_ids=allowed,
    )
    output = run(params, eos)
    assert_edited_greedy(params, output.token_ids, eos)
    assert output.token_ids[:min_tokens] == [7] * min_tokens
    is_end = [token == 9 or (token in eos and not ignore_eos) for token in output.token_ids]
    assert not any(is_end[:-1])
    if is_end[-1]:
        assert (output.finish_reason, output.stop_reason) == ("stop", 9 if output.token_ids[-1] == 9 else None)
    else:
        assert (output.finish_reason, len(output.token_ids)) == ("length", 6)


def test_b34_an_end_that_is_all_there_is_ends_it():
    output = run(deterministic(6, min_tokens=3, allowed_token_ids=[2]), [2])
    assert (output.token_ids, output.finish_reason) == ([2], "stop")


def test_b34_stop_strings_wait_for_min_tokens_too():
    ids = naive_greedy(PROMPT, 12)
    stops = [text_of(ids[2:4]), text_of(ids[6:8])]
    cut = run(greedy(12, stop=stops))
    assert (cut.token_ids, cut.stop_reason) == (ids[:4], stops[0])
    late = run(greedy(12, stop=stops, min_tokens=4))
    assert (late.token_ids, late.text, late.stop_reason) == (ids[:8], text_of(ids[:6]), stops[1])


def test_bad_words_as_text_and_as_ids():
    ids = naive_greedy(PROMPT, 12)
    params = greedy(12, bad_words=[text_of(ids[0:2]).strip() or "!", [ids[0]], ids[4:6]])
    output = run(params)
    assert ids[0] not in output.token_ids
    words = tokenize_bad_words(params.bad_words, ascii_tokenizer(), VOCAB_SIZE)
    as_ids = greedy(12, bad_words=[list(word) for word in words])
    assert_edited_greedy(as_ids, output.token_ids)


def test_a_token_mask_that_fails_ends_its_request_alone():
    def fails_later(prompt: Sequence[int], outputs: Sequence[int]) -> np.ndarray:
        if len(outputs) == 3:
            raise RuntimeError("planted")
        return bits_of([4, 5, 6], VOCAB_SIZE)

    output = run(greedy(12, token_mask=fails_later))
    assert output.finish_reason == "error"
    assert len(output.token_ids) == 3
    assert set(output.token_ids) <= {4, 5, 6}


def test_a_token_mask_restricts_sampling():
    def in_turn(prompt: Sequence[int], outputs: Sequence[int]) -> np.ndarray | None:
        return bits_of([len(outputs), len(outputs) + 50], VOCAB_SIZE) if len(outputs) != 2 else None

    params = greedy(8, token_mask=in_turn)
    output = run(params)
    assert [token % 50 for i, token in enumerate(output.token_ids) if i != 2] == [0, 1, 3, 4, 5, 6, 7]
    random = run(SamplingParams(temperature=20.0, seed=1, max_tokens=8, ignore_eos=True, token_mask=in_turn))
    assert [token % 50 for i, token in enumerate(random.token_ids) if i != 2] == [0, 1, 3, 4, 5, 6, 7]
