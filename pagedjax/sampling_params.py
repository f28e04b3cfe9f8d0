"""How one request samples and when it stops: vLLM's field names, validated field by field. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_SEED = 2**64 - 1
"""Seeds are 64-bit and unsigned: any other int is refused, as wrapped it would coincide with one of these."""


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number in [{low}, {high}], got {value!r}")
    number: Any = value
    if not low <= number <= high:  # false for NaN
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling options. Filters act in this order: temperature, top_k, top_p.

    Raises ValueError that names the field, what it got and what it expects.
    """

    n: int = 1
    """Number of completions. Each has its own random stream, in order: output i of seed s is always the same."""
    temperature: float = 1.0
    """0 is greedy, as is any value so small that it would be 0 in float32; large values approach uniform."""
    top_k: int = 0
    """Keep the k most likely tokens (ties of the k-th are kept); 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p; 1.0 keeps all, 0 is greedy."""
    seed: int | None = None
    """0 to 2**64 - 1. The same seed gives the same tokens whatever else is in the batch; None draws a fresh one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates until a stop or the model's length limit."""
    stop: str | Sequence[str] = ()
    """Strings that end the output: the one that is complete first wins, and of those that end at the same character
    the longest, however the text is split over tokens."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, kept in token_ids; they also act with ignore_eos."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string that ended it, or just before it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Whether to produce text at all; stop strings need it."""

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 4096)
        _check_float("temperature", self.temperature, 0.0, 3.4e38)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if not isinstance(self.stop, Sequence) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, Sequence):
            raise ValueError(f"stop_token_ids must be a list of ints, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            _check_bool(name, getattr(self, name))
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
