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
        found: list[list[int]] = []
        while len(found) < len(self.windows):
            row, num_known = self._find_row(names, len(found))
            if num_known == len(names):
                found.append(row)
            else:  # and those before it have to do with less, too
                found, names = [], names[:num_known]
        return found

    def _find_row(self, names: Sequence[bytes], group: int) -> tuple[list[int], int]:
        """A group's blocks under these names; and how many of the names are worth another try, all if it has them."""
        row = [NULL_BLOCK] * len(names)
        first = first_seen(len(names) * self.block_size, self.windows[group], self.block_size)
        # Without a window the first that is missing decides, with one the last.
        indices = range(len(names)) if self.windows[group] is None else range(len(names) - 1, first - 1, -1)
        for i in indices:
            if (block := self.allocator.find(_name_in(group, names[i]))) is None:
                return [], i
            row[i] = block
        return row, len(names)

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
