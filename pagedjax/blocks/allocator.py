"""Hands out the blocks of the KV pool, with reference counts so that sequences can share them. Host only."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

NULL_BLOCK = 0
"""Never handed out: padding reads from it and writes to it."""


class BlockAllocator:
    """Blocks 1..num_blocks with a reference count each; every operation is O(1).

    A block may be given a name. It keeps it when its last holder has gone, and whoever knows the name can claim it
    back until it is handed out anew: free blocks without a name go first, then the one that was freed first.

    Lack of capacity is a return value. Misuse (freeing or sharing a block that nobody holds) is an AssertionError.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_blocks_used = 0
        """Most blocks ever in use at one time."""
        self.reset()

    def reset(self) -> None:
        """Forgets all holders and names: every block is free."""
        num_blocks = self.num_blocks
        self.num_references = 0
        """Holders of all blocks together: as many blocks as would be in use if none were shared."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))  # the first is given next
        self._ref_counts = [0] * (num_blocks + 1)
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._notes: dict[int, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can still give, named ones included."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that anyone holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_named_blocks(self) -> int:
        """Blocks that can be found by name, held or free."""
        return len(self._names)

    def ref_count(self, block: int) -> int:
        """How many holders `block` has; 0 when it is free."""
        return self._ref_counts[block]

    def is_exclusive(self, block: int) -> bool:
        """Whether a block may be written as it is: it has one holder and no name."""
        return self._ref_counts[block] == 1 and block not in self._names

    def allocate(self) -> int | None:
        """A block with one holder and no name, or None when all are in use."""
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        self.forget_name(block)
        self._hold(block)
        return block

    def fork(self, block: int) -> None:
        """Adds a holder to a block that is in use."""
        self._assert_held(block)
        self._hold(block)

    def free(self, block: int) -> None:
        """Takes a holder away; the block is free again when the last one has gone."""
        self._assert_held(block)
        self.num_references -= 1
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if block not in self._names:
                self._free.move_to_end(block, last=False)

    def name(self, block: int, name: bytes, note: Any = None) -> bool:
        """Makes a block that is in use findable; False if another block has this name already. `note` says what is in
        it, for people."""
        self._assert_held(block)
        if name in self._named:
            return self._named[name] == block
        assert block not in self._names, f"block {block} has another name"
        self._names[block] = name
        self._named[name] = block
        self._notes[block] = note
        return True

    def find(self, name: bytes) -> int | None:
        """The block of this name, which may be free."""
        return self._named.get(name)

    def note_of(self, block: int) -> Any | None:
        """The note on a block, if it has a name."""
        return self._notes.get(block)

    def claim(self, block: int) -> None:
        """Adds a holder to a block that was found: it is in use, or free with a name."""
        if block in self._free:
            assert block in self._names, f"block {block} is free and has no name"
            del self._free[block]
        self._hold(block)

    def forget_name(self, block: int) -> None:
        """Takes a block's name away, if it has one: what is in it is about to change."""
        if (name := self._names.pop(block, None)) is not None:
            del self._named[name], self._notes[block]

    def forget_names(self) -> None:
        """Takes all names away: nothing will be found any more, what is held stays so."""
        self._names.clear()
        self._named.clear()
        self._notes.clear()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Recounts everything from the tables of all holders; raises AssertionError where the books are wrong."""
        held = Counter(chain.from_iterable(block_tables))
        free = self._free.keys()
        assert not free & held.keys(), f"blocks both free and in a table: {sorted(free & held.keys())}"
        assert free | held.keys() == set(range(1, self.num_blocks + 1)), "free and held blocks are not all blocks"
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} has ref count {count}, and {held[block]} tables hold it"
        assert self.num_references == held.total(), f"{self.num_references} references, and {held.total()} in tables"
        assert self._named == {name: block for block, name in self._names.items()}, "a name leads to another block"
        assert self._notes.keys() == self._names.keys(), "a note without a name"

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self.num_references += 1
        self.peak_blocks_used = max(self.peak_blocks_used, self.num_used_blocks)

    def _assert_held(self, block: int) -> None:
        is_held = 0 < block <= self.num_blocks and self._ref_counts[block] > 0
        assert is_held, f"nobody holds block {block}"
