"""The attention and step benchmarks: what they say must move, the inputs that they make, and a dry run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from benchmark_scripts import ROOT, load

SHAPES: dict[str, Any] = load("measured_shapes").SHAPES


# --- what must move, by hand


def test_bytes_and_operations_of_decodes():
    shape = SHAPES["decode-64x4k"]
    kv = 2 * 64 * 4096 * 8 * 128 * 2  # keys and values, requests, tokens, KV heads, head_dim, bf16
    q_and_out = 2 * 64 * 32 * 128 * 2
    tables = 64 * 256 * 4 + 64 * 4 + 65 * 4  # 256 blocks of 16 each, context lengths, query starts
    assert shape.num_bytes() == kv + q_and_out + tables == 1_074_856_452
    assert shape.num_flops == 4 * 64 * 4096 * 32 * 128 == 4_294_967_296  # 2 D for q.k, 2 D for weights.v
    assert shape.num_bytes(4) == 2 * (kv + q_and_out) + tables


def test_operations_of_prompts_are_causal():
    assert SHAPES["prompt-1x4096"].num_flops == 4 * (4096 * 4097 // 2) * 32 * 128 == 137_472_507_904
    num_pairs = load("measured_shapes").num_pairs
    assert num_pairs([(5, 2)]) == 4 + 5  # the fourth token sees four keys, the fifth all
    assert num_pairs([(3, 3), (7, 1)]) == 1 + 2 + 3 + 7


def test_fewer_kv_heads_move_fewer_bytes():
    grouped, full = SHAPES["decode-64x4k"], SHAPES["decode-mha-64x2k"]
    assert full.num_kv_heads == full.num_heads == 4 * grouped.num_kv_heads
    assert 1.99 < full.num_bytes() / grouped.num_bytes() < 2.01  # four times the heads, half the context


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_one_that_the_op_takes(name):
    for shape in (SHAPES[name], SHAPES[name].small()):
        assert shape.num_heads % shape.num_kv_heads == 0
        assert all(1 <= new <= context for context, new in shape.rows)
        assert (shape.max_query_len == 1) == name.startswith("decode")
        assert shape.is_prompt == name.startswith("prompt")
    assert SHAPES[name].small().num_keys <= 2048


def test_shapes_are_chosen_by_parts_of_their_names():
    choose = load("measured_shapes").choose
    assert [shape.name for shape in choose(["mixed", "drafts"])] == ["drafts-32x5-on-2k", "mixed"]
    assert len(choose([""])) == len(SHAPES)
    with pytest.raises(ValueError, match=r"contains 'no-such': there is .*mixed"):
        choose(["mixed", "no-such"])


def test_weights_of_the_8b_model():
    step = load("decode_step")
    config = step.LLAMA_3_8B
    embedding = config.vocab_size * config.hidden_size
    norms = (2 * config.num_layers + 1) * config.hidden_size
    assert step.num_layer_weights(config) + 2 * embedding + norms == 8_030_261_248  # as published
    kv = 64 * 1024 * 131_072  # 128 KiB a token: 2 x 32 layers x 8 heads x 128 x 2 bytes
    weights = 2 * (step.num_layer_weights(config) + embedding)
    assert step.step_bytes(config, step.Step(64, 1024), 2) == weights + kv


def test_the_floor_is_the_larger_time():
    floor_of = load("roofline").floor_of
    assert floor_of(100, 10, bandwidth=10, flops=10) == (10.0, "memory")
    assert floor_of(10, 100, bandwidth=10, flops=10) == (10.0, "compute")


@pytest.mark.parametrize("script", ["paged_attention", "decode_step"])
def test_predictions_say_that_they_are(script):
    text = load(script).predict(["A100", "H200"])
    assert text.startswith("Every number is predicted")
    header = next(line for line in text.splitlines() if line.startswith("| shape"))
    assert header.count("predicted") == header.count("|") - 2  # every column of numbers
    for card in ("A100: floor", "H200: floor", "H200-measured: floor"):
        assert card in header


# --- what is run


@pytest.mark.parametrize("name", ["decode-ragged-64", "mixed", "chunk-512-on-4k"])
def test_sets_share_no_block(name):
    shape = SHAPES[name].small()
    case = load("attention_contenders").make_case(shape, np.float32, 3)
    used = [np.asarray(meta.block_tables)[np.asarray(meta.block_tables) > 0] for meta in case.metas]
    assert sorted(np.concatenate(used)) == list(range(1, 3 * shape.num_blocks + 1))
    assert all(np.diff(meta.query_start_loc).tolist() == [new for _, new in shape.rows] for meta in case.metas)


@pytest.mark.parametrize("name", ["decode-ragged-64", "mixed"])
def test_the_check_of_results_sees_a_wrong_one(name):
    cases = load("attention_contenders")
    case = cases.make_case(SHAPES[name].small(), np.float32, 1)
    expected = cases.expected_of(case)
    contender = cases.contender("xla", case)
    out = jax.jit(contender.function)(*contender.sets[0])
    assert cases.error_of(out, expected) < 2e-6  # as in test_paged_attention.py
    assert cases.error_of(out.at[-1, 0, 0].add(0.1), expected) > 1e-2
    assert np.isnan(cases.error_of(out.at[0, 0, 0].set(np.nan), expected))


JAX_OWN = "jax.experimental.pallas.ops.gpu.paged_attention"


def test_a_kernel_that_jax_has_no_more_cannot_run(monkeypatch):
    cases, shapes = load("attention_contenders"), load("measured_shapes")
    monkeypatch.setattr(cases, "on_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, JAX_OWN, None)
    case = cases.make_case(shapes.SHAPES["decode-64x4k"].small(), np.float32, 2)
    with pytest.raises(cases.CannotRunError, match="jax has it no more"):
        cases.contender("jax pallas paged", case)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_jax_own_kernel_is_called_rightly(monkeypatch):
    """In Pallas' interpreter: tables are padded to what its splits need, and queries scaled."""
    cases, shapes = load("attention_contenders"), load("measured_shapes")
    theirs = pytest.importorskip(JAX_OWN, reason="jax has it no more, from 0.12.1 on")
    plain = theirs.paged_attention
    monkeypatch.setattr(theirs, "paged_attention", lambda *args, **options: plain(*args, **options, interpret=True))
    monkeypatch.setattr(cases, "on_gpu", lambda: True)
    shape = shapes.MeasuredShape("", ((300, 1), (40, 1)), num_heads=4, num_kv_heads=2, head_dim=16)
    case = cases.make_case(shape, np.float32, 2)
    contender = cases.contender("jax pallas paged", case)
    with jax.numpy_dtype_promotion("standard"):
        out = jax.jit(contender.function)(*contender.sets[0])
    assert cases.error_of(out, cases.expected_of(case)) < 2e-6


def test_slots_of_a_step():
    step = load("decode_step")
    batch = step.make_batch(step.TINY, step.Step(2, 40, chunk=20))
    slots, tables = np.asarray(batch.attn.slot_mapping), np.asarray(batch.attn.block_tables)
    assert batch.positions.tolist() == [39, 39, *range(20, 40)]
    rows = [0, 1] + [2] * 20
    assert (slots // 16 == tables[rows, np.asarray(batch.positions) // 16]).all()
    assert (slots % 16 == np.asarray(batch.positions) % 16).all()
    assert batch.logits_indices.tolist() == [0, 1, 21]


# --- the whole check


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_part_that_hangs_is_stopped(tmp_path):
    check = load("gpu_check")
    program = "import time; print('begun', flush=True); time.sleep(60)"
    outcome = check.run(check.Part("slow", python(program), 2.0), tmp_path, dict(os.environ))
    assert (outcome.status, outcome.is_good) == ("failed: stopped after 2 s", False)
    assert (tmp_path / "slow.log").read_text() == "begun\n"


@pytest.mark.parametrize(("program", "status"), [("", "passed"), ("exit(3)", "failed, exit status 3")])
def test_a_part_is_as_good_as_its_exit_status(tmp_path, program, status):
    check = load("gpu_check")
    assert check.run(check.Part("part", python(program), 30.0), tmp_path, dict(os.environ)).status == status


@pytest.mark.parametrize(
    ("counts", "must_pass", "is_good"),
    [((3, 0, 1), True, True), ((3, 0, 3), True, False), ((3, 0, 3), False, True)],
)
def test_nothing_but_skipped_tests_is_no_success_on_a_gpu(tmp_path, counts, must_pass, is_good):
    check, xml = load("gpu_check"), tmp_path / "tests.xml"
    total, failures, skipped = counts
    suite = f'<testsuite tests="{total}" failures="{failures}" errors="0" skipped="{skipped}"/>'
    xml.write_text(f"<testsuites>{suite}</testsuites>")
    outcome = check.Outcome(check.Part("gpu_tests", [], 1.0), "passed", 1.0)
    assert check.count_tests(outcome, xml, must_pass=must_pass).is_good == is_good


def run_check(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--dir", str(folder), *options]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run(command, env=env, cwd=folder.parent, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_refuses(tmp_path):
    done = run_check(tmp_path / "out", ALLOW_CPU="0")
    assert done.returncode != 0
    assert "needs a GPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_dry_run_on_the_cpu(tmp_path):
    folder = tmp_path / "out"
    done = run_check(folder, "--quick", ALLOW_CPU="1")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (folder / "summary.md").read_text()
    assert "dry run on the CPU" in summary
    rows = json.loads((folder / "paged_attention.json").read_text())["rows"]
    measured = {row["shape"] for row in rows if row["name"] == "xla" and row["median_s"] > 0}
    assert measured == set(load("measured_shapes").QUICK)
    assert all("no GPU" in row["skipped"] for row in rows if row["name"].startswith("pallas"))
    steps = json.loads((folder / "decode_step.json").read_text())["rows"]
    assert [row["step"] for row in steps] == ["decode-4k"]
    for name in ("paged_attention", "decode_step"):
        assert (folder / f"{name}.md").read_text().strip() in summary
