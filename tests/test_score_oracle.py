"""`LLM.score` on a real model: SmolLM2-135M's log-likelihoods of fifty texts in f32 are transformers'."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import log_softmax

from pagedjax.llm import LLM
from pagedjax.models.load import load

torch = pytest.importorskip("torch", reason="torch is the oracle")

from test_smollm2_oracle import MODEL, PROMPTS, TOLERANCE, oracle_from  # noqa: E402  it needs torch

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
NUM_TEXTS, MAX_TOKENS = 50, 200
TOTAL_TOLERANCE = 1e-5
"""Relative, of a text's log-likelihood: the largest difference seen is 2e-6. Single tokens have `TOLERANCE`, that of
the logits that they come from: the largest difference seen is 1.0e-4."""


class Scored(NamedTuple):
    """Texts, the model under test, and transformers' log-probabilities of each text's tokens from the second on."""

    llm: LLM
    texts: list[str]
    token_ids: list[list[int]]
    logprobs: list[np.ndarray]


def paragraphs() -> Iterator[str]:
    """Of the licence, and then of the project's own text."""
    for name in ("LICENSE", "CONTRIBUTING.md"):
        for paragraph in (ROOT / name).read_text().split("\n\n"):
            yield re.sub(r"\s+", " ", paragraph).strip()


def oracle_logprobs(oracle: Any, token_ids: list[list[int]]) -> list[np.ndarray]:
    """Padded behind, which causal attention does not see; four of similar lengths at a time."""
    results: dict[int, np.ndarray] = {}
    by_length = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    for start in range(0, len(by_length), 4):
        group = by_length[start : start + 4]
        width = len(token_ids[group[-1]])
        with torch.no_grad():
            logits = oracle(torch.tensor([token_ids[i] + [0] * (width - len(token_ids[i])) for i in group])).logits
        for i, rows in zip(group, logits.numpy(), strict=True):
            targets = np.array(token_ids[i][1:])
            every = log_softmax(rows[: len(targets)].astype(np.float64), axis=-1)
            results[i] = every[np.arange(len(targets)), targets]
    return [results[i] for i in range(len(token_ids))]


@pytest.fixture(scope="module")
def scored() -> Scored:
    model, params, tokenizer = load(MODEL, dtype="float32")
    texts = [prompt for prompt in PROMPTS[1:] if isinstance(prompt, str)]  # the first has one token: nothing to score
    fitting = (text for text in paragraphs() if 2 <= len(tokenizer(text)["input_ids"]) <= MAX_TOKENS)
    texts += [next(fitting) for _ in range(NUM_TEXTS - len(texts))]
    token_ids = [tokenizer(text)["input_ids"] for text in texts]
    llm = LLM(model, params=params, tokenizer=tokenizer, max_model_len=256, warm_up=False, check_integrity=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two, which wait for each other in a loop, take 9 times as long on a busy machine
    try:
        return Scored(llm, texts, token_ids, oracle_logprobs(oracle_from(model.config, params), token_ids))
    finally:
        torch.set_num_threads(num_threads)


def assert_near(ours: list[float], total: float, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    assert total == pytest.approx(theirs.sum(), rel=TOTAL_TOLERANCE, abs=TOLERANCE)


def test_texts_differ(scored):
    assert len(set(scored.texts)) == NUM_TEXTS
    lengths = set(map(len, scored.token_ids))
    assert len(lengths) >= 25
    assert max(lengths) > 180


def test_score_equals_transformers(scored):
    for token_ids, theirs, score in zip(scored.token_ids, scored.logprobs, scored.llm.score(scored.texts), strict=True):
        assert score.token_ids == token_ids[1:]
        assert_near(score.logprobs, score.total, theirs)
    assert scored.llm.stats().num_free_blocks == scored.llm.stats().num_blocks


@pytest.mark.parametrize("where", ["before a word", "inside a word"])
def test_score_of_continuations_equals_transformers(scored, where):
    """Of every fourth text, split in the middle: scored is what the tokens of its first half do not cover."""
    chosen = [i for i, text in enumerate(scored.texts) if " " in text[len(text) // 2 :]][::4]
    splits = [text.index(" ", len(text) // 2) for text in (scored.texts[i] for i in chosen)]
    if where == "inside a word":
        splits = [split + 2 for split in splits]
    prompts = [scored.texts[i][:split] for i, split in zip(chosen, splits, strict=True)]
    continuations = [scored.texts[i][split:] for i, split in zip(chosen, splits, strict=True)]
    assert len(chosen) > 10
    num_joined = 0
    for i, prompt, score in zip(chosen, prompts, scored.llm.score(prompts, continuations), strict=True):
        prompt_ids, token_ids = scored.llm.tokenizer(prompt)["input_ids"], scored.token_ids[i]
        assert score.token_ids == token_ids[len(prompt_ids) :]
        assert_near(score.logprobs, score.total, scored.logprobs[i][len(prompt_ids) - 1 :])
        num_joined += prompt_ids != token_ids[: len(prompt_ids)]
    assert (num_joined > 0) == (where == "inside a word")
