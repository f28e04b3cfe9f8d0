"""One request's beam search between two steps: which beams go on, which have ended, whether to stop. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedjax.beams.params import BeamSearchParams


@dataclass(frozen=True)
class Hypothesis:
    """One output, with the score that it is ranked by."""

    token_ids: tuple[int, ...]
    """With the id that ended it."""
    cumulative_logprob: float
    """The sum over `token_ids`."""
    score: float
    """`cumulative_logprob` over (number of tokens ** length_penalty); transformers' `sequences_scores`."""
    finish_reason: str | None = None
    """"stop", "length", or None for a beam that could still go on."""
    stop_reason: int | None = None
    """The one of stop_token_ids that ended it; None for end-of-sequence and for "length"."""


@dataclass(frozen=True)
class _State:
    """Where a search is."""

    scores: list[float] = field(default_factory=lambda: [0.0])
    token_ids: list[list[int]] = field(default_factory=lambda: [[]])
    ended: list[Hypothesis] = field(default_factory=list)
    """The best `width`, best first."""
    is_done: bool = False


class BeamSearch:
    """transformers' beam search of one prompt. Scores are f32, divided as there, so that they and their ties agree.

    The idea: each step ranks `num_candidates` continuations of all beams. Those that have ended and rank among the
    first `width` are hypotheses, of which the `width` with the best scores stay; lower ones are forgotten. The best
    that have not ended are the next beams. At `max_tokens` every continuation has ended.

    transformers starts with `width` copies of the prompt, all but one with the score -1e9, and fills up with such
    entries wherever it has fewer than `width` real beams or hypotheses: where the vocabulary is hardly larger than
    `width`. Here these do not exist. There are fewer beams then; a search that has none left is done; `hypotheses` are
    the real ones, which can be fewer than `n`, where transformers adds some with scores near -1e9. Two things differ
    for it: with a vocabulary smaller than `width` and early_stopping=True transformers may count such an entry as ended
    and stop sooner, and a real score below -1e9 (a long output, a length_penalty of -2 or less) loses to them there.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        """`eos_token_ids` are empty with `ignore_eos`; `max_tokens` is the params' or the model's limit, at least 1."""
        assert max_tokens >= 1
        self.params = params
        self.width = int(params.beam_width)
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.end_token_ids = eos_token_ids | frozenset(params.stop_token_ids)
        self.num_candidates = max(2, 1 + len(self.end_token_ids)) * self.width
        """So many that `width` of them have not ended, whatever the others do."""
        self._state = _State()

    @property
    def scores(self) -> list[float]:
        """Log-probabilities of the beams, best first; before the first step there is one, the prompt."""
        return self._state.scores

    @property
    def token_ids(self) -> list[list[int]]:
        """Outputs of the beams."""
        return self._state.token_ids

    @property
    def is_done(self) -> bool:
        """Whether no beam goes on."""
        return self._state.is_done

    def advance(self, scores: Sequence[float], beams: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Takes a step's candidates, best first: log-probability of the beam with the token, beam, token.

        Those with score -inf are padding; more than `num_candidates` do no harm. Returns the new beams, best first, as
        (beam that it continues, token); none when the search is done.
        """
        assert not self.is_done
        length, ended = len(self.token_ids[0]) + 1, self._state.ended.copy()
        going_on: list[tuple[float, int, int]] = []
        for rank, (score, beam, token) in enumerate(zip(scores, beams, tokens, strict=True)):
            if score == -np.inf:
                continue
            if token not in self.end_token_ids and length < self.max_tokens:
                going_on.append((score, beam, token))
            elif rank < self.width:
                ended.append(self._hypothesis([*self.token_ids[beam], token], score))
        ended = _best(ended, self.width)
        del going_on[self.width :]
        is_done = self._is_done(going_on[0][0] if going_on else None, length, ended)
        if is_done:
            going_on = []
        token_ids = [[*self.token_ids[beam], token] for _, beam, token in going_on]
        # All at once: an interrupt comes before it or after it.
        self._state = _State([score for score, _, _ in going_on], token_ids, ended, is_done)
        return [(beam, token) for _, beam, token in going_on]

    def hypotheses(self) -> list[Hypothesis]:
        """The best `n` by score, best first; of equal ones the earlier. In mid-search beams count as if they ended now,
        as they would at `max_tokens`; when it is done those that have not ended are gone, as in transformers."""
        running = [self._hypothesis(*beam) for beam in zip(self.token_ids, self.scores, strict=True)]
        return _best(self._state.ended + running, self.params.num_returned)

    def _is_done(self, best_score: float | None, length: int, ended: list[Hypothesis]) -> bool:
        """Whether nothing goes on or, with `width` hypotheses, the best beam is not expected to replace one.

        That beam is judged by its log-probability of now over a length: of now as well, although with a positive
        length_penalty more tokens may raise a score, or with "never" the longest possible.
        """
        if best_score is None:
            return True
        if len(ended) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        looks_ahead = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_possible = self._normalised(best_score, self.max_tokens if looks_ahead else length)
        return best_possible <= ended[-1].score

    def _hypothesis(self, token_ids: list[int], cumulative_logprob: float) -> Hypothesis:
        last = token_ids[-1] if token_ids else None
        is_length = last not in self.end_token_ids and len(token_ids) >= self.max_tokens
        is_stop = last in self.end_token_ids
        return Hypothesis(
            token_ids=tuple(token_ids),
            cumulative_logprob=cumulative_logprob,
            score=self._normalised(cumulative_logprob, max(len(token_ids), 1)),
            finish_reason="stop" if is_stop else "length" if is_length else None,
            stop_reason=last if is_stop and last not in self.eos_token_ids else None,
        )

    def _normalised(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length ** float(self.params.length_penalty)))


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:count]
