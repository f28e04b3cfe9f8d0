"""Hands out the blocks of the KV pool, with reference counts so that sequences can share them. Host only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

NULL_BLOCK = 0
"""Never handed out: padding reads from it and writes to it."""


class BlockAllocator:
    """Blocks 1..num_blocks with a free list and a reference count each; every operation is O(1).

    Lack of capacity is a return value. Misuse (freeing or sharing a block that nobody holds) is an AssertionError.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_blocks_used = 0
        """Most blocks ever in use at one time."""
        self._free_blocks = list(range(num_blocks, NULL_BLOCK, -1))  # a stack: the last one freed is the next one given
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free_blocks)

    def ref_count(self, block: int) -> int:
        """How many holders `block` has; 0 when it is free."""
        return self._ref_counts[block]

    def allocate(self) -> int | None:
        """A block with one holder, or None when all are in use."""
        if not self._free_blocks:
            return None
        block = self._free_blocks.pop()
        self._ref_counts[block] = 1
        self.peak_blocks_used = max(self.peak_blocks_used, self.num_blocks - len(self._free_blocks))
        return block

    def fork(self, block: int) -> None:
        """Adds a holder to a block that is in use."""
        self._assert_held(block)
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Takes a holder away; the block is free again when the last one has gone."""
        self._assert_held(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free_blocks.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Recounts everything from the tables of all holders; raises AssertionError where the books are wrong."""
        held = Counter(chain.from_iterable(block_tables))
        free = set(self._free_blocks)
        assert len(free) == len(self._free_blocks), "a block is in the free list twice"
        assert not free & held.keys(), f"blocks both free and in a table: {sorted(free & held.keys())}"
        assert free | held.keys() == set(range(1, self.num_blocks + 1)), "free and held blocks are not all blocks"
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} has ref count {count}, and {held[block]} tables hold it"

    def _assert_held(self, block: int) -> None:
        is_held = 0 < block <= self.num_blocks and self._ref_counts[block] > 0
        assert is_held, f"nobody holds block {block}"
