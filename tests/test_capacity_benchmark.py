"""The benchmarks of memory and capacity: what they count, where curves cross, and short runs of the command lines."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_scripts import load
from fake_device import fake_engine

from pagedjax import StepLoad

capacity, capacity_real, waste, opt13b = map(load, ("capacity", "capacity_real", "memory_waste", "opt13b"))
host_overhead, simulator, traces = load("host_overhead"), load("simulator"), load("traces")

TRACE = traces.load_trace("ShareGPT", None)


# --- the server's step


def test_the_pool_is_the_papers():
    """12 GB at 800 KB a token (section 3) are 15.7K tokens (table 1)."""
    assert opt13b.KV_BYTES == 800 * 1024
    num_slots = 12 * 2**30 // opt13b.KV_BYTES
    assert num_slots == pytest.approx(opt13b.NUM_SLOTS, rel=0.003)


def test_a_step_is_bound_by_memory_or_by_products():
    """25.7 GB at 1.555 TB/s are 16.5 ms; 2,048 tokens of 25.7 GFLOP at 312 TFLOP/s are 169 ms."""
    assert opt13b.step_seconds(StepLoad(1, 1, 0), efficiency=1.0) == pytest.approx(0.0165, rel=0.01)
    assert opt13b.step_seconds(StepLoad(2048, 1, 2048), efficiency=1.0) == pytest.approx(0.169, rel=0.01)
    assert opt13b.step_seconds(StepLoad(1, 1, 15_700), efficiency=0.5) == pytest.approx(2 * 0.0248, rel=0.01)


# --- memory


def test_shares_are_of_what_nobody_else_can_use():
    use = waste.MemoryUse(num_tokens=40, num_future=10, num_never=20, num_rounded=5, num_free=25)
    assert waste.shares(use, is_paged=False) == pytest.approx((40, 10, 20, 30))
    pages = waste.MemoryUse(num_tokens=57, num_future=0, num_never=3, num_rounded=0, num_free=40)
    assert waste.shares(pages, is_paged=True) == pytest.approx((95, 0, 5, 0))


def test_steps_count_after_the_first_and_if_a_request_waits():
    loaded = waste.Loaded(1)
    for num_tokens, is_blocked in ((100, True), (10, True), (50, False), (20, True)):
        loaded.add(waste.MemoryUse(num_tokens, 0, 0, 0, 0), is_blocked)
    assert (loaded.num_steps, loaded.mean.num_tokens) == (2, 15)


# --- capacity


def test_where_a_curve_crosses_a_latency():
    points = [{"request_rate": r, "normalized_latency_s": s} for r, s in ((1.0, 0.1), (2.0, 0.2), (3.0, 0.6))]
    assert capacity.sustained(points, 0.4) == pytest.approx(2.5)
    assert capacity.sustained(points, 0.2) == pytest.approx(2.0)
    assert capacity.sustained(points, 0.05) is None
    assert capacity.sustained(points, 0.7) is None


def test_a_curve_ends_beyond_its_limit():
    points = capacity.curve(lambda rate: {"request_rate": rate, "normalized_latency_s": rate}, [0.5, 0.9, 1.5, 2.0])
    assert [point["request_rate"] for point in points] == [0.5, 0.9, 1.5]


def test_more_traffic_begins_with_the_same_requests():
    served = capacity.Served(TRACE, 100.0)
    few, many = list(served.requests(0.5)), list(served.requests(1.0))
    assert (len(few), len(many)) == (50, 100)
    assert [(each.prompt, each.output_len) for each in few] == [(each.prompt, each.output_len) for each in many[:50]]
    assert few[10].arrival_s == pytest.approx(2 * many[10].arrival_s)


def test_batches_that_fill_the_pool():
    """500 tokens in and 20 out take 33 blocks of 981, of which some are left to grow into, or a region of 1,024 slots,
    of which the pool has 15, or one of 2,048."""
    served = capacity.Served(traces.Trace("", "", np.array([[500, 20]])), 100.0)
    batched = {name: run(3.0)["mean_batched"] for name, run in capacity.systems(served, 0.02).items()}
    assert batched == {
        "paged": pytest.approx(28, abs=2),
        "Oracle": pytest.approx(15, abs=1),
        "Pow2": pytest.approx(15, abs=1),
        "Max": pytest.approx(7, abs=0.5),
    }


# --- the command lines


def run_main(monkeypatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    load(name).main()


@pytest.fixture
def short_traces(tmp_path: Path) -> str:
    """A folder with a trace of long prompts and short outputs, which fill the pool in few steps."""
    file = tmp_path / traces.ORIGINS["ShareGPT"].file
    file.write_text("num_prefill_tokens,num_decode_tokens\n100,60\n300,20\n500,90\n50,30\n")
    return str(tmp_path)


def test_memory_waste_writes_a_table_and_a_figure(tmp_path: Path, short_traces, monkeypatch, capsys):
    options = ["--requests", "160", "--first-steps", "5", "--traces", short_traces, "--output", str(tmp_path)]
    run_main(monkeypatch, "memory_waste", *options)
    assert "| paged | **9" in capsys.readouterr().out
    assert 5_000 < (tmp_path / "memory_waste.png").stat().st_size < 100_000
    results = {result["name"]: result for result in json.loads((tmp_path / "memory_waste.json").read_text())["results"]}
    percent = {name: result["percent"] for name, result in results.items()}
    assert 5 < percent["Max"][0] < percent["Pow2"][0] <= percent["Oracle"][0] < 90
    assert percent["paged"][0] > 94
    assert percent["paged"][3] == percent["Oracle"][2] == 0
    assert all(sum(parts) == pytest.approx(100) for parts in percent.values())
    assert 0 < results["paged"]["empty_slots_per_sequence"] < 15


def test_capacity_writes_tables_and_a_figure(tmp_path: Path, short_traces, monkeypatch, capsys):
    options = ["--hours", "0.01", "--rates", "1", "2", "--efficiencies", "0.5", "--traces", short_traces]
    run_main(monkeypatch, "capacity", *options, "--output", str(tmp_path))
    assert "| paged | **" in capsys.readouterr().out
    data = json.loads((tmp_path / "capacity.json").read_text())
    assert data["curves"].keys() == {"paged", "Oracle", "Pow2", "Max"}
    assert 5_000 < (tmp_path / "capacity.png").stat().st_size < 100_000


def test_the_simulator_is_timed(tmp_path: Path, monkeypatch):
    run_main(monkeypatch, "simulator", "--requests", "50", "--output", str(tmp_path))
    data = json.loads((tmp_path / "simulator_alpaca.json").read_text())
    assert data["num_requests"] == 50
    assert 0 < data["mean_batched"] <= 50


def test_a_folder_that_is_not_there_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "capacity", "--traces", "no-such-folder")
    assert "there is no folder no-such-folder" in capsys.readouterr().err


def test_growth_is_a_slope_of_logarithms():
    rows = [
        {"num_running": n, **{f"{part}_median_us": t for part in (*host_overhead.PARTS, "total")}}
        for n, t in ((1, 500.0), (64, 64.0), (256, 512.0), (1024, 4096.0))
    ]
    assert host_overhead.growth(rows)["total"] == pytest.approx(1.5)
    assert host_overhead.growth(rows[:2]) == {}


# --- behind the gate of a real engine


def test_a_gate_lets_in_whom_its_policy_has_room_for():
    gate = capacity_real.Gate(lambda prompt_len, output_len: 8, 16)
    assert [gate.admit(name, 1, 1) for name in "abc"] == [True, True, False]
    gate.leave("a")
    assert gate.admit("c", 1, 1)
    assert all(capacity_real.Gate(None, 16).admit(str(i), 16, 16) for i in range(9))


def test_work_is_scaled():
    work = capacity_real.scaled_work(TRACE, 200, 4)
    assert len(work.prompts) == len(work.output_lens) == 200
    lengths = np.array([(len(prompt), n) for prompt, n in zip(work.prompts, work.output_lens, strict=True)])
    assert lengths.min() == 1
    assert lengths.sum(axis=1).max() <= 2048 // 4


def test_an_engine_behind_a_gate():
    """The fake device's engine: three requests of 16 slots in a pool of 32, so two at a time, or all three in pages."""
    work = capacity_real.Work([[1, 2, 3]] * 3, [9, 9, 9])
    paged = capacity_real.run_gated(fake_engine(), work, capacity_real.Gate(None, 32))
    gated = capacity_real.run_gated(fake_engine(), work, capacity_real.Gate(lambda *_: 16, 32))
    assert (paged["num_steps"], paged["mean_batched"]) == (9, 3)
    assert (gated["num_steps"], gated["mean_batched"]) == (18, 1.5)
