"""Options for the sampler, and what it must leave of a row: the plain way, with a sort, in f64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.model_input import SamplingInput
from pagedjax.sampling import sampler

jit_candidates = jax.jit(sampler.candidates)


def sampling_input(num_rows: int, **columns: Any) -> SamplingInput:
    """One value for all rows or one per row; `seed` as a 64-bit int. Rows differ in `num_outputs` by default."""

    def column(name: str, default: Any, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(columns.pop(name, default), dtype), (num_rows,)).copy()

    seed = column("seed", 0, np.uint64)
    out = SamplingInput(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=np.stack([seed >> 32, seed & 0xFFFFFFFF], axis=1).astype(np.uint32),
        sample_index=column("sample_index", 0, np.uint32),
        num_outputs=column("num_outputs", np.arange(num_rows), np.uint32),
    )
    assert not columns
    return out


def kept_by_sorting(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, float]:
    """The candidate set the plain way, sorted, in f64; ties of the last one kept are kept. And how far top_p is from
    the next cumulative probability, and min_p from the next share: within f32's reach, rounding decides.
    """
    logits = logits.astype(np.float64)
    kept = np.ones(len(logits), bool)
    share = np.exp((logits - logits.max()) / temperature)
    margin = 1.0
    if top_k > 0:
        kept &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p < 1:
        weights = np.where(kept, share, 0)
        order = np.argsort(-logits, kind="stable")
        cumulative = np.cumsum(weights[order]) / weights.sum()
        margin = np.abs(cumulative - top_p).min()
        kept &= logits >= logits[order][np.argmax(cumulative >= top_p)]
    if min_p > 0:
        others = share[share < 1]  # the largest is 1 without rounding
        margin = min(margin, np.abs(others / min_p - 1).min(initial=1.0))
        kept &= share >= min_p
    return kept, margin


def distribution(logits: np.ndarray, temperature: float = 1.0, **filters: Any) -> np.ndarray:
    """The exact probabilities, f64."""
    kept, _ = kept_by_sorting(logits, temperature, **filters)
    weights = np.where(kept, np.exp((logits.astype(np.float64) - logits.max()) / temperature), 0)
    return weights / weights.sum()


def candidates(logits: np.ndarray, **columns: Any) -> np.ndarray:
    """Which tokens may be drawn, bool[S, V]."""
    sampling = sampling_input(len(logits), **columns)
    weights = jnp.exp(sampler.scaled(jnp.asarray(logits), jnp.asarray(sampling.temperature)))
    return np.asarray(jit_candidates(jnp.asarray(logits), weights, sampling))


def normal_logits(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)
