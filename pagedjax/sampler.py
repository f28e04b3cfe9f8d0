"""From logits to token ids on the device: greedy, temperature, top-k, top-p, each row with its own random stream.

The filters need no sort: a row's threshold is found by bisection over the bits of its logits, 32 passes of a count or
of a sum. A batch whose rows are all greedy, or all unfiltered, skips the rest at run time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, PRNGKeyArray, UInt32

from pagedjax.model_input import SamplingInput

GROUP = 256
"""Tokens per group: a draw takes the group, then the token in it, and so does the argmax."""


def sample(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Int32[Array, "S"]:
    """One token per row: its argmax, or a draw from softmax(logits / temperature) after top-k, then top-p.

    top_k keeps every token that ties with the k-th; top_p keeps the smallest set of most likely tokens whose
    probability reaches it. A temperature below the smallest normal f32 is greedy, as is 0, and so is top_p = 0.
    """
    greedy = _argmax(logits)
    is_random = (sampling.temperature >= jnp.finfo(jnp.float32).tiny) & (sampling.top_p > 0)
    return lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _sample_random(logits, sampling), greedy),
        lambda: greedy,
    )


def _grouped(x: Float32[Array, "S V"], fill: float) -> Float32[Array, "S G g"]:
    """Cuts rows into groups of `GROUP` tokens, the last one filled up."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % GROUP)), constant_values=fill)
    return padded.reshape(len(x), -1, GROUP)


def _argmax(logits: Float32[Array, "S V"]) -> Int32[Array, "S"]:
    """The first largest entry. By groups, as XLA:CPU vectorises a maximum but not an argmax: 0.7 against 8 ms."""
    groups = _grouped(logits, -jnp.inf)
    group = jnp.argmax(groups.max(axis=-1), axis=-1)
    in_group = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return (group * GROUP + jnp.argmax(in_group, axis=-1)).astype(jnp.int32)


def _sample_random(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Int32[Array, "S"]:
    temperature = jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
    # The largest becomes 0 before the division: a tiny temperature gives 0 and -inf, never inf - inf.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.exp(scaled)
    is_filtered = (sampling.temperature > 0) & ((sampling.top_k > 0) | (sampling.top_p < 1))
    top_k, top_p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)
    weights = lax.cond(
        jnp.any(is_filtered),
        lambda: jnp.where(_candidates(logits, weights, top_k, top_p), weights, 0),
        lambda: weights,
    )
    streams = (sampling.seed, sampling.sample_index, sampling.num_outputs)
    return _draw(weights, jax.vmap(sample_key)(*map(jnp.asarray, streams)))


def sample_key(
    seed: UInt32[Array, "2"], sample_index: UInt32[Array, ""], num_outputs: UInt32[Array, ""]
) -> PRNGKeyArray:
    """The key of one draw: from the request alone, never from the row, the step or the batch. All 64 bits count."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), num_outputs)


def _candidates(
    logits: Float32[Array, "S V"], weights: Float32[Array, "S V"], top_k: Int32[Array, "S"], top_p: Float32[Array, "S"]
) -> Bool[Array, "S V"]:
    """Which tokens may be drawn: top-k, then top-p of what top-k left. Ranks are those of the logits: a large
    temperature makes equal weights of them, but no ties."""
    order = _ordered_bits(logits)
    num_kept = jnp.where(top_k > 0, top_k, logits.shape[-1])
    kth = _largest_threshold(lambda t: jnp.sum(order >= t[:, None], axis=-1) >= num_kept, len(order))
    weights = jnp.where(order >= kth[:, None], weights, 0)
    # top_p = 1 keeps all, whatever the sum rounds to; a tiny one keeps the argmax, which has weight 1.
    needed = jnp.where(top_p < 1, top_p * weights.sum(axis=-1), jnp.inf)
    needed = jnp.maximum(needed, jnp.finfo(jnp.float32).tiny)
    nucleus = _largest_threshold(
        lambda t: jnp.sum(jnp.where(order >= t[:, None], weights, 0), axis=-1) >= needed, len(order)
    )
    return order >= jnp.maximum(kth, nucleus)[:, None]


def _ordered_bits(x: Float32[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Unsigned ints in the order of the floats: the sign bit flipped, all bits of negative numbers."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def _largest_threshold(holds: Callable[[UInt32[Array, "S"]], Bool[Array, "S"]], num_rows: int) -> UInt32[Array, "S"]:
    """The largest t per row with holds(t), for a predicate that is true up to some t; 0 where it is never true."""

    def try_bit(index: Int32[Array, ""], threshold: UInt32[Array, "S"]) -> UInt32[Array, "S"]:
        candidate = threshold | (jnp.uint32(1) << jnp.asarray(31 - index, jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(num_rows, jnp.uint32))


def _draw(weights: Float32[Array, "S V"], keys: Key[Array, "S"]) -> Int32[Array, "S"]:
    """A token per row with probability in proportion to its weight: first its group, then the token in the group.

    Both by the largest of log weight + Gumbel noise, and not by inverting a cumulative sum: rounding moves every
    boundary of that sum, and with the last bits of the logits, which differ between batch sizes, would change the
    token of one draw in 200 (49,152 tokens). Here they decide between near ties alone.
    """
    groups = _grouped(weights, 0.0)
    group = _gumbel_argmax(groups.sum(axis=-1), keys, stage=0)
    in_group = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return group * GROUP + _gumbel_argmax(in_group, keys, stage=1)


def _gumbel_argmax(weights: Float32[Array, "S W"], keys: Key[Array, "S"], stage: int) -> Int32[Array, "S"]:
    """Index i of a row with probability weights[i] / sum (the Gumbel-max trick, arXiv 1611.01144, 2.1).

    Number i of a stage is the same whatever the row's width, and under any of JAX's settings for random bits.
    """
    numbers = jnp.arange(weights.shape[-1], dtype=jnp.uint32) + jnp.uint32(stage << 16)

    def random_bits(key: PRNGKeyArray, number: UInt32[Array, ""]) -> UInt32[Array, ""]:
        high, low = jax.random.key_data(jax.random.fold_in(key, number))
        return high ^ low

    bits = jax.vmap(jax.vmap(random_bits, (None, 0)), (0, None))(keys, numbers)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)  # in (0, 1), both ends excluded
    return jnp.argmax(jnp.log(weights) - jnp.log(-jnp.log(uniform)), axis=-1).astype(jnp.int32)
