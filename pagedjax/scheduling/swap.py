"""Where preempted groups' KV can wait instead of being recomputed: the blocks of the host pool. Host only."""

from collections.abc import Mapping
from itertools import chain

from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.table import BlockTable
from pagedjax.scheduling.group import SequenceGroup

NO_COPIES: Mapping[int, int] = {}


class SwapSpace:
    """Moves block tables between the pool and the host pool (swapping: paper, section 4.5).

    Blocks that sequences of a group share are moved once and are shared again where they come to. Between the two only
    block ids change here: the step that they are scheduled for moves what is in the blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, pool: BlockAllocator) -> None:
        self.host = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.pool = pool
        self.num_swapped_out = 0
        """Blocks that went to the host so far."""
        self.num_swapped_in = 0
        """Blocks that came back so far."""

    def swap_out(self, group: SequenceGroup, copies: Mapping[int, int]) -> Mapping[int, int]:
        """Gives a running group tables of host blocks for what it has computed: {host block: block}, or nothing if
        there are not enough. `copies` {to: from} are still to be made: what they copy is where it was."""
        moves = _move_tables(group, self.host, copies)
        self.num_swapped_out += len(moves)
        return moves

    def swap_in(self, group: SequenceGroup) -> Mapping[int, int]:
        """Gives a swapped group tables of blocks again: {block: host block}. There must be enough of them."""
        moves = _move_tables(group, self.pool, NO_COPIES)
        self.num_swapped_in += len(moves)
        return moves

    def new_table(self) -> BlockTable:
        """A table of nothing, for a sequence of a swapped group that has not begun."""
        return BlockTable(self.host, self.block_size)

    def num_blocks_for_return(self, group: SequenceGroup) -> int:
        """Blocks that a swapped group needs, with those that its next tokens will take."""
        size = self.block_size
        num_shared = group.num_common_tokens // size
        wanted = len(set(chain.from_iterable(request.block_table.blocks for request in group.requests)))
        for request in group.requests:
            num_blocks, table = -(-request.num_tokens // size), request.block_table
            if request.fork_of is not None:
                wanted += max(1, num_blocks - num_shared)
                continue
            wanted += num_blocks - len(table)
            if table.num_tokens % size and self.host.ref_count(table.blocks[-1]) > 1:
                wanted += 1  # a shared block that it will write to, and so copy
        return wanted

    def check_integrity(self, tables: list[BlockTable]) -> None:
        """Recounts the host's blocks from the tables of all swapped sequences."""
        self.host.check_integrity([table.blocks for table in tables])


def _move_tables(group: SequenceGroup, target: BlockAllocator, copies: Mapping[int, int]) -> dict[int, int]:
    """{new block: old block}; empty, and nothing has changed, if `target` has too few free blocks."""
    old_tables = {request: request.block_table for request in group.requests if not request.block_table.is_freed}
    contents = {}
    for request, table in old_tables.items():
        num_blocks = -(-request.num_computed_tokens // table.block_size)  # not what it was to compute next
        contents[request] = [copies.get(block, block) for block in table.blocks[:num_blocks]]
    distinct = dict.fromkeys(chain.from_iterable(contents.values()))
    if len(distinct) > target.num_free_blocks:
        return {}
    new_blocks = {}
    for block in distinct:
        new_blocks[block] = target.allocate()
    for request, blocks in contents.items():
        moved = (new_blocks[block] for block in blocks)
        size, num_tokens = request.block_table.block_size, request.num_computed_tokens
        request.block_table = BlockTable.of_found(target, size, moved, num_tokens)
    for block in new_blocks.values():
        target.free(block)  # the tables hold them now
    for table in old_tables.values():
        table.free()
    return {new: old for old, new in new_blocks.items()}
