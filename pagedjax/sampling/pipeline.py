"""Sampling with all that a step's requests ask for: one small program for each thing, run only if it is wanted."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from pagedjax.model_input import SamplingInput
from pagedjax.sampling import logits as ops
from pagedjax.sampling.edits import LogitBias, TokenHistory
from pagedjax.sampling.extras import StepExtras
from pagedjax.sampling.logprobs import TokenLogprobs, token_logprobs
from pagedjax.sampling.processors import LogitsProcessor
from pagedjax.sampling.sampler import sample

CHUNK = 8192
"""Entries of a sparse table that a program takes at once: so that tables of any length need only one program."""


def sample_with(
    logits: Float32[Array, "S V"], sampling: SamplingInput, extras: StepExtras, *, processed_logprobs: bool
) -> tuple[Int32[Array, "S"], TokenLogprobs | None]:
    """Tokens, and their log-probabilities if anyone wants them: of the model's own logits, or of those drawn from."""
    edited = edit(logits, extras)
    token_ids = _sample(edited, sampling)
    if extras.num_top is None:
        return token_ids, None
    source = _processed(edited, sampling) if processed_logprobs else logits
    return token_ids, _token_logprobs(source, token_ids, padded_top(extras.num_top, logits.shape[1]))


def edit(logits: Float32[Array, "S V"], extras: StepExtras) -> Float32[Array, "S V"]:
    """Bias, penalties, what is not allowed, processors: in the order that `SamplingParams` states."""
    edits = extras.edits
    if edits.bias is not None:
        for part in _chunks(edits.bias, ("row", "token", "value"), len(logits)):
            logits = _add_bias(logits, *part)
    if edits.history is not None:
        logits = _penalise(logits, edits.history)
    if edits.allowed is not None:
        logits = _keep_allowed(logits, edits.allowed)
    if extras.processors:
        logits.block_until_ready()  # so that a fault of the model's own is not taken for a processor's
    for processor, states in extras.processors:
        try:
            logits = _process(logits, processor, states).block_until_ready()  # a callback in it may fail only when run
        except Exception as error:  # noqa: BLE001  a user's function: it may raise anything, and ends its requests
            extras.failed.update((extras.sampling[row], error) for row in states)
    return logits


def _penalise(logits: Float32[Array, "S V"], history: TokenHistory) -> Float32[Array, "S V"]:
    counts = _no_counts(logits)
    for part in _chunks(history, ("row", "token", "is_output"), len(logits)):
        counts = _count_tokens(counts, *part)
    return _apply_penalties(logits, counts, history.presence, history.frequency, history.repetition)


def _process(
    logits: Float32[Array, "S V"], processor: LogitsProcessor, states: dict[int, Any]
) -> Float32[Array, "S V"]:
    is_used = np.zeros(len(logits), np.bool_)
    is_used[list(states)] = True
    any_state = next(iter(states.values()))
    rows = [states.get(row, any_state) for row in range(len(logits))]  # the others' results are dropped
    state = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)
    return _apply_processor(processor.function, logits, state, processor.shared, is_used)


def check_processors(processors: Sequence[LogitsProcessor], prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Traces each once, on one row: ValueError if one raises, or does not give logits back."""
    for processor in processors:
        name = getattr(processor.function, "__name__", processor.function)
        try:
            state = jax.tree.map(lambda leaf: np.asarray(leaf)[None], processor.state_for(prompt_ids, ()))
            logits, is_used = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), np.ones(1, np.bool_)
            _apply_processor.eval_shape(processor.function, logits, state, processor.shared, is_used)
        except Exception as error:
            raise ValueError(f"logits_processors: {name!r} does not work: {error}") from error


@partial(jax.jit, static_argnums=0)
def _apply_processor(
    function: Callable[..., Any], logits: Float32[Array, "S V"], state: Any, shared: Any, is_used: Bool[Array, "S"]
) -> Float32[Array, "S V"]:
    result = function(logits, state) if shared is None else function(logits, state, shared)
    if (result.shape, result.dtype) != (logits.shape, logits.dtype):
        raise ValueError(f"it must return {logits.dtype}{logits.shape}, got {result.dtype}{result.shape}")
    return jnp.where(is_used[:, None], result, logits)


def _chunks(table: LogitBias | TokenHistory, names: tuple[str, ...], num_rows: int) -> Iterator[tuple[np.ndarray, ...]]:
    """The columns of a table in pieces of `CHUNK`; the last one is filled up with entries of a row beyond the rows."""
    columns = [getattr(table, name) for name in names]
    for start in range(0, len(columns[0]), CHUNK):
        row, *others = (column[start : start + CHUNK] for column in columns)
        padding = (0, CHUNK - len(row))
        yield np.pad(row, padding, constant_values=num_rows), *(np.pad(x, padding) for x in others)


def padded_top(num_top: int, vocab_size: int) -> int:
    """Few sizes, as each is a program: 0, 20 (the most that the OpenAI API allows), then powers of 4."""
    sizes = (0, 20, *(4**k for k in range(3, 20)))
    return min(next(size for size in sizes if size >= num_top), vocab_size)


_sample = jax.jit(sample)
_processed = jax.jit(ops.processed_logits)
_add_bias = jax.jit(ops.add_bias)
_keep_allowed = jax.jit(ops.keep_allowed)
_no_counts = jax.jit(ops.no_counts)
_count_tokens = jax.jit(ops.count_tokens, donate_argnums=0)
_apply_penalties = jax.jit(ops.penalise)
_token_logprobs = jax.jit(token_logprobs, static_argnums=2)
