"""Folders of `pagedjax.save`: what comes back, into which sharding, what is refused; all formats give equal logits."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_tokenizer import BOS_TEMPLATE, CHAT, PLAIN_TOOL, TOOL_TEMPLATE, word_tokenizer
from tiny_models import random_tensors, save_folder, save_tiny, tiny, write_gguf
from typer.testing import CliRunner

from pagedjax.llm import LLM
from pagedjax.models import hf_export, orbax_checkpoint
from pagedjax.models.catalogue import CATALOGUE
from pagedjax.models.config import Quantization
from pagedjax.models.convert import convert
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf
from pagedjax.models.hf_export import export_hf
from pagedjax.models.load import load_checkpoint, read_header
from pagedjax.models.orbax_checkpoint import save
from pagedjax.models.placement import build_params
from pagedjax.models.quantization import float_dtype, quantization_in, quantize_params
from pagedjax.models.tokenizer import apply_chat_template
from pagedjax.paths import cache_dir
from pagedjax.serving import cli

MESSAGE = "pagedjax.json is not a valid config: config"


def model_of(dtype: str = "float32", **changes: Any) -> tuple[CausalLM, Any]:
    config = config_from_hf(tiny(dtype=dtype, **changes))
    return CausalLM(config), build_params(config, random_tensors(config).items(), dtype)


def assert_equal_trees(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda leaf: leaf.dtype, left) == jax.tree.map(lambda leaf: leaf.dtype, right)


# --- what comes back

MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True, "eos_token_id": [7, 9]},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "bfloat16": {"dtype": "bfloat16"},
    "qwen3": {"model_type": "qwen3", "hidden_size": 40},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_a_model_comes_back(tmp_path, changes):
    model, params = model_of(**changes)
    save(tmp_path / "a" / "model", model, params, word_tokenizer(BOS_TEMPLATE))
    config, restored, tokenizer = load_checkpoint(tmp_path / "a" / "model")
    assert config == model.config
    assert_equal_trees(params, restored)
    assert tokenizer is not None
    assert apply_chat_template(tokenizer, CHAT) == [1, 3, 5, 4, 6]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, params = model_of()
    save("m", model, params)
    assert_equal_trees(params, load_checkpoint("m").params)
    assert_equal_trees(params, load_checkpoint("./m").params)


def test_without_a_tokenizer(tmp_path):
    save(tmp_path / "m", *model_of())
    assert load_checkpoint(tmp_path / "m").tokenizer is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conversion_while_restoring(tmp_path, dtype):
    model, params = model_of()
    save(tmp_path / "m", model, params)
    restored = load_checkpoint(tmp_path / "m", dtype).params
    assert_equal_trees(jax.tree.map(lambda leaf: leaf.astype(dtype), params), restored)


def test_params_of_another_dtype_than_the_configs(tmp_path):
    """A bf16 checkpoint that was trained on in f32: its own dtype is that of its weights."""
    model, params = model_of("bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 1.001, params)
    save(tmp_path / "m", model, params)
    config, restored, _ = load_checkpoint(tmp_path / "m")
    assert config.dtype == "float32"
    assert_equal_trees(params, restored)


def test_arrays_on_the_host_are_saved_too(tmp_path):
    model, params = model_of("bfloat16")
    save(tmp_path / "m", model, jax.tree.map(np.asarray, params))
    restored = load_checkpoint(tmp_path / "m").params
    assert_equal_trees(params, restored)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


@pytest.mark.parametrize("embeddings", [False, True])
def test_what_is_in_int8_stays_so(tmp_path, embeddings):
    """And all else is in the dtype that is asked for, the scales of a table too: they say what the model runs in."""
    model, params = model_of("bfloat16")
    params = quantize_params(params, Quantization(embeddings))
    save(tmp_path / "m", model, params)
    for dtype in (None, "bfloat16", "float32"):
        restored = load_checkpoint(tmp_path / "m", dtype).params
        assert quantization_in(restored) == Quantization(embeddings)
        assert float_dtype(restored) == jnp.dtype(dtype or "bfloat16")
        for left, right in zip(jax.tree.leaves(params), jax.tree.leaves(restored), strict=True):
            kept = left.dtype in (jnp.int8, jnp.float32)  # in bfloat16 those are scales of kernels
            assert right.dtype == (left.dtype if kept else jnp.dtype(dtype or "bfloat16"))
            np.testing.assert_array_equal(left.astype(jnp.float32), right.astype(jnp.float32))
        logits: Any = model.apply({"params": restored}, jnp.arange(8)[None])
        assert np.isfinite(logits).all()


@pytest.mark.parametrize("embeddings", [False, True])
def test_an_engine_knows_that_a_folder_is_in_int8(tmp_path, embeddings):
    model, params = model_of("float32")
    save(tmp_path / "m", model, quantize_params(params, Quantization(embeddings)))
    options: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32, "max_num_seqs": 2}
    llm = LLM(tmp_path / "m", **options, warm_up=False)
    assert llm.memory_plan.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.params))
    assert llm.engine.config.min_tokens == (2 if jax.default_backend() == "cpu" else 1)
    more = LLM(tmp_path / "m", **options, quantization="int8", quantize_embeddings=True, warm_up=False)
    assert quantization_in(more.engine.runner.params) == Quantization(embeddings=True)
    assert more.memory_plan.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(more.engine.runner.params))


def test_convert_to_int8(tmp_path):
    model, params = model_of("float32")
    save(tmp_path / "m", model, params)
    convert(tmp_path / "m", tmp_path / "int8", quantization="int8")
    assert_equal_trees(load_checkpoint(tmp_path / "int8").params, quantize_params(params, Quantization(False)))
    with pytest.raises(ValueError, match="quantization: got 'int8' with format='safetensors', expected None"):
        convert(tmp_path / "m", tmp_path / "hf", quantization="int8", format="safetensors")


def test_large_arrays_are_stored_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "CHUNK_BYTES", 4096)
    model, params = model_of()
    save(tmp_path / "m", model, params)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(tmp_path / "m" / "params").item_metadata.tree
    table = tree["embed_tokens"]["embedding"]
    assert table.shape == (96, 64)
    assert np.prod(table.storage.chunk_shape) * 4 <= 4096
    assert_equal_trees(params, load_checkpoint(tmp_path / "m").params)


def test_progress_is_in_bytes(tmp_path, capsys):
    model, params = model_of()
    save(tmp_path / "m", model, params)
    assert capsys.readouterr().err == ""
    load_checkpoint(tmp_path / "m", progress=True)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    size = f"{num_bytes / 1000:.0f}k"
    assert f"{size}/{size}" in capsys.readouterr().err


def test_it_is_loaded_like_any_other_model(tmp_path):
    import pagedjax

    model, params = model_of()
    pagedjax.save(tmp_path / "m", model, params, word_tokenizer(BOS_TEMPLATE))
    loaded, restored, tokenizer = pagedjax.load(tmp_path / "m", dtype="float32")
    assert loaded == model
    assert_equal_trees(params, restored)
    assert tokenizer.encode("hi") == [5]
    sizes: Any = {"num_blocks": 8, "block_size": 8, "max_num_seqs": 2}
    sizes |= {"max_num_batched_tokens": 16, "max_model_len": 32}
    plan = pagedjax.LLM.plan(tmp_path / "m", compile=False, **sizes)
    assert plan.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    options = pagedjax.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    by_path = pagedjax.LLM(tmp_path / "m", warm_up=False, **sizes).generate([[1, 2, 3]], options, use_tqdm=False)
    by_hand = pagedjax.LLM(model, params=params, warm_up=False, **sizes).generate([[1, 2, 3]], options, use_tqdm=False)
    assert by_path[0].outputs[0].token_ids == by_hand[0].outputs[0].token_ids


def test_chat_takes_tools_and_templates():
    import pagedjax

    model, params = model_of()
    sizes: Any = {"num_blocks": 8, "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    llm = pagedjax.LLM(model, params=params, tokenizer=word_tokenizer(TOOL_TEMPLATE), warm_up=False, **sizes)
    options = pagedjax.SamplingParams(temperature=0.0, max_tokens=1)
    (plain,) = llm.chat(CHAT, options, use_tqdm=False)
    assert plain.prompt_token_ids == [1, 3, 5, 4, 6]
    (with_tools,) = llm.chat(CHAT, options, use_tqdm=False, tools=[PLAIN_TOOL])
    assert with_tools.prompt_token_ids == [1, 6, 3, 5, 4, 6]
    assert with_tools.prompt_token_ids == llm.render_chat(CHAT, tools=[PLAIN_TOOL])
    two = llm.chat([CHAT, CHAT[:1]], options, use_tqdm=False, chat_template="{{ word }}", word="you")
    assert [output.prompt_token_ids for output in two] == [[6], [6]]
    with pytest.raises(ValueError, match=r"tools\[0\].type: got None"):
        llm.chat(CHAT, options, use_tqdm=False, tools=[{}])


# --- the formats hold the same model


def test_all_formats_give_equal_logits(tmp_path):
    raw = tiny()
    tensors = random_tensors(config_from_hf(raw))
    single = save_folder(tmp_path / "single", raw, tensors)
    sharded = save_folder(tmp_path / "sharded", raw, tensors, shards=3)
    gguf = write_gguf(tmp_path / "m.gguf", raw, tensors)
    convert(gguf, tmp_path / "converted")
    token_ids = jnp.arange(12).reshape(1, 12)
    logits = []
    for path in (single, sharded, gguf, tmp_path / "converted"):
        config, params, _ = load_checkpoint(path, "float32")
        logits.append(np.asarray(CausalLM(config).apply({"params": params}, token_ids)))
    assert np.ptp(logits[0]) > 1
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)


def test_convert_changes_the_dtype(tmp_path):
    folder, _ = save_tiny(tmp_path / "hf")
    convert(folder, tmp_path / "own")
    convert(folder, tmp_path / "narrow", dtype="bfloat16")
    assert load_checkpoint(tmp_path / "own").config.dtype == "float32"
    narrow = load_checkpoint(tmp_path / "narrow")
    assert narrow.config.dtype == "bfloat16"
    assert_equal_trees(load_checkpoint(folder, "bfloat16").params, narrow.params)


def test_convert_refuses_before_it_loads(tmp_path, monkeypatch):
    folder, _ = save_tiny(tmp_path / "hf")
    monkeypatch.setattr("pagedjax.models.convert.load_checkpoint", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"path: got .*hf, expected a new or an empty folder"):
        convert(folder, folder)
    save(tmp_path / "own", *model_of())
    with pytest.raises(ValueError, match=r"path: got .*own"):
        convert(folder, tmp_path / "own", format="safetensors", overwrite=True)
    with pytest.raises(ValueError, match="format: got 'onnx', expected one of orbax, safetensors"):
        convert(folder, tmp_path / "new", format="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "own"]


# --- safetensors out

EXPORTED = {
    **{name: changes for name, changes in MODELS.items() if name != "llama3 rope"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "head_dim": ...},
}


@pytest.mark.parametrize("shard_bytes", [2**31, 20_000])
@pytest.mark.parametrize("changes", EXPORTED.values(), ids=EXPORTED.keys())
def test_written_as_safetensors(tmp_path, monkeypatch, changes, shard_bytes):
    monkeypatch.setattr(hf_export, "SHARD_BYTES", shard_bytes)
    model, params = model_of(**changes)
    save(tmp_path / "m", model, params, word_tokenizer(BOS_TEMPLATE))
    convert(tmp_path / "m", tmp_path / "hf", format="safetensors")
    config, restored, tokenizer = load_checkpoint(tmp_path / "hf")
    # its file says more of what ends a text: the tokenizer's </s> is 2
    assert config == replace(model.config, eos_token_ids=(*model.config.eos_token_ids, 2))
    assert_equal_trees(params, restored)
    assert tokenizer is not None
    if model.config.model_type != "qwen2":  # for which transformers takes its own class, whatever the files say
        assert apply_chat_template(tokenizer, CHAT) == [1, 3, 5, 4, 6]
    assert (tmp_path / "hf" / "model.safetensors").exists() == (shard_bytes == 2**31)


@pytest.mark.oracle
@pytest.mark.parametrize("changes", EXPORTED.values(), ids=EXPORTED.keys())
def test_transformers_loads_what_was_written(tmp_path, changes):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import AutoModelForCausalLM

    model, params = model_of(**{**changes, "dtype": "float32"})
    export_hf(tmp_path / "hf", model.config, params)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    token_ids = np.random.default_rng(0).integers(0, 96, (2, 40))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(token_ids)).logits.numpy()
    logits = model.apply({"params": params}, jnp.asarray(token_ids, jnp.int32))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-4, rtol=2e-4)


def test_what_cannot_be_written_as_safetensors(tmp_path):
    model, params = model_of(**MODELS["llama3 rope"])
    with pytest.raises(ValueError, match=r"config: got .*llama3.* expected one that config.json can hold"):
        export_hf(tmp_path / "hf", model.config, params)
    model, params = model_of()
    with pytest.raises(ValueError, match=r"dtype: got \['float32', 'int8'\], expected one of float32"):
        export_hf(tmp_path / "hf", model.config, quantize_params(params, Quantization(False)))
    assert list(tmp_path.iterdir()) == []


# --- the command line


def test_convert_on_the_command_line(tmp_path):
    folder, _ = save_tiny(tmp_path / "hf")
    out = str(tmp_path / "own")
    arguments = ["convert", str(folder), out, "--dtype", "bfloat16", "--no-progress"]
    done = CliRunner().invoke(cli.app, arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert load_checkpoint(out).config.dtype == "bfloat16"
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2
    assert done.stderr == (
        f"pagedjax: error: path: got {out}, expected a new or an empty folder: overwrite=True replaces it\n"
    )
    done = CliRunner().invoke(cli.app, ["convert", str(folder), out, "--overwrite"])
    assert done.exit_code == 0
    assert "Loading weights: 100%" in done.stderr
    assert load_checkpoint(out).config.dtype == "float32"
    done = CliRunner().invoke(cli.app, ["convert", out, str(tmp_path / "st"), "--format", "safetensors"])
    assert done.exit_code == 0
    assert (tmp_path / "st" / "model.safetensors").is_file()


# --- the real model


@pytest.mark.slow
def test_smollm2_from_each_format_gives_equal_logits(tmp_path):
    path = cache_dir() / "models" / CATALOGUE["smollm2-135m-instruct"].member.rpartition("/")[2]
    if not path.is_file():
        pytest.skip(f"{path} is not there: pagedjax.models.catalogue.resolve('smollm2-135m-instruct') fetches it")
    convert(path, tmp_path / "orbax")
    convert(path, tmp_path / "hf", format="safetensors")
    logits, prompts = [], []
    for source in (path, tmp_path / "orbax", tmp_path / "hf"):
        config, params, tokenizer = load_checkpoint(source, "float32")
        assert tokenizer is not None
        prompts.append(apply_chat_template(tokenizer, [{"role": "user", "content": "What is the capital of France?"}]))
        assert config.eos_token_ids == (2,)
        token_ids = jnp.asarray([prompts[0]], jnp.int32)
        logits.append(np.asarray(jax.jit(CausalLM(config).apply)({"params": params}, token_ids)))
    assert prompts[0] == prompts[1] == prompts[2]
    assert np.ptp(logits[0]) > 10
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)


# --- shardings

ON_EIGHT_DEVICES = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)

from pagedjax.models.config import Quantization
from pagedjax.models.decoder import CausalLM
from pagedjax.models.load import load_checkpoint
from pagedjax.models.orbax_checkpoint import save

assert jax.device_count() == 8
work = Path(sys.argv[1])
devices = np.array(jax.devices())
wide, tall = Mesh(devices.reshape(2, 4), ("data", "model")), Mesh(devices.reshape(4, 2), ("data", "model"))

def columns(path, shape):  # kernels by their outputs over four devices, the rest everywhere
    return NamedSharding(wide, P(None, "model") if path[-1] == "kernel" else P())

def on_one(index):
    return jax.device_put(0, devices[index]).sharding

def rows(path, shape):  # everything by its first axis over all eight
    return NamedSharding(tall, P(("data", "model")))

plain = load_checkpoint(work / "saved").params
model = CausalLM(load_checkpoint(work / "saved").config)
token_ids = jnp.arange(12).reshape(1, 12)
logits = np.asarray(model.apply({"params": plain}, token_ids))

def check(params, placement):
    def one(path, array, exact):
        where = placement(tuple(key.key for key in path), array.shape)
        assert array.sharding.is_equivalent_to(where, array.ndim), (path, array.sharding)
        assert array.addressable_shards[0].data.shape == where.shard_shape(array.shape)
        np.testing.assert_array_equal(np.asarray(array), np.asarray(exact))
    jax.tree_util.tree_map_with_path(one, params, plain)

for name in ("saved", "hf", "m.gguf"):
    check(load_checkpoint(work / name, sharding=columns).params, columns)
    check(load_checkpoint(work / name, sharding=rows).params, rows)

int8 = load_checkpoint(work / "hf", sharding=columns, quantization=Quantization(embeddings=True)).params
save(work / "int8", model, int8)
for params in (int8, load_checkpoint(work / "int8", sharding=columns).params):
    up = params["layers_0"]["mlp"]["up_proj"]
    assert up["kernel"].sharding.is_equivalent_to(columns(("kernel",), (64, 96)), 2)
    assert up["scale"].sharding.is_equivalent_to(NamedSharding(wide, P("model")), 1)
    assert params["embed_tokens"]["scale"].sharding.is_equivalent_to(NamedSharding(wide, P()), 1)
    assert np.isfinite(model.apply({"params": params}, token_ids)).all()

meshed = load_checkpoint(work / "saved", sharding=columns).params
assert meshed["norm"]["scale"].sharding.num_devices == 8
np.testing.assert_allclose(model.apply({"params": meshed}, token_ids), logits, rtol=1e-5, atol=1e-4)
save(work / "from_mesh", model, meshed)
check(load_checkpoint(work / "from_mesh", sharding=rows).params, rows)
check(load_checkpoint(work / "from_mesh").params, lambda *_: on_one(0))
last = on_one(7)
check(load_checkpoint(work / "from_mesh", sharding=last).params, lambda *_: last)
tree = jax.tree_util.tree_map_with_path(lambda path, leaf: rows(path, leaf.shape), plain)
check(load_checkpoint(work / "from_mesh", sharding=tree).params, rows)
print("all shardings hold")
"""


def test_restored_into_any_sharding(tmp_path):
    raw = tiny()
    tensors = random_tensors(config_from_hf(raw))
    save_folder(tmp_path / "hf", raw, tensors)
    write_gguf(tmp_path / "m.gguf", raw, tensors)
    config, params, _ = load_checkpoint(tmp_path / "hf")
    save(tmp_path / "saved", CausalLM(config), params)
    of_orbax = "ignore:jax.sharding.SingleDeviceSharding is deprecated:DeprecationWarning"  # as in pyproject.toml
    command = [sys.executable, "-W", "error", "-W", of_orbax, "-c", ON_EIGHT_DEVICES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "all shardings hold\n"), done.stderr[-3000:]


# --- what is refused: paths


def test_a_path_that_is_taken(tmp_path):
    model, params = model_of()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo").write_text("mine")
    for name in ("file", "folder"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"path: got .*{name}, expected a new or an empty folder: it was not"):
                save(tmp_path / name, model, params, overwrite=overwrite)
    assert (tmp_path / "folder" / "photo").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", model, params)
    with pytest.raises(ValueError, match="overwrite=True replaces it"):
        save(tmp_path / "empty", model, params)
    halves = jax.tree.map(lambda leaf: leaf / 2, params)
    save(tmp_path / "empty", model, halves, overwrite=True)
    assert_equal_trees(halves, load_checkpoint(tmp_path / "empty").params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "folder"]


class Unsaveable:
    def save_pretrained(self, folder):
        raise OSError("disk full")


def test_what_fails_leaves_nothing_behind(tmp_path):
    model, params = model_of()
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "new", model, params, Unsaveable())
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "old", model, params)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "old", model, jax.tree.map(jnp.zeros_like, params), Unsaveable(), overwrite=True)
    assert_equal_trees(params, load_checkpoint(tmp_path / "old").params)


def without(params: Any, *path: str) -> Any:
    params = jax.tree.map(lambda leaf: leaf, params)
    leaf = params
    for key in path[:-1]:
        leaf = leaf[key]
    del leaf[path[-1]]
    return params


def with_leaf(params: Any, value: Any, *path: str) -> Any:
    params = jax.tree.map(lambda leaf: leaf, params)
    leaf = params
    for key in path[:-1]:
        leaf = leaf.setdefault(key, {})
    leaf[path[-1]] = value
    return params


NORM, KERNEL = ("layers_1", "input_layernorm", "scale"), ("layers_0", "mlp", "up_proj", "kernel")
MISFITS = {
    "missing": (lambda tree: without(tree, *NORM), "missing: layers_1/input_layernorm/scale"),
    "a layer too many": (
        lambda tree: with_leaf(tree, jnp.ones(64), "layers_2", "input_layernorm", "scale"),
        r"not used: layers_2/input_layernorm/scale \[64\]",
    ),
    "shape": (
        lambda tree: with_leaf(tree, jnp.ones((96, 64)), *KERNEL),
        r"wrong shape: layers_0/mlp/up_proj/kernel is \[96, 64\], expected \[64, 96\]",
    ),
    "int8 without its scale": (
        lambda tree: with_leaf(tree, jnp.ones((64, 96), jnp.int8), *KERNEL),
        "missing: layers_0/mlp/up_proj/scale",
    ),
    "a scale without int8": (
        lambda tree: with_leaf(tree, jnp.ones(96), *KERNEL[:-1], "scale"),
        r"not used: layers_0/mlp/up_proj/scale \[96\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_arrays_that_are_not_the_models(tmp_path, change, message):
    model, params = model_of()
    with pytest.raises(ValueError, match=f"params do not fit the llama config: {message}"):
        save(tmp_path / "m", model, change(params))
    assert not (tmp_path / "m").exists()
    # and a folder that was changed afterwards
    save(tmp_path / "m", model, params)
    shutil.rmtree(tmp_path / "m" / "params")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "m" / "params", args=ocp.args.PyTreeSave(change(params)))
    with pytest.raises(ValueError, match=f"params do not fit the llama config: {message}"):
        load_checkpoint(tmp_path / "m")


def test_other_leaves_than_arrays(tmp_path):
    model, params = model_of()
    with pytest.raises(ValueError, match="params: got a float at layers_1/input_layernorm/scale, expected an array"):
        save(tmp_path / "m", model, with_leaf(params, 1.0, *NORM))


# --- what is refused: files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "m"
    save(folder, *model_of())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "m"))


def test_without_its_json_it_is_no_checkpoint(copy):
    (copy / "pagedjax.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load_checkpoint(copy)


LOSSES = ("params", "params/_METADATA", "params/manifest.ocdbt", "params/ocdbt.process_0", "the end of the data")
LOAD_EACH = """
import sys

from pagedjax.models.load import load_checkpoint

for folder in sys.argv[1:]:
    try:
        load_checkpoint(folder)
    except ValueError as error:
        print(error)
    else:
        print("loaded")
"""


def test_what_is_lost_is_noticed(saved, tmp_path):
    """In a process of its own: where one read fails, Orbax leaves the others behind, and their coroutines complain."""
    folders = [tmp_path / str(index) for index in range(len(LOSSES))]
    for folder, loss in zip(folders, LOSSES, strict=True):
        shutil.copytree(saved, folder)
        path = folder / loss
        if path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
        else:
            files = [path for path in (folder / "params").rglob("*") if path.is_file()]
            path = max(files, key=lambda path: path.stat().st_size)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    command = [sys.executable, "-c", LOAD_EACH, str(saved), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    whole, *damaged = done.stdout.splitlines()
    assert whole == "loaded"
    for line, folder in zip(damaged, folders, strict=True):
        assert line.startswith(f"{folder}/params is damaged or incomplete: ")


BAD_JSON = {
    "cut off": (lambda raw: json.dumps(raw)[:-9], "pagedjax.json is not valid JSON"),
    "a list": (lambda raw: "[]", "holds a list, expected an object"),
    "another version": (lambda raw: json.dumps(raw | {"format_version": 2}), "format_version: got 2 in .*, expected 1"),
    "no version": (lambda raw: json.dumps({"config": raw["config"]}), "format_version: got None"),
    "no config": (lambda raw: json.dumps({"format_version": 1}), f"{MESSAGE}: got None, expected an object"),
    "an unknown field": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"colour": 1}}),
        rf"{MESSAGE}: got .*missing \[\], unknown \['colour'\]",
    ),
    "a missing field": (
        lambda raw: json.dumps(raw | {"config": {k: v for k, v in raw["config"].items() if k != "head_dim"}}),
        rf"{MESSAGE}: got .*missing \['head_dim'\], unknown \[\]",
    ),
    "a missing field inside": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"rope": {"theta": 1.0}}}),
        rf"{MESSAGE}.rope: got .*missing \[.*'rope_type'",
    ),
    "text for a number": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"num_layers": "2"}}),
        f"{MESSAGE}.num_layers: got '2', expected of type int",
    ),
    "a bool for a number": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"num_layers": True}}),
        f"{MESSAGE}.num_layers: got True, expected of type int",
    ),
    "ids that are none": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"eos_token_ids": [7, "x"]}}),
        rf"{MESSAGE}.eos_token_ids\[1\]: got 'x', expected of type int",
    ),
    "a number for a bool": (
        lambda raw: json.dumps(raw | {"quantization": {"embeddings": 1}}),
        "quantization.embeddings: got 1, expected of type bool",
    ),
    "a value out of range": (
        lambda raw: json.dumps(raw | {"config": raw["config"] | {"vocab_size": 0}}),
        "vocab_size: got 0, expected an int >= 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_bad_json_is_named(copy, change, message):
    path = copy / "pagedjax.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=message):
        read_header(copy)
