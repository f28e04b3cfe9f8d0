"""`pagedjax watch`: the KV pool of a running server, drawn in a terminal."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pagedjax.serving.bench.client import message_of
from pagedjax.serving.urls import server_url

Json = dict[str, Any]

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta", "bright_green")
FILLS = "▁▂▃▄▅▆▇█"
"""A block that one request holds, by how full it is; a shared one shows how many hold it."""
FREE, CACHED = "·", "░"
NUM_EVENTS = 4
MOST_REQUESTS = 12
LONGEST_WAIT_S = 8.0


@dataclass
class Pool:
    """What /engine/events has told so far."""

    block_size: int
    blocks: list[list[Any]]
    """(tokens with KV, whether the prefix cache finds it, position of its first slot, keys of its holders) of each."""
    requests: list[Json]
    stats: Json
    events: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS))

    @classmethod
    def of(cls, picture: Json) -> "Pool":
        """From a whole picture, as /engine/map and the first event have it."""
        return cls(picture["block_size"], list(picture["blocks"]), picture["requests"], picture["stats"])

    def update(self, step: Json) -> None:
        """Takes over what a step has changed."""
        for number, *block in step["changed"]:
            self.blocks[number - 1] = block
        self.requests, self.stats = step["requests"], step["stats"]
        self.events.extend(map(_sentence, step["events"]))


def watch(url: str, api_key: str | None = None, *, once: bool = False, console: Console | None = None) -> None:
    """Draws the pool until Ctrl-C, and connects again when the server goes and comes; with `once` one picture.

    Raises OSError if nothing answers at first, RuntimeError if the server refuses, ValueError if there is no terminal
    to draw on again and again.
    """
    console = console or Console()
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = httpx2.Timeout(10.0, read=30.0)  # a stream without news has a line every second
    with httpx2.Client(base_url=server_url(url), headers=headers, timeout=timeout) as client:
        if once:
            console.print(draw(Pool.of(_map(client)), console.width, None))
            return
        _map(client)  # better an error now than on a screen of its own
        if not console.is_terminal:
            raise ValueError("the output is not a terminal: use --once")
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for pool, note in pictures(client):
                if pool is not None:
                    live.update(draw(pool, console.width, console.height, note), refresh=True)


def pictures(
    client: httpx2.Client, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Pool | None, str | None]]:
    """The pool after each event; with a note while there is no connection, and None before the first one.

    Raises RuntimeError if the server refuses, which trying again would not change.
    """
    pool: Pool | None = None
    wait_s = 0.5
    while True:
        note = "the server has ended the stream, trying again"
        try:
            # The first event has every block: megabytes for the pool of a large GPU.
            with client.sse("/engine/events", max_event_size=None) as events:
                if events.response.status_code in (401, 403, 404):
                    events.response.read()
                    raise _refusal(client, events.response)
                if events.response.status_code != 200:  # which iterating would call a wrong content type
                    events.response.raise_for_status()
                for event in events:
                    if event.event == "map":
                        pool = Pool.of(_object(event))
                    elif pool is not None:
                        pool.update(_object(event))
                    wait_s = 0.5
                    yield pool, None
        except httpx2.HTTPError as error:
            note = f"no connection, trying again: {str(error).partition(chr(10))[0]}"
        yield pool, note
        sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def draw(pool: Pool, width: int, height: int | None, note: str | None = None) -> RenderableType:
    """The pool for a terminal of this size; all of it if the height is None."""
    rows = _grid(pool, width)
    head = [Text(line, "bold", no_wrap=True, overflow="ellipsis") for line in _numbers(pool, width)]
    if note is not None:
        head.append(Text(note, "bold red", no_wrap=True, overflow="ellipsis"))
    foot = [Text("")] + [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in pool.events]
    foot.append(Text(f"{FILLS[3]}{FILLS[7]} in use  2 shared by 2  {CACHED} free, can be found  {FREE} free", "dim"))
    foot[-1].truncate(width)
    room, most_requests = len(rows), MOST_REQUESTS
    if height is not None:
        rest = height - len(head) - len(foot) - 2  # for blocks and requests, with an empty line before each
        # A quarter of the screen is the blocks', if they need it, however many requests there are.
        most_requests = min(MOST_REQUESTS, max(0, rest - 1 - min(len(rows), height // 4)))
        room = max(1, rest - min(len(pool.requests), most_requests + 1))
    if len(rows) > room:
        rows = [*rows[: room - 1], Text(f"... {len(rows) - room + 1} more rows of blocks", "dim")]
    requests = _requests(pool, width, most_requests)
    return Group(*[*head, Text(""), *rows, Text(""), *requests, *foot][:height])


def _grid(pool: Pool, width: int) -> list[Text]:
    rows = []
    for start in range(0, len(pool.blocks), width):
        row = Text(no_wrap=True)
        for filled, is_cached, _, keys in pool.blocks[start : start + width]:
            row.append(*_cell(filled / pool.block_size, bool(is_cached), keys))
        rows.append(row)
    return rows


def _cell(share: float, is_cached: bool, keys: list[int]) -> tuple[str, str]:
    """A block as a character and its style."""
    if not keys:
        return (CACHED if is_cached else FREE), "dim"
    if len(keys) > 1:
        return (str(len(keys)) if len(keys) < 10 else "+"), f"black on {_colour(keys[0])}"
    return FILLS[max(0, round(share * len(FILLS)) - 1)], _colour(keys[0])


def _numbers(pool: Pool, width: int) -> list[str]:
    stats = pool.stats
    hits = "-" if stats["hit_rate"] is None else f"{stats['hit_rate']:.1%}"
    parts = [
        f"{stats['num_used_blocks']} of {len(pool.blocks)} blocks of {pool.block_size}",
        f"{stats['num_shared_blocks']} shared, saving {stats['num_saved_blocks']}",
        f"waste {stats['waste']:.1%}",
        f"prefix hits {hits}",
        f"{stats['num_running']} running, {stats['num_waiting']} waiting",
        f"{stats['num_preemptions']} preemptions",
        f"{stats['num_block_copies']} copies",
        f"{stats['tokens_per_s']:.1f} tokens/s",
    ]
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}  |  {part}" if lines[-1] else part
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def _requests(pool: Pool, width: int, most: int) -> list[Text]:
    lines = []
    for request in pool.requests[:most]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{request['key']:>5} ", _colour(request["key"]))
        line.append(
            f"{request['state']:<9} {request['num_prompt_tokens']:>6} + {request['num_output_tokens']:<6} tokens "
        )
        line.append(f"{request['num_blocks']:>5} blocks  {request['id']}", "dim")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(pool.requests) > most:
        lines.append(Text(f"      and {len(pool.requests) - most} more", "dim"))
    return lines


def _colour(key: int) -> str:
    return COLOURS[key % len(COLOURS)]


def _sentence(event: Json) -> str:
    match event["kind"]:
        case "copy":
            return f"copy-on-write: block {event['from']} was copied to {event['to']}"
        case "preempt":
            how = "moved to the host" if event["how"] == "swap" else "will be computed again"
            return f"preempted: request {event['key']} {how}"
        case "resume":
            return f"resumed: request {event['key']}"
        case _:
            return f"ended: request {event['key']}"


def _object(event: httpx2.ServerSentEvent) -> Json:
    data = event.json()
    if not isinstance(data, dict):
        raise ValueError(f"the server's event must be a JSON object, got {event.data!r:.80}")
    return data


def _map(client: httpx2.Client) -> Json:
    try:
        response = client.get("/engine/map")
    except httpx2.TransportError as error:
        raise OSError(f"no server answers at {client.base_url}: {error}") from error
    if response.status_code != 200:
        raise _refusal(client, response)
    return response.json()


def _refusal(client: httpx2.Client, response: httpx2.Response) -> RuntimeError:
    if response.status_code == 404:
        return RuntimeError(f"{client.base_url} is not a server of pagedjax: it has no {response.request.url.path}")
    return RuntimeError(f"{client.base_url} answers {response.status_code}: {message_of(response.text)}")
