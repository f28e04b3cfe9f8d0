"""The head of the model over the rows that need it: tile by tile, as many tiles as there is work for."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pagedjax.model_input import ModelInput
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import Params, read_out
from pagedjax.sampling.logprobs import TokenLogprobs, token_logprobs
from pagedjax.sampling.sampler import sample

PROMPT_LOGPROBS_ROWS = 64
"""Positions of a prompt that go through the head at a time: 64 x 152k logits in f32 are 39 MB."""


@jax.jit
def take_rows(hidden: Float[Array, "T D"], indices: Int32[Array, "S"]) -> Float[Array, "S D"]:
    return hidden[indices]


@partial(jax.jit, static_argnums=(0, 1, 2))
def score_rows(
    config: ModelConfig,
    num_top: int,
    tile_rows: int,
    params: Params,
    hidden: Float[Array, "T D"],
    source: Int32[Array, "T"],
    target: Int32[Array, "T"],
    num_tokens: int | Int32[Array, ""],
) -> TokenLogprobs:
    """Log-probabilities of `target` after the hidden states `source`, of the first `num_tokens` of them, in tiles: the
    logits of all would take T x V numbers."""
    num_rows = len(source)
    source, target = (jnp.pad(x, (0, -num_rows % tile_rows)) for x in (source, target))

    def score_tile(index: Int32[Array, ""], results: TokenLogprobs) -> TokenLogprobs:
        start = index * tile_rows
        rows, tokens = (lax.dynamic_slice_in_dim(x, start, tile_rows) for x in (source, target))
        tile = token_logprobs(read_out(config, params, hidden[rows]), tokens, num_top)
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0), results, tile)

    like = jax.eval_shape(lambda: token_logprobs(jnp.zeros((1, config.vocab_size)), jnp.zeros(1, jnp.int32), num_top))
    empty = jax.tree.map(lambda x: jnp.zeros((len(source), *x.shape[1:]), x.dtype), like)
    results = lax.fori_loop(0, -(-num_tokens // tile_rows), score_tile, empty)
    return jax.tree.map(lambda x: x[:num_rows], results)


@partial(jax.jit, static_argnums=(0, 4))
def sample_rows(
    config: ModelConfig, params: Params, hidden: Float[Array, "T D"], batch: ModelInput, tile_rows: int
) -> Int32[Array, "S"]:
    """The head and the sampler over as many tiles of rows as sample in this step: none at all in mid-prompt."""
    num_rows = len(batch.logits_indices)
    tile_rows = min(num_rows, tile_rows)
    padding = -num_rows % tile_rows
    rows = jax.tree.map(
        lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), (batch.logits_indices, batch.sampling)
    )

    def sample_tile(index: Int32[Array, ""], tokens: Int32[Array, "P"]) -> Int32[Array, "P"]:
        start = index * tile_rows
        indices, sampling = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, tile_rows), rows)
        logits = read_out(config, params, hidden[indices])
        return lax.dynamic_update_slice_in_dim(tokens, sample(logits, sampling), start, 0)

    num_tiles = -(-batch.num_samples // tile_rows)
    tokens = lax.fori_loop(0, num_tiles, sample_tile, jnp.zeros(num_rows + padding, jnp.int32))
    return tokens[:num_rows]
