"""What each block of the pool holds, for whom, and how often it is shared: for tests, for a server, for people."""

from dataclasses import dataclass

from pagedjax.blocks.allocator import NULL_BLOCK
from pagedjax.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class BlockInfo:
    """One physical block."""

    block: int
    holders: tuple[str, ...]
    """Ids of the sequences that have it in their tables, "held" or "pinned" for KV that nobody runs on; as many as its
    reference count. Empty for a free block."""
    is_cached: bool
    """Whether the prefix cache can find it, in use or free."""
    first_position: int | None
    """Position, in its sequence, of its first slot; None for one that holds nothing that anyone could use."""
    token_ids: tuple[int, ...]
    """Tokens whose KV is in it."""
    layer_group: int = 0
    """Of which layers of these tokens: see `ModelConfig.layer_groups`."""

    @property
    def ref_count(self) -> int:
        """How many hold it."""
        return len(self.holders)


@dataclass(frozen=True)
class MemoryMap:
    """The pool at one moment. Its text is a picture: a letter for each block by its first holder, or its number of
    holders if they are several, "," for a free block that the prefix cache can find, "." for a free one without use.
    """

    block_size: int
    blocks: tuple[BlockInfo, ...]
    """Blocks 1 to num_blocks; the null block is not among them."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks that anyone holds."""
        return sum(info.ref_count > 0 for info in self.blocks)

    @property
    def num_shared_blocks(self) -> int:
        """Blocks with more than one holder."""
        return sum(info.ref_count > 1 for info in self.blocks)

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that sharing saves: each holder but the first would have its own."""
        return sum(info.ref_count - 1 for info in self.blocks if info.ref_count)

    @property
    def num_wasted_slots(self) -> int:
        """Slots of held blocks without KV."""
        return sum(self.block_size - len(info.token_ids) for info in self.blocks if info.ref_count)

    def __str__(self) -> str:
        names = dict.fromkeys(holder for info in self.blocks for holder in info.holders)
        letters = {name: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[i % 26] for i, name in enumerate(names)}

        def sign(info: BlockInfo) -> str:
            if not info.holders:
                return "," if info.is_cached else "."
            return (
                letters[info.holders[0]] if info.ref_count == 1 else str(info.ref_count) if info.ref_count < 10 else "*"
            )

        signs = "".join(map(sign, self.blocks))
        rows = [signs[start : start + 64] for start in range(0, len(signs), 64)]
        legend = " ".join(f"{letter}={name}" for name, letter in list(letters.items())[:26])
        return "\n".join([*rows, legend]) if legend else "\n".join(rows)


def build_memory_map(scheduler: Scheduler) -> MemoryMap:
    """The map between two steps."""
    size, allocator = scheduler.config.block_size, scheduler.allocator
    tables = [
        (request.request_id, request.token_ids, request.block_table)
        for request in scheduler.requests(scheduler.running)
    ]
    tables += [("pinned" if held.is_pinned else "held", held.token_ids, held.block_table) for held in scheduler.kv.held]
    holders: dict[int, list[str]] = {}
    contents: dict[int, tuple[int, tuple[int, ...], int]] = {}
    for name, token_ids, table in tables:
        for group, i, block in (
            (group, i, block) for group, row in enumerate(table.rows) for i, block in enumerate(row)
        ):
            if block == NULL_BLOCK:
                continue
            holders.setdefault(block, []).append(name)
            content = (i * size, tuple(token_ids[i * size : min((i + 1) * size, table.num_tokens)]), group)
            contents[block] = max(contents.get(block, content), content, key=lambda each: len(each[1]))

    def info(block: int) -> BlockInfo:
        cached = allocator.note_of(block)
        first, token_ids, group = contents.get(block) or (
            (cached.first_position, tuple(cached.token_ids), cached.layer_group) if cached else (None, (), 0)
        )
        return BlockInfo(block, tuple(holders.get(block, ())), cached is not None, first, token_ids, group)

    return MemoryMap(size, tuple(info(block) for block in range(1, allocator.num_blocks + 1)))
