"""Seconds of runs that take turns, and where an engine's steps spend theirs: in the runner, or on the host."""

import statistics
import time
from collections.abc import Callable
from typing import Any

RUNNER = ("run", "run_decodes", "run_with", "fetch", "copy_blocks", "swap_out", "swap_in")
SCHEDULER = ("schedule", "advance", "resolve")


class Turns:
    """Seconds of each way of doing the same. On a machine that also does other things the processor time of this
    process, all threads together, is disturbed less than the wall time."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    def time(self, way: str, function: Callable[[], Any]) -> Any:
        """Calls `function`, as one run of `way`, and returns what it does."""
        start, processor_start = time.perf_counter(), time.process_time()
        result = function()
        self.processor.setdefault(way, []).append(time.process_time() - processor_start)
        self.wall.setdefault(way, []).append(time.perf_counter() - start)
        return result

    def median(self, way: str) -> float:
        """Wall seconds."""
        return statistics.median(self.wall[way])

    def ratio(self, way: str, other: str) -> float:
        """How often `other` could run in the time that `way` takes."""
        return self.median(way) / self.median(other)

    def processor_ratio(self, way: str, other: str) -> float:
        """The same of processor time."""
        return statistics.median(self.processor[way]) / statistics.median(self.processor[other])

    def as_dict(self) -> dict[str, Any]:
        return {"wall_s": self.wall, "processor_s": self.processor}


class StepClock:
    """Sums of seconds, measured by wrapping the engine's own calls until `close`."""

    def __init__(self, engine: Any) -> None:
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._wrapped: list[tuple[Any, str]] = []
        for owner, names in (
            (engine, ("step",)),
            (engine.scheduler, SCHEDULER),
            (engine.runner, RUNNER),
            (engine.outputs, ("process",)),
        ):
            for name in names:
                setattr(owner, name, self._timed(name, getattr(owner, name)))
                self._wrapped.append((owner, name))
        self.clear()

    def clear(self) -> None:
        """Starts again from zero."""
        self.seconds = {name: 0.0 for _, name in self._wrapped}
        self.num_steps = 0

    def close(self) -> dict[str, float]:
        """The engine as it was, and milliseconds of a mean step since `clear`, by part."""
        for owner, name in self._wrapped:
            delattr(owner, name)  # the method again
        total, device = self.seconds["step"], sum(self.seconds[name] for name in RUNNER)
        per_step = {f"{name}_ms": 1e3 * seconds / max(self.num_steps, 1) for name, seconds in self.seconds.items()}
        share = (total - device) / total if total else 0.0
        return per_step | {"num_steps": self.num_steps, "host_share": share}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name] += time.perf_counter() - start
            self.num_steps += name == "step"
            return result

        return timed
