"""What a run's outcomes say: latencies, throughput and goodput. Pure functions of the times that were taken."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pagedjax.serving.bench.client import Outcome

LATE_S = 0.01
"""A request that is sent so much after its time is late: the client did not keep up, or had to wait for a place."""


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """The latencies that a good request keeps to, in seconds; None for any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None

    def are_met_by(self, outcome: Outcome) -> bool:
        """Whether an answer came whole and in time. One of a single token has no time per token."""
        measured = ((ttft_s(outcome), self.ttft_s), (tpot_s(outcome), self.tpot_s), (e2e_s(outcome), self.e2e_s))
        in_time = all(most is None or value is None or value <= most for value, most in measured)
        return outcome.error is None and in_time


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Of some seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in figures. Latencies are of the requests that were answered whole, in seconds."""

    duration_s: float
    """From the start to the end of the last answer."""
    num_requests: int
    num_completed: int
    failures: dict[str, int]
    """By kind."""
    num_short: int
    """Answers with fewer tokens than were asked for."""
    num_late: int
    max_late_s: float
    max_in_flight: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: float | None
    """Requests a second that met all objectives; None without objectives."""
    num_good: int | None
    ttft_s: Quantiles | None
    """Time to the first token, from when the request was due."""
    tpot_s: Quantiles | None
    """Time per output token after the first."""
    itl_s: Quantiles | None
    """Between two parts of an answer, over all answers."""
    e2e_s: Quantiles | None
    """From when the request was due to the end of its answer."""
    normalized_s: Quantiles | None
    """End-to-end latency per output token, as in the PagedAttention paper (arXiv 2309.06180, section 6.1)."""


def ttft_s(outcome: Outcome) -> float | None:
    """Seconds from when a request was due to its first text."""
    return outcome.chunk_s[0] - outcome.planned_s if outcome.chunk_s else None


def e2e_s(outcome: Outcome) -> float:
    """Seconds from when a request was due to the end of its answer."""
    return outcome.end_s - outcome.planned_s


def tpot_s(outcome: Outcome) -> float | None:
    """Seconds per output token after the first."""
    if not outcome.chunk_s or outcome.num_output_tokens < 2:
        return None
    return (outcome.end_s - outcome.chunk_s[0]) / (outcome.num_output_tokens - 1)


def normalized_s(outcome: Outcome) -> float | None:
    """End-to-end seconds per output token."""
    return e2e_s(outcome) / outcome.num_output_tokens if outcome.num_output_tokens else None


def summarize(outcomes: Sequence[Outcome], objectives: Objectives | None = None) -> Summary:
    """All figures of a run."""
    completed = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max((outcome.end_s for outcome in outcomes), default=0.0)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_prompt = sum(outcome.num_prompt_tokens for outcome in completed)
    num_output = sum(outcome.num_output_tokens for outcome in completed)
    num_good = None
    if objectives is not None and not objectives.is_empty:
        num_good = sum(map(objectives.are_met_by, outcomes))
    lateness = [outcome.sent_s - outcome.planned_s for outcome in outcomes]
    return Summary(
        duration_s=float(duration_s),
        num_requests=len(outcomes),
        num_completed=len(completed),
        failures=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        num_short=sum(outcome.num_output_tokens < outcome.num_wanted_tokens for outcome in completed),
        num_late=sum(late > LATE_S for late in lateness),
        max_late_s=float(max(lateness, default=0.0)),
        max_in_flight=max_in_flight(outcomes),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        requests_per_s=len(completed) * per_s,
        output_tokens_per_s=num_output * per_s,
        total_tokens_per_s=(num_prompt + num_output) * per_s,
        goodput=None if num_good is None else num_good * per_s,
        num_good=num_good,
        ttft_s=quantiles(map(ttft_s, completed)),
        tpot_s=quantiles(map(tpot_s, completed)),
        itl_s=quantiles(b - a for outcome in completed for a, b in pairwise(outcome.chunk_s)),
        e2e_s=quantiles(map(e2e_s, completed)),
        normalized_s=quantiles(map(normalized_s, completed)),
    )


def quantiles(values: Iterable[float | None]) -> Quantiles | None:
    """Mean and percentiles (linear between two values) of those that are there."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = map(float, np.percentile(known, [50, 90, 99]))
    return Quantiles(mean=float(np.mean(known)), p50=p50, p90=p90, p99=p99, max=float(max(known)))


def max_in_flight(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were sent and not ended at one time."""
    # At the same moment an end counts before a beginning.
    moments = [(outcome.sent_s, 1) for outcome in outcomes] + [(outcome.end_s, -1) for outcome in outcomes]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most
