"""Rope (cases B45, B46): every type's frequencies against transformers', spellings, the length they belong to, and
that what is unknown or half given is refused, never ignored."""

import math
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny

from pagedjax.models.families import config_from_hf
from pagedjax.models.gguf_rope import rope_from_gguf
from pagedjax.models.rope import RopeConfig, rope_from_hf

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
    "odd share": ({"partial_rotary_factor": 0.35}, r"partial_rotary_factor: got .*0.35 of head_dim = 16.*even number"),
    "factor 0": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 0}}, "factor: got 0"),
    "text": ({"rope_theta": "500"}, "rope_theta: got '500'"),
    "beyond floats": ({"rope_theta": 10**400}, "rope_theta: got 10+, expected a finite number"),
    "original 0 beside it": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 0},
        "original_max_position_embeddings: got 0, expected an int >= 1",
    ),
    "original 0 of no use": ({"original_max_position_embeddings": 0}, "original_max_position_embeddings: got 0"),
    "order": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unclear_rope_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny(**changes))


# Of heads of 16 dimensions, stretched from 32 positions by 2; theta 500 puts pairs into every zone of yarn and llama3.
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "yarn, no original": {"factor": 2.0},
    "yarn, attention factor": {"factor": 2.0, "attention_factor": 1.7},
    "yarn, mscale": {"factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 8, "beta_slow": 2},
    "yarn, one mscale": {"factor": 4.0, "mscale": 0.9},
    "yarn, not truncated": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn, factor below 1": {"factor": 0.5},
    "longrope": {**LONG, "original_max_position_embeddings": 8},
    "longrope, factor": {**LONG, "original_max_position_embeddings": 8, "factor": 3.0},
    "longrope, attention factor": {**LONG, "original_max_position_embeddings": 8, "attention_factor": 1.3},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
}


def scaled(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json with one of SCALINGS, for 32 positions."""
    rope = {"rope_type": name.split(",")[0], "rope_theta": 500.0, **SCALINGS[name]}
    return tiny(**{"max_position_embeddings": 32, "rope_parameters": rope, **changes})


@pytest.mark.oracle
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("served", [16, 32, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_type_equals_transformers(name, served, share):
    pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = scaled(name)
    raw["rope_parameters"]["partial_rotary_factor"] = share
    for key in {"short_factor", "long_factor"} & raw["rope_parameters"].keys():
        raw["rope_parameters"][key] = raw["rope_parameters"][key][: int(8 * share)]
    rope = config_from_hf(raw).served_up_to(served).rope
    if name == "default":
        dim = int(16 * share)
        oracle, factor = np.array([500.0 ** (-2 * i / dim) for i in range(dim // 2)]), 1.0
    else:
        oracle, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](LlamaConfig(**raw), seq_len=served)
        oracle = oracle.numpy()
    np.testing.assert_allclose(rope.inv_freq(16), oracle, rtol=1e-6)
    np.testing.assert_allclose(rope.attention_factor, factor, rtol=1e-6)


def test_dynamic_frequencies_are_those_of_the_served_length():
    rope = config_from_hf(scaled("dynamic")).rope
    plain = RopeConfig(theta=500.0).inv_freq(16)
    for served in (16, 32):
        np.testing.assert_array_equal(rope.served_up_to(served).inv_freq(16), plain)
    served = rope.served_up_to(48)
    base = 500.0 * (2.0 * 48 / 32 - 1) ** (16 / 14)
    np.testing.assert_allclose(served.inv_freq(16), [base ** (-2 * i / 16) for i in range(8)], rtol=1e-6)
    linear = config_from_hf(scaled("linear"))
    assert linear.served_up_to(48) is linear


@pytest.mark.parametrize(
    ("name", "longest"),
    [("default", 32), ("linear", 32), ("dynamic", 64), ("yarn", 64), ("yarn, mscale", 128), ("longrope", 32)],
)
def test_longest_context(name, longest):
    config = config_from_hf(scaled(name))
    assert config.longest_context == longest
    config.check_context(longest, allow_longer=False)
    config.check_context(longest + 1, allow_longer=True)
    with pytest.raises(ValueError, match=rf"max_model_len must be at most the model's {longest}, got {longest + 1}"):
        config.check_context(longest + 1, allow_longer=False)


def test_a_stretched_length_in_the_file_is_not_stretched_again():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config_from_hf(tiny(rope_parameters=scaling)).longest_context == 256


HALF_GIVEN = {
    "linear": ({"rope_type": "linear"}, "factor beside it"),
    "dynamic": ({"rope_type": "dynamic", "factor": None}, "factor beside it"),
    "yarn": ({"rope_type": "yarn", "beta_fast": 32}, "factor beside it"),
    "yarn, original": ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor beside it"),
    "longrope": ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "short_factor beside it"),
    "no type": ({"factor": 2.0}, r"rope values: got \['factor'\], expected only what rope_type 'default' knows"),
    "another type's": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}, "rope values: got .*beta_fast"),
    "unknown": ({"rope_type": "default", "mrope_section": [4, 4]}, "rope values: got .*mrope_section"),
    "too few factors": (
        {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8, "factor": 2.0},
        r"len\(short_factor\): got 7, expected one for each of 8",
    ),
    "too few long factors": (
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7, "factor": 2.0},
        r"len\(long_factor\): got 7, expected one for each of 8",
    ),
    "no list": ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 8}, "short_factor: got 1.0"),
    "factor of no number": ({"rope_type": "linear", "factor": "2"}, "rope factor: got '2'"),
    "attention factor 0": ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}, "attention_factor: got 0.0"),
    "order of betas": ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast: got 1.0"),
    "truncate": ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate: got 'no'"),
    "no original length": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        "original_max_position_embeddings: got 0",
    ),
}


@pytest.mark.parametrize(("scaling", "message"), HALF_GIVEN.values(), ids=HALF_GIVEN.keys())
def test_half_given_rope_is_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny(rope_parameters=scaling))


def test_a_length_beside_rope_is_the_original_one():
    """Phi-3's files have it there, and transformers takes it before any other."""
    rope = config_from_hf(
        tiny(rope_scaling={"type": "longrope", **LONG}, original_max_position_embeddings=64, rope_theta=500.0)
    ).rope
    assert (rope.original_max_position_embeddings, rope.factor, rope.served_length) == (64, 4.0, 256)
    np.testing.assert_allclose(rope.attention_factor, math.sqrt(1 + math.log(4) / math.log(64)))


def test_rope_of_a_type_of_layer():
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    values = tiny(rope_parameters=nested)
    assert rope_from_hf(values, "sliding_attention") == RopeConfig(theta=1e4)
    full = rope_from_hf(values, "full_attention")
    assert (full.rope_type, full.factor, full.theta) == ("linear", 8.0, 1e6)


GGUF = {
    "nothing": ({}, RopeConfig()),
    "base": ({"freq_base": 500.0}, RopeConfig(theta=500.0)),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, RopeConfig()),
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
    "no type": ({"scaling.factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
    "old": ({"scale_linear": 2.0}, RopeConfig(rope_type="linear", factor=2.0)),
    "yarn": (
        {"freq_base": 500.0, "scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
        "yarn",
    ),
    "yarn, no original": ({"freq_base": 500.0, "scaling.type": "yarn", "scaling.factor": 4.0}, "yarn"),
}


@pytest.mark.parametrize(("metadata", "expected"), GGUF.values(), ids=GGUF.keys())
def test_rope_of_gguf_files(metadata, expected):
    read = {f"llama.rope.{key}": value for key, value in metadata.items()}.get
    rope = rope_from_gguf(read, "llama", 256)
    if isinstance(expected, str):
        original = metadata.get("scaling.original_context_length", 256)
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
        expected = config_from_hf(tiny(rope_theta=500.0, rope_scaling=scaling)).rope
        assert expected.attention_factor > 1
    assert rope == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"scaling.type": "longrope"}, "llama.rope.scaling.type: got 'longrope', expected one of none, linear, yarn"),
        ({"scaling.type": "yarn"}, "expected llama.rope.scaling.factor beside it"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.attn_factor": 2.0}, "attn_factor: got 2.0"),
        ({"scaling.type": "linear", "scaling.factor": -1.0}, "llama.rope.scaling.factor: got -1.0"),
    ],
)
def test_unclear_rope_of_gguf_files_is_refused(metadata, message):
    with pytest.raises(ValueError, match=message):
        rope_from_gguf({f"llama.rope.{key}": value for key, value in metadata.items()}.get, "llama", 256)


@pytest.mark.parametrize("none", [None, {}, ...])
def test_no_scaling(none):
    assert config_from_hf(tiny(rope_scaling=none, rope_theta=300.0)).rope == RopeConfig(theta=300.0)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["", 0, False, []])
def test_scaling_is_an_object_or_null(key, value):
    with pytest.raises(ValueError, match=f"{key}: got .*, expected an object, or null"):
        config_from_hf(tiny(**{key: value}))
