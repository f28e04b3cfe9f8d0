"""Families whose positions are a table: no position beyond it is ever read (case B13; XLA would clamp it silently)."""

import pytest
from tiny_models import random_tensors

from pagedjax.llm import LLM
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf
from pagedjax.models.placement import build_params
from pagedjax.sampling.params import SamplingParams

NUM_POSITIONS = 16
CONFIGS = {
    "opt": {
        "model_type": "opt",
        "vocab_size": 64,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": NUM_POSITIONS,
        "eos_token_id": None,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": NUM_POSITIONS,
        "eos_token_id": None,
    },
}
SIZES = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16}


def llm_of(raw, **options) -> LLM:
    config = config_from_hf(raw)
    params = build_params(config, random_tensors(config).items(), "float32")
    return LLM(CausalLM(config), params=params, warm_up=False, **SIZES, **options)


@pytest.mark.parametrize("raw", CONFIGS.values(), ids=CONFIGS.keys())
def test_b13_the_edge_of_the_position_table(raw):
    llm = llm_of(raw)
    options = SamplingParams(temperature=0.0, max_tokens=10)
    (output,) = llm.generate([[*range(NUM_POSITIONS - 1)]], options, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    for length in (NUM_POSITIONS, NUM_POSITIONS + 1):
        with pytest.raises(ValueError, match=f"prompt has {length} tokens .* expected 1 to 15.*max_model_len is 16"):
            llm.generate([[1] * length], options, use_tqdm=False)


@pytest.mark.parametrize("raw", CONFIGS.values(), ids=CONFIGS.keys())
def test_more_than_the_table_is_refused(raw):
    with pytest.raises(ValueError, match=r"max_model_len must be at most .*16.*, got 17"):
        llm_of(raw, max_model_len=NUM_POSITIONS + 1)
