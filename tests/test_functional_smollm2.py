"""Sampler and trainer agree on a real model: `functional.score` of a thousand tokens that the engine sampled."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import blocks_of

from pagedjax import functional
from pagedjax.llm import LLM
from pagedjax.models.load import load
from pagedjax.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village between two mountains, there lived a baker who",
    "Ingredients: 200 g flour, 2 eggs, 300 ml milk, a pinch of salt.\n\nMethod:",
]
NUM_SAMPLES, NUM_TOKENS = 5, 50


def sampled(dtype: str, batch_invariant: bool) -> tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A model, padded prompts and their lengths, and the tokens and logprobs [B, N, L] that the engine sampled."""
    model, params, tokenizer = load(MODEL, dtype=dtype)
    llm = LLM(
        model,
        params=params,
        tokenizer=tokenizer,
        num_blocks=160,
        max_num_seqs=20,
        max_model_len=128,
        batch_invariant=batch_invariant,
        warm_up=False,
    )
    sampling = [
        SamplingParams(n=NUM_SAMPLES, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    tokens = np.array([[c.token_ids for c in output.outputs] for output in outputs], np.int32)
    logprobs = [
        [[entry[t].logprob for entry, t in zip(c.logprobs or [], c.token_ids, strict=True)] for c in output.outputs]
        for output in outputs
    ]
    lens = np.array([len(output.prompt_token_ids) for output in outputs], np.int32)
    ids = np.zeros((len(PROMPTS), lens.max()), np.int32)
    for row, output in enumerate(outputs):
        ids[row, : lens[row]] = output.prompt_token_ids
    return model, params, ids, lens, tokens, np.array(logprobs, np.float32)


def as_rollout(tokens: np.ndarray, logprobs: np.ndarray) -> functional.Rollout:
    lengths = jnp.full(tokens.shape[:2], tokens.shape[2], jnp.int32)
    return functional.Rollout(
        jnp.asarray(tokens), jnp.asarray(logprobs), lengths, jnp.zeros(tokens.shape[:2], jnp.bool_)
    )


# Without `batch_invariant` 3.8e-5 and 0.27 were seen: rounding in 30 layers, in other orders.
@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "largest"),
    [("float32", True, 0), ("bfloat16", True, 0), ("float32", False, 1e-4), ("bfloat16", False, 0.6)],
)
def test_the_trainer_agrees_with_the_sampler(dtype, batch_invariant, largest):
    model, params, ids, lens, tokens, logprobs = sampled(dtype, batch_invariant)
    assert tokens.size == 1000
    rollout = as_rollout(tokens, logprobs)
    differences = np.abs(functional.score_rollout(model, params, ids, lens, rollout) - logprobs)
    print(f"{dtype}: largest {differences.max():.1e}, mean {differences.mean():.1e}, logprobs to {logprobs.min():.1f}")
    assert differences.max() <= largest
    if not batch_invariant:
        return

    def summed(params: Any) -> tuple[jnp.ndarray, jnp.ndarray]:
        scores = functional.score_rollout(model, params, ids, lens, rollout)
        return scores.sum(), scores

    (_, scores), _ = jax.jit(jax.value_and_grad(summed, has_aux=True))(params)
    assert np.array_equal(scores, logprobs)


def test_the_docs_and_examples_run():
    (block,) = blocks_of("docs/jitted_scripts.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["rollout"].token_ids.shape == (1, 4, 16)
    examples = Path(__file__).parents[1] / "examples"
    printed = {}
    for name in ("jitted_sampling.py", "best_of_n.py"):
        run = subprocess.run([sys.executable, "-W", "error", examples / name], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        printed[name] = run.stdout
    assert float(printed["jitted_sampling.py"].split()[-3]) < 1e-3
    scores = re.findall(r"^ *(-\d\.\d\d) (ends|given up)", printed["best_of_n.py"], re.MULTILINE)
    ended = [float(score) for score, state in scores if state == "ends"]
    assert len(scores) == 8
    assert ended == sorted(ended, reverse=True)
