"""The thread that owns the engine. HTTP threads queue what they want done between two steps, and read their outputs.

Nobody else touches the engine, which is not thread-safe. Outputs are cumulative, so a reader that is slow finds the
newest of each request and nothing piles up behind it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pagedjax.engine import LLMEngine
from pagedjax.outputs import EngineStats, RequestOutput
from pagedjax.sampling.params import SamplingParams
from pagedjax.serving.job import EngineError, Job, OverloadedError, UnavailableError
from pagedjax.serving.metrics import ServerMetrics
from pagedjax.serving.pool_view import PoolView

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES_TO_FAIL_ALL = 3
"""Steps in a row that raise before every pending request gets an error. The first ones are tried again."""
FAILURES_TO_DIE = 6
LOOK_S = 0.5
"""How often a caller who waits looks whether the engine is stuck."""


class NewRequest(NamedTuple):
    """One prompt of a call, checked."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0


@dataclass
class _Record:
    """What the loop knows of an unfinished request."""

    job: Job
    params: SamplingParams
    num_prompt_tokens: int
    arrived_s: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    last_token_s: float | None = None


class EngineLoop:
    """Steps an engine in a thread of its own for as long as there is work."""

    def __init__(
        self, engine: LLMEngine, metrics: ServerMetrics, *, max_queue: int = 2048, stuck_after_s: float = 120.0
    ) -> None:
        """At most `max_queue` sequences may be unfinished. A step of more than `stuck_after_s` seconds makes the loop
        unhealthy until it ends."""
        self.max_queue = max_queue
        self.stuck_after_s = stuck_after_s
        self.view = PoolView()
        self.error: BaseException | None = None
        """What ended the thread; None while it lives."""
        self.stats: EngineStats = engine.stats()
        """As of the last step."""
        self.is_draining = False
        self._engine = engine
        self._metrics = metrics
        self._commands: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future[Any]]] = queue.SimpleQueue()
        self._records: dict[str, _Record] = {}
        self._num_failures = 0
        self._is_stopping = False
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after its step. What is pending gets an error."""
        self._is_stopping = True
        self._post(lambda _: None)
        self._thread.join(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for those that are pending; whether all ended in time."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._records and self.is_healthy and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._records

    @property
    def is_dead(self) -> bool:
        """Whether the thread has ended."""
        return self.error is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended for another reason than `stop`."""
        return self.is_dead and not isinstance(self.error, UnavailableError)

    @property
    def is_stuck(self) -> bool:
        """Whether a step takes longer than `stuck_after_s`."""
        since_s = self._busy_since_s
        return since_s is not None and time.monotonic() - since_s > self.stuck_after_s

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be answered."""
        return not (self.is_dead or self.is_stuck)

    @property
    def num_pending(self) -> int:
        """Requests that have not ended."""
        return len(self._records)

    def submit(self, requests: Sequence[NewRequest]) -> Job:
        """Queues all requests of a call, or none. Waits for the end of the step that runs.

        Raises ValueError for a request that the engine refuses, OverloadedError if the queue is full, UnavailableError
        if the server shuts down or the engine is dead or stuck.
        """
        self._check_open()
        job = Job([request.request_id for request in requests], self.abort)
        self.call(lambda engine: self._add(engine, job, requests))
        return job

    def fork(self, request_id: str, new_id: str, changes: Callable[[SamplingParams], SamplingParams | None]) -> Job:
        """A new request that goes on from where an unfinished one is, with the params that `changes` makes of that
        one's, or with the same and another seed if it gives None. KeyError if there is no such request."""
        self._check_open()
        job = Job([new_id], self.abort)

        def fork(engine: LLMEngine) -> None:
            parent = self._records[request_id]
            if self.num_sequences + 1 > self.max_queue:
                raise OverloadedError(f"all {self.max_queue} places of the queue are taken")
            params = changes(parent.params)
            engine.fork(request_id, params, new_id)
            record = _Record(job, params or parent.params, parent.num_prompt_tokens, num_tokens=parent.num_tokens)
            self._records[new_id] = record

        self.call(fork)
        return job

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests as soon as the step that runs has ended, unless they have by then. Never waits."""

        self._post(lambda engine: [self._abort(engine, request_id) for request_id in request_ids])

    def abort_now(self, request_id: str) -> bool:
        """Ends a request, whoever reads it; False if no unfinished one has this id."""
        return self.call(lambda engine: self._abort(engine, request_id))

    def call(self, function: Callable[[LLMEngine], T]) -> T:
        """What `function` returns or raises when the owner calls it between two steps. UnavailableError if it does not
        get to it: it is dead, or stuck in a step."""
        future = self._post(function)
        while not future.done():
            done, _ = futures.wait([future], timeout=LOOK_S)
            if not done and self.is_stuck and future.cancel():  # else it has begun, and ends soon
                raise self._stuck()
        return future.result()

    @property
    def num_sequences(self) -> int:
        """Completions that have not ended."""
        return sum(record.params.n for record in self._records.values())

    def _check_open(self) -> None:
        if self.is_dead:
            raise UnavailableError("the engine has stopped after an error: the server must be started again")
        if self.is_stuck:
            raise self._stuck()
        if self.is_draining or self._is_stopping:
            raise UnavailableError("the server is shutting down")

    def _stuck(self) -> UnavailableError:
        return UnavailableError(f"the engine has been in one step for more than {self.stuck_after_s:g} s")

    def _post(self, function: Callable[[LLMEngine], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._commands.put((function, future))
        if self.is_dead:  # perhaps since before the line above, and then nobody else looks
            self._refuse_commands()
        return future

    def _run(self) -> None:
        try:
            self._engine.on_schedule = self.view.note
            while not self._is_stopping:
                self._do_commands(wait=not self._engine.has_unfinished())
                self._busy_since_s = time.monotonic()
                if self._engine.has_unfinished():
                    self._step()
                self.stats = self._engine.stats()
                self.view.refresh(self._engine)
            self._end(UnavailableError("the server has shut down"))
        except BaseException as error:
            logger.critical("the engine's thread ends", exc_info=error)
            self._end(error)
            if not isinstance(error, Exception):
                raise

    def _end(self, error: BaseException) -> None:
        self.error = error
        message = str(error) if isinstance(error, UnavailableError) else "the engine has stopped after an error"
        for record in self._records.values():
            record.job.fail(EngineError(message))
        self._records.clear()
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError("the engine has stopped"))

    def _do_commands(self, wait: bool) -> None:
        if wait:
            self._busy_since_s = None  # who waits for work is not stuck
        try:
            function, future = self._commands.get(block=wait)
            self._busy_since_s = time.monotonic()
            while True:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(self._engine))
                    except Exception as error:  # noqa: BLE001 (it belongs to whoever asked, who raises it)
                        future.set_exception(error)
                function, future = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, engine: LLMEngine, job: Job, requests: Sequence[NewRequest]) -> None:
        num_more = sum(request.params.n for request in requests)
        if num_more > self.max_queue:
            raise ValueError(f"prompt: {num_more} completions are more than the {self.max_queue} that may be pending")
        if self.num_sequences + num_more > self.max_queue:
            raise OverloadedError(f"{self.num_sequences} of the {self.max_queue} places of the queue are taken")
        added: list[str] = []
        try:
            for request in requests:
                engine.add_request(request.token_ids, request.params, request.request_id, priority=request.priority)
                added.append(request.request_id)
        except BaseException:
            for request_id in added:
                engine.abort(request_id)
            raise
        for request in requests:
            self._records[request.request_id] = _Record(job, request.params, len(request.token_ids))

    def _abort(self, engine: LLMEngine, request_id: str) -> bool:
        output = engine.abort(request_id) if request_id in self._records else None
        if output is not None:
            self._deliver(output)
        return output is not None

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._num_failures += 1
            logger.exception("step failed, %d in a row", self._num_failures)
            if self._num_failures >= FAILURES_TO_DIE:
                raise
            if self._num_failures == FAILURES_TO_FAIL_ALL:
                self._fail_all(error)
            return
        if outputs:
            self._num_failures = 0
        for output in outputs:
            self._deliver(output)

    def _fail_all(self, error: Exception) -> None:
        """One of them, or the device, makes every step fail: all pending requests end, those that come are tried."""
        records, self._records = self._records, {}
        for record in records.values():
            record.job.fail(EngineError(f"the engine failed: {type(error).__name__}"))
        for request_id in records:
            self._engine.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        record = self._records.get(output.request_id)
        if record is None:
            return  # failed or aborted before
        now = time.monotonic()
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if num_tokens > record.num_tokens:
            self._metrics.tokens(num_tokens - record.num_tokens, now, record.arrived_s, record.last_token_s)
            record.num_tokens, record.last_token_s = num_tokens, now
        if output.finished:
            del self._records[output.request_id]
            self._metrics.finished(output, now - record.arrived_s)
        record.job.put(output)
