"""One sequence on its way through the engine: its tokens, its block table and its state. Host only."""

import enum
from dataclasses import dataclass, field
from typing import Any

from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.table import BlockTable
from pagedjax.sampling.params import SamplingParams

NO_BLOCKS = BlockTable(BlockAllocator(0), 1)
"""The table of a request that has not been admitted yet: as good as freed."""
NO_BLOCKS.free()


class RequestStatus(enum.Enum):
    """Where a request is. A preempted one waits again, in its old place: with nothing, or swapped out, with its KV in
    the host pool."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API plus "abort" and "error"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


Arrival = tuple[int | float, ...]


@dataclass(eq=False, slots=True)
class HeldKV:
    """Tokens whose KV stays in the pool for those who will go on from them, unless the room is needed."""

    token_ids: list[int]
    block_table: BlockTable = NO_BLOCKS
    """Covers the first of the tokens, often all but the last; freed when the room was needed."""
    is_pinned: bool = False
    """Whether it stays in any case."""
    computed_by: "Request | None" = None
    """The request that computes it, if it is pinned."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, what was generated so far, and how much of both has its KV in the pool.

    There is no prefill and no decode phase: `num_computed_tokens` catches up with `num_tokens`, and a step that
    brings it there samples the next token. After a preemption it starts again from 0, outputs included, or goes on from
    where it was when its blocks come back.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: Arrival
    """Place in line, unique; the smallest goes first: by time, and by priority if the policy says so. A fork stands
    right behind its parent."""
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
    num_pending_tokens: int = 0
    """Those at the end of `token_ids` that are on the device alone: the host has placeholders (see `Scheduler`)."""
    num_computed_tokens: int = 0
    block_table: BlockTable = NO_BLOCKS
    """Where its KV is, in the pool or, while it is swapped out, in the host pool. It covers `num_computed_tokens`, and
    during a step what that computes."""
    block_names: list[bytes] = field(default_factory=list)
    """Names of its first full blocks, as far as they were needed: they depend on the tokens alone."""
    num_published_blocks: int = 0
    """Blocks of its table that can be found by their names, or need not be, as others with the same content can."""
    num_cached_tokens: int = 0
    """Prompt tokens that did not have to be computed, as their KV was there."""
    source: HeldKV | None = None
    """Where the KV of its first tokens may be found."""
    keeps_kv: bool = False
    """Whether its KV stays in the pool when it has ended: as `kept`."""
    kept: HeldKV | None = None
    generates: bool = field(init=False)
    """Whether it samples at all, or only wants its prompt computed."""
    group: Any = field(init=False)
    """The `SequenceGroup` that it is in."""
    fork_of: "Request | None" = None
    """Whose blocks it will share, once that one has computed the tokens that both have; until then it has none."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or the string that stopped it; None for an end-of-sequence token or another reason."""
    num_preemptions: int = 0
    num_forks: int = 0
    edits_cache: Any = None
    """What `sampling.edits` keeps between steps."""
    num_known_prompt_logprobs: int = 1
    """Prompt positions whose log-probabilities are known, or not wanted, as the first, which has none. A preemption
    does not lose them."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.prompt_token_ids)
        self.generates = self.params.max_tokens != 0

    @property
    def max_cached_tokens(self) -> int:
        """How much of its KV may come from elsewhere: its last token is computed, to sample the next one, and so are
        those that log-probabilities of the prompt are read from."""
        if self.params.prompt_logprobs is None or self.sample_index != 0:
            return self.num_tokens - 1
        return min(self.num_tokens, self.num_known_prompt_logprobs) - 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, pending ones included."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens but for pending ones, a copy."""
        return self.token_ids[len(self.prompt_token_ids) : len(self.token_ids) - self.num_pending_tokens]

    @property
    def is_all_computed(self) -> bool:
        """Whether only its last result is to come: it takes part in no more step."""
        return not self.num_left or (self.generates and len(self.token_ids) >= self.max_num_tokens)

    @property
    def num_left(self) -> int:
        """Tokens whose KV is not in the pool yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has left the scheduler for good."""
        return self.status is RequestStatus.FINISHED
