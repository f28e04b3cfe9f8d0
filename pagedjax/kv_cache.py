"""The KV pool on the device: per layer, keys and values in fixed-size blocks."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_INT32 = 2**31 - 1


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers: per layer N blocks of K heads of bs slots.

    A separate array per layer, as each is donated and updated in place by itself. The slots of one head of a block lie
    together: that is what attention reads at a time.
    """

    k: tuple[Float[Array, "N K bs D"], ...]
    v: tuple[Float[Array, "N K bs D"], ...]


def init_kv_cache(
    *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """A zeroed pool of `num_blocks` usable blocks and the null block, block 0, in front of them.

    Raises ValueError for one whose slots, or heads of blocks, int32 cannot count. Elements may be any number: they are
    addressed with 64 bits where it takes them.
    """
    shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
    for name, size in (("slots", block_size), ("KV heads", num_kv_heads)):
        if shape[0] * size > MAX_INT32:
            raise ValueError(
                f"num_blocks={num_blocks}: {shape[0]} blocks, with the null block, x {size} {name} are more "
                f"than the {MAX_INT32} that int32 indices reach; use larger blocks, or fewer"
            )
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
    return KVCache(k, v)


def bytes_per_block(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> int:
    """Bytes of one block, keys and values of all layers together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
