"""Limits on what holds threads."""

import threading
from collections.abc import Callable

from pagedjax.serving.job import OverloadedError


class Places:
    """For what holds a thread as long as a client wants."""

    def __init__(self, most: int, taken_by: str) -> None:
        """At most `most` at once; `taken_by` says what they are taken by, for the error."""
        self._most, self._taken_by = most, taken_by
        self._free = threading.BoundedSemaphore(most)

    def take(self) -> Callable[[], None]:
        """Takes a place; what gives it back, once, however often it is called. OverloadedError if none is left."""
        if not self._free.acquire(blocking=False):
            raise OverloadedError(f"{self._most} {self._taken_by}, as many as may at once")
        is_held = threading.Lock()

        def give_back() -> None:
            if is_held.acquire(blocking=False):
                self._free.release()

        return give_back
