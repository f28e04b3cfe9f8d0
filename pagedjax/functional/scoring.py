"""Log-probabilities as a trainer computes them: of whole sequences, differentiable, with the sampler's arithmetic."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from pagedjax.config import invariant_tokens
from pagedjax.functional import checks
from pagedjax.functional.rollout import Rollout
from pagedjax.functional.sequences import Attend, sampler_attention
from pagedjax.models.decoder import CausalLM, Params, embed_params, head_params, position_tables, read_out, rope_for
from pagedjax.models.layers import DecoderLayer, dense_attention
from pagedjax.pallas_kernels.attention import BATCH_INVARIANT, IMPLEMENTATIONS
from pagedjax.sampling.logprobs import token_logprobs

DENSE = "dense"
"""The attention that needs no blocks: see `score`."""


class _Static(NamedTuple):
    """What is part of the program."""

    chunk_size: int
    remat: bool
    attend: Attend


def score(
    model: CausalLM,
    params: Params,
    token_ids: Int[Array | np.ndarray, "B T"],
    lens: Int[Array | np.ndarray, "B"] | None = None,
    *,
    chunk_size: int = 128,
    remat: bool = False,
    block_size: int = 16,
    implementation: str | None = None,
) -> Float32[Array, "B T-1"]:
    """The log-probability of each token but the first, given those before it: entry [b, t] is of token t + 1.

    On a CPU these are the sampler's, bit for bit, if it is an `LLM` or a `generate` with `batch_invariant=True` and
    the same dtype of params and cache; without that they differ by rounding. Differentiable with respect to params.

    Args:
      token_ids: padded on the right; entries of tokens behind `lens` are 0.
      chunk_size: positions of each row of which the logits are in memory at a time, in the backward pass too, where
        they are computed again.
      remat: computes each layer again in the backward pass.
      block_size: the sampler's, if it is not a divisor of 64.
      implementation: of the attention: see `paged_attention`; None takes the batch-invariant one on a CPU. "dense"
        takes the obvious formula, the faster one where rows lie on many devices.

    Raises:
      ValueError: arrays of other shapes or dtypes, an option that is none, more positions than the model has.
    """
    checks.prompts(token_ids, lens, names=("token_ids", "lens"))
    length = np.shape(token_ids)[1]
    if length < 2:
        raise ValueError(f"token_ids: expected sequences of at least 2 tokens, got {length}")
    checks.positions(model.config, length, 1)
    chunk_size, block_size = checks.count("chunk_size", chunk_size), checks.count("block_size", block_size)
    if implementation not in (None, DENSE, *IMPLEMENTATIONS):
        names = ", ".join((*IMPLEMENTATIONS, DENSE))
        raise ValueError(f"implementation: expected None or one of {names}, got {implementation!r}")
    if implementation is None and jax.default_backend() == "cpu":
        implementation = BATCH_INVARIANT
    attend = dense_attention if implementation == DENSE else sampler_attention(block_size, implementation)
    static = _Static(chunk_size, checks.flag("remat", remat), attend)
    known_lens = None if lens is None else jnp.asarray(lens, jnp.int32)
    return _score(model, static, params, jnp.asarray(token_ids, jnp.int32), known_lens)


# Compiled, as the sampler is: op by op, bf16 would be rounded more often.
@partial(jax.jit, static_argnums=(0, 1))
def _score(
    model: CausalLM, static: _Static, params: Params, token_ids: Int32[Array, "B T"], lens: Int32[Array, "B"] | None
) -> Float32[Array, "B T-1"]:
    num_rows, length = token_ids.shape
    # Products of few rows are computed in another way, in other bits.
    fewest = invariant_tokens(model.config.narrowest)
    padded = jnp.pad(token_ids, ((0, max(0, -(-fewest // (length - 1)) - num_rows)), (0, 0)))
    hidden = _hidden_states(model, params, padded, static)[:, :-1]
    chunk = min(max(static.chunk_size, -(-fewest // len(padded))), length - 1)

    def by_chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(len(padded), -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    score_chunk = jax.checkpoint(partial(_score_chunk, model, head_params(params)))
    chunks = lax.map(lambda args: score_chunk(*args), (by_chunks(hidden), by_chunks(padded[:, 1:])))
    logprobs = chunks.swapaxes(0, 1).reshape(len(padded), -1)[:num_rows, : length - 1]
    if lens is None:
        return logprobs
    step = jnp.arange(1, length, dtype=jnp.int32)
    return jnp.where(step[None, :] < lens[:, None], logprobs, 0)


def join(
    prompt_ids: Int[Array | np.ndarray, "B T"],
    prompt_lens: Int[Array | np.ndarray, "B"] | None,
    rollout: Rollout,
) -> tuple[Int32[Array, "B N S"], Int32[Array, "B N"]]:
    """Each sample behind its prompt, padded on the right to S = T + L, and how many tokens that is. Padding is 0."""
    checks.prompts(prompt_ids, prompt_lens)
    num_prompts, num_samples, max_new_tokens = rollout.token_ids.shape
    prompt_len = np.shape(prompt_ids)[1]
    starts = _starts(prompt_ids, prompt_lens)[:, None, None]
    place = jnp.arange(prompt_len + max_new_tokens, dtype=jnp.int32)[None, None, :]
    prompt = jnp.pad(jnp.asarray(prompt_ids, jnp.int32), ((0, 0), (0, max_new_tokens)))[:, None, :]
    step = jnp.broadcast_to(
        jnp.clip(place - starts, 0, max_new_tokens - 1), (num_prompts, num_samples, place.shape[-1])
    )
    new = jnp.take_along_axis(rollout.token_ids, step, axis=2)
    lens = starts[..., 0] + rollout.lengths
    joined = jnp.where(place < starts, prompt, new)
    return jnp.where(place < lens[..., None], joined, 0), lens


def score_rollout(
    model: CausalLM,
    params: Params,
    prompt_ids: Int[Array | np.ndarray, "B T"],
    prompt_lens: Int[Array | np.ndarray, "B"] | None,
    rollout: Rollout,
    **options: Any,
) -> Float32[Array, "B N L"]:
    """`score` of the tokens of a rollout, in the form of its `logprobs`: 0 behind the end of a sample.

    All B x N rows go through the model at once, with their prompts. `options` are those of `score`.
    """
    token_ids, lens = join(prompt_ids, prompt_lens, rollout)
    num_prompts, num_samples, length = token_ids.shape
    logprobs = score(model, params, token_ids.reshape(-1, length), lens.reshape(-1), **options)
    logprobs = logprobs.reshape(num_prompts, num_samples, -1)
    step = jnp.arange(rollout.token_ids.shape[-1], dtype=jnp.int32)
    index = _starts(prompt_ids, prompt_lens)[:, None, None] - 1 + step[None, None, :]
    chosen = jnp.take_along_axis(logprobs, jnp.broadcast_to(index, rollout.token_ids.shape), axis=2)
    return jnp.where(rollout.mask, chosen, 0)


def _starts(prompt_ids: Any, prompt_lens: Any) -> Int32[Array, "B"]:
    num_prompts, prompt_len = np.shape(prompt_ids)
    return jnp.full(num_prompts, prompt_len, jnp.int32) if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)


def _hidden_states(
    model: CausalLM, params: Params, token_ids: Int32[Array, "B T"], static: _Static
) -> Float[Array, "B T D"]:
    """What `CausalLM` reads its logits out of, each layer compiled apart as in `paged_step`."""
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :], token_ids.shape)
    ropes = position_tables(config, positions)
    x: Any = model.apply({"params": embed_params(params)}, token_ids, positions, method="embed")
    for i, kind in enumerate(config.layer_kinds):
        layer = DecoderLayer(config, kind, attend=static.attend, parent=None)
        apply = lambda p, x, rope, layer=layer: layer.apply({"params": p}, x, rope)[0]  # noqa: E731
        x, rope = lax.optimization_barrier((x, rope_for(kind, ropes)))
        x = (jax.checkpoint(apply) if static.remat else apply)(params[f"layers_{i}"], x, rope)
    return lax.optimization_barrier(x)


def _score_chunk(
    model: CausalLM, params: Params, hidden: Float[Array, "B C D"], targets: Int32[Array, "B C"]
) -> Float32[Array, "B C"]:
    logits = read_out(model.config, params, hidden.reshape(-1, hidden.shape[-1]))
    return token_logprobs(logits, targets.reshape(-1), 0).logprob.reshape(targets.shape)
