"""Several decodes per step, and steps launched ahead of the tokens of those before: the same tokens as one by one."""

import jax
import numpy as np
import pytest
from fake_device import completion_reference, fake_engine
from fake_device import greedy as fake_greedy
from fake_device import run as run_fake
from tiny_engine import (
    BLOCK_SIZE,
    ascii_tokenizer,
    assert_clean,
    fill_pool,
    greedy,
    prompt_of,
    reference,
    run_all,
    text_of,
    tiny_engine,
    unchecked_engine,
)

from pagedjax.beams.params import BeamSearchParams
from pagedjax.sampling.decode_loop import MAX_STOP_IDS, build_decode_rows
from pagedjax.sampling.params import SamplingParams

WAYS = [(1, True), (3, False), (3, True), (8, False), (8, True)]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Of all kinds, with prompts and outputs of many lengths: they join and leave in the middle of others' steps."""
    stops = reference(prompt_of(9, 4), greedy(12))[5:6]
    return [
        (prompt_of(5), greedy(17)),
        (prompt_of(13, 1), SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)),
        (prompt_of(30, 2), greedy(1)),
        (prompt_of(3, 3), SamplingParams(temperature=0.9, seed=2**40, n=2, max_tokens=6, ignore_eos=True)),
        (prompt_of(9, 4), greedy(12, stop_token_ids=stops)),
        (prompt_of(4, 5), greedy(6, logprobs=2)),
    ]


@pytest.mark.parametrize("num_blocks", [64, 10])
@pytest.mark.parametrize(("num_decode_steps", "async_scheduling"), WAYS)
def test_tokens_are_those_of_single_steps(num_decode_steps, async_scheduling, num_blocks):
    asked = requests()
    engine = tiny_engine(num_blocks, num_decode_steps=num_decode_steps, async_scheduling=async_scheduling)
    fill_pool(engine, np.nan)
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(prompt, params, str(i))
    outputs = run_all(engine)
    for i, (prompt, params) in enumerate(asked):
        for completion in outputs[str(i)].outputs:
            assert completion.token_ids == reference(prompt, params, completion.index), i
    assert engine.stats().num_output_tokens == sum(len(c.token_ids) for o in outputs.values() for c in o.outputs)
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 10)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_program_per_step_gives_the_same_tokens(async_scheduling):
    """The loop on the device, as a GPU runs it; it ends when nobody goes on."""
    engine = tiny_engine(whole_step=True, num_decode_steps=4, async_scheduling=async_scheduling)
    fill_pool(engine, np.nan)
    asked = requests()[:5]
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(prompt, params, str(i))
    outputs = run_all(engine)
    for i, (prompt, params) in enumerate(asked):
        for completion in outputs[str(i)].outputs:
            assert completion.token_ids == reference(prompt, params, completion.index), i


def test_a_step_gives_several_tokens_to_each():
    engine = tiny_engine(num_decode_steps=4)
    engine.add_request(prompt_of(3), greedy(9), "x")
    lengths = []
    while engine.has_unfinished():
        (output,) = engine.step()
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == [1, 5, 9]
    assert engine.stats().num_steps == 3


def test_a_launched_step_gives_its_tokens_one_step_later():
    engine = tiny_engine(async_scheduling=True)
    engine.add_request(prompt_of(3), greedy(2), "x")
    lengths = [[len(output.outputs[0].token_ids) for output in engine.step()] for _ in range(3)]
    assert lengths == [[], [1], [2]]
    assert_clean(engine)


@pytest.mark.parametrize(("num_decode_steps", "async_scheduling"), WAYS)
def test_text_ends_at_a_stop_string_in_the_middle_of_a_step(num_decode_steps, async_scheduling):
    prompt = prompt_of(6)
    ids = reference(prompt, greedy(16))
    stop = text_of(ids[6:8])
    first = text_of(ids).index(stop)
    options = {"num_decode_steps": num_decode_steps, "async_scheduling": async_scheduling}
    engine = tiny_engine(tokenizer=ascii_tokenizer(), **options)
    engine.add_request(prompt, greedy(16, stop=stop), "x", keeps_kv=True)
    outputs = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step())
    (completion,) = outputs["x"].outputs
    assert completion.finish_reason == "stop"
    assert completion.text == text_of(ids[:first])
    assert completion.token_ids == ids[: first + len(stop)]
    (kept,) = engine.take_kept("x")
    assert kept.token_ids == prompt + completion.token_ids
    assert kept.block_table.num_tokens == len(kept.token_ids) - 1
    assert len(kept.block_table) == -(-kept.block_table.num_tokens // BLOCK_SIZE)
    engine.scheduler.kv.drop(kept)
    assert_clean(engine)


@pytest.mark.parametrize("num_stops", [1, MAX_STOP_IDS + 4])
def test_a_row_stops_on_the_device_at_any_of_its_ids(num_stops):
    ids = reference(prompt_of(6), greedy(16))
    others = [token for token in range(100, 128) if token not in ids][: num_stops - 1]
    engine = tiny_engine(num_decode_steps=8)
    engine.add_request(prompt_of(6), greedy(16, stop_token_ids=[*others, ids[3]]), "x")
    (completion,) = run_all(engine)["x"].outputs
    assert completion.token_ids == ids[: ids.index(ids[3]) + 1]
    rows = build_decode_rows([8], [frozenset([*others, ids[3]])], 2)
    assert (rows.stop_ids[0] >= 0).sum() == min(num_stops, MAX_STOP_IDS)
    assert (rows.stop_ids[1] == -1).all()
    assert rows.num_decodes.tolist() == [8, 0]


def test_several_decodes_take_no_room_from_anyone():
    """With too few blocks for all of them there are fewer decodes, and not one preemption more."""
    engine = fake_engine(num_blocks=7, num_decode_steps=8)
    for i in range(3):
        engine.add_request([i] * 4, fake_greedy(4), str(i))
    outputs = run_fake(engine)
    assert engine.stats().num_preemptions == 0
    assert all(outputs[str(i)].outputs[0].token_ids == completion_reference([i] * 4, 4) for i in range(3))


def test_what_is_asked_of_a_request_in_flight_sees_its_token():
    engine = fake_engine(async_scheduling=True, num_decode_steps=2)
    engine.add_request([1, 2, 3], fake_greedy(9), "x")
    for _ in range(3):
        engine.step()
    fork = engine.fork("x")
    engine.append("x", [5])
    expected = completion_reference([1, 2, 3], 9)
    outputs = run_fake(engine)
    assert outputs[fork].outputs[0].token_ids == expected
    tokens = outputs["x"].outputs[0].token_ids
    known = tokens.index(5, 4) if tokens[:4] == expected[:4] else -1
    assert tokens == completion_reference([1, 2, 3], 9, outputs=tokens[: known + 1])


@pytest.mark.parametrize("params", [BeamSearchParams(beam_width=2, max_tokens=6), fake_greedy(0)])
def test_others_wait_for_their_tokens(params):
    """Beams and prompts alone among launched steps."""
    engine = fake_engine(async_scheduling=True, num_decode_steps=3)
    engine.add_request([4, 5, 6, 7, 8], params, "other")
    engine.add_request([1, 2, 3], fake_greedy(9), "x")
    outputs = run_fake(engine)
    assert outputs["x"].outputs[0].token_ids == completion_reference([1, 2, 3], 9)
    assert outputs["other"].finished


def test_an_abort_in_flight_frees_at_once():
    engine = fake_engine(async_scheduling=True, num_decode_steps=3)
    engine.add_request([1, 2, 3], fake_greedy(9), "x")
    engine.step()
    engine.step()
    output = engine.abort("x")
    assert output is not None
    assert output.outputs[0].token_ids == completion_reference([1, 2, 3], 9)[: len(output.outputs[0].token_ids)]
    assert engine.stats().num_free_blocks == engine.config.num_blocks
    engine.add_request([9, 9], fake_greedy(5), "x")
    assert run_fake(engine)["x"].outputs[0].token_ids == completion_reference([9, 9], 5)


def test_a_failure_of_a_launched_step_is_seen_by_the_next_and_recomputed(monkeypatch):
    """Its error is in its tokens: the pool that it gave is of no use either."""
    engine = tiny_engine(async_scheduling=True)
    prompts = {str(i): prompt_of(5 + i, i) for i in range(3)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(8), name)
    for _ in range(3):
        engine.step()

    class Lost:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            for array in jax.tree.leaves(engine.runner.kv_cache):
                array.delete()
            raise RuntimeError("the device is out of order")

    assert engine._in_flight is not None
    engine._in_flight.tokens = Lost()
    with pytest.raises(RuntimeError, match="out of order"):
        engine.step()
    outputs = run_all(engine)
    assert all(outputs[name].outputs[0].token_ids == reference(p, greedy(8)) for name, p in prompts.items())


@pytest.mark.parametrize(
    ("name", "value"), [("num_decode_steps", 0), ("num_decode_steps", 1.5), ("async_scheduling", 1)]
)
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        unchecked_engine(**{name: value})
