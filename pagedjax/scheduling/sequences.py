"""Sequences as handles: branches of text that nobody generates on just now, with their KV in the pool. Host only."""

import contextlib
from collections.abc import Callable
from typing import Any

from pagedjax.blocks.table import UseAfterFreeError
from pagedjax.outputs import CompletionOutput
from pagedjax.scheduling.kv_store import KVStore
from pagedjax.scheduling.request import HeldKV


class Sequence:
    """Token ids to go on from: a prompt for `generate` and the others whose KV is there already.

    Forks share their KV blocks, and nothing is copied until one of them writes. `append` adds tokens of the caller's
    own; their KV, like what the pool had no room to keep, is computed when somebody goes on from here. Every handle is
    to be freed, or else its blocks stay until running requests need them; it cannot be used after that.
    """

    def __init__(
        self,
        store: KVStore,
        kv: HeldKV,
        checked_ids: Callable[[Any], list[int]],
        *,
        guard: contextlib.AbstractContextManager[Any] | None = None,
        output: CompletionOutput | None = None,
    ) -> None:
        self.output = output
        """What was generated last to come here, if it was."""
        self._store = store
        self._kv: HeldKV | None = kv
        self._checked_ids = checked_ids
        self._guard = contextlib.nullcontext() if guard is None else guard

    @property
    def kv(self) -> HeldKV:
        """Its tokens and blocks, for the engine. Raises UseAfterFreeError after `free`, as all else does."""
        if self._kv is None:
            raise UseAfterFreeError("this sequence was freed")
        return self._kv

    @property
    def store(self) -> KVStore:
        """Whose blocks they are: a sequence belongs to one engine."""
        return self._store

    @property
    def token_ids(self) -> list[int]:
        """All its tokens, the prompt's too, a copy."""
        return self.kv.token_ids.copy()

    @property
    def num_resident_tokens(self) -> int:
        """How many of its tokens have their KV in the pool: none before it is used, all but the last one after it was
        generated, and none again if the room was needed."""
        return self.kv.block_table.num_tokens

    @property
    def is_freed(self) -> bool:
        """Whether it was freed."""
        return self._kv is None

    def fork(self) -> "Sequence":
        """Another sequence of the same tokens, on the same blocks."""
        with self._guard:
            kv = self._store.hold_fork(self.kv)
        return Sequence(self._store, kv, self._checked_ids, guard=self._guard, output=self.output)

    def append(self, token_ids: Any) -> None:
        """Adds tokens. ValueError for those that are not in the vocabulary, and for a pinned sequence."""
        if self.kv.is_pinned:
            raise ValueError("token_ids: a pinned sequence stays as it is: append to a fork of it")
        with self._guard:
            self.kv.token_ids.extend(self._checked_ids(token_ids))

    def free(self) -> None:
        """Gives its blocks up, a pinned one's too; those that others share stay."""
        with self._guard:
            self._store.unpin(self.kv)
            self._store.drop(self.kv)
            self._kv = None

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_freed:
            self.free()

    def __len__(self) -> int:
        return len(self.kv.token_ids)

    def __repr__(self) -> str:
        if self._kv is None:
            return "Sequence(freed)"
        pinned = ", pinned" if self._kv.is_pinned else ""
        return f"Sequence({len(self)} tokens, {self.num_resident_tokens} of them in the pool{pinned})"
