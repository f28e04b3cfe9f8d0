"""Who runs and who waits, and what comes of a step: tokens appended, requests ended, blocks given back. Host only."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from pagedjax.beams.groups import BeamCandidates, advance_beams, restore_beams
from pagedjax.config import EngineConfig
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.integrity import check_integrity
from pagedjax.scheduling.kv_store import KVStore
from pagedjax.scheduling.limits import most_blocks
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.queues import Queue, put_in_line
from pagedjax.scheduling.request import NO_BLOCKS, FinishReason, HeldKV, Request, RequestStatus
from pagedjax.scheduling.swap import SwapSpace


class Ledger:
    """The scheduler's books. It decides nothing: that is for `Scheduler`.

    A step may be scheduled while the one before it still runs: `advance` says what is certain of a step before its
    tokens are there, with placeholders for them at the end of `token_ids`, and `resolve` puts the tokens there.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kv = KVStore(config)
        self.allocator = self.kv.allocator
        self.swap = SwapSpace(config, self.allocator)
        self._has_windows = any(config.windows)
        self.running: Queue = OrderedDict()
        self.waiting: Queue = OrderedDict()
        self.num_preemptions = 0
        self.num_block_copies = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs or waits."""
        return bool(self.running or self.waiting)

    def requests(self, queue: Queue) -> list[Request]:
        """The sequences of all groups of `running` or `waiting`."""
        return [request for group in list(queue.values()) for request in group.requests]

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        num_outputs: int | None = None,
    ) -> None:
        """Ends a request and frees its blocks. One that has ended already only gets the new reason: its last token may
        have reached the length limit and completed a stop string as well. With `num_outputs` it has no more tokens
        than these."""
        request.finish_reason, request.stop_reason = reason, stop_reason  # first of all: see `restart`
        forget_pending(request)
        if num_outputs is not None:
            del request.token_ids[len(request.prompt_token_ids) + num_outputs :]
        if not request.is_finished:
            self._leave_group(request)
            has_kv = request.status is RequestStatus.RUNNING  # or else it was preempted before its last token was known
            if request.keeps_kv and has_kv and reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.kv.keep(request)
            elif not request.block_table.is_freed:
                request.block_table.free()
            request.status = RequestStatus.FINISHED
        elif num_outputs is not None and request.kept is not None:
            self.kv.shorten(request.kept, request.num_tokens)

    def update(
        self,
        scheduled: SchedulerOutput,
        sampled: Iterable[Any],
        beams: Iterable[BeamCandidates] = (),
        failed: Collection[Request] = (),
    ) -> list[Request]:
        """`advance` and `resolve`, where nothing is scheduled between the two."""
        self.advance(scheduled)
        return self.resolve(scheduled, sampled, beams, failed)

    def advance(self, scheduled: SchedulerOutput) -> None:
        """Counts what a step computes, and appends a placeholder for each token that it samples: -1 - i stands for the
        last token of `scheduled.sampling[i]`."""
        for request, num_new in scheduled.num_new_tokens.items():
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += num_new
                self.kv.publish(request)
                if request.group.requests[-1].fork_of is request:
                    self._fork_followers(request)
        for i, request in enumerate(scheduled.sampling):
            if request.status is RequestStatus.RUNNING:
                num_tokens = scheduled.num_decodes[i] if scheduled.num_decodes else 1
                request.num_pending_tokens = num_tokens
                request.num_computed_tokens += num_tokens - 1
                request.token_ids += [-1 - i] * num_tokens

    def resolve(
        self,
        scheduled: SchedulerOutput,
        sampled: Iterable[Any],
        beams: Iterable[BeamCandidates] = (),
        failed: Collection[Request] = (),
    ) -> list[Request]:
        """Puts the tokens sampled for `scheduled.sampling` in place: one each, or with `num_decodes` a list for each,
        which may be longer than that. Goes on with the best of each search's `beams`, and ends those that are done,
        and with an error those that `failed`.

        Returns the requests that got a token, once for each. Results for one that was aborted since are dropped.
        """
        for request in scheduled.scored:
            if request.status is RequestStatus.RUNNING:
                self.finish(request, FinishReason.LENGTH)
        for request in failed:
            if not request.is_finished:
                self.finish(request, FinishReason.ERROR)
        for group, candidates in zip(scheduled.beams, beams, strict=True):
            if group.status is RequestStatus.RUNNING and not advance_beams(group, candidates):
                for request in list(group.requests):
                    self.finish(request, FinishReason.STOP)
        updated = []
        for request, tokens in zip(scheduled.sampling, sampled, strict=True):
            num_tokens, token_ids = request.num_pending_tokens, request.token_ids
            if num_tokens == 0:
                continue
            del token_ids[-num_tokens:]
            request.num_pending_tokens = 0
            for token_id in map(int, tokens[:num_tokens] if scheduled.num_decodes else (tokens,)):
                is_stop = token_id in request.eos_token_ids or token_id in request.stop_token_ids
                is_last = is_stop or len(token_ids) + 1 >= request.max_num_tokens
                if is_last:  # before it has the token, so that no interrupt comes between: see `restart`
                    request.finish_reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                token_ids.append(token_id)
                updated.append(request)
                if is_last:
                    self._end(request, token_id)
                    break
        return updated

    def _end(self, request: Request, token_id: int) -> None:
        if token_id in request.eos_token_ids:
            self.finish(request, FinishReason.STOP)
        elif token_id in request.stop_token_ids:
            self.finish(request, FinishReason.STOP, stop_reason=token_id)
        else:
            self.finish(request, FinishReason.LENGTH)

    def preempt_all(self) -> None:
        """Sends everything that runs back to wait, to be recomputed, and forgets all other KV: it is of no use any
        more."""
        self.restart([*self.requests(self.running), *self.requests(self.waiting)])

    def restart(self, unfinished: Iterable[Request]) -> None:
        """Begins again with all requests that have not ended and an empty pool, whatever the state is: after a failed
        step, or an interrupt in the middle of anything. Groups are made anew from their members, and who was about to
        end does so."""
        self.kv.restart()
        self.swap.host.reset()
        self.running.clear()
        self.waiting.clear()
        members: dict[SequenceGroup, list[Request]] = {}
        for request in unfinished:
            members.setdefault(request.group, []).append(request)
        for group, requests in members.items():
            group.requests = sorted(requests, key=attrgetter("arrival"))
        for group in sorted(members, key=attrgetter("arrival")):
            self._restart_group(group)

    def _restart_group(self, group: SequenceGroup) -> None:
        self.waiting[group.name] = group
        if group.search is not None:
            restore_beams(group)
        for request in group.requests:
            is_running = request.status is RequestStatus.RUNNING
            request.num_preemptions += is_running
            self.num_preemptions += is_running
            request.block_table = NO_BLOCKS
            request.block_names.clear()
            forget_pending(request)
        self._stop(group, RequestStatus.PREEMPTED)
        for request in list(group.requests):
            if group.search is not None and group.search.is_done:
                self.finish(request, FinishReason.STOP)
            elif request.finish_reason is None:
                continue
            elif is_about_to_end(request):
                self._end(request, request.token_ids[-1])
            elif request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and request.stop_reason is None:
                request.finish_reason = None  # its last token is lost, and will be sampled again
            else:
                self.finish(request, request.finish_reason, request.stop_reason)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self.kv.forget(chain(self.requests(self.running), self.requests(self.waiting)))

    def pin(self, held: HeldKV) -> None:
        """Keeps room for KV in the pool. ValueError if without it an unfinished request may not fit."""
        unfinished = [*self.running.values(), *self.waiting.values()]
        needed = [most_blocks(group, self.config) for group in unfinished if group.requests[0].kept is None]
        self.kv.pin(held, max([1, *needed]))

    def check_integrity(self) -> None:
        """Recounts all blocks and checks the order of both queues, between steps; raises AssertionError."""
        check_integrity(self)

    def _fork_followers(self, leader: Request) -> None:
        group = leader.group
        if len(group.requests) > 1 and leader.num_computed_tokens >= group.num_common_tokens:
            for other in group.requests:
                if other.fork_of is leader:
                    share(leader, other, group.num_common_tokens)

    def _stop(self, group: SequenceGroup, status: RequestStatus) -> None:
        group.status = status
        for request in group.requests:
            request.status = status
            if status is RequestStatus.PREEMPTED:
                forget_computed(request)

    def _run(self, group: SequenceGroup) -> None:
        self.running = put_in_line(self.running, group)

    def _wait(self, group: SequenceGroup) -> None:
        self.waiting = put_in_line(self.waiting, group)

    def _leave_group(self, request: Request) -> None:
        group = request.group
        queue = self.running if group.status is RequestStatus.RUNNING else self.waiting
        group.requests.remove(request)
        if not group.requests:
            group.status = RequestStatus.FINISHED
            del queue[group.name]
        followers = [other for other in group.requests if other.fork_of is request]
        if followers:  # the next one goes first now, from the start
            leader = followers[0]
            is_swapped = group.status is RequestStatus.SWAPPED
            leader.block_table = self.swap.new_table() if is_swapped else self.kv.new_table()
            for other in followers:
                other.fork_of = None if other is leader else leader


def share(parent: Request, child: Request, num_tokens: int) -> None:
    """Lets `child` go on from the parent's first `num_tokens` tokens."""
    num_full = num_tokens // parent.block_table.block_size
    assert parent.block_table.reaches(num_tokens), "the child would see what its parent's window has passed"
    child.block_table = parent.block_table.fork(num_tokens)
    child.num_computed_tokens = num_tokens
    child.block_names = parent.block_names[:num_full]
    child.num_published_blocks = min(parent.num_published_blocks, num_full)
    child.fork_of = None


def forget_computed(request: Request) -> None:
    """Takes all that it has in the pool, or in the host pool, from a request."""
    if not request.block_table.is_freed:
        request.block_table.free()
    request.num_computed_tokens = request.num_published_blocks = 0
    request.fork_of = None


def is_about_to_end(request: Request) -> bool:
    """Whether its last token is one that ends it."""
    last = request.token_ids[-1]
    is_stop = last in request.eos_token_ids or last in request.stop_token_ids
    return request.generates and (is_stop or request.num_tokens >= request.max_num_tokens)


def forget_pending(request: Request) -> None:
    while request.token_ids[-1] < 0:  # as many as are there, for an interrupt may have come between
        request.token_ids.pop()
    request.num_pending_tokens = 0
