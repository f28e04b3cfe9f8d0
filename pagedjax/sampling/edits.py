"""What requests ask to be done to their logits before sampling, as numpy arrays for the rows of one step. Host only."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from pagedjax.scheduling.request import Request

ALL = np.uint32(0xFFFFFFFF)
Bits = UInt32[np.ndarray, "W"]
Rows = list[tuple[int, Request, "_Rules"]]


@dataclass(frozen=True)
class TokenHistory:
    """n tokens of the rows that have penalties, in any order: outputs, of which repeats count, and for a repetition
    penalty the prompt's ids, once each."""

    row: Int32[np.ndarray, "n"]
    token: Int32[np.ndarray, "n"]
    is_output: np.ndarray
    """bool[n]"""
    presence: Float32[np.ndarray, "S"]
    frequency: Float32[np.ndarray, "S"]
    repetition: Float32[np.ndarray, "S"]
    """1 for rows without."""


@dataclass(frozen=True)
class LogitBias:
    """n numbers to be added, each to one logit of one row."""

    row: Int32[np.ndarray, "n"]
    token: Int32[np.ndarray, "n"]
    value: Float32[np.ndarray, "n"]


@dataclass(frozen=True)
class LogitEdits:
    """S rows, the requests that sample in a step and padding after them. None for what no row asks for."""

    bias: LogitBias | None = None
    history: TokenHistory | None = None
    allowed: UInt32[np.ndarray, "S W"] | None = None
    """Bit i % 32 of word i // 32 says whether token i may be sampled; rows without a restriction have all bits set."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return any(x is not None for x in (self.bias, self.history, self.allowed))


@dataclass(eq=False)
class _Rules:
    """What one request asks for, as arrays. They are built once and kept with it: a step costs what changes."""

    bias_tokens: Int32[np.ndarray, "n"]
    bias_values: Float32[np.ndarray, "n"]
    history: array
    """`num_history_prompt` ids of the prompt, then the outputs so far: filled up in each step, copied as bytes."""
    num_history_prompt: int
    allowed: Bits | None
    bad: Bits | None
    """Bad words of one token."""
    bad_after: dict[int, list[tuple[list[int], int]]]
    """The longer ones, as (all ids but the last, the last), by the last but one."""
    early: Bits | None
    """What is banned before min_tokens."""
    latest: tuple[bool, list[int], Bits | None] | None = None
    """Whether it was before min_tokens, the last ids that were banned, and what came of it."""


def build_edits(
    requests: Sequence[Request], num_rows: int, vocab_size: int
) -> tuple[LogitEdits, dict[Request, Exception]]:
    """The edits of the requests that sample in this step, padded to `num_rows` rows.

    And the requests whose `token_mask` failed, with the reason: they have to end, and their rows miss it.
    """
    rows = [
        (row, request, _rules(request, vocab_size))
        for row, request in enumerate(requests)
        if request.params.edits_logits
    ]
    if not rows:
        return LogitEdits(), {}
    masks, failed = _call_token_masks(rows, vocab_size)
    allowed = _build_allowed(rows, masks, num_rows, vocab_size)
    return LogitEdits(_build_bias(rows), _build_history(rows, num_rows), allowed), failed


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """Bits as in `LogitEdits.allowed`, set for these ids."""
    is_set = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view("<u4").astype(np.uint32)


def tokenize_bad_words(
    words: Sequence[str | Sequence[int]], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """`SamplingParams.bad_words` as token ids. A text is banned as it is written at the begin of a word, and after a
    space, as in vLLM: the two are different ids. Raises ValueError for a text without ids in the vocabulary."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            sequences[tuple(map(int, word))] = None
            continue
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            try:
                token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            except TypeError as error:  # what tokenizers raises for a lone surrogate
                raise ValueError(f"bad_words: {word!r} cannot be tokenized: {error}") from error
            if not token_ids or max(token_ids) >= vocab_size:
                raise ValueError(f"bad_words: {word!r} must have tokens, all of the model's vocabulary: {token_ids}")
            sequences[tuple(token_ids)] = None
    return tuple(sequences)


@lru_cache
def _every_bit(vocab_size: int) -> Bits:
    bits = np.full(-(-vocab_size // 32), ALL)
    bits[-1] >>= np.uint32(-vocab_size % 32)
    bits.setflags(write=False)  # all callers have the same one
    return bits


def _rules(request: Request, vocab_size: int) -> _Rules:
    if request.edits_cache is None:
        params, prompt = request.params, request.prompt_token_ids
        bias = params.logit_bias or {}
        prompt_ids = array("i", set(prompt) if params.repetition_penalty != 1 else ())
        single = [word[0] for word in request.bad_word_ids if len(word) == 1]
        bad_after: dict[int, list[tuple[list[int], int]]] = {}
        for word in request.bad_word_ids:
            if len(word) > 1:
                bad_after.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        ends = request.eos_token_ids | request.ignored_eos_token_ids | request.stop_token_ids
        ends = {token_id for token_id in ends if token_id < vocab_size}  # a config may name more than the model has
        request.edits_cache = _Rules(
            bias_tokens=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            history=prompt_ids,
            num_history_prompt=len(prompt_ids),
            allowed=None if params.allowed_token_ids is None else bits_of(params.allowed_token_ids, vocab_size),
            bad=bits_of(single, vocab_size) if single else None,
            bad_after=bad_after,
            early=bits_of(ends, vocab_size) if params.min_tokens and ends else None,
        )
    return request.edits_cache


def _build_bias(rows: Rows) -> LogitBias | None:
    with_bias = [(row, rules) for row, _, rules in rows if len(rules.bias_tokens)]
    if not with_bias:
        return None
    lengths = [len(rules.bias_tokens) for _, rules in with_bias]
    return LogitBias(
        row=np.repeat(np.array([row for row, _ in with_bias], np.int32), lengths),
        token=np.concatenate([rules.bias_tokens for _, rules in with_bias]),
        value=np.concatenate([rules.bias_values for _, rules in with_bias]),
    )


def _build_history(rows: Rows, num_rows: int) -> TokenHistory | None:
    with_history = [(row, request, rules) for row, request, rules in rows if request.params.has_penalties]
    if not with_history:
        return None
    presence, frequency, repetition = np.zeros((3, num_rows), np.float32) + np.array([[0], [0], [1]], np.float32)
    lengths = []  # of prompt and outputs, by turns
    for row, request, rules in with_history:
        history, params = rules.history, request.params
        num_known = len(history) - rules.num_history_prompt
        history.extend(request.token_ids[len(request.prompt_token_ids) + num_known :])
        lengths += [rules.num_history_prompt, len(history) - rules.num_history_prompt]
        presence[row], frequency[row] = params.presence_penalty, params.frequency_penalty
        repetition[row] = params.repetition_penalty
    return TokenHistory(
        row=np.repeat(np.repeat(np.array([row for row, _, _ in with_history], np.int32), 2), lengths),
        token=np.frombuffer(b"".join(rules.history for _, _, rules in with_history), np.int32),
        is_output=np.repeat(np.tile([False, True], len(with_history)), lengths),
        presence=presence,
        frequency=frequency,
        repetition=repetition,
    )


def _call_token_masks(rows: Rows, vocab_size: int) -> tuple[dict[int, Bits], dict[Request, Exception]]:
    """What the hooks return, by row, and the requests whose hook failed."""
    masks: dict[int, Bits] = {}
    failed: dict[Request, Exception] = {}
    for row, request, _ in rows:
        if request.params.token_mask is None:
            continue
        try:
            mask = request.params.token_mask(list(request.prompt_token_ids), request.output_token_ids)
            if mask is not None:
                masks[row] = _checked_mask(mask, vocab_size)
        except Exception as error:  # noqa: BLE001  a user's function: it may raise anything, and ends its request
            failed[request] = error
    return masks, failed


def _checked_mask(mask: Any, vocab_size: int) -> Bits:
    """A copy without bits behind the vocabulary: the hook may fill the same array again for the next request."""
    shape = (-(-vocab_size // 32),)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.shape != shape:
        got = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise ValueError(f"token_mask must return uint32[{shape[0]}] or None, got {got}")
    return mask & _every_bit(vocab_size)


def _build_allowed(
    rows: Rows, masks: dict[int, Bits], num_rows: int, vocab_size: int
) -> UInt32[np.ndarray, "S W"] | None:
    allowed = None
    for row, request, rules in rows:
        bits = _allowed_bits(request, rules, masks.get(row), vocab_size)
        if bits is not None:
            if allowed is None:
                allowed = np.full((num_rows, len(bits)), ALL)
            allowed[row] = bits
    return allowed


def _allowed_bits(request: Request, rules: _Rules, mask: Bits | None, vocab_size: int) -> Bits | None:
    """What one row may sample; None for everything."""
    is_early = request.num_output_tokens < request.params.min_tokens
    token_ids = request.token_ids
    completing = [last for begin, last in rules.bad_after.get(token_ids[-1], ()) if token_ids[-len(begin) :] == begin]
    if mask is not None:
        return _combine(rules, mask, is_early, completing, vocab_size)
    if rules.latest is None or rules.latest[:2] != (is_early, completing):  # most steps ask for what the last one did
        rules.latest = (is_early, completing, _combine(rules, None, is_early, completing, vocab_size))
    return rules.latest[2]


def _combine(rules: _Rules, mask: Bits | None, is_early: bool, completing: list[int], vocab_size: int) -> Bits | None:
    """A row is never left without a token, as one would be sampled all the same and mean nothing: bans give way before
    what is allowed does."""
    bases = [bits for bits in (rules.allowed, mask) if bits is not None]
    bans = [bits for bits in (rules.bad, rules.early if is_early else None) if bits is not None]
    if completing:
        bans.append(bits_of(completing, vocab_size))
    if not bases and not bans:
        return None
    base = np.bitwise_and.reduce(bases) if bases else _every_bit(vocab_size)
    left = base & ~np.bitwise_or.reduce(bans) if bans else base
    return next((bits for bits in (left, base) if bits.any()), None)
