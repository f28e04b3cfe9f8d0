"""Rope frequencies (case B45): values, zones, spellings, and that an unknown scaling is refused, never ignored."""

import math

import numpy as np
import pytest
from tiny_models import tiny

from pagedjax.models.families import config_from_hf
from pagedjax.models.rope import RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SPELLINGS = {
    "rope_type": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "type": {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "both": {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    "rope_parameters, type": {"rope_parameters": {"type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    "theta outside": {"rope_theta": 500.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    "ints": {"rope_theta": 500, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 8}},
}


def test_default_frequencies():
    expected = [10000.0 ** (-2 * pair / 16) for pair in range(8)]
    np.testing.assert_allclose(RopeConfig().inv_freq(16), expected, rtol=1e-6)


def test_llama3_zones():
    inv_freq = RopeConfig(theta=500.0, rope_type="llama3", **LLAMA3).inv_freq(16)
    plain = [500.0 ** (-2 * pair / 16) for pair in range(8)]
    wavelengths = [2 * math.pi / freq for freq in plain]
    assert wavelengths[0] < 32 / 4 < wavelengths[1] < wavelengths[2] < 32 < wavelengths[3]
    np.testing.assert_allclose(inv_freq[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(inv_freq[3:], np.divide(plain[3:], 8), rtol=1e-6)
    for pair in (1, 2):
        smooth = (32 / wavelengths[pair] - 1) / (4 - 1)
        np.testing.assert_allclose(inv_freq[pair], plain[pair] * ((1 - smooth) / 8 + smooth), rtol=1e-6)


def test_freq_factors_divide():
    factors = (1.0, 2.0, 4.0, 8.0)
    np.testing.assert_allclose(
        RopeConfig(freq_factors=factors).inv_freq(8), RopeConfig().inv_freq(8) / factors, rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"freq_factors.*got 4.*8"):
        RopeConfig(freq_factors=factors).inv_freq(16)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_is_the_same_rope(spelling):
    expected = RopeConfig(theta=500.0, rope_type="llama3", **LLAMA3)
    assert config_from_hf(tiny(**spelling)).rope == expected


@pytest.mark.oracle
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_frequencies_equal_transformers(spelling):
    pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = tiny(**spelling)
    oracle = LlamaRotaryEmbedding(LlamaConfig(**raw))
    assert oracle.attention_scaling == 1.0
    ours = config_from_hf(raw).rope.inv_freq(16)
    np.testing.assert_allclose(ours, oracle.inv_freq.numpy(), rtol=1e-6, atol=1e-6)


def test_original_length_defaults_to_the_models():
    scaling = {"rope_type": "llama3", **LLAMA3}
    del scaling["original_max_position_embeddings"]
    assert config_from_hf(tiny(rope_scaling=scaling)).rope.original_max_position_embeddings == 256


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelled", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["ntk", "proportional", "axial", "su", "mrope", "llama4"])
def test_other_types_are_refused(key, spelled, kind):
    with pytest.raises(ValueError, match=f"rope_type: got '{kind}'"):
        config_from_hf(tiny(**{key: {spelled: kind, "factor": 2.0}}))


REFUSED = {
    "types disagree": ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope type"),
    "missing numbers": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
    "keys disagree": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_parameters": {"rope_type": "default"}},
        "the same rope_type",
    ),
    "per layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    "more than all": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_fa"),
    "odd share": ({"partial_rotary_factor": 0.3}, r"partial_rotary_factor: got .*0.3 of head_dim = 16.*even number"),
    "factor 0": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 0}}, "factor: got 0"),
    "text": ({"rope_theta": "500"}, "rope_theta: got '500'"),
    "order": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unclear_rope_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny(**changes))


@pytest.mark.parametrize("none", [None, {}, ...])
def test_no_scaling(none):
    assert config_from_hf(tiny(rope_scaling=none, rope_theta=300.0)).rope == RopeConfig(theta=300.0)
