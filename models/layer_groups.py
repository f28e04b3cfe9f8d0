"""Which layers share block tables: layers with the same attention window, in groups of one size. Host only, no jax.

A block of the pool holds the KV of as many tokens for each layer of one group, and any group may have any block. So a
group with a window holds blocks for its window alone, and what it gives up serves any other group or request.
"""

from collections import Counter
from typing import NamedTuple


class LayerGroups(NamedTuple):
    """The groups of a model's layers. A block table of a sequence has a row for each group."""

    windows: tuple[int | None, ...]
    """How many tokens back, itself included, a token of the group's layers sees; None: all of them."""
    places: tuple[tuple[int, int], ...]
    """(group, pool) of each layer: the row of the block tables that it reads, and which of the arrays that a block lies
    in is its own."""
    num_pools: int
    """Arrays that a block lies in: as many as a group has layers at most."""


def group_layers(windows: tuple[int | None, ...]) -> LayerGroups:
    """The groups of layers that have these windows, in the order in which their first layers come.

    A group has as many layers as the rarest window; where a window's layers are no multiple of it, the last group is
    shorter and leaves a part of its blocks unused: less than if groups were as large as the commonest window's. (vLLM's
    hybrid KV cache manager groups layers like this.)
    """
    counts = Counter(windows)
    num_pools = min(counts.values())
    groups: list[int | None] = []
    last_group: dict[int | None, int] = {}
    num_in_group = Counter[int]()
    places = []
    for window in windows:
        group = last_group.get(window)
        if group is None or num_in_group[group] == num_pools:
            group = last_group[window] = len(groups)
            groups.append(window)
        places.append((group, num_in_group[group]))
        num_in_group[group] += 1
    return LayerGroups(tuple(groups), tuple(places), num_pools)
