"""The blocks of one sequence, in order of position: grown, forked, freed. Host only."""

from array import array
from collections.abc import Sequence

from pagedjax.blocks.allocator import NULL_BLOCK, BlockAllocator

BlockCopy = tuple[int, int]
"""(from, to): what has to be copied on the device before the step that writes."""
Rows = Sequence[Sequence[int]]
"""Block ids by position, a row for each group of layers. Where a window has passed it is the null block."""


class UseAfterFreeError(RuntimeError):
    """Something that was freed is used as if it still had its blocks."""


def first_seen(num_tokens: int, window: int | None, block_size: int) -> int:
    """The first block of a row whose KV is seen, through a window of so many tokens, from position `num_tokens` on."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


class BlockTable:
    """A handle on the blocks that hold the KV of a sequence's first `num_tokens` tokens.

    It has a row for each group of a model's layers (see `models.layer_groups`), mostly one; all rows are equally long.
    In a row with a window, blocks that no later token sees are given up.

    Forks share all blocks and copy none. A block that others hold too is copied when it is written: that is the last,
    partly filled one, as full ones are never written again (PagedAttention, arXiv 2309.06180, section 4.4).
    """

    __slots__ = ("allocator", "block_size", "is_freed", "num_tokens", "rows", "windows")

    def __init__(
        self, allocator: BlockAllocator, block_size: int, windows: tuple[int | None, ...] = (None,), rows: Rows = ()
    ) -> None:
        """With `rows` it claims what was found, in use or by name; set `num_tokens` then."""
        self.allocator = allocator
        self.block_size = block_size
        self.windows = windows
        self.rows = [array("i", row) for row in rows or [()] * len(windows)]
        """Block ids as int32: `build_batch` copies them as bytes, whatever their number."""
        self.num_tokens = 0
        self.is_freed = False
        for block in self.blocks:
            allocator.claim(block)

    def __len__(self) -> int:
        return len(self.rows[0])

    @property
    def blocks(self) -> list[int]:
        """All blocks that it holds."""
        return [block for row in self.rows for block in row if block]

    def append(self, num_tokens: int) -> Sequence[BlockCopy] | None:
        """Makes room to write `num_tokens` more; None, and nothing has changed, if there are not enough free blocks.

        Returns the copies to be made before that: none, or one per row. The last holder of a block writes in place.
        Raises UseAfterFreeError after `free`.
        """
        self._assert_alive()
        allocator, rows, end = self.allocator, self.rows, self.num_tokens + num_tokens
        num_new = -(-end // self.block_size) - len(rows[0])
        if num_new == 0 and num_tokens:
            for row in rows:
                if not allocator.is_exclusive(row[-1]):
                    break
            else:
                self.num_tokens = end  # most decodes
                return ()
        is_partial = self.num_tokens % self.block_size > 0
        shared = [row for row in rows if allocator.ref_count(row[-1]) > 1] if is_partial else []
        if num_new * len(rows) + len(shared) > allocator.num_free_blocks:
            return None
        copies = tuple(self._own_last_block(row) for row in shared)
        for row in rows:
            if is_partial:
                allocator.forget_name(row[-1])  # it was full for another, who had more tokens in it
            for _ in range(num_new):
                row.append(self._allocate())
        self.num_tokens = end
        return copies

    def give_up_passed(self) -> None:
        """Gives up the blocks that no window reaches from here on.

        Those stay that somebody needs who goes on from its last full block, as one does who finds it in the cache; so
        a long sequence holds a constant number of blocks.
        """
        num_full = self.num_tokens // self.block_size * self.block_size
        for row, window in zip(self.rows, self.windows, strict=True):
            for i in range(first_seen(num_full, window, self.block_size) - 1, -1, -1):
                if row[i] == NULL_BLOCK:
                    break
                self.allocator.free(row[i])
                row[i] = NULL_BLOCK

    def reaches(self, num_tokens: int) -> bool:
        """Whether it has all that is needed to go on after the first `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        firsts = (first_seen(num_tokens, window, self.block_size) for window in self.windows)
        return num_tokens <= self.num_tokens and all(
            first >= num_blocks or row[first] != NULL_BLOCK for row, first in zip(self.rows, firsts, strict=True)
        )

    def fork(self, num_tokens: int | None = None) -> "BlockTable":
        """A table that shares the blocks of the first `num_tokens` tokens, or of all.

        Raises UseAfterFreeError after `free`.
        """
        self._assert_alive()
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        rows = [row[: -(-num_tokens // self.block_size)] for row in self.rows]
        table = BlockTable(self.allocator, self.block_size, self.windows, rows)
        table.num_tokens = num_tokens
        return table

    def truncate(self, num_tokens: int) -> None:
        """Gives up the blocks behind the first `num_tokens` tokens."""
        self._assert_alive()
        if num_tokens < self.num_tokens:
            self.num_tokens = num_tokens
            num_blocks = -(-num_tokens // self.block_size)
            for row in self.rows:
                self._free(row[num_blocks:])
                del row[num_blocks:]

    def free(self) -> None:
        """Gives up all blocks, the last one first: of those that stay findable, it is the first to be handed out."""
        self._assert_alive()
        for row in self.rows:
            self._free(row)
            del row[:]
        self.num_tokens = 0
        self.is_freed = True

    def _free(self, row: Sequence[int]) -> None:
        for block in reversed(row):
            if block != NULL_BLOCK:
                self.allocator.free(block)

    def _own_last_block(self, row: array) -> BlockCopy:
        shared, own = row[-1], self._allocate()
        self.allocator.free(shared)
        row[-1] = own
        return shared, own

    def _allocate(self) -> int:
        block = self.allocator.allocate()
        assert block is not None, "fewer free blocks than were counted"
        return block

    def _assert_alive(self) -> None:
        if self.is_freed:
            raise UseAfterFreeError("this block table was freed")
