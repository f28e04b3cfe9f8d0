"""New weights in a running engine: what they cost, and what becomes of requests that are under way."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from test_runner import counting_compiles
from tiny_engine import fill_pool, greedy, prompt_of, tiny_engine, tiny_llm, tiny_params

from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput

PROMPT = prompt_of(9)
NUM_TOKENS = 24


def other_params() -> dict[str, Any]:
    """Weights that say something else from the first token on."""
    params = jax.tree.map(lambda x: x, tiny_params())
    params["layers_0"]["mlp"]["up_proj"]["kernel"] = -params["layers_0"]["mlp"]["up_proj"]["kernel"]
    return params


def tokens_of(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    return llm.generate([prompt], greedy(num_tokens), use_tqdm=False)[0].outputs[0].token_ids


def started(llm: LLM) -> tuple[Iterator[RequestOutput], list[int]]:
    """A stream that has given some tokens."""
    stream = llm.stream(PROMPT, greedy(NUM_TOKENS))
    output = next(stream)
    while len(output.outputs[0].token_ids) < 5:
        output = next(stream)
    return stream, output.outputs[0].token_ids


def last_of(stream: Iterator[RequestOutput]) -> RequestOutput:
    return list(stream)[-1]


def with_other_params() -> LLM:
    llm = tiny_llm()
    llm.update_params(other_params())
    return llm


def test_new_weights_are_taken_as_they_are():
    """Nothing compiles, nothing is copied, and the prefix cache knows nothing of the old ones."""
    llm, params = tiny_llm(), other_params()
    before = tokens_of(llm, PROMPT, NUM_TOKENS)
    assert llm.generate([PROMPT], greedy(1), use_tqdm=False)[0].num_cached_tokens == 8
    with counting_compiles() as num_compiles:
        llm.update_params(params)
        output = llm.generate([PROMPT], greedy(NUM_TOKENS), use_tqdm=False)[0]
        assert num_compiles() == 0
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids != before
    held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.engine.runner.params)]
    assert held == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    llm.update_params(tiny_params())
    assert tokens_of(llm, PROMPT, NUM_TOKENS) == before


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"num_decode_steps": 4}])
def test_requests_under_way_go_on_with_the_new_weights(options):
    llm = tiny_llm(**options)
    stream, before = started(llm)
    llm.update_params(other_params())
    after = last_of(stream).outputs[0]
    kept = next(n for n in range(NUM_TOKENS, 0, -1) if after.token_ids[:n] == tokens_of(tiny_llm(), PROMPT, n))
    assert len(before) <= kept < NUM_TOKENS
    expected = tokens_of(with_other_params(), PROMPT + after.token_ids[:kept], NUM_TOKENS - kept)
    assert after.token_ids[kept:] == expected
    assert after.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"num_decode_steps": 4}, {"num_blocks": 12}])
def test_requests_under_way_are_finished_with_the_old_weights(options):
    """Those of a small pool are preempted on the way, and one waits for a place in the batch."""
    prompts = [prompt_of(6, seed) for seed in range(4)]
    expected = [tokens_of(tiny_llm(), prompt, 20) for prompt in prompts]
    llm = tiny_llm(**options, max_num_seqs=3 if "num_blocks" in options else 8)
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    for stream in streams[:3]:
        next(stream)
    llm.update_params(other_params(), in_flight="finish")
    assert [last_of(stream).outputs[0].token_ids for stream in streams] == expected
    assert tokens_of(llm, prompts[0], 20) == tokens_of(with_other_params(), prompts[0], 20)


def test_outputs_without_an_inbox_are_returned_by_the_next_step():
    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(NUM_TOKENS), "a")
    engine.add_request(PROMPT, greedy(3, n=1), "b")
    engine.step()
    engine.update_params(other_params(), in_flight="finish")
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["a"].outputs[0].token_ids == tokens_of(tiny_llm(), PROMPT, NUM_TOKENS)
    assert len(outputs["b"].outputs[0].token_ids) == 3
    assert not engine.has_unfinished()


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"num_blocks": 10}])
def test_requests_under_way_are_aborted_if_asked(options):
    llm = tiny_llm(**options)
    stream, before = started(llm)
    waiting = llm.engine.add_request(prompt_of(30), greedy(8, n=2))
    llm.update_params(other_params(), in_flight="abort")
    output = last_of(stream)
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids[: len(before)] == before
    (aborted,) = llm.engine.step()
    assert aborted.request_id == waiting
    assert [each.finish_reason for each in aborted.outputs] == ["abort", "abort"]
    assert llm.stats().num_free_blocks == llm.engine.config.num_blocks
    assert tokens_of(llm, PROMPT, 8) == tokens_of(with_other_params(), PROMPT, 8)


@pytest.mark.parametrize("in_flight", ["recompute", "finish", "abort"])
def test_pinned_prefixes_and_held_sequences_are_computed_again(in_flight):
    llm = tiny_llm()
    with llm.pin_prefix(PROMPT), llm.sequence(PROMPT) as sequence:
        llm.generate([PROMPT], greedy(1), use_tqdm=False)
        llm.update_params(other_params(), in_flight=in_flight)
        fill_pool(llm.engine, float("nan"))
        expected = tokens_of(with_other_params(), PROMPT, 8)
        assert tokens_of(llm, PROMPT, 8) == expected
        assert llm.generate(sequence, greedy(8), use_tqdm=False)[0].outputs[0].token_ids == expected


def test_a_generation_in_another_thread_is_finished_first():
    llm = tiny_llm()
    expected, begun = tokens_of(llm, PROMPT, NUM_TOKENS), threading.Event()
    step = llm.engine.step
    results: list[list[int]] = []

    def stepped() -> Any:
        outputs = step()
        begun.set()
        return outputs

    llm.engine.step = stepped
    thread = threading.Thread(target=lambda: results.append(tokens_of(llm, PROMPT, NUM_TOKENS)))
    thread.start()
    begun.wait(60)
    llm.update_params(other_params(), in_flight="finish")
    thread.join(60)
    assert results == [expected]


def test_what_is_refused_changes_nothing():
    llm = tiny_llm()
    stream, _ = started(llm)
    with pytest.raises(ValueError, match="in_flight must be one of recompute, finish, abort, got 'fail'"):
        llm.update_params(other_params(), in_flight="fail")
    wrong = other_params()
    wrong["layers_0"]["mlp"]["up_proj"]["kernel"] = wrong["layers_0"]["mlp"]["up_proj"]["kernel"][:-1]
    for in_flight in ("recompute", "finish", "abort"):
        with pytest.raises(ValueError, match=r"params\['layers_0'\]\['mlp'\]\['up_proj'\]\['kernel'\]: expected"):
            llm.update_params(wrong, in_flight=in_flight)
    assert last_of(stream).outputs[0].token_ids == tokens_of(tiny_llm(), PROMPT, NUM_TOKENS)
