"""What a step is asked for beyond plain sampling: edits of the logits, processors, log-probabilities. Host only.

A step without any of these has no extras, and everything here costs it one look at each request.
"""

from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from jaxtyping import Int32

from pagedjax.sampling.edits import ALL, LogitBias, LogitEdits, TokenHistory, build_edits
from pagedjax.sampling.processors import LogitsProcessor, form_of
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request


@dataclass(frozen=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities this step computes, in the order of the requests that own them."""

    requests: list[Request]
    counts: list[int]
    """How many of the tokens each of them has."""
    source: Int32[np.ndarray, "n"]
    """Which of the step's tokens comes before each."""
    target: Int32[np.ndarray, "n"]
    """The id of each."""
    num_top: int


@dataclass(frozen=True)
class StepExtras:
    """S rows: the requests that sample in this step, padded."""

    num_rows: int
    sampling: list[Request] = field(default_factory=list)
    """Those of the first rows."""
    edits: LogitEdits = field(default_factory=LogitEdits)
    processors: list[tuple[LogitsProcessor, dict[int, object]]] = field(default_factory=list)
    """In order: a processor, and the states of the rows that it is applied to."""
    num_top: int | None = None
    """How many of the most likely tokens any row wants to know; None if nobody wants log-probabilities."""
    prompt: PromptTargets | None = None
    failed: dict[Request, Exception] = field(default_factory=dict)
    """Requests whose own functions raised: they end, the others go on."""

    @property
    def is_for_sampling(self) -> bool:
        """Whether tokens are drawn in any other way than without extras, or their log-probabilities wanted."""
        return bool(self.processors or self.edits) or self.num_top is not None


def build_extras(scheduled: SchedulerOutput, row_sizes: tuple[int, ...], vocab_size: int) -> StepExtras | None:
    """The extras of a step, None if no request has any. Rows are padded to the next of the ascending `row_sizes`."""
    if not any(request.params.has_extras for request in scheduled.num_new_tokens):
        return None
    sampling = scheduled.sampling
    num_rows = next((size for size in row_sizes if size >= len(sampling)), row_sizes[-1])
    edits, failed = build_edits(sampling, num_rows, vocab_size)
    wanted = [request.params.num_logprobs(vocab_size) for request in sampling]
    return StepExtras(
        num_rows=num_rows,
        sampling=sampling,
        edits=edits,
        processors=_processors(sampling, failed),
        num_top=max((n for n in wanted if n is not None), default=None),
        prompt=_prompt_targets(scheduled, vocab_size),
        failed=failed,
    )


def extras_for_warm_up(num_rows: int, vocab_size: int, num_top: int) -> StepExtras:
    """Everything but processors, so that every program of this size compiles; of one row, and it changes nothing."""
    row, token = np.zeros((2, 1), np.int32)
    none = np.zeros(num_rows, np.float32)
    return StepExtras(
        num_rows=num_rows,
        edits=LogitEdits(
            bias=LogitBias(row, token, np.zeros(1, np.float32)),
            history=TokenHistory(row, token, np.ones(1, np.bool_), none, none, none + 1),
            allowed=np.full((num_rows, -(-vocab_size // 32)), ALL),
        ),
        num_top=num_top,
        prompt=PromptTargets([], [], row, token, num_top),
    )


def _processors(
    requests: list[Request], failed: dict[Request, Exception]
) -> list[tuple[LogitsProcessor, dict[int, object]]]:
    """Each request's processors in its own order; the same function of several rows is applied to them together."""
    calls: dict[tuple[object, ...], tuple[LogitsProcessor, dict[int, object]]] = {}
    for row, request in enumerate(requests):
        for position, processor in enumerate(request.params.logits_processors):
            try:
                state = processor.state_for(list(request.prompt_token_ids), request.output_token_ids)
                form = form_of(state)
            except Exception as error:  # noqa: BLE001  a user's function: it may raise anything, and ends its request
                failed[request] = error
                break
            # States of another form are not stacked: neither would a shape fit, nor may a dtype follow a neighbour's.
            key = (position, id(processor.function), id(processor.shared), form)
            calls.setdefault(key, (processor, {}))[1][row] = state
    return [calls[key] for key in sorted(calls, key=itemgetter(0))]


def _prompt_targets(scheduled: SchedulerOutput, vocab_size: int) -> PromptTargets | None:
    requests, counts, sources, targets, num_top, start = [], [], [], [], 0, 0
    for request, num_new in scheduled.num_new_tokens.items():
        wanted = request.params.num_prompt_logprobs(vocab_size) if request.sample_index == 0 else None
        if wanted is not None:
            computed = request.num_computed_tokens
            # Position p is predicted by the token before it. What is known from before a preemption is not repeated.
            first = max(computed + 1, request.num_known_prompt_logprobs)
            end = min(computed + num_new + 1, len(request.prompt_token_ids))
            if first < end:
                requests.append(request)
                counts.append(end - first)
                sources.append(np.arange(first - 1 - computed, end - 1 - computed) + start)
                targets.append(request.prompt_token_ids[first:end])
                num_top = max(num_top, wanted)
        start += num_new
    if not requests:
        return None
    source, target = (np.concatenate(parts).astype(np.int32) for parts in (sources, targets))
    return PromptTargets(requests, counts, source, target, num_top)
