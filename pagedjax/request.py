"""One sequence on its way through the engine: its tokens, its block table and its state. Host only."""

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

from pagedjax.sampling.params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is. A preempted request waits again, in front of those that never ran."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API plus "abort" and "error"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, what was generated so far, and how much of both has its KV in the pool.

    There is no prefill and no decode phase: `num_computed_tokens` catches up with `num_tokens`, and a step that
    brings it there samples the next token. After a preemption it starts again from 0, outputs included.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    """Position in the order of arrival, unique; the smallest is the oldest."""
    max_num_tokens: int
    """Prompt and output together end here with finish reason "length"."""
    seed: int
    """64-bit unsigned seed of the random stream."""
    sample_index: int = 0
    """Which of the n completions of the user's request this is; part of the random key."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids; empty with `ignore_eos`."""
    stop_token_ids: frozenset[int] = frozenset()
    """The caller's own: one of these that ends the request is its `stop_reason`."""
    ignored_eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids with `ignore_eos`: like the others, they do not come before `min_tokens`."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as token ids."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and outputs."""
    num_computed_tokens: int = 0
    block_table: array = field(default_factory=lambda: array("i"))
    """Block ids in order of position, as int32: `build_batch` copies tables as bytes, whatever their length."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or the string that stopped it; None for an end-of-sequence token or another reason."""
    num_preemptions: int = 0
    edits_cache: Any = None
    """What `sampling.edits` keeps between steps."""
    num_known_prompt_logprobs: int = 1
    """Prompt positions whose log-probabilities are known; the first has none. A preemption does not lose them."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def generates(self) -> bool:
        """Whether it samples at all, or only wants to know about its prompt."""
        return self.params.max_tokens != 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far, a copy."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        """Whether it has left the scheduler for good."""
        return self.status is RequestStatus.FINISHED
