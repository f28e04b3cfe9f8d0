"""Where the blocks of a batch lie, computed from shapes: B prompts of at most T tokens, N samples of each, all at once.

There is no allocator inside a compiled program. Each prompt has its blocks, which its samples share; each sample has
blocks for what it writes itself, from the prompt's last block on, if that is not full: the sample gets a copy of it.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pagedjax.config import INVARIANT_TOKENS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a batch. Hashable: part of the compiled program."""

    num_prompts: int
    prompt_len: int
    """The longest that a prompt may be: T of `prompt_ids`."""
    max_new_tokens: int
    num_samples: int = 1
    block_size: int = 16
    num_groups: int = 1
    """Groups of layers, each with tables and blocks of its own: see `models.layer_groups`."""
    exact_lens: bool = False
    """Whether all prompts are `prompt_len` tokens long: then it is known how full their last blocks are."""
    min_tokens: int = 1
    """Fewest tokens of a step, filled up with padding: see `EngineConfig`."""

    @property
    def batch_invariant(self) -> bool:
        """Whether nothing of a row depends on the others: see `init_kv_cache`."""
        return self.min_tokens >= INVARIANT_TOKENS

    @property
    def num_rows(self) -> int:
        """Rows after `fork`: row b * N + n is sample n of prompt b."""
        return self.num_prompts * self.num_samples

    @property
    def max_len(self) -> int:
        """Tokens of a row in the pool at most: the last new token is sampled, but nothing reads its KV."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def table_len(self) -> int:
        """Blocks of a row's table."""
        return _num_blocks(self.max_len, self.block_size)

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt. A prompt with one sample keeps room for that: nothing of it is shared or copied."""
        return self.table_len if self.num_samples == 1 else _num_blocks(self.prompt_len, self.block_size)

    @property
    def sample_blocks(self) -> int:
        """Blocks of one sample alone: those it writes to, whose first may begin with the end of its prompt."""
        num_written = self.max_new_tokens - 1
        if self.num_samples == 1 or num_written == 0:
            return 0
        most_copied = self.prompt_len % self.block_size if self.exact_lens else self.block_size - 1
        return _num_blocks(most_copied + num_written, self.block_size)

    @property
    def blocks_per_group(self) -> int:
        """Blocks of all prompts and samples, in one group of layers."""
        return self.num_prompts * self.prompt_blocks + self.num_rows * self.sample_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, without the null block."""
        return self.num_groups * self.blocks_per_group

    def filled_up(self, x: Array, axis: int = 0) -> Array:
        """With zeros behind the end of this axis, of rows or tokens, up to `min_tokens`."""
        missing = max(0, self.min_tokens - x.shape[axis])
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

    def prompt_tables(self) -> Int32[Array, "G B W"]:
        """The tables that the prompts are computed with, padded with the null block."""
        blocks = jnp.arange(self.num_prompts * self.prompt_blocks, dtype=jnp.int32) + 1
        blocks = blocks.reshape(1, self.num_prompts, self.prompt_blocks) + self._first_of_group()
        return jnp.pad(blocks, ((0, 0), (0, 0), (0, self.table_len - self.prompt_blocks)))

    def own_blocks(self) -> Int32[Array, "G R O"]:
        """The blocks of each sample alone, in order."""
        first = self.num_prompts * self.prompt_blocks + 1
        blocks = jnp.arange(self.num_rows * self.sample_blocks, dtype=jnp.int32) + first
        return blocks.reshape(1, self.num_rows, self.sample_blocks) + self._first_of_group()

    def _first_of_group(self) -> Int32[Array, "G 1 1"]:
        return (jnp.arange(self.num_groups, dtype=jnp.int32) * self.blocks_per_group)[:, None, None]


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
