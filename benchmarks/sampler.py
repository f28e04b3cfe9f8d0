"""The sampler by itself: milliseconds a step by vocabulary, batch and feature, beside a plain sampler that sorts.

    python benchmarks/sampler.py [--vocab 49152 128256 151936] [--rows 1 8 64 256] [--repeat 5] [--json] [--small]

The plain sampler sorts whole rows, as most do: threshold from the sorted logits and the cumulative sum of their
probabilities. Its candidates are compared with ours in the same run; where they differ, the benchmark stops. Both are
timed in turns, and medians count. "-" is a feature that a sort would not help.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pagedjax.model_input import SamplingInput
from pagedjax.sampling.logits import add_bias, count_tokens, keep_allowed, no_counts, penalise
from pagedjax.sampling.logprobs import token_logprobs
from pagedjax.sampling.sampler import candidates, sample, sample_key, scaled

FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
NUM_ENTRIES = 8192
"""Entries of the tables for penalties and biases, most of them padding."""


class Feature(NamedTuple):
    """A thing to time: ours, and the plain way where there is one."""

    name: str
    ours: Callable[[], Any]
    plain: Callable[[], Any] | None = None


def sampling_input(num_rows: int, options: dict[str, float]) -> SamplingInput:
    columns = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    return SamplingInput(
        **{name: np.full(num_rows, v, np.int32 if name == "top_k" else np.float32) for name, v in columns.items()},
        seed=np.zeros((num_rows, 2), np.uint32),
        sample_index=np.zeros(num_rows, np.uint32),
        num_outputs=np.arange(num_rows, dtype=np.uint32),
    )


def plain_candidates(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Bool[Array, "S V"]:
    """What may be drawn, from a full sort and a cumulative sum."""
    top_k, top_p, min_p = map(jnp.asarray, (sampling.top_k, sampling.top_p, sampling.min_p))
    vocab_size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.take_along_axis(ordered, jnp.where(top_k > 0, top_k, vocab_size)[:, None] - 1, axis=-1)
    weights = jnp.where(ordered >= kth, jnp.exp(scaled(ordered, jnp.asarray(sampling.temperature))), 0)
    cumulative = jnp.cumsum(weights, axis=-1)
    is_enough = cumulative >= top_p[:, None] * cumulative[:, -1:]
    last = jnp.where(top_p < 1, jnp.argmax(is_enough, axis=-1), vocab_size - 1)
    nucleus = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    is_likely = jnp.exp(scaled(logits, jnp.asarray(sampling.temperature))) >= min_p[:, None]
    return (logits >= jnp.maximum(kth, nucleus)) & is_likely


def plain_sample(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Int32[Array, "S"]:
    """A draw by the inverse of a cumulative sum; always sorts, as the options are data."""
    weights = jnp.where(
        plain_candidates(logits, sampling), jnp.exp(scaled(logits, jnp.asarray(sampling.temperature))), 0
    )
    keys = jax.vmap(sample_key)(*map(jnp.asarray, (sampling.seed, sampling.sample_index, sampling.num_outputs)))
    cumulative = jnp.cumsum(weights, axis=-1)
    drawn = jax.vmap(jax.random.uniform)(keys)[:, None] * cumulative[:, -1:]
    random = jnp.argmax(cumulative > drawn, axis=-1)
    return jnp.where(jnp.asarray(sampling.temperature) > 0, random, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


_sample, _plain_sample, _plain_candidates = map(jax.jit, (sample, plain_sample, plain_candidates))
_add_bias, _penalise, _keep_allowed = map(jax.jit, (add_bias, penalise, keep_allowed))
_token_logprobs = jax.jit(token_logprobs, static_argnums=2)


@jax.jit
def _candidates(logits: Float32[Array, "S V"], sampling: SamplingInput) -> Bool[Array, "S V"]:
    return candidates(logits, jnp.exp(scaled(logits, jnp.asarray(sampling.temperature))), sampling)


@jax.jit
def _count(logits: Float32[Array, "S V"], row: Int32[Array, "n"], token: Int32[Array, "n"]) -> Any:
    return count_tokens(no_counts(logits), row, token, row >= 0)


@partial(jax.jit, static_argnums=2)
def _plain_logprobs(logits: Float32[Array, "S V"], token_ids: Int32[Array, "S"], num_top: int) -> Any:
    """By log_softmax and lax.top_k of whole rows."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    rank = jnp.sum(logprobs > chosen, axis=-1) + 1
    return chosen[:, 0], rank, *lax.top_k(logprobs, num_top)


def num_different(logits: Array, options: dict[str, float]) -> int:
    """Rows with other candidates than the sort leaves. Where f32 sums of probabilities come so close to top_p that
    rounding decides, one more or one less is the same."""
    sampling = jax.device_put(sampling_input(len(logits), options))
    ours, plain = np.asarray(_candidates(logits, sampling)), np.asarray(_plain_candidates(logits, sampling))
    num_rows = 0
    for row in np.flatnonzero((ours != plain).any(axis=-1)):
        shifted = (np.asarray(logits[row], np.float64) - float(logits[row].max())) / 0.8
        share = np.exp(shifted) / np.exp(shifted).sum()
        num_rows += share[ours[row] != plain[row]].sum() > 1e-5
    return int(num_rows)


def features(logits: Array) -> list[Feature]:
    """All that is timed on these logits."""
    num_rows, vocab_size = logits.shape
    rng = np.random.default_rng(0)
    row = jax.device_put(rng.integers(0, 8 * num_rows, NUM_ENTRIES, np.int32))
    token = jax.device_put(rng.integers(0, vocab_size, NUM_ENTRIES, np.int32))
    ones = jnp.ones(num_rows)
    bits = jax.device_put(rng.integers(0, 2**32, (num_rows, -(-vocab_size // 32)), np.uint32))
    token_ids = jax.device_put(rng.integers(0, vocab_size, num_rows, np.int32))
    found = []
    for name, options in FILTERS.items():
        sampling = jax.device_put(sampling_input(num_rows, options))
        found.append(Feature(name, partial(_sample, logits, sampling), partial(_plain_sample, logits, sampling)))
    found += [
        Feature("penalties", lambda: _penalise(logits, _count(logits, row, token), ones, ones, ones)),
        Feature("bias", lambda: _add_bias(logits, row, token, token.astype(jnp.float32))),
        Feature("mask", lambda: _keep_allowed(logits, bits)),
    ]
    for num_top in (0, 5, 20):
        call = partial(_token_logprobs, logits, token_ids, num_top)
        found.append(Feature(f"logprobs {num_top}", call, partial(_plain_logprobs, logits, token_ids, num_top)))
    return found


def milliseconds(feature: Feature, repeat: int) -> dict[str, Any]:
    """Medians, and every repetition; ours and the plain way in turns, so that both see the same machine."""
    calls = {"ours": feature.ours} | ({"plain": feature.plain} if feature.plain else {})
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())  # compiles
    for _ in range(repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    ratio = medians["plain_ms"] / medians["ours_ms"] if feature.plain else None
    return {"feature": feature.name, **medians, "plain_over_ours": ratio, "times_ms": times}


def measure(vocab_size: int, num_rows: int, repeat: int, max_plain: int) -> list[dict[str, Any]]:
    """All features on random logits of one shape. The plain way is left out above `max_plain` logits."""
    logits = 3 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size), jnp.float32)
    with_plain = logits.size <= max_plain
    if with_plain:
        for name, options in FILTERS.items():
            if options.get("temperature") != 0 and (wrong := num_different(logits, options)):
                raise SystemExit(f"{vocab_size} x {num_rows}, {name}: {wrong} rows with other candidates than a sort's")
    results = []
    for feature in features(logits):
        feature = feature if with_plain else feature._replace(plain=None)
        results.append({"vocab_size": vocab_size, "num_rows": num_rows, **milliseconds(feature, repeat)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256, 151_936], help="vocabulary sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="requests in a batch")
    parser.add_argument("--repeat", type=int, default=5, help="times that each is run")
    parser.add_argument("--max-plain", type=int, default=10_000_000, help="logits above which nothing is sorted")
    parser.add_argument("--small", action="store_true", help="one small shape, to see whether it works")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.small:
        args.vocab, args.rows, args.repeat = [5000], [4], 1

    results = []
    if not args.json:
        print(f"{'vocabulary':>10}{'rows':>6}  {'feature':<14}{'ours':>10}{'plain':>10}{'ratio':>8}")
    for vocab_size in args.vocab:
        for num_rows in args.rows:
            for row in measure(vocab_size, num_rows, args.repeat, args.max_plain):
                results.append(row)
                if not args.json:
                    plain, ratio = row.get("plain_ms"), row["plain_over_ours"]
                    cells = f"{plain:>10.2f}{ratio:>7.1f}x" if plain else f"{'-':>10}{'-':>8}"
                    print(
                        f"{vocab_size:>10}{num_rows:>6}  {row['feature']:<14}{row['ours_ms']:>10.2f}{cells}", flush=True
                    )
    if args.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "results": results}))
    else:
        print("median milliseconds a step; candidates were the same as the sort's wherever both ran")


if __name__ == "__main__":
    main()
