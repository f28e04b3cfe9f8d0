"""The blocks of one sequence, in order of position: grown, forked, freed. Host only."""

from array import array
from collections.abc import Iterable, Sequence

from pagedjax.blocks.allocator import BlockAllocator

BlockCopy = tuple[int, int]
"""(from, to): what has to be copied on the device before the step that writes."""


class UseAfterFreeError(RuntimeError):
    """Something that was freed is used as if it still had its blocks."""


class BlockTable:
    """A handle on the blocks that hold the KV of a sequence's first `num_tokens` tokens.

    Forks share all blocks and copy none. A block that others hold too is copied when it is written: that is the last,
    partly filled one, as full ones are never written again (PagedAttention, arXiv 2309.06180, section 4.4).
    """

    __slots__ = ("allocator", "block_size", "blocks", "is_freed", "num_tokens")

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.blocks = array("i")
        """Block ids as int32: `build_batch` copies them as bytes, whatever their number."""
        self.num_tokens = 0
        self.is_freed = False

    @classmethod
    def of_found(
        cls, allocator: BlockAllocator, block_size: int, blocks: Iterable[int], num_tokens: int
    ) -> "BlockTable":
        """A new table of blocks that hold so many tokens and were found, in use or by name; claims each."""
        table = cls(allocator, block_size)
        for block in blocks:
            allocator.claim(block)
            table.blocks.append(block)
        table.num_tokens = num_tokens
        return table

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, num_tokens: int) -> Sequence[BlockCopy] | None:
        """Makes room to write `num_tokens` more; None, and nothing has changed, if there are not enough free blocks.

        Returns the copies to be made before that: none, or one. The last holder of a block writes in place.
        Raises UseAfterFreeError after `free`.
        """
        self._assert_alive()
        end = self.num_tokens + num_tokens
        num_new = -(-end // self.block_size) - len(self.blocks)
        if num_new == 0 and num_tokens and self.allocator.is_exclusive(self.blocks[-1]):
            self.num_tokens = end  # most decodes
            return ()
        is_partial = self.num_tokens % self.block_size > 0
        is_shared = is_partial and self.allocator.ref_count(self.blocks[-1]) > 1
        if num_new + is_shared > self.allocator.num_free_blocks:
            return None
        copies = (self._own_last_block(),) if is_shared else ()
        if is_partial:
            self.allocator.forget_name(self.blocks[-1])  # it was full for another, who had more tokens in it
        for _ in range(num_new):
            self.blocks.append(self._allocate())
        self.num_tokens = end
        return copies

    def fork(self, num_tokens: int | None = None) -> "BlockTable":
        """A table that shares the blocks of the first `num_tokens` tokens, or of all.

        Raises UseAfterFreeError after `free`.
        """
        self._assert_alive()
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        table = BlockTable(self.allocator, self.block_size)
        table.blocks = self.blocks[: -(-num_tokens // self.block_size)]
        for block in table.blocks:
            self.allocator.fork(block)
        table.num_tokens = num_tokens
        return table

    def truncate(self, num_tokens: int) -> None:
        """Gives up the blocks behind the first `num_tokens` tokens."""
        self._assert_alive()
        if num_tokens < self.num_tokens:
            self.num_tokens = num_tokens
            while len(self.blocks) > -(-num_tokens // self.block_size):
                self.allocator.free(self.blocks.pop())

    def free(self) -> None:
        """Gives up all blocks, the last one first: of those that stay findable, it is the first to be handed out."""
        self._assert_alive()
        for block in reversed(self.blocks):
            self.allocator.free(block)
        del self.blocks[:]
        self.num_tokens = 0
        self.is_freed = True

    def _own_last_block(self) -> BlockCopy:
        shared, own = self.blocks[-1], self._allocate()
        self.allocator.free(shared)
        self.blocks[-1] = own
        return shared, own

    def _allocate(self) -> int:
        block = self.allocator.allocate()
        assert block is not None, "fewer free blocks than were counted"
        return block

    def _assert_alive(self) -> None:
        if self.is_freed:
            raise UseAfterFreeError("this block table was freed")
