"""What is in the pool's blocks beside what running requests hold: kept, pinned and findable KV. Host only."""

from collections.abc import Iterable

from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.prefix_cache import PrefixCache
from pagedjax.blocks.table import BlockTable, Rows
from pagedjax.config import EngineConfig
from pagedjax.scheduling.request import NO_BLOCKS, HeldKV, Request


class KVStore:
    """The allocator, the prefix cache on it, and the KV that nobody runs on but somebody has a handle on."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.allocator = BlockAllocator(config.num_blocks)
        self.prefix_cache = (
            PrefixCache(self.allocator, config.block_size, config.windows) if config.enable_prefix_caching else None
        )
        self.held: dict[HeldKV, None] = {}
        """KV with blocks, the one that will be dropped first in front."""
        self.pinned: dict[HeldKV, None] = {}
        """KV that there must always be room for, whether it is computed already or not."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that are not for pinned KV."""
        return self.config.num_blocks - sum(self.config.num_blocks_for(len(held.token_ids)) for held in self.pinned)

    def new_table(self, rows: Rows = (), num_tokens: int = 0) -> BlockTable:
        """A table of nothing, or of what `find` has found."""
        table = BlockTable(self.allocator, self.config.block_size, self.config.windows, rows)
        table.num_tokens = num_tokens
        return table

    def find(self, request: Request, limit: int) -> tuple[Rows, int]:
        """Rows of blocks that hold the KV of a request's first tokens, `limit` at most, and of how many: of what it
        goes on from, or cached."""
        limit = min(limit, request.max_cached_tokens)
        rows = self.prefix_cache.find(request, limit) if self.prefix_cache is not None else ()
        num_cached = len(rows[0]) * self.config.block_size if rows else 0
        if request.source is not None:
            table = request.source.block_table
            num_held = min(table.num_tokens, limit)
            if num_held > num_cached and table.reaches(num_held):
                return [row[: self.config.table_len(num_held)] for row in table.rows], num_held
        return rows, num_cached

    def publish(self, request: Request) -> None:
        """Makes the full blocks that a request has computed findable."""
        num_full = request.num_computed_tokens // self.config.block_size
        if num_full > request.num_published_blocks and self.prefix_cache is not None:
            self.prefix_cache.publish(request)

    def count(self, request: Request) -> None:
        """Counts, for the statistics, what was found for a request."""
        if self.prefix_cache is not None:
            self.prefix_cache.num_query_tokens += request.num_tokens
            self.prefix_cache.num_hit_tokens += request.num_computed_tokens

    def forget(self, requests: Iterable[Request]) -> None:
        """Empties the prefix cache but for pinned KV; `requests` are all unfinished ones."""
        if self.prefix_cache is None:
            return
        self.prefix_cache.reset()
        for request in requests:
            request.block_names.clear()
        for held in self.pinned:
            if held in self.held:
                self.prefix_cache.publish_held(held)

    def keep(self, request: Request) -> None:
        """Takes the KV of a request that has ended over, unless what it was computed for has its KV by now."""
        kept = request.kept = request.kept or HeldKV(request.token_ids.copy())
        if kept in self.held:
            request.block_table.free()
            return
        kept.block_table = request.block_table
        kept.block_table.truncate(request.num_tokens - request.generates)  # the last one's KV is of no use to anyone
        kept.block_table.give_up_passed()
        self.held[kept] = None

    def shorten(self, held: HeldKV, num_tokens: int) -> None:
        """Takes the last tokens away: the text ended before them."""
        del held.token_ids[num_tokens:]
        if held in self.held:
            held.block_table.truncate(num_tokens - 1)

    def hold_fork(self, held: HeldKV) -> HeldKV:
        """The same tokens once more, on the same blocks."""
        fork = HeldKV(held.token_ids.copy())
        if held in self.held:
            fork.block_table = held.block_table.fork()
            self.held[fork] = None
        return fork

    def drop(self, held: HeldKV) -> None:
        """Frees the blocks of KV that nobody runs on; does nothing for one that has none."""
        if held in self.held:
            del self.held[held]
            held.block_table.free()

    @property
    def num_droppable_blocks(self) -> int:
        """Blocks that held KV without a pin has; more than would come free where two share one."""
        droppable = (held for held in self.held if not held.is_pinned)
        return sum(len(held.block_table.blocks) for held in droppable)

    def drop_oldest(self) -> bool:
        """Drops what has been held longest, if anything is that is not pinned."""
        held = next((held for held in self.held if not held.is_pinned), None)
        if held is not None:
            self.drop(held)
        return held is not None

    def restart(self) -> None:
        """Begins again with an empty pool, whatever the state is; pinned KV keeps its room, and is to be computed."""
        self.allocator.reset()
        for held in self.held:
            held.block_table = NO_BLOCKS
        self.held.clear()
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def pin(self, held: HeldKV, num_needed: int) -> None:
        """Keeps room for KV until `unpin`. ValueError unless `num_needed` blocks, for a request, are left."""
        num_blocks = self.config.num_blocks_for(len(held.token_ids))
        if num_blocks + num_needed > self.num_usable_blocks:
            raise ValueError(
                f"a prefix of {len(held.token_ids)} tokens takes {num_blocks} blocks of {self.config.block_size}, but "
                f"of the {self.num_usable_blocks} that are not pinned {num_needed} may be needed by a request"
            )
        held.is_pinned = True
        self.pinned[held] = None

    def unpin(self, held: HeldKV) -> None:
        """Lets go of KV that was pinned."""
        held.is_pinned = False
        self.pinned.pop(held, None)
        if held.computed_by is not None:
            held.computed_by.keeps_kv = False

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Recounts all blocks; `requests` are the running ones."""
        assert not any(held.block_table.is_freed for held in self.held), "held KV without blocks"
        tables = [request.block_table.blocks for request in requests]
        self.allocator.check_integrity([*tables, *(held.block_table.blocks for held in self.held)])
