"""Sampling options end to end: an engine against a plain loop over the dense model, whatever else is in the batch."""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_edits import reference_row
from tiny_engine import (
    LOGIT_TOLERANCE,
    MAX_MODEL_LEN,
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
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling.edits import bits_of, tokenize_bad_words
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.processors import LogitsProcessor
from pagedjax.scheduling.request import Request

PROMPT = prompt_of(10)


def deterministic(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def assert_edited_greedy(params: SamplingParams, output: Sequence[int], eos: Sequence[int] = ()) -> None:
    """Each token is the best of the dense model's logits, edited token by token, or ties with it."""
    words = tokenize_bad_words(params.bad_words, ascii_tokenizer(), VOCAB_SIZE)
    logits = dense_logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
    for i, token in enumerate(output):
        request = Request("x", list(PROMPT), params, arrival=(0,), max_num_tokens=64, seed=0, bad_word_ids=words)
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
    while not any(request.num_output_tokens == 4 for request in engine.scheduler.requests(engine.scheduler.running)):
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


# Seeds, with every option at once.


def every_third_is_banned(prompt: Sequence[int], outputs: Sequence[int]) -> np.ndarray:
    return bits_of([i for i in range(VOCAB_SIZE) if (i + len(outputs)) % 3], VOCAB_SIZE)


def tilt(logits: jax.Array, state: dict[str, jax.Array]) -> jax.Array:
    return logits + jnp.cos(state["phase"])[:, None] * jnp.linspace(0, 160, VOCAB_SIZE)[None, :]


EVERYTHING: dict[str, Any] = {
    "temperature": 20.0,
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.1,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 0.7,
    "logit_bias": dict.fromkeys(range(40, 55), 15.0),
    "bad_words": ["A", "5", [66, 66], *([i] for i in range(52, 60, 3))],
    "allowed_token_ids": list(range(30, 70)),
    "token_mask": every_third_is_banned,
    "logits_processors": [LogitsProcessor(tilt, state=lambda prompt, output: {"phase": np.float32(len(output))})],
    "min_tokens": 22,
    "stop_token_ids": list(range(30, 60, 4)),
}
REPORTS: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2}


def everything(seed: int = 7, **options: Any) -> SamplingParams:
    return SamplingParams(**{**EVERYTHING, **REPORTS, "seed": seed, "max_tokens": 24, "ignore_eos": True, **options})


def output_alone(params: SamplingParams) -> RequestOutput:
    engine = tiny_engine(tokenizer=ascii_tokenizer(), max_num_batched_tokens=MAX_MODEL_LEN)
    engine.add_request(PROMPT, params, "x")
    return run_all(engine)["x"]


@lru_cache
def alone(n: int = 1) -> RequestOutput:
    return output_alone(everything(n=n))


def ids_with(**options: Any) -> list[int]:
    return output_alone(everything(**options)).outputs[0].token_ids


def assert_as_alone(output: RequestOutput) -> None:
    """The same ids, and log-probabilities of the same tokens, near to what they were."""
    expected = alone(len(output.outputs))
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
    assert [each.text for each in output.outputs] == [each.text for each in expected.outputs]
    mine = [output.prompt_logprobs or [], *(each.logprobs or [] for each in output.outputs)]
    theirs = [expected.prompt_logprobs or [], *(each.logprobs or [] for each in expected.outputs)]
    for entries, expected_entries in zip(mine, theirs, strict=True):
        assert len(entries) == len(expected_entries) > 0
        for entry, expected_entry in zip(entries, expected_entries, strict=True):
            values, expected_values = (
                {i: each.logprob for i, each in (e or {}).items()} for e in (entry, expected_entry)
            )
            assert values == pytest.approx(expected_values, abs=2 * LOGIT_TOLERANCE)


def test_a_seed_every_option_acts():
    """Else the tests below say nothing about it: without any one of them the tokens are others."""
    neutral = {field.name: field.default for field in fields(SamplingParams)}
    differs = {name: ids_with(**{name: neutral[name]}) != ids_with() for name in EVERYTHING | REPORTS}
    assert differs == dict.fromkeys(EVERYTHING, True) | dict.fromkeys(REPORTS, False)


NEIGHBOURS = {
    "plain": [greedy(20), SamplingParams(temperature=20.0, seed=1, ignore_eos=True)],
    "filtered": [SamplingParams(temperature=20.0, top_k=5, top_p=0.5, min_p=0.1, max_tokens=20, ignore_eos=True)],
    "with extras": [greedy(20, repetition_penalty=1.3, logprobs=9), greedy(9, logit_bias={1: 50.0}, bad_words=[[2]])],
    "the same": [everything(), everything(8, n=2, logprobs=0, prompt_logprobs=None)],
}


@pytest.mark.parametrize("row", [0, 1, 4])
@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_a_seed_in_any_row_with_any_neighbours(row, neighbours):
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    for i in range(5):
        if i == row:
            engine.add_request(PROMPT, everything(), "x")
        engine.add_request(prompt_of(3 + 2 * i, i), neighbours[i % len(neighbours)], f"neighbour {i}")
    assert_as_alone(run_all(engine)["x"])


@pytest.mark.parametrize("with_neighbours", [False, True])
@pytest.mark.parametrize("budget", [3, 8])
def test_a_seed_and_chunks_of_its_prompt(budget, with_neighbours):
    engine = tiny_engine(tokenizer=ascii_tokenizer(), max_num_batched_tokens=budget)
    if with_neighbours:
        engine.add_request(prompt_of(4), greedy(20), "neighbour")
    engine.add_request(PROMPT, everything(), "x")
    assert_as_alone(run_all(engine)["x"])


@pytest.mark.parametrize("num_outputs", [0, 1, 7])
def test_a_seed_that_is_preempted_and_resumed(num_outputs):
    """Thrown out among neighbours, and then alone, and computed again in chunks."""
    engine = tiny_engine(tokenizer=ascii_tokenizer(), max_num_batched_tokens=8)
    engine.add_request(prompt_of(5, 1), greedy(3, presence_penalty=1.0), "neighbour")
    engine.add_request(PROMPT, everything(), "x")
    (request,) = engine.scheduler.waiting["x"].requests
    engine.step()
    for count in (num_outputs, num_outputs + 2):
        while request.num_output_tokens < count:
            engine.step()
        engine.scheduler.preempt_all()
    assert_as_alone(run_all(engine)["x"])
    assert engine.stats().num_preemptions >= 2


def test_a_seed_in_a_pool_that_is_too_small():
    engine = tiny_engine(13, tokenizer=ascii_tokenizer())
    for i in range(3):
        engine.add_request(prompt_of(9, i), greedy(16), f"neighbour {i}")
    engine.add_request(PROMPT, everything(n=3), "x")
    assert_as_alone(run_all(engine)["x"])
    assert engine.stats().num_preemptions > 1


def test_a_seed_after_a_step_that_failed(monkeypatch):
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    engine.add_request(PROMPT, everything(), "x")
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run_with", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert_as_alone(run_all(engine)["x"])


def test_a_seed_and_n_of_them_in_order():
    """Output i is the same for any n above i."""
    ids = [each.token_ids for each in alone(5).outputs]
    assert [each.index for each in alone(5).outputs] == [0, 1, 2, 3, 4]
    assert len(set(map(tuple, ids))) == 5
    for n in (1, 2, 4):
        assert [each.token_ids for each in alone(n).outputs] == ids[:n]
    engine = tiny_engine(tokenizer=ascii_tokenizer(), max_num_batched_tokens=8, max_num_seqs=3)
    engine.add_request(prompt_of(4), greedy(20), "neighbour")
    engine.add_request(PROMPT, everything(n=5), "x")
    assert_as_alone(run_all(engine)["x"])
