"""From cumulative outputs to what one choice of an answer has that was not sent yet: the same for a stream, which sends
it bit by bit, and for a whole answer, which sends it once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.outputs import CompletionOutput, LogprobsOfPosition
from pagedjax.text.detokenizer import Detokenizer, token_bytes

Json = dict[str, Any]


@dataclass
class ScoredToken:
    """A token with its log-probability, and where it begins in the text of its choice."""

    token_id: int
    entry: LogprobsOfPosition | None
    """None for the first token of an echoed prompt, which has no probability."""
    offset: int


@dataclass
class News:
    """What a choice has got since it was last sent."""

    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class EchoedPrompt:
    """A prompt that its completions begin with."""

    text: str
    token_ids: Sequence[int]


class Choice:
    """How much of a completion was sent. `tokenizer` is given where offsets are wanted, for log-probabilities."""

    def __init__(self, index: int, tokenizer: Any = None, echo: EchoedPrompt | None = None, skip_special: bool = True):
        self.index = index
        self.is_finished = False
        self._echo = echo
        self._base = len(echo.text) if echo else 0
        self._num_chars = self._num_tokens = self._num_scored = self._num_sent = 0
        self._offsets = _Offsets(tokenizer, skip_special) if tokenizer is not None else None
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._waiting: list[ScoredToken] = []

    def news(
        self, completion: CompletionOutput, prompt_logprobs: Sequence[LogprobsOfPosition | None] | None
    ) -> News | None:
        """What to send now; None if there is nothing that can be seen: text may be held back, and with it the
        log-probabilities of tokens that begin in it."""
        text = completion.text[self._num_chars :]
        self._num_chars = len(completion.text)
        if self._echo is not None:
            text = self._echo.text + text
            if self._offsets is not None and prompt_logprobs is not None:
                self._score_prompt(self._echo, prompt_logprobs)
            self._echo = None
        if self._offsets is not None:
            self._score(completion)
        scored = self._scored_up_to(self._base + self._num_chars, all_of_them=completion.finished)
        self.is_finished = completion.finished
        if not (text or scored or completion.finished):
            return None
        token_ids = completion.token_ids[self._num_tokens :]
        self._num_tokens = len(completion.token_ids)
        return News(text, token_ids, scored, completion.finish_reason, completion.stop_reason)

    def _score_prompt(self, echo: EchoedPrompt, entries: Sequence[LogprobsOfPosition | None]) -> None:
        offsets = _Offsets(self._tokenizer, self._skip_special)
        for token_id, entry in zip(echo.token_ids, entries, strict=True):
            # A text prompt is echoed as it was sent, which its tokens may say in other words.
            self._waiting.append(ScoredToken(token_id, entry, min(offsets.next(token_id), self._base)))

    def _score(self, completion: CompletionOutput) -> None:
        assert self._offsets is not None
        entries = completion.logprobs or []
        for token_id, entry in zip(completion.token_ids[self._num_scored :], entries[self._num_scored :], strict=False):
            self._waiting.append(ScoredToken(token_id, entry, self._base + self._offsets.next(token_id)))
            self._num_scored += 1

    def _scored_up_to(self, end: int, all_of_them: bool) -> list[ScoredToken]:
        num_ready = len(self._waiting)
        if not all_of_them:
            num_ready = next((i for i, token in enumerate(self._waiting) if token.offset >= end), num_ready)
        ready, self._waiting = self._waiting[:num_ready], self._waiting[num_ready:]
        for token in ready:
            token.offset = min(token.offset, end)  # behind a stop string the text has ended
        return ready


@dataclass
class _Offsets:
    """Where each of a run of tokens begins in their text."""

    tokenizer: Any
    skip_special: bool
    detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=self.skip_special)

    def next(self, token_id: int) -> int:
        begin = len(self.detokenizer.text)
        self.detokenizer.append([token_id])
        return begin


def completion_logprobs(scored: Sequence[ScoredToken], tokenizer: Any, num_top: int) -> Json:
    """OpenAI's `logprobs` of completions: lists, one entry per token."""
    return {
        "tokens": [token_name(tokenizer, token.token_id) for token in scored],
        "token_logprobs": [None if token.entry is None else token.entry[token.token_id].logprob for token in scored],
        "top_logprobs": [_top_by_name(token, tokenizer, num_top) for token in scored],
        "text_offset": [token.offset for token in scored],
    }


def chat_logprobs(scored: Sequence[ScoredToken], tokenizer: Any, num_top: int) -> Json:
    """OpenAI's `logprobs` of chat completions: a list of objects, so that equal texts do not meet."""

    def described(token_id: int, logprob: float) -> Json:
        name = token_name(tokenizer, token_id)
        return {"token": name, "logprob": logprob, "bytes": list(token_bytes(tokenizer, token_id))}

    content = []
    for token in scored:
        assert token.entry is not None
        top = [described(token_id, value.logprob) for token_id, value in _most_likely(token.entry, num_top)]
        content.append({**described(token.token_id, token.entry[token.token_id].logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_name(tokenizer: Any, token_id: int) -> str:
    """A token as text; one that is not whole characters as "bytes:\\xe2\\x80", as OpenAI writes it."""
    raw = token_bytes(tokenizer, token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _most_likely(entry: LogprobsOfPosition, num_top: int) -> list[tuple[int, Any]]:
    return [(token_id, value) for token_id, value in entry.items() if value.rank <= num_top][:num_top]


def _top_by_name(token: ScoredToken, tokenizer: Any, num_top: int) -> dict[str, float] | None:
    """By text, as OpenAI has it, with the token itself wherever it ranks; a text that is taken gives way to an id."""
    if token.entry is None:
        return None
    chosen = {token_id: value.logprob for token_id, value in _most_likely(token.entry, num_top)}
    chosen[token.token_id] = token.entry[token.token_id].logprob
    named: dict[str, float] = {}
    for token_id, logprob in chosen.items():
        name = token_name(tokenizer, token_id)
        named[f"token_id:{token_id}" if name in named else name] = logprob
    return named
