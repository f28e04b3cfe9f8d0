"""The load test for a few requests: nothing is wrong, and whatever is planted is found. The throughput's arithmetic."""

import asyncio
import random
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from benchmark_scripts import load
from serving_cases import serving
from tiny_engine import prompt_of, tiny_llm

from pagedjax import SamplingParams

serving_users, serving_load, serving_throughput = map(load, ("serving_users", "serving_load", "serving_throughput"))
SIZES = serving_users.Sizes(prompt_chars=20, output_tokens=12)


def run_load(url: str, num_acts: int) -> Any:
    """Some acts of eight clients."""
    left = iter(range(num_acts))
    options = {"num_clients": 8, "sizes": SIZES, "num_cases": 10, "seed": 1}
    return asyncio.run(serving_load.load(url, lambda seconds: next(left, None) is None, **options))


def new_reference() -> Any:
    return serving_load.CachedReference(tiny_llm(enable_prefix_caching=False, max_num_batched_tokens=64))


@pytest.fixture(scope="module")
def result():
    """A short run against the tiny model, in a pool that is too small."""
    with serving(tiny_llm(num_blocks=24)) as server:
        return run_load(server.url, 90)


def test_a_short_load_finds_nothing(result):
    assert result.problems == []
    reference = new_reference()
    assert serving_load.compare(result.users.seen, reference) == []
    assert reference.num_checked >= 8
    done = {name.partition(":")[0] for name in result.users.counts}
    assert done >= {"read stream", "read whole", "leave in the middle", "ask badly"}
    assert sum(result.users.counts.values()) == 90
    report = serving_load.report(result, reference, num_clients=8)
    assert "Nothing was wrong." in report.markdown
    assert report.data["facts"]["blocks in use at the end"] == 0
    assert {seen.case.kind for seen in result.users.seen} >= {"greedy", "seeded", "n=3", "stop", "penalties"}


def test_wrong_answers_are_found(result):
    whole = [seen for seen in result.users.seen if seen.is_whole and len(seen.choices[0].token_ids) > 3]
    reference = new_reference()
    for seen, spoil in zip(whole, (wrong_token, wrong_text, cut, wrong_reason), strict=False):
        choice = seen.choices[0]
        before = dict(vars(choice), token_ids=list(choice.token_ids))
        spoil(choice)
        assert len(serving_load.compare([seen], reference)) == 1
        vars(choice).update(before)
        assert serving_load.compare([seen], reference) == []


def wrong_token(choice: Any) -> None:
    choice.token_ids[1] ^= 1


def wrong_text(choice: Any) -> None:
    choice.text = choice.text[:-1]


def cut(choice: Any) -> None:
    choice.token_ids.pop()


def wrong_reason(choice: Any) -> None:
    choice.finish_reason = "stop" if choice.finish_reason == "length" else "length"


def users_of(answer: Any) -> Any:
    """Users of a server that gives one answer."""
    transport = httpx2.MockTransport(lambda request: answer)
    http = httpx2.AsyncClient(base_url="http://server.test", transport=transport)
    cases = serving_users.draw_cases(1, SIZES, 0)
    return serving_users.Users(http, cases, cases[0], random.Random(0))


CHUNK = (
    'data: {"choices": [{"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [2], "finish_reason": null, '
    '"stop_reason": null}]}\n\n'
)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (httpx2.Response(500, text="oops"), "HTTP 500 instead of 200"),
        (httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, text=CHUNK), "ended early"),
        (
            httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, text=CHUNK + "data: [DONE]\n\n"),
            "ended early",
        ),
        (
            httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, text='data: {"error": {}}\n\n'),
            "error",
        ),
        (httpx2.Response(200, json={}), "SSEError"),
    ],
)
def test_errors_of_the_server_are_found(answer, text, monkeypatch):
    users = users_of(answer)
    monkeypatch.setattr(users.rng, "choices", lambda acts, weights: [users.read_stream])
    asyncio.run(users.act())
    assert len(users.problems) == 1
    assert text in users.problems[0]
    assert users.counts == {"read stream: PROBLEM": 1}


def test_a_refusal_that_is_none_is_found(monkeypatch):
    users = users_of(httpx2.Response(200, json={"choices": []}))
    monkeypatch.setattr(users.rng, "choices", lambda acts, weights: [users.ask_badly])
    asyncio.run(users.act())
    assert "HTTP 200 instead of 4" in users.problems[0]


def test_what_an_idle_server_keeps_is_found(monkeypatch):
    metrics = {"vllm:num_requests_running": 1.0, "vllm:num_requests_waiting": 0.0}
    metrics |= {"pagedjax:num_blocks": 10.0, "pagedjax:num_free_blocks": 7.0}

    async def read_metrics(http: Any) -> Any:
        return metrics

    monkeypatch.setattr(serving_load, "read_metrics", read_metrics)
    monkeypatch.setattr(serving_load, "IDLE_TIMEOUT_S", -1.0)
    users = users_of(httpx2.Response(200))
    (problem,) = asyncio.run(serving_load.wait_until_idle(users.http))
    assert "'vllm:num_requests_running': 1.0" in problem
    assert "3 blocks in use" in problem
    metrics.update({"vllm:num_requests_running": 0.0, "pagedjax:num_free_blocks": 10.0})
    assert asyncio.run(serving_load.wait_until_idle(users.http)) == []


def test_memory_that_grows_is_found():
    watch = serving_load.Watch(None, [2.0 * i for i in range(150)], [1000.0 + i for i in range(150)])
    assert watch.minutes_mb(300.0) == (1044.5, 1134.5)
    assert len(serving_load.memory_problems(watch, 300.0, 89.0)) == 1
    assert serving_load.memory_problems(watch, 300.0, 91.0) == []
    assert serving_load.Watch(None).minutes_mb(300.0) is None


@pytest.mark.parametrize("status", [0, 1])
def test_the_command_ends_with_1_if_anything_is_wrong(status, result, monkeypatch, tmp_path, capsys):
    @contextmanager
    def fake_process(model: str, flags: Any) -> Any:
        yield SimpleNamespace(url="", status=status, errors=["ERROR x"] * status)

    async def fake_load(*_: Any, **__: Any) -> Any:
        return serving_load.Result(result.users, result.watch, 1.0, result.metrics, 0, [])

    monkeypatch.setattr(serving_load, "server_process", fake_process)
    monkeypatch.setattr(serving_load, "load", fake_load)
    monkeypatch.setattr(serving_load, "reference_llm", lambda model: tiny_llm(enable_prefix_caching=False))
    assert serving_load.main(["--output", str(tmp_path)]) == status
    text = capsys.readouterr().out
    assert ("- the server ended with 1" in text) == (status == 1)
    assert ("- the server's log: ERROR x" in text) == (status == 1)
    assert (tmp_path / "serving_load.json").exists()


def test_throughput_of_both(monkeypatch):
    """The same requests through both, and the ratio in the report."""
    llm = tiny_llm()
    prompts, lengths = [prompt_of(n) for n in (3, 5, 9)], [4, 6, 8]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    offline = serving_throughput.offline_run(llm, prompts, params)
    with serving(llm) as server:
        facts = SimpleNamespace(url=server.url, cpu_s=lambda: 1.0)
        served = asyncio.run(serving_throughput.stream(facts, prompts, lengths))
    for run in (offline, served):
        assert run["output_tokens_per_s"] * run["wall_s"] == pytest.approx(sum(lengths))
        assert 0 < run["ttft_mean_s"] <= run["ttft_max_s"] <= run["wall_s"]
    cpu = {"engine_cpu_s": 1.0, "client_cpu_s": 0.5}
    rounds = [
        {
            part: [serving_throughput.run_of(wall, 90, [1.0, 3.0], cpu)]
            for part, wall in (("offline", 9.0), ("server", s))
        }
        for s in (10.0, 9.5)
    ]
    args = SimpleNamespace(num_requests=3, model="tiny")
    report = serving_throughput.report(args, rounds)
    assert report.data["ratios"]["by round"] == [pytest.approx(0.9), pytest.approx(9 / 9.5)]
    assert "| server, round 1, run 1 | 10.0 | 9.0 | 2.00 |" in report.markdown


def test_a_request_that_fails_ends_the_measurement():
    with serving() as server:
        facts = SimpleNamespace(url=server.url, cpu_s=lambda: 1.0)
        with pytest.raises(RuntimeError, match="HTTP 400"):
            asyncio.run(serving_throughput.stream(facts, [[1000]], [4]))
