"""What one HTTP call waits for: the newest output of each of its requests, or the error that ended them."""

import threading
from collections.abc import Callable, Sequence

from pagedjax.outputs import RequestOutput


class EngineError(RuntimeError):
    """No more outputs will come: the engine failed, or the server stops. HTTP 500."""


class OverloadedError(RuntimeError):
    """There is no room for the request now. HTTP 429."""


class UnavailableError(RuntimeError):
    """The server takes no requests: it shuts down, or its engine is dead or stuck. HTTP 503."""


class Job:
    """Requests of one call. The engine's thread puts outputs in, one HTTP thread takes them out."""

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self.request_ids = tuple(request_ids)
        self._abort = abort
        self._unfinished = set(request_ids)
        self._latest: dict[str, RequestOutput] = {}
        self._error: EngineError | None = None
        self._news = threading.Condition()

    def put(self, output: RequestOutput) -> None:
        """Hands over an output, in place of an older one that nobody has taken."""
        with self._news:
            self._latest[output.request_id] = output
            if output.finished:
                self._unfinished.discard(output.request_id)
            self._news.notify()

    def fail(self, error: EngineError) -> None:
        """Ends the job: nothing more comes."""
        with self._news:
            self._error = error
            self._unfinished.clear()
            self._news.notify()

    def take(self, timeout_s: float) -> list[RequestOutput]:
        """The requests with news since the last call, each with its newest output; none after the timeout.

        Raises EngineError when all outputs that there are have been taken and no more will come.
        """
        with self._news:
            self._news.wait_for(lambda: self._latest or self._error, timeout_s)
            outputs = list(self._latest.values())
            self._latest.clear()
            if not outputs and self._error is not None:
                raise self._error
            return outputs

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have been put. Never after an error, which `take` raises when the rest is taken."""
        with self._news:
            return not self._unfinished and self._error is None

    def close(self) -> None:
        """Aborts what has not ended. It never waits, and may be called at any time and twice."""
        with self._news:
            unfinished = sorted(self._unfinished)
            self._unfinished.clear()
        if unfinished:
            self._abort(unfinished)
