"""The benchmarks of preemption and of several decodes per step: short runs, what they print, what the clock says."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_sharing_benchmark import load
from tiny_engine import greedy, prompt_of, run_all, tiny_engine

from pagedjax import SamplingParams

host_clock, multi_step = load("host_clock"), load("multi_step")


def run_main(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", *options])
    load(name).main()


@pytest.mark.slow
def test_preemption_writes_tables_and_a_figure(tmp_path: Path, monkeypatch, capsys):
    options = ["--model", "tiny", "--block-sizes", "8", "--contexts", "24", "--requests", "2", "--budget", "8"]
    run_main(monkeypatch, "preemption", *options, "--repeat", "1", "--output", str(tmp_path))
    text = capsys.readouterr().out
    assert "| 8 | 24 |" in text
    assert "Figure 19b" in text
    (times,) = json.loads((tmp_path / "preemption_micro.json").read_text())["results"]
    assert min(times[f"{way}_ms"] for way in ("swap_out", "swap_in", "recompute")) > 0
    (result,) = json.loads((tmp_path / "preemption.json").read_text())["results"]
    assert result["num_preemptions"]["none"] == 0
    assert min(result["num_preemptions"][way] for way in ("recompute", "swap")) > 0
    assert result["num_swapped_out_blocks"] > 0
    assert result["num_same"] == {"none": 2, "recompute": 2, "swap": 2}
    assert result["auto"] in ("swap", "recompute")
    assert 5_000 < (tmp_path / "preemption.png").stat().st_size < 100_000


def test_multi_step_gives_the_same_tokens(tmp_path: Path, monkeypatch, capsys):
    options = ["--model", "tiny", "--requests", "2", "--steps", "1", "4", "--prompt-len", "4", "--decodes", "8"]
    run_main(monkeypatch, "multi_step", *options, "--repeat", "1", "--output", str(tmp_path))
    assert "| 4, async |" in capsys.readouterr().out
    results = json.loads((tmp_path / "multi_step_2.json").read_text())["results"]
    ways = [(r["num_decode_steps"], r["async_scheduling"]) for r in results]
    assert ways == [(1, False), (4, False), (1, True), (4, True)]
    assert [r["runs"][0]["num_steps"] for r in results] == [8, 2, 8, 2]
    for r in results:
        assert 0 < r["host_share"] < 1
        assert r["step_ms"] == pytest.approx(r["launch_ms"] + r["wait_ms"] + r["host_ms"])


@pytest.mark.parametrize("options", [{}, {"num_decode_steps": 3}, {"async_scheduling": True}])
def test_the_clock_leaves_the_engine_as_it_was(options):
    engine = tiny_engine(**options)
    clock = host_clock.HostClock(engine)
    engine.add_request(prompt_of(4), greedy(7))
    engine.add_request(prompt_of(4), SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    assert len(run_all(engine)) == 2
    clock.close()
    assert clock.num_steps > 2
    for owner in (engine, engine.scheduler, engine.runner):
        assert not {"step", "_resolve", "schedule", *host_clock.LAUNCHES} & vars(owner).keys()


def test_all_that_the_host_does_is_exposed_without_a_launch_ahead():
    """30 ms before each launch, in which the device has nothing to do."""
    engine = tiny_engine()
    schedule = engine.scheduler.schedule

    def slow() -> Any:
        time.sleep(0.03)
        return schedule()

    engine.scheduler.schedule = slow
    clock = host_clock.HostClock(engine)
    engine.add_request(prompt_of(4), greedy(6))
    while engine.has_unfinished():
        engine.step()
    result = clock.per_step()
    assert clock.num_steps == 6
    assert result["host_ms"] >= 30
    assert result["exposed_ms"] >= 30


def test_busy_is_what_is_not_ready():
    engine = tiny_engine()
    clock = host_clock.HostClock(engine)
    assert not clock._is_busy()
    clock._last = jax.block_until_ready(jax.numpy.zeros(3))
    assert not clock._is_busy()
    clock._last = np.zeros(3)
    assert not clock._is_busy()
    clock.close()


def test_work_is_the_same_at_every_call():
    first, second = (multi_step.draw_work(128, 3, 5, 8) for _ in range(2))
    assert first == second
    assert [len(prompt) for prompt in first.prompts] == [5, 5, 5]
