"""Sizes and limits of one engine: frozen, validated once, host only."""

import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PREEMPTIONS = ("recompute", "swap", "auto")
POLICIES = ("fcfs", "priority")
MAX_SECONDS = 1e9
INVARIANT_TOKENS = 64
"""On a CPU, XLA's products of so many rows or more compute each row in the same way, however many there are
(docs/decisions.md)."""
INVARIANT_NUMBERS = 4096
"""So do its sums over the last axis of arrays of so many numbers."""


def check_positive_int(name: str, value: object) -> None:
    """Raises ValueError unless `value` is an int (not a bool) of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def invariant_tokens(width: int) -> int:
    """Fewest tokens of a step in which each is computed in the same way as in any larger one, on a CPU, of a model of
    which the narrowest array that sums are taken over has so many numbers per token."""
    return max(INVARIANT_TOKENS, -(-INVARIANT_NUMBERS // width))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the host side needs to know; the model's own sizes are in `pagedjax.models.config.ModelConfig`."""

    num_blocks: int
    """Usable KV blocks. The device pool holds one more: block 0, the null block, which padding reads and writes."""
    max_model_len: int
    """Most tokens that a request may have, prompt and output together."""
    block_size: int = 16
    """Tokens per KV block."""
    windows: tuple[int | None, ...] = (None,)
    """Of each group of the model's layers, which has block tables of its own (`ModelConfig.layer_groups`): how many
    tokens back its attention sees, the token itself included; None sees all."""
    max_num_seqs: int = 256
    """Most requests that run in one step."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step: decodes, and prompts in chunks."""
    min_tokens: int = 1
    """Fewest tokens of a step, filled up with padding: 2 where products of one row fall into a slow path, and
    `invariant_tokens` where nothing may depend on what else is in a step."""
    logprobs_mode: str = "raw_logprobs"
    """Which log-probabilities are given out: "raw_logprobs", of the model's logits, or "processed_logprobs", of what is
    drawn from, after edits, temperature and filters."""
    enable_prefix_caching: bool = True
    """Look for the KV of a prompt's full blocks in what was computed before, instead of computing it again."""
    preemption: str = "recompute"
    """What becomes of the KV of whoever has to make room: "recompute" forgets it, "swap" moves it to the host if there
    is room for all that a request has, "auto" takes what measures faster."""
    num_swap_blocks: int = 0
    """Blocks of the host pool."""
    scheduling_policy: str = "fcfs"
    """Who goes first: "fcfs", who came first, or "priority", where a level of priority counts as `priority_aging_s`."""
    priority_aging_s: float = 10.0
    """Seconds of waiting that make up for a level of priority: a request never waits for one that arrives later than
    this many seconds after it, times the difference of their levels."""
    num_decode_steps: int = 1
    """Most tokens that a request gets from one step in which everyone decodes."""
    async_scheduling: bool = False
    """Schedule a step while the device computes the one before it."""
    check_integrity: bool = False
    """Recount blocks and check every table before each step: for tests and for debugging."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int and field.name != "num_swap_blocks":
                check_positive_int(field.name, getattr(self, field.name))
            elif field.type is bool and not isinstance(value := getattr(self, field.name), bool):
                raise ValueError(f"{field.name} must be a bool, got {value!r}")
        if not isinstance(self.windows, tuple) or not self.windows:
            raise ValueError(f"windows must be a tuple with an entry for each group of layers, got {self.windows!r}")
        for window in self.windows:
            if window is not None:
                check_positive_int("windows", window)
        if self.num_blocks < len(self.windows):
            raise ValueError(
                f"num_blocks must be at least {len(self.windows)}, one for each group of layers, got {self.num_blocks}"
            )
        if type(self.num_swap_blocks) is not int or self.num_swap_blocks:
            check_positive_int("num_swap_blocks", self.num_swap_blocks)
        aging: Any = self.priority_aging_s if isinstance(self.priority_aging_s, Real) else 0
        if isinstance(aging, bool) or not 0 < aging < MAX_SECONDS:
            raise ValueError(f"priority_aging_s must be in (0, {MAX_SECONDS:g}), got {self.priority_aging_s!r}")
        if self.num_decode_steps > self.max_model_len:
            raise ValueError(
                f"num_decode_steps must be at most max_model_len={self.max_model_len}, got {self.num_decode_steps}"
            )
        choices = {"logprobs_mode": LOGPROBS_MODES, "preemption": PREEMPTIONS, "scheduling_policy": POLICIES}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")

    @property
    def batch_invariant(self) -> bool:
        """Whether, on a CPU, no bit of a request's result depends on what else is in its steps."""
        return self.min_tokens >= INVARIANT_TOKENS

    def max_prompt_len(self, *, generates: bool, num_blocks: int | None = None) -> int:
        """Longest prompt that fits the model and the pool, or `num_blocks` of it, with a first token to generate or
        without."""
        num_blocks = self.num_blocks if num_blocks is None else num_blocks
        if generates:
            return self.max_seq_len_in(num_blocks) - 1
        return min(self.max_model_len, self._table_len_in(num_blocks) * self.block_size)

    @cached_property
    def extras_buckets(self) -> tuple[int, ...]:
        """Rows that sampling with extras is padded to, ascending: few, as each is several small programs."""
        most = self.max_num_rows if self.batch_invariant else self.max_num_running
        return (*(size for size in (8, 64) if self.min_tokens <= size < most), most)

    def extras_buckets_for(self, num_tokens: int) -> tuple[int, ...]:
        """Those that a step of so many tokens may need."""
        most = min(num_tokens, self.max_num_running)
        return tuple(size for i, size in enumerate(self.extras_buckets) if i == 0 or self.extras_buckets[i - 1] < most)

    @property
    def max_num_running(self) -> int:
        """Most requests in one step: each running request needs at least one token of the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: enough for the longest request, which the pool limits as well as the model."""
        return self._table_len_in(self.num_blocks)

    @property
    def max_seq_len(self) -> int:
        """Most tokens a request can reach."""
        return self.max_seq_len_in(self.num_blocks)

    def max_seq_len_in(self, num_blocks: int) -> int:
        """Most tokens a sequence can reach in so many blocks: one more than fits, as the last one needs no slot."""
        return min(self.max_model_len, self._table_len_in(num_blocks) * self.block_size + 1)

    @cached_property
    def decode_buckets(self) -> tuple[int, ...]:
        """Sizes that a step of decodes alone is padded to, ascending: powers of two, from 16 on also halfway between
        them (at most a third is padding), and last the most requests that can run."""
        sizes = _buckets(self.max_num_rows, powers_from=0, halfway=True)
        return tuple(size for size in sizes if size >= self.min_tokens)

    @cached_property
    def mixed_buckets(self) -> tuple[int, ...]:
        """Sizes that a step with a chunk of a prompt is padded to: powers of two from 16 on, and last the budget. Few,
        as each is a program to compile, and as waiting prompts fill the budget anyway."""
        sizes = _buckets(max(self.max_num_batched_tokens, self.min_tokens), powers_from=4, halfway=False)
        return tuple(size for size in sizes if size >= self.min_tokens)

    def bucket_for(self, num_tokens: int, *, is_decode: bool) -> int:
        """What `num_tokens` tokens are padded to."""
        buckets = self.decode_buckets if is_decode else self.mixed_buckets
        return buckets[bisect_left(buckets, num_tokens)]

    def num_rows_for(self, num_tokens: int) -> int:
        """Rows of the tables of a step that is padded to `num_tokens` tokens."""
        return min(num_tokens, self.max_num_rows)

    @property
    def max_num_rows(self) -> int:
        """Most rows that the tables of a step may have."""
        return max(self.max_num_running, self.min_tokens)

    def table_len(self, num_tokens: int) -> int:
        """Entries of each row of a block table for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at a time on its way to `num_tokens` tokens with KV."""
        return self._num_blocks_in(self.table_len(num_tokens))

    def num_blocks_for_requests(self, num_requests: int, num_tokens: int) -> int:
        """Most blocks that so many sequences hold together on their way to `num_tokens` tokens with KV each: windows
        hold a chunk beside what they see, and all of them share one budget."""
        length, grown = self.table_len(num_tokens), 1 + self.table_len(self.num_decode_steps)
        total = 0
        for window, most in zip(self.windows, self._most_in_rows, strict=True):
            seen = length if window is None else self.table_len(window - 1)
            each = num_requests * min(length, most)
            total += each if window is None else min(each, num_requests * min(length, seen + grown) + most - seen)
        return total

    def num_own_blocks_for(self, num_tokens: int, num_shared_tokens: int) -> int:
        """The same, for a sequence that shares the blocks of its first tokens with others: those for it alone. One at
        least of each group, as it writes to one that is copied, or new."""
        num_own = self.table_len(num_tokens) - num_shared_tokens // self.block_size
        return sum(max(1, min(num_own, most)) for most in self._most_in_rows)

    def num_blocks_for_beams(self, num_beams: int, num_tokens: int, num_shared_tokens: int) -> int:
        """The same for so many sequences together, which share their first tokens."""
        num_each, num_shared = self.table_len(num_tokens), num_shared_tokens // self.block_size
        most = num_shared + num_beams * (num_each - num_shared)
        return sum(min(most, num_beams * min(num_each, row)) for row in self._most_in_rows)

    @cached_property
    def _most_in_rows(self) -> tuple[int, ...]:
        """Most blocks of each row of a block table that are held at a time. With a window those are what the first
        token of a chunk sees behind it, and the chunk, neither of which need begin with a block."""
        chunk = self.table_len(self.block_size - 1 + max(self.max_num_batched_tokens, self.num_decode_steps))
        return tuple(sys.maxsize if window is None else self.table_len(window - 1) + chunk for window in self.windows)

    def _num_blocks_in(self, table_len: int) -> int:
        return sum(min(table_len, most) for most in self._most_in_rows)

    def _table_len_in(self, num_blocks: int) -> int:
        """The longest block table that so many blocks always suffice for."""
        lengths = range(self.table_len(self.max_model_len) + 1)
        return bisect_right(lengths, num_blocks, key=self._num_blocks_in) - 1


def _buckets(limit: int, *, powers_from: int, halfway: bool) -> tuple[int, ...]:
    sizes = {2**k for k in range(powers_from, limit.bit_length())}
    if halfway:
        sizes |= {3 * 2**k for k in range(3, limit.bit_length())}
    return (*sorted(size for size in sizes if size < limit), limit)
