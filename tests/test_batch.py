"""Golden tables, written out by hand, for the arrays that the device is given."""

from array import array
from dataclasses import replace

import jax
import numpy as np
import pytest

from pagedjax.batch import build_batch
from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.table import BlockTable
from pagedjax.config import EngineConfig
from pagedjax.model_input import ModelInput
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request, RequestStatus
from pagedjax.scheduling.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(
    num_blocks=8, block_size=4, max_model_len=15, max_num_seqs=5, max_num_batched_tokens=16, check_integrity=True
)


def running(prompt, outputs, num_computed, blocks, params=GREEDY, seed=0, sample_index=0) -> Request:
    request = Request("r", prompt, params, arrival=(0,), max_num_tokens=99, seed=seed, sample_index=sample_index)
    request.token_ids += outputs
    request.num_computed_tokens = num_computed
    request.block_table = BlockTable(BlockAllocator(0), CONFIG.block_size)
    request.block_table.rows = [array("i", blocks)]
    request.status = RequestStatus.RUNNING
    return request


def assert_array(got, dtype, expected):
    assert isinstance(got, np.ndarray)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.array(expected))


def mixed_step() -> SchedulerOutput:
    """Two decodes, the end of a prompt and the beginning of one."""
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.25, min_p=0.5)
    short = running([1, 2, 3], [4, 5, 6], num_computed=5, blocks=[3, 5])
    long = running([7, 8, 9, 11, 12, 13, 14, 15], [16], 8, [1, 7, 2], params, seed=2**32 + 7, sample_index=3)
    end = running([20, 21, 22, 23, 24, 25, 26], [], 3, [4, 8], SamplingParams(top_k=40), seed=2**64 - 1)
    start = running([30, 31, 32, 33, 34, 35, 36, 37, 38, 39], [], 0, [6])
    return SchedulerOutput({short: 1, long: 1, end: 4, start: 3}, sampling=[short, long, end])


def test_a_mixed_step():
    batch = build_batch(mixed_step(), CONFIG)
    #                               short  long  end            start      padding to 16
    assert_array(batch.token_ids, np.int32, [6, 16, 23, 24, 25, 26, 30, 31, 32, 0, 0, 0, 0, 0, 0, 0])
    assert_array(batch.positions, np.int32, [5, 8, 3, 4, 5, 6, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0])
    slots = [5 * 4 + 1, 2 * 4 + 0, 4 * 4 + 3, 8 * 4 + 0, 8 * 4 + 1, 8 * 4 + 2, 6 * 4 + 0, 6 * 4 + 1, 6 * 4 + 2]
    assert_array(batch.attn.slot_mapping, np.int32, slots + [0] * 7)
    tables = [[3, 5, 0, 0], [1, 7, 2, 0], [4, 8, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]]
    assert_array(batch.attn.block_tables, np.int32, tables)
    assert_array(batch.attn.context_lens, np.int32, [6, 9, 7, 3, 0])
    assert_array(batch.attn.query_start_loc, np.int32, [0, 1, 2, 6, 9, 9])
    assert batch.attn.max_query_len == 16
    assert_array(batch.logits_indices, np.int32, [0, 1, 5, 0, 0])
    assert_array(batch.num_samples, np.int32, 3)
    assert_array(batch.sampling.temperature, np.float32, [0.0, 0.5, 1.0, 0.0, 0.0])
    assert_array(batch.sampling.top_k, np.int32, [0, 0, 40, 0, 0])
    assert_array(batch.sampling.top_p, np.float32, [1.0, 0.25, 1.0, 1.0, 1.0])
    assert_array(batch.sampling.min_p, np.float32, [0.0, 0.5, 0.0, 0.0, 0.0])
    assert_array(batch.sampling.seed, np.uint32, [[0, 0], [1, 7], [2**32 - 1, 2**32 - 1], [0, 0], [0, 0]])
    assert_array(batch.sampling.sample_index, np.uint32, [0, 3, 0, 0, 0])
    assert_array(batch.sampling.num_outputs, np.uint32, [3, 1, 0, 0, 0])


def test_a_step_of_decodes():
    first = running([1, 2, 3, 4], [5], num_computed=4, blocks=[8, 1])
    second = running([1, 2, 3, 4, 5], [6, 7], num_computed=6, blocks=[2, 4])
    third = running([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12], num_computed=11, blocks=[3, 7, 5])
    batch = build_batch(SchedulerOutput({first: 1, second: 1, third: 1}, sampling=[first, second, third]), CONFIG)
    assert_array(batch.token_ids, np.int32, [5, 7, 12, 0])
    assert_array(batch.positions, np.int32, [4, 6, 11, 0])
    assert_array(batch.attn.slot_mapping, np.int32, [4, 18, 23, 0])
    assert_array(batch.attn.block_tables, np.int32, [[8, 1, 0, 0], [2, 4, 0, 0], [3, 7, 5, 0], [0, 0, 0, 0]])
    assert_array(batch.attn.context_lens, np.int32, [5, 7, 12, 0])
    assert_array(batch.attn.query_start_loc, np.int32, [0, 1, 2, 3, 3])
    assert batch.attn.max_query_len == 1
    assert_array(batch.logits_indices, np.int32, [0, 1, 2, 0])


def test_a_step_that_fills_its_bucket_and_samples_nothing():
    request = running(list(range(50, 64)), [], num_computed=2, blocks=[5, 3, 1])
    batch = build_batch(SchedulerOutput({request: 8}), replace(CONFIG, max_num_batched_tokens=8))
    assert_array(batch.token_ids, np.int32, [52, 53, 54, 55, 56, 57, 58, 59])
    assert_array(batch.attn.slot_mapping, np.int32, [22, 23, 12, 13, 14, 15, 4, 5])
    assert_array(batch.attn.context_lens, np.int32, [10, 0, 0, 0, 0])
    assert_array(batch.attn.query_start_loc, np.int32, [0, 8, 8, 8, 8, 8])
    assert_array(batch.logits_indices, np.int32, [0, 0, 0, 0, 0])
    assert_array(batch.num_samples, np.int32, 0)
    assert batch.attn.max_query_len == 8


def test_one_token_of_a_prompt_is_no_different_from_a_decode():
    request = running([7, 8, 9], [], num_computed=0, blocks=[2])
    batch = build_batch(SchedulerOutput({request: 1}), CONFIG)
    assert_array(batch.token_ids, np.int32, [7])
    assert_array(batch.attn.slot_mapping, np.int32, [8])
    assert_array(batch.attn.block_tables, np.int32, [[2, 0, 0, 0]])
    assert_array(batch.attn.query_start_loc, np.int32, [0, 1])
    assert batch.attn.max_query_len == 1


def test_from_the_scheduler_to_the_tables():
    config = EngineConfig(num_blocks=9, block_size=4, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=7)
    scheduler = Scheduler(config)
    for i, prompt in enumerate([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24, 25]]):
        scheduler.add(SequenceGroup([Request(str(i), prompt, GREEDY, arrival=(i,), max_num_tokens=20, seed=i)]))
    first = build_batch(scheduled := scheduler.schedule(), config)
    assert_array(first.token_ids, np.int32, [10, 11, 12, 13, 14, 20, 21])
    assert_array(first.attn.slot_mapping, np.int32, [4, 5, 6, 7, 8, 12, 13])
    assert_array(first.logits_indices, np.int32, [4, 0, 0])
    scheduler.update(scheduled, np.array([15], np.int32))
    second = build_batch(scheduler.schedule(), config)
    assert_array(second.token_ids, np.int32, [15, 22, 23, 24, 25, 0, 0])
    assert_array(second.positions, np.int32, [5, 2, 3, 4, 5, 0, 0])
    assert_array(second.attn.slot_mapping, np.int32, [9, 14, 15, 16, 17, 0, 0])
    assert_array(second.attn.context_lens, np.int32, [6, 6, 0])
    assert_array(second.logits_indices, np.int32, [0, 4, 0])
    assert_array(second.sampling.num_outputs, np.uint32, [1, 0, 0])
    assert_array(second.sampling.seed, np.uint32, [[0, 0], [0, 1], [0, 0]])


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "decode_buckets", "mixed_buckets"),
    [
        (1, 256, (1,), (1,)),
        (7, 256, (1, 2, 4, 7), (7,)),
        (24, 8, (1, 2, 4, 8), (16, 24)),
        (25, 25, (1, 2, 4, 8, 16, 24, 25), (16, 25)),
        (317, 13, (1, 2, 4, 8, 13), (16, 32, 64, 128, 256, 317)),
        (2048, 256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256), (16, 32, 64, 128, 256, 512, 1024, 2048)),
    ],
)
def test_buckets(budget, max_num_seqs, decode_buckets, mixed_buckets):
    config = EngineConfig(num_blocks=1, max_model_len=1, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    assert config.decode_buckets == decode_buckets
    assert config.mixed_buckets == mixed_buckets


def test_build_batch_is_pure():
    scheduled = mixed_step()

    def contents():
        requests = scheduled.num_new_tokens
        return [(list(r.token_ids), list(r.block_table.blocks), r.num_computed_tokens) for r in requests]

    before = contents()
    first, second = build_batch(scheduled, CONFIG), build_batch(scheduled, CONFIG)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert not np.shares_memory(a, b)
        np.testing.assert_array_equal(a, b)
    assert before == [
        (list(r.token_ids), list(r.block_table.blocks), r.num_computed_tokens) for r in scheduled.num_new_tokens
    ]


def test_a_batch_is_a_pytree_whose_max_query_len_belongs_to_the_program():
    batch = build_batch(mixed_step(), CONFIG)
    passed = jax.jit(lambda batch: batch)(batch)
    assert isinstance(passed, ModelInput)
    assert passed.attn.max_query_len == 16
    for given, returned in zip(jax.tree.leaves(batch), jax.tree.leaves(passed), strict=True):
        assert (given.dtype, given.shape) == (returned.dtype, returned.shape)
    assert len(jax.tree.leaves(batch)) == 15
    avals = jax.eval_shape(lambda batch: batch, batch)
    assert avals.attn.slot_mapping == jax.ShapeDtypeStruct((16,), np.int32)


def test_b69_padding_stays_in_the_null_block():
    """A marker in the last block, which a -1 anywhere would hit, survives the writes and reads of a padded batch."""
    request = running([1, 2, 3], [], num_computed=2, blocks=[1])
    batch = build_batch(SchedulerOutput({request: 1}, sampling=[request]), CONFIG)
    tables = (batch.attn.slot_mapping, batch.attn.block_tables, batch.positions, batch.logits_indices, batch.token_ids)
    assert all(table.min() >= 0 for table in tables)
    mixed = build_batch(mixed_step(), CONFIG)
    pool = jax.numpy.full((9 * 4,), 7, np.int32).at[mixed.attn.slot_mapping].set(mixed.token_ids)
    written = [4 * 4 + 3, 5 * 4 + 1, 2 * 4, 6 * 4, 6 * 4 + 1, 6 * 4 + 2, 32, 33, 34]
    assert sorted({0, *written}) == np.flatnonzero(np.asarray(pool) != 7).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [3, 0]}, "block outside the pool"),
        ({"blocks": [3, -1]}, "block outside the pool"),
        ({"blocks": [3, 9]}, "block outside the pool"),
        ({"blocks": [9, 3]}, "block outside the pool"),  # read, though not written
        ({"blocks": [3]}, "6 tokens in 1 blocks"),
        ({"outputs": [4, 5, -6]}, "negative token id"),
        ({"outputs": [4] * 13, "num_computed": 15, "blocks": [1, 2, 3, 4]}, "position outside the model"),
    ],
)
def test_b69_indices_out_of_range_are_refused_on_the_host(change, message):
    sound = {"prompt": [1, 2, 3], "outputs": [4, 5, 6], "num_computed": 5, "blocks": [3, 5]}
    request = running(**sound)
    build_batch(SchedulerOutput({request: 1}, sampling=[request]), CONFIG)
    request = running(**sound | change)
    with pytest.raises(AssertionError, match=message):
        build_batch(SchedulerOutput({request: 1}, sampling=[request]), CONFIG)


def test_b69_a_table_that_is_too_narrow_is_an_error_even_without_checks():
    config = EngineConfig(num_blocks=8, block_size=4, max_model_len=8, max_num_batched_tokens=16)
    request = running([1] * 9, [], num_computed=8, blocks=[1, 2, 3])
    with pytest.raises((IndexError, ValueError)):
        build_batch(SchedulerOutput({request: 1}, sampling=[request]), config)
