"""Which token belongs to which request, and where its KV lies in the pool: what every attention kernel is given."""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Int32


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """T tokens of S requests, one request after another in flat arrays.

    The slot rule: the KV of the token at position `pos` is in pool slot
    `block_table[pos // block_size] * block_size + pos % block_size`, where slot = block * block_size + offset.

    Padding never leaves the null block, block 0: padding tokens have slot 0, padding rows no tokens and no context.
    """

    slot_mapping: Int32[Array | np.ndarray, "T"]
    """The slot that each of this step's tokens writes its KV to; 0 for padding."""
    block_tables: Int32[Array | np.ndarray, "S B"]
    """Each request's blocks in order of position, padded with 0."""
    context_lens: Int32[Array | np.ndarray, "S"]
    """Tokens of each request in the pool, INCLUDING this step's; 0 for padding rows."""
    query_start_loc: Int32[Array | np.ndarray, "S+1"]
    """Row s owns tokens query_start_loc[s] up to query_start_loc[s + 1]; the last value is the number of real tokens.
    Their positions are the last ones of the context."""
    max_query_len: int = field(metadata={"static": True})
    """No row has more new tokens; 1 means that every request decodes. Part of the compiled program."""
    shared_lens: Int32[Array | np.ndarray, "P"] | None = None
    """For decodes, of which each row has one token: S / P rows, one behind the other, read the same blocks for their
    first tokens, this many of them, and an implementation may read those once for all. None: nothing is known. The
    tables hold the shared blocks all the same."""
