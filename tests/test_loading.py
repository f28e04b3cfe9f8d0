"""Loading a Hugging Face folder (cases B43, B44, B47): every tensor is used once or named, and logits equal."""

import dataclasses
import json
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tiny_engine import MODEL, tiny_params
from tiny_models import random_tensors, save_folder, save_tiny, tiny, write_gguf, write_index

from pagedjax.llm import LLM
from pagedjax.models.config import ModelConfig
from pagedjax.models.config_file import write_config
from pagedjax.models.families import config_from_hf
from pagedjax.models.gguf_loader import iter_gguf_tensors, open_gguf
from pagedjax.models.load import load_checkpoint
from pagedjax.models.placement import build_params
from pagedjax.models.safetensors_loader import iter_tensors
from pagedjax.models.weights import expected_tensors

ATTENTION = [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]


def leaf(params, path) -> Any:
    for key in path:
        params = params[key]
    return params


# --- which numbers end up where


def test_every_value_arrives(tmp_path):
    folder, tensors = save_tiny(tmp_path, attention_bias=True, mlp_bias=True)
    config, params, tokenizer = load_checkpoint(folder)
    assert tokenizer is None
    assert len(jax.tree.leaves(params)) == len(tensors) == 3 + 2 * (2 + 7 * 2)
    for name, (path, shape, transpose) in expected_tensors(config).items():
        value = leaf(params, path)
        assert (value.shape, value.dtype) == (shape, jnp.float32)
        np.testing.assert_array_equal(np.asarray(value), tensors[name].T if transpose else tensors[name])


def test_sharded_equals_single(tmp_path):
    folder, tensors = save_tiny(tmp_path / "one")
    single = load_checkpoint(folder).params
    sharded = load_checkpoint(save_folder(tmp_path / "three", tiny(), tensors, shards=3)).params
    jax.tree.map(np.testing.assert_array_equal, single, sharded)


def test_bfloat16_is_read_and_written_exactly(tmp_path):
    raw = tiny(dtype="bfloat16")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in random_tensors(config_from_hf(raw)).items()}
    folder = save_folder(tmp_path, raw, tensors)
    own, wide = load_checkpoint(folder), load_checkpoint(folder, dtype="float32")
    assert own.config.dtype == "bfloat16"
    for value, exact in zip(jax.tree.leaves(own.params), jax.tree.leaves(wide.params), strict=True):
        assert (value.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(np.asarray(value, np.float32), np.asarray(exact))
    expected = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(wide.params["norm"]["scale"]), expected)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_config_without_dtype_takes_the_files(tmp_path, stored):
    tensors = {name: value.astype(stored) for name, value in random_tensors(config_from_hf(tiny())).items()}
    config, params, _ = load_checkpoint(save_folder(tmp_path, tiny(), tensors))
    assert config.dtype == stored
    assert {value.dtype for value in jax.tree.leaves(params)} == {jnp.dtype(stored)}


@pytest.mark.parametrize("dtype", ["float64", "int8", "auto", "fp16"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"dtype: got '{dtype}', expected one of float32, bfloat16, float16"):
        load_checkpoint(save_tiny(tmp_path)[0], dtype=dtype)


def test_tensors_are_streamed():
    """No array of the file is alive any more when the next is asked for."""
    config = config_from_hf(tiny())
    tensors = random_tensors(config)
    read = []

    def stream():
        for name in list(tensors):
            assert all(reference() is None for reference in read)
            array = tensors.pop(name).copy()
            read.append(weakref.ref(array))
            yield name, array
            del array

    build_params(config, stream(), "float32")
    assert len(read) == len(expected_tensors(config))


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "gguf"])
def test_the_files_readers_keep_no_tensor(tmp_path, kind):
    raw = tiny()
    tensors = random_tensors(config_from_hf(raw))
    if kind == "gguf":
        reader = open_gguf(write_gguf(tmp_path / "m.gguf", raw, tensors, "Q8_0"))
        stream = iter_gguf_tensors(reader, config_from_hf(raw))
    else:
        stream = iter_tensors(save_folder(tmp_path, raw, tensors, shards=3 if kind == "sharded" else 1))
    previous = None
    names = []
    for name, array in stream:
        assert previous is None or previous() is None
        names.append(name)
        previous = weakref.ref(array if array.base is None else array.base)
        del array
    assert sorted(names) == sorted(tensors)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_conversion_rounds_as_numpy_does(stored, dtype):
    """Whoever does it; the smallest numbers, infinities and ties included."""
    config = config_from_hf(tiny())
    tensors = {name: value.astype(stored) for name, value in random_tensors(config).items()}
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, 6e-8, 1e-7, 65504, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11], np.float32
    )
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        tensors[name].reshape(-1)[: special.size] = special.astype(stored)
    params = build_params(config, tensors.items(), dtype)
    with np.errstate(over="ignore"):
        for name, (path, _, transpose) in expected_tensors(config).items():
            exact = tensors[name].astype(dtype)
            np.testing.assert_array_equal(np.asarray(leaf(params, path)), exact.T if transpose else exact)


def test_progress_is_in_bytes_of_the_parameters(capsys):
    config = config_from_hf(tiny())
    tensors = {name: value.astype(np.float16) for name, value in random_tensors(config).items()}
    params = build_params(config, tensors.items(), "float32", progress=True)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    shown = capsys.readouterr().err
    assert "Loading weights: 100%|" in shown
    assert f"{num_bytes / 1000:.0f}k/{num_bytes / 1000:.0f}k" in shown.rpartition("Loading weights")[2]
    build_params(config, tensors.items(), "float32")
    assert capsys.readouterr().err == ""


# --- where the parameters live


def test_parameters_go_where_they_are_told():
    config = config_from_hf(tiny())
    tensors = random_tensors(config)
    here = jnp.zeros(()).sharding  # of one device
    asked = {}

    def by_path(path, shape):
        asked[path] = shape
        return here

    plain = build_params(config, tensors.items(), "bfloat16")
    tree = jax.tree.map(lambda _: here, plain)
    for placement in (here, by_path, tree):
        params = build_params(config, tensors.items(), "bfloat16", sharding=placement)
        jax.tree.map(np.testing.assert_array_equal, plain, params)
        assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {here}
        assert all(leaf.committed for leaf in jax.tree.leaves(params))
    assert asked == {path: shape for path, shape, _ in expected_tensors(config).values()}


def test_bad_shardings_are_named():
    config = config_from_hf(tiny())
    tensors = random_tensors(config)
    tree = jax.tree.map(lambda leaf: leaf.sharding, build_params(config, tensors.items(), "float32"))
    del tree["layers_1"]["mlp"]
    message = "sharding of layers_1/mlp/gate_proj/kernel: got None, expected a jax.sharding.Sharding"
    with pytest.raises(ValueError, match=message):
        build_params(config, tensors.items(), "float32", sharding=tree)
    no_sharding: Any = {"embed_tokens": "cpu"}
    with pytest.raises(ValueError, match=r"sharding of embed_tokens/embedding: got None, expected a jax"):
        build_params(config, tensors.items(), "float32", sharding=no_sharding)
    one_axis = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(None, "x"))
    with pytest.raises(ValueError, match=r"sharding of [\w/]*norm/scale: .* expected one for the shape \[64\]"):
        build_params(config, tensors.items(), "float32", sharding=one_axis)


def test_parameters_do_not_share_the_files_memory():
    config = config_from_hf(tiny())
    tensors = random_tensors(config)
    before = {name: value.copy() for name, value in tensors.items()}
    params = build_params(config, tensors.items(), "float32")
    for value in tensors.values():
        value[...] = np.nan
    np.testing.assert_array_equal(np.asarray(params["norm"]["scale"]), before["model.norm.weight"])
    np.testing.assert_array_equal(np.asarray(params["embed_tokens"]["embedding"]), before["model.embed_tokens.weight"])


# --- the head (B43)


def test_tied_with_another_head_in_the_file_uses_the_embedding(tmp_path):
    raw = tiny(tie_word_embeddings=True)
    tensors = random_tensors(config_from_hf(raw))
    clean = load_checkpoint(save_folder(tmp_path / "a", raw, tensors)).params
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    params = load_checkpoint(save_folder(tmp_path / "b", raw, tensors)).params
    assert "lm_head" not in params
    jax.tree.map(np.testing.assert_array_equal, clean, params)


def test_untied_without_a_head_is_an_error(tmp_path):
    tensors = random_tensors(config_from_hf(tiny()))
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing: lm_head.weight \[96, 64\]"):
        load_checkpoint(save_folder(tmp_path, tiny(), tensors))


# --- used once or named


def test_all_problems_are_in_one_error():
    config = config_from_hf(tiny())
    tensors = random_tensors(config)
    missing = tensors.pop("model.norm.weight")
    tensors["model.norm.bias"] = missing
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
    stream = [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])]
    with pytest.raises(ValueError) as error:
        build_params(config, stream, "float32")
    text = str(error.value)
    assert "missing: model.norm.weight [64]" in text
    assert "not used: model.norm.bias [64]" in text
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is [64, 96], expected [96, 64]" in text
    assert "given twice: lm_head.weight" in text
    assert text.count("model.layers") == 1


def test_old_rotary_buffers_are_ignored(tmp_path):
    tensors = random_tensors(config_from_hf(tiny()))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    load_checkpoint(save_folder(tmp_path, tiny(), tensors))


def test_a_layer_too_many_is_named(tmp_path):
    raw = tiny(num_hidden_layers=1)
    folder = save_folder(tmp_path, raw, random_tensors(config_from_hf(tiny())))
    with pytest.raises(ValueError, match=r"not used: model.layers.1.input_layernorm.weight"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ATTENTION)
def test_one_lacking_bias_is_named(tmp_path, name):
    raw = tiny(attention_bias=True)
    tensors = random_tensors(config_from_hf(raw))
    del tensors[f"{name}.bias"]
    with pytest.raises(ValueError, match=f"missing: {name}.bias"):
        load_checkpoint(save_folder(tmp_path, raw, tensors))


@pytest.mark.parametrize("name", [*ATTENTION, "model.layers.0.mlp.down_proj"])
def test_a_bias_that_the_config_does_not_name_is_an_error(tmp_path, name):
    tensors = random_tensors(config_from_hf(tiny()))
    tensors[f"{name}.bias"] = np.zeros(tensors[f"{name}.weight"].shape[0], np.float32)
    with pytest.raises(ValueError, match=f"not used: {name}.bias"):
        load_checkpoint(save_folder(tmp_path, tiny(), tensors))


def test_integer_tensors_are_refused(tmp_path):
    tensors = random_tensors(config_from_hf(tiny()))
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(ValueError, match=r"model.norm.weight is of type I8"):
        load_checkpoint(save_folder(tmp_path, tiny(), tensors))


# --- the index is the authority


def sharded(tmp_path):
    tensors = random_tensors(config_from_hf(tiny()))
    folder = save_folder(tmp_path, tiny(), tensors, shards=2)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_index_names_a_missing_file(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is missing"):
        load_checkpoint(folder)


def test_index_names_a_tensor_that_is_not_there(tmp_path):
    folder, weight_map = sharded(tmp_path)
    write_index(folder, {**weight_map, "model.layers.9.extra.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(ValueError, match=r"missing in the file \['model.layers.9.extra.weight'\]"):
        load_checkpoint(folder)


def test_a_shard_holds_what_the_index_does_not_name(tmp_path):
    folder, weight_map = sharded(tmp_path)
    shard = folder / "model-00001-of-00002.safetensors"
    save_file({**load_file(shard), "stray.weight": np.ones(3, np.float32)}, shard)
    with pytest.raises(ValueError, match=r"not in the index \['stray.weight'\]"):
        load_checkpoint(folder)
    assert "stray.weight" not in weight_map


def test_index_does_not_lead_out_of_the_folder(tmp_path):
    folder, weight_map = sharded(tmp_path)
    write_index(folder, {**weight_map, "x": "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="expected a file in the same folder"):
        load_checkpoint(folder)


BROKEN = {
    "no config": ("config.json", None, "config.json is missing"),
    "config cut off": ("config.json", '{"model_type": ', "config.json is not valid JSON"),
    "config a list": ("config.json", "[]", "config.json holds a list, expected an object"),
    "no weights": ("model.safetensors", None, "model.safetensors is missing"),
    "weights cut off": ("model.safetensors", "\x08", "model.safetensors is not a valid safetensors file"),
    "index without a map": ("model.safetensors.index.json", "{}", "no weight_map"),
    "index of nothing": ("model.safetensors.index.json", '{"weight_map": {}}', "no weight_map"),
    "config without end": ("config.json", '{"a": ' * 100_000, "config.json is not valid JSON"),
    "pagedjax.json without end": ("pagedjax.json", "[" * 100_000, "pagedjax.json is not valid JSON"),
}


@pytest.mark.parametrize(("file", "content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_folders(tmp_path, file, content, message):
    folder, _ = save_tiny(tmp_path)
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_a_saved_config_with_a_number_beyond_floats(tmp_path):
    write_config(tmp_path, config_from_hf(tiny()), None)
    raw = json.loads((tmp_path / "pagedjax.json").read_text())
    raw["config"]["norm_eps"] = 10**400
    (tmp_path / "pagedjax.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"config\.norm_eps: got 10+, expected a number, and finite"):
        load_checkpoint(tmp_path)


# --- the config (B43 d, B44)


def test_head_dim_is_its_own_number(tmp_path):
    folder, _ = save_tiny(tmp_path, hidden_size=40)
    config, params, _ = load_checkpoint(folder)
    assert config.head_dim == 16
    assert params["layers_0"]["self_attn"]["q_proj"]["kernel"].shape == (40, 64)
    assert params["layers_0"]["self_attn"]["o_proj"]["kernel"].shape == (64, 40)


@pytest.mark.parametrize("head_dim", [None, ...])
def test_head_dim_from_hidden_and_heads(head_dim):
    assert config_from_hf(tiny(hidden_size=40, head_dim=head_dim)).head_dim == 10
    with pytest.raises(ValueError, match="hidden_size: got 42, expected a multiple of num_attention_heads = 4"):
        config_from_hf(tiny(hidden_size=42, head_dim=head_dim))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_keys_mean_what_they_mean_in_transformers(model_type):
    from transformers import CONFIG_MAPPING

    raw = {"model_type": model_type, "sliding_window": None}
    oracle, ours = CONFIG_MAPPING[model_type](**raw), config_from_hf(raw)
    same = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    for name in (*same, "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(oracle, name), name
    assert ours.norm_eps == oracle.rms_norm_eps
    assert ours.num_layers == oracle.num_hidden_layers
    assert ours.num_heads == oracle.num_attention_heads
    assert ours.num_kv_heads == oracle.num_key_value_heads
    assert ours.head_dim == (getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads)
    assert ours.rope.theta == oracle.rope_parameters["rope_theta"]
    assert ours.attention_bias == (model_type == "qwen2")
    assert ours.qk_norm == (model_type == "qwen3")
    assert ours.eos_token_ids == ()


UNSUPPORTED = {
    "model type": (
        {"model_type": "mamba"},
        "model_type: got 'mamba', expected one of llama, mistral, qwen2, qwen3, gemma",
    ),
    "no model type": ({"model_type": ...}, "model_type: got ''"),
    "activation": ({"hidden_act": "tanh"}, "hidden_act: got 'tanh', expected one of silu, relu, gelu, gelu_new"),
    "llama's window": ({"sliding_window": 8}, "sliding_window: got 8, expected null: a llama has none"),
    "a window of nothing": (
        {"model_type": "mistral", "sliding_window": 0},
        "sliding_window: got 0, expected an int >= 1",
    ),
    "another type of layer": (
        {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]},
        r"layer_types: got \['full_attention', 'chunked_attention'\], expected a list of full_attention and sliding",
    ),
    "too few types of layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]},
        r"layer_types: got \['sliding_attention'\], expected one for each of the 2 layers",
    ),
    "too many types of layers": (
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
        "layer_types: got .*, expected one for each of the 2 layers",
    ),
    "a window that is switched off": (  # transformers takes the config and raises in the model's first call
        {"model_type": "qwen2", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window: got None, expected an int >= 1 that is in use, as layer_types has sliding_attention",
    ),
    "max_window_layers true": ({"model_type": "qwen2", "max_window_layers": True}, "max_window_layers: got True"),
    "max_window_layers -1": ({"model_type": "qwen3", "max_window_layers": -1}, "max_window_layers: got -1, expected"),
    "too many layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected at most 10000"),
    "eps beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps: got 10+, expected a finite number > 0"),
    "length beyond floats": ({"max_position_embeddings": 10**400}, "max_position_embeddings: got 10+, expected an"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "heads": ({"num_key_value_heads": 3}, "num_kv_heads: got 3, expected a divisor of num_heads = 4"),
    "odd head_dim": ({"head_dim": 15}, "head_dim: got 15, expected an even number"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
    "dtype": ({"dtype": "float64"}, "dtype: got 'float64'"),
    "eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>'"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny(**changes))


WINDOWS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
    "mistral's default": ({"model_type": "mistral", "sliding_window": ...}, (4096, 4096)),
    "mistral null": ({"model_type": "mistral", "sliding_window": None}, ()),
    "qwen2": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (None, 8),
    ),
    "qwen2 switched off": ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, ()),
    "qwen2 null": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None}, ()),
    "qwen2 no such layer": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        (),
    ),
    "qwen3 by layer_types": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (8, None),
    ),
}


@pytest.mark.parametrize(("changes", "windows"), WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_of_layers(changes, windows):
    assert config_from_hf(tiny(**changes)).layer_windows == windows


def test_config_is_hashable_and_frozen():
    config = config_from_hf(tiny(eos_token_id=[7, 9]))
    assert hash(config) == hash(config_from_hf(tiny(eos_token_id=[7, 9])))
    assert config.eos_token_ids == (7, 9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, "vocab_size", 3)  # noqa: B010


# --- logits equal transformers' at every position

FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama tie not stated": {"tie_word_embeddings": ...},
    "llama head_dim null": {"head_dim": None},
    "llama 7 biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "hidden_size": 40},
    "qwen2": {"model_type": "qwen2", "head_dim": ...},
    "qwen2 tied": {"model_type": "qwen2", "head_dim": ..., "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "hidden_size": 40},
    "qwen3 biases": {"model_type": "qwen3", "hidden_size": 40, "attention_bias": True},
}


@pytest.mark.oracle
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_equal_transformers(tmp_path, changes):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from pagedjax.models.decoder import CausalLM

    raw = tiny(**changes)
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(CONFIG_MAPPING[raw["model_type"]](**raw)).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    oracle.save_pretrained(tmp_path / "saved")
    # transformers writes its own spelling of the config: ours must read that one and the one that was asked for
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "raw" / "model.safetensors").symlink_to(tmp_path / "saved" / "model.safetensors")

    length = 200 if "rope_scaling" in raw else 70
    token_ids = np.random.default_rng(1).integers(0, raw["vocab_size"], (2, length))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(token_ids)).logits.numpy()
    saved, asked = load_checkpoint(tmp_path / "saved"), load_checkpoint(tmp_path / "raw")
    assert saved.config == asked.config
    model = CausalLM(saved.config)
    logits = np.asarray(model.apply({"params": saved.params}, jnp.asarray(token_ids, jnp.int32)))
    assert np.abs(expected).max() > 1  # the comparison has something to compare
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=2e-4)


def test_iter_tensors_keeps_the_files_type(tmp_path):
    tensors = {name: value.astype(np.float16) for name, value in random_tensors(config_from_hf(tiny())).items()}
    stream = dict(iter_tensors(save_folder(tmp_path, tiny(), tensors)))
    assert stream.keys() == tensors.keys()
    assert {value.dtype for value in stream.values()} == {np.dtype(np.float16)}


def test_model_config_names_the_field():
    config = config_from_hf(tiny())
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with pytest.raises(ValueError, match="vocab_size: got -1, expected an int >= 1"):
        ModelConfig(**{**fields, "vocab_size": -1})
    with pytest.raises(ValueError, match="eos_token_ids"):
        ModelConfig(**{**fields, "eos_token_ids": (-1,)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params.pop("layers_1"), "missing: layers_1/input_layernorm/scale"),
        (
            lambda params: params["layers_0"]["mlp"]["up_proj"].update(kernel=jnp.ones((64, 8))),
            r"wrong shape: layers_0/mlp/up_proj/kernel is \[64, 8\], expected \[64, 96\]",
        ),
        (lambda params: params.update(norm={"scale": None}), r"missing: norm/scale \[64\]"),
    ],
)
def test_params_that_are_not_the_models_are_named(change, message):
    params = jax.tree.map(lambda leaf: leaf, tiny_params())
    change(params)
    with pytest.raises(ValueError, match=f"params do not fit the model's llama config: {message}"):
        LLM(MODEL, params=params, warm_up=False)
