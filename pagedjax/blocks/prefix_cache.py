"""Finds the KV of a prompt's beginning in blocks that were filled before, by a hash of all tokens up to there.

Host only. A block is published under its name once a step has filled it, never before, and only if it is full: a full
block is not written again. Whoever holds it may free it; it can be found until it is handed out anew.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from pagedjax.blocks.allocator import NULL_BLOCK, BlockAllocator
from pagedjax.blocks.table import BlockTable, Rows, first_seen
from pagedjax.scheduling.request import HeldKV, Request


class CachedContent(NamedTuple):
    """What is in a block that can be found, for people."""

    first_position: int
    token_ids: array
    layer_group: int
    """Of which layers."""


class PrefixCache:
    """Names blocks by a SHA-256 that is chained over them: the name of the block before, and the block's own token ids.

    So equal names mean equal tokens from the first on, and the same `version`; nothing needs comparing on a hit. Each
    group of layers has its own block of these tokens, under the name with the group's number.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.windows = windows
        self.num_query_tokens = 0
        """Tokens of the requests that were looked up, once each."""
        self.num_hit_tokens = 0
        """Those of them whose KV was found."""
        self._version = 0
        self._root = b""
        self.reset()

    def reset(self) -> None:
        """Forgets everything: what was named before has another name now. Requests must forget their `block_names`."""
        self.allocator.forget_names()
        self._version += 1
        # What else the KV depends on, such as an adapter, belongs here too.
        self._root = sha256(f"version {self._version}".encode()).digest()

    def find(self, request: Request, max_tokens: int) -> Rows:
        """The blocks of the longest beginning of a request that is known to all groups, `max_tokens` long at most; they
        are not held yet. A group with a window need not know more than what is seen from there on."""
        num_blocks = max_tokens // self.block_size
        self._extend_names(request.block_names, request.token_ids, num_blocks)
        names = request.block_names[:num_blocks]
        rows: dict[int, list[int]] = {}
        for group, window in enumerate(self.windows):
            if window is None:
                rows[group] = self._known(names, group)
                del names[len(rows[group]) :]
        num_blocks = len(names)
        windows = [group for group in range(len(self.windows)) if group not in rows]
        while (num_reached := self._reached(names, num_blocks, windows)) < num_blocks:
            num_blocks = num_reached
        return [
            rows[group][:num_blocks] if group in rows else self._seen(names, num_blocks, group)
            for group in range(len(self.windows))
        ]

    def _known(self, names: Sequence[bytes], group: int) -> list[int]:
        """A group's blocks under the first of these names, up to one that it does not know."""
        row = []
        for name in names:
            if (block := self.allocator.find(_name_in(group, name))) is None:
                break
            row.append(block)
        return row

    def _reached(self, names: Sequence[bytes], num_blocks: int, groups: Sequence[int]) -> int:
        """How many of the first `num_blocks` blocks somebody can go on from, for all that each of these groups with a
        window knows by itself. Every name is looked up once, but for a window's length of them."""
        for group in groups:
            window, i = self.windows[group], num_blocks
            while i > first_seen(num_blocks * self.block_size, window, self.block_size):
                i -= 1
                if self.allocator.find(_name_in(group, names[i])) is None:
                    num_blocks = i
        return num_blocks

    def _seen(self, names: Sequence[bytes], num_blocks: int, group: int) -> list[int]:
        """A group's blocks as far as its window sees them behind `num_blocks` blocks, all of which it knows."""
        first = first_seen(num_blocks * self.block_size, self.windows[group], self.block_size)
        found = (self.allocator.find(_name_in(group, name)) for name in names[first:num_blocks])
        return [NULL_BLOCK] * first + [block or NULL_BLOCK for block in found]

    def publish(self, request: Request) -> None:
        """Makes a request's full blocks findable. Those whose content another block has too stay without a name."""
        num_full = request.num_computed_tokens // self.block_size
        self._extend_names(request.block_names, request.token_ids, num_full)
        names = request.block_names[:num_full]  # `find` may have made more
        self._publish(names, request.token_ids, request.block_table, request.num_published_blocks)
        request.num_published_blocks = num_full

    def publish_held(self, held: HeldKV) -> None:
        """The same for KV that nobody runs on, of which nothing is published yet."""
        names: list[bytes] = []
        self._extend_names(names, held.token_ids, held.block_table.num_tokens // self.block_size)
        self._publish(names, held.token_ids, held.block_table, 0)

    def _publish(self, names: list[bytes], token_ids: list[int], table: BlockTable, first: int) -> None:
        for i in range(first, len(names)):
            start = i * self.block_size
            content = array("i", token_ids[start : start + self.block_size])
            for group, row in enumerate(table.rows):
                if row[i] != NULL_BLOCK:
                    self.allocator.name(row[i], _name_in(group, names[i]), CachedContent(start, content, group))

    def _extend_names(self, names: list[bytes], token_ids: list[int], num_blocks: int) -> None:
        size = self.block_size
        while len(names) < num_blocks:
            start = len(names) * size
            content = array("q", token_ids[start : start + size]).tobytes()
            names.append(sha256((names[-1] if names else self._root) + content).digest())


def _name_in(group: int, name: bytes) -> bytes:
    return name + group.to_bytes(2) if group else name
