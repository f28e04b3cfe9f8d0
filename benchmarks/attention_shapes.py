"""Shapes of the paged attention op, and random calls of it: its tests and its benchmark take the same."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.pallas_kernels.metadata import AttentionMetadata


class Shape(NamedTuple):
    """What a kernel is compiled for, apart from the dtype and the number of tokens and requests."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None = None
    logits_soft_cap: float | None = None


# As the models' config.json says.
MODELS = {
    "smollm2 135m": Shape(9, 3, 64, 16),
    "qwen2.5 0.5b": Shape(14, 2, 64, 16),
    "llama 3.2 1b": Shape(32, 8, 64, 16),
    "llama 3.1 8b": Shape(32, 8, 128, 16),
    "phi 3 mini": Shape(32, 32, 96, 16, sliding_window=2047),
    "mistral 7b": Shape(32, 8, 128, 16, sliding_window=4096),
    "gemma 2 2b": Shape(8, 4, 256, 16, sliding_window=4096, logits_soft_cap=50.0),
}

Row = tuple[int, int]
"""Tokens of a request in the pool, and how many of them are new."""


class Case(NamedTuple):
    """One call of the op."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    meta: AttentionMetadata
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, AttentionMetadata]:
        return self.q, self.k_pool, self.v_pool, self.meta

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.q.shape[-1] ** -0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
        }


def first_seen(row: Row, sliding_window: int | None) -> int:
    """The first position of the context that a new token sees."""
    context, num_new = row
    return 0 if sliding_window is None else max(0, context - num_new + 1 - sliding_window)


def make_metadata(
    rows: Sequence[Row],
    block_size: int,
    *,
    sliding_window: int | None = None,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    table_width: int | None = None,
    num_blocks: int | None = None,
    seed: int = 0,
) -> AttentionMetadata:
    """Contexts in blocks in random order out of `num_blocks`; `num_tokens` and `num_rows` count padding too.

    Blocks wholly before the window are gone: the table holds 0 for them.
    """
    num_blocks = num_blocks or num_blocks_for(rows, block_size)
    num_rows = num_rows or len(rows)
    contexts, query_lens = (np.array(column) for column in zip(*rows, strict=True))
    ends = np.cumsum(query_lens)
    num_tokens = num_tokens or int(ends[-1])
    blocks_per_row = -(-contexts // block_size)
    free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
    tables = np.zeros((num_rows, table_width or int(max(blocks_per_row)) + 1), np.int32)
    for row, count in enumerate(blocks_per_row):
        first = first_seen(rows[row], sliding_window) // block_size
        tables[row, first:count], free = free[: count - first], free[count - first :]
    return AttentionMetadata(
        slot_mapping=np.zeros(num_tokens, np.int32),  # attention only reads
        block_tables=tables,
        context_lens=np.pad(contexts, (0, num_rows - len(rows))).astype(np.int32),
        query_start_loc=np.pad([0, *ends], (0, num_rows - len(rows)), mode="edge").astype(np.int32),
        max_query_len=1 if max(query_lens) == 1 else num_tokens,
    )


def num_blocks_for(rows: Sequence[Row], block_size: int) -> int:
    """Enough for the contexts, with the null block and two that stay unused."""
    return sum(-(-context // block_size) for context, _ in rows) + 3


def make_case(
    rows: Sequence[Row],
    shape: Shape,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    fill: float = math.nan,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    table_width: int | None = None,
    num_blocks: int | None = None,
    q_size: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random queries and contexts; `fill` lies in every slot that no new token sees, and in the queries of padding."""
    num_blocks = num_blocks or num_blocks_for(rows, shape.block_size)
    meta = make_metadata(
        rows,
        shape.block_size,
        sliding_window=shape.sliding_window,
        num_tokens=num_tokens,
        num_rows=num_rows,
        table_width=table_width,
        num_blocks=num_blocks,
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    pools = np.full((2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim), fill, np.float32)
    for table, row in zip(meta.block_tables, rows, strict=False):
        position = np.arange(first_seen(row, shape.sliding_window), row[0])
        blocks, offsets = table[position // shape.block_size], position % shape.block_size
        size = (len(position), 2, shape.num_kv_heads, shape.head_dim)
        pools[:, blocks, :, offsets] = rng.standard_normal(size, np.float32)
    q = np.full((len(meta.slot_mapping), shape.num_heads, shape.head_dim), fill, np.float32)
    num_real = int(meta.query_start_loc[-1])
    q[:num_real] = q_size * rng.standard_normal((num_real, *q.shape[1:]), np.float32)
    # a fill beyond float16 becomes infinite, which is as good
    with np.errstate(over="ignore"):
        k_pool, v_pool, q = (jnp.asarray(x, dtype) for x in (*pools, q))
    return Case(q, k_pool, v_pool, meta, shape.sliding_window, shape.logits_soft_cap)
