"""Decides what runs next: admission, growth, sharing, preemption, finish. Host only.

There is no prefill and no decode phase. Each request's `num_computed_tokens` catches up with its `num_tokens`: by one
token for a decode, by a chunk for a prompt or for what a preemption threw away, all within one token budget per step.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import SupportsInt

from pagedjax.beams.groups import BeamCandidates, advance_beams
from pagedjax.blocks.table import BlockTable
from pagedjax.config import EngineConfig
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.kv_store import KVStore
from pagedjax.scheduling.limits import check_fits, most_blocks
from pagedjax.scheduling.output import SchedulerOutput, in_batch_order
from pagedjax.scheduling.request import NO_BLOCKS, FinishReason, HeldKV, Request, RequestStatus


class Scheduler:
    """Continuous batching, first come, first served; when blocks run out, the newest is preempted and recomputed.

    What is scheduled is a group of sequences, mostly of one. All of `running` arrived before all of `waiting`, and
    both are in order of arrival: a group is admitted only from the front of `waiting` to the end of `running`, and
    preempted the other way. So the newest is the last, the oldest the first, and nothing is searched by arrival.

    Nor can a long prompt stop the decodes: a chunk leaves a token of the budget for each sequence behind it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kv = KVStore(config)
        self.allocator = self.kv.allocator
        self.running: dict[str, SequenceGroup] = {}
        self.waiting: OrderedDict[str, SequenceGroup] = OrderedDict()
        self.num_preemptions = 0
        self.num_block_copies = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs or waits."""
        return bool(self.running or self.waiting)

    def requests(self, queue: dict[str, SequenceGroup]) -> list[Request]:
        """The sequences of all groups of `running` or `waiting`."""
        return [request for group in list(queue.values()) for request in group.requests]

    def add(self, group: SequenceGroup) -> None:
        """Queues a group that arrived after all others; a group too large for one step goes in parts.

        Raises ValueError if its prompt can never fit, or the beams that it will have.
        """
        assert group.name not in self.running, f"{group.name} is not finished yet"
        assert group.name not in self.waiting, f"{group.name} is not finished yet"
        if group.requests[0].kept is None:  # else there is room: it is pinned
            check_fits(group, self.config, self.kv.num_usable_blocks)
        while len(group.requests) > self.config.max_num_running:
            rest = group.split(self.config.max_num_running)
            self.waiting[group.name] = group
            group = rest
        self.waiting[group.name] = group

    def fork(self, parent: Request, child: Request) -> None:
        """Queues `child`, which has the parent's tokens and goes alone, right behind it. It shares all of the parent's
        blocks if that runs, unless an older one waits. If that makes too many sequences, the next `schedule` preempts
        the newest."""
        group = SequenceGroup([child])
        is_next = all(child.arrival < other.arrival for other in islice(self.waiting.values(), 1))
        if parent.status is RequestStatus.RUNNING and is_next:
            _share(parent, child, parent.num_computed_tokens)
            group.status = child.status = RequestStatus.RUNNING
            self.running = _in_order_of_arrival(self.running, group)
        else:
            self.waiting = OrderedDict(_in_order_of_arrival(self.waiting, group))

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request and frees its blocks. One that has ended already only gets the new reason: its last token may
        have reached the length limit and completed a stop string as well."""
        if not request.is_finished:
            self._leave_group(request)
            if request.keeps_kv and reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.kv.keep(request)
            elif not request.block_table.is_freed:
                request.block_table.free()
            request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def schedule(self) -> SchedulerOutput:
        """Chooses what the next step computes and gives it blocks. `update` must follow, or `preempt_all`."""
        if self.config.check_integrity:
            self.check_integrity()
        step = SchedulerOutput()
        num_seqs = sum(group.max_num_seqs for group in self.running.values())
        while num_seqs > self.config.max_num_running:  # forks have come in between
            num_seqs -= self._preempt_newest(step).max_num_seqs
        budget = self._schedule_running(step, num_seqs)
        if not step.preempted:  # whoever was preempted comes back when others have freed blocks, not at once
            self._schedule_waiting(step, budget, num_seqs)

        # The oldest can always go on: alone it fits the pool (`add`), and everyone else makes room for it.
        assert step.num_new_tokens or not self.has_unfinished, "a step without progress"
        assert all(step.num_new_tokens.values()), "a running request is starved"
        self.num_block_copies += len(step.copies)
        return in_batch_order(step)

    def update(
        self,
        scheduled: SchedulerOutput,
        sampled: Iterable[SupportsInt],
        beams: Iterable[BeamCandidates] = (),
        failed: Collection[Request] = (),
    ) -> list[Request]:
        """Appends the tokens sampled for `scheduled.sampling`, goes on with the best of each search's `beams`, and ends
        those that are done, and those that `failed` with an error.

        Returns the requests that got a token, in that order. Results for a request that was aborted since are dropped.
        """
        for request, num_new in scheduled.num_new_tokens.items():
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += num_new
                self.kv.publish(request)
                if request.group.requests[-1].fork_of is request:
                    self._fork_followers(request)
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
        for request, token_id in zip(scheduled.sampling, map(int, sampled), strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue
            request.token_ids.append(token_id)
            updated.append(request)
            if token_id in request.eos_token_ids:
                self.finish(request, FinishReason.STOP)
            elif token_id in request.stop_token_ids:
                self.finish(request, FinishReason.STOP, stop_reason=token_id)
            elif request.num_tokens >= request.max_num_tokens:
                self.finish(request, FinishReason.LENGTH)
        return updated

    def preempt_all(self) -> None:
        """Sends everything that runs back to wait, to be recomputed, and forgets all other KV: it is of no use any
        more."""
        self.restart([*self.running.values(), *self.waiting.values()])

    def restart(self, groups: Iterable[SequenceGroup]) -> None:
        """Begins again with `groups`, all that have not ended, and an empty pool, whatever the state is: after a failed
        step, or an interrupt in the middle of `schedule` or `update`."""
        self.kv.restart()
        self.running.clear()
        self.waiting.clear()
        for group in sorted(groups, key=attrgetter("arrival")):
            self.waiting[group.name] = group
            group.status = RequestStatus.PREEMPTED
            for request in group.requests:
                is_running = request.status is RequestStatus.RUNNING
                request.num_preemptions += is_running
                self.num_preemptions += is_running
                request.block_table = NO_BLOCKS
                request.block_names.clear()
                _stop(request)

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
        running, waiting = self.requests(self.running), self.requests(self.waiting)
        self.kv.check_integrity(running)
        arrivals = [request.arrival for request in chain(running, waiting)]
        assert all(old < new for old, new in pairwise(arrivals)), "not in order of arrival"
        for name, group in chain(self.running.items(), self.waiting.items()):
            assert group.name == name
            assert all(request.group is group and request.status is group.status for request in group.requests)
        for request in running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens == request.block_table.num_tokens < request.num_tokens
            assert request.num_tokens <= request.max_num_tokens
            assert request.num_tokens < request.max_num_tokens or not request.generates
            assert len(request.block_table) == self.config.num_blocks_for(request.num_computed_tokens)
            assert request.fork_of is None or request.fork_of in request.group.requests
            assert request.fork_of is None or request.num_computed_tokens == 0
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.block_table.is_freed
            assert request.num_computed_tokens == 0

    def _schedule_running(self, step: SchedulerOutput, num_seqs: int) -> int:
        """Gives each running sequence its tokens, the oldest first, and blocks for them; the budget that is left."""
        budget = self.config.max_num_batched_tokens
        for group in list(self.running.values()):
            if group.status is not RequestStatus.RUNNING:
                break  # it made room for an older one, and so did all that are newer
            num_seqs -= group.max_num_seqs
            budget = self._schedule_group(group, step, budget, num_behind=num_seqs)
        return budget

    def _schedule_group(self, group: SequenceGroup, step: SchedulerOutput, budget: int, num_behind: int) -> int:
        """The same for a group, with `num_behind` sequences behind it that need a token each."""
        if len(group.requests) == 1:
            (request,) = group.requests
            num_new = min(request.num_left, budget - num_behind)
            return budget - num_new if self._grow(request, num_new, step) else budget
        # Beams go on together: those that have caught up hold their last token back until all have.
        num_held = int(group.search is not None and max(request.num_left for request in group.requests) > 1)
        active = [request for request in group.requests if request.fork_of is None]
        for i, request in enumerate(active, start=1):
            if request.status is not RequestStatus.RUNNING:
                break  # nobody newer was left to make room: it had to, with its group or for the others in it
            num_new = min(request.num_left - num_held, budget - num_behind - (len(active) - i))
            if num_new > 0 and self._grow(request, num_new, step):
                budget -= num_new
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, num_seqs: int) -> None:
        """Admits groups while there are rows, tokens and blocks for them.

        Admission wants room for all that is known of a group, though its first chunk may need less: otherwise a prompt
        would run into the end of the pool half-way, again and again. And it leaves a block for each sequence that runs
        to grow into: the newcomer would pay for that growth with its own preemption (docs/decisions.md). All these
        blocks are still given out one by one.
        """
        while self.waiting and budget:
            group = next(iter(self.waiting.values()))
            if num_seqs + group.max_num_seqs > self.config.max_num_running:
                break
            found = self._find_room(group, num_seqs)
            if found is None:
                break
            self.waiting.popitem(last=False)
            self.running[group.name] = group
            num_seqs += group.max_num_seqs
            self._start(group, self.kv.new_table(*found))
            budget = self._schedule_group(group, step, budget, num_behind=0)
            assert group.status is RequestStatus.RUNNING, "admitted without room"

    def _find_room(self, group: SequenceGroup, num_growing: int) -> tuple[Sequence[int], int] | None:
        """The blocks of the group's beginning that are there already, and the tokens in them; None if there is no room
        for the rest. Held KV makes room, and a group that does not fit even alone is split."""
        size = self.config.block_size
        while True:
            group.find_common_tokens()
            leader, *others = group.requests
            blocks, num_found = self.kv.find(leader)
            num_shared = group.num_common_tokens // size
            wanted = self.config.num_blocks_for(leader.num_tokens) - num_found // size
            wanted += sum(max(1, self.config.num_blocks_for(each.num_tokens) - num_shared) for each in others)
            num_idle = sum(self.allocator.ref_count(block) == 0 for block in blocks)
            num_missing = wanted + num_idle + num_growing - self.allocator.num_free_blocks
            if num_missing <= 0:
                return blocks, num_found
            if self.running and num_missing > self.kv.num_droppable_blocks:
                return None
            if not self.kv.drop_oldest():
                if self.running or len(group.requests) == 1 or group.search is not None:
                    return None
                rest = group.split(len(group.requests) - 1)
                self.waiting = OrderedDict(_in_order_of_arrival(self.waiting, rest))

    def _start(self, group: SequenceGroup, table: BlockTable) -> None:
        """The first sequence begins with the blocks of `table`; the others follow when they can fork it."""
        leader, *others = group.requests
        group.status = leader.status = RequestStatus.RUNNING
        leader.block_table = table
        leader.num_computed_tokens = table.num_tokens
        leader.num_published_blocks = table.num_tokens // self.config.block_size
        if leader.num_preemptions == 0:
            leader.num_cached_tokens = table.num_tokens
            self.kv.count(leader)
        for other in others:
            other.status = RequestStatus.RUNNING
            other.fork_of = leader
        self._fork_followers(leader)

    def _fork_followers(self, leader: Request) -> None:
        group = leader.group
        if len(group.requests) > 1 and leader.num_computed_tokens >= group.num_common_tokens:
            for other in group.requests:
                if other.fork_of is leader:
                    _share(leader, other, group.num_common_tokens)

    def _grow(self, request: Request, num_new: int, step: SchedulerOutput) -> bool:
        """Gives a request blocks for its next `num_new` tokens; the newest make room. False if it had to go itself."""
        while (copies := request.block_table.append(num_new)) is None:
            if not self.kv.drop_oldest():
                self._make_room(step)
            if request.status is not RequestStatus.RUNNING:
                return False
        for source, target in copies:
            step.copies[target] = source
        step.num_new_tokens[request] = num_new
        return True

    def _make_room(self, step: SchedulerOutput) -> None:
        """Preempts the newest group. The last one left is too large for the pool: its newest sequence leaves it."""
        group = next(reversed(self.running.values()))
        if len(self.running) == 1 and len(group.requests) > 1 and group.search is None:
            self._preempt(group.split(len(group.requests) - 1), step)
        else:
            self._preempt_newest(step)

    def _preempt_newest(self, step: SchedulerOutput) -> SequenceGroup:
        _, group = self.running.popitem()
        self._preempt(group, step)
        return group

    def _preempt(self, group: SequenceGroup, step: SchedulerOutput) -> None:
        """All or nothing: takes the blocks of all the group's sequences, which will be recomputed."""
        self.waiting[group.name] = group
        self.waiting.move_to_end(group.name, last=False)
        group.status = RequestStatus.PREEMPTED
        for request in group.requests:
            step.num_new_tokens.pop(request, None)
            step.preempted.append(request)
            for block in request.block_table.blocks:
                step.copies.pop(block, None)  # a copy's target has no other holder yet
            _stop(request)
            request.num_preemptions += 1
            self.num_preemptions += 1

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
            leader.block_table = self.kv.new_table()
            for other in followers:
                other.fork_of = None if other is leader else leader


def _share(parent: Request, child: Request, num_tokens: int) -> None:
    """Lets `child` go on from the parent's first `num_tokens` tokens."""
    num_full = num_tokens // parent.block_table.block_size
    child.block_table = parent.block_table.fork(num_tokens)
    child.num_computed_tokens = num_tokens
    child.block_names = parent.block_names[:num_full]
    child.num_published_blocks = min(parent.num_published_blocks, num_full)
    child.fork_of = None


def _stop(request: Request) -> None:
    """Takes all that it has in the pool from a running request."""
    if not request.block_table.is_freed:
        request.block_table.free()
    request.num_computed_tokens = request.num_published_blocks = 0
    request.fork_of = None
    request.status = RequestStatus.PREEMPTED


def _in_order_of_arrival(queue: Mapping[str, SequenceGroup], group: SequenceGroup) -> dict[str, SequenceGroup]:
    """`queue` and one more, which belongs somewhere in it."""
    groups = sorted([*queue.values(), group], key=attrgetter("arrival"))
    return {each.name: each for each in groups}
