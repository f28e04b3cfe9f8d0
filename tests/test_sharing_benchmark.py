"""The benchmark of sharing: what it counts, by hand and by formulas of its own, its lengths, and its command line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_scripts import load

from pagedjax.blocks.allocator import BlockAllocator

memory, traces = load("sharing_memory"), load("traces")


# --- counting


def blocks_of(lengths: np.ndarray, n: int, block_size: int) -> tuple[int, int]:
    """Saved blocks and blocks without sharing, over the steps of all requests: the first step computes the prompt once
    for all n samples, later ones write a token in each of them, and they share the full blocks of the prompt."""
    num_saved = num_without = 0
    for prompt_len, output_len in lengths.tolist():
        num_without += n * -(-prompt_len // block_size)
        num_saved += (n - 1) * -(-prompt_len // block_size)
        for num_tokens in range(prompt_len + 1, prompt_len + output_len):
            num_without += n * -(-num_tokens // block_size)
            num_saved += (n - 1) * (prompt_len // block_size)
    return num_saved, num_without


@pytest.mark.parametrize(("n", "block_size"), [(1, 16), (2, 16), (6, 16), (4, 64), (3, 1)])
def test_parallel_saving_is_what_a_formula_says(n, block_size):
    lengths = np.array([[40, 30], [16, 5], [15, 20], [1, 33], [70, 1], [32, 2]])
    blocks = memory.parallel_saving(lengths, n, block_size=block_size)
    assert (blocks.num_saved, blocks.num_without_sharing) == blocks_of(lengths, n, block_size)


def test_two_samples_by_hand():
    """A prompt of 20 in blocks of 16, three tokens each: 2 blocks for both, then twice 2 x 2 of which the full one is
    shared."""
    blocks = memory.parallel_saving(np.array([[20, 3]]), 2)
    assert (blocks.num_saved, blocks.num_without_sharing, blocks.num_steps) == (4, 12, 3)
    assert (blocks.saving, blocks.mean_of_ratios) == (pytest.approx(1 / 3), pytest.approx((2 / 4 + 1 / 4 + 1 / 4) / 3))


def test_what_is_preempted_is_not_measured():
    with pytest.raises(AssertionError, match="too small"):
        memory.parallel_saving(np.array([[20, 40], [20, 40]]), 2, num_blocks=10)


def test_blocks_of_a_step_are_counted_as_they_are_held():
    allocator = BlockAllocator(8)
    counted = memory.BlockCount(allocator)
    shared, own = allocator.allocate(), allocator.allocate()
    assert shared is not None
    assert own is not None
    allocator.fork(shared)
    allocator.fork(shared)
    counted.count()
    assert (counted.num_saved, counted.num_without_sharing) == (2, 4)


@pytest.mark.parametrize(("name", "num_requests", "low", "high"), [("Alpaca", 200, 4, 8), ("ShareGPT", 20, 12, 26)])
def test_two_samples_of_drawn_lengths_save_about_as_much_as_in_the_paper(name, num_requests, low, high):
    """The paper has 6.1 and 16.2 %."""
    lengths = traces.load_trace(name, None).sample(num_requests)
    assert low < 100 * memory.parallel_saving(lengths, 2).saving < high


# --- lengths


@pytest.mark.parametrize("name", ["Alpaca", "ShareGPT"])
def test_lengths_have_the_papers_means(name):
    trace = traces.load_trace(name, None)
    assert trace.means == pytest.approx(traces.ORIGINS[name].paper_means, rel=0.03)
    assert "lognormal" in trace.source
    assert trace.lengths.min() >= 1
    assert trace.lengths.sum(axis=1).max() <= traces.MAX_TOKENS


def test_a_trace_is_scaled_and_cut(tmp_path):
    origin = traces.ORIGINS["ShareGPT"]
    (tmp_path / origin.file).write_text("num_prefill_tokens,num_decode_tokens\n100,10\n3000,10\n0,0\n2295,1\n")
    trace = traces.load_trace("ShareGPT", tmp_path)
    assert trace.lengths.tolist() == [[89, 7], [1, 1]]
    assert "scaled to the paper's means" in trace.source


def test_samples_of_a_trace():
    trace = traces.Trace("", "", np.array([[9, 1], [1, 1], [2, 3], [1, 2], [4, 4], [1, 4]]))
    assert trace.quantiles(3).tolist() == [[1, 2], [1, 4], [9, 1]]
    assert sorted(trace.sample(6).tolist()) == sorted(trace.lengths.tolist())
    assert trace.sample(2).tolist() == trace.sample(2).tolist()


# --- hypotheses


def test_hypotheses_are_compared_rank_by_rank():
    compare, hypothesis = load("sharing_beams").compare, load("sharing_beams").Hypothesis
    ours = [[hypothesis([1, 2], -0.5), hypothesis([3], -1.0)]]
    theirs = [[hypothesis([1, 2], -0.75), hypothesis([4], -1.125)]]
    assert compare(ours, theirs) == {
        "num_hypotheses": 2,
        "num_same_ids": 1,
        "max_score_difference": 0.25,
        "score_differences_where_ids_differ": [0.125],
    }


# --- the clock


def test_a_clock_leaves_the_engine_as_it_was():
    class Part:
        def call(self) -> int:
            return 2

        schedule = advance = resolve = process = call
        run = run_decodes = run_with = fetch = copy_blocks = swap_out = swap_in = call

    class Engine:
        def __init__(self) -> None:
            self.scheduler, self.outputs, self.runner = Part(), Part(), Part()

        def step(self) -> int:
            return self.scheduler.schedule() + self.runner.run()

    engine = Engine()
    clock = load("step_clock").StepClock(engine)
    assert engine.step() == 4
    result = clock.close()
    assert result["num_steps"] == 1
    assert 0 <= result["host_share"] <= 1
    assert not any(map(vars, (engine.scheduler, engine.outputs, engine.runner)))
    assert "step" not in vars(engine)


# --- the command line


def test_options():
    sharing = load("sharing")
    args = sharing.parse_args([])
    assert args.parts == ["fig15", "fig16", "chat", "beams"]
    args = sharing.parse_args(["--parts", "chat", "fig15", "--quick", "--output", "folder"])
    assert (args.parts, args.output, args.sharegpt_beams) == (["chat", "fig15"], Path("folder"), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--oracle", "no-such-folder"], "export_hf.py"),
        (["--traces", "no-such-folder"], "there is no folder no-such-folder"),
        (["--parts", "fig17"], "invalid choice"),
    ],
)
def test_bad_options_are_explained(options, message, capsys):
    with pytest.raises(SystemExit):
        load("sharing").parse_args(options)
    assert message in capsys.readouterr().err


def test_a_part_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys):
    sharing = load("sharing")
    options = ["--parts", "fig15", "--parallel-requests", "3", "--alpaca-beams", "0", "--sharegpt-beams", "0"]
    monkeypatch.setattr(sys, "argv", ["sharing.py", *options, "--output", str(tmp_path)])
    sharing.main()
    text = (tmp_path / "fig15.md").read_text()
    assert text.partition("\n\n")[2].strip() in capsys.readouterr().out
    assert "| Alpaca, parallel sampling, n = 2 |" in text
    data = json.loads((tmp_path / "fig15.json").read_text())
    assert [(r["kind"], r["width"]) for r in data["results"]] == [("parallel", n) for n in (2, 4, 6)] * 2
    assert data["machine"].keys() >= {"cpu", "jax", "python"}


def test_texts_are_enough():
    texts = load("sharing_texts")
    assert len(texts.CHAT_MESSAGES) == 10
    assert len(set(texts.BEAM_PROMPTS)) == 20
