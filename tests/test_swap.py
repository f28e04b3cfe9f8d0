"""Preempted groups that wait in the host pool: all or nothing, shared as before, and the same tokens as undisturbed."""

from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_device import DeviceError, completion_reference, fake_engine
from fake_device import greedy as fake_greedy
from fake_device import run as run_fake
from tiny_engine import assert_clean, fill_pool, greedy, pool_of, prompt_of, reference, run_all, tiny_engine

from pagedjax.beams.params import BeamSearchParams
from pagedjax.blocks.host_pool import TILE, HostPool
from pagedjax.engine import LLMEngine
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import FinishReason, RequestStatus

SWAP = {"preemption": "swap", "num_swap_blocks": 64}


def sharing(group: SequenceGroup, num_blocks: int | None = None) -> list[list[int]]:
    """Which of the first blocks the group's tables have in common, whatever their ids: each by when it comes first."""
    tables = [request.block_table.rows[0][:num_blocks] for request in group.requests]
    names = {block: i for i, block in enumerate(dict.fromkeys(chain.from_iterable(tables)))}
    return [[names[block] for block in table] for table in tables]


def swapped(engine: LLMEngine) -> list[SequenceGroup]:
    return [group for group in engine.scheduler.waiting.values() if group.status is RequestStatus.SWAPPED]


def step_until_swapped(engine: LLMEngine) -> SequenceGroup:
    for _ in range(100):
        engine.step()
        if groups := swapped(engine):
            return groups[0]
    raise AssertionError("nobody was swapped out")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_tokens_are_those_of_an_undisturbed_run(fill, async_scheduling):
    engine = tiny_engine(9, **SWAP, async_scheduling=async_scheduling)
    fill_pool(engine, fill)
    for i in range(4):
        engine.add_request(prompt_of(9, i), greedy(14, n=1 + (i == 2)), str(i))
    outputs = run_all(engine)
    for i in range(4):
        for completion in outputs[str(i)].outputs:
            assert completion.token_ids == reference(prompt_of(9, i), greedy(14)), i
    stats = engine.stats()
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks > 0
    assert stats.num_free_swap_blocks == stats.num_swap_blocks == 64
    assert engine.runner.host_pool.num_bytes == 0


def test_nothing_that_was_swapped_out_is_computed_again():
    engine = fake_engine(num_blocks=9, **SWAP)
    for i in range(3):
        engine.add_request([i] * 9, fake_greedy(12), str(i))
    run_fake(engine)
    assert engine.stats().num_preemptions > 0
    runner: Any = engine.runner
    assert runner.num_tokens == 3 * (9 + 12 - 1)  # the last token's KV is nobody's


def test_b21_a_group_comes_back_as_it_went():
    """Shared blocks are moved once, have other ids afterwards, and as many holders as before."""
    engine = fake_engine(num_blocks=9, **SWAP)
    engine.add_request([1] * 10, fake_greedy(14), "old")
    engine.add_request([2] * 10, fake_greedy(6, n=3), "group")
    for _ in range(3):
        engine.step()
    group = engine.scheduler.running["group[0]"]
    blocks = {block for request in group.requests for block in request.block_table.blocks}
    assert step_until_swapped(engine) is group
    host = engine.scheduler.swap.host
    assert host.num_used_blocks == len(set(chain.from_iterable(sharing(group))))
    shape = sharing(group)
    while group.status is RequestStatus.SWAPPED:
        engine.step()
    assert sharing(group, 3) == shape == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    shared = group.requests[0].block_table.blocks[0]
    assert engine.scheduler.allocator.ref_count(shared) == 3
    assert {block for request in group.requests for block in request.block_table.blocks} != blocks
    assert host.num_used_blocks == 0
    outputs = run_fake(engine)
    assert all(c.token_ids == completion_reference([2] * 10, 6) for c in outputs["group"].outputs)


def test_b21_a_host_pool_too_small_for_a_group_falls_back_to_recompute():
    engine = fake_engine(num_blocks=9, preemption="swap", num_swap_blocks=2)
    engine.add_request([1] * 10, fake_greedy(14), "old")
    engine.add_request([2] * 10, fake_greedy(6, n=3), "group")
    outputs = run_fake(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swapped_out_blocks == 0
    assert outputs["old"].outputs[0].token_ids == completion_reference([1] * 10, 14)
    assert all(c.token_ids == completion_reference([2] * 10, 6) for c in outputs["group"].outputs)


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
def test_b21_it_comes_back_only_with_room_for_its_next_token(num_prompt):
    """Wherever its last block ends: it is not admitted only to be swapped out again at once."""
    for num_blocks in range(5, 10):
        engine = fake_engine(num_blocks=num_blocks, **SWAP)
        engine.add_request([1] * num_prompt, fake_greedy(9), "old")
        engine.add_request([2] * num_prompt, fake_greedy(9), "new")
        outputs, num_idle = {}, 0
        while engine.has_unfinished():
            num_preemptions = engine.stats().num_preemptions
            was_swapped = bool(swapped(engine))
            outputs.update((output.request_id, output) for output in engine.step() if output.finished)
            num_idle += was_swapped and not swapped(engine) and engine.stats().num_preemptions > num_preemptions
        assert num_idle == 0
        for name, token in (("old", 1), ("new", 2)):
            assert outputs[name].outputs[0].token_ids == completion_reference([token] * num_prompt, 9)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_b20_abort_while_swapped_out(n, times):
    engine = tiny_engine(9, **SWAP)
    engine.add_request(prompt_of(10), greedy(14), "old")
    engine.add_request(prompt_of(10, 1), greedy(12, n=n), "new")
    assert step_until_swapped(engine).name.startswith("new")
    output = engine.abort("new")
    assert output is not None
    assert [c.finish_reason for c in output.outputs] == ["abort"] * n
    for _ in range(times - 1):
        assert engine.abort("new") is None
    assert engine.stats().num_free_swap_blocks == 64
    assert run_all(engine)["old"].outputs[0].token_ids == reference(prompt_of(10), greedy(14))


def test_b20_one_sibling_ends_while_all_are_swapped_out():
    engine = fake_engine(num_blocks=9, **SWAP)
    engine.add_request([1] * 10, fake_greedy(14), "old")
    engine.add_request([2] * 10, fake_greedy(6, n=3), "group")
    group = step_until_swapped(engine)
    first = group.requests[0]
    engine.scheduler.finish(first, FinishReason.ABORT)
    engine.scheduler.check_integrity()
    outputs = run_fake(engine)
    assert [c.token_ids for c in outputs["group"].outputs[1:]] == [completion_reference([2] * 10, 6)] * 2


def test_a_prompt_in_chunks_goes_on_where_it_was():
    engine = fake_engine(num_blocks=17, max_num_batched_tokens=8, enable_prefix_caching=False, **SWAP)
    for i in range(4):
        engine.add_request([i] * 3, fake_greedy(20))
    engine.add_request([2] * 29, fake_greedy(3, n=2), "new")
    group = step_until_swapped(engine)
    assert 0 < group.requests[0].num_computed_tokens < 29
    assert group.requests[1].fork_of is group.requests[0]
    outputs = run_fake(engine)
    assert all(c.token_ids == completion_reference([2] * 29, 3) for c in outputs["new"].outputs)


def test_beams_are_swapped_together():
    engine = fake_engine(num_blocks=11, **SWAP)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    alone = fake_engine()
    alone.add_request([2] * 6, params, "beams")
    expected = [c.token_ids for c in run_fake(alone)["beams"].outputs]
    engine.add_request([1] * 14, fake_greedy(24), "old")
    engine.add_request([2] * 6, params, "beams")
    assert len(step_until_swapped(engine).requests) == 3
    assert [c.token_ids for c in run_fake(engine)["beams"].outputs] == expected


def test_new_weights_and_a_lost_pool_leave_nothing_of_the_old_kv():
    for happens in ("update", "failure"):
        engine = fake_engine(num_blocks=9, **SWAP)
        engine.add_request([1] * 10, fake_greedy(14), "old")
        engine.add_request([2] * 10, fake_greedy(12), "new")
        step_until_swapped(engine)
        runner: Any = engine.runner
        if happens == "update":
            engine.update_params(None)
        else:
            runner.fails = True
            with pytest.raises(DeviceError):
                engine.step()
        assert engine.stats().num_free_swap_blocks == 64
        assert run_fake(engine)["new"].outputs[0].token_ids == completion_reference([2] * 10, 12)


def test_auto_takes_what_is_measured_to_be_faster():
    engine = tiny_engine(preemption="auto", num_swap_blocks=8)
    assert engine.config.preemption in ("swap", "recompute")
    assert engine.config.preemption == engine.scheduler.config.preemption
    engine.add_request(prompt_of(5), greedy(4), "x")
    assert run_all(engine)["x"].outputs[0].token_ids == reference(prompt_of(5), greedy(4))


def random_cache(num_blocks: int, seed: int = 0) -> KVCache:
    cache = init_kv_cache(
        num_pools=2, num_blocks=num_blocks, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_blocks_come_back_bit_by_bit_wherever_they_go(count):
    pool, cache = HostPool(whole_step=count == TILE), random_cache(40)
    before = [np.array(x) for x in jax.tree.leaves(cache)]
    rng = np.random.default_rng(count)
    source, target = (rng.permutation(np.arange(1, 41))[:count].tolist() for _ in range(2))
    pool.copy_out(cache, dict(zip(range(1, count + 1), source, strict=True)))
    assert pool.num_bytes == sum(x.nbytes // 41 for x in before) * count
    cache = pool.copy_in(cache, dict(zip(target, range(1, count + 1), strict=True)))
    assert pool.num_bytes == 0
    for old, new in zip(before, map(np.asarray, jax.tree.leaves(cache)), strict=True):
        np.testing.assert_array_equal(new[target], old[source])
        others = [block for block in range(41) if block not in target]
        np.testing.assert_array_equal(new[others], old[others])


@pytest.mark.parametrize("whole_step", [False, True])
def test_the_host_pool_is_pinned_memory_and_the_pool_stays_in_place(whole_step):
    pool, cache = HostPool(whole_step), random_cache(40)
    pool.copy_out(cache, {3: 7})
    assert pool._blocks[3].sharding.memory_kind == "pinned_host"
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    cache = pool.copy_in(cache, {9: 3})
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)] == pointers


def test_a_warm_up_changes_nothing():
    engine = tiny_engine(**SWAP)
    fill_pool(engine, 3.0)
    before = pool_of(engine)
    engine.runner.kv_cache = engine.runner.host_pool.warm_up(engine.runner.kv_cache)
    for old, new in zip(before, pool_of(engine), strict=True):
        np.testing.assert_array_equal(old, new)
    assert_clean(engine)
