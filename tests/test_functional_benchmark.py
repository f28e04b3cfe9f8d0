"""The benchmarks of `pagedjax.functional` and of `batch_invariant`: short runs, what they count, the tokens."""

import json
from pathlib import Path

import pytest
from benchmark_scripts import load
from tiny_models import save_tiny


def run_main(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", *options])
    load(name).main()


@pytest.mark.slow
def test_all_samplers_give_the_same_tokens(tmp_path: Path, monkeypatch, capsys):
    folder, _ = save_tiny(tmp_path / "hf")
    sizes = ["--prompts", "2", "--samples", "3", "--prompt-len", "8", "--new-tokens", "5", "--block-size", "4"]
    options = ["--model", str(folder), *sizes, "--repeat", "1", "--plain-rival", "--output", str(tmp_path)]
    run_main(monkeypatch, "functional_sampler", *options)
    assert "| contiguous cache, keys transposed |" in capsys.readouterr().out
    ways = json.loads((tmp_path / "functional-float32.json").read_text())["ways"]
    assert len(ways) == 5
    assert {name: way["same_tokens"] for name, way in ways.items()} == dict.fromkeys(ways, 1.0)
    assert all(len(way["seconds"]) == 1 and way["tokens_per_s"] > 0 for way in ways.values())
    # 6 rows of 13 positions; 2 blocks of each prompt, 1 of each sample and the null block, 4 positions each.
    contiguous, paged = (
        ways[name]["kv_bytes"]
        for name in (
            "contiguous cache, keys transposed",
            "functional.generate, blocks of 4, all prompts of one length",
        )
    )
    assert contiguous / paged == (6 * 13) / ((2 * 2 + 6 + 1) * 4)


@pytest.mark.slow
def test_what_batch_invariance_costs(tmp_path: Path, monkeypatch, capsys):
    options = ["--model", "tiny", "--requests", "2", "--prompt-len", "4", "--max-tokens", "5", "--repeat", "1"]
    run_main(monkeypatch, "batch_invariance", *options, "--output", str(tmp_path))
    (result,) = json.loads((tmp_path / "batch_invariance.json").read_text())["results"]
    ratio = result["batch_invariant"][0] / result["plain"][0]
    assert f"| **{ratio:.2f}x** |" in capsys.readouterr().out
