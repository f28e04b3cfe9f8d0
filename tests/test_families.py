"""Every family against transformers (cases B10, B49, B50, B52, B53): logits at every position, dense and paged, what
each setting does, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_scripts import load
from safetensors.numpy import load_file, save_file
from tiny_models import random_tensors, save_folder

from pagedjax.llm import LLM
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.families import FAMILIES, MODEL_TYPES, config_from_hf
from pagedjax.models.layers import RMSNorm
from pagedjax.models.load import load_checkpoint
from pagedjax.models.placement import build_params
from pagedjax.models.weights import expected_tensors

parity = load("model_parity")
CASES: dict[str, dict[str, Any]] = parity.CASES
each_case = pytest.mark.parametrize("name", CASES)
GEMMAS = ("Gemma", "Gemma 2", "Gemma 3")

F32_TOLERANCE = 5e-5
"""Of logits around 5: sums of up to 100 f32 products in another order, over up to six layers. Seen: 2e-5."""
BF16_TOLERANCE = 0.025
"""Root mean square of the error over that of the logits: some 30 roundings in a row, each by up to 2**-9 of what it
rounds. Seen: 0.018, where transformers itself has 0.020."""

# transformers says so of special ids beyond a tiny vocabulary
pytestmark = pytest.mark.filterwarnings("ignore:.*vocabulary.*")


def random_model(raw: dict[str, Any]) -> tuple[ModelConfig, Params]:
    config = config_from_hf(raw)
    return config, build_params(config, random_tensors(config).items(), "float32")


# --- logits equal transformers'


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> Any:
    """The oracle of a case, and the folder that it is saved in."""
    pytest.importorskip("torch", reason="torch is the oracle")
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            folder, oracle = tmp_path_factory.mktemp("oracle"), parity.oracle_for(CASES[name])
            oracle.save_pretrained(folder)
            made[name] = oracle, folder
        return made[name]

    return get


@pytest.mark.oracle
@each_case
def test_logits_equal_transformers(oracles, tmp_path, name):
    oracle, folder = oracles(name)
    token_ids = parity.random_ids(1, parity.NUM_TOKENS)
    expected = parity.logits_of(oracle, token_ids)
    assert np.abs(expected).max() > 1
    config, params, _ = load_checkpoint(folder)
    # transformers writes its own spelling of the config: ours must read that one and the one that was asked for
    (tmp_path / "config.json").write_text(json.dumps(CASES[name]))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    asked = load_checkpoint(tmp_path).config
    assert dataclasses.replace(asked, eos_token_ids=config.eos_token_ids) == config
    dense = parity.dense_logits(config, params, token_ids)
    np.testing.assert_allclose(dense, expected, atol=F32_TOLERANCE, rtol=0)
    paged = parity.paged_logits(config, params, token_ids[0])
    np.testing.assert_allclose(paged, expected[0], atol=F32_TOLERANCE, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["Mistral (window 8)", "Qwen3", *GEMMAS[1:], "GPT-2", list(CASES)[-1]])
def test_bfloat16_is_as_near_as_transformers(tmp_path, name):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    row = parity.parity(CASES[name], tmp_path)
    assert torch.__version__
    assert row.bf16 < BF16_TOLERANCE
    assert row.bf16 < 1.25 * row.bf16_oracle


@pytest.mark.oracle
@pytest.mark.parametrize("block_size", [4, 3])
def test_b10_the_window_holds_the_token_itself(tmp_path, block_size):
    """Window 4, a prompt of 12, in chunks of every size, then 8 decodes."""
    pytest.importorskip("torch", reason="torch is the oracle")
    raw = {**CASES["Mistral (window 8)"], "sliding_window": 4}
    oracle, token_ids = parity.oracle_for(raw), parity.random_ids(1, 20)
    oracle.save_pretrained(tmp_path)
    expected = parity.logits_of(oracle, token_ids)[0]
    config, params, _ = load_checkpoint(tmp_path)
    assert config.layer_windows == (4, 4)
    for budget in (1, 3, 4, 5, 12):
        chunks = [min(budget, 12 - start) for start in range(0, 12, budget)]
        paged = parity.paged_logits(config, params, token_ids[0], chunks, block_size)
        np.testing.assert_allclose(paged, expected, atol=F32_TOLERANCE, rtol=0)
    for wrong in (3, 5):
        other = dataclasses.replace(config, layer_windows=(wrong, wrong))
        assert np.abs(parity.dense_logits(other, params, token_ids)[0] - expected).max() > 0.1


# --- every setting matters, or the comparison above would not see it


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("Mistral (window 8)", {"layer_windows": ()}),
    "which layers have it": ("Gemma 2", {"layer_windows": (None, 8, None, 8)}),
    "attention cap": ("Gemma 2", {"attention_soft_cap": None}),
    "final cap": ("Gemma 2", {"final_soft_cap": None}),
    "scale": ("Gemma 2", {"attention_scale": None}),
    "embedding scale": ("Gemma 2", {"embedding_scale": None}),
    "1 + w": ("Gemma 2", {"norm_offset": False}),
    "local rope": ("Gemma 3", {"local_rope": None}),
    "activation": ("Gemma 2", {"activation": "silu"}),
    "scores by layer": ("GPT-2 (scores by layer, n_inner)", {"attention_scale_by_layer": False}),
    "gelu and its approximation": ("GPT-2", {"activation": "gelu"}),
    "position offset": ("OPT", {"position_offset": 1, "max_position_embeddings": 81}),
    "epsilon": ("OPT", {"norm_eps": 0.1}),
}


@pytest.mark.parametrize(("name", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_every_setting_matters(name, changes):
    config, params = random_model(CASES[name])
    token_ids = parity.random_ids(1, 60)
    with_it = parity.dense_logits(config, params, token_ids)
    without = parity.dense_logits(dataclasses.replace(config, **changes), params, token_ids)
    assert np.abs(with_it - without).max() > 4 * F32_TOLERANCE


# --- params


@each_case
def test_params_have_the_structure_of_init(name):
    config, params = random_model(CASES[name])
    fresh = jax.eval_shape(CausalLM(config).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    assert jax.tree.structure(fresh) == jax.tree.structure(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), fresh) == jax.tree.map(lambda x: (x.shape, x.dtype), params)


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "GPT-2", "OPT 350M (projections, post-norm)"])
def test_every_parameter_has_a_gradient(name):
    config, params = random_model(CASES[name])
    token_ids = jnp.asarray(parity.random_ids(4, 48), jnp.int32)

    def loss(params: Params) -> jax.Array:
        logits = jnp.asarray(CausalLM(config).apply({"params": params}, token_ids[:, :-1]))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), token_ids[:, 1:, None], axis=-1).mean()

    for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert jnp.isfinite(gradient).all(), path
        # The softmax does not see what is the same in all scores of a query, as the bias of the keys is.
        if jax.tree_util.keystr(path).endswith("['k_proj']['bias']"):
            assert jnp.abs(gradient).max() < 1e-6, path
        else:
            assert jnp.abs(gradient).max() > 1e-7, path


def test_layers_of_one_kind_share_a_program():
    kinds = config_from_hf(CASES["Gemma 3"]).layer_kinds
    assert len(kinds) == 6
    assert len(set(kinds)) == 2
    assert len(set(config_from_hf(CASES["Qwen3"]).layer_kinds)) == 1


def test_every_model_type_has_one_family():
    assert len(set(MODEL_TYPES)) == len(MODEL_TYPES)
    assert sorted(MODEL_TYPES) == sorted(name for family in FAMILIES for name in family.model_types)


# --- GPT-2's files (B49)

GPT2 = CASES["GPT-2"]


def gpt2_files(folder: Path, changes: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], Any]:
    """What transformers saves of a GPT-2, and its logits."""
    pytest.importorskip("torch", reason="torch is the oracle")
    raw = {**GPT2, **(changes or {})}
    oracle = parity.oracle_for(raw)
    oracle.save_pretrained(folder / "theirs")
    return load_file(folder / "theirs" / "model.safetensors"), parity.logits_of(oracle, parity.random_ids(1, 60))


@pytest.mark.oracle
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_b49_both_spellings_with_mask_buffers(tmp_path, prefix):
    tensors, expected = gpt2_files(tmp_path)
    assert tensors["transformer.h.0.attn.c_proj.weight"].shape == (64, 64)  # square: the wrong way round would load
    tensors = {prefix + name.removeprefix("transformer."): value for name, value in tensors.items()}
    for layer in range(2):
        tensors[f"{prefix}h.{layer}.attn.bias"] = np.tri(80, dtype=np.uint8).reshape(1, 1, 80, 80)
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    config, params, _ = load_checkpoint(save_folder(tmp_path / "ours", GPT2, tensors))
    assert config.intermediate_size == 4 * 64
    logits = parity.dense_logits(config, params, parity.random_ids(1, 60))
    np.testing.assert_allclose(logits, expected, atol=F32_TOLERANCE, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_weights": False},
        {"reorder_and_upcast_attn": True},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
        {"layer_norm_epsilon": 0.01},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_b49_odd_flags_are_honoured(tmp_path, changes):
    tensors, expected = gpt2_files(tmp_path, changes)
    assert ("lm_head.weight" in tensors) == (changes.get("tie_word_embeddings") is False)
    config, params, _ = load_checkpoint(tmp_path / "theirs")
    logits = parity.dense_logits(config, params, parity.random_ids(1, 60))
    np.testing.assert_allclose(logits, expected, atol=F32_TOLERANCE, rtol=0)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
    config = config_from_hf(GPT2)
    tensors = {"transformer.h.0.attn.c_attn.bias": np.zeros(190, np.float32)}
    with pytest.raises(ValueError) as error:
        load_checkpoint(save_folder(tmp_path, GPT2, tensors))
    assert "not used: transformer.h.0.attn.c_attn.bias [190]" in str(error.value)
    assert "missing: transformer.h.0.attn.c_attn[q].bias [64]" in str(error.value)
    assert config.num_layers == 2


def test_the_same_tensor_under_both_spellings_is_named(tmp_path):
    tensors = {"wte.weight": np.zeros((96, 64), np.float32), "transformer.wte.weight": np.zeros((96, 64), np.float32)}
    with pytest.raises(ValueError, match=r"given twice: transformer\.wte\.weight"):
        load_checkpoint(save_folder(tmp_path, GPT2, tensors))


# --- OPT's positions (B50)

OPT_32 = {**CASES["OPT 350M (projections, post-norm)"], "max_position_embeddings": 32}


@pytest.mark.oracle
@pytest.mark.parametrize("before", [True, False])
def test_b50_all_positions_and_none_beyond(tmp_path, before):
    pytest.importorskip("torch", reason="torch is the oracle")
    oracle = parity.oracle_for({**OPT_32, "do_layer_norm_before": before})
    oracle.save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert tensors["model.decoder.embed_positions.weight"].shape == (34, 40)
    assert tensors["model.decoder.project_in.weight"].shape == (40, 24)
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}  # as the first files have them
    token_ids = parity.random_ids(1, 33)
    expected = parity.logits_of(oracle, token_ids[:, :32])[0]
    config, params, _ = load_checkpoint(
        save_folder(tmp_path / "ours", {**OPT_32, "do_layer_norm_before": before}, tensors)
    )
    assert ("norm" in params) == before
    paged = parity.paged_logits(config, params, token_ids[0, :32], chunks=(20, 5))
    np.testing.assert_allclose(paged, expected, atol=F32_TOLERANCE, rtol=0)
    with pytest.raises(ValueError, match=r"token_ids: got sequences of 33 tokens, expected at most 32 positions"):
        parity.dense_logits(config, params, token_ids)
    beyond = parity.paged_logits(config, params, token_ids[0], chunks=(20, 5))
    np.testing.assert_allclose(beyond[:32], expected, atol=F32_TOLERANCE, rtol=0)
    assert np.isnan(beyond[32]).all(), "clamped"


def test_b50_an_engine_has_no_position_beyond():
    config, params = random_model(OPT_32)
    options: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "warm_up": False}
    model = CausalLM(config)
    llm = LLM(model, params=params, max_num_seqs=2, **options)
    assert llm.engine.config.max_model_len == 32
    with pytest.raises(
        ValueError, match="max_model_len must be at most the model's 32, got 33; its positions are lear"
    ):
        LLM(model, params=params, max_model_len=33, allow_longer_context=True, **options)


# --- Gemma (B52)


@pytest.mark.oracle
def test_b52_norms_and_embeddings_round_as_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    rng = np.random.default_rng(0)
    weights, x = (rng.normal(mean, std, shape) for mean, std, shape in ((15, 2, 48), (0, 3, (20, 48))))
    norm = Gemma2RMSNorm(48, eps=1e-6).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weights))
        expected = norm(torch.from_numpy(x).to(torch.bfloat16)).float().numpy()
    params = {"scale": jnp.asarray(weights, jnp.bfloat16)}
    ours: Any = RMSNorm(1e-6, offset=True).apply({"params": params}, jnp.asarray(x, jnp.bfloat16))
    assert ours.dtype == jnp.bfloat16
    # Equal but where the f32 sums of another order fall on the other side of a rounding.
    different = np.asarray(ours, np.float32) != expected
    assert different.mean() < 0.01
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=2.0**-7)

    config, params = random_model(CASES["Gemma 2"])
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ids = jnp.arange(96, dtype=jnp.int32)
    embedded: Any = CausalLM(config).apply({"params": narrow}, ids, ids, method="embed")
    table = torch.from_numpy(np.asarray(narrow["embed_tokens"]["embedding"], np.float32)).to(torch.bfloat16)
    scaled = (table * torch.tensor(48**0.5).to(torch.bfloat16)).float().numpy()
    np.testing.assert_array_equal(np.asarray(embedded, np.float32), scaled)


@pytest.mark.oracle
def test_gemma_3_with_a_vision_tower(tmp_path):
    """Its text model alone, out of the files of the whole."""
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {key: value for key, value in CASES["Gemma 3"].items() if key != "model_type"}
    own = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=95,
    )
    own._attn_implementation = "eager"
    torch.manual_seed(0)
    oracle = Gemma3ForConditionalGeneration(own).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0.0, 0.2)
    oracle.save_pretrained(tmp_path)
    token_ids = parity.random_ids(1, 60) % 90 + 3
    config, params, _ = load_checkpoint(tmp_path)
    assert config.model_type == "gemma3_text"
    logits = parity.dense_logits(config, params, token_ids)
    np.testing.assert_allclose(logits, parity.logits_of(oracle, token_ids), atol=F32_TOLERANCE, rtol=0)

    # The other order of the names, as older and newer versions save them.
    orders = ("model.language_model.", "language_model.model.")
    tensors = load_file(tmp_path / "model.safetensors")
    (old,) = (order for order in orders if any(name.startswith(order) for name in tensors))
    (new,) = set(orders) - {old}
    renamed = {name.replace(old, new): value for name, value in tensors.items()}
    assert any("vision_tower" in name for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path).params, params)


# --- configs


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "gpt2", "opt"])
def test_missing_keys_mean_what_they_mean_in_transformers(model_type):
    from transformers import CONFIG_MAPPING

    oracle, ours = CONFIG_MAPPING[model_type](), config_from_hf({"model_type": model_type})
    for name in ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(oracle, name), name
    assert ours.num_layers == oracle.num_hidden_layers
    assert ours.num_heads == oracle.num_attention_heads
    assert ours.eos_token_ids == ()
    assert ours.attention_soft_cap == getattr(oracle, "attn_logit_softcapping", None)
    assert ours.final_soft_cap == getattr(oracle, "final_logit_softcapping", None)
    if layer_types := getattr(oracle, "layer_types", None):
        windows = [oracle.sliding_window if name == "sliding_attention" else None for name in layer_types]
        assert list(ours.layer_windows) == windows
    if model_type == "gemma3_text":
        assert ours.local_rope is not None
        assert ours.rope.theta == oracle.rope_parameters["full_attention"]["rope_theta"]
        assert ours.local_rope.theta == oracle.rope_parameters["sliding_attention"]["rope_theta"]


def test_gpt2_under_the_names_of_others():
    """transformers takes hidden_size for n_embd, and so on."""
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    raw = {names.get(key, key): value for key, value in GPT2.items()}
    assert config_from_hf(raw) == config_from_hf(GPT2)


@pytest.mark.parametrize("kind", ["gelu", "gelu_pytorch_tanh"])
def test_gemmas_first_files_mean_the_approximation(kind):
    assert config_from_hf({**CASES["Gemma"], "hidden_act": kind}).activation == "gelu_tanh"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bidirectional": ("Gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
    "gemma 3's cap": ("Gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, expected null"),
    "cap 0": ("Gemma 2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: got 0.0"),
    "one rope for both": (
        "Gemma 3",
        {"rope_parameters": {"rope_type": "default"}},
        "rope_parameters: got .* an object",
    ),
    "no pattern": ("Gemma 3", {"sliding_window_pattern": 0}, "sliding_window_pattern: got 0"),
    "a rope for other layers": ("Gemma 3", {"rope_parameters": {"sliding": {}}}, "rope_parameters: got .*'sliding'"),
    "rope_parameters of text": ("Gemma 3", {"rope_parameters": ""}, "rope_parameters: got '', expected an object"),
    "too few layer types": ("Gemma 2", {"layer_types": ["sliding_attention"]}, "one for each of the 4 layers"),
    "no window in Gemma 2": ("Gemma 2", {"sliding_window": None}, "sliding_window: got None, expected an int >= 1"),
    "no window in Gemma 3": ("Gemma 3", {"sliding_window": None}, "sliding_window: got None, expected an int >= 1"),
    "the outer object quantised": (
        "Gemma 3",
        {"model_type": "gemma3", "text_config": CASES["Gemma 3"], "quantization_config": {"quant_method": "awq"}},
        "quantization_config: got .*awq",
    ),
    "another text model": (
        "Gemma 3",
        {"model_type": "gemma3", "text_config": {**CASES["Gemma 3"], "model_type": "gemma2"}},
        "text_config.model_type: got 'gemma2', expected gemma3_text",
    ),
    "layers of GPT-2": ("GPT-2", {"n_layer": 10**9}, "n_layer: got 1000000000, expected at most 10000"),
    "layers of Gemma 3": ("Gemma 3", {"num_hidden_layers": 10**9}, "num_hidden_layers: got 10+, expected at most"),
    "a width beyond floats": ("Gemma", {"hidden_size": 10**400}, "hidden_size: got 10+, expected an int >= 1, of 64"),
    "heads beyond memory": ("Gemma", {"head_dim": 10**9}, "head_dim: got 1000000000, expected at most 65536"),
    "a cap beyond floats": ("Gemma 2", {"final_logit_softcapping": 10**400}, "final_logit_softcapping: got 10+, exp"),
    "activation": ("Gemma 2", {"hidden_activation": "quick_gelu"}, "hidden_activation: got 'quick_gelu'"),
    "no text_config": ("Gemma 3", {"model_type": "gemma3"}, "text_config: got None, expected an object"),
    "cross attention": ("GPT-2", {"add_cross_attention": True}, "add_cross_attention: got True"),
    "gpt2's activation": ("GPT-2", {"activation_function": "tanh"}, "activation_function: got 'tanh'"),
    "gpt2's heads": ("GPT-2", {"n_head": 5}, "hidden_size: got 64, expected a multiple of num_attention_heads = 5"),
    "norms without weights": (
        "OPT",
        {"layer_norm_elementwise_affine": False},
        "layer_norm_elementwise_affine: got Fal",
    ),
    "quantised": ("OPT", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_implemented_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**CASES[name], **changes})


@pytest.mark.parametrize("key", ["rope_theta", "rope_local_base_freq"])
@pytest.mark.parametrize("value", [0, False, "", {}, 10**400])
def test_gemma_3_takes_its_own_theta_for_null_alone(key, value):
    raw = {**CASES["Gemma 3"], key: None}
    config = config_from_hf(raw)
    assert config.local_rope is not None
    theta = config.rope.theta if key == "rope_theta" else config.local_rope.theta
    assert theta == {"rope_theta": 1e6, "rope_local_base_freq": 1e4}[key]
    with pytest.raises(ValueError, match=f"{key}: got "):
        config_from_hf({**raw, key: value})


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False, ...])
def test_the_outer_object_says_whether_the_head_is_tied(outer, inner):
    """As transformers, which does not look at the text model's; its default is true."""
    raw = {"model_type": "gemma3", "text_config": {**CASES["Gemma 3"], "tie_word_embeddings": inner}}
    given = {} if outer is ... else {"tie_word_embeddings": outer}
    assert config_from_hf({**raw, **given}).tie_word_embeddings == (outer is not False)


def test_a_fused_tensor_without_dimensions_is_named(tmp_path):
    tensors = {"transformer.h.0.attn.c_attn.weight": np.array(1.0, np.float32)}
    with pytest.raises(ValueError, match=r"not used: transformer\.h\.0\.attn\.c_attn\.weight \[\]"):
        load_checkpoint(save_folder(tmp_path, GPT2, tensors))


@each_case
def test_no_value_of_a_config_ends_in_another_error(name):
    """Whatever stands in a file: read, or refused with a ValueError."""
    config = dataclasses.asdict(config_from_hf(CASES[name]))
    more = ("eos_token_id", "dtype", "layer_types", "rope_parameters", "hidden_act", "activation_function", "n_inner")
    num_refused = 0
    for key in {*CASES[name], *more, *_HF_FLAGS}:
        for value in (None, "x", "1", [], {}, [None], -1, 0, True, 2.5, float("nan"), 10**9, 10**400):
            try:
                config_from_hf({**CASES[name], key: value})
            except ValueError:
                num_refused += 1
    assert num_refused > 5 * len(CASES[name])
    assert dataclasses.asdict(config_from_hf(CASES[name])) == config


_HF_FLAGS = (
    *("attention_bias", "use_sliding_window", "rope_local_base_freq", "use_bidirectional_attention"),
    *("add_cross_attention", "scale_attn_weights", "enable_bias", "_remove_final_layer_norm"),
)
BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "norm": ({"norm": "batch"}, "norm: got 'batch', expected one of rms, layer"),
    "placement": ({"norm_placement": "after"}, "norm_placement: got 'after'"),
    "activation": ({"activation": "tanh"}, "activation: got 'tanh'"),
    "positions": ({"position_embedding": "alibi"}, "position_embedding: got 'alibi'"),
    "offset": ({"position_offset": -1}, "position_offset: got -1, expected an int >= 0"),
    "windows": ({"layer_windows": (8,)}, r"layer_windows: got \(8,\), expected one for each of the 2 layers"),
    "a window": ({"layer_windows": (8, 0)}, r"layer_windows: got \(8, 0\), expected ints >= 1"),
    "scale": ({"attention_scale": -1.0}, "attention_scale: got -1.0"),
    "cap": ({"final_soft_cap": float("inf")}, "final_soft_cap: got inf"),
    "width": ({"embedding_size": 0}, "embedding_width: got 0"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_bad_field_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config_from_hf(CASES["LLaMA"]), **changes)


def test_names_of_tensors():
    """One of each kind, as the files of the hub have them."""
    expected = {
        "OPT": ["model.decoder.layers.1.self_attn.out_proj.bias", "model.decoder.layers.0.fc1.weight"],
        "GPT-2": ["transformer.h.1.mlp.c_proj.bias", "transformer.wpe.weight", "transformer.h.0.attn.c_attn[k].weight"],
        "Gemma 3": ["model.layers.5.post_feedforward_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"],
    }
    for name, tensors in expected.items():
        assert set(tensors) <= set(expected_tensors(config_from_hf(CASES[name])))


def test_a_family_that_transformers_does_not_know(monkeypatch):
    """One file and one line: its own keys, without defaults."""
    from pagedjax.models import families
    from pagedjax.models.families.family import Family

    def read_config(values: Any) -> ModelConfig:
        llama = config_from_hf({**CASES["LLaMA"], "num_hidden_layers": values.get("depth", 1)})
        return dataclasses.replace(llama, model_type="toylm")

    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, Family(model_types=("toylm",), read_config=read_config)))
    monkeypatch.setattr(families, "MODEL_TYPES", (*MODEL_TYPES, "toylm"))
    config = config_from_hf({"model_type": "toylm", "depth": 3})
    assert (config.model_type, config.num_layers) == ("toylm", 3)
    assert "model.layers.2.mlp.up_proj.weight" in expected_tensors(config)
