"""How one request searches with beams and when it stops: transformers' meaning, validated field by field. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagedjax.sampling import checks
from pagedjax.sampling.params import SamplingParams

MAX_BEAM_WIDTH = 4096
MAX_LENGTH_PENALTY = 5.0
"""Either sign: a million tokens to this power are 1e30, so that no score overflows float32."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """One request's beam search, which is transformers', without sampling: `num_beams` is `beam_width` here,
    `num_return_sequences` is `n`, `max_new_tokens` is `max_tokens`; `length_penalty` and `early_stopping` are the same.

    Outputs come at the end of the search only, best first, with `score` = `cumulative_logprob` / (number of tokens **
    length_penalty). There are no stop strings, log-probabilities of single tokens, penalties or processors.

    Raises ValueError that names the field, what it got and what it expects.
    """

    beam_width: int
    """How many beams go on after each token. With 1, early_stopping="never" and a positive length_penalty go beyond
    the first end of sequence; otherwise 1 is greedy."""
    n: int | None = None
    """How many hypotheses are returned, best first; None returns beam_width. There are fewer only if the model has no
    more sequences to offer."""
    length_penalty: float = 1.0
    """A score is the log-probability over (number of output tokens ** length_penalty): positive values favour long
    outputs, negative ones short outputs, 0 is the plain log-probability. -5 to 5."""
    early_stopping: bool | str = False
    """When beam_width hypotheses have ended: True stops there. False stops when the best beam, at its length of now,
    scores no better than the worst of them. "never" stops when it can no longer become better at any length up to
    max_tokens (for a positive length_penalty; otherwise it is False)."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates until the search ends or to the model's length limit."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a hypothesis as the end of sequence does, kept in its token_ids; also with ignore_eos."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Whether to produce text at all."""

    def __post_init__(self) -> None:
        checks.check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n is not None:
            checks.check_int("n", self.n, 1, int(self.beam_width))
        checks.check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        is_word = isinstance(self.early_stopping, str) and self.early_stopping == "never"
        if not is_word and not isinstance(self.early_stopping, bool):
            raise ValueError(f'early_stopping must be True, False or "never", got {self.early_stopping!r}')
        if self.max_tokens is not None:
            checks.check_int("max_tokens", self.max_tokens, 1)
        checks.check_token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            checks.check_bool(name, getattr(self, name))

    @property
    def num_returned(self) -> int:
        """`n` as a count."""
        return self.beam_width if self.n is None else self.n

    def sampling_params(self) -> SamplingParams:
        """What it has in common with sampling: how long a sequence may be, and what its text is."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
        )
