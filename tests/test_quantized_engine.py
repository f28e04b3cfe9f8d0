"""Engines with weights in int8: their tokens against the dense model in int8, loading, memory plans, new params."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_scripts import load
from test_runner import counting_compiles
from tiny_engine import CONFIG, MODEL, greedy, prompt_of, tiny_llm, tiny_params, unchecked_llm
from tiny_models import random_tensors, save_tiny, tiny, write_gguf

import pagedjax
from pagedjax.llm import LLM
from pagedjax.models.config import Quantization
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf
from pagedjax.models.placement import build_params
from pagedjax.models.quantization import is_quantized, quantize_params

CASES: dict[str, dict[str, Any]] = load("model_parity").CASES
INT8: dict[str, Any] = {"quantization": "int8"}
INT8_ALL: dict[str, Any] = {"quantization": "int8", "quantize_embeddings": True}
KINDS = pytest.mark.parametrize("options", [INT8, INT8_ALL], ids=["kernels", "embeddings too"])


@lru_cache
def int8_params(embeddings: bool) -> Any:
    return quantize_params(tiny_params(), Quantization(embeddings))


def assert_greedy(params: Any, prompt: list[int], token_ids: Any, tolerance: float) -> None:
    """Each token is the dense model's best within rounding: a number between two integers may fall to either side."""
    text = [*prompt, *token_ids]
    padded = jnp.asarray([text + [0] * (64 - len(text))], jnp.int32)
    logits = np.asarray(_dense(params, padded))[0, len(prompt) - 1 : len(text) - 1]
    chosen = logits[range(len(token_ids)), list(token_ids)]
    assert np.all(logits.max(axis=-1) - chosen <= tolerance), (logits.max(axis=-1) - chosen).max()


@jax.jit
def _dense(params: Any, ids: Any) -> Any:
    return MODEL.apply({"params": params}, ids)


@KINDS
def test_the_engine_gives_the_tokens_of_the_dense_model(options):
    llm = tiny_llm(**options)
    prompts = [prompt_of(length, seed=length) for length in (3, 12, 31, 40)]
    outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
    params = int8_params(options is INT8_ALL)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(params, prompt, output.outputs[0].token_ids, tolerance=1.0)
    alone = [llm.generate([prompt], greedy(12), use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    for prompt, token_ids in zip(prompts, alone, strict=True):
        assert_greedy(params, prompt, token_ids, tolerance=1.0)


@KINDS
def test_float_params_are_quantised_and_shared_where_they_stay(options):
    given = tiny_params()
    params = tiny_llm(**options).engine.runner.params
    assert is_quantized(params["layers_0"]["mlp"]["up_proj"]["kernel"])
    assert params["norm"]["scale"] is given["norm"]["scale"]
    assert not is_quantized(given["layers_0"]["mlp"]["up_proj"]["kernel"])
    assert is_quantized(params["embed_tokens"]["embedding"]) == (options is INT8_ALL)


def test_params_in_int8_need_no_option():
    llm = LLM(MODEL, params=int8_params(False), num_blocks=8, max_model_len=64, warm_up=False)
    assert llm.memory_plan.quantization == Quantization(embeddings=False)
    assert llm.memory_plan.config.min_tokens == 2
    assert llm.memory_plan.weights_in_place
    assert llm.engine.runner.params["norm"]["scale"] is tiny_params()["norm"]["scale"]


@KINDS
def test_loading_quantises_each_tensor(options, tmp_path):
    folder, tensors = save_tiny(tmp_path / "hf")
    gguf = write_gguf(tmp_path / "model.gguf", tiny(), tensors)
    model, floats, _ = pagedjax.load(folder)
    expected = quantize_params(floats, Quantization(options is INT8_ALL))
    pagedjax.save(tmp_path / "own", model, floats)
    pagedjax.save(tmp_path / "own8", model, expected)
    for path, given in ((folder, options), (gguf, options), (tmp_path / "own", options), (tmp_path / "own8", {})):
        params = pagedjax.load(path, **given)[1]
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 8},
    ],
    ids=lambda changes: changes["model_type"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_runs_in_int8(changes, dtype, tmp_path):
    folder, _ = save_tiny(tmp_path, **changes)
    model, floats, _ = pagedjax.load(folder, dtype)
    ids = jnp.asarray([np.random.default_rng(0).integers(0, 96, 40).tolist()], jnp.int32)
    exact = np.asarray(model.apply({"params": floats}, ids))
    for options in (INT8, INT8_ALL):
        _, params, _ = pagedjax.load(folder, dtype, **options)
        logits: Any = model.apply({"params": params}, ids)
        assert logits.dtype == jnp.float32
        assert 1e-4 < np.linalg.norm(np.asarray(logits) - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_decoders_are_near_themselves_in_int8(name):
    """Layer norms, biases, learned positions, projections, windows: whatever a family has."""
    config = config_from_hf(CASES[name])
    params = build_params(config, random_tensors(config).items(), "float32")
    ids = jnp.asarray([np.random.default_rng(0).integers(3, 96, 40).tolist()], jnp.int32)
    model = CausalLM(config)
    exact, near = (
        np.asarray(jax.jit(model.apply)({"params": each}, ids))
        for each in (params, quantize_params(params, Quantization(embeddings=True)))
    )
    assert 1e-4 < np.linalg.norm(near - exact) / np.linalg.norm(exact) < 0.15


@KINDS
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_int8(options, tied, tmp_path):
    folder, _ = save_tiny(tmp_path, tie_word_embeddings=tied)
    sizes: dict[str, Any] = {"num_blocks": 8, "max_model_len": 64, "max_num_seqs": 4}
    llm = LLM(folder, **sizes, **options, warm_up=False)
    loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.params))
    assert llm.memory_plan.weight_bytes == loaded
    assert loaded < LLM.plan(folder, **sizes, compile=False).weight_bytes / 2
    assert "int8 and float32" in str(llm.memory_plan)


@KINDS
def test_steps_take_no_more_than_the_plan_says(options):
    wide = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=1024, num_heads=16, num_kv_heads=4)
    params = jax.eval_shape(CausalLM(wide).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    sizes: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    plan = LLM.plan(CausalLM(wide), params=params, **sizes, **options)
    in_closed_form = LLM.plan(CausalLM(wide), params=params, **sizes, **options, compile=False)
    assert plan.programs
    assert max(plan.programs.values()) <= in_closed_form.step_bytes


def test_new_float_params_are_quantised_and_nothing_compiles():
    llm = tiny_llm(**INT8)
    prompt = prompt_of(12)
    before = llm.generate([prompt], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    changed = jax.tree.map(lambda x: x, tiny_params())
    changed["layers_0"]["mlp"]["up_proj"]["kernel"] = -changed["layers_0"]["mlp"]["up_proj"]["kernel"]
    with counting_compiles() as num_compiles:
        llm.update_params(changed)
        after = llm.generate([prompt], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
        assert num_compiles() == 0
    assert after != before
    assert_greedy(quantize_params(changed, Quantization(False)), prompt, after, tolerance=1.0)
    llm.update_params(int8_params(False))
    assert llm.generate([prompt], greedy(8), use_tqdm=False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "quantization: got 'int4', expected None or one of int8"),
        ({"quantize_embeddings": True}, "quantize_embeddings: got True, expected False without a quantization"),
        ({"quantization": "int8", "quantize_embeddings": 1}, "quantize_embeddings: got 1, expected True or False"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        unchecked_llm(**options)
