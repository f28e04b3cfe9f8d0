"""One streamed request to a server with OpenAI's API, and when each part of its answer came."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request before it is sent."""

    arrival_s: float
    """Seconds after the start of the run; what the clock says, whether or not the client keeps up."""
    prompt: Prompt
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a request. Times are seconds since the start of the run."""

    planned_s: float
    """When it was to be sent: latencies count from here, so a client that is late hides nothing."""
    sent_s: float
    chunk_s: Sequence[float] = ()
    """When each part of the text came; a part is one token on most servers."""
    end_s: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_wanted_tokens: int = 0
    error: str | None = None
    """The kind of failure, such as "HTTP 429"; None if the answer came whole."""
    detail: str = ""


class AnswerError(Exception):
    """An answer that is not what OpenAI's API says."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail


@dataclass
class _Answer:
    """What has come of an answer so far."""

    chunk_s: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    is_finished: bool = False

    def take(self, data: str, now_s: float) -> None:
        """The data of one event."""
        if data == "[DONE]":
            self.is_finished = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise AnswerError("not JSON", data[:200]) from error
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise AnswerError("error in the stream", str(chunk)[:200])
        try:
            if any(map(_can_be_seen, chunk.get("choices") or [])):
                self.chunk_s.append(now_s)
            if chunk.get("usage"):
                self.usage = {name: _count(chunk["usage"].get(name)) for name in ("prompt_tokens", "completion_tokens")}
        except (AttributeError, TypeError, ValueError) as error:
            raise AnswerError("not as OpenAI's", f"{error}: {data[:200]}") from error


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and 0 <= value < 2**53):
        return value
    raise ValueError(f"expected a number of tokens, got {value!r:.80}")


def _can_be_seen(choice: Mapping[str, Any]) -> bool:
    """Text, or the end. Not what opens a chat's stream, which says no more than that the server has begun."""
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    return bool(text or choice.get("finish_reason"))


class Client:
    """Sends requests to one model."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        model: str,
        *,
        endpoint: str = "completions",
        fields: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`fields` go into every request; an answer may take `timeout_s` seconds."""
        self.http = http
        self.model = model
        self.endpoint = endpoint
        self.fields = dict(fields or {})
        self.timeout_s = timeout_s

    def body(self, prompt: Prompt, num_output_tokens: int) -> dict[str, Any]:
        """The JSON of a request."""
        if self.endpoint == "chat":
            content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            content = {"prompt": prompt}
        streams = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **content, "max_tokens": num_output_tokens, **streams, **self.fields}

    async def send(self, planned: Planned, start_s: float = 0.0) -> Outcome:
        """Sends a request now and reads all of its answer. `start_s` is the loop's time at which the run began."""
        clock = asyncio.get_running_loop().time
        sent_s = clock() - start_s
        answer, failure = _Answer(), None
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read(planned, answer, lambda: clock() - start_s)
        except AnswerError as error:
            failure = error
        except TimeoutError:
            failure = AnswerError("timeout", f"no end after {self.timeout_s:g} s")
        except httpx2.HTTPError as error:
            failure = AnswerError(_kind_of(error), f"{type(error).__name__}: {error}")
        end_s = answer.chunk_s[-1] if answer.chunk_s and failure is None else clock() - start_s
        num_output = answer.usage.get("completion_tokens")
        return Outcome(
            planned_s=planned.arrival_s,
            sent_s=sent_s,
            chunk_s=tuple(answer.chunk_s),
            end_s=end_s,
            num_prompt_tokens=answer.usage.get("prompt_tokens") or 0,
            num_output_tokens=len(answer.chunk_s) if num_output is None else num_output,
            num_wanted_tokens=planned.num_output_tokens,
            error=failure and failure.kind,
            detail=failure.detail if failure else "",
        )

    async def _read(self, planned: Planned, answer: _Answer, now: Any) -> None:
        body = self.body(planned.prompt, planned.num_output_tokens)
        async with self.http.stream("POST", PATHS[self.endpoint], json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise AnswerError(f"HTTP {response.status_code}", message_of(text))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise AnswerError("not a stream", response.headers.get("content-type", ""))
            async for event in httpx2.EventSource(response):
                answer.take(event.data, now())
        if not answer.is_finished:
            raise AnswerError("broken stream", "it ended without [DONE]")
        if not answer.chunk_s:
            raise AnswerError("no answer", "a stream without text or end")


def message_of(text: str) -> str:
    """What an error's body says."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300]


def _kind_of(error: httpx2.HTTPError) -> str:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return "no connection"
    return "timeout" if isinstance(error, httpx2.TimeoutException) else "broken stream"
