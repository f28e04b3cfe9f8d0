"""Sequences that are scheduled together, as they share blocks. Host only."""

from dataclasses import dataclass

from pagedjax.beams.search import BeamSearch
from pagedjax.scheduling.request import Arrival, Request, RequestStatus


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """Sequences of one request: admitted and preempted together, as they share blocks (paper, section 4.5).

    When a group is admitted, its first sequence computes what all have in common; then the others fork its table. All
    or nothing: a group is preempted, swapped out and brought back as a whole.
    """

    requests: list[Request]
    """Those that have not ended, in order."""
    search: BeamSearch | None = None
    """Which of them go on and with what, if they are the beams of one search; otherwise each samples for itself."""
    num_common_tokens: int = 0
    """Where the others fork the first one's table."""
    status: RequestStatus = RequestStatus.WAITING
    name: str = ""
    """Its first request's id, for good."""
    root: Arrival = ()
    """Its first request's place in line, for good: those of beams begin with it."""

    def __post_init__(self) -> None:
        self.name, self.root = self.requests[0].request_id, self.requests[0].arrival
        for request in self.requests:
            request.group = self

    @property
    def arrival(self) -> Arrival:
        """The first one's: the others follow it without a gap."""
        return self.requests[0].arrival

    @property
    def max_num_seqs(self) -> int:
        """Sequences that it may have at a time."""
        return len(self.requests) if self.search is None else self.search.width

    def split(self, num_requests: int) -> "SequenceGroup":
        """Keeps the first `num_requests`; the others are a group of their own, which is returned."""
        rest = SequenceGroup(self.requests[num_requests:], status=self.status)
        del self.requests[num_requests:]
        return rest

    def find_common_tokens(self) -> None:
        """Sets `num_common_tokens`. Where not all are the same, each keeps at least one token to compute for itself."""
        start = len(self.requests[0].prompt_token_ids)
        first, *others = (request.token_ids for request in self.requests)
        if all(token_ids == first for token_ids in others):
            self.num_common_tokens = len(first)
            return
        columns = zip(*(token_ids[start:] for token_ids in (first, *others)), strict=False)
        differing = (i for i, column in enumerate(columns, start) if any(token != column[0] for token in column))
        num_common = next(differing, len(first))
        self.num_common_tokens = min(num_common, *(len(token_ids) - 1 for token_ids in (first, *others)))
