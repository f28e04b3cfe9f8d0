"""What the user gets back: plain data with vLLM's names. Host only."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """How likely a token was at its position."""

    logprob: float
    """Natural logarithm of its probability, of the whole vocabulary's log-softmax."""
    rank: int
    """1 for the most likely token; equal ones share the best rank."""
    decoded_token: str | None = None
    """The token by itself as text, which may be half a character; None without a tokenizer."""


LogprobsOfPosition = dict[int, Logprob]
"""By token id, most likely first: as many as were asked for, and the token that stands there wherever it ranks."""


@dataclass
class CompletionOutput:
    """One of the n completions of a request."""

    index: int
    text: str
    """Text so far. It never ends inside a character or inside a possible stop string before the request ends."""
    token_ids: list[int]
    """Generated ids so far, with the id that stopped it; ids after a stop string's last token are not generated."""
    finish_reason: str | None = None
    """None while running; "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string; None for end-of-sequence and for other reasons."""
    logprobs: list[LogprobsOfPosition] | None = None
    """One entry per id in `token_ids`; None unless asked for."""
    cumulative_logprob: float | None = None
    """The sum over `token_ids`; None unless logprobs were asked for, or it is a beam search's."""
    score: float | None = None
    """What a beam search ranks its outputs by: `cumulative_logprob` over (number of tokens ** length_penalty)."""

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request as seen after a step: cumulative, so that the last one is the result."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None
    """One entry per prompt token, None up to `prompt_logprobs_start`; grows with the chunks of the prompt. None unless
    asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, as their KV was in the pool already: cached, pinned or held."""


@dataclass(frozen=True)
class ScoreOutput:
    """How likely a model finds a continuation, or a text from its second token on."""

    token_ids: list[int]
    """The tokens that are scored."""
    logprobs: list[float]
    """Of each, given all before it."""
    is_greedy: bool
    """Whether each of them is a most likely token."""

    @property
    def total(self) -> float:
        """The log-probability of all of them together."""
        return sum(self.logprobs)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine's start, and its pool and queues as they are now."""

    num_running: int
    num_waiting: int
    """Requests that wait for their first step or, preempted, for their next one."""
    num_blocks: int
    """Usable blocks of the pool."""
    num_free_blocks: int
    peak_blocks_used: int
    """Most blocks in use at one time."""
    num_block_references: int
    """Blocks that would be in use if none were shared: each counts once for each of its holders."""
    num_cached_blocks: int
    """Blocks that the prefix cache can find, in use or free."""
    num_block_copies: int
    """Blocks copied on write."""
    prefix_cache_query_tokens: int
    """Tokens of the requests that the prefix cache was asked for."""
    prefix_cache_hit_tokens: int
    """Those of them that did not have to be computed."""
    num_preemptions: int
    """Sequences that lost their blocks: to make room, or with a step that failed or was interrupted."""
    num_swap_blocks: int
    """Blocks of the host pool."""
    num_free_swap_blocks: int
    num_swapped_out_blocks: int
    """Blocks that went to the host pool so far."""
    num_swapped_in_blocks: int
    """Blocks that came back so far."""
    num_steps: int
    num_finished: int
    """Requests that ended, aborted ones included; the n completions of one request count once."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_programs: int
    """Shapes of steps that were compiled, or read from the persistent compilation cache."""
