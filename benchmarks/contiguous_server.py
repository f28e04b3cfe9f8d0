"""Serving with contiguous KV: iteration-level scheduling as in Orca, first come, first served, nothing preempted.

A request joins the batch when its region is there, computes its whole prompt in its first step and leaves when its
output is complete (Yu et al., OSDI 2022). Steps and clock are those of `pagedjax.simulate`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from contiguous import BuddyAllocator, Policy, Region

from pagedjax.simulation.cost import StepLoad, StepTime
from pagedjax.simulation.results import RequestTimes
from pagedjax.simulation.workload import SimulatedRequest


class MemoryUse(NamedTuple):
    """What the slots of the KV pool are for, at one moment."""

    num_tokens: float
    """Hold a token's KV."""
    num_future: float
    """Reserved for tokens that will come."""
    num_never: float
    """Reserved, or allocated by the block, for tokens that will not: internal fragmentation."""
    num_rounded: float
    """Allocated beyond what was reserved, as regions are powers of two."""
    num_free: float
    """Not allocated."""


class InBatch(NamedTuple):
    """A request that has its region."""

    index: int
    request: SimulatedRequest
    num_reserved: int
    region: Region


@dataclass(frozen=True, kw_only=True)
class ContiguousResult(RequestTimes):
    """Of one run."""

    end_s: float
    num_steps: int
    mean_requests_per_step: float


Observer = Callable[[MemoryUse, bool], None]
"""Called in each step with what the memory is used for, and whether a request waits for memory."""


class ContiguousServer:
    """`num_slots` of KV for regions of a policy's size; a step takes `max_num_batched_tokens` tokens, or one prompt."""

    def __init__(
        self,
        policy: Policy,
        num_slots: int,
        step_time: StepTime,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        observe: Observer | None = None,
    ) -> None:
        self.policy = policy
        self.step_time = step_time
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.observe = observe
        self.memory = BuddyAllocator(num_slots)
        self.waiting: deque[tuple[int, SimulatedRequest]] = deque()
        self.ending: defaultdict[int, list[InBatch]] = defaultdict(list)
        """Requests of the batch by the step that is their last."""
        self.num_running = self.num_steps = self.num_tokens = self.num_final = self.num_reserved = 0
        """Of the batch: requests, tokens that have KV, will have in the end, and slots reserved."""

    def run(self, requests: Iterable[SimulatedRequest]) -> ContiguousResult:
        """Serves requests that come in this order, one completion each."""
        arrivals = deque(enumerate(requests))
        all_requests = [request for _, request in arrivals]
        first_token_s, finish_s = np.zeros((2, len(all_requests)))
        now, num_batched = 0.0, 0
        while arrivals or self.waiting or self.num_running:
            if not self.waiting and not self.num_running:
                now = max(now, arrivals[0][1].arrival_s)
            while arrivals and arrivals[0][1].arrival_s <= now:
                self.waiting.append(arrivals.popleft())
            started, load = self._start_step()
            now += self.step_time(load)
            num_batched += self.num_running
            first_token_s[started] = now
            finish_s[self._end_step()] = now
        return ContiguousResult(
            arrival_s=np.array([request.arrival_s for request in all_requests]),
            first_token_s=first_token_s,
            finish_s=finish_s,
            num_prompt_tokens=np.array([request.prompt_len for request in all_requests]),
            num_output_tokens=np.array([request.output_len for request in all_requests]),
            end_s=now,
            num_steps=self.num_steps,
            mean_requests_per_step=num_batched / max(self.num_steps, 1),
        )

    def _start_step(self) -> tuple[list[int], StepLoad]:
        """Decodes everyone, and admits who comes next; the indices of those, and what the step computes."""
        num_computed = self.num_running
        self.num_tokens += self.num_running
        started: list[int] = []
        is_blocked = False
        while self.waiting and self.num_running < self.max_num_seqs:
            index, request = self.waiting[0]
            if started and num_computed + request.prompt_len > self.max_num_batched_tokens:
                break
            num_reserved = self.policy(request.prompt_len, request.output_len)
            region = self.memory.allocate(num_reserved)
            if region is None:
                assert self.num_running, f"request {index} can never fit"
                is_blocked = True
                break
            self.waiting.popleft()
            started.append(index)
            self.ending[self.num_steps + request.output_len - 1].append(InBatch(index, request, num_reserved, region))
            num_computed += request.prompt_len
            self._count(request, num_reserved, 1, request.prompt_len)
        if self.observe is not None:
            self.observe(self.memory_use(), is_blocked)
        return started, StepLoad(num_computed, self.num_running, self.num_tokens)

    def _end_step(self) -> list[int]:
        """Frees the regions of those whose output is complete; their indices."""
        ended = self.ending.pop(self.num_steps, [])
        for each in ended:
            self.memory.free(each.region)
            # The last token is given out, and its KV never computed.
            num_tokens = each.request.prompt_len + each.request.output_len - 1
            self._count(each.request, each.num_reserved, -1, num_tokens)
        self.num_steps += 1
        return [each.index for each in ended]

    def _count(self, request: SimulatedRequest, num_reserved: int, sign: int, num_tokens: int) -> None:
        self.num_running += sign
        self.num_tokens += sign * num_tokens
        self.num_final += sign * (request.prompt_len + request.output_len)
        self.num_reserved += sign * num_reserved

    def memory_use(self) -> MemoryUse:
        """In the middle of a step."""
        num_allocated = self.memory.num_allocated_slots
        return MemoryUse(
            num_tokens=self.num_tokens,
            num_future=self.num_final - self.num_tokens,
            num_never=self.num_reserved - self.num_final,
            num_rounded=num_allocated - self.num_reserved,
            num_free=self.memory.num_slots - num_allocated,
        )
