"""How long a step takes on the machine that is simulated, as a function of what the step computes. Host only."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from pagedjax.sampling.checks import check_float

MAX_SECONDS = 1e9
"""Of a step or a request: more is surely a mistake of units."""


class StepLoad(NamedTuple):
    """What a step computes."""

    num_tokens: int
    """Tokens that go through the model: one for each decode, and chunks of prompts."""
    num_sequences: int
    """Sequences that they belong to, which attention and sampling have a row for each."""
    num_context_tokens: int
    """Tokens whose KV attention reads: each sequence's, up to the last one that this step computes."""
    num_swapped_blocks: int = 0
    """Blocks that move to the host or back, with swap."""


StepTime = Callable[[StepLoad], float]
"""Seconds that a step takes, more than 0."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step time that is linear in its load; fit it to steps that were measured.

    A decoding model is bound by reading its weights (`base_s`), then by its tokens' products and the KV that is read.
    Raises ValueError that names the field.
    """

    base_s: float
    """Seconds of every step: weights, launches, the host."""
    s_per_token: float = 0.0
    s_per_sequence: float = 0.0
    s_per_context_token: float = 0.0
    s_per_swapped_block: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_float(field.name, getattr(self, field.name), 0.0, MAX_SECONDS)
        if not self.base_s > 0:
            raise ValueError(f"base_s must be more than 0, got {self.base_s!r}")

    def __call__(self, load: StepLoad) -> float:
        return (
            self.base_s
            + self.s_per_token * load.num_tokens
            + self.s_per_sequence * load.num_sequences
            + self.s_per_context_token * load.num_context_tokens
            + self.s_per_swapped_block * load.num_swapped_blocks
        )
