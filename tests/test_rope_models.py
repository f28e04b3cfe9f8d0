"""Models with every kind of rope (cases B45, B46): their logits against transformers', and an engine's tokens against
the dense model, around the length that they were trained for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_rope import scaled
from tiny_engine import CONFIG, LOGIT_TOLERANCE, greedy, prompt_of, tiny_params, unchecked_llm
from tiny_models import random_tensors, tiny

from pagedjax.llm import LLM
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf
from pagedjax.models.layers import apply_rope, rope_tables
from pagedjax.models.placement import build_params
from pagedjax.models.rope import RopeConfig


@pytest.mark.oracle
@pytest.mark.parametrize("length", [12, 31, 33, 60])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "yarn, attention factor", "longrope", "llama3"])
def test_logits_equal_transformers(name, length):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = scaled(name)
    config = config_from_hf(raw).served_up_to(length)
    tensors = random_tensors(config)
    eager: Any = {"attn_implementation": "eager"}
    oracle = LlamaForCausalLM(LlamaConfig(**raw, **eager)).eval()
    missing = oracle.load_state_dict({key: torch.from_numpy(value) for key, value in tensors.items()})
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    token_ids = np.random.default_rng(0).integers(0, 96, (1, length))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(token_ids)).logits.numpy()
    params = build_params(config, iter(tensors.items()), "float32")
    logits = CausalLM(config).apply({"params": params}, jnp.asarray(token_ids, jnp.int32))
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-4 * np.abs(expected).max())
    unscaled = dataclasses.replace(config, rope=RopeConfig(theta=500.0))
    others = CausalLM(unscaled).apply({"params": params}, jnp.asarray(token_ids, jnp.int32))
    # dynamic rope is plain rope up to the trained length
    same = name == "dynamic" and length <= 32
    assert (np.abs(np.asarray(others) - expected).max() < 1e-3 * np.abs(expected).max()) == same


@pytest.mark.oracle
def test_partial_rotation_equals_transformers():
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import StableLmConfig
    from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding, apply_rotary_pos_emb

    raw = tiny(model_type="llama", rope_theta=500.0, partial_rotary_factor=0.25)
    rope = config_from_hf(raw).rope
    assert rope.rotary_dim(16) == 4
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 9, 3, 16)).astype(np.float32)
    positions = rng.integers(0, 200, (1, 9))
    oracle_config = StableLmConfig(**{**raw, "model_type": "stablelm"})
    embedding: Any = StableLmRotaryEmbedding(oracle_config)
    cos, sin = embedding(torch.zeros(1), torch.from_numpy(positions))
    heads = [torch.from_numpy(x).transpose(1, 2) for x in (q, k)]  # to [B, H, T, D]
    rotated = apply_rotary_pos_emb(heads[0][..., :4], heads[1][..., :4], cos, sin)
    tables = rope_tables(rope, 16, positions.astype(np.int32))
    for ours, theirs, whole in zip((q, k), rotated, heads, strict=True):
        expected = torch.cat([theirs, whole[..., 4:]], dim=-1).transpose(1, 2).numpy()
        np.testing.assert_allclose(apply_rope(jnp.asarray(ours), tables), expected, atol=2e-5)


@pytest.mark.parametrize("max_model_len", [16, 32, 64])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn, attention factor", "longrope"])
def test_the_engine_serves_its_own_length(name, max_model_len):
    """Every prompt that fits, chunked and with a cache, against the dense model with the rope of that length."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=32, rope=config_from_hf(scaled(name)).rope)
    assert config.head_dim == 16
    model = CausalLM(config)
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    options = {**sizes, "max_model_len": max_model_len, "warm_up": False, "allow_longer_context": True}
    llm = LLM(model, params=tiny_params(), check_integrity=True, **options)
    prompts = [prompt_of(length, seed=length) for length in (12, 31, 33, 60) if length < max_model_len]
    served = CausalLM(config.served_up_to(max_model_len))
    dense = jax.jit(lambda ids: served.apply({"params": tiny_params()}, ids))
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(4), use_tqdm=False), strict=True):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == min(4, max_model_len - len(prompt))
        text = [*prompt, *token_ids]
        padded = jnp.asarray([text + [0] * (64 - len(text))], jnp.int32)
        logits = np.asarray(dense(padded))[0, len(prompt) - 1 : len(text) - 1]
        assert np.all(logits.max(axis=-1) - logits[range(len(token_ids)), token_ids] < LOGIT_TOLERANCE)


def test_a_longer_context_is_refused_unless_asked_for():
    config = dataclasses.replace(CONFIG, max_position_embeddings=32)
    options = {"params": tiny_params(), "num_blocks": 64, "max_model_len": 64, "warm_up": False}
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 32, got 64; allow_longer_context"):
        LLM(CausalLM(config), **options)
    assert LLM(CausalLM(config), **options, allow_longer_context=True).memory_plan.config.max_model_len == 64
    with pytest.raises(ValueError, match="allow_longer_context must be True or False, got 1"):
        unchecked_llm(allow_longer_context=1)
