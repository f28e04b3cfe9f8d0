"""The prefix cache through the engine, on the fake device: what is found, when, and what it must never find."""

import pytest
from fake_device import VOCAB_SIZE, DeviceError, completion_reference, device_of, fake_engine, greedy, run

from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + i * i + seed * 13) % VOCAB_SIZE for i in range(length)]


def ask(engine: LLMEngine, prompt: list[int], params: SamplingParams | None = None) -> RequestOutput:
    """Runs one request, and checks that nothing but what it should be comes out."""
    params = params or greedy(4)
    output = run(engine)[request_id] if (request_id := engine.add_request(prompt, params)) else None
    assert output is not None
    (completion,) = output.outputs
    assert completion.token_ids == completion_reference(prompt, params.max_tokens or 0)
    return output


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize(("block_size", "length"), [(16, n) for n in (1, 15, 16, 17, 31, 32, 33)] + [(1, 1), (1, 5)])
def test_b01_a_hit_never_covers_the_last_token(block_size, length, max_tokens):
    """The granularity is a block: for 32 tokens in blocks of 16 it is 16."""
    engine = fake_engine(block_size=block_size)
    prompt = prompt_of(length)
    cached = [ask(engine, prompt, greedy(max_tokens)).num_cached_tokens for _ in range(3)]
    expected = (length - 1) // block_size * block_size
    assert cached == [0, expected, expected]


def test_outputs_are_found_too():
    engine = fake_engine()
    first = ask(engine, prompt_of(6), greedy(7))
    whole = prompt_of(6) + first.outputs[0].token_ids
    assert ask(engine, [*whole, 1]).num_cached_tokens == 12, "the last token of an output has no KV"


def test_b02_a_block_that_is_reused_is_not_found():
    engine = fake_engine(num_blocks=4)
    for i in range(20):
        assert ask(engine, prompt_of(8, seed=i), greedy(1)).num_cached_tokens == 0
        assert ask(engine, prompt_of(12, seed=100 + i), greedy(4)).num_cached_tokens == 0
        assert ask(engine, prompt_of(8, seed=i), greedy(1)).num_cached_tokens == 0, "all four blocks were taken since"


def test_b03_two_with_one_prompt_in_the_same_step():
    engine = fake_engine()
    for _ in range(2):
        engine.add_request(prompt_of(12), greedy(4))
    outputs = run(engine)
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 0]
    assert all(o.outputs[0].token_ids == completion_reference(prompt_of(12), 4) for o in outputs.values())
    assert ask(engine, prompt_of(12)).num_cached_tokens == 8


@pytest.mark.parametrize("then", ["goes on", "is aborted"])
def test_b03_only_what_was_computed_is_found(then):
    engine = fake_engine(max_num_batched_tokens=6, max_num_seqs=6)
    engine.add_request(prompt_of(12), greedy(4), "a")
    engine.step()
    engine.add_request(prompt_of(12), greedy(4), "c")
    if then == "is aborted":
        engine.abort("a")
        assert run(engine)["c"].num_cached_tokens == 4, "six tokens were computed, one block"
    else:
        assert run(engine)["c"].num_cached_tokens == 8, "the rest of the first one's prompt came before"


def test_b03_a_step_that_fails_publishes_nothing():
    engine = fake_engine()
    engine.add_request(prompt_of(12), greedy(4), "a")
    device_of(engine).fails = True
    with pytest.raises(DeviceError):
        engine.step()
    assert engine.stats().num_cached_blocks == 0
    assert run(engine)["a"].outputs[0].token_ids == completion_reference(prompt_of(12), 4)


def test_b05_another_beginning_is_another_block():
    engine = fake_engine()
    ask(engine, [1, 2, 3, 4, 9, 10, 11, 12, 1])
    assert ask(engine, [5, 6, 7, 8, 9, 10, 11, 12, 1]).num_cached_tokens == 0


@pytest.mark.parametrize("m", [1, 7, 31])
def test_b05_small_changes_are_other_names(m):
    engine = fake_engine()
    first = [0] * 9
    ask(engine, first)
    for j in range(7):
        other = list(first)
        other[j], other[j + 1] = m, VOCAB_SIZE - 1
        assert ask(engine, other).num_cached_tokens == (4 if j >= 4 else 0)


def test_b05_engines_do_not_see_each_other():
    first, second = fake_engine(), fake_engine()
    ask(first, prompt_of(12))
    assert ask(second, prompt_of(12)).num_cached_tokens == 0


def test_hits_are_claimed_before_new_blocks_are_taken():
    """The pool has just enough: if the two new blocks were taken first, they would be the ones that were found."""
    engine = fake_engine(num_blocks=4)
    ask(engine, prompt_of(8), greedy(1))
    assert ask(engine, prompt_of(8) + prompt_of(7, seed=3), greedy(1)).num_cached_tokens == 8


def test_least_recently_used_goes_first():
    engine = fake_engine(num_blocks=8)
    for seed in (0, 1):
        ask(engine, prompt_of(9, seed), greedy(1))
    ask(engine, prompt_of(9, 0), greedy(1))  # used again
    ask(engine, prompt_of(20, 2), greedy(1))  # takes five: three that are empty, the unnamed first, and two of seed 1
    assert ask(engine, prompt_of(9, 0), greedy(1)).num_cached_tokens == 8
    assert ask(engine, prompt_of(9, 1), greedy(1)).num_cached_tokens == 0


def test_a_preempted_request_finds_its_own_blocks_again():
    engine = fake_engine(num_blocks=9, max_num_batched_tokens=64)
    for seed in (0, 1):
        engine.add_request(prompt_of(10, seed), greedy(10), str(seed))
    outputs = run(engine)
    assert engine.stats().num_preemptions >= 1
    for seed in (0, 1):
        assert outputs[str(seed)].outputs[0].token_ids == completion_reference(prompt_of(10, seed), 10)
        assert outputs[str(seed)].num_cached_tokens == 0, "what it threw away itself is no cached prompt"
    stats = engine.stats()
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (20, 0)
    assert device_of(engine).num_tokens < 2 * 19 + 10, "it did not start again from the first token"


def test_statistics():
    engine = fake_engine()
    for _ in range(3):
        ask(engine, prompt_of(11), greedy(1))
    stats = engine.stats()
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (33, 16)
    assert stats.num_cached_blocks == 2
    assert stats.num_free_blocks == stats.num_blocks


def test_switched_off_nothing_is_found():
    engine = fake_engine(enable_prefix_caching=False)
    assert [ask(engine, prompt_of(12)).num_cached_tokens for _ in range(2)] == [0, 0]
    stats = engine.stats()
    assert (stats.prefix_cache_query_tokens, stats.num_cached_blocks) == (0, 0)


def test_reset_forgets_everything_also_while_requests_run():
    engine = fake_engine()
    ask(engine, prompt_of(12))
    engine.add_request(prompt_of(12, 1), greedy(8), "running")
    engine.step()
    engine.scheduler.forget_prefixes()
    assert engine.stats().num_cached_blocks == 0
    assert ask(engine, prompt_of(12)).num_cached_tokens == 0


def test_new_params_empty_it_and_running_requests_are_computed_again():
    engine = fake_engine()
    ask(engine, prompt_of(12))
    engine.add_request(prompt_of(12, 1), greedy(8), "running")
    for _ in range(3):
        engine.step()
    engine.update_params({})  # the fake pool is empty now: what is not computed again is found out
    assert engine.stats().num_cached_blocks == 0
    assert run(engine)["running"].outputs[0].token_ids == completion_reference(prompt_of(12, 1), 8)
    assert ask(engine, prompt_of(12)).num_cached_tokens == 0
