"""What a long run must not do to its process: grow, compile, or keep what has ended."""

import gc
import os
import statistics
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
WARM_UP_SHARE = 0.2
"""Of the samples of the memory, the first, which do not count: allocators and caches fill up."""


class Watch:
    """Samples of the resident memory, compilations, and objects of the engine, from its start on."""

    def __init__(self) -> None:
        import jax

        self.rss_mb = array("d")
        self.num_compiles = 0
        self.num_objects = num_objects()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def sample(self) -> None:
        """Remembers how much memory the process has now."""
        self.rss_mb.append(rss_mb())

    def close(self) -> None:
        """Stops to count compilations."""
        import jax

        jax.monitoring.unregister_event_duration_listener(self._listen)

    def thirds_mb(self) -> tuple[float, float]:
        """Mean memory in the first and in the last third after the warm-up."""
        return thirds(self.rss_mb)

    def wrong(self, most_growth_mb: float) -> list[str]:
        """What the process did that it must not, after all engines are idle."""
        first, last = self.thirds_mb()
        found = []
        if last - first > most_growth_mb:
            found.append(f"the memory grew from {first:.1f} to {last:.1f} MB, by more than {most_growth_mb:g} MB")
        if self.num_compiles:
            found.append(f"{self.num_compiles} programs were compiled after the warm-up")
        if (left := num_objects() - self.num_objects) > 0:
            found.append(f"{left} requests, groups or sequences are alive that nobody needs")
        return found

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.num_compiles += event == COMPILE_EVENT


def thirds(samples: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third of what comes after the warm-up."""
    counted = samples[int(len(samples) * WARM_UP_SHARE) :]
    size = max(len(counted) // 3, 1)
    return statistics.mean(counted[:size]), statistics.mean(counted[-size:])


def rss_mb() -> float:
    """Resident memory of this process; needs Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_objects() -> int:
    """Requests, groups and kept sequences that are alive in this process."""
    from pagedjax.scheduling.group import SequenceGroup
    from pagedjax.scheduling.request import HeldKV, Request

    gc.collect()
    return sum(type(each) in (Request, SequenceGroup, HeldKV) for each in gc.get_objects())
