"""Log-probabilities as users get them: of outputs (case B32), of prompts (B33), and `LLM.score` (B60, engine part).

The expected values are the log-softmax of the dense model's logits, teacher-forced.
"""

import copy
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax
from tiny_engine import (
    LOGIT_TOLERANCE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ascii_tokenizer,
    assert_clean,
    dense_logits,
    fill_pool,
    greedy,
    prompt_of,
    run_all,
    tiny_engine,
    tiny_llm,
)
from tokenizers.processors import TemplateProcessing

from pagedjax.outputs import LogprobsOfPosition, RequestOutput
from pagedjax.sampling.params import SamplingParams

PROMPT = prompt_of(11)


def expected_logprobs(token_ids: list[int]) -> np.ndarray:
    """f64[len - 1, V]: row i is what the model says of position i + 1."""
    return log_softmax(dense_logits(token_ids).astype(np.float64), axis=-1)[:-1]


def assert_entry(entry: LogprobsOfPosition | None, token_id: int, expected: np.ndarray, k: int) -> None:
    """The k most likely tokens in that order, the token itself, true ranks, right values."""
    assert entry is not None
    assert token_id in entry
    assert len(entry) in (k, k + 1)
    values = [each.logprob for each in entry.values()]
    assert values == sorted(values, reverse=True)
    best = np.sort(expected)[::-1][:k]
    np.testing.assert_allclose(values[:k], best, atol=2 * LOGIT_TOLERANCE)
    for id_, each in entry.items():
        assert abs(each.logprob - expected[id_]) <= 2 * LOGIT_TOLERANCE
        near = np.abs(expected - expected[id_]) <= 2 * LOGIT_TOLERANCE  # whose order rounding may change
        larger = expected > expected[id_]
        assert 1 + (larger & ~near).sum() <= each.rank <= 1 + (larger | near).sum()


def assert_outputs(output: RequestOutput, k: int, index: int = 0) -> None:
    completion = output.outputs[index]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    rows = expected_logprobs([*output.prompt_token_ids, *completion.token_ids])[len(output.prompt_token_ids) - 1 :]
    for entry, token_id, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        assert_entry(entry, token_id, row, k)
    total = rows[np.arange(len(rows)), completion.token_ids].sum()
    assert completion.cumulative_logprob == pytest.approx(total, abs=len(rows) * 2 * LOGIT_TOLERANCE)


def assert_prompt(output: RequestOutput, k: int) -> None:
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(output.prompt_token_ids)
    assert entries[0] is None
    rows = expected_logprobs(output.prompt_token_ids) if len(entries) > 1 else []
    for entry, token_id, row in zip(entries[1:], output.prompt_token_ids[1:], rows, strict=True):
        assert_entry(entry, token_id, row, k)


# --- of outputs


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB_SIZE, -1])
@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_b32_count_order_and_rank(k, temperature):
    engine = tiny_engine()
    fill_pool(engine, np.nan)
    engine.add_request(PROMPT, SamplingParams(temperature=temperature, seed=1, logprobs=k, ignore_eos=True), "x")
    assert_outputs(run_all(engine)["x"], VOCAB_SIZE if k == -1 else k)


def test_b32_values_do_not_depend_on_filters_or_neighbours():
    """Raw ones are the model's own, whatever is drawn from; the second of the best two is drawn half of the time."""
    engine = tiny_engine()
    filtered = SamplingParams(temperature=50.0, top_k=2, logprobs=3, seed=4, max_tokens=12, ignore_eos=True)
    engine.add_request(PROMPT, filtered, "filtered")
    engine.add_request(prompt_of(5, 1), greedy(9, logprobs=7), "greedy")
    engine.add_request(prompt_of(7, 2), greedy(9), "without")
    finished = run_all(engine)
    assert_outputs(finished["filtered"], 3)
    assert_outputs(finished["greedy"], 7)
    assert finished["without"].outputs[0].logprobs is None
    assert finished["without"].outputs[0].cumulative_logprob is None
    assert all(each.rank <= 2 for e in finished["filtered"].outputs[0].logprobs or [] for each in list(e.values())[:2])


def test_the_token_that_ends_the_output_has_an_entry_too():
    (stop,) = greedy_ids(1)
    engine = tiny_engine()
    engine.add_request(PROMPT, SamplingParams(temperature=0.0, logprobs=2, stop_token_ids=[stop]), "x")
    output = run_all(engine)["x"]
    assert output.outputs[0].token_ids == [stop]
    assert_outputs(output, 2)


def greedy_ids(n: int) -> list[int]:
    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(n), "x")
    return run_all(engine)["x"].outputs[0].token_ids


def test_every_completion_has_its_own():
    engine = tiny_engine()
    engine.add_request(PROMPT, SamplingParams(n=3, temperature=30.0, seed=1, logprobs=2, ignore_eos=True), "x")
    output = run_all(engine)["x"]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for index in range(3):
        assert_outputs(output, 2, index)


def test_they_survive_preemption():
    engine = tiny_engine(14)
    for i, length in enumerate((5, 19, 9)):
        engine.add_request(prompt_of(length, i), greedy(12, logprobs=2), str(i))
    finished = run_all(engine)
    assert engine.stats().num_preemptions > 0
    for output in finished.values():
        assert_outputs(output, 2)


def test_processed_logprobs_are_of_what_is_drawn_from():
    engine = tiny_engine(logprobs_mode="processed_logprobs")
    options = {"temperature": 20.0, "top_k": 3, "seed": 2, "logprobs": 5, "ignore_eos": True}
    engine.add_request(PROMPT, SamplingParams(**options), "x")
    output = run_all(engine)["x"]
    rows = dense_logits([*PROMPT, *output.outputs[0].token_ids])[len(PROMPT) - 1 : -1].astype(np.float64)
    for entry, token_id, row in zip(output.outputs[0].logprobs or [], output.outputs[0].token_ids, rows, strict=True):
        best = np.argsort(row)[::-1][:3]
        expected = dict(zip(best.tolist(), log_softmax(row[best] / 20.0), strict=True))
        assert token_id in expected
        assert {i: each.logprob for i, each in list(entry.items())[:3]} == pytest.approx(expected, abs=LOGIT_TOLERANCE)
        assert all(each.logprob == -math.inf for each in list(entry.values())[3:])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"logprobs_mode must be one of raw_logprobs, processed_logprobs, got 'raw'"):
        tiny_llm(logprobs_mode="raw")


def test_tokens_as_text():
    output = tiny_llm().generate("Hi", greedy(3, logprobs=1))[0]
    for entry in output.outputs[0].logprobs or []:
        assert {each.decoded_token for each in entry.values()} == {chr(i) for i in entry}


# --- of prompts


@pytest.mark.parametrize("budget", [3, 4, 24])
@pytest.mark.parametrize("length", [1, 2, 11])
def test_b33_chunks(budget, length):
    engine = tiny_engine(max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    fill_pool(engine, np.nan)
    engine.add_request(prompt_of(length), greedy(4, prompt_logprobs=2, logprobs=1), "x")
    engine.add_request(prompt_of(9, 1), greedy(4), "plain")
    finished = run_all(engine)
    assert_prompt(finished["x"], 2)
    assert_outputs(finished["x"], 1)
    assert finished["plain"].prompt_logprobs is None


def test_b33_preempted_in_mid_prompt():
    """The request loses its blocks after some of its prompt: what is known is not computed or told twice."""
    engine = tiny_engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(prompt_of(11), greedy(3, prompt_logprobs=2), "x")
    engine.step()
    engine.step()
    engine.scheduler.preempt_all()
    output = run_all(engine)["x"]
    assert engine.stats().num_preemptions == 1
    assert_prompt(output, 2)


def test_b33_grows_with_the_chunks_and_only_once_for_n():
    engine = tiny_engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(prompt_of(6), SamplingParams(n=2, seed=1, prompt_logprobs=0, ignore_eos=True, max_tokens=3), "x")
    output = run_all(engine)["x"]
    assert_prompt(output, 0)


# --- score


def test_score_of_texts_and_continuations():
    llm = tiny_llm()
    prompts, continuations = ["The cat", "A", "Once upon"], [" sat", " dog barks", " a time"]
    for prompt, continuation, score in zip(prompts, continuations, llm.score(prompts, continuations), strict=True):
        token_ids = [ord(char) for char in prompt + continuation]
        rows = expected_logprobs(token_ids)[len(prompt) - 1 :]
        expected = rows[np.arange(len(continuation)), token_ids[len(prompt) :]]
        assert score.token_ids == token_ids[len(prompt) :]
        np.testing.assert_allclose(score.logprobs, expected, atol=2 * LOGIT_TOLERANCE)
        assert score.total == sum(score.logprobs)
        assert not score.is_greedy
    assert_clean(llm.engine)


def test_score_without_continuations_and_with_ids():
    llm = tiny_llm()
    (whole,) = llm.score([PROMPT])
    (part,) = llm.score([PROMPT[:4]], [PROMPT[4:]])
    assert (whole.token_ids, part.token_ids) == (PROMPT[1:], PROMPT[4:])
    np.testing.assert_allclose(whole.logprobs[3:], part.logprobs, atol=2 * LOGIT_TOLERANCE)


def test_score_knows_what_is_greedy():
    ids = greedy_ids(5)
    (best,) = tiny_llm().score([PROMPT], [ids])
    (other,) = tiny_llm().score([PROMPT], [[*ids[:4], (ids[4] + 1) % VOCAB_SIZE]])
    assert (best.is_greedy, other.is_greedy) == (True, False)


def test_b60_a_prompt_as_long_as_the_model_allows():
    """Nothing is generated, so the prompt may fill the model's length, and the pool."""
    prompt = prompt_of(MAX_MODEL_LEN)
    (score,) = tiny_llm().score([prompt])
    assert len(score.logprobs) == MAX_MODEL_LEN - 1
    engine = tiny_engine(2)
    engine.add_request(prompt_of(8), SamplingParams(max_tokens=0, prompt_logprobs=0), "x")
    output = run_all(engine)["x"]
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert engine.stats().num_output_tokens == 0
    with pytest.raises(ValueError, match="9 tokens"):
        engine.add_request(prompt_of(9), SamplingParams(max_tokens=0, prompt_logprobs=0))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((["A"],), r"prompts\[0\]: 1 tokens leave nothing to score"),
        ((["AB"], [""]), r"prompts\[0\] or its continuation: prompt is empty"),
        ((["A", "B"], ["C"]), "continuations: 1 of them for 2 prompts"),
        ((["AB", ""],), r"prompts\[1\] or its continuation: prompt is empty"),
        ((["AB"], [[VOCAB_SIZE]]), r"prompts\[0\] or its continuation: .*vocabulary"),
    ],
)
def test_what_cannot_be_scored(args: Any, message):
    llm = tiny_llm()
    with pytest.raises(ValueError, match=message):
        llm.score(*args)
    assert_clean(llm.engine)


def test_max_tokens_0_without_prompt_logprobs_computes_the_prompt_alone():
    engine = tiny_engine()
    engine.add_request(prompt_of(9), SamplingParams(max_tokens=0), "x")
    output = run_all(engine)["x"]
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert output.prompt_logprobs is None
    assert (engine.stats().num_steps, engine.stats().num_output_tokens) == (1, 0)


def with_special_tokens(*, ends: bool) -> Any:
    """The ascii tokenizer with a begin-of-sequence id, 1, before every text, and an end-of-sequence id, 2, behind."""
    tokenizer = copy.deepcopy(ascii_tokenizer())
    template = "<bos> $A <eos>" if ends else "<bos> $A"
    special = [("<bos>", 1), ("<eos>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("ends", [False, True])
def test_special_tokens_stand_before_prompts_alone(ends):
    llm = tiny_llm(tokenizer=with_special_tokens(ends=ends))
    (texts,) = llm.score("ab", "cd")
    (ids_and_text,) = llm.score([[1, 97, 98]], ["cd"])
    (text_and_ids,) = llm.score(["ab"], [[99, 100]])
    (without_prompt_text,) = llm.score([[1]], ["cd"])
    for score in (texts, ids_and_text, text_and_ids, without_prompt_text):
        assert score.token_ids == [99, 100]
    np.testing.assert_allclose(texts.logprobs, ids_and_text.logprobs, atol=2 * LOGIT_TOLERANCE)
    np.testing.assert_allclose(texts.logprobs, text_and_ids.logprobs, atol=2 * LOGIT_TOLERANCE)


def test_a_tokenizer_that_fails_on_one_token_takes_nothing_from_others(monkeypatch):
    tokenizer = copy.deepcopy(ascii_tokenizer())
    bad = greedy_ids(3)[2]
    decode = tokenizer.decode

    def failing(ids, *args, **kwargs):
        if bad in np.ravel(ids):
            raise RuntimeError("no such token")
        return decode(ids, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", failing)
    engine = tiny_engine(tokenizer=tokenizer)
    engine.add_request(PROMPT, greedy(5, logprobs=0, detokenize=False), "bad")
    engine.add_request(prompt_of(5, 1), greedy(5, logprobs=0, detokenize=False), "good")
    engine.add_request(prompt_of(5, 1), greedy(3, detokenize=False), "short")
    finished = run_all(engine)
    assert set(finished) == {"bad", "good", "short"}
    assert_outputs(finished["bad"], 0)
    assert_outputs(finished["good"], 0)
    texts = [each.decoded_token for entry in finished["bad"].outputs[0].logprobs or [] for each in entry.values()]
    assert None in texts
