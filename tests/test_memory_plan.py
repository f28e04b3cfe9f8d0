"""The memory plan: its numbers against loaded weights, real pools and compiled programs; its table; what is refused."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import BLOCK_SIZE, BUDGET, CONFIG, MODEL, POOL_BLOCKS, VOCAB_SIZE, tiny_config, tiny_llm, tiny_params
from tiny_models import save_tiny, tiny, write_gguf
from typer.testing import CliRunner

import pagedjax
from pagedjax import model_runner
from pagedjax.batch import padding_batch
from pagedjax.blocks import host_pool
from pagedjax.config import EngineConfig
from pagedjax.llm import LLM
from pagedjax.models import decoder
from pagedjax.models.load import load_checkpoint
from pagedjax.planning import bounds, memory, programs
from pagedjax.planning.build import plan_memory
from pagedjax.planning.memory import Memory, host_memory, memory_for
from pagedjax.planning.plan import MemoryPlan, size
from pagedjax.sampling import pipeline
from pagedjax.sampling.rows import sample_rows, score_rows
from pagedjax.serving import cli

GIB = 2**30
SIZES: dict[str, Any] = {
    "num_blocks": POOL_BLOCKS,
    "block_size": BLOCK_SIZE,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": BUDGET,
}


def plan_of(model: Any = MODEL, **options: Any) -> MemoryPlan:
    return LLM.plan(model, **{"compile": False, **options})


@pytest.fixture
def little_memory(monkeypatch):
    """Calls to it set what this machine has left."""

    def has(num_bytes: int | None) -> None:
        monkeypatch.setattr(memory, "host_memory", lambda: (num_bytes, "free on this machine"))

    return has


# --- numbers against the real thing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_loaded_model(tmp_path, dtype, tied):
    changes = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    folder, tensors = save_tiny(tmp_path / "folder", **changes)
    params = load_checkpoint(folder, dtype).params
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    plan = plan_of(folder, dtype=dtype)
    assert plan.weight_bytes == nbytes
    assert plan.num_params == sum(leaf.size for leaf in jax.tree.leaves(params))
    gguf = write_gguf(tmp_path / "m.gguf", tiny(**changes), tensors)
    assert plan_of(gguf, dtype=dtype).weight_bytes == nbytes
    assert plan_of(decoder.CausalLM(load_checkpoint(folder).config), dtype=dtype).weight_bytes == nbytes


def test_nothing_but_the_config_is_read(tmp_path, little_memory):
    little_memory(GIB)
    folder, _ = save_tiny(tmp_path, dtype=...)
    whole = plan_of(folder)
    (folder / "model.safetensors").unlink()
    assert plan_of(folder) == whole


def test_the_plan_of_an_engine_is_what_it_has():
    llm = tiny_llm()
    plan, runner = llm.memory_plan, llm.engine.runner
    assert plan.pool_bytes == sum(pool.nbytes for pool in jax.tree.leaves(runner.kv_cache))
    assert plan.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tiny_params()))
    assert plan.config == llm.engine.config
    assert plan.weights_in_place
    assert plan.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert plan.required_bytes == plan.pool_bytes + plan.step_bytes
    assert plan.left_bytes is not None
    assert plan.memory.available_bytes == plan.required_bytes + plan.left_bytes
    beforehand = LLM.plan(MODEL, compile=False, check_integrity=True, **SIZES)
    assert not beforehand.weights_in_place
    same = {"memory": plan.memory, "weights_in_place": True}
    assert replace(beforehand, **same) == replace(plan, programs={})


def own_programs() -> dict[str, Any]:
    """The programs that the tiny engine's runner itself runs for its largest step, compiled, with what each is given
    beside weights and pool."""
    runner = tiny_llm().engine.runner
    batch = jax.device_put(padding_batch(runner.config, BUDGET, BUDGET))
    hidden, (rope,) = decoder._embed(CONFIG, decoder.embed_params(runner.params), batch)
    layer_pool = (runner.kv_cache.k[0], runner.kv_cache.v[0])
    args = (runner.params["layers_0"], hidden, rope, batch.attn, layer_pool)
    layer = decoder._paged_layer.lower(CONFIG, CONFIG.layer_kinds[0], None, *args)
    head = sample_rows.lower(CONFIG, decoder.head_params(runner.params), hidden, batch, model_runner.CPU_HEAD_ROWS)
    return {"layer": (layer.compile(), (hidden, rope, batch.attn)), "head": (head.compile(), (hidden, batch))}


def test_programs_are_what_xla_says_of_the_runners_own():
    plan = LLM.plan(MODEL, **SIZES)
    expected, own = {}, own_programs()
    for name, (compiled, given) in own.items():
        xla = compiled.memory_analysis()
        results = xla.output_size_in_bytes - xla.alias_size_in_bytes
        expected[name] = xla.temp_size_in_bytes + results + sum(leaf.nbytes for leaf in jax.tree.leaves(given))
    assert plan.programs == expected
    pools = own["layer"][0].memory_analysis().alias_size_in_bytes
    assert pools == plan.pool_bytes // CONFIG.layer_groups.num_pools, "the pool is counted twice"
    assert plan.program_bytes == max(expected.values()) < plan.step_bytes


def test_a_backend_that_says_nothing(monkeypatch):
    said: list[Any] = [None, SimpleNamespace(temp_size_in_bytes=1)]
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: said.pop())
    plan = LLM.plan(MODEL, **SIZES)
    assert (plan.programs, plan.program_bytes) == ({}, None)
    assert "compiled" not in str(plan)


def test_a_program_larger_than_its_bound_counts(monkeypatch):
    monkeypatch.setattr("pagedjax.planning.build.compiled_bytes", lambda *_: {"layer": GIB})
    plan = LLM.plan(MODEL, **SIZES)
    assert plan.step_bytes == GIB


WIDE = replace(CONFIG, vocab_size=32_000, hidden_size=256, intermediate_size=512)
"""Large enough for the constant part of the bounds not to hide the rest."""
DEEP = decoder.CausalLM(replace(WIDE, num_layers=32, max_position_embeddings=8192))
"""With a pool that can be larger than a small card. Only ever planned."""


@pytest.mark.parametrize(("tokens", "seqs", "dtype"), [(256, 256, "float32"), (2048, 4, "bfloat16")])
def test_no_program_of_a_step_is_larger_than_its_bound(tokens, seqs, dtype):
    """Compiles for this CPU alone. What a GPU's programs take stands in docs/decisions.md."""
    model = decoder.CausalLM(WIDE)
    plan = LLM.plan(model, dtype=dtype, max_num_seqs=seqs, max_num_batched_tokens=tokens, num_blocks=512, block_size=16)
    slack = bounds.CPU_SLACK_BYTES
    assert plan.program_bytes is not None
    assert plan.program_bytes <= plan.step_bytes
    # 7.1 times in bfloat16 from jax 0.11 on, where XLA no longer turns weights and pool into float32.
    assert plan.step_bytes - slack < 8 * plan.program_bytes, "a bound that says nothing"


def test_no_program_of_the_extras_is_larger_than_its_bound():
    num_rows, vocab = 64, WIDE.vocab_size
    plan = plan_of(decoder.CausalLM(WIDE), max_num_seqs=num_rows, num_blocks=64)
    logits = jax.ShapeDtypeStruct((num_rows, vocab), jnp.float32)
    batch = padding_batch(plan.config, 256, 256)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch.sampling)
    ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    beside = 2 * num_rows * vocab * 4  # the model's logits and the edited ones, of which a program is given one
    for program in (
        pipeline._sample.lower(logits, rows),
        pipeline._processed.lower(logits, rows),
        pipeline._token_logprobs.lower(logits, ids, 20),
        pipeline._token_logprobs.lower(logits, ids, vocab),
    ):
        xla: Any = program.compile().memory_analysis()
        taken = beside + xla.argument_size_in_bytes + xla.temp_size_in_bytes + xla.output_size_in_bytes
        assert taken <= plan.step_bytes + plan.extras_bytes

    params = programs.abstract_params(WIDE, "float32")
    head = decoder.head_params(params)
    hidden = jax.ShapeDtypeStruct((256, WIDE.hidden_size), jnp.float32)
    of_prompt = jax.ShapeDtypeStruct((256,), jnp.int32)
    program = score_rows.lower(WIDE, 20, 64, head, hidden, of_prompt, of_prompt, 256)
    xla = program.compile().memory_analysis()
    assert xla.temp_size_in_bytes + xla.output_size_in_bytes <= plan.step_bytes + plan.extras_bytes


def test_the_numbers_of_others_that_bounds_repeat():
    assert bounds.CPU_HEAD_ROWS == model_runner.CPU_HEAD_ROWS
    assert bounds.SWAP_TILE == host_pool.TILE


# --- how many requests fit


@pytest.mark.parametrize(("context", "expected"), [(5, 32), (6, 21), (33, 7), (64, 3), (65, 0)])
def test_requests_that_fit(context, expected):
    # 64 blocks of 4: a request of 33 tokens has 32 in 8 blocks, and one block is left for each.
    plan = plan_of(**{**SIZES, "max_num_seqs": 48, "max_num_batched_tokens": 64}, context=context)
    assert plan.max_requests(context) == expected
    assert plan.fits_requests == (expected >= 1)
    if expected:
        assert plan.num_blocks_for(expected, context) <= POOL_BLOCKS < plan.num_blocks_for(expected + 1, context)
        assert plan.max_requests(plan.max_context_for(expected)) >= expected
    assert plan.max_context_for(49) == 0


def test_as_many_requests_as_the_plan_says_run_at_once_without_a_preemption():
    llm = tiny_llm()
    plan = llm.memory_plan
    for context in (33, 64):
        num_requests, before = plan.max_requests(context), llm.stats().num_preemptions
        prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (num_requests, 4)).tolist()
        params = pagedjax.SamplingParams(max_tokens=context - 4, ignore_eos=True)
        for prompt in prompts:
            llm.engine.add_request(prompt, params)
        most = 0
        while llm.engine.has_unfinished():
            llm.engine.step()
            most = max(most, llm.stats().num_running)
        assert most == num_requests
        assert llm.stats().num_preemptions == before


# --- memory


def test_another_card_is_planned_as_a_gpu():
    plan = plan_of(memory_bytes=80 * GIB, block_size=None)
    assert plan.dtype == "bfloat16"
    assert (plan.config.block_size, plan.config.max_num_batched_tokens) == (16, 2048)
    assert plan.memory.available_bytes == int(80 * GIB * 0.75 * 0.9)
    assert plan.config.num_blocks == 256 * 256 // 16  # all that can be used
    more = plan_of(memory_bytes=80 * GIB, gpu_memory_utilization=0.5)
    assert more.memory.available_bytes == 30 * GIB


def test_a_gpus_pool_leaves_room_for_programs(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    plan = plan_of(DEEP, memory_bytes=4 * GIB)
    assert plan.left_bytes is not None
    assert 0 <= plan.left_bytes < 2 * plan.block_bytes
    assert plan.required_bytes == plan.weight_bytes + plan.pool_bytes + plan.step_bytes + plan.extras_bytes
    assert plan.step_bytes + plan.extras_bytes > 8 * 256 * 32_000 * 4  # 256 rows of logits, and copies of them
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert plan_of(DEEP, memory_bytes=4 * GIB).pool_bytes > plan.pool_bytes + GIB // 2


def test_a_device_says_what_it_has(monkeypatch):
    stats: dict[str, Any] | None = {"bytes_limit": 10 * GIB, "bytes_in_use": 2 * GIB}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    found = memory_for(None, None, 0.5)
    assert (found.platform, found.available_bytes) == ("gpu", 3 * GIB)
    assert found.source == "50% of 10.0 GiB less 2.0 GiB in use"
    stats = None
    assert memory_for(None, None, 0.5).available_bytes is None
    stats = {}
    assert memory_for(None, None, 0.5).available_bytes is None


def test_where_nobody_says_how_much_there_is_nothing_is_refused(little_memory):
    little_memory(None)
    plan = plan_of(num_blocks=10**6)
    assert (plan.fits, plan.left_bytes) == (True, None)
    plan.check()
    assert "available         unknown" in str(plan)
    assert plan_of().config.num_blocks == 256 * 256 // 64


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    800 kB\nHugePages_Total: 0\n"}


def cgroup(folder: str, limit: str, used: str, cache: str, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {cache}\n"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": used, f"{folder}/memory.stat": stat}


V1 = {"proc/self/cgroup": "3:cpu:/a\n2:memory,hugetlb:/a/b\n0::/"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, (800 * 1024, "free on this machine")),
        (MEMINFO | V1, (800 * 1024, "free on this machine")),
        (MEMINFO | V1 | cgroup("sys/fs/cgroup/memory/a", "5000", "3000", "500", 1), (2500, "left to this container")),
        (MEMINFO | V1 | cgroup("sys/fs/cgroup/memory", "5000", "6000", "0", 1), (0, "left to this container")),
        (
            MEMINFO | V1 | cgroup("sys/fs/cgroup/memory/a", str(2**63), "3000", "500", 1),
            (819200, "free on this machine"),
        ),
        (
            MEMINFO
            | {"proc/self/cgroup": "0::/x/y\n"}
            | cgroup("sys/fs/cgroup/x/y", "max", "3000", "500")
            | cgroup("sys/fs/cgroup/x", "9000\n", "3000\n", "500")
            | cgroup("sys/fs/cgroup", "8000", "4000", "1000"),
            (5000, "left to this container"),
        ),
    ],
)
def test_host_memory_is_what_the_machine_and_every_group_leave(tmp_path, files, expected):
    write(tmp_path, files)
    assert host_memory(tmp_path) == expected


def test_host_memory_where_there_is_no_proc(tmp_path, monkeypatch):
    found, _ = host_memory(tmp_path)
    assert found is not None
    assert found > 2**28
    monkeypatch.setattr("os.sysconf_names", {})
    assert host_memory(tmp_path) == (None, "the system does not say")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"platform": "tpu"}, "^platform must be one of cpu, gpu or None, got 'tpu'"),
        ({"platform": "gpu"}, "memory_bytes"),
        ({"memory_bytes": 0}, "^memory_bytes must be"),
        ({"num_requests": 0}, "^num_requests must be a positive int"),
        ({"context": -1}, "^context must be a positive int"),
        ({"num_blocks": 0}, "^num_blocks must be a positive int"),
        ({"dtype": "int8"}, "^dtype"),
        ({"max_model_len": 1000}, "at most the model's 256"),
    ],
)
def test_a_wrong_argument_is_named(options, match):
    with pytest.raises(ValueError, match=match):
        plan_of(**options)


def test_an_unknown_option():
    with pytest.raises(TypeError, match="num_block"):
        plan_of(num_block=3)


# --- refusals


def test_a_cpus_default_pool_takes_what_fits(little_memory):
    little_memory(64 * GIB)
    whole = plan_of(DEEP)
    assert GIB - whole.block_bytes < whole.pool_bytes <= GIB + whole.block_bytes
    for available in (40 * 2**20 + whole.weight_bytes + whole.step_bytes, GIB):
        little_memory(available)
        plan = plan_of(DEEP)
        assert plan.fits_memory
        assert plan.pool_bytes < GIB
        assert plan.pool_bytes > (available - plan.weight_bytes - plan.step_bytes) // 3


def test_too_large_a_pool_is_refused_with_the_numbers(little_memory, monkeypatch):
    little_memory(GIB)
    monkeypatch.setattr(model_runner, "init_kv_cache", lambda **_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"^not enough memory") as caught:
        tiny_llm(num_blocks=2_000_000)
    text = str(caught.value)
    pool = 2_000_001 * 2 * 2 * 2 * 4 * 16 * 4
    assert f"KV pool {size(pool)}" in text
    assert "available are 1.0 GiB (free on this machine)" in text
    most = int(text.split("num_blocks=")[1].split(":")[0])
    assert plan_of(**{**SIZES, "num_blocks": most}, params=tiny_params()).fits_memory
    assert not plan_of(**{**SIZES, "num_blocks": most + 1}, params=tiny_params()).fits_memory


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(little_memory, tmp_path, monkeypatch):
    folder, _ = save_tiny(tmp_path)
    little_memory(2**20)
    monkeypatch.setattr("pagedjax.llm.load_tensors", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"^not enough memory: weights .*; together .*To change: "):
        LLM(folder)


def test_the_pool_of_the_host_counts_where_it_lies():
    plan = plan_of(memory_bytes=80 * GIB)
    swapping = replace(plan, host_pool_bytes=2 * GIB, memory=replace(plan.memory, host_bytes=GIB))
    assert swapping.required_bytes == plan.required_bytes
    assert not swapping.fits_memory
    with pytest.raises(ValueError, match=r"host pool 2\.0 GiB.*the host has 1\.0 GiB for its pool"):
        swapping.check()
    on_cpu = replace(plan_of(**SIZES), host_pool_bytes=2 * GIB, memory=Memory("cpu", GIB, "as given"))
    assert on_cpu.required_bytes > 2 * GIB
    assert not on_cpu.fits_memory


def test_the_pool_of_the_host_is_no_larger_than_what_is_left(little_memory):
    plan = plan_of(**SIZES, num_swap_blocks=10, preemption="swap")
    assert plan.host_pool_bytes == 10 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
    assert "host pool        20.0 KiB  10 blocks" in str(plan)
    assert plan_of(**SIZES, preemption="swap").host_pool_bytes == POOL_BLOCKS * plan.block_bytes
    little_memory(plan.required_bytes + 5 * plan.block_bytes + 1)
    fitting = plan_of(**SIZES, preemption="swap")
    assert fitting.fits
    assert fitting.host_pool_bytes == 15 * plan.block_bytes
    little_memory(2**28)
    assert plan_of(DEEP, preemption="auto").fits


def test_half_of_the_hosts_memory_is_for_swapped_blocks():
    config = tiny_config()
    beside = Memory("gpu", GIB, "", host_bytes=20 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4)
    assert bounds.num_swap_blocks_that_fit(CONFIG, config, "float32", beside, 0) == 10
    unknown = replace(beside, host_bytes=None)
    assert bounds.num_swap_blocks_that_fit(CONFIG, config, "float32", unknown, 0) == POOL_BLOCKS


# --- what to change


def advised(plan: MemoryPlan, start: str) -> dict[str, int]:
    """The options of the change that begins so."""
    (line,) = [change for change in plan.changes if change.startswith(start)]
    pairs = (part.split("=") for part in line.split(":")[0].split(" for all")[0].split(", "))
    return {name: int(value) for name, value in pairs}


def test_what_is_advised_is_enough(little_memory):
    little_memory(GIB)
    asked = {"num_requests": 40, "context": 60}
    plan = plan_of(**SIZES, **asked)
    assert not plan.fits
    assert plan.fits_memory
    grown = advised(plan, "num_blocks=")
    assert set(grown) == {"num_blocks", "max_num_seqs", "max_num_batched_tokens"}
    assert plan_of(**{**SIZES, **grown}, **asked).fits
    assert not plan_of(**{**SIZES, **grown, "num_blocks": grown["num_blocks"] - 1}, **asked).fits
    assert plan_of(**SIZES, **{**asked, **advised(plan, "num_requests=")}).fits
    many = plan_of(**SIZES, num_requests=8, context=60)
    assert plan_of(**SIZES, num_requests=8, **advised(many, "context=")).fits


def test_what_is_advised_where_the_memory_is_short():
    options: dict[str, Any] = {"memory_bytes": 4 * GIB, "num_requests": 300, "context": 8192}
    plan = plan_of(DEEP, **options)
    text = str(plan)
    assert "No room for 300 requests of 8,192 tokens. To change:" in text
    assert 'preemption="swap"' in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION (now 0.75" in text
    assert any("max_num_seqs=300 for all of them" in change for change in plan.changes)
    assert plan_of(DEEP, **{**options, **advised(plan, "num_requests=")}).fits
    explicit = plan_of(DEEP, memory_bytes=4 * GIB, num_blocks=10**6)
    assert plan_of(DEEP, memory_bytes=4 * GIB, **advised(explicit, "num_blocks=")).fits
    assert plan_of(context=1000).changes == ("context=256 at most: the model was made for no more",)


def test_a_narrower_type_is_advised_if_it_helps():
    model = decoder.CausalLM(replace(WIDE, num_layers=100))
    weights = plan_of(model, dtype="float32").weight_bytes
    plan = plan_of(model, dtype="float32", memory_bytes=int(weights * 1.5), max_num_seqs=1, max_num_batched_tokens=16)
    (line,) = [change for change in plan.changes if "bfloat16" in change]
    assert line.endswith("left")


# --- the table, and the command


def test_the_table():
    plan = LLM.plan(MODEL, num_requests=2, context=33, **SIZES)
    rows = str(plan).split("\n")
    assert [row.split()[0] for row in rows if row][:6] == ["weights", "KV", "step", "extras", "together", "available"]
    assert "64 blocks of 4 tokens, 512 B a token" in rows[1]
    assert "24 tokens, 8 rows; compiled: layer " in rows[2]
    assert "tokens of each     33     64" in rows
    assert "requests            7      3" in rows
    assert rows[-1] == "Room for 2 requests of 33 tokens at once."
    assert not any(row != row.rstrip() for row in rows)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (None, "unknown")]
)
def test_sizes(num_bytes, text):
    assert size(num_bytes) == text


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["plan", *arguments])


def test_the_command(tmp_path):
    folder, _ = save_tiny(tmp_path)
    fits = run(str(folder), "--num-requests", "2", "--context", "64", "--no-compile")
    assert (fits.exit_code, fits.stderr) == (0, "")
    assert fits.stdout.endswith("Room for 2 requests of 64 tokens at once.\n")
    too_many = run(str(folder), "--num-requests", "2", "--context", "64", "--num-blocks", "1", "--no-compile")
    assert too_many.exit_code == 1
    assert "To change:\n- num_blocks=3" in too_many.stdout
    card = run(str(folder), "--memory", "80GiB", "--gpu-memory-utilization", "0.8", "--json")
    numbers = json.loads(card.stdout)
    assert card.exit_code == 0
    assert numbers["available_bytes"] == int(80 * GIB * 0.75 * 0.8)
    assert numbers["weight_bytes"] == plan_of(folder, dtype="bfloat16").weight_bytes
    assert numbers["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "expected an existing folder"),
        (["nowhere", "--num-requests", "0"], "num_requests must be a positive int"),
        (["nowhere", "--memory", "much"], "--memory: got 'much', expected a number of bytes with a unit"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments, words):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pagedjax: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 * GIB), ("141GB", 141 * 10**9), ("1.5 tib", 3 * 2**39), ("512KB", 512_000)]
)
def test_sizes_on_the_command_line(text, num_bytes):
    assert cli._bytes_in(text) == num_bytes


def test_a_size_without_a_unit_is_refused():
    with pytest.raises(ValueError, match="expected a unit as well"):
        cli._bytes_in("80")


def test_plan_memory_gives_the_opened_checkpoint(tmp_path):
    folder, _ = save_tiny(tmp_path)
    names = ("block_size", "num_blocks", "max_num_batched_tokens", "max_model_len")
    options: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)} | dict.fromkeys(names)
    del options["min_tokens"], options["windows"]
    plan, header = plan_memory(folder, **options)
    assert header is not None
    assert header.config.max_position_embeddings == plan.max_context == 256
