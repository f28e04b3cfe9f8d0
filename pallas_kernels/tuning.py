"""How the Pallas Triton attention cuts its work: every number that its kernels are tuned by, and why."""

from dataclasses import dataclass, replace

import jax


@dataclass(frozen=True)
class Tile:
    """The work of one thread block: rows of queries against the keys of a context, `num_keys` at a time."""

    num_rows: int
    """Rows of a product: tokens of one request x query heads of one KV head. A power of two, at least 16 (mma)."""
    num_keys: int
    """A power of two, at least 16."""
    num_warps: int
    num_stages: int
    """One more than the tiles of keys and values that are on their way while another is computed with."""

    def with_rows(self, num_rows: int) -> "Tile":
        """The tile, widened where it has fewer rows, with warps for its accumulators."""
        num_rows = max(self.num_rows, _next_power_of_2(num_rows))
        return replace(self, num_rows=num_rows, num_warps=max(self.num_warps, min(8, num_rows // 16)))


@dataclass(frozen=True)
class Tuning:
    """For one GPU, head_dim and dtype. Short requests wait for memory, long ones for products."""

    short: Tile
    """Of requests with few new tokens: decodes, drafts."""
    long: Tile
    """Of prompts and chunks."""
    max_draft_rows: int
    """A program in which all new tokens of any request fit so many rows knows short requests only."""
    num_programs: int
    """Thread blocks that fill the GPU: contexts are split until there are as many, if they are long enough."""
    min_split_keys: int = 256
    """Fewest keys of a split. One of 256 x 128 in bf16 reads 128 KiB and leaves 2 KiB for the merge: 2%."""
    max_splits: int = 64
    """The merge holds a row of every split in registers: 64 x 128 in f32 are 64 of them a thread."""

    def short_tile(self, group: int, max_query_len: int) -> Tile:
        """The tile of short requests in a program where none has more than `max_query_len` new tokens."""
        num_rows = group * max_query_len
        return self.short.with_rows(num_rows if num_rows <= self.max_draft_rows else group)

    def long_tile(self, group: int) -> Tile:
        """The tile of the other requests."""
        return self.long.with_rows(group)

    def num_splits(self, num_programs: int, max_context_len: int) -> int:
        """How many stretches a context is cut into at most where there are `num_programs` (request, KV head) pairs."""
        wanted = -(-self.num_programs // num_programs)
        return max(1, min(wanted, max_context_len // self.min_split_keys, self.max_splits))


NUM_MULTIPROCESSORS = {"A100": 108, "H100": 132, "H200": 132}
"""Of the SXM parts, by what `device_kind` contains; 132 for any other GPU."""
HOPPER = ("H100", "H200")
"""Where products read their operands from shared memory (wgmma), of which a thread block gets 227 KiB. Other GPUs hold
them in registers, and the smallest gives 99 KiB."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""An H200 needs 29 KiB on their way to each multiprocessor (4.8 TB/s x 0.8 us / 132), which two thread blocks have;
more of them even out contexts of unlike length."""
SHORT_KEY_BYTES = 16 * 1024
"""Of a tile of keys. With larger ones fewer thread blocks fit a multiprocessor, with smaller ones each waits more."""


def tuning_for(gpu: str, *, head_dim: int, itemsize: int) -> Tuning:
    """The tuning for a GPU (its `device_kind`), head_dim and bytes per number of queries and pool.

    The largest tiles that the compile gate shows not to spill registers; not yet compared by time on a GPU.
    """
    row_bytes = _next_power_of_2(head_dim) * itemsize
    num_multiprocessors = next((n for name, n in NUM_MULTIPROCESSORS.items() if name in gpu), 132)
    num_keys = max(16, min(128, SHORT_KEY_BYTES // row_bytes))
    short = Tile(num_rows=16, num_keys=num_keys, num_warps=4, num_stages=3)
    max_draft_rows = 64
    if itemsize == 4:  # no tensor cores in full f32: threads hold the products, and only small tiles fit registers
        short = Tile(num_rows=16, num_keys=min(32, num_keys), num_warps=8, num_stages=3)
        long = Tile(num_rows=16, num_keys=16, num_warps=8, num_stages=2)
        max_draft_rows = 16
    elif row_bytes > 256:
        long = Tile(num_rows=64, num_keys=32, num_warps=8, num_stages=2)
        max_draft_rows = 32
    elif row_bytes > 128 and not any(name in gpu for name in HOPPER):
        long = Tile(num_rows=128, num_keys=32, num_warps=8, num_stages=3)
    else:
        long = Tile(num_rows=128, num_keys=64, num_warps=8, num_stages=3)
    return Tuning(short, long, max_draft_rows, num_programs=PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors)


def max_group_for(*, head_dim: int, itemsize: int) -> int:
    """Query heads of a KV head that fit the rows of one tile, in registers and in 99 KiB of shared memory."""
    if itemsize == 4:
        return 16
    return 32 if _next_power_of_2(head_dim) * itemsize > 256 else 128


def current_gpu() -> str:
    """The `device_kind` that is compiled for: of the abstract mesh, if there is one, or else of the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
