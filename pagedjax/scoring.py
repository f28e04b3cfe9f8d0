"""What `LLM.score` scores: where a continuation begins, among the tokens of it and of its prompt."""

from typing import Any

from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput, ScoreOutput
from pagedjax.scheduling.sequences import Sequence as HeldSequence


def split_for_score(engine: LLMEngine, index: int, prompt: Any, continuation: Any) -> tuple[list[int], int]:
    """All token ids, and how many of them are not scored."""
    try:
        text, token_ids = engine.requests.tokenize(prompt)
        start = 1
        if continuation is not None:
            token_ids, start = _join(engine, text, token_ids, continuation)
    except ValueError as error:
        raise ValueError(f"prompts[{index}] or its continuation: {error}") from error
    if start >= len(token_ids):
        raise ValueError(f"prompts[{index}]: {len(token_ids)} tokens leave nothing to score after the first")
    return token_ids, start


def _join(engine: LLMEngine, text: str | None, token_ids: list[int], continuation: Any) -> tuple[list[int], int]:
    """A prompt and what follows it, and where that begins."""
    if isinstance(continuation, HeldSequence):
        raise ValueError("a continuation is text or token ids, such as sequence.output.token_ids, not a Sequence")
    is_text = isinstance(continuation, str) and continuation != ""
    front: list[int] = []
    if text is not None:  # what a tokenizer puts behind a text goes, as more of it follows
        front = _special_front(token_ids, bare := _bare_ids(engine, text))
        token_ids = front + bare
    start = len(token_ids)
    if text is not None and is_text:
        whole = front + _bare_ids(engine, text + continuation)
        return whole, max(1, min(start, len(whole) - 1))
    return token_ids + (
        _bare_ids(engine, continuation) if is_text else engine.requests.tokenize(continuation)[1]
    ), start


def _bare_ids(engine: LLMEngine, text: str) -> list[int]:
    """A text's ids without begin- and end-of-sequence ids, as a part of a longer one has them."""
    if engine.tokenizer is None:
        raise ValueError("text needs a tokenizer, and this model has none: pass token ids")
    token_ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return engine.requests.tokenize(token_ids)[1] if token_ids else []


def _special_front(token_ids: list[int], bare: list[int]) -> list[int]:
    """What a tokenizer puts before a text, such as a begin-of-sequence id."""
    starts = range(len(token_ids) - len(bare) + 1)
    start = next((i for i in starts if token_ids[i : i + len(bare)] == bare), 0) if bare else 1
    return token_ids[:start]


def score_of(output: RequestOutput, start: int) -> ScoreOutput:
    """What a prompt's log-probabilities say of its tokens from `start` on."""
    token_ids, entries = output.prompt_token_ids[start:], (output.prompt_logprobs or [])[start:]
    scored = [entry[token] for entry, token in zip(entries, token_ids, strict=True) if entry is not None]
    return ScoreOutput(token_ids, [each.logprob for each in scored], all(each.rank == 1 for each in scored))
