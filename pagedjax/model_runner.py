"""Params and KV pool on the device, and the one jitted step that uses them: the only jit and donate boundary."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from tqdm.auto import tqdm

from pagedjax.beams.choose import Candidates, choose_candidates
from pagedjax.beams.rows import BeamRows, beams_for_warm_up
from pagedjax.config import EngineConfig
from pagedjax.kv_cache import KVCache, copy_cache_blocks, init_kv_cache
from pagedjax.model_input import ModelInput, SamplingInput, pack, unpack
from pagedjax.models.llama import LlamaForCausalLM, Params, paged_step, read_out
from pagedjax.pallas_kernels.attention import why_not
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.sampling.extras import StepExtras, extras_for_warm_up
from pagedjax.sampling.logprobs import TokenLogprobs
from pagedjax.sampling.pipeline import padded_top, sample_with
from pagedjax.sampling.rows import PROMPT_LOGPROBS_ROWS, sample_rows, score_rows, take_rows
from pagedjax.sampling.sampler import sample

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
        model: LlamaForCausalLM,
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
        self.kv_cache = self._new_kv_cache()
        is_cpu = jax.default_backend() == "cpu"
        whole_step = not is_cpu if whole_step is None else whole_step
        self._check_attention(attention_implementation)
        step = partial(paged_step, implementation=attention_implementation)
        self._forward: Any = jax.jit(step, static_argnums=0, donate_argnums=3) if whole_step else step
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

    def run(self, batch: ModelInput) -> np.ndarray:
        """Runs one step: i32[S] token ids, of which the first `batch.num_samples` are real. DONATES the pool."""
        self._shapes_run.add((len(batch.token_ids), batch.attn.max_query_len))
        batch = unpack(*pack(batch))
        hidden, self.kv_cache = self._forward(self.model.config, self.params, batch, self.kv_cache)
        return np.asarray(sample_rows(self.model.config, self._head_params, hidden, batch, self._head_rows))

    def run_with(self, batch: ModelInput, extras: StepExtras | None, beams: BeamRows | None = None) -> StepResult:
        """As `run`, for requests that ask for more than plain sampling. DONATES the pool."""
        on_device = unpack(*pack(batch))
        hidden, self.kv_cache = self._forward(self.model.config, self.params, on_device, self.kv_cache)
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
        tile, most = self._copy_tile, self.config.max_num_running  # a sequence writes to one shared block at most
        source, target = np.zeros((2, -(-most // tile) * tile), np.int32)
        source[: len(copies)], target[: len(copies)] = list(copies.values()), list(copies)
        self.kv_cache = self._copy(tile, self.kv_cache, source, target, -(-len(copies) // tile))

    def run_with_logits(self, batch: ModelInput) -> tuple[np.ndarray, np.ndarray]:
        """As `run`, and also the f32[S, V] logits that the tokens come from: for tests and for debugging."""
        batch = unpack(*pack(batch))
        hidden, self.kv_cache = self._forward(self.model.config, self.params, batch, self.kv_cache)
        logits = _read_out(self.model.config, self._head_params, hidden[batch.logits_indices])
        return np.asarray(_sample(logits, batch.sampling)), np.asarray(logits)

    def warm_up(self, *, extras: bool = False, progress: bool = False) -> None:
        """Compiles every program that `run` may need, by running each once on padding alone; with `extras` also those
        of `run_with`, but for logits processors, more than 20 log-probabilities and searches of more than 4 beams."""
        self.copy_blocks({})
        for batch in tqdm(list(self.padding_batches()), desc="compiling", unit="program", disable=not progress):
            self.run(batch)
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
            if num_tokens > 1:  # with a budget of 1 every step is a decode
                yield padding_batch(self.config, num_tokens, max_query_len=num_tokens)

    def update_params(self, params: Params) -> None:
        """Other weights of the same form: the compiled programs stay. ValueError if their form is another."""
        try:
            params = jax.tree.map(jnp.asarray, params)  # no copy of what is on the device
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
        self.params = params

    def restore_kv_cache(self) -> None:
        """After a failed step: makes a new pool if the old one, donated, went with it."""
        if any(x.is_deleted() for x in jax.tree.leaves(self.kv_cache)):
            del self.kv_cache  # what is left of it, before the new one: two pools may not fit
            self.kv_cache = self._new_kv_cache()

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
        return {name: self.params[name] for name in ("embed_tokens", "norm", "lm_head") if name in self.params}

    def _new_kv_cache(self) -> KVCache:
        model = self.model.config
        return init_kv_cache(
            num_layers=model.num_layers,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.kv_dtype,
        )


_read_out = jax.jit(read_out, static_argnums=0)
_sample = jax.jit(sample)
_choose_candidates = jax.jit(choose_candidates, static_argnums=4)


def padding_batch(config: EngineConfig, num_tokens: int, max_query_len: int) -> ModelInput:
    """A batch of this shape without any request: it computes on the null block alone."""
    num_rows = config.num_rows_for(num_tokens)

    def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros(shape, dtype)

    return ModelInput(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        attn=AttentionMetadata(
            slot_mapping=zeros(num_tokens),
            block_tables=zeros(num_rows, config.max_blocks_per_seq),
            context_lens=zeros(num_rows),
            query_start_loc=zeros(num_rows + 1),
            max_query_len=max_query_len,
        ),
        logits_indices=zeros(num_rows),
        num_samples=zeros(),
        sampling=SamplingInput(
            temperature=zeros(num_rows, dtype=np.float32),
            top_k=zeros(num_rows),
            top_p=np.ones(num_rows, np.float32),
            min_p=zeros(num_rows, dtype=np.float32),
            seed=zeros(num_rows, 2, dtype=np.uint32),
            sample_index=zeros(num_rows, dtype=np.uint32),
            num_outputs=zeros(num_rows, dtype=np.uint32),
        ),
    )
