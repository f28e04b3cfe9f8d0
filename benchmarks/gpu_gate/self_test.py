"""Programs with known faults: the gate must report each, and must pass the same programs without them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Abstract
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from benchmarks.gpu_gate.aot import compile_for
from benchmarks.gpu_gate.cards import CARDS
from benchmarks.gpu_gate.cases import ABOVE_32_BITS, Case
from benchmarks.gpu_gate.checks import breaches

POOL = Abstract((4097, 8, 16, 128), jnp.bfloat16)
NEW = Abstract((64, 8, 128), jnp.bfloat16)
SLOTS = Abstract((64,), jnp.int32)
LARGE_POOL = Abstract((ABOVE_32_BITS + 1, 16384), jnp.bfloat16)


class Fault(NamedTuple):
    case: Case
    reported: str | None
    """What a breach of it contains; None for a case without fault."""
    forgets_donation: bool = False


def faults() -> Iterator[Fault]:
    yield from kernel_faults()
    yield from pool_faults()
    yield from offset_faults()


def kernel_faults() -> Iterator[Fault]:
    """Products that fit a thread block, and that do not."""
    tall, wide = Abstract((128, 16), jnp.bfloat16), Abstract((256, 512), jnp.bfloat16)
    yield Fault(Case(name="it fits", function=product(num_warps=4), args=(tall, tall)), None)
    yield Fault(Case(name="it spills", function=product(num_warps=1), args=(tall, tall)), "spills registers")
    yield Fault(Case(name="too much to share", function=product(num_warps=8), args=(wide, wide)), "does not compile")


def pool_faults() -> Iterator[Fault]:
    """Writes into the pool, and other uses of it, in place or not."""
    case = partial(Case, args=(POOL, NEW, SLOTS), pool=(0,), donates_pool=True, allows_atomics=False)
    yield Fault(case(name="in place", function=write), None)
    yield Fault(case(name="not donated", function=write), "updated in place", forgets_donation=True)
    yield Fault(case(name="maybe twice", function=write_any), "atomics")
    yield Fault(case(name="needed twice", function=write_and_read_old), ": copy")
    yield Fault(case(name="rewritten", function=rewrite, args=(POOL,)), ": fusion")
    reading = Case(name="converted", function=read_as_f32, args=(POOL,), pool=(0,))
    yield Fault(reading, ": convert")
    yield Fault(reading, "bytes of temporaries")


def offset_faults() -> Iterator[Fault]:
    """The same gather from a pool that 32 bits do not suffice for, with and without enough."""
    case = partial(Case, args=(LARGE_POOL, SLOTS), pool=(0,), largest_index=ABOVE_32_BITS)
    yield Fault(case(name="64 bits", function=gather_rows), None)
    yield Fault(case(name="32 bits", function=gather_flat), "may overflow")


def failures() -> list[str]:
    """The faults that the gate did not report, and the good programs that it refused."""
    found = []
    for card in (CARDS["A100"], CARDS["H100"]):
        for case, reported, forgets_donation in faults():
            donate = case.pool if case.donates_pool and not forgets_donation else ()
            lines = breaches(compile_for(card, case.function, case.args, donate=donate), case)
            is_right = not lines if reported is None else any(reported in line for line in lines)
            if not is_right:
                found.append(
                    f"{case.name}, {card.name}: expected {reported or 'nothing'}, reported {lines or 'nothing'}"
                )
    return found


def product(num_warps: int) -> Callable[..., jax.Array]:
    """A kernel of one thread block: more warps share the accumulators."""

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = plt.dot(x_ref[...], y_ref[...].T)

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        out = Abstract((x.shape[0], y.shape[0]), jnp.float32)
        return pl.pallas_call(kernel, out_shape=out, compiler_params=plt.CompilerParams(num_warps=num_warps))(x, y)

    return call


def write(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows into slots, which are promised to be distinct."""
    return pool.at[slots // 16, :, slots % 16].set(new, unique_indices=True)


def write_any(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows into slots, two of which may be the same."""
    return pool.at[slots // 16, :, slots % 16].set(new)


def write_and_read_old(pool: jax.Array, new: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both pools are alive at the end."""
    written = write(pool, new, slots)
    return written, written[slots] - pool[slots]


def rewrite(pool: jax.Array) -> jax.Array:
    """In place and without temporaries, and yet it moves the whole pool."""
    return pool * jnp.bfloat16(0.5)


def read_as_f32(pool: jax.Array) -> jax.Array:
    """Sorts, which no fusion can do on the fly, a converted pool."""
    return jnp.sort(pool.astype(jnp.float32), axis=-1)[0]


def gather_rows(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """Indexes the pool with two numbers."""

    def kernel(pool_ref: Any, blocks_ref: Any, out_ref: Any) -> None:
        i = pl.program_id(0)
        out_ref[i, :] = pool_ref[blocks_ref[i], :]

    return _gather(kernel, pool, blocks)


def gather_flat(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """Multiplies a block number in 32 bits, as all integers are in jax."""
    width = pool.shape[1]

    def kernel(pool_ref: Any, blocks_ref: Any, out_ref: Any) -> None:
        i = pl.program_id(0)
        out_ref[i, :] = pool_ref[blocks_ref[i] * width + jnp.arange(width)]

    return _gather(kernel, pool.reshape(-1), blocks, width)


def _gather(kernel: Callable[..., None], pool: jax.Array, blocks: jax.Array, width: int | None = None) -> jax.Array:
    out = Abstract((len(blocks), width or pool.shape[1]), pool.dtype)
    compiler_params = plt.CompilerParams(num_warps=4)
    return pl.pallas_call(kernel, grid=(len(blocks),), out_shape=out, compiler_params=compiler_params)(pool, blocks)
