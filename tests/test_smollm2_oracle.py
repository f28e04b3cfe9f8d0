"""The whole engine on a real model: SmolLM2-135M's greedy answers in f32 are transformers', however they are batched.

On a near tie the last bit decides, and batch sizes differ in it: there the logits must agree, not the ids.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.beams.params import BeamSearchParams
from pagedjax.llm import LLM
from pagedjax.models.catalogue import resolve
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.load import load
from pagedjax.models.weights import expected_tensors
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams

torch = pytest.importorskip("torch", reason="torch is the oracle")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
NUM_OUTPUTS = 48
TOLERANCE = 8e-4
"""Of logits up to 30, f32 through 30 layers: the largest difference seen is 1.4e-4 on one kind of CPU and 4.1e-4 on
another, before and after the same change; the smallest top-2 gap is 1.8e-3."""

PROMPTS: list[str | list[dict[str, str]]] = [
    "The",
    "The capital of France is",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village between two mountains, there lived a baker who",
    "Ingredients: 200 g flour, 2 eggs, 300 ml milk, a pinch of salt.\n\nMethod:",
    "Die Hauptstadt von Deutschland ist",
    "Q: Who wrote Romeo and Juliet?\nA: William Shakespeare\n\nQ: Who painted the Mona Lisa?\nA:",
    'import numpy as np\n\ndef softmax(x):\n    """Numerically stable softmax over the last axis."""\n',
    "The three laws of thermodynamics can be summarised as follows. First, energy is neither created nor destroyed; it "
    "only changes its form. Second, the entropy of an isolated system never decreases. Third,",
    "An operating system gives each process the illusion of a memory of its own. It divides memory into pages of one "
    "size, keeps a table of which page lies where, and brings pages in on demand. The same idea serves a language "
    "model: the keys and values of a sequence are cut into blocks, a table says where each block lies, and any free "
    "block can serve any sequence. Compared with one contiguous region per request, this",
    "| city | country | population |\n|---|---|---|\n| Paris | France | 2.1 million |\n| Berlin |",
    "😀 Emoji, ümläuts and 漢字 are all",
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Name a prime number larger than ten."},
        {"role": "assistant", "content": "Eleven."},
        {"role": "user", "content": "And the next one?"},
    ],
    [
        {
            "role": "user",
            "content": "List five animals that live in the desert, each with one reason why it survives there.",
        }
    ],
]


class Real(NamedTuple):
    """The model under test, the prompts as ids, and what transformers makes of them."""

    model: CausalLM
    params: Params
    tokenizer: Any
    prompts: list[list[int]]
    outputs: list[list[int]]
    """NUM_OUTPUTS greedy ids for each prompt."""
    logits: np.ndarray
    """[prompt, output, vocabulary]: what each of these ids was the largest of."""


def oracle_from(config: ModelConfig, params: Params) -> Any:
    """transformers' own Llama with exactly our weights."""
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as TheirLlama

    assert config.rope.rope_type == "default"
    oracle_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    tensors = {}
    for name, (path, _, transpose) in expected_tensors(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        tensors[name] = torch.from_numpy(np.array(leaf.T if transpose else leaf, np.float32, order="C"))
    oracle = TheirLlama(oracle_config).eval()
    missing, unexpected = oracle.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return oracle


@pytest.fixture(scope="module")
def oracle_and_model() -> tuple[Any, CausalLM, Params, Any]:
    model, params, tokenizer = load(MODEL, dtype="float32")
    return oracle_from(model.config, params), model, params, tokenizer


@pytest.fixture(scope="module")
def real(oracle_and_model: tuple[Any, CausalLM, Params, Any]) -> Real:
    """All prompts at once, padded on the left, through transformers' `generate`."""
    oracle, model, params, tokenizer = oracle_and_model
    renderer = LLM(model, params=params, tokenizer=tokenizer, num_blocks=1, warm_up=False)
    prompts = [
        tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else renderer.render_chat(prompt)
        for prompt in PROMPTS
    ]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        generated = oracle.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    outputs = generated.sequences[:, width:].tolist()
    logits = torch.stack(generated.logits, dim=1).float().numpy()
    assert logits.shape == (len(prompts), NUM_OUTPUTS, model.config.vocab_size)
    return Real(model, params, tokenizer, prompts, outputs, logits)


def test_the_oracle_reads_the_same_weights(oracle_and_model):
    """Ours out of the GGUF file are transformers' out of the GGUF file."""
    from transformers import AutoModelForCausalLM

    path = resolve(MODEL)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = oracle_and_model[0].state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-7, msg=name)


def test_prompts_differ(real):
    assert len(real.prompts) == 20
    assert len(set(map(len, real.prompts))) >= 10
    assert len({tuple(ids) for ids in real.outputs}) == 20


# --- dense


def dense_logits(real: Real, token_ids: list[int]) -> np.ndarray:
    """Logits at every position. Causal: what pads it to a common length changes nothing."""
    padded = jnp.asarray([token_ids + [0] * (-len(token_ids) % 64)], jnp.int32)
    return np.asarray(jax.jit(real.model.apply)({"params": real.params}, padded))[0, : len(token_ids)]


@pytest.mark.parametrize("index", [0, 12, 18])
def test_dense_logits(real, index):
    prompt, output = real.prompts[index], real.outputs[index]
    logits = dense_logits(real, prompt + output[:-1])[len(prompt) - 1 :]
    np.testing.assert_allclose(logits, real.logits[index], atol=TOLERANCE, rtol=0)


# --- the engine


def make_llm(real: Real, **options: Any) -> LLM:
    return LLM(real.model, params=real.params, max_model_len=256, warm_up=False, check_integrity=True, **options)


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True), use_tqdm=False
    )


def assert_greedy_ids_equal(real: Real, outputs: list[RequestOutput], indices: list[int]) -> None:
    """Equal to the end, or to where transformers' own choice was a near tie with ours: our logits are near as well."""
    for index, output in zip(indices, outputs, strict=True):
        ids, expected = output.outputs[0].token_ids, real.outputs[index]
        assert len(ids) == NUM_OUTPUTS
        different = np.flatnonzero(np.array(ids) != np.array(expected))
        if not len(different):
            continue
        first = different[0]
        theirs = real.logits[index, first]
        gap = theirs.max() - theirs[ids[first]]
        assert gap < TOLERANCE, f"prompt {index} differs at output {first}, where the gap is {gap}"
        ours = dense_logits(real, real.prompts[index] + expected[:first])[-1]
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def record_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], np.ndarray]:
    """Logits by request id and number of outputs so far, filled in while the engine runs."""
    recorded: dict[tuple[str, int], np.ndarray] = {}
    last_step: list[np.ndarray] = []
    advance: Callable[..., Any] = llm.engine.scheduler.advance

    def run(batch: Any) -> np.ndarray:
        tokens, last_step[:] = llm.engine.runner.run_with_logits(batch)
        return tokens

    def recording_advance(scheduled: Any) -> None:
        for request, logits in zip(scheduled.sampling, last_step, strict=False):
            recorded[request.request_id, request.num_output_tokens] = logits.copy()  # a view keeps padding alive
        advance(scheduled)

    monkeypatch.setattr(llm.engine.runner, "run", run)
    monkeypatch.setattr(llm.engine.scheduler, "advance", recording_advance)
    return recorded


def assert_logits_equal(real: Real, recorded: dict[tuple[str, int], np.ndarray], outputs: list[RequestOutput]) -> None:
    """As far as the ids, and so the inputs, are the same."""
    num_compared = 0
    for index, output in enumerate(outputs):
        ids, expected = output.outputs[0].token_ids, real.outputs[index]
        for i in range(NUM_OUTPUTS):
            logits = recorded[output.request_id, i]
            np.testing.assert_allclose(logits, real.logits[index, i], atol=TOLERANCE, rtol=0)
            num_compared += 1
            if ids[i] != expected[i]:
                break
    assert num_compared > 0.9 * len(outputs) * NUM_OUTPUTS


ALL = list(range(len(PROMPTS)))
# Between them every block size and every budget; a budget of 7 takes prompts in chunks of 7 or less.
CONFIGS = {
    "blocks of 1, budget 64": (1, 64, ALL),
    "blocks of 8, budget 2048": (8, 2048, ALL),
    "blocks of 32, budget 64": (32, 64, ALL),
    "blocks of 16, budget 7": (16, 7, [1, 5, 8, 15]),
    "blocks of 1, budget 7": (1, 7, [0, 3]),
}


@pytest.mark.parametrize(("block_size", "budget", "indices"), CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_ids_equal_transformers(real, block_size, budget, indices):
    llm = make_llm(real, block_size=block_size, max_num_seqs=20, max_num_batched_tokens=budget)
    outputs = generate(llm, [real.prompts[index] for index in indices])
    assert_greedy_ids_equal(real, outputs, indices)
    assert llm.stats().num_preemptions == 0


def test_logits_equal_transformers(real, monkeypatch):
    llm = make_llm(real, block_size=16, max_num_seqs=20, max_num_batched_tokens=64)
    recorded = record_logits(llm, monkeypatch)
    outputs = generate(llm, real.prompts)
    assert_greedy_ids_equal(real, outputs, ALL)
    assert_logits_equal(real, recorded, outputs)


def test_preempted_requests_go_on_as_if_nothing_had_been(real, monkeypatch):
    """Room for a fraction of all: several are thrown out half-way and computed again, outputs included."""
    llm = make_llm(real, block_size=8, num_blocks=60, max_num_seqs=20, max_num_batched_tokens=64)
    recorded = record_logits(llm, monkeypatch)
    outputs = generate(llm, real.prompts)
    assert llm.stats().num_preemptions >= 3
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert_greedy_ids_equal(real, outputs, ALL)
    assert_logits_equal(real, recorded, outputs)


def test_beam_search_equals_transformers(oracle_and_model, real):
    """All 20 prompts are in benchmarks/sharing.py. Searches of different lengths step in one batch here."""
    oracle, indices, lengths = oracle_and_model[0], [0, 5, 9, 16], [12, 9, 12, 7]
    llm = make_llm(real, block_size=16)
    each = [BeamSearchParams(beam_width=4, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.beam_search([real.prompts[i] for i in indices], each, use_tqdm=False)
    for index, length, output in zip(indices, lengths, outputs, strict=True):
        prompt = torch.tensor([real.prompts[index]])
        with torch.no_grad():
            expected = oracle.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=4,
                num_return_sequences=4,
                max_new_tokens=length,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        ids = [completion.token_ids for completion in output.outputs]
        assert ids == expected.sequences[:, prompt.shape[1] :].tolist()
        scores = [completion.score or 0.0 for completion in output.outputs]
        np.testing.assert_allclose(scores, expected.sequences_scores.numpy(), atol=1e-4)
    assert llm.stats().num_block_copies > 0
