"""KV memory as it was handed out before paging: one contiguous region for each request, from a buddy allocator.

The baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1, "Baseline 2: Orca"), which differ in how much
they reserve: the model's length, the output's next power of two, or, as if they knew it, the output's true length.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

Policy = Callable[[int, int], int]
"""From the tokens of a prompt and of its output to the slots that are reserved for both."""


def policies(max_model_len: int) -> dict[str, Policy]:
    """By their names in the paper, for a model that takes so many tokens."""
    return {
        "Oracle": lambda prompt_len, output_len: prompt_len + output_len,
        "Pow2": lambda prompt_len, output_len: min(prompt_len + power_of_two(output_len), max_model_len),
        "Max": lambda prompt_len, output_len: max_model_len,
    }


def power_of_two(output_len: int) -> int:
    """The output over-reserved "by at most 2x. For example, if the true output length is 25, it reserves 32"."""
    return 1 << (output_len - 1).bit_length()


class Region(NamedTuple):
    """Slots from `start` on; `size` is a power of two."""

    start: int
    size: int


class BuddyAllocator:
    """Regions of powers of two, each at a multiple of its size (Knowlton 1965). A region is split in halves, two
    buddies, as often as fits; it is whole again when both are free.

    A pool whose size is no power of two starts as several regions, from the largest on.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_allocated_slots = 0
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        """Starts of the free regions of 2**order slots, by order."""
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> Region | None:
        """The lowest region of the smallest size that has room, or None if no free region is large enough."""
        wanted = (num_slots - 1).bit_length()
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.num_allocated_slots += 1 << wanted
        return Region(start, 1 << wanted)

    def free(self, region: Region) -> None:
        """Gives a region back."""
        start, order = region.start, region.size.bit_length() - 1
        self.num_allocated_slots -= region.size
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)

    def free_regions(self) -> list[Region]:
        """All of them, in order of their start."""
        return sorted(Region(start, 1 << order) for order, starts in enumerate(self._free) for start in starts)

    def check_integrity(self, allocated: Iterable[Region]) -> None:
        """Raises AssertionError unless free and `allocated` regions are all slots, once each, and no two free buddies
        are apart."""
        allocated, free, end = list(allocated), self.free_regions(), 0
        for region in sorted([*allocated, *free]):
            assert region.start == end, f"slots {end} to {region.start}: lost, or in two regions"
            assert region.start % region.size == 0, f"{region} is not aligned"
            end = region.start + region.size
        assert end == self.num_slots
        assert self.num_allocated_slots == sum(region.size for region in allocated)
        assert not any(Region(start ^ size, size) in free for start, size in free), "two free buddies"
