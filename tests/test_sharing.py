"""Parallel sampling, beams and cached prompts on the tiny model: equal to the same requests without sharing."""

from collections.abc import Sequence

import numpy as np
import pytest
from tiny_engine import (
    VOCAB_SIZE,
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
    tiny_engine,
    tiny_llm,
)

from pagedjax.beams.params import BeamSearchParams
from pagedjax.outputs import LogprobsOfPosition, RequestOutput
from pagedjax.sampling.params import SamplingParams


def sampled(n: int, max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=20.0, seed=3, n=n, max_tokens=max_tokens, ignore_eos=True, **options)


def scores_of(output: RequestOutput) -> list[float]:
    return [completion.score for completion in output.outputs if completion.score is not None]


def logprobs_of(entries: Sequence[LogprobsOfPosition | None] | None, token_ids: Sequence[int]) -> list[float]:
    assert entries is not None
    return [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True) if entry is not None]


def teacher_forced(prompt: list[int], ids: list[int]) -> np.ndarray:
    logits = dense_logits([*prompt, *ids])[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(axis=-1))


@pytest.mark.parametrize("num_blocks", [3, 6, 20])
@pytest.mark.parametrize("length", [5, 8])
def test_b08_siblings_part_at_their_first_write(length, num_blocks):
    """With three blocks of 8 there is no room for the copies: the siblings take turns."""
    engine = tiny_engine(num_blocks, block_size=8)
    fill_pool(engine, np.nan)
    engine.add_request(prompt := prompt_of(length), sampled(3, logprobs=0), "x")
    output = run_all(engine)["x"]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        reported = logprobs_of(completion.logprobs, completion.token_ids)
        np.testing.assert_allclose(reported, teacher_forced(prompt, completion.token_ids), atol=2e-3)
    stats = engine.stats()
    if num_blocks == 20:
        assert stats.num_block_copies == (2 if length == 5 else 0), "the last holder writes in place"
        assert stats.num_preemptions == 0
    if num_blocks == 3:
        assert stats.num_preemptions > 0


def test_b08_two_siblings_stop_at_once():
    prompt, params = prompt_of(5), sampled(3, 6)
    outputs = [reference(prompt, params, index) for index in range(3)]
    last = {ids[2] for ids in outputs[:2]}
    assert not last & {token for ids in outputs for token in (*ids[:2], *outputs[2])}
    engine = tiny_engine(block_size=8)
    engine.add_request(prompt, sampled(3, 6, stop_token_ids=sorted(last)), "x")
    output = run_all(engine)["x"]
    assert [completion.token_ids for completion in output.outputs] == [outputs[0][:3], outputs[1][:3], outputs[2]]


def test_the_prompt_is_computed_once_and_its_blocks_are_shared():
    engine = tiny_engine()
    engine.add_request(prompt_of(11), sampled(4), "x")
    engine.step()
    stats = engine.stats()
    assert (stats.num_blocks - stats.num_free_blocks, stats.num_block_references) == (3, 12)
    before = [pool.copy() for pool in pool_of(engine)]
    engine.step()
    stats = engine.stats()
    assert (stats.num_block_copies, stats.num_blocks - stats.num_free_blocks) == (3, 6)
    shared = engine.memory_map().blocks[:2]
    assert [info.ref_count for info in shared] == [4, 4]
    for old, new in zip(before, pool_of(engine), strict=True):
        np.testing.assert_array_equal(old[1:3], new[1:3], "a shared block was written")
    run_all(engine)


def test_b29_completions_are_an_ordered_list_whatever_n_is():
    engine = tiny_engine()
    engine.add_request(prompt_of(9), sampled(4), "four")
    engine.add_request(prompt_of(9), sampled(2), "two")
    outputs = run_all(engine)
    four = [completion.token_ids for completion in outputs["four"].outputs]
    assert [completion.token_ids for completion in outputs["two"].outputs] == four[:2]
    assert [completion.index for completion in outputs["four"].outputs] == [0, 1, 2, 3]
    assert four == [reference(prompt_of(9), sampled(4), index) for index in range(4)]


@pytest.mark.parametrize("n", [9, 20])
def test_more_completions_than_rows_go_in_parts(n):
    llm = tiny_llm()
    (output,) = llm.generate([prompt_of(6)], greedy(5, n=n), use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [naive_greedy(prompt_of(6), 5)] * n


def test_a_prompt_of_one_token_with_more_completions_than_tokens():
    """The step has one token and eight samples."""
    engine = tiny_engine()
    engine.add_request([5], sampled(8, 3), "x")
    outputs = run_all(engine)["x"].outputs
    assert [completion.token_ids for completion in outputs] == [reference([5], sampled(8, 3), i) for i in range(8)]


def test_completions_are_streamed_together():
    llm = tiny_llm()
    stream = llm.stream(prompt_of(6), sampled(3, 4))
    lengths = [[len(completion.token_ids) for completion in output.outputs] for output in stream]
    assert lengths == [[1] * 3, [2] * 3, [3] * 3, [4] * 3]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_group_is_preempted_and_comes_back_as_one(enable_prefix_caching):
    engine = tiny_engine(14, enable_prefix_caching=enable_prefix_caching)
    engine.add_request(prompt_of(10), greedy(20), "old")
    engine.add_request(prompt_of(9, 1), sampled(3, 10), "group")
    preempted = []
    schedule = engine.scheduler.schedule

    def watched():
        scheduled = schedule()
        preempted.append([request.request_id for request in scheduled.preempted])
        return scheduled

    engine.scheduler.schedule = watched
    outputs = run_all(engine)
    assert ["group[0]", "group[1]", "group[2]"] in preempted
    assert all(len(names) in (0, 3) for names in preempted)
    assert_greedy(prompt_of(10), outputs["old"].outputs[0].token_ids)
    ids = [completion.token_ids for completion in outputs["group"].outputs]
    assert ids == [reference(prompt_of(9, 1), sampled(3, 10), index) for index in range(3)]


def test_every_method_steps_in_one_batch():
    llm = tiny_llm()
    prompts = [prompt_of(length, length) for length in (4, 7, 9, 5)]
    params = [greedy(6), sampled(2, 6), BeamSearchParams(beam_width=3, max_tokens=6), greedy(6, logprobs=2)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().num_steps <= 8
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = tiny_llm(enable_prefix_caching=False).generate([prompt], each, use_tqdm=False)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]
        assert scores_of(alone) == pytest.approx(scores_of(output), abs=2e-3)
        assert [c.text for c in alone.outputs] == [c.text for c in output.outputs]
    assert_clean(llm.engine)


def test_width_1_is_greedy():
    llm = tiny_llm()
    (output,) = llm.beam_search(prompt_of(9), BeamSearchParams(beam_width=1, max_tokens=7), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.token_ids == naive_greedy(prompt_of(9), 7)
    assert completion.finish_reason == "length"
    assert completion.text == "".join(map(chr, completion.token_ids))
    total = teacher_forced(prompt_of(9), completion.token_ids).sum()
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-2)
    assert completion.score == pytest.approx(total / 7, abs=2e-3)


@pytest.mark.parametrize("width", [2, 8])
def test_b36_a_search_in_a_small_pool_is_the_same(width):
    params = BeamSearchParams(beam_width=width, max_tokens=8)
    expected = tiny_llm().beam_search(prompt_of(10), params, use_tqdm=False)[0]
    llm = tiny_llm(num_blocks=2 + width * 3, max_num_batched_tokens=9)
    fill_pool(llm.engine, np.nan)
    both = llm.beam_search([prompt_of(10), prompt_of(10)], params, use_tqdm=False)
    assert width == 2 or llm.stats().num_preemptions == 0
    for output in both:
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
        np.testing.assert_allclose(scores_of(output), scores_of(expected), atol=2e-3)
    assert_clean(llm.engine)


def test_a_search_that_cannot_fit_is_refused():
    llm = tiny_llm(num_blocks=6)
    with pytest.raises(
        ValueError, match="can never fit: 4 beams of 18 tokens may take 14 blocks of 4, and the pool has 6"
    ):
        llm.beam_search(prompt_of(10), BeamSearchParams(beam_width=4, max_tokens=8), use_tqdm=False)
    with pytest.raises(ValueError, match="beam_width=9 is more than the 8 sequences of a step"):
        llm.beam_search(prompt_of(3), BeamSearchParams(beam_width=9, max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="stop_token_ids must be below the vocabulary size 128, got 128"):
        llm.beam_search(prompt_of(3), BeamSearchParams(beam_width=2, stop_token_ids=[VOCAB_SIZE]), use_tqdm=False)
    assert_clean(llm.engine)


def test_an_aborted_search_gives_its_best_so_far():
    engine = tiny_engine()
    engine.add_request(prompt_of(7), BeamSearchParams(beam_width=3, max_tokens=9), "x")
    for _ in range(4):
        assert engine.step() == [], "a search has no output before it has ended: any beam may still be dropped"
    output = engine.abort("x")
    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert [len(completion.token_ids) for completion in output.outputs] == [4] * 3
    assert_clean(engine)


def test_b33_prompt_logprobs_do_not_depend_on_the_cache():
    prompt = prompt_of(11)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    engine = tiny_engine()
    results = []
    for warm_up in ([], [prompt], [prompt_of(3)]):
        for each in warm_up:
            engine.add_request(each, greedy(2))
        run_all(engine)
        engine.add_request(prompt, params, "x")
        results.append(run_all(engine)["x"])
    for output in results:
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        reported = logprobs_of(output.prompt_logprobs[1:], prompt[1:])
        np.testing.assert_allclose(reported, teacher_forced(prompt[:1], prompt[1:]), atol=2e-3)


@pytest.mark.parametrize(("start", "cached"), [(1, 0), (2, 0), (8, 4), (9, 8), (10, 8), (11, 8), (99, 8)])
def test_prompt_logprobs_from_a_position_on_read_the_cache_before_it(start, cached):
    """The first of them is read from the token before it, which is computed."""
    prompt = prompt_of(11)
    engine = tiny_engine()
    engine.add_request(prompt, greedy(2))
    run_all(engine)
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start)
    engine.add_request(prompt, params, "x")
    output = run_all(engine)["x"]
    assert output.num_cached_tokens == cached
    first = min(start, 11)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[:first] == [None] * first
    reported = logprobs_of(output.prompt_logprobs[first:], prompt[first:])
    np.testing.assert_allclose(reported, teacher_forced(prompt[:first], prompt[first:]), atol=2e-3)


def test_scores_of_one_prompt_compute_it_once():
    llm = tiny_llm()
    prompt = prompt_of(20)
    first = llm.score([prompt], [[1, 2, 3]])
    before = llm.stats().prefix_cache_hit_tokens
    rest = llm.score([prompt] * 3, [[1, 2, 3], [4, 5], [6]])
    assert llm.stats().prefix_cache_hit_tokens - before == 3 * 16, "of 19 tokens that need no logits, in blocks of 4"
    np.testing.assert_allclose(rest[0].logprobs, first[0].logprobs, atol=2e-3)
    for score, ids in zip(rest, [[1, 2, 3], [4, 5], [6]], strict=True):
        np.testing.assert_allclose(score.logprobs, teacher_forced(prompt, ids), atol=2e-3)
