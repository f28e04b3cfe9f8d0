"""`bench_serve` measures what a server does: its figures against a server with a known schedule on a virtual clock."""

import asyncio
import io
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from rich.console import Console
from serving_cases import serving
from typer.testing import CliRunner

from pagedjax.serving.bench import plots, run
from pagedjax.serving.bench.client import Outcome, message_of
from pagedjax.serving.bench.lengths import Lengths, draw_lengths, read_trace, shorten
from pagedjax.serving.bench.metrics import Objectives, max_in_flight, quantiles, summarize
from pagedjax.serving.bench.prompts import WORDS, WordPrompts
from pagedjax.serving.bench.report import BenchResult, as_table
from pagedjax.serving.bench.run import bench_serve, parse_rates
from pagedjax.serving.cli import app
from pagedjax.simulation.workload import poisson_requests

URL = "http://server.test"


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.now_s = max(self.now_s, loop._scheduled[0].when())
        loop.__class__.__base__._run_once(self)


@dataclass
class FakeServer:
    """Answers after `ttft_s`, then a token every `tpot_s`; at most `places` requests at once."""

    ttft_s: float = 0.5
    tpot_s: float = 0.125
    places: int = 10**6
    has_usage: bool = True
    token_ids: list[int] | None = field(default_factory=lambda: list(range(100, 150)))
    spoil: Callable[[int], Any] = lambda number: None
    """A response in place of the answer to a request, by its number."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "fake", "max_model_len": 1024}]})
        if request.url.path == "/tokenize":
            return (
                httpx2.Response(404)
                if self.token_ids is None
                else httpx2.Response(200, json={"tokens": self.token_ids})
            )
        body = json.loads(request.content)
        self.bodies.append(body)
        spoiled = self.spoil(len(self.bodies))
        if spoiled is not None:
            if isinstance(spoiled, Exception):
                raise spoiled
            return spoiled
        return sse(self._answer(body))

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        if not hasattr(self, "_free"):
            self._free = asyncio.Semaphore(self.places)
        async with self._free:
            is_chat = "messages" in body
            if is_chat:
                yield event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            await asyncio.sleep(self.ttft_s)
            for i in range(body["max_tokens"]):
                if i:
                    await asyncio.sleep(self.tpot_s)
                text: dict[str, Any] = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
                yield event({"choices": [{**text, "finish_reason": None}]})
        if self.has_usage:
            prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
            num_prompt = 7 + 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
            yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


def sse(parts: AsyncIterator[str]) -> httpx2.Response:
    async def encoded() -> AsyncIterator[bytes]:
        async for part in parts:
            yield part.encode()

    return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=encoded())


def sse_of(*parts: str) -> httpx2.Response:
    async def each() -> AsyncIterator[str]:
        for part in parts:
            yield part

    return sse(each())


@contextmanager
def virtual(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`bench_serve` speaks to this server, on a virtual clock."""
    transport = httpx2.MockTransport(server)

    def run_virtual(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    with monkeypatch.context() as patch:
        patch.setattr(run, "_connected", lambda options: httpx2.AsyncClient(base_url=options.url, transport=transport))
        patch.setattr(run.asyncio, "run", run_virtual)
        yield


def bench(server: FakeServer, monkeypatch: pytest.MonkeyPatch, **options: Any) -> BenchResult:
    with virtual(server, monkeypatch):
        return bench_serve(URL, **{"num_requests": 40, "lengths": "20,8", "progress": False, "plots": False, **options})


def outcome(planned: float, sent: float, chunks: list[float], num_output: int, **more: Any) -> Outcome:
    ended = {"end_s": chunks[-1] if chunks else sent, "num_wanted_tokens": num_output}
    options = {"num_prompt_tokens": 10, "num_output_tokens": num_output, **ended, **more}
    return Outcome(planned_s=planned, sent_s=sent, chunk_s=chunks, **options)


def test_figures_of_given_times():
    outcomes = [
        outcome(0.0, 0.0, [1.0, 1.5, 2.0], 3),
        outcome(1.0, 1.5, [2.0, 5.0], 5, num_wanted_tokens=8),
        outcome(2.0, 2.0, [3.0], 1),
        outcome(3.0, 3.0, [4.0], 0, error="HTTP 500", end_s=10.0),
    ]
    summary = summarize(outcomes, Objectives(ttft_s=1.0, tpot_s=0.6))
    assert summary.duration_s == 10.0
    assert (summary.num_requests, summary.num_completed, summary.failures) == (4, 3, {"HTTP 500": 1})
    assert (summary.num_short, summary.num_late, summary.max_late_s, summary.max_in_flight) == (1, 1, 0.5, 2)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (30, 9)
    assert summary.requests_per_s == pytest.approx(0.3)
    assert summary.output_tokens_per_s == pytest.approx(0.9)
    assert summary.total_tokens_per_s == pytest.approx(3.9)
    assert summary.ttft_s == quantiles([1.0, 1.0, 1.0])
    assert summary.tpot_s == quantiles([0.5, 0.75])
    assert summary.itl_s == quantiles([0.5, 0.5, 3.0])
    assert summary.e2e_s == quantiles([2.0, 4.0, 1.0])
    assert summary.normalized_s == quantiles([2 / 3, 4 / 5, 1.0])
    assert (summary.num_good, summary.goodput) == (2, pytest.approx(0.2))
    assert summarize(outcomes).goodput is None
    assert summarize(outcomes, Objectives(e2e_s=1.5)).num_good == 1


def test_quantiles_are_linear_between_values():
    values = quantiles(float(i) for i in range(1, 102))
    assert values is not None
    assert (values.mean, values.p50, values.p90, values.p99, values.max) == (51.0, 51.0, 91.0, 100.0, 101.0)
    assert quantiles([None]) is None
    assert max_in_flight([outcome(0.0, 0.0, [1.0], 1), outcome(1.0, 1.0, [2.0], 1)]) == 1
    assert summarize([]).requests_per_s == 0.0


def test_a_server_that_keeps_up(monkeypatch):
    """Its schedule comes back exactly, and requests come when the simulator's would."""
    server = FakeServer()
    result = bench(server, monkeypatch, rates=[2.0], seed=5, slo_ttft_s=0.5, slo_tpot_s=0.125)
    (each,) = result.results
    pairs = draw_lengths("20,8", 40, seed=5).pairs
    arrivals = [request.arrival_s for request in poisson_requests(pairs.tolist(), 2.0, seed=5)]
    assert [o.planned_s for o in each.outcomes] == arrivals
    np.testing.assert_allclose([o.sent_s for o in each.outcomes], arrivals, atol=1e-9)
    np.testing.assert_allclose([o.chunk_s[0] - o.planned_s for o in each.outcomes], 0.5, atol=1e-9)
    for o, (num_prompt, num_output) in zip(each.outcomes, pairs.tolist(), strict=True):
        assert (o.num_prompt_tokens, o.num_output_tokens, len(o.chunk_s)) == (num_prompt, num_output, num_output)
        assert o.end_s - o.planned_s == pytest.approx(0.5 + 0.125 * (num_output - 1))
    summary = each.summary
    assert summary.tpot_s is not None
    assert summary.tpot_s.p99 == pytest.approx(0.125)
    assert summary.num_late == 0
    assert summary.num_completed == 40
    sent = server.bodies[-1]
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert (sent["temperature"], sent["ignore_eos"], sent["model"]) == (0.0, True, "fake")
    assert set(sent["prompt"]) <= set(range(100, 150))


def test_waiting_is_part_of_the_latency(monkeypatch):
    """Whether a server makes requests wait or the client does for a place: an open loop hides nothing."""
    options: dict[str, Any] = {"rates": [4.0], "seed": 1}
    (queued,) = bench(FakeServer(places=1), monkeypatch, **options).results
    (waited,) = bench(FakeServer(), monkeypatch, max_concurrency=1, **options).results
    ours, theirs = queued.summary, waited.summary
    assert ours.ttft_s is not None
    assert theirs.ttft_s is not None
    assert ours.ttft_s.max > 10
    assert theirs.ttft_s.p99 == pytest.approx(ours.ttft_s.p99)
    assert theirs.e2e_s is not None
    assert theirs.e2e_s.mean == pytest.approx(np.mean([o.end_s - o.planned_s for o in queued.outcomes]))
    assert (ours.num_late, ours.max_in_flight > 20) == (0, True)
    assert theirs.num_late > 30
    assert theirs.max_in_flight == 1
    (closed,) = bench(FakeServer(), monkeypatch, max_concurrency=1, rates=[math.inf]).results
    assert closed.summary.ttft_s is not None
    assert closed.summary.ttft_s.max == pytest.approx(0.5)
    assert (closed.summary.num_late, closed.summary.max_in_flight) == (0, 1)


FAILURES = {
    "HTTP 429": httpx2.Response(429, json={"error": {"message": "too many", "type": "x"}}),
    "HTTP 500": httpx2.Response(500, text="oh\nno"),
    "not a stream": httpx2.Response(200, json={"choices": []}),
    "broken stream": sse_of(event({"choices": [{"text": "a"}]})),
    "not JSON": sse_of("data: {nonsense\n\n"),
    "error in the stream": sse_of(event({"error": {"message": "lost"}})),
    "no answer": sse_of("data: [DONE]\n\n"),
    "not as OpenAI's": sse_of(event({"choices": [7]})),
    "no connection": httpx2.ConnectError("refused"),
}


@pytest.mark.parametrize("kind", [*FAILURES, "reset", "timeout"])
def test_failures_are_counted_by_their_kind(kind, monkeypatch):
    others = {"reset": httpx2.ReadError("reset"), "timeout": sse(FakeServer(ttft_s=100.0)._answer({"max_tokens": 1}))}
    spoiled: Any = {**FAILURES, **others}[kind]
    server = FakeServer(spoil=lambda number: spoiled if number == 10 else None)
    (result,) = bench(server, monkeypatch, num_requests=20, timeout_s=60, slo_ttft_s=60).results
    assert result.summary.failures == {{"reset": "broken stream"}.get(kind, kind): 1}
    assert (result.summary.num_completed, result.summary.num_good) == (19, 19)
    failed = next(o for o in result.outcomes if o.error)
    if kind == "HTTP 429":
        assert failed.detail == "too many"
    if kind == "timeout":
        assert failed.end_s - failed.sent_s == pytest.approx(60.0)
    text = text_of(BenchResult(settings={}, notes=[], results=[result]))
    assert "19 of 20 requests completed" in text
    assert f"FAILED: {failed.error} 1" in text


def test_the_first_failure_of_a_kind_is_shown(monkeypatch, capsys):
    refusals = {5: 429, 6: 429, 7: 500}
    server = FakeServer(
        spoil=lambda i: httpx2.Response(refusals[i], json={"error": f"no {i}"}) if i in refusals else None
    )
    bench(server, monkeypatch, num_requests=9, progress=True)
    shown = capsys.readouterr().err
    assert re.findall(r"HTTP \d+: no \d", shown) == ["HTTP 429: no 5", "HTTP 500: no 7"]


@pytest.mark.parametrize(
    "usage", [[1], 7, {"completion_tokens": "many"}, {"completion_tokens": 1e308}, {"prompt_tokens": -1}]
)
def test_usage_that_makes_no_sense_is_a_failure_of_one_request(usage, monkeypatch):
    spoiled = sse_of(event({"choices": [{"text": "a"}]}), event({"choices": [], "usage": usage}), "data: [DONE]\n\n")
    server = FakeServer(spoil=lambda number: spoiled if number == 3 else None)
    (result,) = bench(server, monkeypatch, num_requests=5).results
    assert result.summary.failures == {"not as OpenAI's": 1}
    assert result.summary.num_completed == 4


def text_of(result: BenchResult) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(as_table(result))
    return console.export_text()


def test_messages_of_errors():
    assert message_of('{"error": {"message": "no"}}') == "no"
    assert message_of('{"error": "no"}') == "no"
    assert message_of("<html>\n bad") == "<html> bad"
    assert message_of("[1]") == "[1]"


def test_a_server_without_usage_or_tokenize_gets_words_and_its_parts_are_counted(monkeypatch):
    server = FakeServer(has_usage=False, token_ids=None)
    result = bench(server, monkeypatch, num_requests=5)
    assert "no usage" in result.notes[2]
    assert set(server.bodies[-1]["prompt"].split()) <= set(WORDS)
    assert [o.num_output_tokens for o in result.results[0].outcomes] == [b["max_tokens"] for b in server.bodies[-5:]]


def test_words_for_a_chat_have_the_wanted_tokens(monkeypatch):
    server = FakeServer()
    result = bench(server, monkeypatch, endpoint="chat", lengths="200,8", ignore_eos=False, extra_body={"top_p": 0.5})
    wanted = draw_lengths("200,8", 40).pairs[:, 0]
    got = np.array([o.num_prompt_tokens for o in result.results[0].outcomes])
    assert (np.abs(wanted - got) <= 1)[wanted > 10].all()
    assert "2.00 tokens after 7" in result.notes[2]
    body = server.bodies[-1]
    assert (body["top_p"], "ignore_eos" in body, body["messages"][0]["role"]) == (0.5, False, "user")
    ttft_s = [o.chunk_s[0] - o.planned_s for o in result.results[0].outcomes]
    np.testing.assert_allclose(ttft_s, 0.5, atol=1e-9)  # what opens a chat's stream at once is no token
    assert WordPrompts("", 1.0, 50.0).make(3, np.random.default_rng(0)) in WORDS


def test_ids_of_a_vocabulary_and_prompts_that_never_come_again(monkeypatch):
    server = FakeServer(token_ids=None)
    bench(server, monkeypatch, vocab_size=50_000, rates=[1.0, 1.0], num_requests=10)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    assert max(map(max, prompts)) > 40_000
    server = FakeServer(token_ids=None)
    bench(server, monkeypatch, prompts="text", num_requests=2)
    assert all(isinstance(body["prompt"], str) for body in server.bodies)


def test_a_server_that_takes_no_ids_gets_words(monkeypatch):
    refusal = httpx2.Response(400, json={"error": {"message": "prompt must be text"}})
    server = FakeServer(spoil=lambda number: refusal if number == 1 else None)
    result = bench(server, monkeypatch, num_requests=2)
    assert result.notes[2].startswith("Prompts: random words")
    with pytest.raises(RuntimeError, match="refused a trial request: HTTP 400: prompt must be text"):
        bench(FakeServer(spoil=lambda number: refusal), monkeypatch, prompts="text")


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("num_prefill_tokens,num_decode_tokens", "30,7"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,30,7"),
        ("timestamp,input_length,output_length,hash_ids", "0,30,7,0 1 2"),
        ("input_len,output_len", "30.0,7"),
    ],
)
def test_traces_are_read(header, line, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("\n".join([header, line, line.replace("30", "0"), line.replace("7", "9"), ""]))
    assert read_trace(file).tolist() == [[30, 7], [30, 9]]


def test_lengths(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("input_len,output_len\n" + "\n".join(f"{i},{2 * i}" for i in range(1, 101)))
    drawn = draw_lengths(str(file), 50)
    assert len({tuple(pair) for pair in drawn.pairs.tolist()}) == 50
    assert (drawn.pairs[:, 1] == 2 * drawn.pairs[:, 0]).all()
    assert len(draw_lengths(str(file), 150).pairs) == 150
    scaled = draw_lengths(str(file), 100, means="20,10")
    assert scaled.pairs.mean(axis=0) == pytest.approx([20, 10], abs=0.3)
    assert "scaled to means 20,10" in scaled.source
    paper = draw_lengths("ShareGPT", 200).pairs
    assert paper.mean(axis=0) == pytest.approx([161.31, 337.99], rel=0.05)
    assert abs(np.corrcoef(paper.T)[0, 1]) < 0.2
    short = shorten(Lengths("", np.array([[900, 300], [10, 10], [1, 5000], [5000, 1]])), 616, reserve=16)
    assert short.pairs.tolist() == [[450, 150], [10, 10], [1, 599], [599, 1]]
    assert short.num_shortened == 3
    with pytest.raises(ValueError, match="too short"):
        shorten(drawn, 64, reserve=64)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rate 0": ({"rates": [0.0]}, "rates must be"),
    "no rate": ({"rates": []}, "rates must be"),
    "requests": ({"num_requests": 0}, "num_requests must be"),
    "endpoint": ({"endpoint": "embeddings"}, "endpoint must be"),
    "prompts": ({"prompts": "images"}, "prompts must be"),
    "ids to a chat": ({"prompts": "ids", "endpoint": "chat"}, "a chat takes text"),
    "slo": ({"slo_ttft_s": -1.0}, "slo_ttft_s must be"),
    "concurrency": ({"max_concurrency": 0}, "max_concurrency must be"),
    "vocabulary": ({"vocab_size": 1}, "vocab_size must be"),
    "lengths": ({"lengths": "longish"}, "lengths: got 'longish'"),
    "means": ({"lengths": "1,x"}, "lengths: got '1,x'"),
    "means of means": ({"lengths": "1,2", "means": "1,2"}, "means scale the lengths of a file"),
    "model": ({"model": "other"}, "the server has fake"),
}


@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(options, text, monkeypatch):
    with pytest.raises(ValueError, match=text):
        bench(FakeServer(), monkeypatch, **options)


def test_other_errors_are_said(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="url must be"):
        bench_serve("127.0.0.1:8000")
    with pytest.raises(ConnectionError, match="no server answers"):
        bench_serve("http://127.0.0.1:9", progress=False)
    with pytest.raises(ValueError, match="rates: got '1,fast'"):
        parse_rates("1,fast")
    assert parse_rates("1, 2.5,inf") == [1.0, 2.5, math.inf]
    file = tmp_path / "trace.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="got the columns a, b"):
        read_trace(file)
    file.write_text("input_len,output_len\n1,x\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(file)
    file.write_text("input_len,output_len\n0,1\n")
    with pytest.raises(ValueError, match="no row"):
        read_trace(file)
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        bench(FakeServer(), monkeypatch, output=tmp_path, plots=True)
    refuses = httpx2.MockTransport(lambda request: httpx2.Response(401, json={"error": "who?"}))
    monkeypatch.setattr(run, "_connected", lambda options: httpx2.AsyncClient(base_url=URL, transport=refuses))
    with pytest.raises(PermissionError, match="who"):
        bench_serve(URL, progress=False)


def test_against_our_server(tmp_path):
    with serving() as server:
        result = bench_serve(
            f"{server.url}/v1/", rates=[50, math.inf], num_requests=6, lengths="12,6", output=tmp_path, slo_e2e_s=600,
            progress=False,
        )  # fmt: skip
    for each in result.results:
        summary = each.summary
        assert (summary.num_completed, summary.failures, summary.num_short) == (6, {}, 0)
        assert summary.num_output_tokens == sum(o.num_wanted_tokens for o in each.outcomes)
        assert summary.num_good == 6
        assert all(o.num_prompt_tokens > 0 and list(o.chunk_s) == sorted(o.chunk_s) for o in each.outcomes)
    assert "context of 64 tokens" in result.notes[0]
    data = json.loads((tmp_path / "results.json").read_text())
    assert [entry["rate"] for entry in data["results"]] == [50.0, "inf"]
    assert len(data["results"][0]["requests"]) == 6
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latencies.png", "results.json", "timeline.png"]
    assert "All rates" in text_of(result)


def test_figures_of_several_rates(monkeypatch, tmp_path):
    bench(FakeServer(places=4), monkeypatch, rates=[4.0, 1.0, 2.0], output=tmp_path, plots=True, slo_ttft_s=1.0)
    assert (tmp_path / "rates.png").stat().st_size > 5000


def test_a_key_is_sent_and_not_written(tmp_path, monkeypatch):
    options = {"api_key": "s3cret", "num_requests": 2, "output": tmp_path}
    bench(FakeServer(), monkeypatch, **options)
    assert "s3cret" not in (Path(tmp_path) / "results.json").read_text()
    sent = run._connected(run._Options(url=URL, rates=[1.0], num_requests=1, model=None, api_key="s3cret",
        endpoint="chat", prompts="auto", vocab_size=None, max_concurrency=None, objectives=Objectives(), fields={},
        seed=0, timeout_s=1.0, progress=False))  # fmt: skip
    assert sent.headers["Authorization"] == "Bearer s3cret"


def test_the_command(tmp_path):
    """Its options arrive, what it prints can be read by programs, and failures and bad options have their status."""
    command = ["bench-serve", "--no-progress", "--num-requests", "4", "--lengths", "8,6", "--no-plots"]
    with serving() as server:
        asked = [*command, server.url, "--rates", "200,inf", "--slo-ttft-s", "60", "--output", str(tmp_path)]
        result = CliRunner().invoke(app, [*asked, "--json"])
        assert result.exit_code == 0, result.output
        first, second = json.loads(result.stdout)["results"]
        assert (first["rate"], second["rate"]) == (200.0, "inf")
        assert first["num_completed"] == first["num_good"] == 4
        assert (tmp_path / "results.json").is_file()
        assert "4 of 4 requests completed" in CliRunner().invoke(app, asked).stdout
        failing = CliRunner().invoke(app, [*command, server.url, "--extra-body", '{"temperature": -1}'])
        assert failing.exit_code == 2
        assert "temperature" in failing.stderr
    for option, message in ((["--extra-body", "[]"], "--extra-body: expected"), (["--rates", "x"], "rates: got 'x'")):
        result = CliRunner().invoke(app, [*command, "http://127.0.0.1:1", *option])
        assert result.exit_code == 2
        assert message in result.stderr
