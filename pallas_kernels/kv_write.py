"""Writing this step's keys and values into the pool, in place when the pool is donated."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32


def write_kv(
    pool: Float[Array, "N K bs D"], new: Float[Array, "T K D"], slot_mapping: Int32[Array | np.ndarray, "T"]
) -> Float[Array, "N K bs D"]:
    """Puts row t of `new` into slot `slot_mapping[t]` (= block * bs + offset) of the pool, all heads.

    Padding tokens have slot 0, which lies in the null block: nobody attends to what is there.
    """
    num_blocks, num_kv_heads, block_size, head_dim = pool.shape
    if new.shape[0] * num_kv_heads == 1:
        # XLA:CPU turns a scatter with one index into a dynamic-update-slice and copies the whole pool with it.
        new, slot_mapping = jnp.pad(new, ((0, 1), (0, 0), (0, 0))), jnp.pad(slot_mapping, (0, 1))
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    rows = (block[:, None] * num_kv_heads + jnp.arange(num_kv_heads)[None, :]) * block_size + offset[:, None]
    flat = pool.reshape(num_blocks * num_kv_heads * block_size, head_dim)
    return flat.at[rows].set(new.astype(pool.dtype)).reshape(pool.shape)
