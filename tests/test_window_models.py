"""Models whose layers have windows, through the engine: equal to the dense model, in a window's blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import CONFIG, assert_clean, fill_pool, greedy, prompt_of, run_all

from pagedjax.beams.params import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.llm import LLM
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM
from pagedjax.models.rope import RopeConfig
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams

WINDOW = 8
MAX_MODEL_LEN = 96
TOLERANCE = 2e-3
"""Of logits up to 60 in f32."""
MODELS = {
    "all layers": (WINDOW, WINDOW),
    "alternating": (WINDOW, None, WINDOW, None),
    "three of four, and two ropes": (WINDOW, WINDOW, None, WINDOW),
    "two windows": (5, WINDOW),
}


@lru_cache
def tiny(name: str) -> tuple[CausalLM, dict[str, Any]]:
    """Weights whose text depends on all that is seen: attention weighs as much as the token itself."""
    windows = MODELS[name]
    config = replace(CONFIG, num_layers=len(windows), layer_windows=windows)
    if "ropes" in name:
        config = replace(config, local_rope=RopeConfig(theta=100.0))
    model = CausalLM(config)
    params: Any = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, drawn)


def window_llm(name: str, **options: Any) -> LLM:
    model, params = tiny(name)
    sizes = {"num_blocks": 80, "block_size": 4, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    return LLM(model, params=params, check_integrity=True, warm_up=False, **{**sizes, **options})


def dense_logits(name: str, token_ids: Sequence[int]) -> np.ndarray:
    model, params = tiny(name)
    padded = np.zeros((1, MAX_MODEL_LEN + 8), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_dense(model, params, padded))[0, : len(token_ids)]


def _dense(model: CausalLM, params: Any, token_ids: Any) -> Any:
    return _apply(model.config, params, token_ids)


@jax.jit(static_argnums=0)
def _apply(config: ModelConfig, params: Any, token_ids: jax.Array) -> Any:
    return CausalLM(config).apply({"params": params}, token_ids)


def assert_greedy(name: str, output: RequestOutput) -> None:
    for completion in output.outputs:
        token_ids, num_prompt = completion.token_ids, len(output.prompt_token_ids)
        logits = dense_logits(name, [*output.prompt_token_ids, *token_ids])[num_prompt - 1 : -1]
        lost = logits.max(axis=-1) - logits[np.arange(len(token_ids)), token_ids]
        assert (lost <= TOLERANCE).all(), f"not greedy: {lost} below the best"


def test_the_window_matters():
    """Or the tests here would show nothing: a token that only the first tokens differ in has other logits if it sees
    them, and the same ones if it does not."""
    first, second = prompt_of(40), [7, *prompt_of(40)[1:]]
    differences = {name: np.abs(dense_logits(name, first) - dense_logits(name, second)).max(axis=-1) for name in MODELS}
    assert differences["all layers"][: 2 * WINDOW - 1].min() > 0.01
    assert differences["all layers"][2 * WINDOW - 1 :].max() == 0, "two layers see no further"
    assert differences["alternating"][2 * WINDOW :].min() > 0.01


@pytest.mark.parametrize(("name", "budget"), [*((name, 5) for name in MODELS), ("alternating", 64)])
def test_outputs_are_the_dense_models(name, budget):
    """Prompts shorter and longer than the window, in chunks and whole, over a pool of NaN."""
    llm = window_llm(name, max_num_batched_tokens=budget, max_num_seqs=5)
    fill_pool(llm.engine, np.nan)
    prompts = [prompt_of(length, seed=length) for length in (1, 7, 8, 9, 30, 50)]
    for output in llm.generate(prompts, greedy(20), use_tqdm=False):
        assert_greedy(name, output)
    assert_clean(llm.engine)


@pytest.mark.parametrize("name", ["all layers", "alternating", "two windows"])
@pytest.mark.parametrize("way", ["recomputed", "swapped", "several decodes a step"])
def test_other_ways_through_the_pool_change_nothing(name, way):
    """Preempted by somebody more urgent, forked and copied, found in the cache."""
    options: dict[str, Any] = {"max_num_batched_tokens": 9, "max_num_seqs": 4, "scheduling_policy": "priority"}
    if way == "several decodes a step":
        options |= {"num_decode_steps": 3, "async_scheduling": True}
    if way == "swapped":
        options |= {"preemption": "swap", "num_swap_blocks": 60}
    llm, outputs = window_llm(name, **options), {}
    for seed in range(2):
        llm.engine.add_request(prompt_of(30, seed=seed), greedy(24, n=2), str(seed))
    for _ in range(15):
        llm.engine.step()
    llm.engine.add_request(prompt_of(30), greedy(24, n=2), "urgent", priority=-9)
    outputs |= run_all(llm.engine)
    for output in outputs.values():
        assert_greedy(name, output)
    stats = llm.stats()
    assert len(outputs) == 3
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in_blocks > 0) == (way == "swapped")
    assert stats.num_block_copies > 0
    assert stats.prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("name", ["all layers", "alternating"])
def test_beams_and_handles(name):
    llm = window_llm(name, enable_prefix_caching=False)
    prompt = prompt_of(33)
    wide = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    for completion in wide.outputs:
        logits = dense_logits(name, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(12), completion.token_ids]
        assert completion.cumulative_logprob == pytest.approx(logprobs.sum(), abs=1e-2)
    with llm.sequence(prompt) as root:
        ((first, second),) = llm.expand(root, SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True))
        ((third,),) = llm.expand(first, greedy(8))
        assert third.output is not None
        assert_greedy(name, RequestOutput("", None, first.token_ids, [third.output], True))
        for handle in (first, second, third):
            handle.free()
    assert_clean(llm.engine)


def test_ten_windows_hold_a_constant_number_of_blocks():
    """The rolling buffer of Mistral (arXiv 2310.06825, section 2), paged."""
    llm, held = window_llm("all layers", max_model_len=11 * WINDOW, num_blocks=40), set()
    engine: LLMEngine = llm.engine
    engine.add_request(prompt_of(3), greedy(10 * WINDOW), "long")
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        for request in engine.scheduler.requests(engine.scheduler.running):
            if request.num_tokens > 2 * WINDOW:
                held.add(len(request.block_table.blocks))
    assert held == {3}, "7 tokens of the past in 2 blocks, and one to write to"
    assert len(outputs["long"].outputs[0].token_ids) == 10 * WINDOW
    assert_greedy("all layers", outputs["long"])


def test_a_windowed_model_serves_texts_longer_than_the_pool():
    llm = window_llm("all layers", num_blocks=12, max_num_batched_tokens=8, max_num_seqs=2)
    (output,) = llm.generate([prompt_of(70)], greedy(16), use_tqdm=False)
    assert_greedy("all layers", output)
    assert 70 + 16 > 12 * 4


def test_other_engines_windows_are_refused():
    from pagedjax.config import EngineConfig
    from pagedjax.model_runner import ModelRunner

    model, params = tiny("alternating")
    with pytest.raises(ValueError, match=r"windows: got \(None,\), expected those of the model's layers: \(8, None\)"):
        ModelRunner(model, params, EngineConfig(num_blocks=4, max_model_len=8), kv_dtype=jnp.float32)


def test_requests_are_independent():
    """Whoever comes and goes between: the same bits."""
    alone, together = window_llm("alternating"), window_llm("alternating")
    alone.engine.add_request(prompt_of(20), greedy(30), "x")
    expected = run_all(alone.engine)["x"].outputs[0].token_ids
    for i in range(5):
        together.engine.add_request(prompt_of(9 * i + 1, seed=i), greedy(7 * i + 1))
    together.engine.add_request(prompt_of(20), greedy(30), "x")
    assert_greedy("alternating", run_all(together.engine)["x"])
    assert len(expected) == 30
