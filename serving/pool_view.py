"""The KV pool as people watch it: a picture of every block after some steps, and what happened to blocks between.

Pictures are taken on the engine's thread between two steps, and only while somebody watches: at most every
`MIN_INTERVAL_S`, and so seldom that they take `MAX_SHARE` of its time at most.
"""

import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pagedjax.blocks.memory_map import BlockInfo, MemoryMap
from pagedjax.engine import LLMEngine
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request, RequestStatus

MIN_INTERVAL_S = 0.1
MAX_SHARE = 0.05
MAX_EVENTS = 1000
"""Events that are kept for those who watch."""

Json = dict[str, Any]
Block = tuple[Any, ...]
"""(tokens with KV, whether the prefix cache finds it, position of its first slot or None, keys of its holders)."""


@dataclass(frozen=True)
class Picture:
    """The pool after a step."""

    number: int
    block_size: int
    blocks: list[Block]
    requests: list[Json]
    stats: Json
    num_events: int
    """Events so far, over all pictures."""


@dataclass
class _Rate:
    """Tokens per second of the last seconds."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, now: float, num_tokens: int) -> float:
        self.seen.append((now, num_tokens))
        while len(self.seen) > 2 and now - self.seen[0][0] > 3.0:
            self.seen.popleft()
        start, before = self.seen[0]
        seconds = now - start
        return (num_tokens - before) / seconds if seconds > 0 else 0.0


class PoolView:
    """Shared by the engine's thread, which draws, and those who watch."""

    def __init__(self) -> None:
        self._num_watchers = 0
        self._news = threading.Condition()
        self._picture: Picture | None = None
        self._events: deque[Json] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._keys: dict[str, int] = {}
        self._next_key = count(1)
        self._preempted: set[str] = set()
        self._due_s = 0.0
        self._num_steps = -1
        self._rate = _Rate()

    # The engine's thread.

    def note(self, scheduled: SchedulerOutput) -> None:
        """What a step is about to do; called before it runs."""
        if not self._num_watchers:
            return
        for to, source in scheduled.copies.items():
            self._event({"kind": "copy", "from": source, "to": to})
        for request in scheduled.preempted:
            how = "swap" if request.status is RequestStatus.SWAPPED else "recompute"
            self._preempted.add(request.request_id)
            self._event({"kind": "preempt", "key": self._key_of(request.request_id), "how": how})
        for request in scheduled.num_new_tokens:
            if request.request_id in self._preempted:
                self._preempted.discard(request.request_id)
                self._event({"kind": "resume", "key": self._key_of(request.request_id)})

    def refresh(self, engine: LLMEngine, now: bool = False) -> None:
        """Takes a picture if somebody watches, one is due and something changed; or `now`."""
        start = time.monotonic()
        idle = not engine.has_unfinished()
        if not now and (not self._num_watchers or (start < self._due_s and not idle)):
            return
        stats = engine.stats()
        if not now and idle and self._num_steps == stats.num_steps + stats.num_finished:
            return
        self._num_steps = stats.num_steps + stats.num_finished
        memory_map = engine.memory_map()
        requests = self._describe(engine, memory_map)
        with self._news:
            self._picture = Picture(
                number=self._picture.number + 1 if self._picture else 1,
                block_size=memory_map.block_size,
                blocks=[self._block(info) for info in memory_map.blocks],
                requests=requests,
                stats=self._stats(engine, memory_map, start),
                num_events=self._num_events,
            )
            self._news.notify_all()
        taken = time.monotonic() - start
        self._due_s = start + max(MIN_INTERVAL_S, taken / MAX_SHARE)

    def _describe(self, engine: LLMEngine, memory_map: MemoryMap) -> list[Json]:
        scheduler = engine.scheduler
        running = scheduler.requests(scheduler.running)
        sequences = [*running, *scheduler.requests(scheduler.waiting)]
        num_blocks: dict[str, int] = {}
        for info in memory_map.blocks:
            for holder in info.holders:
                num_blocks[holder] = num_blocks.get(holder, 0) + 1
        described = [self._describe_one(request, num_blocks.get(request.request_id, 0)) for request in sequences]
        alive = {request.request_id for request in sequences}
        for name in ("pinned", "held"):
            if name in num_blocks:
                alive.add(name)
                described.append(
                    {"key": self._key_of(name), "id": name, "index": 0, "state": name, "num_prompt_tokens": 0}
                    | {"num_output_tokens": 0, "num_blocks": num_blocks[name]}
                )
        for name in [name for name in self._keys if name not in alive]:
            self._event({"kind": "finish", "key": self._keys.pop(name)})
            self._preempted.discard(name)
        return described

    def _describe_one(self, request: Request, num_blocks: int) -> Json:
        return {
            "key": self._key_of(request.request_id),
            "id": request.request_id.removesuffix(f"[{request.sample_index}]"),
            "index": request.sample_index,
            "state": str(request.status.value),
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": request.num_output_tokens - request.num_pending_tokens,
            "num_blocks": num_blocks,
        }

    def _stats(self, engine: LLMEngine, memory_map: MemoryMap, now: float) -> Json:
        stats = engine.stats()
        num_used = memory_map.num_used_blocks
        num_asked = stats.prefix_cache_query_tokens
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_free_blocks": stats.num_free_blocks,
            "num_used_blocks": num_used,
            "num_shared_blocks": memory_map.num_shared_blocks,
            "num_saved_blocks": memory_map.num_saved_blocks,
            "num_cached_blocks": stats.num_cached_blocks,
            "waste": memory_map.num_wasted_slots / (num_used * memory_map.block_size) if num_used else 0.0,
            "hit_rate": stats.prefix_cache_hit_tokens / num_asked if num_asked else None,
            "num_preemptions": stats.num_preemptions,
            "num_block_copies": stats.num_block_copies,
            "num_steps": stats.num_steps,
            "num_output_tokens": stats.num_output_tokens,
            "tokens_per_s": round(self._rate.update(now, stats.num_output_tokens), 1),
        }

    def _block(self, info: BlockInfo) -> Block:
        holders = [self._key_of(holder) for holder in info.holders]
        return (len(info.token_ids), int(info.is_cached), info.first_position, holders)

    def _key_of(self, name: str) -> int:
        if name not in self._keys:
            self._keys[name] = next(self._next_key)
        return self._keys[name]

    def _event(self, event: Json) -> None:
        with self._news:
            self._events.append(event)
            self._num_events += 1

    # Those who watch.

    def watch(self, heartbeat_s: float = 1.0) -> Generator[tuple[str, Json] | None, None, None]:
        """Endless ("map", everything) once, then ("step", what changed) messages; None where nothing has happened for
        `heartbeat_s` seconds. Close it to stop watching; until the first item it does not."""
        with self._news:
            self._num_watchers += 1
        seen: Picture | None = None
        try:
            while True:
                picture, events = self._wait(seen, heartbeat_s)
                if picture is None:
                    yield None
                elif seen is None:
                    yield "map", whole(picture)
                else:
                    yield "step", _difference(seen, picture, events)
                seen = picture or seen
        finally:
            with self._news:
                self._num_watchers -= 1

    def _wait(self, seen: Picture | None, timeout_s: float) -> tuple[Picture | None, list[Json]]:
        """A picture that is newer than the one seen, and the events between them; None if there is none in time."""
        with self._news:
            if not self._news.wait_for(lambda: self._picture is not seen, timeout_s) or self._picture is None:
                return None, []
            return self._picture, self._events_since(seen, self._picture)

    def _events_since(self, seen: Picture | None, picture: Picture) -> list[Json]:
        if seen is None:
            return []
        num_new = min(picture.num_events - seen.num_events, len(self._events))
        last = len(self._events) - (self._num_events - picture.num_events)
        return list(self._events)[max(0, last - num_new) : max(0, last)]

    @property
    def picture(self) -> Picture:
        """The newest one; there must be one."""
        assert self._picture is not None
        return self._picture


def whole(picture: Picture) -> Json:
    """A picture as JSON."""
    return {
        "block_size": picture.block_size,
        "num_blocks": len(picture.blocks),
        "blocks": picture.blocks,
        "requests": picture.requests,
        "stats": picture.stats,
        "events": [],
    }


def _difference(before: Picture, after: Picture, events: list[Json]) -> Json:
    pairs = enumerate(zip(before.blocks, after.blocks, strict=True), start=1)
    changed = [[number, *new] for number, (old, new) in pairs if old != new]
    return {"changed": changed, "requests": after.requests, "stats": after.stats, "events": events}
