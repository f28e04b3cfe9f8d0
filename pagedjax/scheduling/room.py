"""How many blocks a group that waits needs, and what of it is there already; blocks for several decodes. Host only."""

from collections.abc import Sequence
from typing import NamedTuple

from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.kv_store import KVStore
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import RequestStatus
from pagedjax.scheduling.swap import SwapSpace


class Room(NamedTuple):
    """What there is for a group that waits."""

    num_missing: int
    """Blocks that would have to come free first; none or less if there is room."""
    blocks: Sequence[int] = ()
    """Those that hold the KV of its beginning already."""
    num_tokens: int = 0
    """How many tokens of KV these hold."""


def room_for(group: SequenceGroup, kv: KVStore, swap: SwapSpace, num_growing: int) -> Room:
    """The room for all that is known of a group, beside a block each for `num_growing` sequences to grow into."""
    num_left = kv.allocator.num_free_blocks - num_growing
    if group.status is RequestStatus.SWAPPED:
        return Room(swap.num_blocks_for_return(group) - num_left)
    num_blocks_for = kv.config.num_blocks_for
    group.find_common_tokens()
    leader, *others = group.requests
    blocks, num_found = kv.find(leader)
    num_shared = group.num_common_tokens // kv.config.block_size
    wanted = num_blocks_for(leader.num_tokens) - num_found // kv.config.block_size
    wanted += sum(max(1, num_blocks_for(each.num_tokens) - num_shared) for each in others)
    wanted += sum(kv.allocator.ref_count(block) == 0 for block in blocks)
    return Room(wanted - num_left, blocks, num_found)


def reserve_decodes(step: SchedulerOutput, kv: KVStore) -> None:
    """Lets a step of nothing but plain decodes compute several tokens, as far as there are blocks for all of them."""
    is_decode = step.num_tokens == len(step.sampling) and step.sampling == list(step.num_new_tokens)
    if not step or not is_decode or not step.is_plain:
        return
    most, tables = kv.config.num_decode_steps, [request.block_table for request in step.sampling]
    lefts = [request.max_num_tokens - request.num_tokens for request in step.sampling]
    while most > 1:
        ends = [table.num_tokens + min(left, most) - 1 for table, left in zip(tables, lefts, strict=True)]
        blocks = (kv.config.num_blocks_for(end) - len(table) for end, table in zip(ends, tables, strict=True))
        if sum(blocks) <= kv.allocator.num_free_blocks:
            break
        most //= 2
    if most > 1 and max(lefts) > 1:
        step.num_decodes.extend(min(left, most) for left in lefts)
        for table, num_decodes in zip(tables, step.num_decodes, strict=True):
            if num_decodes > 1:
                table.append(num_decodes - 1)
