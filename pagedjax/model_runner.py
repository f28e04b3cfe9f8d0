"""Params and KV pool on the device, and the one jitted step that uses them: the only jit and donate boundary."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from tqdm.auto import tqdm

from pagedjax.batch import padding_batch
from pagedjax.beams.choose import Candidates, choose_candidates
from pagedjax.beams.rows import BeamRows, beams_for_warm_up
from pagedjax.blocks.host_pool import TILE, HostPool
from pagedjax.config import EngineConfig
from pagedjax.kv_cache import KVCache, copy_cache_blocks, init_kv_cache
from pagedjax.model_input import ModelInput, pack, unpack
from pagedjax.models.decoder import CausalLM, Params, head_params, paged_step, read_out
from pagedjax.models.quantization import quantize_like
from pagedjax.pallas_kernels.attention import implementation_for, why_not
from pagedjax.sampling.decode_loop import (
    DecodeRows,
    build_decode_rows,
    decode_in_loop,
    decode_in_turn,
    feed_tokens,
    pad_tokens,
)
from pagedjax.sampling.extras import StepExtras, extras_for_warm_up
from pagedjax.sampling.logprobs import TokenLogprobs
from pagedjax.sampling.pipeline import padded_top, sample_with
from pagedjax.sampling.rows import PROMPT_LOGPROBS_ROWS, sample_rows, score_rows, take_rows
from pagedjax.sampling.sampler import sample

logger = logging.getLogger(__name__)

CPU_HEAD_ROWS = 64
"""Rows that go through the head at a time on a CPU, where products are compute-bound. A GPU takes all at once: there
each turn of the loop would read the head's weights again."""

CPU_COPY_TILE = 8
"""Blocks copied at a time on a CPU, where padding costs as much as what is copied. A GPU copies all at once."""


class StepResult(NamedTuple):
    """What a step with extras gives, as numpy arrays."""

    token_ids: np.ndarray
    """i32[S]; the first `num_samples` are real."""
    logprobs: TokenLogprobs | None = None
    """Of the sampled tokens, row by row."""
    prompt_logprobs: TokenLogprobs | None = None
    """Of `extras.prompt`'s tokens, in their order."""
    beams: Candidates | None = None
    """Of each search, in the order of `beams.groups`."""


class ModelRunner:
    """Runs steps. On a GPU a step is one program; on a CPU it is one per part of the model, shared by all layers, as
    XLA:CPU takes too long over whole steps (docs/decisions.md). Everything compiles in `warm_up`, or else at first use.
    """

    def __init__(
        self,
        model: CausalLM,
        params: Params,
        config: EngineConfig,
        *,
        kv_dtype: jax.typing.DTypeLike,
        whole_step: bool | None = None,
        attention_implementation: str | None = None,
    ) -> None:
        self.model = model
        self.params = params
        self.config = config
        self.kv_dtype = jnp.dtype(kv_dtype)
        if config.windows != model.config.layer_groups.windows:
            raise ValueError(
                f"windows: got {config.windows}, expected those of the model's layers: "
                f"{model.config.layer_groups.windows}"
            )
        self.kv_cache = self._new_kv_cache()
        is_cpu = jax.default_backend() == "cpu"
        whole_step = not is_cpu if whole_step is None else whole_step
        implementation = implementation_for(attention_implementation, config.batch_invariant)
        self._check_attention(implementation)
        step = partial(paged_step, implementation=implementation)
        self._forward: Any = jax.jit(step, static_argnums=0, donate_argnums=3) if whole_step else step
        self._whole_step = whole_step
        self._decode_loop: Any = jax.jit(self._decode_in_loop, donate_argnums=3)
        self._last_tokens: Any = None
        self.host_pool = HostPool(whole_step)
        self._copy: Any = (
            jax.jit(copy_cache_blocks, static_argnums=0, donate_argnums=1) if whole_step else copy_cache_blocks
        )
        self._copy_tile = CPU_COPY_TILE if is_cpu else config.max_num_running
        self._shapes_run: set[tuple[int, int]] = set()
        self._head_rows = CPU_HEAD_ROWS if is_cpu else config.max_num_running

    @property
    def num_programs(self) -> int:
        """Shapes of batches that were run, and so compiled, so far."""
        return len(self._shapes_run)

    def run(self, batch: ModelInput) -> Int32[Array | np.ndarray, "S"]:
        """Runs one step: token ids on the device, of which the first `batch.num_samples` are real. DONATES the pool.

        It does not wait. Token ids of the batch that are negative stand for the last tokens of the step before.
        """
        hidden, on_device = self._run_layers(batch)
        tokens = sample_rows(self.model.config, self._head_params, hidden, on_device, self._head_rows)
        self._remember(tokens)
        return tokens

    def fetch(self, tokens: Any) -> np.ndarray:
        """Waits for what `run` or `run_decodes` gave."""
        return np.asarray(tokens)

    def run_decodes(self, batch: ModelInput, rows: DecodeRows) -> Any:
        """As `run`, for a batch of decodes which get several tokens each: i32[S] of each decode. DONATES the pool."""
        on_device, limits = unpack(*pack((batch, rows)))
        on_device = self._fed(on_device)
        if self._whole_step:
            tokens, last, self.kv_cache = self._decode_loop(self.params, on_device, limits, self.kv_cache)
        else:
            num_steps = int(rows.num_decodes.max())
            decode = partial(self._decode, self.params)
            tokens, last, self.kv_cache = decode_in_turn(decode, on_device, limits, self.kv_cache, num_steps)
        self._remember(last.token_ids)
        return tokens

    def run_with(self, batch: ModelInput, extras: StepExtras | None, beams: BeamRows | None = None) -> StepResult:
        """As `run`, for requests that ask for more than plain sampling. DONATES the pool."""
        hidden, on_device = self._run_layers(batch)
        logprobs = prompt_logprobs = candidates = None
        if extras is not None and extras.is_for_sampling and batch.num_samples > 0:
            rows, sampling = jax.tree.map(
                lambda x: np.resize(x, (extras.num_rows, *x.shape[1:])), (batch.logits_indices, batch.sampling)
            )
            logits = _read_out(self.model.config, self._head_params, take_rows(hidden, rows))
            tokens, logprobs = sample_with(
                logits, sampling, extras, processed_logprobs=self.config.logprobs_mode == "processed_logprobs"
            )
        else:
            tokens = sample_rows(self.model.config, self._head_params, hidden, on_device, self._head_rows)
        if extras is not None and extras.prompt is not None:
            prompt = extras.prompt
            prompt_logprobs = self._logprobs_after(hidden, prompt.source, prompt.target, prompt.num_top)
        if beams is not None:
            candidates = self._choose(hidden, beams)
        return StepResult(*jax.tree.map(np.asarray, (tokens, logprobs, prompt_logprobs, candidates)))

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Copies blocks of all layers, {to: from}, before a step writes to them. DONATES the pool."""
        # A sequence writes to one shared block of each group of layers at most.
        tile, most = self._copy_tile, self.config.max_num_running * len(self.config.windows)
        source, target = np.zeros((2, -(-most // tile) * tile), np.int32)
        source[: len(copies)], target[: len(copies)] = list(copies.values()), list(copies)
        self.kv_cache = self._copy(tile, self.kv_cache, source, target, -(-len(copies) // tile))

    def swap_out(self, moves: Mapping[int, int]) -> None:
        """Copies blocks to the host, {host block: block}, as they are before the next step."""
        self.host_pool.copy_out(self.kv_cache, moves)

    def swap_in(self, moves: Mapping[int, int]) -> None:
        """Copies blocks back, {block: host block}, before the next step. DONATES the pool."""
        self.kv_cache = self.host_pool.copy_in(self.kv_cache, moves)

    def faster_preemption(self) -> str:
        """Whether to "swap" or to "recompute", by what a block takes: out and in again, or to compute its tokens in the
        largest step. Measured on an empty pool."""
        blocks = range(1, min(self.config.num_blocks, 4 * TILE) + 1)
        moves = {block: block for block in blocks}
        batch = list(self.padding_batches())[-1]

        def swap() -> None:
            self.swap_out(moves)
            self.swap_in(moves)
            jax.block_until_ready(self.kv_cache)

        swap_s = _least_seconds(swap) / len(blocks)
        step_s = _least_seconds(lambda: jax.block_until_ready(self.run(batch)))
        recompute_s = step_s * self.config.block_size / len(batch.token_ids)
        logger.info("a block takes %.2f ms to swap, %.2f ms to recompute", 1e3 * swap_s, 1e3 * recompute_s)
        return "swap" if swap_s < recompute_s else "recompute"

    def run_with_logits(self, batch: ModelInput) -> tuple[np.ndarray, np.ndarray]:
        """As `run`, and also the f32[S, V] logits that the tokens come from: for tests and for debugging."""
        hidden, batch = self._run_layers(batch)
        logits = _read_out(self.model.config, self._head_params, hidden[batch.logits_indices])
        return np.asarray(_sample(logits, batch.sampling)), np.asarray(logits)

    def warm_up(self, *, extras: bool = False, progress: bool = False) -> None:
        """Compiles every program that `run` may need, by running each once on padding alone; with `extras` also those
        of `run_with`, but for logits processors, more than 20 log-probabilities and searches of more than 4 beams."""
        self.copy_blocks({})
        if self.config.num_swap_blocks:
            self.kv_cache = self.host_pool.warm_up(self.kv_cache)
        for batch in tqdm(list(self.padding_batches()), desc="compiling", unit="program", disable=not progress):
            jax.block_until_ready(self.run(batch))
            if self.config.num_decode_steps > 1 and batch.attn.max_query_len == 1:
                self.run_decodes(batch, build_decode_rows([2], [], len(batch.logits_indices)))
            if self.config.async_scheduling:
                feed_tokens(jnp.asarray(batch.token_ids), self._last_tokens)
            for num_rows in self.config.extras_buckets_for(len(batch.token_ids)) if extras else ():
                one_sample = replace(batch, num_samples=np.array(1, np.int32))
                for num_top in (0, 20):
                    self.run_with(one_sample, extras_for_warm_up(num_rows, self.model.config.vocab_size, num_top))
                self.run_with(batch, None, beams_for_warm_up(num_rows))

    def padding_batches(self) -> Iterable[ModelInput]:
        """A batch of padding for each program: buckets of decodes, and buckets of anything."""
        for num_tokens in self.config.decode_buckets:
            yield padding_batch(self.config, num_tokens, max_query_len=1)
        for num_tokens in self.config.mixed_buckets:
            if self.config.max_num_batched_tokens > 1:  # otherwise every step is a decode
                yield padding_batch(self.config, num_tokens, max_query_len=num_tokens)

    def checked_params(self, params: Params) -> Params:
        """Weights that may take the place of `params`, on the device: of the same form, or in float of what is int8,
        which they become. Compiled programs stay. ValueError for others."""
        try:
            params = jax.tree.map(jnp.asarray, params)  # no copy of what is on the device
            params = dict(quantize_like(params, self.params)) if isinstance(params, Mapping) else params
        except TypeError as error:
            raise ValueError(f"params: expected a pytree of arrays: {error}") from error
        forms = [
            {jax.tree_util.keystr(path): (leaf.shape, jnp.dtype(leaf.dtype).name) for path, leaf in leaves}
            for leaves in (jax.tree_util.tree_leaves_with_path(tree) for tree in (self.params, params))
        ]
        old, new = forms
        if old.keys() != new.keys():
            raise ValueError(
                f"params: expected the same arrays as before, but {sorted(old.keys() ^ new.keys())[0]} differs"
            )
        for path, form in old.items():
            if new[path] != form:
                raise ValueError(
                    f"params{path}: expected {form[1]}{list(form[0])}, got {new[path][1]}{list(new[path][0])}"
                )
        return params

    def restore_kv_cache(self) -> None:
        """After a failed step: makes a new pool if the old one, donated, went with it or would come out of it."""
        self.host_pool.clear()
        if not _is_sound(self.kv_cache):
            del self.kv_cache  # what is left of it, before the new one: two pools may not fit
            self.kv_cache = self._new_kv_cache()

    def _run_layers(self, batch: ModelInput) -> tuple[Float[Array, "T D"], ModelInput]:
        """Hidden states, and the batch on the device."""
        self._shapes_run.add((len(batch.token_ids), batch.attn.max_query_len))
        on_device = self._fed(unpack(*pack(batch)))
        hidden, self.kv_cache = self._forward(self.model.config, self.params, on_device, self.kv_cache)
        return hidden, on_device

    def _fed(self, batch: ModelInput) -> ModelInput:
        """With the tokens of the step before, which the host may not know, in their places."""
        if not self.config.async_scheduling or self._last_tokens is None:
            return batch
        return replace(batch, token_ids=feed_tokens(batch.token_ids, self._last_tokens))

    def _remember(self, tokens: Any) -> None:
        if self.config.async_scheduling:
            self._last_tokens = pad_tokens(tokens, self.config.max_num_rows)

    def _decode(self, params: Params, batch: ModelInput, kv_cache: KVCache) -> tuple[Int32[Array, "S"], KVCache]:
        hidden, kv_cache = self._forward(self.model.config, params, batch, kv_cache)
        return sample_rows(self.model.config, head_params(params), hidden, batch, self._head_rows), kv_cache

    def _decode_in_loop(self, params: Params, batch: ModelInput, rows: DecodeRows, kv_cache: KVCache) -> Any:
        return decode_in_loop(partial(self._decode, params), batch, rows, kv_cache, self.config.num_decode_steps)

    def _logprobs_after(
        self, hidden: Float[Array, "T D"], source: Int32[np.ndarray, "n"], target: Int32[np.ndarray, "n"], num_top: int
    ) -> TokenLogprobs:
        num_tokens, num_padding = len(source), len(hidden) - len(source)
        source, target = (np.pad(x, (0, num_padding)) for x in (source, target))
        num_top = padded_top(num_top, self.model.config.vocab_size)
        tile_rows = min(self._head_rows, len(hidden), PROMPT_LOGPROBS_ROWS)
        args = (hidden, source, target, num_tokens)
        return score_rows(self.model.config, num_top, tile_rows, self._head_params, *args)

    def _choose(self, hidden: Float[Array, "T D"], beams: BeamRows) -> Candidates:
        best = self._logprobs_after(hidden, beams.source, np.zeros_like(beams.source), beams.num_candidates)
        num_candidates = min(padded_top(beams.num_candidates, 2**30), beams.rows.shape[1] * best.top_ids.shape[1])
        return _choose_candidates(best.top_logprobs, best.top_ids, beams.rows, beams.scores, num_candidates)

    def _check_attention(self, implementation: str | None) -> None:
        model = self.model.config
        q = jax.ShapeDtypeStruct((1, model.num_heads, model.head_dim), self.kv_dtype)
        reason = None if implementation is None else why_not(implementation, q, self.kv_cache.k[0])
        if reason is not None:
            raise ValueError(f"attention_implementation={implementation!r}: {reason}")

    @property
    def _head_params(self) -> Params:
        return head_params(self.params)

    def _new_kv_cache(self) -> KVCache:
        model = self.model.config
        cache = init_kv_cache(
            num_pools=model.layer_groups.num_pools,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.kv_dtype,
        )
        # Where the params are, for good: what comes back from the host is, and other programs would compile for it.
        devices = getattr(jax.tree.leaves(self.params)[0], "devices", jax.local_devices)()
        return jax.device_put(cache, next(iter(devices)))


_read_out = jax.jit(read_out, static_argnums=0)
_sample = jax.jit(sample)
_choose_candidates = jax.jit(choose_candidates, static_argnums=4)


def _is_sound(kv_cache: KVCache) -> bool:
    leaves = jax.tree.leaves(kv_cache)
    if any(x.is_deleted() for x in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:  # noqa: BLE001 (what a step raised that nobody has waited for)
        return False
    return True


def _least_seconds(function: Callable[[], Any]) -> float:
    function()  # it compiles, the first time
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
