"""Waiting for a job, as a whole or bit by bit as server-sent events, and for a client that goes away meanwhile."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from pagedjax.outputs import RequestOutput
from pagedjax.serving.answer import Answer
from pagedjax.serving.errors import ApiError
from pagedjax.serving.job import EngineError, Job
from pagedjax.serving.pool_view import PoolView

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often to look whether the client is still there while no output comes."""
HEARTBEAT_S = 5.0
"""How often a stream without news shows that it is alive, for proxies that would close it."""
DONE = "data: [DONE]\n\n"
HEARTBEAT = ": still here\n\n"

IsGone = Callable[[], bool]
"""Whether the client has gone."""


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event with JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def wait(job: Job, is_gone: IsGone) -> list[RequestOutput] | None:
    """The last output of each request, in order; None if the client has gone. Raises EngineError."""
    last: dict[str, RequestOutput] = {}
    while True:
        is_finished = job.is_finished  # before the outputs are taken: then they are the last
        for output in job.take(0.0 if is_finished else LOOK_S):
            last[output.request_id] = output
        if is_finished:
            return [last[request_id] for request_id in job.request_ids]
        if is_gone():
            return None


def stream(answer: Answer, job: Job, include_usage: bool, is_gone: IsGone) -> Iterator[str]:
    """The answer as events. An error on the way is an event as well, and the last one."""
    try:
        sent_s = time.monotonic()
        while not is_gone():
            is_finished = job.is_finished
            chunks = [chunk for output in job.take(0.0 if is_finished else LOOK_S) for chunk in answer.chunks(output)]
            if chunks:
                sent_s = time.monotonic()
                yield "".join(map(event, chunks))
            elif time.monotonic() - sent_s > HEARTBEAT_S:
                sent_s = time.monotonic()
                yield HEARTBEAT
            if is_finished:
                if include_usage:
                    yield event(answer.last_chunk())
                yield DONE
                return
    except EngineError as error:
        yield event(ApiError(500, str(error), code="engine_error").body())
    except Exception as error:  # the status is sent already: this is the only way left to say it
        logger.exception("stream %s ends with an error", answer.id)
        yield event(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error").body())
    finally:
        job.close()


def watch(view: PoolView, is_over: IsGone) -> Iterator[str]:
    """The pool as events for as long as the client and the engine are there."""
    messages = view.watch()
    try:
        for message in messages:
            if is_over():
                return
            yield HEARTBEAT if message is None else event(message[1], message[0])
    finally:
        messages.close()
