"""Writing this step's keys and values into the pool, in place when the pool is donated."""

import numpy as np
from jaxtyping import Array, Float, Int32


def write_kv(
    pool: Float[Array, "N K bs D"], new: Float[Array, "T K D"], slot_mapping: Int32[Array | np.ndarray, "T"]
) -> Float[Array, "N K bs D"]:
    """Puts row t of `new` into slot `slot_mapping[t]` (= block * bs + offset) of the pool, all heads.

    Padding tokens have slot 0, which lies in the null block: nobody attends to what is there.
    """
    # A block and an offset per token, and not a flat row per token and head: with one head XLA:CPU would copy the pool.
    block_size = pool.shape[2]
    return pool.at[slot_mapping // block_size, :, slot_mapping % block_size].set(new.astype(pool.dtype))
