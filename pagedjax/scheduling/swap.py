"""Where preempted groups' KV can wait instead of being recomputed: the blocks of the host pool. Host only."""

from collections.abc import Mapping
from itertools import chain

from pagedjax.blocks.allocator import NULL_BLOCK, BlockAllocator
from pagedjax.blocks.table import BlockTable
from pagedjax.config import EngineConfig
from pagedjax.scheduling.group import SequenceGroup

NO_COPIES: Mapping[int, int] = {}


class SwapSpace:
    """Moves block tables between the pool and the host pool (swapping: paper, section 4.5).

    Blocks that sequences of a group share are moved once and are shared again where they come to. Between the two only
    block ids change here: the step that they are scheduled for moves what is in the blocks.
    """

    def __init__(self, config: EngineConfig, pool: BlockAllocator) -> None:
        self.config = config
        self.host = BlockAllocator(config.num_swap_blocks)
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
        return BlockTable(self.host, self.config.block_size, self.config.windows)

    def num_blocks_for_return(self, group: SequenceGroup) -> int:
        """Blocks that a swapped group needs, with those that its next tokens will take."""
        config = self.config
        wanted = len(set(chain.from_iterable(request.block_table.blocks for request in group.requests)))
        for request in group.requests:
            table = request.block_table
            if request.fork_of is not None:
                wanted += config.num_own_blocks_for(request.num_tokens, group.num_common_tokens)
                continue
            wanted += config.num_blocks_for(request.num_tokens - len(table) * config.block_size)
            if table.num_tokens % config.block_size:  # shared blocks that it will write to, and so copy
                wanted += sum(self.host.ref_count(row[-1]) > 1 for row in table.rows)
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
        contents[request] = [[copies.get(block, block) for block in row[:num_blocks]] for row in table.rows]
    held = chain.from_iterable(chain.from_iterable(rows) for rows in contents.values())
    distinct = dict.fromkeys(block for block in held if block != NULL_BLOCK)
    if len(distinct) > target.num_free_blocks:
        return {}
    new_blocks = {}
    for block in distinct:
        new_blocks[block] = target.allocate()
    for request, rows in contents.items():
        old, moved = request.block_table, [[new_blocks.get(block, NULL_BLOCK) for block in row] for row in rows]
        request.block_table = BlockTable(target, old.block_size, old.windows, moved)
        request.block_table.num_tokens = request.num_computed_tokens
    for block in new_blocks.values():
        target.free(block)  # the tables hold them now
    for table in old_tables.values():
        table.free()
    return {new: old for old, new in new_blocks.items()}
