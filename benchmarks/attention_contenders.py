"""Random inputs for a shape, and everything that can attend over them: our implementations, and JAX's own functions."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measured_shapes import MeasuredShape

from pagedjax.pallas_kernels import reference
from pagedjax.pallas_kernels.attention import IMPLEMENTATIONS, paged_attention
from pagedjax.pallas_kernels.metadata import AttentionMetadata

BYTES_OF_SETS = 2**30
"""Sets of inputs are two at least, and then as many as make up this size or `MAX_SETS`. Eight of the smallest shape
(chunk-512-on-4k) are 180 MB, three times an H200's L2 cache: a set has left it when its turn comes again."""
MAX_SETS = 8
MAX_REFERENCE_KEYS = 65536
"""The reference gathers its keys per token, in f32: 2 x 268 MB with 8 KV heads of 128."""
TOLERANCE = {jnp.dtype(jnp.bfloat16): 2e-2, jnp.dtype(jnp.float32): 2e-5}
"""Largest error over largest output. bf16: inputs are the same, but weights, partial sums (in the baselines) and
outputs are rounded to 8 bits, 4e-3 each. f32 (CPU only): sums in another order."""


class CannotRunError(Exception):
    """Why a baseline, or an implementation, does not take part."""


class Case(NamedTuple):
    """Sets of inputs in one pool: each has queries, and blocks of its own in random order."""

    shape: MeasuredShape
    k_pool: jax.Array
    v_pool: jax.Array
    queries: list[jax.Array]
    metas: list[AttentionMetadata]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


class Contender(NamedTuple):
    """A function, what it is called with for each set, and how its output becomes [T, H, D]."""

    function: Callable[..., jax.Array]
    sets: list[tuple[Any, ...]]


def num_sets_for(shape: MeasuredShape, itemsize: int, num_bytes: int = BYTES_OF_SETS) -> int:
    return min(MAX_SETS, max(2, -(-num_bytes // shape.num_bytes(itemsize))))


def make_case(shape: MeasuredShape, dtype: jax.typing.DTypeLike, num_sets: int) -> Case:
    """Random normal queries, keys and values throughout: zeros could run faster than real data."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, 1 + num_sets * shape.num_blocks)).astype(np.int32)
    pool_shape = (1 + num_sets * shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    k_pool, v_pool, *queries = (
        _normal(seed, x, jnp.dtype(dtype))
        for seed, x in enumerate([pool_shape] * 2 + [(shape.num_tokens, shape.num_heads, shape.head_dim)] * num_sets)
    )
    metas = [jax.device_put(_metadata(shape, of_set)) for of_set in blocks.reshape(num_sets, -1)]
    return Case(shape, k_pool, v_pool, queries, metas)


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(seed), shape, dtype)


def _metadata(shape: MeasuredShape, blocks: np.ndarray) -> AttentionMetadata:
    num_rows, per_row = len(shape.rows), shape.blocks_per_row
    tables = np.zeros((num_rows, max(per_row)), np.int32)
    tables[np.arange(tables.shape[1]) < np.array(per_row)[:, None]] = blocks
    return AttentionMetadata(
        slot_mapping=np.zeros(shape.num_tokens, np.int32),  # attention only reads
        block_tables=tables,
        context_lens=np.array([context for context, _ in shape.rows], np.int32),
        query_start_loc=np.cumsum([0] + [new for _, new in shape.rows], dtype=np.int32),
        max_query_len=shape.max_query_len,
    )


# --- what takes part


def contender(name: str, case: Case) -> Contender:
    """By its name in `IMPLEMENTATIONS` or in `BASELINES`."""
    if name in BASELINES:
        return BASELINES[name](case)
    if name.startswith("pallas") and not on_gpu():
        raise CannotRunError("no GPU: it would run in Pallas' interpreter, which says nothing about its speed")

    def attend(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, meta: AttentionMetadata) -> jax.Array:
        return paged_attention(q, k_pool, v_pool, meta, scale=case.scale, implementation=name)

    sets = zip(case.queries, case.metas, strict=True)
    return Contender(attend, [(q, case.k_pool, case.v_pool, meta) for q, meta in sets])


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _same_new_tokens(shape: MeasuredShape) -> int:
    """New tokens of every row."""
    num_new = {new for _, new in shape.rows}
    if len(num_new) > 1:
        raise CannotRunError("takes a rectangular batch: rows with different numbers of new tokens would be padded")
    return num_new.pop()


@jax.jit
def _gather(pool: jax.Array, tables: jax.Array) -> jax.Array:
    """[N, K, bs, D] and [S, B] to [S, B bs, K, D]."""
    gathered = pool[tables].swapaxes(2, 3)
    return gathered.reshape(len(tables), -1, pool.shape[1], pool.shape[3])


def dense_attention(case: Case) -> Contender:
    """`jax.nn.dot_product_attention` on keys and values that lie together: cuDNN on a GPU, XLA on a CPU."""
    shape = case.shape
    num_new = _same_new_tokens(shape)
    is_ragged = len({context for context, _ in shape.rows}) > 1
    # Its causal mask counts both sides from 0: right for whole prompts alone. Others are given the mask.
    mask = None
    if num_new > 1 and not shape.is_prompt:
        key, token = jnp.arange(shape.max_context)[None, :], jnp.arange(num_new)[:, None]
        first = jnp.array([context - num_new for context, _ in shape.rows])
        mask = (key[None] <= first[:, None, None] + token[None])[:, None]
    elif shape.is_prompt and is_ragged:
        raise CannotRunError("prompts of different lengths would be padded")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None, mask: jax.Array | None) -> Any:
        out = jax.nn.dot_product_attention(
            q.reshape(len(k), num_new, shape.num_heads, shape.head_dim),
            k,
            v,
            mask=mask,
            scale=case.scale,
            is_causal=shape.is_prompt and num_new > 1,
            key_value_seq_lengths=lengths,
            implementation="cudnn" if on_gpu() else "xla",
        )
        return out.reshape(q.shape)

    sets = []
    for q, meta in zip(case.queries, case.metas, strict=True):
        k, v = (_gather(pool, meta.block_tables)[:, : shape.max_context] for pool in (case.k_pool, case.v_pool))
        sets.append((q, k, v, meta.context_lens if is_ragged else None, mask))
    return Contender(attend, sets)


def jax_pallas_attention(case: Case) -> Contender:
    """`jax.experimental.pallas.ops.gpu.paged_attention`: decodes; its pool has the heads first, and no scale."""
    if not on_gpu():
        raise CannotRunError("needs a GPU")
    if case.shape.max_query_len > 1:
        raise CannotRunError("takes decodes alone")
    try:
        theirs = import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    except ImportError as error:
        raise CannotRunError(f"jax has it no more, from 0.12.1 on: {error}") from error
    # The context is cut into k_splits parts of whole compute blocks of 8 pages; 16 is their default.
    pages = -(-case.shape.max_context // case.shape.block_size)
    k_splits = min(16, 1 << max(0, (pages // 8).bit_length() - 1))
    padding = -pages % (8 * k_splits)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        return theirs((q * case.scale).astype(q.dtype), k, v, tables, lengths, k_splits=k_splits)

    k_pages, v_pages = (jax.jit(lambda x: x.swapaxes(0, 1))(pool) for pool in (case.k_pool, case.v_pool))
    sets = zip(case.queries, case.metas, strict=True)
    return Contender(
        attend,
        [(q, k_pages, v_pages, jnp.pad(m.block_tables, ((0, 0), (0, padding))), m.context_lens) for q, m in sets],
    )


def cudnn_paged_attention(case: Case) -> Contender:
    """cuDNN's paged attention, which JAX has but does not show; its pool holds one batch exactly."""
    if not on_gpu():
        raise CannotRunError("needs a GPU")
    shape = case.shape
    num_new = _same_new_tokens(shape)
    if num_new > 1 and not shape.is_prompt:
        raise CannotRunError("its causal mask counts both sides from 0: right for whole prompts alone")
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType
        from jax._src.cudnn.fused_attention_stablehlo import paged_attention as theirs
    except ImportError as error:
        raise CannotRunError(f"this jax has it elsewhere: {error}") from error
    mask_type = MaskType.PADDING_CAUSAL if num_new > 1 else MaskType.PADDING

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        query = q.reshape(len(tables), num_new, *q.shape[1:]).swapaxes(1, 2)
        both_lengths = jnp.full(len(tables), num_new, jnp.int32), lengths
        options = {"scale": case.scale, "mask_type": mask_type, "qkv_layout": "BNTH"}
        out: Any = theirs(query, k, v, *both_lengths, tables, tables, **options)
        return out.swapaxes(1, 2).reshape(q.shape)

    sets = []
    for q, meta in zip(case.queries, case.metas, strict=True):
        order = np.random.default_rng(1).permutation(meta.block_tables.size).astype(np.int32)
        tables = meta.block_tables.reshape(-1)
        # Block order[i] of their pool is block i of the tables.
        k, v = (pool[tables[np.argsort(order)]] for pool in (case.k_pool, case.v_pool))
        sets.append((q, k, v, jnp.asarray(order).reshape(len(meta.block_tables), 1, -1, 1), meta.context_lens))
    return Contender(attend, sets)


BASELINES: dict[str, Callable[[Case], Contender]] = {
    "jax.nn dense": dense_attention,
    "jax pallas paged": jax_pallas_attention,
    "cudnn paged": cudnn_paged_attention,
}
ALL = (*IMPLEMENTATIONS, *BASELINES)


# --- whether it is right


class Expected(NamedTuple):
    """The reference's output for some tokens of the first set."""

    tokens: np.ndarray
    out: np.ndarray


def expected_of(case: Case) -> Expected:
    """Of the last tokens of rows and some in between: a token at position p attends as a decode over p + 1 does."""
    shape, meta = case.shape, case.metas[0]
    starts = np.cumsum([0] + [new for _, new in shape.rows])
    count = max(1, min(16, MAX_REFERENCE_KEYS // shape.max_context))
    tokens = np.unique(np.concatenate([starts[1:] - 1, np.linspace(0, shape.num_tokens - 1, 2 * count).astype(int)]))
    tokens = tokens[np.linspace(0, len(tokens) - 1, min(count, len(tokens))).round().astype(int)]
    rows = np.searchsorted(starts, tokens, side="right") - 1
    contexts = np.array([shape.rows[row][0] for row in rows]) - (starts[rows + 1] - 1 - tokens)
    as_decodes = AttentionMetadata(
        slot_mapping=np.zeros(len(tokens), np.int32),
        block_tables=np.asarray(meta.block_tables)[rows],
        context_lens=contexts.astype(np.int32),
        query_start_loc=np.arange(len(tokens) + 1, dtype=np.int32),
        max_query_len=1,
    )
    run = jax.jit(reference.paged_attention, static_argnames="scale")
    out = run(case.queries[0][tokens], case.k_pool, case.v_pool, as_decodes, scale=case.scale)
    return Expected(tokens, np.asarray(out))


def error_of(out: jax.Array, expected: Expected) -> float:
    """Largest error over largest output; NaN if there is one anywhere."""
    if not bool(jnp.isfinite(out).all()):
        return float("nan")
    actual = np.asarray(out[expected.tokens].astype(jnp.float32))
    return float(np.abs(actual - expected.out).max() / np.abs(expected.out).max())


def difference(out: jax.Array, other: jax.Array) -> float:
    """Of two whole outputs, over the largest value."""
    a, b = out.astype(jnp.float32), other.astype(jnp.float32)
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())
