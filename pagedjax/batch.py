"""Turns what the scheduler chose into the int32 tables that the device reads: pure, numpy, padded to a bucket."""

from itertools import chain
from operator import attrgetter

import numpy as np
from jaxtyping import Int32

from pagedjax.blocks.allocator import NULL_BLOCK
from pagedjax.blocks.table import first_seen
from pagedjax.config import EngineConfig
from pagedjax.model_input import ModelInput, SamplingInput
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request


def build_batch(scheduled: SchedulerOutput, config: EngineConfig) -> ModelInput:
    """The model's input for one step, as numpy arrays: tokens of all requests one after another, T and S padded.

    Call it after `schedule` and before `update`. With `config.check_integrity`, an index that leaves the pool or the
    model's positions is an AssertionError: on the device it would read or write another request's KV without a word.
    """
    requests = list(scheduled.num_new_tokens)
    R = len(requests)
    num_new = np.fromiter(scheduled.num_new_tokens.values(), np.int32, R)
    num_computed = np.fromiter(map(attrgetter("num_computed_tokens"), requests), np.int32, R)
    ends = np.cumsum(num_new, dtype=np.int32)
    num_tokens = int(ends[-1])
    is_decode = num_tokens == R
    num_samples = len(scheduled.sampling)  # with many completions of a short prompt there are more of these
    T = config.bucket_for(max(num_tokens, num_samples), is_decode=is_decode)
    S = config.num_rows_for(T)

    block_tables = _pad_block_tables(requests, S, config)
    rows = np.repeat(np.arange(R), num_new)
    positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(ends - num_new - num_computed, num_new)
    blocks = block_tables[:, rows, positions // config.block_size]
    slots = blocks * config.block_size + positions % config.block_size
    context_lens = _padded(num_computed + num_new, S)
    query_start_loc = np.concatenate([[0], ends, np.full(S - R, num_tokens)], dtype=np.int32)
    token_ids = chain.from_iterable(
        [0] * n
        if request.is_finished  # since it was scheduled: its tokens may be fewer now
        else request.token_ids[request.num_computed_tokens : request.num_computed_tokens + n]
        for request, n in scheduled.num_new_tokens.items()
    )
    row_of = {request: row for row, request in enumerate(requests)}
    # Any row for one that was aborted after `schedule`, and so is no fork any more: its token is dropped.
    sampling_rows = np.fromiter(
        (0 if r.is_finished else row_of[r.fork_of or r] for r in scheduled.sampling), np.intp, num_samples
    )

    batch = ModelInput(
        token_ids=_padded(np.fromiter(token_ids, np.int32, num_tokens), T),
        positions=_padded(positions, T),
        groups=tuple(
            AttentionMetadata(_padded(slots[group], T), table, context_lens, query_start_loc, 1 if is_decode else T)
            for group, table in enumerate(block_tables)
        ),
        logits_indices=_padded(ends[sampling_rows] - 1, S),
        num_samples=np.array(num_samples, np.int32),
        sampling=_sampling_input(scheduled.sampling, S),
    )
    if config.check_integrity:
        _check_ranges(batch, requests, config)
    return batch


def padding_batch(config: EngineConfig, num_tokens: int, max_query_len: int) -> ModelInput:
    """A batch of this shape without any request: it computes on the null block alone."""
    num_rows = config.num_rows_for(num_tokens)

    def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros(shape, dtype)

    return ModelInput(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        groups=tuple(
            AttentionMetadata(
                slot_mapping=zeros(num_tokens),
                block_tables=zeros(num_rows, config.max_blocks_per_seq),
                context_lens=zeros(num_rows),
                query_start_loc=zeros(num_rows + 1),
                max_query_len=max_query_len,
            )
            for _ in config.windows
        ),
        logits_indices=zeros(num_rows),
        num_samples=zeros(),
        sampling=SamplingInput(
            temperature=zeros(num_rows, dtype=np.float32),
            top_k=zeros(num_rows),
            top_p=np.ones(num_rows, np.float32),
            min_p=zeros(num_rows, dtype=np.float32),
            seed=zeros(num_rows, 2, dtype=np.uint32),
            sample_index=zeros(num_rows, dtype=np.uint32),
            num_outputs=zeros(num_rows, dtype=np.uint32),
        ),
    )


def _pad_block_tables(requests: list[Request], S: int, config: EngineConfig) -> Int32[np.ndarray, "G S B"]:
    tables = np.zeros((len(config.windows), S, config.max_blocks_per_seq), np.int32)
    lengths = np.fromiter((len(request.block_table) for request in requests), np.int32, len(requests))
    for group, table in enumerate(tables):
        flat = np.frombuffer(b"".join(request.block_table.rows[group] for request in requests), np.int32)
        used = table[: len(requests), : lengths.max()]  # a view
        used[np.arange(used.shape[1]) < lengths[:, None]] = flat
    return tables


def _sampling_input(requests: list[Request], S: int) -> SamplingInput:
    def column(name: str, dtype: type, padding: int = 0) -> np.ndarray:
        out = np.full(S, padding, dtype)
        out[: len(requests)] = np.fromiter(map(attrgetter(name), requests), dtype, len(requests))
        return out

    seeds = column("seed", np.uint64)
    return SamplingInput(
        temperature=column("params.temperature", np.float32),
        top_k=np.maximum(column("params.top_k", np.int32), 0),
        top_p=column("params.top_p", np.float32, padding=1),
        min_p=column("params.min_p", np.float32),
        seed=np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=1).astype(np.uint32),
        sample_index=column("sample_index", np.uint32),
        num_outputs=column("num_output_tokens", np.uint32),
    )


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.zeros(size - len(values), values.dtype)])


def _check_ranges(batch: ModelInput, requests: list[Request], config: EngineConfig) -> None:
    """Raises AssertionError for an index that the device would clamp, wrap or drop instead of refusing it."""
    num_tokens = int(batch.attn.query_start_loc[-1])
    token_ids, positions = batch.token_ids[:num_tokens], batch.positions[:num_tokens]
    lowest = -config.max_num_rows if config.async_scheduling else 0  # the placeholders are the lowest there can be
    assert (token_ids >= lowest).all(), f"negative token id in {token_ids}"
    assert ((positions >= 0) & (positions < config.max_model_len)).all(), f"position outside the model: {positions}"
    query_lens = np.diff(batch.attn.query_start_loc)
    for request, context_len, query_len in zip(requests, batch.attn.context_lens, query_lens, strict=False):
        if request.is_finished:  # aborted after `schedule`: it writes to the null block, and its token is dropped
            continue
        for row, window in zip(request.block_table.rows, config.windows, strict=True):
            first = first_seen(int(context_len - query_len), window, config.block_size)
            lowest = [NULL_BLOCK] * first + [NULL_BLOCK + 1] * (len(row) - first)
            is_inside = all(low <= block <= config.num_blocks for low, block in zip(lowest, row, strict=False))
            assert is_inside, f"block outside the pool: {row}"
            assert len(row) >= config.table_len(int(context_len)), f"{context_len} tokens in {len(row)} blocks"
