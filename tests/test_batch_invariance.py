"""With `batch_invariant=True` no bit of a request's result depends on what else runs, or on how it was computed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_functional_blocks import CASES, family
from test_window_models import tiny as window_model
from tiny_engine import MODEL, prompt_of, tiny_params

from pagedjax import functional
from pagedjax.beams.params import BeamSearchParams
from pagedjax.functional.scoring import DENSE
from pagedjax.llm import LLM
from pagedjax.models.decoder import CausalLM
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.processors import LogitsProcessor

MAX_NEW_TOKENS = 9
LENGTHS = (13, 1, 24, 4)
SEEDS = (3, 2**63 + 5, 0, 2**32)
Models = tuple[CausalLM, Any]


def engine(model: Models, **options: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_seqs": 16, "num_blocks": 160, "max_model_len": 64, "batch_invariant": True}
    return LLM(model[0], params=model[1], tokenizer=None, warm_up=False, **{**defaults, **options})


def prompts_for(model: Models) -> list[list[int]]:
    most = model[0].config.vocab_size
    return [[token % most for token in prompt_of(length, seed=length)] for length in LENGTHS]


def sampled(llm: LLM, prompts: list[list[int]], seeds: tuple[int, ...] = SEEDS, **options: Any) -> list[Any]:
    """Of each prompt, what each of three samples is, and the bits of its log-probabilities and of its prompt's."""
    defaults: dict[str, Any] = {"n": 3, "max_tokens": MAX_NEW_TOKENS, "temperature": 20.0, "logprobs": 2}
    sampling = [SamplingParams(seed=seed, ignore_eos=True, **{**defaults, **options}) for seed in seeds[: len(prompts)]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]


def tokens_of(results: list[Any]) -> list[list[list[int]]]:
    return [[token_ids for token_ids, _ in samples] for samples, _ in results]


def logprobs_of(results: list[Any]) -> np.ndarray:
    """f32[B, N, L] of the tokens that were sampled."""
    return np.array(
        [
            [[entry[token].logprob for token, entry in zip(*sample, strict=True)] for sample in samples]
            for samples, _ in results
        ],
        np.float32,
    )


def rollout_of(model: Models, prompts: list[list[int]], seeds: tuple[int, ...] = SEEDS, **options: Any) -> Any:
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((len(prompts), lens.max()), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    keys = functional.request_keys(list(seeds[: len(prompts)]))
    defaults = {"num_samples": 3, "max_new_tokens": MAX_NEW_TOKENS, "temperature": 20.0, "batch_invariant": True}
    rollout = functional.generate(*model, ids, lens, keys, **{**defaults, **options})
    return ids, lens, rollout


def tiny(dtype: str = "float32") -> Models:
    return MODEL, jax.tree.map(lambda x: jnp.asarray(x, dtype), tiny_params())


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of prompts": {"max_num_batched_tokens": 5},
    "preempted": {"num_blocks": 22, "preemption": "recompute"},
    "swapped": {"num_blocks": 22, "preemption": "swap", "num_swap_blocks": 60},
    "a step ahead": {"async_scheduling": True},
    "more rows than the padding": {"max_num_seqs": 70},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_the_schedule(name, dtype):
    model = tiny(dtype)
    prompts = prompts_for(model)
    llm = engine(model, **SCHEDULES[name])
    together = sampled(llm, prompts, prompt_logprobs=1)
    assert (llm.engine.stats().num_preemptions > 0) == (name in ("preempted", "swapped"))
    alone = engine(model, max_num_seqs=4, enable_prefix_caching=False)
    for index, result in enumerate(together):
        assert sampled(alone, prompts[index : index + 1], SEEDS[index:], prompt_logprobs=1) == [result]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nor_on_cached_blocks_or_on_tokens_per_step(dtype):
    model = tiny(dtype)
    prompts = prompts_for(model)
    llm = engine(model)
    first = sampled(llm, prompts)
    assert sampled(llm, prompts[::-1], SEEDS[::-1]) == first[::-1]
    assert llm.engine.stats().prefix_cache_hit_tokens > 0
    several = engine(model, num_decode_steps=4)
    tokens = [[token_ids for token_ids, _ in samples] for samples, _ in first]
    assert [
        [token_ids for token_ids, _ in samples] for samples, _ in sampled(several, prompts, logprobs=None)
    ] == tokens


ASKED: list[dict[str, Any]] = [
    {"top_p": 0.8, "min_p": 0.01, "logits_processors": [LogitsProcessor(lambda logits, state: logits * 0.9)]},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "top_k": 40},
    {"allowed_token_ids": range(2, 30), "min_tokens": 4, "stop_token_ids": range(4, 30), "ignore_eos": True},
    {"logit_bias": {3: 4.0, 7: -2.0}, "bad_words": [[5, 6], [9]], "logprobs": 3, "prompt_logprobs": 1},
]


@pytest.mark.parametrize(
    "options", [{}, {"logprobs_mode": "processed_logprobs"}, {"quantization": "int8", "quantize_embeddings": True}]
)
def test_nor_on_what_is_asked_of_it_or_of_others(options):
    model = tiny()
    prompts = prompts_for(model)
    sampling = [
        SamplingParams(**{"seed": i, "temperature": 5.0, "logprobs": 1, **asked}) for i, asked in enumerate(ASKED)
    ]
    sampling += [BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)] * len(prompts)

    def results(llm: LLM, which: slice) -> list[Any]:
        outputs = llm.generate((prompts * 2)[which], sampling[which], use_tqdm=False)
        scores = llm.score(prompts[which], [[1, 2, 3]] * len(prompts[which])) if prompts[which] else []
        completions = [[(c.token_ids, c.cumulative_logprob, c.logprobs) for c in output.outputs] for output in outputs]
        return [*completions, [score.logprobs for score in scores]]

    *together, scores = results(engine(model, **options), slice(None))
    alone = engine(model, max_num_seqs=4, enable_prefix_caching=False, **options)
    for i, result in enumerate(together):
        assert results(alone, slice(i, i + 1)) == [result, scores[i : i + 1]]


def model_of(name: str) -> Models:
    if name in CASES:
        return family(name)
    return window_model(name)


@pytest.mark.parametrize("name", ["Gemma 2", "OPT", "GPT-2", "Qwen3", "alternating", "float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:.*vocabulary.*")
def test_the_same_bits_in_a_jit_and_from_a_trainer(name):
    """`functional.generate` for all and for one prompt, and `score` as it is and in `value_and_grad`: the engine's."""
    model = tiny(name) if name.startswith(("float", "bfloat")) else model_of(name)
    prompts = prompts_for(model)
    results = sampled(engine(model), prompts)
    logprobs = logprobs_of(results)
    ids, lens, rollout = rollout_of(model, prompts, block_size=8, chunk_size=7)
    assert np.asarray(rollout.token_ids).tolist() == tokens_of(results)
    assert np.array_equal(rollout.logprobs, logprobs)
    _, _, one = rollout_of(model, prompts[2:3], SEEDS[2:], num_samples=1)
    assert np.array_equal(one.logprobs[0, 0], logprobs[2, 0])

    score = partial(functional.score_rollout, model[0], prompt_ids=ids, prompt_lens=lens, rollout=rollout)
    assert np.array_equal(score(model[1]), logprobs)
    value, _ = jax.jit(jax.value_and_grad(lambda params: (score(params) - logprobs).sum()))(model[1])
    assert value == 0
    few = functional.score(*model, np.concatenate([ids[2], rollout.token_ids[2, 0]])[None])
    assert np.array_equal(few[0, -MAX_NEW_TOKENS:], logprobs[2, 0]), "products of few rows"


@pytest.mark.parametrize("name", ["alternating", "Gemma 2"])
def test_gradients_are_those_of_the_obvious_formula(name):
    model, params = model_of(name)
    ids = np.array([prompt_of(24, seed=1), prompt_of(24, seed=2)], np.int32) % model.config.vocab_size

    def loss(params: Any, implementation: str | None) -> Any:
        return functional.score(model, params, ids, implementation=implementation).sum()

    ours, dense = (jax.jit(jax.grad(loss), static_argnums=1)(params, name) for name in (None, DENSE))
    for got, expected in zip(*map(jax.tree.leaves, (ours, dense)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))


def test_a_draw_does_not_depend_on_the_rows_beside_it():
    """top_p at the very probability of the first token: whether the second one may be drawn is a matter of rounding."""
    model = tiny()
    row = np.random.default_rng(0).normal(size=(4, model[0].config.vocab_size)).astype(np.float32)
    row[:, :2] += (6.3, 6)
    edges = np.asarray(jax.nn.softmax(row.astype(np.float64)).max(axis=1), np.float32)
    edges = np.stack([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(1))])

    for case, logits in enumerate(row):

        def processor(x: Any, generated: Any, logits: np.ndarray = logits) -> Any:
            return jnp.broadcast_to(jnp.asarray(logits), x.shape)

        def draw(rows: slice, processor: Any = processor, case: int = case) -> np.ndarray:
            top_p = np.resize(edges[:, case], 66)[rows]
            options = {"num_samples": 1, "max_new_tokens": 1, "temperature": 1.0, "logits_processors": [processor]}
            _, _, rollout = rollout_of(model, [[1]] * len(top_p), tuple(range(66))[rows], top_p=top_p, **options)
            return np.asarray(rollout.token_ids)

        assert np.array_equal(np.concatenate([draw(slice(i, i + 3)) for i in range(0, 18, 3)]), draw(slice(0, 66))[:18])


def test_what_is_refused(monkeypatch):
    """More of it in test_functional_blocks.py, without the type checks of these tests."""
    model = tiny()
    with pytest.raises(ValueError, match=r"batch_invariant.*'pallas_triton': only 'xla_invariant' is so"):
        engine(model, attention_implementation="pallas_triton")
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got 1"):
        LLM.plan(MODEL, batch_invariant=1)
    with pytest.raises(ValueError, match="batch_invariant: expected False on a GPU"):
        LLM.plan(MODEL, batch_invariant=True, platform="gpu", memory_bytes=2**30)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="batch_invariant: expected False on a GPU"):
        rollout_of(model, [[1, 2]])
