"""From a step's arrays of log-probabilities to the entries that users get. Host only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pagedjax.outputs import Logprob, LogprobsOfPosition
from pagedjax.sampling.extras import PromptTargets
from pagedjax.scheduling.request import Request


@dataclass(frozen=True)
class StepLogprobs:
    """What a step's log-probabilities belong to. The arrays are a `TokenLogprobs` of numpy's, a row per token."""

    sampling: list[Request]
    prompt: PromptTargets | None
    logprobs: Any | None
    """Of the sampled tokens."""
    prompt_logprobs: Any | None
    """Of the prompt tokens in `prompt`."""

    def of_outputs(self) -> Iterator[tuple[Request, int]]:
        """Requests that want them, each with its row in `logprobs`."""
        if self.logprobs is not None:
            for row, request in enumerate(self.sampling):
                if request.params.logprobs is not None:
                    yield request, row

    def of_prompts(self) -> Iterator[tuple[Request, int]]:
        """For each prompt token its request, and its row in `prompt_logprobs`."""
        if self.prompt is not None:
            counts = zip(self.prompt.requests, self.prompt.counts, strict=True)
            owners = (request for request, count in counts for _ in range(count))
            yield from ((request, row) for row, request in enumerate(owners))


def entry_of(
    rows: Any, row: int, token_id: int, wanted: int | None, text_of: Callable[[int], str | None]
) -> LogprobsOfPosition:
    """The most likely tokens, as many as were asked for (-1: all), and the token that stands there."""
    num_top = rows.top_ids.shape[1] if wanted == -1 else wanted
    ids, logprobs = rows.top_ids[row, :num_top].tolist(), rows.top_logprobs[row, :num_top].tolist()
    entry: LogprobsOfPosition = {}
    rank = 0
    for position, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        rank = rank if position > 1 and logprob == logprobs[position - 2] else position
        entry[id_] = Logprob(logprob, rank, text_of(id_))
    if token_id not in entry:
        entry[token_id] = Logprob(float(rows.logprob[row]), int(rows.rank[row]), text_of(token_id))
    return entry
