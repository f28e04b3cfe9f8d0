"""What came out of a simulation: times of requests, and what the pool held over time. Host only."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When each request came, got its first token and was done, in order of arrival; all in seconds."""

    arrival_s: Float64[np.ndarray, " n"]
    first_token_s: Float64[np.ndarray, " n"]
    finish_s: Float64[np.ndarray, " n"]
    """When the last of its completions was done."""
    num_prompt_tokens: Int64[np.ndarray, " n"]
    num_output_tokens: Int64[np.ndarray, " n"]
    """Of each completion."""

    @property
    def latency_s(self) -> Float64[np.ndarray, " n"]:
        """From arrival to the end."""
        return self.finish_s - self.arrival_s

    @property
    def ttft_s(self) -> Float64[np.ndarray, " n"]:
        """Time to the first token, from arrival."""
        return self.first_token_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> Float64[np.ndarray, " n"]:
        """End-to-end latency over output tokens: the paper's measure (arXiv 2309.06180, section 6.1), which takes the
        mean of it over all requests."""
        return self.latency_s / self.num_output_tokens


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The whole time in stretches, one after another: each as many steps long as the next, but for the last. The values
    are means over the time of a stretch, in which nothing may run."""

    end_s: Float64[np.ndarray, " t"]
    """When a stretch ends; the first one starts at 0."""
    seconds: Float64[np.ndarray, " t"]
    num_requests: Float64[np.ndarray, " t"]
    """Requests that are in the step."""
    num_sequences: Float64[np.ndarray, " t"]
    """Sequences in it that compute tokens."""
    num_used_blocks: Float64[np.ndarray, " t"]
    """Blocks that somebody holds, among them those that the step fills."""
    num_context_tokens: Float64[np.ndarray, " t"]
    """Tokens of all sequences whose KV is in them; what sequences share counts for each."""
    num_empty_slots: Float64[np.ndarray, " t"]
    """Slots of used blocks without a token: internal waste, less than a block for a sequence."""

    def mean(self, name: str) -> float:
        """The mean of one of the values over all the time; 0 if there is none."""
        return float(np.average(getattr(self, name), weights=self.seconds)) if len(self.seconds) else 0.0


@dataclass(frozen=True, kw_only=True)
class SimulationResult(RequestTimes):
    """Of one simulation: `RequestTimes`, and what the engine did."""

    end_s: float
    """When the last request was done."""
    num_steps: int
    num_computed_tokens: int
    """Prompt and output tokens, what was computed again after a preemption too, what the prefix cache had not."""
    num_preemptions: int
    """Of sequences."""
    num_lookup_tokens: int
    """Tokens of the requests that the prefix cache was asked for, once each."""
    num_cached_tokens: int
    """Those of them that it had."""
    peak_blocks_used: int
    mean_requests_per_step: float
    """Requests in a mean step: the mean batch. For the mean over time, idle time too, see `timeline.mean`."""
    timeline: Timeline
