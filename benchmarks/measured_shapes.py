"""The batches that paged attention is measured on, by name, and what each must cost: bytes, operations. No jax."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Row = tuple[int, int]
"""Tokens of a request in the pool, and how many of them are new: (context, new)."""

MAX_DRAFT_LEN = 16
"""New tokens of a request, up to which a batch counts as one of drafts to verify."""


@dataclass(frozen=True)
class MeasuredShape:
    """One batch: who attends to how much, with which heads."""

    name: str
    rows: tuple[Row, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows)

    @property
    def num_keys(self) -> int:
        return sum(context for context, _ in self.rows)

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_per_row)

    @property
    def blocks_per_row(self) -> list[int]:
        return [-(-context // self.block_size) for context, _ in self.rows]

    @property
    def max_query_len(self) -> int:
        """What selects the program: 1 for decodes alone, the longest of drafts, else the number of tokens."""
        longest = max(new for _, new in self.rows)
        return longest if longest <= MAX_DRAFT_LEN else self.num_tokens

    @property
    def max_context(self) -> int:
        return max(context for context, _ in self.rows)

    @property
    def is_prompt(self) -> bool:
        """Whole prompts: every token in the pool is new."""
        return all(context == new for context, new in self.rows)

    def num_bytes(self, itemsize: int = 2) -> int:
        """The fewest bytes to move: keys and values once per KV head, queries, outputs, tables."""
        kv = 2 * self.num_keys * self.num_kv_heads * self.head_dim * itemsize
        q_and_out = 2 * self.num_tokens * self.num_heads * self.head_dim * itemsize
        tables = 4 * (self.num_blocks + 2 * len(self.rows) + 1)  # block tables, context lengths, query starts
        return kv + q_and_out + tables

    @property
    def num_flops(self) -> int:
        """Of the two products, over the pairs of a token and a key that it sees: 2 D each per head."""
        return 4 * num_pairs(self.rows) * self.num_heads * self.head_dim

    def small(self) -> "MeasuredShape":
        """The same kind of batch for a CPU: at most four rows, a 32nd of the tokens, two KV heads."""
        rows = [(context // 32, new if new <= 8 else new // 32) for context, new in _spread(self.rows, 4)]
        num_kv_heads = min(2, self.num_kv_heads)
        return replace(
            self,
            rows=tuple((max(context, new), new) for context, new in rows),
            num_heads=num_kv_heads * (self.num_heads // self.num_kv_heads),
            num_kv_heads=num_kv_heads,
        )


def num_pairs(rows: Sequence[Row]) -> int:
    """Pairs of a new token and a key that it sees: token i of n after c - n others sees c - n + i + 1."""
    return sum(new * (context - new) + new * (new + 1) // 2 for context, new in rows)


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` of the rows, from first to last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * (len(rows) - 1) // (count - 1)] for i in range(count)]


def _ragged(num_rows: int, mean: int, longest: int) -> tuple[Row, ...]:
    """Decodes with lognormal contexts, as in real traffic: many short ones, a few long ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, num_rows)  # this has the mean `mean`
    return tuple((int(length), 1) for length in np.clip(drawn, 16, longest))


K = 1024
SHAPES = {
    shape.name: shape
    for shape in (
        # The most telling ones first: a run that ends early has these.
        MeasuredShape("decode-64x4k", ((4 * K, 1),) * 64),
        MeasuredShape("prompt-1x4096", ((4 * K, 4 * K),)),
        MeasuredShape("decode-1x32k", ((32 * K, 1),)),
        MeasuredShape("chunk-512-on-4k", ((4 * K + 512, 512),)),
        MeasuredShape("drafts-32x5-on-2k", ((2 * K + 5, 5),) * 32),
        MeasuredShape("mixed", ((4 * K, 1),) * 32 + ((2 * K + 512, 512), (K, K))),
        MeasuredShape("decode-ragged-64", _ragged(64, mean=2 * K, longest=16 * K)),
        MeasuredShape("decode-8x8k", ((8 * K, 1),) * 8),
        MeasuredShape("decode-256x512", ((512, 1),) * 256),
        MeasuredShape("decode-mha-64x2k", ((2 * K, 1),) * 64, num_kv_heads=32),
        MeasuredShape("decode-gqa7-64x4k", ((4 * K, 1),) * 64, num_heads=28, num_kv_heads=4),
        MeasuredShape("decode-dim64-64x4k", ((4 * K, 1),) * 64, head_dim=64),
        MeasuredShape("decode-dim256-32x4k", ((4 * K, 1),) * 32, num_heads=16, head_dim=256),
        MeasuredShape("prompt-4x2048", ((2 * K, 2 * K),) * 4),
        MeasuredShape("prompt-1x8192", ((8 * K, 8 * K),)),
        MeasuredShape("prompt-gqa7-1x4096", ((4 * K, 4 * K),), num_heads=28, num_kv_heads=4),
        MeasuredShape("prompt-dim64-1x4096", ((4 * K, 4 * K),), head_dim=64),
        MeasuredShape("prompt-dim256-1x4096", ((4 * K, 4 * K),), num_heads=16, head_dim=256),
    )
}
"""Llama-3-8B's heads unless the name says otherwise; gqa7 is Qwen2-7B's, dim64 Llama-3.2-1B's, dim256 Gemma's size."""
QUICK = ("decode-64x4k", "prompt-1x4096", "decode-1x32k", "chunk-512-on-4k", "drafts-32x5-on-2k", "mixed")


def choose(patterns: Sequence[str]) -> list[MeasuredShape]:
    """The shapes whose names contain one of the patterns; ValueError if one of them matches nothing."""
    for pattern in patterns:
        if not any(pattern in name for name in SHAPES):
            raise ValueError(f"no shape's name contains {pattern!r}: there is {', '.join(SHAPES)}")
    return [shape for name, shape in SHAPES.items() if any(pattern in name for pattern in patterns)]
