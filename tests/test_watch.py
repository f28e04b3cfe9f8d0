"""`pagedjax watch` draws what the server says, at any size, and comes back when the server does."""

import io
import json
import threading
from typing import Any

import httpx2
import pytest
from rich.console import Console
from serving_cases import client_of, serving, slow, wait_until
from test_server_lifecycle import LONG, connection
from tiny_engine import prompt_of, tiny_llm
from typer.testing import CliRunner

from pagedjax.serving.app import Limits
from pagedjax.serving.cli import app
from pagedjax.serving.watch import Pool, draw, pictures, watch

STATS = {
    "num_running": 2,
    "num_waiting": 1,
    "num_used_blocks": 4,
    "num_shared_blocks": 2,
    "num_saved_blocks": 12,
    "waste": 0.125,
    "hit_rate": None,
    "num_preemptions": 0,
    "num_block_copies": 3,
    "tokens_per_s": 61.5,
}
REQUEST = {"key": 1, "id": "chatcmpl-1", "index": 0, "state": "running", "num_prompt_tokens": 8}
PICTURE: dict[str, Any] = {
    "block_size": 8,
    "num_blocks": 10,
    "blocks": [
        *([8, 1, 0, [1, 2]], [8, 0, 8, list(range(1, 13))], [8, 0, 8, [1]], [4, 0, 16, [2]], [1, 0, 8, [2]]),
        *([8, 1, None, []], *[[0, 0, None, []]] * 4),
    ],
    "requests": [{**REQUEST, "num_output_tokens": 7, "num_blocks": 3}],
    "stats": STATS,
    "events": [],
}
STEP = {
    "changed": [[10, 2, 0, 24, [1]]],
    "requests": [],
    "stats": {**STATS, "hit_rate": 0.5},
    "events": [
        {"kind": "copy", "from": 4, "to": 10},
        {"kind": "preempt", "key": 2, "how": "swap"},
        {"kind": "resume", "key": 2},
        {"kind": "finish", "key": 1},
    ],
}


def text_of(pool: Pool, width: int = 120, height: int | None = None, note: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw(pool, width, height, note))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_each_kind_of_block_has_its_sign():
    """Shared ones their count, the others how full they are."""
    assert "2+█▄▁░····\n" in text_of(Pool.of(PICTURE))


def test_a_step_changes_the_picture():
    pool = Pool.of(PICTURE)
    assert "prefix hits -" in text_of(pool)
    pool.update(STEP)
    text = text_of(pool)
    assert "2+█▄▁░···▂\n" in text
    assert "prefix hits 50.0%" in text
    for sentence in (
        "block 4 was copied to 10",
        "request 2 moved to the host",
        "resumed: request 2",
        "ended: request 1",
    ):
        assert sentence in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_it_fits_the_terminal(width):
    pool = Pool.of({**PICTURE, "blocks": PICTURE["blocks"] * 30, "requests": PICTURE["requests"] * 20})
    text = text_of(pool, width, 40, "no connection")
    assert all(len(line) <= width for line in text.splitlines())
    assert "and 8 more" in text
    assert "no connection" in text
    if width > 40:
        assert "running        8 + 7      tokens" in text
    small = text_of(pool, width, 24)
    assert ("more rows" in small) == (width < 80)


@pytest.mark.parametrize("height", [3, 6, 12, 24, 50])
def test_it_is_never_higher_than_the_terminal(height):
    """With many requests and a long note: the grid keeps a place beside them."""
    pool = Pool.of({**PICTURE, "blocks": PICTURE["blocks"] * 300, "requests": PICTURE["requests"] * 20})
    pool.update(STEP | {"requests": pool.requests})
    lines = text_of(pool, 60, height, "no connection" * 20).splitlines()
    assert len(lines) <= height
    if height >= 24:
        assert sum("·" in line for line in lines[:-1]) >= height // 6  # the legend has one too
        assert "block 4 was copied to 10" in "".join(lines)


def stream_of(*events: tuple[str, Any]) -> httpx2.Response:
    text = ": hello\n\n" + "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    return httpx2.Response(200, text=text, headers={"Content-Type": "text/event-stream"})


def test_it_connects_again_and_waits_longer_each_time():
    answers = iter(
        [
            stream_of(("map", PICTURE), ("step", STEP)),
            httpx2.ConnectError("refused"),
            httpx2.Response(503, text="dead"),
            stream_of(("map", PICTURE)),
        ]
    )

    def answer(_: httpx2.Request) -> httpx2.Response:
        each = next(answers)
        if isinstance(each, Exception):
            raise each
        return each

    waits: list[float] = []
    with httpx2.Client(base_url="http://x", transport=httpx2.MockTransport(answer)) as client:
        seen = pictures(client, waits.append)
        notes = [next(seen)[1] for _ in range(6)]
    assert notes[:2] == [None, None]
    assert "ended the stream" in (notes[2] or "")
    assert "refused" in (notes[3] or "")
    assert "503" in (notes[4] or "")
    assert notes[5] is None
    assert waits == [0.5, 1.0, 2.0]


def answering(*answers: httpx2.Response) -> httpx2.Client:
    each = iter(answers)
    return httpx2.Client(base_url="http://x", transport=httpx2.MockTransport(lambda _: next(each)))


def test_the_pool_of_a_large_gpu():
    """Its first event is larger than the megabyte that the client takes unless it is told otherwise."""
    large = {**PICTURE, "blocks": PICTURE["blocks"] * 20_000}
    with answering(stream_of(("map", large))) as client:
        pool, note = next(pictures(client))
    assert note is None
    assert pool is not None
    assert len(pool.blocks) == 200_000


def test_a_server_that_comes_back_with_another_key():
    refuses = httpx2.Response(401, json={"error": {"message": "another key"}})
    with answering(stream_of(("map", PICTURE)), refuses) as client:
        seen = pictures(client, lambda _: None)
        assert [next(seen)[1] is None for _ in range(2)] == [True, False]
        with pytest.raises(RuntimeError, match="answers 401: another key"):
            next(seen)


def test_a_stream_of_something_else():
    with answering(stream_of(("map", [1, 2]))) as client, pytest.raises(ValueError, match=r"JSON object, got '\[1, 2"):
        next(pictures(client))


def test_a_server_as_it_runs():
    """The whole way: what is drawn last is an empty pool, and on the way there were shared blocks."""
    with serving(slow(tiny_llm())) as server, client_of(server) as client:
        drawn: list[str] = []
        is_over = threading.Event()

        def look() -> None:
            for pool, note in pictures(client):
                assert note is None
                assert pool is not None
                drawn.append(text_of(pool))
                if is_over.is_set() and pool.stats["num_used_blocks"] == 0:
                    return

        thread = threading.Thread(target=look)
        thread.start()
        wait_until(lambda: drawn)
        with connection(server, {**LONG, "prompt": prompt_of(6), "n": 3, "temperature": 30.0}):
            wait_until(lambda: any("copied to" in text for text in drawn))
            wait_until(lambda: any("3 running" in text for text in drawn))
        is_over.set()
        thread.join(60)
        assert any("\n3" in text for text in drawn)
        assert "ended: request" in drawn[-1]


def test_the_command():
    run = CliRunner().invoke
    with serving() as server:
        shown = run(app, ["watch", server.url, "--once"])
        assert shown.exit_code == 0
        assert "0 of 64 blocks of 4" in shown.stdout
        assert "·" * 64 in shown.stdout
        assert "\x1b" not in shown.stdout
        piped = run(app, ["watch", server.url])
        assert (piped.exit_code, piped.stdout) == (2, "")
        assert "not a terminal: use --once" in piped.stderr
    with serving(limits=Limits(api_key="key")) as server:
        refused = run(app, ["watch", server.url])
        assert refused.exit_code == 2
        assert "answers 401" in refused.stderr
        assert run(app, ["watch", server.url, "--once", "--api-key", "key"]).exit_code == 0
    nobody = run(app, ["watch", "http://127.0.0.1:1"])
    assert nobody.exit_code == 2
    assert "no server answers at http://127.0.0.1:1" in nobody.stderr
    for url in ("x", "http://[::1"):
        assert "url must be a server's" in run(app, ["watch", url]).stderr


def test_a_terminal_is_left_as_it_was(monkeypatch):
    """Ctrl-C comes through, and the screen of its own is closed."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)

    def interrupted(client: httpx2.Client) -> Any:
        yield Pool.of(PICTURE), None
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedjax.serving.watch.pictures", interrupted)
    with serving() as server, pytest.raises(KeyboardInterrupt):
        watch(server.url, console=console)
    written = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "\x1b[?1049h" in written
    assert "\x1b[?1049l" in written
