"""Decides what runs next: admission, growth, preemption, finish. Host only.

There is no prefill and no decode phase. Each request's `num_computed_tokens` catches up with its `num_tokens`: by one
token for a decode, by a chunk for a prompt or for what a preemption threw away, all within one token budget per step.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from typing import SupportsInt

from pagedjax.block_allocator import BlockAllocator
from pagedjax.config import EngineConfig
from pagedjax.request import FinishReason, Request, RequestStatus


@dataclass(frozen=True)
class SchedulerOutput:
    """What one step computes. Falsy when there is nothing to do."""

    num_new_tokens: dict[Request, int] = field(default_factory=dict)
    """How many tokens each request computes, in batch order: rows with one token by ascending context length (the
    attention of neighbours takes about as long), then chunks."""
    sampling: list[Request] = field(default_factory=list)
    """Those that have caught up after this step and so sample their next token, in batch order."""
    scored: list[Request] = field(default_factory=list)
    """Those that have caught up and end with that: they generate nothing (`max_tokens=0`)."""
    preempted: list[Request] = field(default_factory=list)
    """Those that lost their blocks for this step."""

    def __bool__(self) -> bool:
        return bool(self.num_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.num_new_tokens.values())


class Scheduler:
    """Continuous batching, first come, first served; when blocks run out, the newest is preempted and recomputed.

    All of `running` arrived before all of `waiting`, and both are in order of arrival: a request is admitted only from
    the front of `waiting` to the end of `running`, and preempted the other way. So the newest is the last, the oldest
    the first, and nothing is ever searched or sorted by arrival.

    Nor can a long prompt stop the decodes. A chunk that does not end its prompt takes all of the budget that is left,
    so nobody is admitted behind it: all running requests but the newest decode, and the budget covers each.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.allocator = BlockAllocator(config.num_blocks)
        self.running: dict[str, Request] = {}
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs or waits."""
        return bool(self.running or self.waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self.running or request_id in self.waiting

    def add(self, request: Request) -> None:
        """Queues a request that arrived after all others. Its id is free again once it has ended.

        Raises ValueError if an unfinished request has its id, or if its prompt can never fit.
        """
        config, name = self.config, f"request {request.request_id!r}"
        if request.request_id in self:
            raise ValueError(f"{name} is not finished yet: choose another request_id")
        num_prompt = len(request.prompt_token_ids)
        limit = config.max_prompt_len(generates=request.generates)
        if not 1 <= num_prompt <= limit:
            raise ValueError(
                f"{name} can never fit: its prompt has {num_prompt} tokens ({config.num_blocks_for(num_prompt)} blocks "
                f"of {config.block_size}), expected 1 to {limit}: the pool has {config.num_blocks} "
                f"blocks, and max_model_len is {config.max_model_len}"
                + (" with at least one token of output" if request.generates else "")
            )
        assert num_prompt <= request.max_num_tokens <= config.max_seq_len, f"{name}: max_num_tokens out of range"
        self.waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in any state, also between `schedule` and `update`; None if no unfinished one has this id."""
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request and frees its blocks. One that has ended already only gets the new reason: its last token may
        have reached the length limit and completed a stop string as well."""
        if not request.is_finished:
            del (self.running if request.status is RequestStatus.RUNNING else self.waiting)[request.request_id]
            self._free_blocks(request)
            request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def schedule(self) -> SchedulerOutput:
        """Chooses what the next step computes and gives it blocks. `update` must follow, or `preempt_all`."""
        if self.config.check_integrity:
            self.check_integrity()
        num_new_tokens: dict[Request, int] = {}
        preempted: list[Request] = []
        budget = self.config.max_num_batched_tokens

        for request in list(self.running.values()):
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while request.status is RequestStatus.RUNNING and not self._grow(request, num_new):
                preempted.append(self._preempt_newest())
            if request.status is not RequestStatus.RUNNING:
                break  # it made room for an older one or had none itself, and so did all that are newer
            num_new_tokens[request] = num_new
            budget -= num_new

        # Whoever was preempted comes back when others have freed blocks, not at once. Admission wants room for all that
        # is known of a request, though its first chunk may need less: otherwise a prompt would run into the end of the
        # pool half-way, again and again. And it leaves a block for each that runs to grow into: the newcomer would pay
        # for that growth with its own preemption (docs/decisions.md). All these blocks are still given out one by one.
        while self.waiting and budget and not preempted and len(self.running) < self.config.max_num_running:
            request = next(iter(self.waiting.values()))
            num_blocks_wanted = self.config.num_blocks_for(request.num_tokens) + len(self.running)
            if num_blocks_wanted > self.allocator.num_free_blocks:
                break
            self.waiting.popitem(last=False)
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            num_new_tokens[request] = num_new = min(request.num_tokens, budget)
            budget -= num_new
            has_grown = self._grow(request, num_new)
            assert has_grown, "admitted without room"

        # The oldest can always go on: alone it fits the pool (`add`), and everyone else makes room for it.
        assert num_new_tokens or not self.has_unfinished, "a step without progress"
        assert all(num_new_tokens.values()), "a running request is starved"
        batch = _in_batch_order(num_new_tokens)
        caught_up = [request for request, num_new in batch.items() if _num_left(request) == num_new]
        sampling = [request for request in caught_up if request.generates]
        scored = [request for request in caught_up if not request.generates]
        return SchedulerOutput(batch, sampling, scored, preempted)

    def update(self, scheduled: SchedulerOutput, sampled: Iterable[SupportsInt]) -> list[Request]:
        """Appends the tokens sampled for `scheduled.sampling` and ends those that are done.

        Returns the requests that got a token, in that order. Results for a request that was aborted since are dropped.
        """
        for request, num_new in scheduled.num_new_tokens.items():
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += num_new
        for request in scheduled.scored:
            if request.status is RequestStatus.RUNNING:
                self.finish(request, FinishReason.LENGTH)
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
        """Sends everything that runs back to wait, to be recomputed: for a pool that was lost in a failed step."""
        while self.running:
            self._preempt_newest()

    def check_integrity(self) -> None:
        """Recounts all blocks and checks the order of both queues, between steps; raises AssertionError."""
        requests = list(chain(self.running.values(), self.waiting.values()))
        self.allocator.check_integrity(request.block_table for request in requests)
        assert len(self.running) <= self.config.max_num_running
        assert all(old.arrival < new.arrival for old, new in pairwise(requests)), "not in order of arrival"
        assert all(request.request_id == key for key, request in chain(self.running.items(), self.waiting.items()))
        for request in self.running.values():
            assert request.status is RequestStatus.RUNNING
            assert 0 < request.num_computed_tokens < request.num_tokens <= request.max_num_tokens
            assert request.num_tokens < request.max_num_tokens or not request.generates
            assert len(request.block_table) == self.config.num_blocks_for(request.num_computed_tokens)
        for request in self.waiting.values():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == len(request.block_table) == 0
        assert all(_num_left(request) == 1 for request in list(self.running.values())[:-1]), "one prompt behind another"

    def _grow(self, request: Request, num_new: int) -> bool:
        """Gives a request the blocks that its next `num_new` tokens need; False when the pool is used up before."""
        num_slots_needed = request.num_computed_tokens + num_new
        while len(request.block_table) * self.config.block_size < num_slots_needed:
            block = self.allocator.allocate()
            if block is None:
                return False
            request.block_table.append(block)
        return True

    def _preempt_newest(self) -> Request:
        _, request = self.running.popitem()
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._free_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        return request

    def _free_blocks(self, request: Request) -> None:
        for block in request.block_table:
            self.allocator.free(block)
        del request.block_table[:]


def _num_left(request: Request) -> int:
    """Tokens whose KV is not in the pool yet."""
    return request.num_tokens - request.num_computed_tokens


def _in_batch_order(num_new_tokens: dict[Request, int]) -> dict[Request, int]:
    singles = [request for request, num_new in num_new_tokens.items() if num_new == 1]
    singles.sort(key=attrgetter("num_computed_tokens"))
    return dict.fromkeys(singles, 1) | {request: n for request, n in num_new_tokens.items() if n > 1}
