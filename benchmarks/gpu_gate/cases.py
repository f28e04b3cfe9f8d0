"""What the gate compiles: one line per kernel and shape."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Abstract

from pagedjax.pallas_kernels.attention import paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.pallas_kernels.pool_ops import copy_blocks, gather_blocks, scatter_blocks, write_kv

POOL_TOKENS = 64 * 1024
CONTEXT = 2048
"""Tokens of each request, for the bytes that must move."""
MAX_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function to compile, with what it is given and what is known about it."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Trees of ShapeDtypeStructs."""
    pool: tuple[int, ...] = ()
    """Which of the arguments are the KV pool, or a part of it."""
    donates_pool: bool = False
    moved_bytes: int = 0
    """What any implementation must read and write, at `CONTEXT` tokens a request."""
    largest_index: int | None = None
    """Of a pool that is too large for 32-bit offsets: the largest number in the tables."""
    allows_atomics: bool = True
    """False for what only moves data. XLA stores 16-bit numbers with them where two may be the same one."""
    temp_fraction: float = 0.5
    """Most bytes of temporaries, as a fraction of the smallest array of the pool."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def pool_elements(self) -> int:
        """Numbers in the smallest array of the pool, 0 without a pool."""
        return min((prod(leaf.shape) for leaf in self._pool_leaves()), default=0)

    @property
    def temp_limit(self) -> int | None:
        sizes = [num_bytes(leaf) for leaf in self._pool_leaves()]
        return round(min(sizes) * self.temp_fraction) if sizes else None

    @property
    def in_place_bytes(self) -> int:
        """Bytes of the pool that must be updated where they are."""
        return sum(num_bytes(leaf) for leaf in self._pool_leaves()) if self.donates_pool else 0

    def _pool_leaves(self) -> list[Abstract]:
        return [leaf for number in self.pool for leaf in jax.tree.leaves(self.args[number])]


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def attention(
    name: str,
    *,
    implementation: str = "pallas_triton",
    rows: int = 64,
    tokens: int | None = None,
    max_query_len: int | None = None,
    group: int = 4,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: str = "bfloat16",
    num_blocks: int | None = None,
    **options: Any,
) -> Case:
    """Decodes of `rows` requests, or with `tokens` a chunk of that many tokens of one request beside other decodes."""
    num_tokens = tokens or rows
    max_query_len = max_query_len or (tokens or 1)
    pool = pool_array(kv_heads, head_dim, block_size, dtype, num_blocks)
    q = Abstract((num_tokens, group * kv_heads, head_dim), dtype)
    num_keys = min(CONTEXT, options.get("sliding_window", CONTEXT))
    kv_read = 2 * rows * num_keys * kv_heads * head_dim * pool.dtype.itemsize
    return Case(
        name=name,
        function=partial(paged_attention, scale=head_dim**-0.5, implementation=implementation),
        args=(q, pool, pool, metadata(rows, num_tokens, max_query_len, block_size)),
        pool=(1, 2),
        moved_bytes=kv_read + 2 * num_bytes(q),
        largest_index=pool.shape[0] - 1 if num_blocks is not None else None,
        options=options,
    )


def kv_write(name: str, *, tokens: int = 64, num_blocks: int | None = None, **pool_options: Any) -> Case:
    """The write of a step's keys and values into the pool."""
    pool = pool_array(**pool_options, num_blocks=num_blocks)
    _, kv_heads, block_size, head_dim = pool.shape
    new = Abstract((tokens, kv_heads, head_dim), pool.dtype)
    return _pool_op(
        name,
        write_kv,
        (pool, pool, new, new, Abstract((tokens,), jnp.int32)),
        moved_bytes=4 * num_bytes(new) + 4 * tokens,
        largest_index=len(pool) * block_size - 1 if num_blocks is not None else None,
    )


def block_ops(suffix: str = "", *, blocks: int = 64, num_blocks: int | None = None, **pool_options: Any) -> list[Case]:
    """Copies of blocks within the pool, out of it and into it."""
    pool = pool_array(**pool_options, num_blocks=num_blocks)
    table = Abstract((blocks,), jnp.int32)
    values = Abstract((blocks, *pool.shape[1:]), pool.dtype)
    options: dict[str, Any] = {"largest_index": len(pool) - 1 if num_blocks is not None else None}
    one, both = 2 * num_bytes(values), 4 * num_bytes(values)
    return [
        _pool_op(f"copy blocks{suffix}", copy_blocks, (pool, pool, table, table), moved_bytes=both, **options),
        _pool_op(
            f"scatter blocks{suffix}", scatter_blocks, (pool, table, values), pool=(0,), moved_bytes=one, **options
        ),
        Case(
            name=f"gather blocks{suffix}",
            function=gather_blocks,
            args=(pool, table),
            pool=(0,),
            moved_bytes=one,
            **options,
        ),
    ]


def _pool_op(
    name: str, function: Callable[..., Any], args: Any, *, pool: tuple[int, ...] = (0, 1), **options: Any
) -> Case:
    return Case(name=name, function=function, args=args, pool=pool, donates_pool=True, allows_atomics=False, **options)


def pool_array(
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: str = "bfloat16",
    num_blocks: int | None = None,
) -> Abstract:
    """Keys, or values, of one layer, with the null block."""
    num_blocks = num_blocks or POOL_TOKENS // block_size
    return Abstract((num_blocks + 1, kv_heads, block_size, head_dim), jnp.dtype(dtype))


def metadata(rows: int, tokens: int, max_query_len: int, block_size: int) -> AttentionMetadata:
    """Tables of `rows` requests with `tokens` tokens together."""

    def table(*shape: int) -> Any:
        return Abstract(shape, jnp.int32)

    width = MAX_CONTEXT // block_size
    return AttentionMetadata(table(tokens), table(rows, width), table(rows), table(rows + 1), max_query_len)


ABOVE_32_BITS = 2**32 // (8 * 16 * 128)
"""Blocks of 8 heads x 16 slots x 128 numbers: with the null block the pool has more than 2^32 numbers."""


def kernel_cases() -> list[Case]:
    """Every kernel of the project, in the shapes that real models and options ask for."""
    cases = [
        attention("decode"),
        attention("decode, 1 row", rows=1),
        attention("decode, 256 rows", rows=256),
        *(attention(f"decode, head_dim {d}", head_dim=d) for d in (8, 64, 80, 96, 256)),
        *(attention(f"decode, block {size}", block_size=size) for size in (1, 8, 32, 128)),
        *(attention(f"decode, group {group}", group=group) for group in (1, 3, 7, 8)),
        *(attention(f"decode, {dtype}", dtype=dtype) for dtype in ("float16", "float32")),
        attention("decode, head_dim 256, float32", head_dim=256, dtype="float32"),
        attention("decode, window", sliding_window=1024),
        attention("decode, soft cap", logits_soft_cap=50.0),
        attention("chunk", tokens=512),
        attention("chunk, 1 row", tokens=512, rows=1),
        attention("drafts", tokens=320, max_query_len=5),
        *(attention(f"chunk, head_dim {d}", tokens=512, head_dim=d) for d in (64, 80, 96, 256)),
        *(attention(f"chunk, block {size}", tokens=512, block_size=size) for size in (1, 8, 32, 128)),
        *(attention(f"chunk, group {group}", tokens=512, group=group) for group in (1, 3, 7, 8)),
        *(attention(f"chunk, {dtype}", tokens=512, dtype=dtype) for dtype in ("float16", "float32")),
        attention("chunk, head_dim 256, float32", tokens=512, head_dim=256, dtype="float32"),
        attention("chunk, window", tokens=512, sliding_window=1024),
        attention("chunk, soft cap", tokens=512, logits_soft_cap=50.0),
        attention("decode, pool over 2^31", num_blocks=ABOVE_32_BITS // 2),
        attention("decode, pool over 2^32", num_blocks=ABOVE_32_BITS),
        attention("chunk, pool over 2^32", tokens=512, num_blocks=ABOVE_32_BITS),
        attention("decode in XLA", implementation="xla"),
        attention("chunk in XLA", implementation="xla", tokens=512),
        kv_write("write KV"),
        kv_write("write KV, 512 tokens", tokens=512),
        kv_write("write KV, head_dim 80, block 1", head_dim=80, block_size=1),
        kv_write("write KV, one head", kv_heads=1),
        *(kv_write(f"write KV, {dtype}", dtype=dtype) for dtype in ("float16", "float32")),
        kv_write("write KV, pool over 2^32", num_blocks=ABOVE_32_BITS),
        *block_ops(),
        *block_ops(", head_dim 80, block 1", head_dim=80, block_size=1),
        *block_ops(", float32", dtype="float32"),
        *block_ops(", pool over 2^32", num_blocks=ABOVE_32_BITS),
    ]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "a name stands for one case"
    return cases
