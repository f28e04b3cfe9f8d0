"""Clients that go away, queues that are full, engines that fail, servers that stop: nothing is lost, nothing leaks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_cases import client_of, events_of, serving, slow, wait_until
from tiny_engine import ascii_tokenizer, prompt_of, tiny_llm

from pagedjax.llm import LLM
from pagedjax.serving import engine_loop, streams
from pagedjax.serving.app import Limits
from pagedjax.serving.job import EngineError, Job
from pagedjax.serving.server import Server

LONG = {"prompt": "hello", "max_tokens": 50, "temperature": 0, "ignore_eos": True}


class Gate:
    """Steps of an engine that wait for it to open; each may raise."""

    def __init__(self, llm: LLM) -> None:
        self.open = threading.Event()
        self.error: BaseException | None = None
        self.num_errors = 0
        self._step = llm.engine.step
        llm.engine.step = self.step

    def step(self) -> Any:
        self.open.wait(60.0)
        if self.error is not None and self.num_errors > 0:
            self.num_errors -= 1
            raise self.error
        return self._step()


@contextmanager
def connection(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[socket.socket]:
    """A request on a bare socket, which is closed at the end, whatever came."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + data)
        yield sock


def read_until(sock: socket.socket, text: bytes) -> bytes:
    data = b""
    while text not in data:
        more = sock.recv(4096)
        assert more, data
        data += more
    return data


CASES: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "whole": {},
    "n=3": {"stream": True, "n": 3, "temperature": 1.0},
    "two prompts": {"prompt": ["a", "b"]},
    "text held back": {"stream": True, "stop": ["\x7f" * 200], "logit_bias": {"127": 100}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_client_that_goes_in_the_middle(case):
    """B61. The engine is aborted although tokens flow, and also when nothing is due to be written."""
    with serving(slow(tiny_llm())) as server:
        loop = server.backend.loop
        with connection(server, {**LONG, **CASES[case]}) as sock:
            wait_until(lambda: loop.stats.num_output_tokens >= 3)
            if case in ("stream", "n=3"):
                read_until(sock, b"data: ")
        wait_until(lambda: loop.num_pending == 0)
        assert loop.stats.num_output_tokens < 40 * CASES[case].get("n", 1)
        with client_of(server) as client:
            assert 'finished_reason="abort"' in client.get("/metrics").text


@pytest.mark.parametrize("case", CASES)
def test_a_client_that_goes_before_the_first_token(case):
    """B61: while its request is queued, or its prompt is computed."""
    llm = tiny_llm()
    gate = Gate(llm)
    with serving(llm) as server:
        loop = server.backend.loop
        with connection(server, {**LONG, **CASES[case]}):
            wait_until(lambda: loop.num_pending > 0)
        time.sleep(1.0)  # it is noticed while no step ends
        gate.open.set()
        wait_until(lambda: loop.num_pending == 0)
        assert loop.stats.num_output_tokens < 40


def test_many_clients_that_go_at_once():
    with serving(slow(tiny_llm())) as server:
        loop = server.backend.loop
        started = threading.Barrier(21)

        def go() -> None:
            with connection(server, {**LONG, "stream": True}) as sock:
                read_until(sock, b"HTTP/1.1 200")
                started.wait(60)

        threads = [threading.Thread(target=go) for _ in range(20)]
        for thread in threads:
            thread.start()
        started.wait(60)
        for thread in threads:
            thread.join()
        wait_until(lambda: loop.num_pending == 0)


def test_a_stream_before_its_first_token_shows_that_it_is_alive(monkeypatch):
    monkeypatch.setattr("pagedjax.serving.streams.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("pagedjax.serving.streams.LOOK_S", 0.05)
    llm = tiny_llm()
    gate = Gate(llm)
    with serving(llm) as server, connection(server, {**LONG, "stream": True}) as sock:
        read_until(sock, b": still here\n\n")
        gate.open.set()
        read_until(sock, b"[DONE]")


def test_a_reader_that_is_slow_gets_everything():
    with serving() as server, connection(server, {**LONG, "stream": True, "n": 4}) as sock:
        wait_until(lambda: server.backend.loop.num_pending == 0 and server.backend.loop.stats.num_finished)
        data = b""
        while b"[DONE]" not in data:
            data += sock.recv(7)
        assert data.count(b'"finish_reason":"length"') == 4


def test_more_calls_than_are_answered_at_once():
    llm = slow(tiny_llm(), 0.05)
    with serving(llm, limits=Limits(max_calls=2)) as server, client_of(server) as client:
        with connection(server, LONG) as first, connection(server, LONG):
            wait_until(lambda: server.backend.loop.num_pending == 2)
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert client.get("/health").status_code == 200  # what is quick has threads of its own
            read_until(first, b"usage")
        wait_until(lambda: client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200)


def test_more_completions_than_the_queue_ever_holds():
    with serving(max_queue=4) as server, client_of(server) as client:
        refused = client.post("/v1/completions", json={**LONG, "n": 5})
        assert refused.status_code == 400
        assert "the 4 that may be pending" in refused.json()["error"]["message"]


def test_a_full_queue_says_when_to_come_again():
    llm = slow(tiny_llm(), 0.05)
    with serving(llm, max_queue=2) as server, client_of(server) as client:
        body = {**LONG, "n": 2, "temperature": 1.0}
        with connection(server, body) as sock:
            wait_until(lambda: server.backend.loop.num_pending == 1)
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert "2 of the 2 places" in refused.json()["error"]["message"]
            read_until(sock, b"usage")


def test_a_step_that_fails_once_is_not_seen():
    """B67, B74: all are computed again, and get the same tokens."""
    llm = tiny_llm()
    gate = Gate(llm)
    gate.open.set()
    with serving(llm) as server, client_of(server) as client:
        expected = client.post("/v1/completions", json=LONG).json()["choices"]
        gate.error, gate.num_errors = RuntimeError("a device error"), 2
        assert client.post("/v1/completions", json=LONG).json()["choices"] == expected
        assert gate.num_errors == 0


def test_steps_that_fail_end_all_that_is_pending_and_the_next_ones_are_served():
    """B67: an error at once, in the stream as an event."""
    llm = tiny_llm()
    gate = Gate(llm)
    with serving(llm) as server, client_of(server) as client:
        gate.error, gate.num_errors = RuntimeError("a device error"), engine_loop.FAILURES_TO_FAIL_ALL
        answers: dict[str, Any] = {}

        def ask(name: str, **more: Any) -> None:
            with client.stream("POST", "/v1/completions", json={**LONG, **more}) as response:
                answers[name] = (response.status_code, response.read().decode())

        threads = [
            threading.Thread(target=ask, args=("whole",)),
            threading.Thread(target=ask, args=("stream",), kwargs={"stream": True}),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.backend.loop.num_pending > 0)
        gate.open.set()
        for thread in threads:
            thread.join(60)
        assert answers["whole"][0] == 500 or answers["stream"][0] == 200
        failed = [text for _, text in answers.values() if "the engine failed: RuntimeError" in text]
        assert failed  # one of them may have come after the failures
        assert client.post("/v1/completions", json=LONG).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_failure_is_not_taken_for_the_end(num_taken):
    """B67: with outputs that nobody has taken yet, which a slow reader leaves, too."""
    llm = tiny_llm()
    llm.engine.add_request([1, 2], tiny_params(), "a")
    (output,) = llm.engine.step()
    job = Job(["a"], lambda _: None)
    job.put(output)
    if num_taken:
        job.take(0.0)
    job.fail(EngineError("the engine failed"))
    assert not job.is_finished
    with pytest.raises(EngineError, match="the engine failed"):
        streams.wait(job, lambda: False)
    with pytest.raises(EngineError, match="the engine failed"):
        job.take(0.0)


def test_an_engine_that_only_fails_is_dead():
    """B67: pending requests get an error, new ones 503, and /health says so."""
    llm = tiny_llm()
    gate = Gate(llm)
    gate.open.set()
    gate.error, gate.num_errors = RuntimeError("a device error"), 10**9
    with serving(llm) as server, client_of(server) as client:
        statuses = [client.post("/v1/completions", json=LONG).status_code for _ in range(3)]
        assert statuses[0] == 500
        assert statuses[-1] == 503
        assert client.get("/health").json() == {"status": "dead"}
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        assert client.get("/engine/map").status_code == 503
        assert client.get("/v1/models").status_code == 200


class ThreadEnd(BaseException):
    """Not an Exception: nothing catches it on the way."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_exits():
    """B67: whoever waits gets an error at once."""
    llm = tiny_llm()
    gate = Gate(llm)
    gate.error, gate.num_errors = ThreadEnd(), 1
    with serving(llm) as server, client_of(server) as client:
        threading.Timer(0.2, gate.open.set).start()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            (error,) = events_of(response)
        assert error["error"]["type"] == "server_error"
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.post("/v1/completions", json=LONG).status_code == 503


def test_an_engine_that_is_stuck():
    """B67: health tells; new requests are refused at once; when the step ends all is well."""
    llm = tiny_llm()
    gate = Gate(llm)
    with serving(llm, stuck_after_s=0.3) as server, client_of(server) as client, connection(server, LONG) as sock:
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json() == {"status": "stuck"}
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert "more than 0.3 s" in refused.json()["error"]["message"]
        gate.open.set()
        read_until(sock, b"usage")
        wait_until(lambda: client.get("/health").status_code == 200)


def test_an_idle_engine_is_not_stuck():
    with serving(stuck_after_s=0.01) as server, client_of(server) as client:
        time.sleep(0.1)
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_what_waits_for_a_stuck_engine_is_told(monkeypatch):
    """B67: not only what comes when it is known. What was not begun is not done later either."""
    llm = tiny_llm()
    gate = Gate(llm)
    with serving(llm, stuck_after_s=2.0) as server, client_of(server) as client, connection(server, LONG) as sock:
        wait_until(lambda: server.backend.loop.num_pending == 1)
        answers = [client.get("/engine/map"), client.post("/v1/completions", json=LONG)]
        answers.append(client.delete("/engine/requests/x"))
        assert [answer.status_code for answer in answers] == [503, 503, 503]
        assert "in one step" in answers[0].json()["error"]["message"]
        gate.open.set()
        read_until(sock, b"usage")
        assert server.backend.loop.call(lambda engine: engine.stats().num_finished) == 1


def test_more_watchers_than_there_are_threads_for():
    """They are refused, and take nothing from those who ask."""
    limits = Limits(max_calls=2, max_watchers=2)
    with serving(limits=limits) as server, client_of(server) as client:
        with client.stream("GET", "/engine/events") as first, client.stream("GET", "/engine/events") as second:
            assert next(named_events(first.iter_lines()))[0] == next(named_events(second.iter_lines()))[0] == "map"
            refused = [client.get("/engine/events") for _ in range(20)]
            assert {answer.status_code for answer in refused} == {429}
            assert "2 clients watch the pool" in refused[0].json()["error"]["message"]
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=LONG).status_code == 200
        wait_until(lambda: server.backend.loop.view._num_watchers == 0)
        with client.stream("GET", "/engine/events") as response:
            assert response.status_code == 200


def test_a_shutdown_does_not_wait_for_watchers(caplog):
    """A page that is open somewhere: its stream ends."""
    with serving() as server, client_of(server) as client, client.stream("GET", "/engine/events") as response:
        lines = response.iter_lines()
        assert next(named_events(lines))[0] == "map"
        server.stop()
        assert "still running" not in caplog.text
        list(lines)  # it has an end


class FailingTokenizer:
    """Has no text for one token."""

    def __init__(self, bad: int) -> None:
        self._tokenizer, self._bad = ascii_tokenizer(), bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    backend_tokenizer = None

    def decode(self, token_ids: Any, **options: Any) -> Any:
        if self._bad in token_ids:
            raise KeyError(self._bad)
        return self._tokenizer.decode(token_ids, **options)

    def __deepcopy__(self, _: Any) -> Any:
        return self


def test_a_detokenizer_that_fails_on_one_request_leaves_the_others():
    """B67: 500 for the one, answers for its neighbours."""
    with serving(slow(tiny_llm(tokenizer=FailingTokenizer(65)))) as server, client_of(server) as client:
        answers: dict[str, Any] = {}

        def ask(name: str, **more: Any) -> None:
            answers[name] = client.post("/v1/completions", json={**LONG, **more})

        bias = {"logit_bias": {"65": 100}, "max_tokens": 5}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("bad", bias),
            ("bad stream", {**bias, "stream": True}),
            ("good", {}),
        ]
        threads = [threading.Thread(target=ask, args=(name,), kwargs=more) for name, more in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers["bad"].status_code == 500
        assert answers["bad"].json()["error"]["type"] == "server_error"
        (error,) = [event for event in events_of(answers["bad stream"]) if "error" in event]
        assert error["error"]["code"] == "engine_error"
        assert answers["good"].status_code == 200
        assert len(answers["good"].json()["choices"][0]["text"]) == 50


def test_a_shutdown_drains():
    with serving(slow(tiny_llm())) as server, client_of(server) as client:
        result: list[Any] = []
        with connection(server, LONG) as sock:
            wait_until(lambda: server.backend.loop.num_pending == 1)
            draining = threading.Thread(target=lambda: result.append(server.backend.loop.drain(60.0)))
            draining.start()
            wait_until(lambda: server.backend.loop.is_draining)
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            assert b"length" in read_until(sock, b"usage")
            draining.join(60)
        assert result == [True]


def test_a_shutdown_that_takes_too_long_ends_the_rest_with_an_error():
    llm = slow(tiny_llm(), 0.1)
    with serving(llm) as server, connection(server, {**LONG, "stream": True}) as sock:
        read_until(sock, b"data: ")
        assert not server.backend.loop.drain(0.2)
        server.backend.loop.stop()
        assert b"the server has shut down" in read_until(sock, b'"error"') + sock.recv(4096)


def test_watching_the_pool():
    """The first event has the whole pool, the others what changed; together they are the pool as it is."""
    with serving(slow(tiny_llm())) as server, client_of(server) as client:
        with client.stream("GET", "/engine/events") as response:
            events = named_events(response.iter_lines())
            name, picture = next(events)
            assert name == "map"
            assert len(picture["blocks"]) == picture["num_blocks"] == 64
            blocks, step = list(picture["blocks"]), picture
            with connection(server, {**LONG, "n": 3, "temperature": 30.0, "prompt": prompt_of(6)}):
                kinds, most_shared, most_running = set[str](), 0, 0
                while "finish" not in kinds or step["requests"]:
                    name, step = next(events)
                    assert name == "step"
                    for number, *block in step["changed"]:
                        blocks[number - 1] = block
                    kinds |= {event["kind"] for event in step["events"]}
                    held = {key for block in blocks for key in block[3]}
                    assert held <= {request["key"] for request in step["requests"]}
                    most_shared = max(most_shared, step["stats"]["num_shared_blocks"])
                    most_running = max(most_running, step["stats"]["num_running"])
                assert (most_shared, most_running) in ((1, 3), (2, 3))  # with the one that is copied, if that is seen
                assert "copy" in kinds
        assert all(block[3] == [] for block in blocks)
        fresh = client.get("/engine/map").json()
        assert fresh["blocks"] == blocks
        wait_until(lambda: server.backend.loop.view._num_watchers == 0)


def named_events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_preemptions_are_seen():
    with serving(slow(tiny_llm(num_blocks=10, enable_prefix_caching=False))) as server, client_of(server) as client:
        with client.stream("GET", "/engine/events") as response:
            events = named_events(response.iter_lines())
            next(events)
            kinds: dict[str, Any] = {}
            states: set[str] = set()
            with connection(server, {**LONG, "prompt": [prompt_of(8, 1), prompt_of(8, 2)], "max_tokens": 24}):
                while "resume" not in kinds:
                    _, step = next(events)
                    kinds |= {event["kind"]: event for event in step["events"]}
                    states |= {request["state"] for request in step["requests"]}
        assert kinds["preempt"]["how"] == "recompute"
        assert kinds["preempt"]["key"] == kinds["resume"]["key"]
        assert {"running", "preempted"} <= states


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(number, tmp_path):
    """`pagedjax serve`: starts, answers, drains at a signal, and ends with status 0."""
    environment = {**os.environ, "PAGEDJAX_API_KEY": "key"}
    command = [
        sys.executable,
        "-m",
        "pagedjax",
        "serve",
        "smollm2-135m-instruct",
        "--port",
        "0",
        "--warm-up",
        "none",
        "--no-progress",
    ]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "4"], stderr=stderr, env=environment, cwd=Path(__file__).parents[1]
        )
    try:
        wait_until(lambda: "http://" in log.read_text() or process.poll() is not None, timeout_s=300)
        url = log.read_text().split("at ")[-1].split(" ")[0]
        import openai

        with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
            messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
            stream = client.chat.completions.create(
                model="smollm2-135m-instruct", messages=messages, temperature=0, stream=True
            )
            first = next(iter(stream))
            assert first.choices
            process.send_signal(number)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "The capital of France is Paris."
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_loop_without_http():
    """What `submit` raises, and that a call of several prompts is queued whole or not at all."""
    with serving() as server:
        loop = server.backend.loop
        good = engine_loop.NewRequest("a", [1, 2], tiny_params())
        bad = engine_loop.NewRequest("b", [1] * 100, tiny_params())
        with pytest.raises(ValueError, match="can never fit"):
            loop.submit([good, bad])
        assert loop.num_pending == 0
        job = loop.submit([good])
        outputs = wait_for(lambda: [output for output in job.take(1.0) if output.finished])
        assert len(outputs[0].outputs[0].token_ids) == 3


def tiny_params() -> Any:
    from pagedjax.sampling.params import SamplingParams

    return SamplingParams(max_tokens=3, ignore_eos=True)


def wait_for(get: Callable[[], Any]) -> Any:
    while not (value := get()):
        pass
    return value
