"""What the user gets back: plain data with vLLM's names. Host only."""

from dataclasses import dataclass, field


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
