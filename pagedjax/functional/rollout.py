"""`generate`: paged sampling as one pure function, to be called inside a user's own jit, vmap, scan or mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from pagedjax.functional import checks
from pagedjax.functional.keys import seeds_of
from pagedjax.functional.steps import DEFAULT_CHUNK, PagedState, decode_step, fork, init_kv_cache, prefill
from pagedjax.model_input import SamplingInput
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.quantization import float_dtype
from pagedjax.sampling.logprobs import token_logprobs
from pagedjax.sampling.sampler import sample


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """N samples of B prompts, of at most L tokens each."""

    token_ids: Int32[Array, "B N L"]
    """`pad_id` behind the end of a sample."""
    logprobs: Float32[Array, "B N L"]
    """Of each token under the model's own distribution, before temperature, filters and processors; 0 behind the
    end."""
    lengths: Int32[Array, "B N"]
    """Tokens of each sample, with the one of `eos_ids` that ends it."""
    is_finished: Bool[Array, "B N"]
    """Whether it ended with one of `eos_ids`; the others were cut at `max_new_tokens`."""

    @property
    def mask(self) -> Bool[Array, "B N L"]:
        """Which tokens are real."""
        steps = jnp.arange(self.token_ids.shape[-1], dtype=jnp.int32)
        return jnp.expand_dims(steps, range(self.lengths.ndim)) < self.lengths[..., None]


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generated:
    """What a logits processor is told: R = B x N rows, row b * N + n is sample n of prompt b."""

    token_ids: Int32[Array, "R L"]
    """The tokens so far; those behind are `pad_id`."""
    num_tokens: Int32[Array, "R"]
    """How many there are so far."""


Processor = Callable[[Float32[Array, "R V"], Generated], Float32[Array, "R V"]]


class _Static(NamedTuple):
    """What is part of the program."""

    max_new_tokens: int
    num_samples: int
    block_size: int
    chunk_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    kv_dtype: Any
    processors: tuple[Processor, ...]
    batch_invariant: bool
    implementation: str | None


class _Filters(NamedTuple):
    """Of each prompt."""

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]


class _Loop(NamedTuple):
    """What one decode hands to the next."""

    step: Int32[Array, ""]
    state: PagedState
    token_ids: Int32[Array, "R L"]
    logprobs: Float32[Array, "R L"]
    lengths: Int32[Array, "R"]
    last: Int32[Array, "R"]
    is_running: Bool[Array, "R"]


def generate(
    model: CausalLM,
    params: Params,
    prompt_ids: Int[Array | np.ndarray, "B T"],
    prompt_lens: Int[Array | np.ndarray, "B"] | None,
    key: Any,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    eos_ids: Sequence[int] = (),
    pad_id: int = 0,
    logits_processors: Sequence[Processor] = (),
    block_size: int = 16,
    chunk_size: int = DEFAULT_CHUNK,
    kv_dtype: jax.typing.DTypeLike | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Rollout:
    """Samples from the model over a paged KV cache that lives and dies inside this call. Pure: it may be jitted,
    mapped, scanned and sharded; called as it is, it compiles itself once for each set of shapes and options.

    The prompts are computed and stored once, and their `num_samples` samples share their blocks. The loop ends when
    all rows have ended. Under vmap it ends when the last of all calls has, and each step copies the pools: rows in one
    call cost less.

    Args:
      params: as `pagedjax.load` gives them, on one device or sharded over a mesh.
      prompt_ids: token ids, padded on the right with anything.
      prompt_lens: how much of each row is real, 1 to T; None: all of it. May be traced: other lengths, same program.
      key: one JAX key (threefry), of which row b gets `fold_in(key, b)`; or one for each of the B rows. With those of
        `request_keys(seeds)` the samples are `LLM.generate`'s for these seeds. Token t of sample n is drawn with
        `fold_in(fold_in(row's key, n), t)`: neither padding, batch nor mesh has a part in it.
      temperature, top_k, top_p, min_p: one number, or one for each prompt, as in `SamplingParams`; may be traced.
        Temperature 0 is greedy, top_k 0 or -1 keeps all tokens.
      eos_ids: token ids that end a sample. None is added: pass those of the tokenizer.
      logits_processors: functions of the logits f32[R, V] and of `Generated`, applied in order before the draw.
      kv_dtype: of the cache; None: that of the params.
      chunk_size: tokens of the prompts that go through the model at a time.
      batch_invariant: no bit of a row depends on the others, and `score` gives the same log-probabilities. On a CPU
        alone; it costs what padding to 64 rows does, little from there on.
      implementation: of the attention: see `paged_attention`.

    Raises:
      ValueError: while it is traced, for sizes below 1, arrays of the wrong shape or dtype, numbers out of their range,
        and more positions than the model has.
    """
    checks.prompts(prompt_ids, prompt_lens)
    num_prompts, prompt_len = np.shape(prompt_ids)
    static = _Static(
        max_new_tokens=checks.count("max_new_tokens", max_new_tokens),
        num_samples=checks.count("num_samples", num_samples),
        block_size=checks.count("block_size", block_size),
        chunk_size=checks.count("chunk_size", chunk_size),
        eos_ids=checks.token_ids("eos_ids", eos_ids, model.config.vocab_size),
        pad_id=int(pad_id),
        kv_dtype=jnp.dtype(float_dtype(params) if kv_dtype is None else kv_dtype),
        processors=checks.processors(logits_processors),
        batch_invariant=checks.batch_invariant(batch_invariant),
        implementation=implementation,
    )
    checks.positions(model.config, prompt_len, max_new_tokens)
    ranges = {"temperature": (0.0, 3e38), "top_k": (-1.0, 2.0**31 - 1), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in values.items():
        checks.per_prompt(name, value, num_prompts, *ranges[name])
    dtypes = {name: jnp.int32 if name == "top_k" else jnp.float32 for name in values}
    columns = {name: jnp.broadcast_to(jnp.asarray(x, dtypes[name]), (num_prompts,)) for name, x in values.items()}
    token_ids = jnp.asarray(prompt_ids, jnp.int32)
    lens = None if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)
    return _generate(model, static, params, token_ids, lens, seeds_of(key, num_prompts), _Filters(**columns))


@partial(jax.jit, static_argnums=(0, 1))
def _generate(
    model: CausalLM,
    static: _Static,
    params: Params,
    prompt_ids: Int32[Array, "B T"],
    prompt_lens: Int32[Array, "B"] | None,
    seeds: UInt32[Array, "B 2"],
    filters: _Filters,
) -> Rollout:
    num_prompts, num_samples = len(prompt_ids), static.num_samples
    empty = init_kv_cache(
        model,
        num_prompts=num_prompts,
        prompt_len=prompt_ids.shape[1],
        max_new_tokens=static.max_new_tokens,
        num_samples=num_samples,
        block_size=static.block_size,
        dtype=static.kv_dtype,
        exact_lens=prompt_lens is None,
        batch_invariant=static.batch_invariant,
    )
    options = {"implementation": static.implementation}
    logits, state = prefill(model, params, empty, prompt_ids, prompt_lens, chunk_size=static.chunk_size, **options)
    sampling = _sampling_input(seeds, filters, num_samples)
    shape = (num_prompts * num_samples, static.max_new_tokens)
    start = _Loop(
        step=jnp.int32(0),
        state=fork(state),
        token_ids=jnp.full(shape, static.pad_id, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        lengths=jnp.zeros(shape[0], jnp.int32),
        last=jnp.zeros(shape[0], jnp.int32),
        is_running=jnp.ones(shape[0], jnp.bool_),
    )

    def goes_on(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < static.max_new_tokens) & jnp.any(loop.is_running)

    def turn(loop: _Loop) -> _Loop:
        logits, state = decode_step(model, params, loop.state, loop.last, loop.is_running, **options)
        return _draw(static, loop._replace(state=state), logits, sampling)

    first = _draw(static, start, jnp.repeat(logits, num_samples, axis=0), sampling)
    end = lax.while_loop(goes_on, turn, first)
    by_prompt = (num_prompts, num_samples)
    return Rollout(
        token_ids=end.token_ids.reshape(*by_prompt, -1),
        logprobs=end.logprobs.reshape(*by_prompt, -1),
        lengths=end.lengths.reshape(by_prompt),
        is_finished=~end.is_running.reshape(by_prompt),
    )


def _draw(static: _Static, loop: _Loop, logits: Float32[Array, "R V"], sampling: SamplingInput) -> _Loop:
    """The next token of each row that runs, and who goes on."""
    edited = logits
    for processor in static.processors:
        edited = processor(edited, Generated(loop.token_ids, loop.lengths))
        if (edited.shape, edited.dtype) != (logits.shape, logits.dtype):
            got = f"{edited.dtype}{edited.shape}"
            raise ValueError(f"logits_processors: {processor} must return {logits.dtype}{logits.shape}, got {got}")
    rows = SamplingInput(**{**vars(sampling), "num_outputs": jnp.full(len(logits), loop.step, jnp.uint32)})
    filled_up = loop.state.layout.filled_up
    tokens = sample(filled_up(edited), jax.tree.map(filled_up, rows))
    token = tokens[: len(logits)]
    logprob = token_logprobs(filled_up(logits), tokens, 0).logprob[: len(token)]
    is_end = jnp.zeros_like(loop.is_running)
    for eos_id in static.eos_ids:
        is_end |= token == eos_id
    return loop._replace(
        step=loop.step + 1,
        token_ids=loop.token_ids.at[:, loop.step].set(jnp.where(loop.is_running, token, static.pad_id)),
        logprobs=loop.logprobs.at[:, loop.step].set(jnp.where(loop.is_running, logprob, 0)),
        lengths=loop.lengths + loop.is_running.astype(jnp.int32),
        last=jnp.where(loop.is_running, token, loop.last),
        is_running=loop.is_running & ~is_end,
    )


def _sampling_input(seeds: UInt32[Array, "B 2"], filters: _Filters, num_samples: int) -> SamplingInput:
    temperature, top_k, top_p, min_p = (jnp.repeat(x, num_samples) for x in filters)
    return SamplingInput(
        temperature=temperature,
        top_k=jnp.maximum(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        seed=jnp.repeat(seeds, num_samples, axis=0),
        sample_index=jnp.tile(jnp.arange(num_samples, dtype=jnp.uint32), len(seeds)),
        num_outputs=jnp.zeros(len(temperature), jnp.uint32),
    )
