"""Fork, append, free: requests that go on in two ways, handles on KV, pinned prefixes. On the fake device."""

from typing import Any, cast

import pytest
from fake_device import VOCAB_SIZE, completion_reference, device_of, fake_engine, greedy, run
from tiny_engine import greedy as tiny_greedy
from tiny_engine import naive_greedy, prompt_of, tiny_llm, unchecked_llm

from pagedjax.beams.params import BeamSearchParams
from pagedjax.blocks.table import UseAfterFreeError
from pagedjax.engine import LLMEngine
from pagedjax.sampling.params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def running(num_steps: int, params: SamplingParams | None = None, **options) -> LLMEngine:
    """An engine with request "x", which has `num_steps` of its outputs."""
    engine = fake_engine(**options)
    engine.add_request(PROMPT, params or greedy(), "x")
    for _ in range(num_steps):
        engine.step()
    return engine


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_a_fork_goes_on_from_where_its_parent_is(num_steps):
    engine = running(num_steps)
    assert engine.fork("x", new_id="y") == "y"
    outputs = run(engine)
    expected = completion_reference(PROMPT, 8)
    assert [outputs[name].outputs[0].token_ids for name in ("x", "y")] == [expected, expected]
    if num_steps:  # else both began with nothing, in the same step
        assert device_of(engine).num_tokens == 17 + 8 - num_steps, "something was computed twice"
        assert device_of(engine).num_copies == ((len(PROMPT) + num_steps - 1) % 4 != 0), "a partly filled block, once"


def test_a_fork_of_a_sampled_request_has_a_stream_of_its_own_and_the_same_one_every_time():
    def forked() -> list[list[int]]:
        engine = running(2, SamplingParams(temperature=1.0, seed=5, max_tokens=8))
        names = ["x", engine.fork("x"), engine.fork("x"), engine.fork("x", SamplingParams(seed=9, max_tokens=6))]
        outputs = run(engine)
        return [outputs[name].outputs[0].token_ids for name in names]

    tokens = forked()
    assert tokens[0] == completion_reference(PROMPT, 8, seed=5)
    assert all(ids[:2] == tokens[0][:2] for ids in tokens)
    assert len(set(map(tuple, tokens))) == 4
    assert tokens[3] == completion_reference(PROMPT, 6, seed=9, outputs=tokens[0][:2])
    assert tokens == forked()


def test_a_fork_stands_behind_its_parent():
    engine = running(1, max_num_seqs=2)
    engine.add_request([1, 2, 3], greedy(), "later")
    engine.step()
    engine.fork("x", new_id="y")
    engine.step()
    assert list(engine.scheduler.running) == ["x", "y"]
    assert list(engine.scheduler.waiting) == ["later"], "there are rows for two, and the newest makes room"
    outputs = run(engine)
    assert outputs["later"].outputs[0].token_ids == completion_reference([1, 2, 3], 8)


def test_appended_tokens_count_as_outputs():
    engine = running(2)
    fork = engine.fork("x")
    engine.append(fork, [7, 8, 9])
    outputs = run(engine)
    known = [*completion_reference(PROMPT, 2), 7, 8, 9]
    assert outputs[fork].outputs[0].token_ids == completion_reference(PROMPT, 8, outputs=known)
    assert outputs["x"].outputs[0].token_ids == completion_reference(PROMPT, 8)


def test_free_ends_one_branch_alone():
    engine = running(2)
    fork = engine.fork("x")
    engine.free("x")
    with pytest.raises(ValueError, match="no unfinished request has the id 'x'"):
        engine.free("x")
    assert run(engine)[fork].outputs[0].token_ids == completion_reference(PROMPT, 8)


def test_what_cannot_be_forked_or_appended_to_is_refused():
    engine = fake_engine()
    engine.add_request(PROMPT, greedy(n=2), "two")
    engine.add_request(PROMPT, BeamSearchParams(beam_width=2), "beams")
    engine.add_request(PROMPT, greedy(logprobs=0), "logprobs")
    engine.add_request(PROMPT, greedy(), "x")
    for name in ("two", "beams"):
        with pytest.raises(ValueError, match=f"request '{name}' has several completions"):
            engine.fork(name)
    with pytest.raises(ValueError, match="request_id: no unfinished request has the id 'gone'"):
        engine.fork("gone")
    with pytest.raises(ValueError, match="request_id 'two' is in use"):
        engine.fork("x", new_id="two")
    with pytest.raises(ValueError, match="params must be SamplingParams with n=1"):
        engine.fork("x", greedy(n=2))
    with pytest.raises(ValueError, match="wants logprobs"):
        engine.append("logprobs", [1])
    with pytest.raises(ValueError, match=r"must be in \[0, 32\)"):
        engine.append("x", [VOCAB_SIZE])
    with pytest.raises(ValueError, match="8 more tokens leave none to generate: request 'x' has 10 of at most 18"):
        engine.append("x", [1] * 8)
    engine.step()
    engine.step()
    with pytest.raises(ValueError, match="max_tokens must be more than the 1 tokens"):
        engine.fork("x", greedy(1))
    for name in ("two", "beams", "logprobs", "x"):
        engine.abort(name)


def test_a_tree_of_handles():
    llm = tiny_llm()
    prompt = prompt_of(11)
    with llm.sequence(prompt) as root:
        (first, second), (third,) = llm.expand(
            [root, root], [SamplingParams(temperature=20.0, seed=1, n=2, max_tokens=6), tiny_greedy(5)]
        )
        assert third.token_ids == prompt + naive_greedy(prompt, 5)
        assert third.output is not None
        assert third.output.token_ids == naive_greedy(prompt, 5)
        assert third.num_resident_tokens == 15, "all but the last token"
        assert "15 of them in the pool" in repr(third)
        assert first.token_ids != second.token_ids
        before = llm.stats()
        ((grandchild,),) = llm.expand(third, tiny_greedy(4))
        assert grandchild.token_ids == third.token_ids + naive_greedy(third.token_ids, 4)
        assert grandchild.output is not None
        assert len(grandchild.output.text) == 4
        after = llm.stats()
        assert after.num_steps - before.num_steps == 4, "nothing was computed again"
        assert llm.generate(third, tiny_greedy(3), use_tqdm=False)[0].num_cached_tokens == 15
        fork = third.fork()
        fork.append([5, 6])
        assert llm.generate(fork, tiny_greedy(3), use_tqdm=False)[0].outputs[0].token_ids == naive_greedy(
            [*third.token_ids, 5, 6], 3
        )
        for handle in (first, second, third, fork, grandchild):
            handle.free()
    assert root.is_freed
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_after_free_a_handle_is_refused_everywhere():
    llm = tiny_llm()
    handle = llm.sequence(prompt_of(9))
    handle.free()
    for use in (
        lambda: handle.token_ids,
        lambda: handle.num_resident_tokens,
        handle.fork,
        lambda: handle.append([1]),
        handle.free,
        lambda: llm.generate(handle, tiny_greedy(2), use_tqdm=False),
        lambda: llm.expand(handle),
    ):
        with pytest.raises(UseAfterFreeError, match="freed"):
            use()
    assert repr(handle) == "Sequence(freed)"


def test_a_handle_makes_room_and_is_computed_again():
    engine = fake_engine(num_blocks=6)
    name = engine.add_request(PROMPT, greedy(3), keeps_kv=True)
    run(engine)
    (kv,) = engine.take_kept(name)
    handle = engine.handle(kv)
    assert handle.num_resident_tokens == 12
    engine.add_request([7] * 18, greedy(4))  # needs all six blocks
    run(engine)
    assert handle.num_resident_tokens == 0
    name = engine.add_request(handle, greedy(2))
    assert run(engine)[name].outputs[0].token_ids == completion_reference(handle.token_ids, 2)


def test_a_pinned_prefix_stays_whatever_else_runs():
    engine = fake_engine(num_blocks=10)
    handle = engine.handle(engine.pin(PROMPT))
    run(engine)
    for seed in range(5):
        engine.add_request([seed] * 20, greedy(4))
        run(engine)
    name = engine.add_request([*PROMPT, 1, 2], greedy(2))
    output = run(engine)[name]
    assert output.num_cached_tokens == 8
    engine.scheduler.forget_prefixes()
    name = engine.add_request([*PROMPT, 1, 2], greedy(2))
    assert run(engine)[name].num_cached_tokens == 8, "pinned prefixes are still found"
    with pytest.raises(ValueError, match="a pinned sequence stays as it is"):
        handle.append([1])
    handle.free()
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == 10
    assert not engine.scheduler.kv.pinned


def test_pins_leave_room_for_those_who_run():
    engine = fake_engine(num_blocks=10)
    engine.add_request([1] * 20, greedy(10), "x")  # may take eight blocks
    with pytest.raises(
        ValueError, match=r"a prefix of 10 tokens takes 3 blocks of 4, but of the 10 .* 8 may be needed"
    ):
        engine.pin(PROMPT)
    run(engine)
    handle = engine.handle(engine.pin(PROMPT))
    with pytest.raises(ValueError, match="the pool has 10 blocks, of which 3 are pinned"):
        engine.add_request([1] * 29, greedy(2))
    run(engine)
    with pytest.raises(ValueError, match="a prefix of 65 tokens is longer than max_model_len=64"):
        engine.pin([1] * 65)
    handle.free()


def test_a_pinned_prefix_is_computed_again_with_new_params_and_after_a_lost_pool():
    engine = fake_engine()
    handle = engine.handle(engine.pin(PROMPT))
    run(engine)
    engine.update_params({})
    assert handle.num_resident_tokens == 0
    run(engine)
    assert handle.num_resident_tokens == len(PROMPT)
    name = engine.add_request([*PROMPT, 1], greedy(2))
    assert run(engine)[name].num_cached_tokens == 8


def test_llm_pins_resets_and_updates():
    llm = tiny_llm()
    prompt = prompt_of(13)
    pinned = llm.pin_prefix(prompt)
    assert (pinned.num_resident_tokens, pinned.is_freed) == (13, False)
    llm.reset_prefix_cache()
    (output,) = llm.generate([[*prompt, 1]], tiny_greedy(3), use_tqdm=False)
    assert output.num_cached_tokens == 12
    assert output.outputs[0].token_ids == naive_greedy([*prompt, 1], 3)
    pinned.free()
    llm.reset_prefix_cache()
    assert llm.generate([[*prompt, 1]], tiny_greedy(3), use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_a_handle_belongs_to_one_engine():
    first, second = fake_engine(), fake_engine()
    name = first.add_request(PROMPT, greedy(3), keeps_kv=True)
    run(first)
    (kv,) = first.take_kept(name)
    handle = first.handle(kv)
    with pytest.raises(ValueError, match="a sequence of another engine"):
        second.add_request(handle, greedy(2))
    handle.free()


def test_a_prefix_that_is_unpinned_while_it_is_computed_leaves_nothing():
    engine = fake_engine()
    handle = engine.handle(engine.pin(PROMPT))
    handle.free()
    run(engine)
    assert engine.stats().num_free_blocks == engine.config.num_blocks
    assert not engine.scheduler.kv.held


def test_two_prefixes_are_pinned_at_a_time():
    engine = fake_engine(num_blocks=10)
    handles = [engine.handle(engine.pin([token] * 14)) for token in (1, 2)]
    run(engine)
    assert [handle.num_resident_tokens for handle in handles] == [14, 14]
    for handle in handles:
        handle.free()


def test_a_handle_keeps_its_kv_when_dropping_it_would_admit_nobody():
    engine = fake_engine(num_blocks=20)
    name = engine.add_request(PROMPT, greedy(3), keeps_kv=True)
    run(engine)
    (kv,) = engine.take_kept(name)
    handle = engine.handle(kv)
    engine.add_request([1] * 30, greedy(20), "running")
    engine.step()
    engine.add_request([2] * 48, greedy(2), "waiting")
    engine.step()
    assert "waiting" in engine.scheduler.waiting
    assert handle.num_resident_tokens == 12
    run(engine)
    handle.free()


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_fork_cannot_want_what_its_parent_did_not_note(name):
    engine = running(2)
    with pytest.raises(ValueError, match=f"{name}: request 'x' has none of the tokens before the fork"):
        engine.fork("x", greedy(**{name: 0}))
    run(engine)


def test_a_fork_whose_text_would_have_ended_is_refused():
    llm = tiny_llm()
    engine = llm.engine
    engine.add_request(prompt_of(9), tiny_greedy(8), "x")
    for _ in range(4):
        engine.step()
    stop = chr(naive_greedy(prompt_of(9), 2)[1])
    with pytest.raises(ValueError, match="before the fork already"):
        engine.fork("x", tiny_greedy(8, stop=[stop]))
    assert list(engine.scheduler.running) == ["x"]
    assert [output.request_id for output in run(engine).values()] == ["x"]


def test_sequences_and_continuations_that_are_none():
    llm, text = tiny_llm(), cast("Any", "hello")
    with llm.sequence(prompt_of(5)) as root:
        with pytest.raises(ValueError, match="not a Sequence"):
            llm.score(root, root)
        with pytest.raises(ValueError, match="sequences must be handles, as `sequence` gives them, got 'hello'"):
            unchecked_llm().expand(text)
        with pytest.raises(ValueError, match="token_ids must be a list of ints, got int"):
            root.append(5)
    with pytest.raises(ValueError, match="expected a pytree of arrays"):
        llm.engine.update_params({"norm": "nothing"})
