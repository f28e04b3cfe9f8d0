"""What the scheduler tells the others about one step. Host only."""

from dataclasses import dataclass, field, replace
from operator import attrgetter

from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request


@dataclass(frozen=True)
class SchedulerOutput:
    """What one step computes. Falsy when there is nothing to do."""

    num_new_tokens: dict[Request, int] = field(default_factory=dict)
    """How many tokens each request computes, in batch order: rows with one token by ascending context length (the
    attention of neighbours takes about as long), then chunks."""
    copies: dict[int, int] = field(default_factory=dict)
    """Blocks to copy before that, as {to: from}: shared ones that are about to be written (copy-on-write)."""
    sampling: list[Request] = field(default_factory=list)
    """Those that have caught up after this step and so sample their next token, in batch order. Those that are still
    `fork_of` another sample from that one's logits."""
    beams: list[SequenceGroup] = field(default_factory=list)
    """Groups whose beams have all caught up: their next tokens are chosen together."""
    scored: list[Request] = field(default_factory=list)
    """Those that have caught up and end with that: they generate nothing (`max_tokens=0`)."""
    preempted: list[Request] = field(default_factory=list)
    """Those that lost their blocks for this step."""

    swap_out: dict[int, int] = field(default_factory=dict)
    """Blocks whose KV goes to the host before all else, as {host block: block}."""
    swap_in: dict[int, int] = field(default_factory=dict)
    """Blocks whose KV comes back after that, before the copies, as {block: host block}."""
    num_decodes: list[int] = field(default_factory=list)
    """How many tokens each of `sampling` gets, one after another in one step; empty where all get one."""

    def __bool__(self) -> bool:
        return bool(self.num_new_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether it does nothing but sample, each request from its own logits alone: the host need not know the
        tokens that it computes."""
        return not (self.beams or self.scored) and not any(request.params.has_extras for request in self.num_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.num_new_tokens.values())


def in_batch_order(step: SchedulerOutput) -> SchedulerOutput:
    """The step with its requests in the order of the batch, and what each will do when it has caught up."""
    num_new_tokens = step.num_new_tokens
    singles = [request for request, num_new in num_new_tokens.items() if num_new == 1]
    singles.sort(key=attrgetter("num_computed_tokens"))
    batch = dict.fromkeys(singles, 1) | {request: n for request, n in num_new_tokens.items() if n > 1}
    beams: dict[SequenceGroup, None] = {}
    for request, num_new in batch.items():
        num_tokens, group = len(request.token_ids), request.group
        if num_tokens - request.num_computed_tokens != num_new:
            continue
        if group.search is not None:
            beams[group] = None
            continue
        caught_up = step.sampling if request.generates else step.scored
        caught_up.append(request)
        if len(group.requests) > 1 and group.num_common_tokens == num_tokens:
            caught_up.extend(other for other in group.requests if other.fork_of is request)
    step.beams.extend(beams)
    return replace(step, num_new_tokens=batch)
