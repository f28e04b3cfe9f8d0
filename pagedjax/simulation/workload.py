"""The traffic of a simulation: when requests come, how long they are and what their prompts share. Host only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from pagedjax.sampling.checks import check_float, check_int
from pagedjax.simulation.cost import MAX_SECONDS

MAX_TOKEN_ID = 2**29 - 1
"""Of prompts: ids beyond it stand for what is like nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRequest:
    """One request as far as its text does not matter. Raises ValueError that names the field."""

    arrival_s: float
    """Seconds after the start."""
    prompt: int | Sequence[int]
    """Its number of tokens, of a prompt that shares nothing with others, or the token ids themselves, 0 to 2**29 - 1,
    for the prefix cache to find what it has in common with others."""
    output_len: int
    """Tokens that it generates, in each of its completions. They are like nothing in other requests."""
    n: int = 1
    """Completions of the prompt, which share its blocks."""

    def __post_init__(self) -> None:
        check_float("arrival_s", self.arrival_s, 0.0, MAX_SECONDS)
        if isinstance(self.prompt, Sequence) and not isinstance(self.prompt, str | bytes):
            is_ids = all(isinstance(i, Integral) and not isinstance(i, bool) for i in self.prompt)
            if not is_ids or not self.prompt or min(self.prompt) < 0 or max(self.prompt) > MAX_TOKEN_ID:
                raise ValueError(
                    f"prompt must be token ids in [0, {MAX_TOKEN_ID}], at least one, got {self.prompt!r:.80}"
                )
        else:
            check_int("prompt", self.prompt, 1)
        check_int("output_len", self.output_len, 1)
        check_int("n", self.n, 1, 4096)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) if isinstance(self.prompt, Sequence) else int(self.prompt)


def poisson_requests(
    lengths: Iterable[Sequence[int]], request_rate: float, *, seed: int = 0, n: int = 1
) -> Iterator[SimulatedRequest]:
    """Requests of these (prompt, output) lengths in tokens, in this order, that come independently of each other:
    exponential gaps of 1 / `request_rate` seconds in the mean. Made one by one, as they are asked for.

    Raises ValueError that names the argument.
    """
    check_float("request_rate", request_rate, 1.0 / MAX_SECONDS, MAX_SECONDS)
    return _poisson_requests(lengths, float(request_rate), seed, n)


def _poisson_requests(
    lengths: Iterable[Sequence[int]], request_rate: float, seed: int, n: int
) -> Iterator[SimulatedRequest]:
    rng, now = np.random.default_rng(seed), 0.0
    for prompt_len, output_len in lengths:
        now += float(rng.exponential(1.0 / request_rate))
        yield SimulatedRequest(arrival_s=now, prompt=int(prompt_len), output_len=int(output_len), n=n)


def prompt_of_blocks(names: Sequence[int], num_tokens: int, block_size: int) -> list[int]:
    """A prompt whose beginning is known by names of its blocks of `block_size` tokens, as in traces that were made
    anonymous (Mooncake's `hash_ids`): prompts have so many first tokens in common as they have first names.

    Raises ValueError unless there is a name for each block that the `num_tokens` tokens begin.
    """
    check_int("num_tokens", num_tokens, 1)
    check_int("block_size", block_size, 1)
    if len(names) != -(-num_tokens // block_size):
        raise ValueError(
            f"names must have one for each of the {-(-num_tokens // block_size)} blocks of {block_size} that "
            f"{num_tokens} tokens begin, got {len(names)}"
        )
    return [name for name in names for _ in range(block_size)][:num_tokens]
