"""From logits to token ids on the device: greedy, temperature, top-k, top-p, min-p; a random stream for each row.

The filters need no sort: a row's threshold is found by bisection over the bits of its logits, at most 32 passes of a
count or of a sum. A batch whose rows are all greedy, or all unfiltered, skips the rest at run time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, PRNGKeyArray, UInt32

from pagedjax.model_input import SamplingInput

GROUP = 256
"""Tokens per group: a draw takes the group, then the token in it, and so does the argmax."""
CPU_TILE = 2**20
"""Logits of the rows that look for their thresholds together on a CPU: they stay in its cache from pass to pass."""


def sample(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Int32[Array, "S"]:
    """One token per row: its argmax, or a draw from softmax(logits / temperature) after top-k, top-p, min-p.

    top_k keeps every token that ties with the k-th; top_p keeps the smallest set of most likely tokens whose
    probability reaches it; min_p keeps those with at least that share of the largest probability. A temperature
    below the smallest normal f32 is greedy, as is 0, and so is top_p = 0.
    """
    greedy = _argmax(logits)
    is_random = (sampling.temperature >= jnp.finfo(jnp.float32).tiny) & (sampling.top_p > 0)
    return lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _sample_random(logits, sampling), greedy),
        lambda: greedy,
    )


def grouped(x: Float32[Array, "S V"], fill: float) -> Float32[Array, "S G g"]:
    """Cuts rows into groups of `GROUP` tokens, the last one filled up; a small vocabulary is one group."""
    size = min(GROUP, x.shape[-1])
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % size)), constant_values=fill)
    return padded.reshape(len(x), -1, size)


def _argmax(logits: Float32[Array, "S V"]) -> Int32[Array, "S"]:
    """The first largest entry. By groups, as XLA:CPU vectorises a maximum but not an argmax: 0.7 against 8 ms."""
    groups = grouped(logits, -jnp.inf)
    group = jnp.argmax(groups.max(axis=-1), axis=-1)
    in_group = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return (group * GROUP + jnp.argmax(in_group, axis=-1)).astype(jnp.int32)


def _sample_random(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Int32[Array, "S"]:
    temperature = jnp.asarray(sampling.temperature)
    weights = jnp.exp(scaled(logits, temperature))
    weights = lax.cond(
        jnp.any((temperature > 0) & is_filtered(sampling)),
        lambda: jnp.where(candidates(logits, weights, sampling), weights, 0),
        lambda: weights,
    )
    streams = (sampling.seed, sampling.sample_index, sampling.num_outputs)
    return _draw(weights, jax.vmap(sample_key)(*map(jnp.asarray, streams)))


def scaled(logits: Float32[Array, "*S V"], temperature: Float32[Array, "*S"]) -> Float32[Array, "*S V"]:
    """Logits over temperature, the largest of a row 0. It becomes that before the division: a tiny temperature gives
    0 and -inf, never inf - inf."""
    return (logits - logits.max(axis=-1, keepdims=True)) / _divisor(temperature)[..., None]


def _divisor(temperature: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
    return jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)


def is_filtered(sampling: SamplingInput) -> Bool[Array, "S"]:
    """Whether a row has any of the filters."""
    return (jnp.asarray(sampling.top_k) > 0) | (jnp.asarray(sampling.top_p) < 1) | (jnp.asarray(sampling.min_p) > 0)


def sample_key(
    seed: UInt32[Array, "2"], sample_index: UInt32[Array, ""], num_outputs: UInt32[Array, ""]
) -> PRNGKeyArray:
    """The key of one draw: from the request alone, never from the row, the step or the batch. All 64 bits count."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), num_outputs)


def candidates(
    logits: Float32[Array, "S V"], weights: Float32[Array, "S V"], sampling: SamplingInput
) -> Bool[Array, "S V"]:
    """Which tokens may be drawn: top-k, top-p of what top-k left, min-p. `weights` is exp(scaled(logits)).

    Ranks are those of the logits: a large temperature makes equal weights of them, but no ties.
    """
    top_k, top_p, min_p = map(jnp.asarray, (sampling.top_k, sampling.top_p, sampling.min_p))
    rows = (logits, weights, jnp.asarray(sampling.temperature), top_k, top_p)
    threshold = lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: lax.platform_dependent(*rows, cpu=_thresholds_by_tiles, default=jax.vmap(_threshold)),
        lambda: jnp.zeros(len(logits), jnp.uint32),
    )
    # The largest weight is 1.
    return (_ordered_bits(logits) >= threshold[:, None]) & (weights >= min_p[:, None])


def _thresholds_by_tiles(*rows: Array) -> UInt32[Array, "S"]:
    """`_threshold` of each row. The last tile is filled up, so that no row is computed by another program."""
    num_rows, vocab_size = rows[0].shape
    tile = min(max(CPU_TILE // vocab_size, 1), num_rows)

    def in_tiles(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -num_rows % tile)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, tile, *x.shape[1:])

    return lax.map(lambda tiles: jax.vmap(_threshold)(*tiles), tuple(map(in_tiles, rows))).reshape(-1)[:num_rows]


def _threshold(
    logits: Float32[Array, "V"],
    weights: Float32[Array, "V"],
    temperature: Float32[Array, ""],
    top_k: Int32[Array, ""],
    top_p: Float32[Array, ""],
) -> UInt32[Array, ""]:
    """What the ordered bits of a logit must reach to pass top-k and top-p; a row that has neither makes no pass.

    Counts are f32, exact below 2**24: XLA:CPU vectorises sums of floats, but not counts of integers (4 against 20 ms).
    """
    order, peak = _ordered_bits(logits), logits.max()
    high = _ordered_bits(peak)

    def leaves_k(threshold: UInt32[Array, ""]) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        count = jnp.sum(jnp.where(order >= threshold, jnp.float32(1), 0))
        return count >= top_k.astype(jnp.float32), count == top_k.astype(jnp.float32)

    kth = _largest(leaves_k, jnp.uint32(0), jnp.where(top_k > 0, high, 0))
    weights = jnp.where(order >= kth, weights, 0)
    # A tiny top_p keeps the argmax, which has weight 1.
    needed = jnp.maximum(top_p * weights.sum(), jnp.finfo(jnp.float32).tiny)

    def leaves_p(threshold: UInt32[Array, ""]) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        total = jnp.sum(jnp.where(order >= threshold, weights, 0))
        least = jnp.exp((_from_ordered_bits(threshold) - peak) / _divisor(temperature))
        # Each token that is left weighs at least `least`: if the total is not enough without it, all are needed.
        return total >= needed, (total >= needed) & (total - least < needed)

    # top_p = 1 keeps all, whatever the sum rounds to.
    return _largest(leaves_p, kth, jnp.where(top_p < 1, high, kth))


def _largest(
    holds: Callable[[UInt32[Array, ""]], tuple[Bool[Array, ""], Bool[Array, ""]]],
    low: UInt32[Array, ""],
    high: UInt32[Array, ""],
) -> UInt32[Array, ""]:
    """The largest t in [low, high] with holds(t)[0], which is true up to some t, or `low`. Where holds(t)[1] is true as
    well, no larger t would leave other tokens, and t is taken at once.
    """

    def halve(bounds: tuple[UInt32[Array, ""], UInt32[Array, ""]]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
        low, high = bounds
        middle = low + ((high - low + jnp.uint32(1)) >> jnp.uint32(1))  # never overflows: inf is no 0xFFFFFFFF
        is_true, is_final = holds(middle)
        low, high = jnp.where(is_true, middle, low), jnp.where(is_true, high, middle - jnp.uint32(1))
        return low, jnp.where(is_final, low, high)

    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]


def _ordered_bits(x: Float32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Unsigned ints in the order of the floats: the sign bit flipped, all bits of negative numbers."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def _from_ordered_bits(order: UInt32[Array, ""]) -> Float32[Array, ""]:
    bits = order ^ jnp.where(order >> 31 == 1, jnp.uint32(0x80000000), jnp.uint32(0xFFFFFFFF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _draw(weights: Float32[Array, "S V"], keys: Key[Array, "S"]) -> Int32[Array, "S"]:
    """A token per row with probability in proportion to its weight: first its group, then the token in the group.

    Both by the largest of log weight + Gumbel noise, and not by inverting a cumulative sum: rounding moves every
    boundary of that sum, and with the last bits of the logits, which differ between batch sizes, would change the
    token of one draw in 200 (49,152 tokens). Here they decide between near ties alone.
    """
    groups = grouped(weights, 0.0)
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
