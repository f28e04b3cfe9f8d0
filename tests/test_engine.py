"""The engine end to end on a tiny random model: the tokens of a request alone, in every state and after failures."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ascii_tokenizer,
    assert_clean,
    assert_greedy,
    dense_logits,
    fill_pool,
    greedy,
    naive_greedy,
    pool_of,
    prompt_of,
    reference,
    run_all,
    text_of,
    tiny_engine,
    tiny_llm,
    unchecked_engine,
    unchecked_llm,
)

from pagedjax.batch import build_batch
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.request import Request, RequestStatus

RANDOM = {"temperature": 20.0, "seed": 7, "ignore_eos": True}
"""The tiny model's logits are far apart: at this temperature about ten tokens are likely."""


def ids_of(outputs) -> list[list[int]]:
    return [completion.token_ids for completion in outputs.outputs]


def waiting(engine) -> list[Request]:
    return engine.scheduler.requests(engine.scheduler.waiting)


# What the other tests rest on.


def test_the_tiny_model_needs_its_whole_context():
    prompt = prompt_of(24)
    expected = naive_greedy(prompt, 12)
    assert len(set(expected)) > 6, "a text that repeats itself hides mistakes"
    for i in range(len(prompt)):
        changed = [*prompt[:i], (prompt[i] + 1) % VOCAB_SIZE, *prompt[i + 1 :]]
        assert naive_greedy(changed, 12) != expected
    with pytest.raises(AssertionError, match="not greedy"):
        assert_greedy(prompt, [*expected[:5], expected[5] ^ 1])


def test_a_request_alone_is_the_naive_loop():
    for length in (1, 7, 16, 40):
        prompt = prompt_of(length, length)
        assert reference(prompt, greedy(20)) == naive_greedy(prompt, 20)


# B01 to B22 of the engine.


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_b01_the_same_prompt_three_times(fill):
    engine = tiny_engine(block_size=16)
    fill_pool(engine, fill)
    for length in (1, 15, 16, 17, 31, 32, 33):
        prompt = prompt_of(length, length)
        expected = naive_greedy(prompt, 4)
        num_cached = (length - 1) // 16 * 16  # full blocks, without the last token: 16 of 32
        for i in range(3):  # one after another
            engine.add_request(prompt, greedy(4))
            (output,) = run_all(engine).values()
            assert ids_of(output) == [expected]
            assert output.num_cached_tokens == (num_cached if i else 0)
        for _ in range(3):  # and together
            engine.add_request(prompt, greedy(4))
        outputs = list(run_all(engine).values())
        assert [ids_of(output) for output in outputs] == [[expected]] * 3
        assert [output.num_cached_tokens for output in outputs] == [num_cached] * 3
        engine.add_request(prompt, greedy(1))
        (output,) = run_all(engine).values()
        assert ids_of(output) == [expected[:1]]
        assert output.num_cached_tokens == num_cached


def test_b01_blocks_of_one_token():
    engine = tiny_engine(block_size=1)
    for _ in range(3):
        engine.add_request([5], greedy(4))
        (output,) = run_all(engine).values()
        assert ids_of(output) == [naive_greedy([5], 4)]
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("fill", [0.0, np.nan])
@pytest.mark.parametrize(("budget", "num_blocks"), [(24, 9), (3, 8)])  # with chunks of 3 the peak is 8 blocks
def test_b06_a_preempted_request_replays_its_outputs(budget, num_blocks, fill, enable_prefix_caching):
    options = {"max_num_batched_tokens": budget, "enable_prefix_caching": enable_prefix_caching}
    engine = tiny_engine(num_blocks, tokenizer=ascii_tokenizer(), **options)
    fill_pool(engine, fill)
    prompts = {str(i): prompt_of(10, i) for i in range(2)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(10), name)
    requests = waiting(engine)
    streamed = {name: [("", 0)] for name in prompts}
    while engine.has_unfinished():
        for output in engine.step():
            (completion,) = output.outputs
            assert output.prompt_token_ids == prompts[output.request_id]  # usage: 10 prompt tokens, before and after
            streamed[output.request_id].append((completion.text, len(completion.token_ids)))
    for name, prompt in prompts.items():
        expected = naive_greedy(prompt, 10)
        # Every delta is one token, sent once.
        assert streamed[name] == [(text_of(expected[:n]), n) for n in range(11)]
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert engine.stats().num_preemptions == 1
    assert_clean(engine)


def test_b06_preempted_twice():
    engine = tiny_engine(7)
    sizes = [(8, 5), (4, 17), (6, 8)]  # (prompt, outputs)
    for i, (length, max_tokens) in enumerate(sizes):
        engine.add_request(prompt_of(length, i), greedy(max_tokens), str(i))
    requests = waiting(engine)
    finished = run_all(engine)
    for i, (length, max_tokens) in enumerate(sizes):
        assert ids_of(finished[str(i)]) == [naive_greedy(prompt_of(length, i), max_tokens)]
    assert [request.num_preemptions for request in requests] == [0, 0, 2]


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_b12_a_pool_of_exactly_the_right_size(length):
    for max_tokens in (1, 4, 5):
        num_blocks = -(-(length + max_tokens - 1) // BLOCK_SIZE)
        engine = tiny_engine(num_blocks)
        fill_pool(engine, np.nan)
        engine.add_request(prompt_of(length), greedy(max_tokens))
        (output,) = run_all(engine).values()
        assert ids_of(output) == [naive_greedy(prompt_of(length), max_tokens)]
        assert output.outputs[0].finish_reason == "length"
        stats = engine.stats()
        assert (stats.num_preemptions, stats.num_steps, stats.peak_blocks_used) == (0, max_tokens, num_blocks)


def test_b12_a_device_pool_that_is_no_larger_than_what_is_handed_out():
    engine = tiny_engine(3, pool_blocks=3)
    assert len(pool_of(engine)[0]) == 4  # and the null block
    fill_pool(engine, np.nan)
    engine.add_request(prompt_of(8), greedy(5))
    (output,) = run_all(engine).values()
    assert ids_of(output) == [naive_greedy(prompt_of(8), 5)]
    assert engine.stats().peak_blocks_used == 3


def test_b13_the_edge_of_max_model_len():
    engine = tiny_engine(max_model_len=16)
    engine.add_request(prompt_of(15), greedy(10))
    (output,) = run_all(engine).values()
    assert ids_of(output) == [naive_greedy(prompt_of(15), 1)]
    assert output.outputs[0].finish_reason == "length"
    for length in (16, 17):
        with pytest.raises(ValueError, match=f"prompt has {length} tokens .* expected 1 to 15.*max_model_len is 16"):
            engine.add_request(prompt_of(length), greedy(10))
    engine.add_request(prompt_of(14), greedy(None))
    (output,) = run_all(engine).values()
    assert ids_of(output) == [naive_greedy(prompt_of(14), 2)]


def test_b13_a_model_len_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len must be at most .*256.*, got 257"):
        tiny_llm(max_model_len=257)


def test_b16_a_request_that_can_never_fit():
    engine = tiny_engine(4)
    with pytest.raises(ValueError, match=r"prompt has 20 tokens \(5 blocks of 4\).* 4 blocks"):
        engine.add_request(prompt_of(20), greedy(4))
    with pytest.raises(ValueError, match="can never fit"):
        engine.add_request(prompt_of(20), greedy(4, n=3))
    engine.add_request(prompt_of(4), greedy(4))
    (output,) = run_all(engine).values()
    assert ids_of(output) == [naive_greedy(prompt_of(4), 4)]

    engine.add_request(prompt_of(10), greedy(50))
    (output,) = run_all(engine, max_steps=10).values()
    assert ids_of(output) == [naive_greedy(prompt_of(10), 7)]  # 16 slots, and the last token needs none
    assert output.outputs[0].finish_reason == "length"
    assert engine.stats().num_preemptions == 0

    engine.add_request(prompt_of(10), greedy(3, n=8))  # one after another: the pool holds one at a time
    (output,) = run_all(engine).values()
    assert ids_of(output) == [naive_greedy(prompt_of(10), 3)] * 8


def test_b16_generate_does_not_hang():
    llm = tiny_llm(num_blocks=4)
    with pytest.raises(ValueError, match=r"prompts\[0\]: .*can never fit"):
        llm.generate([prompt_of(20), prompt_of(4)], greedy(4), use_tqdm=False)
    assert_clean(llm.engine)
    (output,) = llm.generate(prompt_of(10), greedy(50), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 7


@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "num_swap_blocks": 20}])
@pytest.mark.parametrize("num_blocks", [6, 5])
def test_b17_no_livelock(num_blocks, options):
    engine = tiny_engine(num_blocks, **options)
    for i in range(4):
        engine.add_request(prompt_of(8, i), greedy(12), str(i))
    oldest = waiting(engine)[0]
    finished = run_all(engine, max_steps=150)
    for i in range(4):
        assert ids_of(finished[str(i)]) == [naive_greedy(prompt_of(8, i), 12)]
    assert engine.stats().num_preemptions >= 1
    assert oldest.num_preemptions == 0


X_PARAMS = SamplingParams(**RANDOM, max_tokens=12)


def bring_to(state: str, n: int):
    """An engine with an old request that decodes for long, and `x` in the given state; what it said so far."""
    engine = tiny_engine(num_blocks=10 + 2 * n if state == "preempted" else 60, max_num_batched_tokens=16)
    engine.add_request(prompt_of(6), greedy(40), "other")
    for _ in range(3):
        engine.step()
    prompt = prompt_of(20 if state == "mid-chunk" else 8, 1)
    params = dataclasses.replace(X_PARAMS, n=n)
    if state in ("finished", "preempted"):
        params = dataclasses.replace(params, max_tokens=3 if state == "finished" else 40)
    if state == "one sibling finished":
        full = [reference(prompt, params, i) for i in range(n)]
        # The token at which sibling 1 stops, before any other: it says it early, the others late or never.
        first = [full[1][k] for k in range(6)]
        stop = next(t for t in first if all(t not in full[i][:9] for i in range(n) if i != 1))
        params = dataclasses.replace(params, stop_token_ids=[stop])
    engine.add_request(prompt, params, "x")
    children = waiting(engine)
    assert [child.request_id for child in children] == (["x"] if n == 1 else [f"x[{i}]" for i in range(n)])

    reached = {
        "waiting": lambda: True,
        "mid-chunk": lambda: 0 < children[0].num_computed_tokens < 20,
        "decoding": lambda: all(child.num_output_tokens >= 2 for child in children),
        "preempted": lambda: any(child.status is RequestStatus.PREEMPTED for child in children),
        "finished": lambda: all(child.is_finished for child in children),
        "one sibling finished": lambda: children[1 % n].is_finished,
    }[state]
    last = None
    while not reached():
        assert engine.has_unfinished(), "never reached"
        for output in engine.step():
            if output.request_id == "x":
                last = output
    assert "other" in engine.scheduler.running
    return engine, children, last


B20_STATES = [
    (state, n)
    for n in (1, 3)
    for state in ("waiting", "mid-chunk", "decoding", "preempted", "finished", "one sibling finished")
    if n > 1 or state != "one sibling finished"
]


@pytest.mark.parametrize("moment", ["between steps", "before the batch is built", "during the device call"])
@pytest.mark.parametrize(("state", "n"), B20_STATES)
def test_b20_abort_in_every_state(state, n, moment, monkeypatch):
    engine, children, last = bring_to(state, n)
    was_finished = [child.is_finished for child in children]
    tokens = [list(child.token_ids) for child in children]
    assert engine.abort("unknown") is None
    assert engine.abort("x[0]") is None, "the id of a child is no request's"
    before = engine.stats().num_finished
    aborted = []

    def abort_twice():
        aborted.append(engine.abort("x"))
        assert engine.abort("x") is None

    seen = []
    if moment == "between steps":
        abort_twice()
    elif moment == "before the batch is built":
        scheduled = engine.scheduler.schedule()
        abort_twice()
        batch = build_batch(scheduled, engine.config)
        engine.runner.copy_blocks(scheduled.copies)
        sampled = engine.runner.run(batch)
        updated = engine.scheduler.update(scheduled, sampled[: len(scheduled.sampling)])
        outputs = engine.outputs.process(updated, engine.scheduler)
        for output in outputs:
            if output.finished:
                engine.outputs.discard(output.request_id)
        seen += outputs
    else:
        run = engine.runner.run

        def run_and_abort(batch):
            if not aborted:
                abort_twice()
            return run(batch)

        monkeypatch.setattr(engine.runner, "run", run_and_abort)
        seen += engine.step()
    while engine.has_unfinished():
        seen += engine.step()
    assert_clean(engine)

    (final,) = aborted
    if state == "finished":
        assert final is None
        assert last is not None
        assert last.finished
        assert [completion.finish_reason for completion in last.outputs] == ["length"] * n
    else:
        assert final is not None
        assert final.finished
        reasons = [completion.finish_reason for completion in final.outputs]
        assert reasons == ["stop" if done else "abort" for done in was_finished]
        # What it had said before still counts; what the device computes for it afterwards does not.
        assert ids_of(final) == [
            ids[len(child.prompt_token_ids) :] for ids, child in zip(tokens, children, strict=True)
        ]
    assert [child.token_ids for child in children] == tokens
    assert {output.request_id for output in seen} == {"other"}
    assert engine.stats().num_finished == before + (final is not None) + 1
    assert ids_of(seen[-1]) == [naive_greedy(prompt_of(6), 40)]
    assert engine.abort("other") is None


def test_b22_an_id_is_unique_while_its_request_is_unfinished():
    engine = tiny_engine()
    assert engine.add_request(prompt_of(10), greedy(5), "x") == "x"
    with pytest.raises(ValueError, match="'x' is in use"):
        engine.add_request(prompt_of(6), greedy(5), "x")
    engine.step()
    with pytest.raises(ValueError, match="'x' is in use"):
        engine.add_request(prompt_of(6), greedy(5), "x")
    engine.abort("x")
    engine.add_request(prompt_of(6, 1), greedy(5), "x")
    assert ids_of(run_all(engine)["x"]) == [naive_greedy(prompt_of(6, 1), 5)]
    engine.add_request(prompt_of(10), greedy(5), "x")
    assert ids_of(run_all(engine)["x"]) == [naive_greedy(prompt_of(10), 5)]


def test_b22_ids_that_look_like_those_of_children():
    engine = tiny_engine()
    engine.add_request(prompt_of(5), greedy(3), "x[1]")
    with pytest.raises(ValueError, match=r"'x\[1\]' is in use"):
        engine.add_request(prompt_of(5), greedy(3, n=2), "x")
    assert list(engine.scheduler.waiting) == ["x[1]"], "half of it was queued"
    engine.add_request(prompt_of(6), greedy(4, n=2), "y")
    for name in ("y", "y[0]", "y[1]"):
        with pytest.raises(ValueError, match="is in use"):
            engine.add_request(prompt_of(5), greedy(3), name)
    engine.add_request(prompt_of(7), greedy(2), "y[2]")
    finished = run_all(engine)
    assert {name: ids_of(output) for name, output in finished.items()} == {
        "x[1]": [naive_greedy(prompt_of(5), 3)],
        "y": [naive_greedy(prompt_of(6), 4)] * 2,
        "y[2]": [naive_greedy(prompt_of(7), 2)],
    }


def test_b22_fresh_ids_avoid_those_in_use():
    engine = tiny_engine()
    engine.add_request(prompt_of(5), greedy(3), "0")
    engine.add_request(prompt_of(5), greedy(3), "2")
    assert [engine.add_request(prompt_of(5), greedy(3)) for _ in range(3)] == ["1", "3", "4"]
    engine.add_request(prompt_of(5), greedy(3), "5[1]")  # a name that the next one's child would have
    assert engine.add_request(prompt_of(5), greedy(3, n=2)) == "6"
    assert len(run_all(engine)) == 7


# Prompts.


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello!",
        [72, 101, 108, 108, 111, 33],
        (72, 101, 108, 108, 111, 33),
        np.array([72, 101, 108, 108, 111, 33]),
        np.array([72, 101, 108, 108, 111, 33], np.uint8),
        jnp.array([72, 101, 108, 108, 111, 33]),
        [np.int64(72), 101, 108, np.int32(108), 111, 33],
        {"prompt": "Hello!"},
        {"prompt_token_ids": [72, 101, 108, 108, 111, 33]},
        {"prompt_token_ids": np.array([72, 101, 108, 108, 111, 33])},
    ],
    ids=repr,
)
def test_a_prompt_of_every_shape(prompt):
    llm = unchecked_llm()
    ids = [72, 101, 108, 108, 111, 33]
    expected = naive_greedy(ids, 6)
    for outputs in (
        llm.generate(prompt, greedy(6), use_tqdm=False),
        llm.generate([prompt], greedy(6), use_tqdm=False),
        llm.generate([prompt, [1, 2]], greedy(6), use_tqdm=False)[:1],
    ):
        (output,) = outputs
        is_text = isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt" in prompt)
        assert output.prompt == ("Hello!" if is_text else None)
        assert output.prompt_token_ids == ids
        assert all(type(i) is int for i in output.prompt_token_ids)
        assert ids_of(output) == [expected]
        assert output.outputs[0].text == text_of(expected)
    assert_clean(llm.engine)


def test_an_array_of_prompts():
    outputs = unchecked_llm().generate(np.arange(6).reshape(2, 3), greedy(4), use_tqdm=False)
    assert [ids_of(output) for output in outputs] == [[naive_greedy([0, 1, 2], 4)], [naive_greedy([3, 4, 5], 4)]]


BAD_PROMPTS = {
    "negative": ([1, -1], r"in \[0, 128\), the vocabulary, got -1"),
    "V": ([1, VOCAB_SIZE], r"in \[0, 128\), the vocabulary, got 128"),
    "2**32-1": ([4294967295], "got 4294967295"),
    "2**70": ([1, 2**70], "flat list of ints|got 1180591620717411303424"),
    "bool": ([True, 2], "flat list of ints"),
    "numpy bool": (np.array([True]), "flat list of ints"),
    "float": ([1.0, 2.0], "flat list of ints"),
    "numpy float": (np.array([1.0]), "flat list of ints"),
    "words": ([1, "a"], "ints|got int"),
    "none inside": ([1, None], "ints|got int"),
    "empty": ([], "empty"),
    "empty text": ("", "empty"),
    "empty array": (np.array([], np.int32), "empty"),
    "empty array of floats": (np.array([]), "empty|flat list of ints"),
    "nested": ([[1, 2], [3, 4]], "flat list of ints"),
    "ragged": ([[1, 2], [3]], "flat list of ints"),
    "0-d array": (np.array(5), "flat list of ints"),
    "2-d array": (np.zeros((2, 3), np.int32), "flat list of ints"),
    "bytes": (b"abc", "got bytes"),
    "none": (None, "got NoneType"),
    "int": (3, "got int"),
    "set": ({1, 2}, "got set"),
    "empty mapping": ({}, "must have the key"),
    "unknown key": ({"text": "a"}, "must have the key"),
    "both keys": ({"prompt": "a", "prompt_token_ids": [1]}, "must have the key"),
    "too long": (prompt_of(MAX_MODEL_LEN), "can never fit"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_is_queued(name):
    bad, message = BAD_PROMPTS[name]
    engine = unchecked_engine(tokenizer=ascii_tokenizer())
    engine.add_request(prompt_of(5), greedy(3), "good")
    for n in (1, 2):
        with pytest.raises(ValueError, match=message):
            engine.add_request(bad, greedy(3, n=n), "bad")
        assert list(engine.scheduler.waiting) == list(engine.outputs.groups) == ["good"]
    assert ids_of(run_all(engine)["good"]) == [naive_greedy(prompt_of(5), 3)]


def test_a_bad_prompt_among_good_ones_names_itself_and_leaves_nothing():
    llm = unchecked_llm()
    for bad, message in BAD_PROMPTS.values():
        with pytest.raises(ValueError, match=rf"prompts\[1\]: .*({message})"):
            llm.generate(["good", bad, "good"], greedy(3), use_tqdm=False)
        assert_clean(llm.engine)
    assert llm.stats().num_steps == 0


def test_text_without_a_tokenizer():
    llm = tiny_llm(tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: pass token ids"):
        llm.generate("Hello", greedy(3), use_tqdm=False)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([1, 2], greedy(3, stop="a"), use_tqdm=False)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])
    (output,) = llm.generate([1, 2], greedy(3), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert ids_of(output) == [naive_greedy([1, 2], 3)]


# Ends.


def first_new(ids: list[int], start: int = 3) -> int:
    """An index from `start` on whose token was not there before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def finish(params: SamplingParams, prompt: list[int], eos: int | None = None):
    engine = tiny_engine(tokenizer=ascii_tokenizer(), eos_token_ids=() if eos is None else (eos, 3))
    for i in range(2):  # an ordinary neighbour on either side
        engine.add_request(prompt_of(9, 5), greedy(20), f"before {i}")
    engine.add_request(prompt, params, "x")
    engine.add_request(prompt_of(4, 6), greedy(20), "after")
    finished = run_all(engine)
    assert ids_of(finished["after"]) == [naive_greedy(prompt_of(4, 6), 20)]
    (completion,) = finished["x"].outputs
    return completion


def test_end_of_sequence_and_stop_tokens():
    prompt = prompt_of(10)
    ids = naive_greedy(prompt, 20)
    cut = first_new(ids)
    stop = ids[cut]
    eos_params = SamplingParams(temperature=0.0, max_tokens=20)

    done = finish(eos_params, prompt, eos=stop)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[: cut + 1], "stop", None)
    done = finish(dataclasses.replace(eos_params, ignore_eos=True), prompt, eos=stop)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids, "length", None)
    done = finish(greedy(20, stop_token_ids=[stop]), prompt)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[: cut + 1], "stop", stop)
    done = finish(greedy(20, stop_token_ids=[stop]), prompt, eos=stop)  # ignore_eos takes only the model's own away
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[: cut + 1], "stop", stop)
    done = finish(greedy(cut + 1, stop_token_ids=[stop]), prompt)  # the limit is reached as well
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[: cut + 1], "stop", stop)
    with pytest.raises(ValueError, match="stop_token_ids must be below the vocabulary size 128, got 128"):
        finish(greedy(20, stop_token_ids=[VOCAB_SIZE]), prompt)


def test_llm_takes_the_end_of_sequence_ids_of_the_model():
    ids = naive_greedy(prompt_of(10), 20)
    stop = ids[first_new(ids)]
    llm = tiny_llm()
    assert llm.engine.requests._eos_token_ids == frozenset()
    model = type(llm.engine.runner.model)(dataclasses.replace(llm.engine.runner.model.config, eos_token_ids=(stop,)))
    llm = type(llm)(
        model, params=llm.engine.runner.params, num_blocks=64, block_size=4, max_model_len=64, warm_up=False
    )
    assert llm.engine.requests._eos_token_ids == {stop}


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include):
    prompt = prompt_of(10)
    ids = naive_greedy(prompt, 20)
    cut = first_new(ids)
    stop = text_of(ids[cut - 1 : cut + 1])  # over two tokens
    assert text_of(ids).find(stop) == cut - 1
    for params in (
        greedy(20, stop=stop, include_stop_str_in_output=include),
        greedy(20, stop=["never said", stop], include_stop_str_in_output=include),
        greedy(cut + 1, stop=[stop], include_stop_str_in_output=include),  # the limit is reached as well
    ):
        done = finish(params, prompt)
        assert done.token_ids == ids[: cut + 1]
        assert done.text == text_of(ids[: cut + 1] if include else ids[: cut - 1])
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    done = finish(greedy(cut, stop=stop, include_stop_str_in_output=include), prompt)
    assert (done.text, done.finish_reason, done.stop_reason) == (text_of(ids[:cut]), "length", None)


def test_a_possible_stop_string_is_held_back_and_then_shown():
    prompt = prompt_of(10)
    ids = naive_greedy(prompt, 12)
    stop = text_of(ids[2:5]) + "never"
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    engine.add_request(prompt, greedy(12, stop=stop), "x")
    texts = []
    while engine.has_unfinished():
        texts += [output.outputs[0].text for output in engine.step()]
    shown = [min(n, 2) if n < 6 else n for n in range(1, 13)]
    assert texts == [text_of(ids[:n]) for n in shown]
    assert_clean(engine)


def test_no_text_without_detokenize():
    done = finish(greedy(5, detokenize=False), prompt_of(10))
    assert (done.token_ids, done.text) == (naive_greedy(prompt_of(10), 5), "")


# n completions.


def test_n_completions_are_n_streams_in_order():
    params = SamplingParams(**RANDOM, n=3, max_tokens=8)
    prompt = prompt_of(6)
    expected = [reference(prompt, params, i) for i in range(3)]
    assert len({tuple(ids) for ids in expected}) == 3
    for num_blocks in (64, 6):  # with room for all, and for little more than one
        engine = tiny_engine(num_blocks)
        engine.add_request(prompt_of(4, 3), greedy(6), "other")
        engine.add_request(prompt, params, "x")
        finished = run_all(engine)
        assert [completion.index for completion in finished["x"].outputs] == [0, 1, 2]
        assert ids_of(finished["x"]) == expected
        assert ids_of(finished["other"]) == [naive_greedy(prompt_of(4, 3), 6)]


def test_more_completions_than_sequences_in_a_step():
    engine = tiny_engine(max_num_seqs=8)
    params = SamplingParams(**RANDOM, n=11, max_tokens=4)
    engine.add_request(prompt_of(6), params, "x")
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.finished for output in outputs].count(True) == 1
    final = outputs[-1]
    assert [completion.index for completion in final.outputs] == list(range(11))
    assert all(completion.finish_reason == "length" for completion in final.outputs)
    assert ids_of(final)[:3] == [reference(prompt_of(6), params, i) for i in range(3)]
    assert engine.stats().num_finished == 1
    assert engine.stats().num_prompt_tokens == 6
    assert engine.stats().num_output_tokens == 44


# Offline use.


def test_generate_is_in_the_order_of_the_prompts():
    llm = tiny_llm()
    lengths = [30, 1, 17, 4, 9, 22, 2, 12, 40, 3, 8]
    max_tokens = [2, 20, 5, 9, 1, 12, 20, 3, 8, 15, 4]
    prompts = [prompt_of(length, i) for i, length in enumerate(lengths)]
    outputs = llm.generate(prompts, [greedy(n) for n in max_tokens], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, prompt, n in zip(outputs, prompts, max_tokens, strict=True):
        assert ids_of(output) == [naive_greedy(prompt, n)]
        assert output.finished
    assert_clean(llm.engine)
    assert llm.generate([], greedy(3), use_tqdm=False) == []
    with pytest.raises(ValueError, match="sampling_params must be one for all or one per prompt: 2 for 3"):
        llm.generate(prompts[:3], [greedy(3)] * 2, use_tqdm=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_generate_leaves_nothing_behind_after_a_failure(error, moment, monkeypatch):
    llm = tiny_llm()
    runner, calls = llm.engine.runner, itertools.count()
    run = runner.run

    def fails_in_the_third_step(batch):
        if next(calls) != 3:
            return run(batch)
        if moment == "after":
            run(batch)
        raise error("planted")

    monkeypatch.setattr(runner, "run", fails_in_the_third_step)
    prompts = [prompt_of(length, length) for length in (5, 20, 30)]
    with pytest.raises(error, match="planted"):
        llm.generate(prompts, greedy(10, n=2), use_tqdm=False)
    assert_clean(llm.engine)
    outputs = llm.generate(prompts, greedy(10), use_tqdm=False)
    assert [ids_of(output) for output in outputs] == [[naive_greedy(prompt, 10)] for prompt in prompts]


def test_generate_leaves_other_requests_alone():
    llm = tiny_llm()
    llm.engine.add_request(prompt_of(6), greedy(30), "mine")
    llm.engine.step()
    with pytest.raises(ValueError):
        llm.generate([[1, 2], [-1]], greedy(3), use_tqdm=False)
    (output,) = llm.generate([1, 2], greedy(3), use_tqdm=False)
    assert ids_of(output) == [naive_greedy([1, 2], 3)]
    assert ids_of(run_all(llm.engine)["mine"]) == [naive_greedy(prompt_of(6), 30)]


def test_two_engines_in_one_process():
    engines = [tiny_engine(), tiny_engine(9), tiny_engine(block_size=16)]
    for i, engine in enumerate(engines):
        fill_pool(engine, np.nan)
        for k in range(3):
            engine.add_request(prompt_of(7 + k, 10 * i + k), greedy(9), str(k))
    outputs = [{} for _ in engines]
    while any(engine.has_unfinished() for engine in engines):
        for engine, seen in zip(engines, outputs, strict=True):
            seen |= {output.request_id: ids_of(output) for output in engine.step()}
    for i, engine in enumerate(engines):
        assert_clean(engine)
        assert outputs[i] == {str(k): [naive_greedy(prompt_of(7 + k, 10 * i + k), 9)] for k in range(3)}


def test_unseeded_requests_differ_and_follow_the_engines_seed():
    params = SamplingParams(temperature=20.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        llm = tiny_llm(seed=seed)
        runs.append([ids_of(output) for output in llm.generate([prompt_of(6)] * 2, params, use_tqdm=False)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_stats():
    engine = tiny_engine(20)
    engine.add_request(prompt_of(10), greedy(5), "a")
    engine.add_request(prompt_of(20), greedy(5), "b")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.num_blocks) == (0, 2, 20, 20)
    engine.step()  # 10 tokens of a, 14 of b
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.num_steps) == (2, 0, 20 - 3 - 4, 1)
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_finished) == (30, 1, 0)
    run_all(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 20)
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_finished) == (30, 10, 2)
    assert stats.peak_blocks_used == 4 + 6
    assert stats.num_preemptions == 0


def test_dense_logits_do_not_see_their_padding():
    prompt = prompt_of(20)
    assert np.array_equal(dense_logits(prompt)[:9], dense_logits(prompt[:9]))


# Callers that share, change or lose things.


def test_outputs_belong_to_the_caller():
    params = SamplingParams(temperature=20.0, seed=1, max_tokens=6, n=2)
    expected = [reference(prompt_of(5), params, i) for i in range(2)]
    engine = tiny_engine()
    engine.add_request(prompt_of(5), params)
    while engine.has_unfinished():
        for output in engine.step():
            seen = [list(completion.token_ids) for completion in output.outputs]
            assert output.prompt_token_ids == prompt_of(5)
            output.prompt_token_ids.clear()
            output.outputs[0].token_ids.clear()
    assert seen == expected


def test_generate_does_not_lose_what_others_wait_for():
    llm = tiny_llm()
    llm.engine.add_request(prompt_of(6), greedy(3), "mine")
    llm.generate([[1, 2]], greedy(12), use_tqdm=False)
    assert llm.engine.has_unfinished()
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.engine.add_request([1], greedy(1), "mine")
    llm.generate([[1, 2]], greedy(2), use_tqdm=False)
    assert ids_of(run_all(llm.engine)["mine"]) == [naive_greedy(prompt_of(6), 3)]


def test_an_iterator_of_prompts_loses_none():
    llm = tiny_llm()
    prompts = ["ab", "cd", "ef"]
    several: Any = iter(prompts)
    outputs = llm.generate(several, greedy(2), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts


class UnhashableTokenizer:
    """`Detokenizer` refuses it, after the prompt was accepted."""

    __hash__: Any = None


def test_a_request_whose_text_cannot_be_made_is_not_queued_by_half():
    engine = tiny_engine(tokenizer=UnhashableTokenizer())
    with pytest.raises(TypeError):
        engine.add_request([1, 2], greedy(3, n=2))
    assert_clean(engine)


def test_b67_a_detokenizer_that_fails_ends_one_request(monkeypatch):
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    for i in range(3):
        engine.add_request(prompt_of(5, i), greedy(3), str(i))
    engine.step()
    detokenizer = engine.outputs.groups["1"].completions[0].detokenizer

    def fails(token_ids):
        raise RuntimeError("planted")

    monkeypatch.setattr(detokenizer, "append", fails)
    finished = run_all(engine)
    assert [finished[str(i)].outputs[0].finish_reason for i in range(3)] == ["length", "error", "length"]
    for i in (0, 2):
        ids = naive_greedy(prompt_of(5, i), 3)
        assert ids_of(finished[str(i)]) == [ids]
        assert finished[str(i)].outputs[0].text == text_of(ids)


def test_an_interrupt_while_tokens_are_handed_out(monkeypatch):
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    for i in range(3):
        engine.add_request(prompt_of(5, i), greedy(6), str(i))
    engine.step()
    resolve = engine.scheduler.resolve

    def interrupted(scheduled, sampled, *args):
        def tokens():
            yield sampled[0]
            raise KeyboardInterrupt

        return resolve(scheduled, tokens(), *args)

    monkeypatch.setattr(engine.scheduler, "resolve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    finished = run_all(engine)
    for i in range(3):
        ids = naive_greedy(prompt_of(5, i), 6)
        assert ids_of(finished[str(i)]) == [ids]
        assert finished[str(i)].outputs[0].text == text_of(ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", "16"),
        ("max_num_seqs", 0),
        ("max_model_len", "16"),
        ("max_model_len", 0),
        ("gpu_memory_utilization", 2),
        ("gpu_memory_utilization", "x"),
        ("seed", None),
        ("seed", 1.5),
        ("max_num_seqs", None),
        ("preemption", "x"),
        ("num_swap_blocks", False),
        ("num_swap_blocks", -1),
        ("scheduling_policy", "x"),
        ("num_decode_steps", 10**9),
    ],
)
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must"):
        unchecked_llm(**{"num_blocks": None, name: value})


def test_an_abort_whose_text_fails_leaves_nothing_behind(monkeypatch):
    engine = tiny_engine(tokenizer=ascii_tokenizer())
    engine.add_request(prompt_of(5), greedy(9, n=2), "a")
    engine.step()

    def fails():
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.outputs.groups["a"].completions[0].detokenizer, "finish", fails)
    output = engine.abort("a")
    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    assert_clean(engine)
