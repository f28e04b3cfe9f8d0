"""Where a step's beams are among its tokens, as tables for `choose_candidates`. Host only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from pagedjax.beams.groups import BeamCandidates
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.output import SchedulerOutput

MIN_WIDTH = 4
"""Searches are padded to this many beams, or twice as many, and so on: each is a program."""


@dataclass(frozen=True)
class BeamRows:
    """All beams of a step: G searches, padded, of up to W beams."""

    groups: list[SequenceGroup]
    source: Int32[np.ndarray, "n"]
    """Which of the step's tokens each beam goes on from."""
    rows: Int32[np.ndarray, "G W"]
    """Where each beam is in `source`; 0 for padding."""
    scores: Float32[np.ndarray, "G W"]
    """Log-probability of each beam so far; -inf for padding."""
    num_candidates: int
    """The most that any of the searches looks at."""

    def split(self, candidates: Any) -> Iterator[BeamCandidates]:
        """Each search's own of the step's `Candidates`, which are numpy arrays."""
        for i, group in enumerate(self.groups):
            assert group.search is not None
            columns = (candidates.scores, candidates.beams, candidates.tokens)
            yield BeamCandidates(*(column[i, : group.search.num_candidates].tolist() for column in columns))


def build_beam_rows(scheduled: SchedulerOutput, row_sizes: Sequence[int]) -> BeamRows | None:
    """The beams of a step, None if it has none. Searches are padded to the next of the ascending `row_sizes`."""
    searches = [group.search for group in scheduled.beams if group.search is not None]
    if not searches:
        return None
    ends = dict(zip(scheduled.num_new_tokens, accumulate(scheduled.num_new_tokens.values()), strict=True))
    source = [ends[request] - 1 for group in scheduled.beams for request in group.requests]
    num_groups = next(size for size in row_sizes if size >= len(searches))
    width = MIN_WIDTH
    while width < max(search.width for search in searches):
        width *= 2
    rows, scores = np.zeros((num_groups, width), np.int32), np.full((num_groups, width), -np.inf, np.float32)
    start = 0
    for i, (group, search) in enumerate(zip(scheduled.beams, searches, strict=True)):
        num_beams = len(group.requests)  # none if it was aborted after `schedule`
        rows[i, :num_beams] = range(start, start + num_beams)
        scores[i, :num_beams] = search.scores[:num_beams]
        start += num_beams
    return BeamRows(
        groups=scheduled.beams,
        source=np.array(source, np.int32),
        rows=rows,
        scores=scores,
        num_candidates=max(search.num_candidates for search in searches),
    )


def beams_for_warm_up(num_groups: int) -> BeamRows:
    """One search of the smallest padded width, which looks at nothing that matters."""
    rows, scores = np.zeros((num_groups, MIN_WIDTH), np.int32), np.zeros((num_groups, MIN_WIDTH), np.float32)
    return BeamRows([], np.zeros(1, np.int32), rows, scores, num_candidates=2 * MIN_WIDTH)
