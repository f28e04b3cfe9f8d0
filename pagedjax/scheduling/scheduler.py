"""Decides what runs next: admission, growth, sharing, preemption, finish. Host only.

There is no prefill and no decode phase. Each request's `num_computed_tokens` catches up with its `num_tokens`: by one
token for a decode, by a chunk for a prompt or for what a preemption threw away, all within one token budget per step.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice

from pagedjax.blocks.table import BlockTable
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.ledger import Ledger, share
from pagedjax.scheduling.limits import check_fits
from pagedjax.scheduling.output import SchedulerOutput, in_batch_order
from pagedjax.scheduling.request import Request, RequestStatus
from pagedjax.scheduling.room import Room, reserve_decodes, room_for


class Scheduler(Ledger):
    """Continuous batching; when blocks run out, the last in line is preempted: swapped out, or recomputed later.

    What is scheduled is a group of sequences, mostly of one. Everyone has a place in line for good (`Request.arrival`):
    the order of arrival, or with priorities one in which each level counts as so many seconds. Both `running` and
    `waiting` are in this order, groups are admitted from the front of `waiting` alone, and whoever has to make room is
    the last of `running`. So the first in line always goes on, and nobody waits for those behind him.

    Nor can a long prompt stop the decodes: a chunk leaves a token of the budget for each sequence behind it.
    """

    def add(self, group: SequenceGroup) -> None:
        """Queues a group at its place in line; one too large for one step goes in parts.

        Raises ValueError if its prompt can never fit, or the beams that it will have.
        """
        assert group.name not in self.running, f"{group.name} is not finished yet"
        assert group.name not in self.waiting, f"{group.name} is not finished yet"
        if group.requests[0].kept is None:  # else there is room: it is pinned
            check_fits(group, self.config, self.kv.num_usable_blocks)
        while len(group.requests) > self.config.max_num_running:
            rest = group.split(self.config.max_num_running)
            self._wait(group)
            group = rest
        self._wait(group)

    def fork(self, parent: Request, child: Request) -> None:
        """Queues `child`, which has the parent's tokens and goes alone, right behind it. It shares all of the parent's
        blocks if that runs, unless an older one waits. If that makes too many sequences, the next `schedule` preempts
        the newest."""
        group = SequenceGroup([child])
        is_next = all(child.arrival < other.arrival for other in islice(self.waiting.values(), 1))
        if parent.status is RequestStatus.RUNNING and is_next:
            share(parent, child, parent.num_computed_tokens)
            group.status = child.status = RequestStatus.RUNNING
            self._run(group)
        else:
            self._wait(group)

    def schedule(self) -> SchedulerOutput:
        """Chooses what the next step computes and gives it blocks. `advance` must follow, or `preempt_all`.

        It computes nothing if nobody is there, or if everyone who runs waits for no more than his last token.
        """
        if self.config.check_integrity:
            self.check_integrity()
        step = SchedulerOutput()
        num_seqs = sum(group.max_num_seqs for group in self.running.values())
        while num_seqs > self.config.max_num_running:  # forks have come in between
            num_seqs -= self._preempt_last(step).max_num_seqs
        num_seqs = self._make_way(step, num_seqs)
        budget = self._schedule_running(step, num_seqs)
        self._schedule_waiting(step, budget, num_seqs)

        # The first can always go on: alone it fits the pool (`add`), and everyone else makes room for it.
        is_idle = not step.num_new_tokens
        assert not is_idle or self._is_drained(), "a step without progress"
        assert all(step.num_new_tokens.values()), "a running request is starved"
        self.num_block_copies += len(step.copies)
        step = in_batch_order(step)
        if self.config.num_decode_steps > 1:
            reserve_decodes(step, self.kv)
        return step

    def _schedule_running(self, step: SchedulerOutput, num_seqs: int) -> int:
        """Gives each running sequence its tokens, the first in line first, and blocks for them; the budget left."""
        budget = self.config.max_num_batched_tokens
        for group in list(self.running.values()):
            if group.status is not RequestStatus.RUNNING:
                break  # it made room for one before it, and so did all behind it
            num_seqs -= group.max_num_seqs
            budget = self._schedule_group(group, step, budget, num_behind=num_seqs)
        return budget

    def _schedule_group(self, group: SequenceGroup, step: SchedulerOutput, budget: int, num_behind: int) -> int:
        """The same for a group, with `num_behind` sequences behind it that need a token each."""
        if len(group.requests) == 1:
            (request,) = group.requests
            num_new = min(request.num_left, budget - num_behind)
            if request.num_pending_tokens and request.is_all_computed:
                return budget
            return budget - num_new if self._grow(request, num_new, step) else budget
        # Beams go on together: those that have caught up hold their last token back until all have.
        num_held = int(group.search is not None and max(request.num_left for request in group.requests) > 1)
        if group.search is not None and not num_held and budget - num_behind < len(group.requests):
            return budget  # just brought back, and not enough is left for all
        active = [request for request in group.requests if request.fork_of is None and not request.is_all_computed]
        for i, request in enumerate(active, start=1):
            if request.status is not RequestStatus.RUNNING:
                break  # nobody behind was left to make room: it had to, with its group or for the others in it
            num_new = min(request.num_left - num_held, budget - num_behind - (len(active) - i))
            if num_new > 0 and self._grow(request, num_new, step):
                budget -= num_new
        return budget

    def _make_way(self, step: SchedulerOutput, num_seqs: int) -> int:
        """Preempts those behind the first that waits if that makes room for it, the last first; how many sequences are
        left. First come, first served, nobody who runs is behind one who waits."""
        behind = []
        first = next(iter(self.waiting.values()), None)
        for group in reversed(self.running.values()):
            if first is None or group.arrival < first.arrival:
                break
            behind.append(group)
        if first is None or not behind:
            return num_seqs
        num_rows = num_seqs + first.max_num_seqs - self.config.max_num_running
        if num_rows > sum(group.max_num_seqs for group in behind):
            return num_seqs
        num_missing = self._find_room(first, num_seqs).num_missing
        num_victims, num_freed, held = 0, 0, Counter[int]()
        for group in behind:
            if num_rows <= 0 and num_missing <= num_freed:
                break
            num_victims, num_rows = num_victims + 1, num_rows - group.max_num_seqs
            for block in chain.from_iterable(request.block_table.blocks for request in group.requests):
                held[block] += 1
                num_freed += held[block] == self.allocator.ref_count(block)  # nobody else has it
        if num_rows <= 0 and num_missing <= num_freed:
            for _ in range(num_victims):
                num_seqs -= self._preempt_last(step).max_num_seqs
        return num_seqs

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, num_seqs: int) -> None:
        """Admits groups while there are rows, tokens and blocks for them.

        Admission wants room for all that is known of a group, though its first chunk may need less: otherwise a prompt
        would run into the end of the pool half-way, again and again. And it leaves a block for each sequence that runs
        to grow into: the newcomer would pay for that growth with its own preemption (docs/decisions.md). All these
        blocks are still given out one by one.
        """
        while self.waiting and budget:
            group = next(iter(self.waiting.values()))
            is_back = group.requests[0] in step.preempted  # not at once, but when others have freed blocks
            if is_back or num_seqs + group.max_num_seqs > self.config.max_num_running:
                break
            room = self._find_room(group, num_seqs)
            if room.num_missing > 0:
                break
            self.waiting.popitem(last=False)
            self._run(group)
            num_seqs += group.max_num_seqs
            if group.status is RequestStatus.SWAPPED:
                self._bring_back(group, step)
            else:
                self._start(group, self.kv.new_table(room.rows, room.num_tokens))
            budget = self._schedule_group(group, step, budget, num_behind=0)
            assert group.status is RequestStatus.RUNNING, "admitted without room"

    def _find_room(self, group: SequenceGroup, num_growing: int) -> Room:
        """What of the group's beginning is there already, and how many blocks are missing for the rest, if any. Held KV
        makes room, and a group that does not fit even alone is recomputed, and then split."""
        while True:
            room = room_for(group, self.kv, self.swap, num_growing)
            if room.num_missing <= 0 or (self.running and room.num_missing > self.kv.num_droppable_blocks):
                return room
            if self.kv.drop_oldest():
                continue
            if self.running:
                return room
            if group.status is RequestStatus.SWAPPED:
                self._stop(group, RequestStatus.PREEMPTED)
            elif len(group.requests) == 1 or group.search is not None:
                return room
            else:
                self._wait(group.split(len(group.requests) - 1))

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

    def _bring_back(self, group: SequenceGroup, step: SchedulerOutput) -> None:
        """The group goes on where it was swapped out."""
        step.swap_in.update(self.swap.swap_in(group))
        group.status = RequestStatus.RUNNING
        for request in group.requests:
            request.status = RequestStatus.RUNNING
            request.num_published_blocks = 0

    def _grow(self, request: Request, num_new: int, step: SchedulerOutput) -> bool:
        """Gives a request blocks for its next `num_new` tokens; the newest make room. False if it had to go itself."""
        if self._has_windows:
            request.block_table.give_up_passed()
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
        """Preempts the last group. If no other is left, it is too large for the pool: its last sequences leave it."""
        group = next(reversed(self.running.values()))
        if len(self.running) == 1 and len(group.requests) > 1 and group.search is None:
            self._preempt(group.split(len(group.requests) - 1), step)
        else:
            self._preempt_last(step)

    def _preempt_last(self, step: SchedulerOutput) -> SequenceGroup:
        _, group = self.running.popitem()
        self._preempt(group, step)
        return group

    def _preempt(self, group: SequenceGroup, step: SchedulerOutput) -> None:
        """All or nothing: takes the blocks of all the group's sequences. They are swapped out if that is chosen and the
        host pool has room for all of it, and else recomputed."""
        self._wait(group)
        blocks = [block for request in group.requests for block in request.block_table.blocks]
        moves: Mapping[int, int] = {}
        if self.config.preemption == "swap" and all(
            r.fork_of is None or r.fork_of.group is group for r in group.requests
        ):
            moves = self.swap.swap_out(group, step.copies)
        step.swap_out.update(moves)
        for block in blocks:
            step.copies.pop(block, None)  # a copy's target has no other holder yet
        self._stop(group, RequestStatus.SWAPPED if moves else RequestStatus.PREEMPTED)
        for request in group.requests:
            step.num_new_tokens.pop(request, None)
            step.preempted.append(request)
            request.num_preemptions += 1
            self.num_preemptions += 1

    def _is_drained(self) -> bool:
        """Whether those who run wait for no more than their last tokens, and nobody waits for nothing."""
        return all(r.is_all_computed for r in self.requests(self.running)) and bool(self.running or not self.waiting)
