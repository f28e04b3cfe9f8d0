"""Recounts what the scheduler keeps: blocks, queues and what their requests say of themselves. Host only."""

from itertools import chain, pairwise
from typing import Any

from pagedjax.scheduling.request import Request, RequestStatus


def check_integrity(scheduler: Any) -> None:
    """Checks a `Scheduler` between steps; raises AssertionError where its books are wrong."""
    running, waiting = scheduler.requests(scheduler.running), scheduler.requests(scheduler.waiting)
    scheduler.kv.check_integrity(running)
    scheduler.swap.check_integrity([r.block_table for r in waiting if r.status is RequestStatus.SWAPPED])
    for queue in (running, waiting):
        arrivals = [request.arrival for request in queue]
        assert all(old < new for old, new in pairwise(arrivals)), "not in line"
    for name, group in chain(scheduler.running.items(), scheduler.waiting.items()):
        assert group.name == name
        assert all(request.group is group and request.status is group.status for request in group.requests)
    for request in running:
        _check_running(request)
        assert len(request.block_table) == scheduler.config.table_len(request.num_computed_tokens)
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
        if request.status is RequestStatus.SWAPPED:
            assert request.fork_of is not None or request.block_table.allocator is scheduler.swap.host
            assert request.num_computed_tokens == request.block_table.num_tokens
            assert request.fork_of is None or request.fork_of in request.group.requests
        else:
            assert request.block_table.is_freed
            assert request.num_computed_tokens == 0


def _check_running(request: Request) -> None:
    assert request.status is RequestStatus.RUNNING
    assert request.num_computed_tokens == request.block_table.num_tokens < request.num_tokens
    assert request.block_table.reaches(request.num_computed_tokens)
    assert request.num_tokens <= request.max_num_tokens
    is_ended = request.generates and request.num_tokens == request.max_num_tokens
    assert request.num_pending_tokens or not is_ended
    assert request.fork_of is None or request.fork_of in request.group.requests
    assert request.fork_of is None or request.num_computed_tokens == 0
