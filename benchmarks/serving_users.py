"""What the users of `serving_load.py` do: requests whose answers can be checked, requests that are wrong, and ways to
read an answer, or not to."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

TEXT = Path(__file__).parent / "data" / "alice29.txt"
COMPLETIONS = "/v1/completions"

Json = dict[str, Any]


class Sizes(NamedTuple):
    """How long prompts and answers may be."""

    prompt_chars: int
    output_tokens: int


@dataclass(frozen=True, eq=False)
class Case:
    """A request whose tokens depend on nothing but itself: greedy, or with a seed."""

    kind: str
    body: Json

    @property
    def params(self) -> Json:
        """Its fields of `SamplingParams`."""
        return {name: value for name, value in self.body.items() if name not in ("prompt", "return_token_ids")}


@dataclass
class Choice:
    """One completion as far as it was read."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Seen:
    """What a user read of an answer."""

    case: Case
    prompt_token_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    is_whole: bool = False

    def take(self, answer: Json) -> None:
        """A chunk, or an answer in one piece."""
        for each in answer["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            choice.text += each["text"]
            choice.token_ids += each["token_ids"]
            choice.finish_reason, choice.stop_reason = each["finish_reason"], each["stop_reason"]
            self.prompt_token_ids = each["prompt_token_ids"] or self.prompt_token_ids

    def key(self) -> tuple[Any, ...]:
        """Equal for answers that say the same."""
        choices = tuple((i, each.text, tuple(each.token_ids), each.finish_reason) for i, each in self.choices.items())
        return id(self.case), self.is_whole, tuple(sorted(choices))


def draw_cases(count: int, sizes: Sizes, seed: int) -> list[Case]:
    """Pieces of a book to go on with, greedily, with seeds, three times, and up to a stop string."""
    rng, text = random.Random(seed), TEXT.read_text().replace("\n", " ")
    cases = []
    for i in range(count):
        start, length = rng.randrange(len(text) - 1000), rng.randint(5, sizes.prompt_chars)
        body: Json = {"prompt": text[start : start + length].strip() or "It", "return_token_ids": True}
        body["max_tokens"] = rng.randint(max(sizes.output_tokens // 4, 1), sizes.output_tokens)
        kind = ("greedy", "seeded", "n=3", "stop", "penalties")[i % 5]
        if kind in ("seeded", "n=3"):
            body |= {
                "temperature": rng.choice([0.7, 1.0]),
                "top_p": rng.choice([0.9, 1.0]),
                "seed": rng.getrandbits(64),
            }
        else:
            body["temperature"] = 0.0
        if kind == "n=3":
            body["n"] = 3
        if kind == "stop":
            body["stop"] = rng.sample([" the", ".", ",", " and", "e", "\n"], 2)
        if kind == "penalties":
            body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        cases.append(Case(kind, body))
    return cases


async def held_back_case(http: httpx2.AsyncClient, sizes: Sizes) -> Case:
    """A case whose text is held back from soon after its beginning: it looks like a stop string until the end."""
    body = {"prompt": "Once upon a time", "max_tokens": sizes.output_tokens, "temperature": 0.0}
    response = await http.post(COMPLETIONS, json=body)
    text = response.json()["choices"][0]["text"]
    stop = text[min(10, len(text) // 4) :] + "\x01 never"
    return Case("held back", {**body, "stop": [stop], "return_token_ids": True})


BAD_REQUESTS: dict[str, tuple[int, Any]] = {
    "no JSON": (400, b'{"prompt": '),
    "no object": (400, b"[1, 2]"),
    "no prompt": (400, {"max_tokens": 3}),
    "empty prompt": (400, {"prompt": []}),
    "wrong type": (400, {"prompt": "a", "max_tokens": "3"}),
    "unknown field": (400, {"prompt": "a", "colour": "red"}),
    "out of range": (400, {"prompt": "a", "temperature": -1}),
    "no such token": (400, {"prompt": [10**9]}),
    "too long": (400, {"prompt": "a", "max_tokens": 10**6}),
    "another model": (404, {"prompt": "a", "model": "gpt-0"}),
    "too many choices": (400, {"prompt": "a", "n": 5000}),
    "NaN": (400, b'{"prompt": "a", "temperature": NaN}'),
    "too large": (413, b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}'),
}
PATHS_TO_LOOK_AT = ("/health", "/ready", "/metrics", "/v1/models", "/engine/map", "/openapi.json", "/")


class WrongAnswerError(Exception):
    """An answer that a server must not give."""


@dataclass
class Users:
    """Everybody who talks to one server, and what they saw."""

    http: httpx2.AsyncClient
    cases: Sequence[Case]
    held_back: Case
    rng: random.Random
    seen: list[Seen] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Of what they did, with the status."""
    problems: list[str] = field(default_factory=list)
    slowest_look_s: float = 0.0
    """Of what needs no engine, such as /health."""

    async def act(self) -> None:
        """Does one thing, whatever it is, and notes what is wrong with the answer."""
        acts: dict[Callable[[], Awaitable[str]], int] = {
            self.read_stream: 30,
            self.read_whole: 20,
            self.leave_before_the_first_token: 8,
            self.leave_whole: 4,
            self.leave_in_the_middle: 10,
            self.leave_while_text_is_held_back: 6,
            self.ask_badly: 10,
            self.read_slowly: 8,
            self.look_around: 8,
        }
        (act,) = self.rng.choices(list(acts), list(acts.values()))
        name = act.__name__.replace("_", " ")
        try:
            self.counts[f"{name}: {await act()}"] += 1
        except (WrongAnswerError, httpx2.HTTPError, OSError, ValueError, KeyError) as error:
            self.counts[f"{name}: PROBLEM"] += 1
            self.problems.append(f"{name}: {type(error).__name__}: {error}"[:500])

    async def read_stream(self) -> str:
        """Reads a stream to its end."""
        case = self.rng.choice([*self.cases, self.held_back])
        return await self._stream(case, lambda seen: False)

    async def read_whole(self) -> str:
        """Waits for an answer in one piece."""
        seen = Seen(self.rng.choice(self.cases), is_whole=True)
        response = await self.http.post(COMPLETIONS, json=seen.case.body)
        _expect(response.status_code, 200, response.text)
        seen.take(response.json())
        self.seen.append(seen)
        return "200"

    async def leave_in_the_middle(self) -> str:
        """Closes a stream after some chunks."""
        num_chunks = self.rng.randint(1, 12)
        left = iter(range(num_chunks))
        return await self._stream(self.rng.choice(self.cases), lambda seen: next(left, None) is None)

    async def leave_before_the_first_token(self) -> str:
        """Sends a request and goes, with a goodbye or without."""
        return await self._leave(stream=True)

    async def leave_whole(self) -> str:
        """The same where the answer would have come in one piece."""
        return await self._leave(stream=False)

    async def leave_while_text_is_held_back(self) -> str:
        """Closes a stream while tokens come and nothing is sent."""
        return await self._stream(self.held_back, lambda seen: bool(seen.choices), self.rng.uniform(0.1, 1.5))

    async def ask_badly(self) -> str:
        """Sends what is to be refused."""
        name, (status, body) = self.rng.choice(list(BAD_REQUESTS.items()))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        response = await self.http.post(COMPLETIONS, content=content, headers=headers)
        _expect(response.status_code, status, f"{name}: {response.text}")
        if "message" not in response.json()["error"]:
            raise WrongAnswerError(f"{name}: {response.text}")
        return str(status)

    async def look_around(self) -> str:
        """Asks for what needs no engine, or for a picture of it."""
        path = self.rng.choice(PATHS_TO_LOOK_AT)
        start = time.monotonic()
        response = await self.http.get(path)
        if path != "/engine/map":  # waits for the end of a step
            self.slowest_look_s = max(self.slowest_look_s, time.monotonic() - start)
        if not (path == "/" and response.status_code == 404):  # a server without the page
            _expect(response.status_code, 200, f"{path}: {response.text}")
        return str(response.status_code)

    async def read_slowly(self) -> str:
        """Reads a stream some bytes at a time, with pauses. HTTP/1.0, so that the body comes as it is."""
        seen = Seen(self.rng.choice(self.cases))
        loop = asyncio.get_running_loop()
        with await self._send_raw({**seen.case.body, "stream": True}) as connection:
            data = b""
            while part := await loop.sock_recv(connection, 200):
                data += part
                await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        head, _, body = data.partition(b"\r\n\r\n")
        _expect(int(head.split()[1]), 200, body.decode())
        for line in body.decode().splitlines():
            if line.startswith("data: "):
                self._take(seen, line.removeprefix("data: "))
        return self._ended(seen)

    async def _stream(self, case: Case, is_enough: Callable[[Seen], bool], stay_s: float = 0.0) -> str:
        seen = Seen(case)
        async with self.http.stream("POST", COMPLETIONS, json={**case.body, "stream": True}) as response:
            if response.status_code != 200:
                _expect(response.status_code, 200, (await response.aread()).decode())
            async for event in httpx2.EventSource(response):
                self._take(seen, event.data)
                if not seen.is_whole and is_enough(seen):
                    await asyncio.sleep(stay_s)
                    self.seen.append(seen)
                    return "left"
        return self._ended(seen)

    async def _leave(self, stream: bool) -> str:
        with await self._send_raw({**self.rng.choice(self.cases).body, "stream": stream}) as connection:
            await asyncio.sleep(self.rng.uniform(0.0, 0.5))
            if self.rng.random() < 0.5:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    async def _send_raw(self, body: Json) -> socket.socket:
        url, content = self.http.base_url, json.dumps(body).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        head = (
            f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            await loop.sock_connect(connection, (url.host, url.port))
            await loop.sock_sendall(connection, head.encode() + content)
        except BaseException:
            with suppress(OSError):
                connection.close()
            raise
        return connection

    def _take(self, seen: Seen, data: str) -> None:
        if data == "[DONE]":
            seen.is_whole = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise WrongAnswerError(f"{seen.case.kind}: {chunk}")
        seen.take(chunk)

    def _ended(self, seen: Seen) -> str:
        num_choices = seen.case.body.get("n", 1)
        reasons = [choice.finish_reason for choice in seen.choices.values()]
        if not seen.is_whole or len(reasons) != num_choices or None in reasons:
            raise WrongAnswerError(f"{seen.case.kind}: the stream ended early: {reasons}, [DONE] {seen.is_whole}")
        self.seen.append(seen)
        return "200"


def _expect(status: int, wanted: int, text: str) -> None:
    if status != wanted:
        raise WrongAnswerError(f"HTTP {status} instead of {wanted}: {text[:300]}")
