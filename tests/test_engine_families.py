"""Every family through the whole engine against transformers: what is said of each prompt and of each output."""

from typing import Any

import jax
import numpy as np
import pytest
from benchmark_scripts import load
from tiny_engine import assert_clean, fill_pool

from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams

pytest.importorskip("torch", reason="torch is the oracle")
parity = load("model_parity")
CASES: dict[str, dict[str, Any]] = parity.CASES

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:.*vocabulary.*"),  # transformers says so of special ids beyond a tiny one
]
TOLERANCE = 5e-5
"""Of log-probabilities down to -30, in f32: chunks and other batches move the last bits. Seen: 7e-6."""
PROMPT_LENGTHS = (60, 1, 8, 23)
NUM_OUTPUTS = 10


def engine_for(oracle: Any, folder: Any, **options: Any) -> LLM:
    oracle.save_pretrained(folder)
    sizes = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "num_blocks": 160, "max_model_len": 72}
    return LLM(folder, dtype="float32", check_integrity=True, warm_up=False, **{**sizes, **options})


def assert_logprobs_equal(oracle: Any, output: RequestOutput) -> None:
    """Of all of the prompt's tokens and of all outputs, each of which is the likeliest."""
    (completion,) = output.outputs
    token_ids = [*output.prompt_token_ids, *completion.token_ids]
    logprobs = np.asarray(jax.nn.log_softmax(parity.logits_of(oracle, np.array([token_ids]))[0], axis=-1))
    expected = logprobs[np.arange(len(token_ids) - 1), token_ids[1:]]
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    said = [entry[token_id].logprob for entry, token_id in zip(entries, token_ids[1:], strict=True) if entry]
    np.testing.assert_allclose(said, expected, atol=TOLERANCE, rtol=0)
    best = logprobs[len(output.prompt_token_ids) - 1 : -1].max(axis=-1)
    assert (best - expected[len(output.prompt_token_ids) - 1 :] <= TOLERANCE).all()


@pytest.mark.parametrize("name", CASES)
def test_prompts_and_outputs_have_transformers_logprobs(tmp_path, name):
    """In chunks, four at a time, over a pool of NaN."""
    oracle = parity.oracle_for(CASES[name])
    llm = engine_for(oracle, tmp_path)
    fill_pool(llm.engine, np.nan)
    prompts = [parity.random_ids(length).tolist() for length in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == NUM_OUTPUTS
        assert_logprobs_equal(oracle, output)
    assert_clean(llm.engine)


def test_mistral_at_ten_times_its_window(tmp_path):
    """Constant blocks, and transformers' outputs to the end (arXiv 2310.06825: the rolling buffer)."""
    window = 8
    oracle = parity.oracle_for(CASES["Mistral (window 8)"])
    llm = engine_for(oracle, tmp_path, max_model_len=11 * window)
    params = SamplingParams(temperature=0.0, max_tokens=10 * window, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    llm.engine.add_request([5, 9, 31], params, "long")
    held, outputs = [], []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
        held += [
            len(request.block_table.blocks) for request in llm.engine.scheduler.requests(llm.engine.scheduler.running)
        ]
    assert set(held[: 2 * window]) == {1, 2, 3}
    assert set(held[2 * window :]) == {3}, "what the window sees of the past in two blocks, and one to write to"
    assert len(outputs[-1].outputs[0].token_ids) == 10 * window
    assert_logprobs_equal(oracle, outputs[-1])
