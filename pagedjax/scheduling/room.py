"""How many blocks a group that waits needs, and what of it is there already; blocks for several decodes. Host only."""

import sys
from typing import NamedTuple

from pagedjax.blocks.table import Rows
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.kv_store import KVStore
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import RequestStatus
from pagedjax.scheduling.swap import SwapSpace


class Room(NamedTuple):
    """What there is for a group that waits."""

    num_missing: int
    """Blocks that would have to come free first; none or less if there is room."""
    rows: Rows = ()
    """Blocks that hold the KV of its beginning already."""
    num_tokens: int = 0
    """How many tokens of KV these hold."""


def room_for(group: SequenceGroup, kv: KVStore, swap: SwapSpace, num_growing: int) -> Room:
    """The room for all that is known of a group, beside blocks for `num_growing` sequences to grow into."""
    config = kv.config
    num_left = kv.allocator.num_free_blocks - num_growing * len(config.windows)
    if group.status is RequestStatus.SWAPPED:
        return Room(swap.num_blocks_for_return(group) - num_left)
    group.find_common_tokens()
    leader, *others = group.requests
    # Behind the end of a window's blocks nothing can be forked: there the others' tokens must be the last ones found.
    limit = group.num_common_tokens if others and any(config.windows) else sys.maxsize
    rows, num_found = kv.find(leader, limit)
    found = [block for row in rows for block in row[: num_found // config.block_size] if block]
    wanted = config.num_blocks_for(leader.num_tokens) - len(found)
    wanted += sum(config.num_own_blocks_for(each.num_tokens, group.num_common_tokens) for each in others)
    wanted += sum(kv.allocator.ref_count(block) == 0 for row in rows for block in row if block)
    return Room(wanted - num_left, rows, num_found)


def reserve_decodes(step: SchedulerOutput, kv: KVStore) -> None:
    """Lets a step of nothing but plain decodes compute several tokens, as far as there are blocks for all of them."""
    is_decode = step.num_tokens == len(step.sampling) and step.sampling == list(step.num_new_tokens)
    if not step or not is_decode or not step.is_plain:
        return
    most, tables = kv.config.num_decode_steps, [request.block_table for request in step.sampling]
    lefts = [request.max_num_tokens - request.num_tokens for request in step.sampling]
    while most > 1:
        ends = [table.num_tokens + min(left, most) - 1 for table, left in zip(tables, lefts, strict=True)]
        blocks = (kv.config.table_len(end) - len(table) for end, table in zip(ends, tables, strict=True))
        if sum(blocks) * len(kv.config.windows) <= kv.allocator.num_free_blocks:
            break
        most //= 2
    if most > 1 and max(lefts) > 1:
        step.num_decodes.extend(min(left, most) for left in lefts)
        for table, num_decodes in zip(tables, step.num_decodes, strict=True):
            if num_decodes > 1:
                table.append(num_decodes - 1)
