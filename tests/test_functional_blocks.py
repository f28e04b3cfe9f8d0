"""The building blocks of `functional`: the same logits as the dense model's, for every family; and its scores."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_scripts import load
from test_functional import MAX_NEW_TOKENS, PROMPTS, SEEDS, assert_same, engine_outputs, padded
from test_window_models import MODELS
from test_window_models import tiny as window_model
from tiny_engine import MODEL, prompt_of, tiny_params
from tiny_models import random_tensors

from pagedjax import functional
from pagedjax.functional.layout import Layout
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf
from pagedjax.models.placement import build_params

ROOT = Path(__file__).parents[1]
parity = load("model_parity")
CASES: dict[str, dict[str, Any]] = parity.CASES
TOLERANCE = 5e-5
"""Of log-probabilities of the random families, whose logits are around 5."""
SCORE_TOLERANCE = 1e-3
"""Of log-probabilities of `tiny_engine`'s model, whose logits are up to 100."""


def family(name: str, dtype: str = "float32") -> tuple[CausalLM, Any]:
    config = config_from_hf(CASES[name])
    return CausalLM(config), build_params(config, random_tensors(config).items(), dtype)


def filled(state: functional.PagedState, value: float) -> functional.PagedState:
    """With this in every slot, as in memory that another program left."""
    pool = jax.tree.map(lambda x: jnp.full_like(x, value), state.kv_cache)
    return dataclasses.replace(state, kv_cache=pool)


def dense_logprobs(model: CausalLM, params: Any, token_ids: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(model.apply({"params": params}, jnp.asarray(token_ids)[None])[0], axis=-1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*vocabulary.*")
def test_every_family_over_a_pool_of_nan(name):
    """Prefill, fork and five decodes of given tokens: each logit is the dense model's."""
    model, params = family(name)
    prompts = [parity.random_ids(length).tolist() for length in (18, 1, 8)]
    ids, lens = padded(prompts)
    state = functional.init_kv_cache(model, num_prompts=3, prompt_len=18, max_new_tokens=6, num_samples=2, block_size=4)
    logits, state = functional.prefill(model, params, filled(state, np.nan), ids, lens, chunk_size=11)
    state = functional.fork(state)
    new = np.random.default_rng(0).integers(0, model.config.vocab_size, (6, 5)).astype(np.int32)
    got = [np.repeat(np.asarray(logits), 2, axis=0)]
    step = jax.jit(partial(functional.decode_step, model))
    for column in new.T:
        logits, state = step(params, state, column)
        got.append(np.asarray(logits))
    for row in range(6):
        token_ids = np.array([*prompts[row // 2], *new[row]], np.int32)
        expected = dense_logprobs(model, params, token_ids)[-6:]
        said = jax.nn.log_softmax(np.stack(got)[:, row], axis=-1)
        np.testing.assert_allclose(said, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_windows_sample_what_the_engine_samples(name):
    model, params = window_model(name)
    prompts = [prompt_of(length, seed=length) for length in (21, 3, 8)]
    expected = engine_outputs(prompts, model=model, params=params, n=3, temperature=20.0)
    ids, lens = padded(prompts)
    keys = functional.request_keys(SEEDS[:3])
    sizes: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "num_samples": 3, "block_size": 4, "chunk_size": 7}
    assert_same(functional.generate(model, params, ids, lens, keys, temperature=20.0, pad_id=-1, **sizes), expected)


def test_bf16_samples_what_the_engine_samples():
    model, params = family("SmolLM2 (tied)", "bfloat16")
    prompts = [parity.random_ids(len(prompt)).tolist() for prompt in PROMPTS]
    expected = engine_outputs(prompts, model=model, params=params, n=2, temperature=1.0)
    ids, lens = padded(prompts)
    rollout = functional.generate(
        model,
        params,
        ids,
        lens,
        functional.request_keys(SEEDS),
        max_new_tokens=MAX_NEW_TOKENS,
        num_samples=2,
        pad_id=-1,
    )
    same = np.asarray(rollout.token_ids) == np.array(expected[0])
    assert same[:, :, 0].all()
    assert same.mean() > 0.8, "bf16 rounds differently in other batches, which moves a draw now and then"


# --- the layout


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 7, 5, 3, 4), (3, 8, 1, 4, 4), (2, 5, 9, 1, 3), (2, 16, 17, 8, 16)]
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_block_is_written_by_two(sizes, num_groups):
    """For every length of the prompts: what a row writes is its own, and each token has a slot."""
    num_prompts, prompt_len, max_new_tokens, num_samples, block_size = sizes
    model = dataclasses.replace(window_model("alternating")[0].config) if num_groups == 2 else MODEL.config
    for length in range(1, prompt_len + 1):
        state = functional.init_kv_cache(
            CausalLM(model),
            num_prompts=num_prompts,
            prompt_len=prompt_len,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            block_size=block_size,
        )
        lens = jnp.full(num_prompts, length, jnp.int32)
        forked = functional.fork(dataclasses.replace(state, context_lens=lens))
        tables = np.asarray(forked.block_tables)
        assert tables.shape[:2] == (num_groups, num_prompts * num_samples)
        assert tables.max() <= state.layout.num_blocks
        written = tables[:, :, length // block_size : -(-(length + max_new_tokens - 1) // block_size)]
        if max_new_tokens > 1:
            assert (written > 0).all()
            assert len(set(written.ravel().tolist())) == written.size
        shared = tables[:, :, : length // block_size].reshape(num_groups, num_prompts, num_samples, -1)
        assert (shared > 0).all()
        assert (shared == shared[:, :, :1]).all()
        assert not set(shared.ravel().tolist()) & set(written.ravel().tolist())


def test_a_quarter_of_a_contiguous_cache():
    """8 prompts of 512 tokens, 8 samples of 64 tokens each."""
    sizes: dict[str, Any] = {"num_prompts": 8, "prompt_len": 512, "max_new_tokens": 64, "num_samples": 8}
    contiguous = 8 * 8 * (512 + 64)
    known = Layout(**sizes, block_size=16, exact_lens=True)
    padded = Layout(**sizes, block_size=8)
    assert (known.num_blocks + 1) * 16 <= contiguous / 4
    assert (padded.num_blocks + 1) * 8 <= contiguous / 4


def test_a_loop_that_goes_too_far_gets_nan():
    state = functional.init_kv_cache(MODEL, num_prompts=2, prompt_len=4, max_new_tokens=3, num_samples=2, block_size=3)
    ids = np.array([prompt_of(4, 0), prompt_of(4, 1)], np.int32)
    _, state = functional.prefill(MODEL, tiny_params(), state, ids)
    state = functional.fork(state)
    token = np.zeros(4, np.int32)
    for _ in range(2):
        logits, state = functional.decode_step(MODEL, tiny_params(), state, token)
        assert jnp.isfinite(logits).all()
    logits, state = functional.decode_step(MODEL, tiny_params(), state, token, np.array([True, False, True, False]))
    assert np.isnan(np.asarray(logits)).all(axis=1).tolist() == [True, False, True, False]


# --- scores


def test_scores_are_the_dense_models():
    ids, lens = padded(PROMPTS)
    for chunk_size in (5, 128):
        got = np.asarray(functional.score(MODEL, tiny_params(), ids, lens, chunk_size=chunk_size))
        assert got.shape == (4, ids.shape[1] - 1)
        for row, prompt in enumerate(PROMPTS):
            expected = dense_logprobs(MODEL, tiny_params(), np.array(prompt, np.int32))
            expected = expected[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(got[row, : len(prompt) - 1], expected, atol=SCORE_TOLERANCE, rtol=0)
            assert (got[row, len(prompt) - 1 :] == 0).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*vocabulary.*")
def test_the_trainer_agrees_with_the_sampler(name):
    model, params = family(name)
    ids, lens = padded([parity.random_ids(length).tolist() for length in (18, 1, 8)])
    eos_ids = tuple(range(0, model.config.vocab_size, 12))
    rollout = functional.generate(
        model, params, ids, lens, jax.random.key(0), max_new_tokens=12, num_samples=4, eos_ids=eos_ids, block_size=4
    )
    assert len(np.unique(rollout.lengths)) > 1
    scores = functional.score_rollout(model, params, ids, lens, rollout)
    np.testing.assert_allclose(scores, rollout.logprobs, atol=TOLERANCE, rtol=0)
    token_ids, lengths = functional.join(ids, lens, rollout)
    for row, (sample, length) in enumerate(zip(token_ids[:, 1], lengths[:, 1], strict=True)):
        said = [*ids[row, : lens[row]], *np.asarray(rollout.token_ids)[row, 1, : rollout.lengths[row, 1]]]
        assert sample[:length].tolist() == said
        assert (sample[length:] == 0).all()


def test_gradients_are_the_dense_models():
    model, params = family("SmolLM2 (tied)")
    ids, lens = padded([parity.random_ids(length).tolist() for length in (9, 5)])

    def ours(params: Any, **options: Any) -> jax.Array:
        return functional.score(model, params, ids, lens, **options).sum()

    def theirs(params: Any) -> jax.Array:
        logprobs: Any = jax.nn.log_softmax(model.apply({"params": params}, jnp.asarray(ids)), axis=-1)  # pyright: ignore[reportArgumentType]
        chosen = jnp.take_along_axis(logprobs[:, :-1], jnp.asarray(ids)[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(jnp.arange(1, 9)[None, :] < lens[:, None], chosen, 0).sum()

    expected = jax.grad(theirs)(params)
    for options in ({}, {"chunk_size": 3}, {"remat": True}):
        got = jax.grad(partial(ours, **options))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), got, expected)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.1


# --- what is refused: in a process of its own, without the shape checks, which would come first

REFUSED = """
import sys
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp, numpy as np
from pagedjax import functional
from tiny_engine import MODEL, tiny_params

params, ids, key = tiny_params(), np.ones((2, 5), np.int32), jax.random.key(0)

def refuses(words, function, *args, **options):
    for wrap in (lambda f: f(), lambda f: jax.jit(f)()):
        try:
            wrap(lambda: function(*args, **options))
        except ValueError as error:
            assert words in str(error), (words, str(error))
        else:
            raise AssertionError(f"accepted: {words} {options}")

def generate(words, ids=ids, lens=None, key=key, **options):
    refuses(words, functional.generate, MODEL, params, ids, lens, key, **{"max_new_tokens": 3, **options})

for name in ("max_new_tokens", "num_samples", "block_size", "chunk_size"):
    for value in (0, -1, 1.5, True, "2"):
        generate(name, **{name: value})
generate("max_new_tokens: prompts of 5 tokens and 300", max_new_tokens=300)
generate("temperature", temperature=-0.5)
generate("temperature", temperature=float("nan"))
generate("temperature", temperature=np.ones(3, np.float32))
generate("top_k", top_k=-2)
generate("top_p", top_p=1.5)
generate("min_p", min_p=-0.1)
generate("eos_ids", eos_ids=(-1,))
generate("eos_ids", eos_ids=(10**6,))
generate("eos_ids", eos_ids=5)
generate("logits_processors", logits_processors=[3])
generate("logits_processors", logits_processors=[lambda logits, generated: logits[:, :2]])
generate("prompt_ids", ids=np.ones((2, 5), np.float32))
generate("prompt_ids", ids=np.ones(5, np.int32))
generate("prompt_ids", ids=np.ones((2, 0), np.int32))
generate("prompt_ids", ids=[[1, 2]])
generate("prompt_lens", lens=np.ones(3, np.int32))
generate("prompt_lens", lens=np.array([0, 5], np.int32))
generate("prompt_lens", lens=np.array([1, 6], np.int32))
generate("prompt_lens", lens=np.ones(2, np.float32))
generate("key", key=3)
generate("key", key=jax.random.split(key, 3))
generate("key", key=jax.random.key(0, impl="rbg"))
for value in (1, "no", jnp.array(True)):
    generate("batch_invariant: expected True or False, known while", batch_invariant=value)
    refuses("remat: expected True or False, known while", functional.score, MODEL, params, ids, remat=value)
generate("implementation must be None or one of xla, ", implementation="foo")
refuses("implementation: expected None or one of xla, ", functional.score, MODEL, params, ids, implementation="foo")
generate("with the attention 'xla'", batch_invariant=True, implementation="xla")
refuses("seeds", functional.request_keys, [2**64])
score = lambda words, *args: refuses(words, functional.score, MODEL, params, *args)
score("token_ids", np.ones((2, 1), np.int32))
score("token_ids", np.ones((2, 5), np.float32))
score("lens", ids, np.array([9, 9], np.int32))
state = functional.init_kv_cache(MODEL, num_prompts=2, prompt_len=5, max_new_tokens=3, num_samples=2)
refuses("num_prompts", functional.init_kv_cache, MODEL, num_prompts=0, prompt_len=5, max_new_tokens=3)
refuses("prompt_ids", functional.prefill, MODEL, params, state, np.ones((2, 6), np.int32))
forked = functional.fork(state)
refuses("state", functional.fork, forked)
refuses("state", functional.prefill, MODEL, params, forked, ids)
refuses("token_ids", functional.decode_step, MODEL, params, forked, np.ones(2, np.int32))
print("all refused")
"""


def test_what_is_refused():
    run = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "all refused\n"), run.stderr
