"""The Llama family on tiny random weights: dense equals the formulas, paged equals dense, and params are a pytree.

That the dense logits equal transformers' is in test_loading.py (cases B43 to B45, B47): there the weights go through
a file as well. Here a loop in float64 says the same where torch is not installed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_tensors, tiny

from pagedjax.batch import build_batch
from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.table import BlockTable
from pagedjax.config import EngineConfig
from pagedjax.model_runner import ModelRunner
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.families import config_from_hf
from pagedjax.models.placement import build_params
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied, 3 groups": {"tie_word_embeddings": True, "num_attention_heads": 6},
    "llama no groups": {"num_key_value_heads": 4},
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
    "qwen2": {"model_type": "qwen2", "head_dim": ...},
    "qwen3, its own head_dim": {"model_type": "qwen3", "hidden_size": 40},
}
each_family = pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
# All modules and parameters that there are occur in these.
DISTINCT = ("llama tied, 3 groups", "llama 7 biases", "qwen3, its own head_dim")
distinct_families = pytest.mark.parametrize("changes", [FAMILIES[name] for name in DISTINCT], ids=DISTINCT)

F32_TOLERANCE = 2e-5
"""Of logits around 10: sums of up to 100 f32 products in another order, over two layers."""
BF16_TOLERANCE = 0.05
"""Root mean square of the error over that of the logits: each of some 30 roundings in a row is off by up to 2**-9 of
what it rounds, and random weights of size 0.2 amplify."""


def random_model(changes: dict[str, Any], dtype: str = "float32") -> tuple[CausalLM, Params]:
    """Norms and biases are random too."""
    config = config_from_hf(tiny(**changes))
    return CausalLM(config), build_params(config, random_tensors(config).items(), dtype)


def random_ids(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 96, shape), jnp.int32)


def dense_logits(model: CausalLM, params: Params, token_ids: jax.Array) -> np.ndarray:
    return np.asarray(jax.jit(model.apply)({"params": params}, token_ids))


# --- dense against the formulas


def logits_by_hand(config: ModelConfig, params: Params, token_ids: np.ndarray) -> np.ndarray:
    """One sequence in float64, attention head by head."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    angles = np.outer(np.arange(len(token_ids)), config.rope.inv_freq(config.head_dim))
    rotation = np.exp(1j * angles)
    causal = np.tri(len(token_ids), dtype=bool)

    def norm(x: np.ndarray, weights: Params) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weights["scale"]

    def linear(x: np.ndarray, weights: Params) -> np.ndarray:
        return x @ weights["kernel"] + weights.get("bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        pairs = (x[:, : config.head_dim // 2] + 1j * x[:, config.head_dim // 2 :]) * rotation
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    def attend(x: np.ndarray, weights: Params) -> np.ndarray:
        q, k, v = (linear(x, weights[f"{name}_proj"]) for name in "qkv")
        out = []
        for head in range(config.num_heads):
            kv_head = head // (config.num_heads // config.num_kv_heads)
            mine, shared = (slice(i * config.head_dim, (i + 1) * config.head_dim) for i in (head, kv_head))
            q_head, k_head = q[:, mine], k[:, shared]
            if config.qk_norm:
                q_head, k_head = norm(q_head, weights["q_norm"]), norm(k_head, weights["k_norm"])
            scores = rotate(q_head) @ rotate(k_head).T / np.sqrt(config.head_dim)
            exps = np.where(causal, np.exp(scores - scores.max()), 0)
            out.append(exps / exps.sum(-1, keepdims=True) @ v[:, shared])
        return linear(np.concatenate(out, axis=1), weights["o_proj"])

    def mlp(x: np.ndarray, weights: Params) -> np.ndarray:
        gate = linear(x, weights["gate_proj"])
        return linear(gate / (1 + np.exp(-gate)) * linear(x, weights["up_proj"]), weights["down_proj"])

    x = params["embed_tokens"]["embedding"][token_ids]
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        x = x + attend(norm(x, layer["input_layernorm"]), layer["self_attn"])
        x = x + mlp(norm(x, layer["post_attention_layernorm"]), layer["mlp"])
    head = params["embed_tokens"]["embedding"].T if config.tie_word_embeddings else params["lm_head"]["kernel"]
    return norm(x, params["norm"]) @ head


@each_family
def test_dense_logits_equal_the_formulas(changes):
    model, params = random_model(changes)
    token_ids = random_ids(2, 200 if "rope_scaling" in changes else 60)
    expected = [logits_by_hand(model.config, params, row) for row in np.asarray(token_ids)]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(dense_logits(model, params, token_ids), expected, atol=F32_TOLERANCE, rtol=F32_TOLERANCE)


# --- paged steps against dense

CHUNKS = ([7, 23, 1, 19, 10], [13, 1, 23, 5, 18])
"""Two requests with prompts of 60 tokens, chunk by chunk, side by side in each step."""
NUM_DECODES = 10
BLOCK_SIZE = 8


def paged_logits(model: CausalLM, params: Params, sequences: jax.Array, whole_step: bool = False) -> np.ndarray:
    """Logits at every position: prompts in odd chunks, then single tokens, over blocks in no order, out of NaN."""
    config = EngineConfig(
        num_blocks=24,
        max_model_len=80,
        block_size=BLOCK_SIZE,
        max_num_seqs=32,
        max_num_batched_tokens=32,
        check_integrity=True,
    )
    kv_dtype = params["embed_tokens"]["embedding"].dtype
    runner = ModelRunner(model, params, config, kv_dtype=kv_dtype, whole_step=whole_step)
    runner.kv_cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), runner.kv_cache)
    free = iter(np.random.default_rng(2).permutation(np.arange(1, 25)))
    requests = [
        Request(str(i), list(map(int, ids)), SamplingParams(), arrival=(i,), max_num_tokens=80, seed=0)
        for i, ids in enumerate(sequences)
    ]
    for request in requests:
        request.block_table = BlockTable(BlockAllocator(0), BLOCK_SIZE)
    logits: list[list[np.ndarray]] = [[], []]
    for step in [*zip(*CHUNKS, strict=True), *[(1, 1)] * NUM_DECODES]:
        for request, num_new in zip(requests, step, strict=True):
            while len(request.block_table) * BLOCK_SIZE < request.num_computed_tokens + num_new:
                request.block_table.rows[0].append(int(next(free)))
        batch = build_batch(SchedulerOutput(dict(zip(requests, step, strict=True)), sampling=requests), config)
        assert len(batch.token_ids) == len(batch.logits_indices)
        batch = dataclasses.replace(batch, logits_indices=np.arange(len(batch.token_ids), dtype=np.int32))
        rows = runner.run_with_logits(batch)[1]
        for mine, request, num_new, end in zip(logits, requests, step, np.cumsum(step), strict=True):
            mine.append(rows[end - num_new : end])
            request.num_computed_tokens += num_new
    return np.stack([np.concatenate(mine) for mine in logits])


@each_family
def test_paged_logits_equal_dense_ones(changes):
    model, params = random_model(changes)
    sequences = random_ids(2, 60 + NUM_DECODES)
    actual, expected = paged_logits(model, params, sequences), dense_logits(model, params, sequences)
    np.testing.assert_allclose(actual, expected, atol=F32_TOLERANCE, rtol=F32_TOLERANCE)


def test_a_step_may_be_one_program():
    """As on a GPU; on a CPU every part of the model is a program of its own."""
    model, params = random_model(FAMILIES["llama 7 biases"])
    sequences = random_ids(2, 60 + NUM_DECODES)
    parts, whole = (paged_logits(model, params, sequences, whole_step) for whole_step in (False, True))
    np.testing.assert_allclose(whole, parts, atol=F32_TOLERANCE, rtol=F32_TOLERANCE)


@distinct_families
def test_bfloat16(changes):
    """Dense and paged, against f32 on the same bf16 weights."""
    model, params = random_model(changes, "bfloat16")
    sequences = random_ids(2, 60 + NUM_DECODES)
    exact = dense_logits(model, jax.tree.map(lambda x: x.astype(jnp.float32), params), sequences)
    paged = paged_logits(model, params, sequences)
    for logits in (dense_logits(model, params, sequences), paged):
        assert np.sqrt(np.mean((logits - exact) ** 2)) < BF16_TOLERANCE * np.sqrt(np.mean(exact**2))


def test_paged_steps_see_no_later_token():
    """Another token later in a chunk changes nothing before it, and something after it."""
    model, params = random_model({})
    sequences = random_ids(2, 60 + NUM_DECODES)
    changed = sequences.at[0, 20].set((sequences[0, 20] + 1) % 96)
    before, after = (paged_logits(model, params, ids) for ids in (sequences, changed))
    np.testing.assert_array_equal(before[0][:20], after[0][:20])
    assert (before[0][20:] != after[0][20:]).any(axis=1).all()
    np.testing.assert_array_equal(before[1], after[1])  # nor does the other request see it


# --- params are a plain pytree


@each_family
def test_params_have_the_structure_of_init(changes):
    model, params = random_model(changes)
    fresh = jax.eval_shape(model.init, jax.random.key(0), random_ids(1, 4))["params"]
    assert jax.tree.structure(fresh) == jax.tree.structure(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), fresh) == jax.tree.map(lambda x: (x.shape, x.dtype), params)


@distinct_families
def test_every_parameter_has_a_gradient(changes):
    model, params = random_model(changes)
    token_ids = random_ids(4, 48)

    def loss(params: Params) -> jax.Array:
        logits = jnp.asarray(model.apply({"params": params}, token_ids[:, :-1]))
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, token_ids[:, 1:, None], axis=-1).mean()

    for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert jnp.isfinite(gradient).all(), path
        assert jnp.abs(gradient).max() > 0, path
