"""The random streams of `generate`: the engine's own, from JAX keys."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from pagedjax.sampling.checks import check_int
from pagedjax.sampling.params import MAX_SEED


def request_keys(seeds: Sequence[int]) -> Key[Array, "B"]:
    """The keys with which the engine samples for requests with these seeds: ints of 64 bits, `SamplingParams.seed`."""
    for seed in seeds:
        check_int("seeds", seed, 0, MAX_SEED)
    halves = np.array([(int(seed) >> 32, int(seed) & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2)
    return jax.random.wrap_key_data(jnp.asarray(halves), impl="threefry2x32")


def seeds_of(key: Any, num_prompts: int) -> UInt32[Array, "B 2"]:
    """The 64 bits that the sampler starts from in each row: of one key, new or old-style, or of one for each row."""
    is_typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and getattr(key, "dtype", None) != jnp.uint32:
        raise ValueError(f"key: expected a JAX key, or one for each of {num_prompts} prompts, got {key!r}")
    data = jax.random.key_data(key) if is_typed else jnp.asarray(key)
    if data.shape == (2,):
        one = jax.random.wrap_key_data(data, impl="threefry2x32")
        rows = jax.vmap(jax.random.fold_in, (None, 0))(one, jnp.arange(num_prompts, dtype=jnp.uint32))
        return jax.random.key_data(rows)
    if data.shape != (num_prompts, 2):
        raise ValueError(
            f"key: expected one threefry key, or one for each of {num_prompts} prompts, got {key.dtype}{[*key.shape]}"
        )
    return data
