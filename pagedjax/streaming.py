"""Several users of one engine: whole generations and streams, in any threads and event loops.

There is no background loop. Whoever waits for an output steps the engine, for all, and each output goes to its owner.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput
from pagedjax.requests import Params, Prompt


@dataclass(eq=False)
class Inbox:
    """What one user has asked the engine for, and the outputs that he has not read yet."""

    outputs: deque[RequestOutput] = field(default_factory=deque)
    request_ids: list[str] = field(default_factory=list)
    error: Exception | None = None  # why a request that was added later was refused
    is_closed: bool = False


class SharedEngine:
    """Lets one user at a time call the engine, which is not thread-safe."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that holds it
        self._to_add: deque[tuple[Inbox, Prompt, Params | None, dict[str, Any]]] = deque()
        self._to_close: deque[Inbox] = deque()
        self._step: asyncio.Future[None] | None = None

    def add(self, inbox: Inbox, prompt: Prompt, params: Params | None, later: bool = False, **options: Any) -> None:
        """Queues a request whose outputs go to `inbox`. If the next step may do it `later`, this never waits."""
        if later:
            return self._to_add.append((inbox, prompt, params, options))
        with self:
            return self._add(inbox, prompt, params, options)

    def step(self) -> None:
        """Computes one step and hands out what it gave."""
        with self:
            while self._to_add:
                inbox, prompt, params, options = self._to_add.popleft()
                try:
                    if not inbox.is_closed:
                        self._add(inbox, prompt, params, options)
                except Exception as error:  # noqa: BLE001 (raised where this one's outputs are read, and only there)
                    inbox.error = error
            for output in self._engine.step():
                if output.finished:  # without an inbox: whoever added it gets it from his own `engine.step()`
                    self._engine.defer(output)

    async def step_in_thread(self, inbox: Inbox) -> None:
        """Waits for the end of a step in a worker thread: of the one that runs, or of a new one."""
        loop = asyncio.get_running_loop()
        if self._step is None or self._step.done() or self._step.get_loop() is not loop:
            self._step = loop.run_in_executor(None, self.step)
            self._step.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
        await asyncio.wait([step := self._step])  # and a task that is cancelled here leaves it to the others
        if inbox.error is not None:
            raise inbox.error
        step.result()

    def close(self, inbox: Inbox) -> None:
        """Aborts what is unfinished, after the step if one runs: signal handlers and garbage collection come here."""
        inbox.is_closed = True
        self._to_close.append(inbox)
        self._close_all()

    def _add(self, inbox: Inbox, prompt: Prompt, params: Params | None, options: dict[str, Any]) -> None:
        request_id = self._engine.add_request(prompt, params, **options)
        self._engine.inboxes[request_id] = inbox.outputs
        inbox.request_ids.append(request_id)

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError("the engine was called from inside one of its own steps: by a hook or a signal handler")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()
        self._close_all()

    def _close_all(self) -> None:
        while self._to_close and self._lock.acquire(blocking=False):
            try:
                while self._to_close:
                    inbox = self._to_close.popleft()
                    for request_id in inbox.request_ids:
                        self._engine.discard_kept(request_id)
                        if self._engine.inboxes.get(request_id) is inbox.outputs:  # or another's by now
                            self._engine.abort(request_id)
            finally:
                self._lock.release()


class _Stream:
    def __init__(self, engine: SharedEngine, prompt: Prompt, params: Params | None, priority: int = 0) -> None:
        self._engine, self._inbox = engine, Inbox()
        engine.add(self._inbox, prompt, params, later=isinstance(self, AsyncStream), priority=priority)

    def close(self) -> None:
        """Ends the stream and aborts its request. Never waits; anyone may call it at any time, a signal handler too."""
        self._engine.close(self._inbox)

    __del__ = close

    def _next(self) -> RequestOutput:
        output = self._inbox.outputs.popleft()
        if output.finished:
            self._inbox.is_closed = True
        return output


class Stream(_Stream, Iterator[RequestOutput]):
    """A request's outputs, each as soon as it is there."""

    def __next__(self) -> RequestOutput:
        try:
            while not self._inbox.is_closed:
                if self._inbox.outputs:
                    return self._next()
                self._engine.step()
        except BaseException:
            self.close()
            raise
        raise StopIteration


class AsyncStream(_Stream, AsyncIterator[RequestOutput]):
    """The same for asyncio."""

    async def __anext__(self) -> RequestOutput:
        try:
            while not self._inbox.is_closed:
                if self._inbox.outputs:
                    return self._next()
                await self._engine.step_in_thread(self._inbox)
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """`close`, as `contextlib.aclosing` calls it."""
        self.close()
