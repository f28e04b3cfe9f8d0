"""Writing this step's keys and values into the pool, in place when the pool is donated."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def write_kv(
    pool: Float[Array, "N bs K D"], new: Float[Array, "T K D"], slot_mapping: Int32[Array, "T"]
) -> Float[Array, "N bs K D"]:
    """Puts row t of `new` into slot `slot_mapping[t]` (= block * bs + offset) of the pool.

    Padding tokens have slot 0, which lies in the null block: nobody attends to what is there.
    """
    num_blocks, block_size, num_kv_heads, head_dim = pool.shape
    if len(slot_mapping) == 1:
        # XLA:CPU turns a scatter with one index into a dynamic-update-slice and copies the whole pool with it.
        new, slot_mapping = jnp.pad(new, ((0, 1), (0, 0), (0, 0))), jnp.pad(slot_mapping, (0, 1))
    flat = pool.reshape(num_blocks * block_size, num_kv_heads, head_dim)
    return flat.at[slot_mapping].set(new.astype(pool.dtype)).reshape(pool.shape)
