"""An engine whose device is a numpy pool of token ids: every read is checked, and a step takes microseconds.

The pool holds token ids instead of KV. What a request reads through its table must be its own tokens, slot by slot, and
the next token is a checksum of them: one slot that is stale, missing, uncopied or someone else's is found at once.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedjax.beams.params import BeamSearchParams
from pagedjax.beams.search import BeamSearch, Hypothesis
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.model_runner import ModelRunner, StepResult
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams

VOCAB_SIZE = 32
NOTHING = -1
"""In a slot that was never written."""
WRONG = 9999
"""Sampled from such a slot: somebody's output would have it."""


Windows = tuple[int | None, ...]


def seen(token_ids: Sequence[int], windows: Windows) -> Sequence[int]:
    """What the last token sees of all tokens, in the group that sees most."""
    return token_ids if None in windows else token_ids[-max(window or 0 for window in windows) :]


def next_token(token_ids: Sequence[int], seed: int = 0, sample_index: int = 0, num_outputs: int = 0) -> int:
    """The fake model and its sampler: depends on every token, on their order and on the random stream."""
    stream = np.array([seed >> 32, seed & 0xFFFFFFFF, sample_index, num_outputs], np.uint32).tobytes()
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes() + (stream if seed else b"")) % VOCAB_SIZE


def next_logprobs(token_ids: Sequence[int]) -> np.ndarray:
    """f32[V] log-probabilities of the fake model."""
    logits = np.random.default_rng(zlib.crc32(np.asarray(token_ids, np.int32).tobytes())).normal(0, 3, VOCAB_SIZE)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def best_candidates(contexts: Sequence[Sequence[int]], scores: Sequence[float], count: int) -> tuple[list, list, list]:
    """The best continuations of several beams: scores, beams, tokens."""
    pairs = zip(contexts, scores, strict=True)
    totals = np.concatenate([next_logprobs(context) + np.float32(score) for context, score in pairs])
    best = np.argsort(-totals, kind="stable")[:count]
    return totals[best].tolist(), (best // VOCAB_SIZE).tolist(), (best % VOCAB_SIZE).tolist()


def completion_reference(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int = 0,
    sample_index: int = 0,
    outputs: Sequence[int] = (),
    windows: Windows = (None,),
) -> list[int]:
    """All outputs of a completion alone, of which the first are `outputs`."""
    outputs = list(outputs)
    while len(outputs) < num_tokens:
        outputs.append(next_token(seen([*prompt, *outputs], windows), seed, sample_index, len(outputs)))
    return outputs


def beam_reference(
    prompt: Sequence[int], params: BeamSearchParams, max_tokens: int, windows: Windows = (None,)
) -> list[Hypothesis]:
    """The outputs of a search alone."""
    search = BeamSearch(params, frozenset(), max_tokens)
    while not search.is_done:
        contexts = [seen([*prompt, *outputs], windows) for outputs in search.token_ids]
        search.advance(*best_candidates(contexts, search.scores, search.num_candidates))
    return search.hypotheses()


class DeviceError(Exception):
    """What a step raises that is told to fail."""


class FakeHostPool(dict):
    """Rows of token ids by host block."""

    def retain(self, num_used: int, is_used: Any) -> None:
        for host in [host for host in self if not is_used(host)]:
            del self[host]
        assert len(self) == num_used


class FakeRunner(ModelRunner):
    """What a `ModelRunner` is to the engine."""

    def __init__(self, config: EngineConfig) -> None:
        model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB_SIZE))
        self.model, self.config = model, config
        self._shapes_run = set()
        self.engine: LLMEngine | None = None
        self.fails = False
        """Whether the next step raises, and loses the pool."""
        self.host_pool: Any = FakeHostPool()
        self.last_tokens = np.zeros(0, np.int32)
        self.num_copies = 0
        self.num_tokens = 0
        """Tokens computed so far."""
        self.lose_pool()

    def lose_pool(self) -> None:
        self.pool = np.full((self.config.num_blocks + 1, self.config.block_size), NOTHING, np.int32)

    def restore_kv_cache(self) -> None:
        self.host_pool.clear()

    def checked_params(self, params: Any) -> Any:
        return params

    @property
    def params(self) -> Any:
        return None

    @params.setter
    def params(self, params: Any) -> None:
        self.lose_pool()  # what is not computed again is found out

    def faster_preemption(self) -> str:
        return "swap"

    def swap_out(self, moves: Mapping[int, int]) -> None:
        for host, block in moves.items():
            assert 0 < host <= self.config.num_swap_blocks
            self.host_pool[host] = self.pool[block].copy()

    def swap_in(self, moves: Mapping[int, int]) -> None:
        assert self.engine is not None
        for block, host in moves.items():
            assert self.engine.scheduler.swap.host.ref_count(host) == 0
            self.pool[block] = self.host_pool.pop(host)

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        assert self.engine is not None
        allocator = self.engine.scheduler.allocator
        for target, source in copies.items():  # as the device does it, one after the other
            assert allocator.ref_count(target) <= 1  # none if its holder ended since
            assert target != source
            self.pool[target] = self.pool[source]
        self.num_copies += len(copies)

    def run(self, batch: Any) -> np.ndarray:
        self._write(batch)
        self.last_tokens = self._sample(batch)
        return self.last_tokens

    def run_decodes(self, batch: Any, rows: Any) -> list[np.ndarray]:
        """By the definition: row by row, position by position."""
        tokens, size = [], self.config.block_size
        going = rows.num_decodes > 0
        last = np.zeros(len(batch.logits_indices), np.int32)
        for step in range(self.config.num_decode_steps):
            self._write(batch)
            sampled = self._sample(batch)
            tokens.append(np.where(going, sampled, -77))
            last = np.where(going, sampled, last)
            is_stop = [token in stops for token, stops in zip(sampled, rows.stop_ids, strict=True)]
            going = going & ~np.array(is_stop) & (step + 1 < rows.num_decodes)
            positions = batch.positions + going
            groups = []
            for attn in batch.groups:
                blocks = attn.block_tables[np.arange(len(positions)), positions // size]
                slots = np.where(going, blocks * size + positions % size, 0)
                groups.append(replace(attn, slot_mapping=slots, context_lens=attn.context_lens + going))
            sampling = replace(batch.sampling, num_outputs=batch.sampling.num_outputs + going)
            batch = replace(batch, token_ids=last, positions=positions, groups=tuple(groups), sampling=sampling)
        self.last_tokens = last
        return tokens

    def run_with(self, batch: Any, extras: Any, beams: Any = None) -> StepResult:
        self._write(batch)
        candidates = None
        if beams is not None:
            candidates = self._candidates(batch, beams)
        return StepResult(self._sample(batch), beams=candidates)

    def _write(self, batch: Any) -> None:
        assert self.engine is not None
        if self.fails:
            self.fails = False
            self.lose_pool()
            raise DeviceError
        allocator = self.engine.scheduler.allocator
        num_tokens = int(batch.attn.query_start_loc[-1])
        token_ids = [self.last_tokens[-1 - token] if token < 0 else token for token in batch.token_ids[:num_tokens]]
        written: set[int] = set()
        for attn in batch.groups:
            slots = np.asarray(attn.slot_mapping[:num_tokens])
            is_real = slots >= self.config.block_size
            assert len(written) + is_real.sum() == len(written | set(slots[is_real].tolist())), "two tokens in one slot"
            written |= set(slots[is_real].tolist())
            self.pool.reshape(-1)[slots] = np.where(is_real, token_ids, NOTHING)
        for block in {slot // self.config.block_size for slot in written}:
            assert allocator.ref_count(block) <= 1, f"a write into block {block}, which is shared"
        self.num_tokens += len(written) // len(batch.groups)

    def _context(self, batch: Any, index: int) -> list[int]:
        """What the token sees in the group that sees most; nothing if the others hold other tokens."""
        row = int(np.searchsorted(batch.attn.query_start_loc, index, side="right")) - 1
        contexts = [
            list(seen(self.pool[attn.block_tables[row]].ravel()[: attn.context_lens[row]].tolist(), (window,)))
            for attn, window in zip(batch.groups, self.config.windows, strict=True)
        ]
        most = max(contexts, key=len)
        return most if all(most[len(most) - len(each) :] == each for each in contexts) else [NOTHING]

    def _sample(self, batch: Any) -> np.ndarray:
        sampled = np.zeros(len(batch.logits_indices), np.int32)
        sampling = batch.sampling
        for i in range(int(batch.num_samples)):
            high, low = map(int, sampling.seed[i])
            seed = (high << 32) + low if sampling.temperature[i] else 0
            stream = (seed, int(sampling.sample_index[i]), int(sampling.num_outputs[i]))
            context = self._context(batch, int(batch.logits_indices[i]))
            # A row that ended in the step before, which the host did not know yet, may read what was never written.
            sampled[i] = WRONG if NOTHING in context else next_token(context, *stream)
        return sampled

    def _candidates(self, batch: Any, beams: Any) -> Any:
        size = beams.num_candidates
        scores = np.full((len(beams.rows), size), -np.inf, np.float32)
        which, tokens = np.zeros((2, len(beams.rows), size), np.int32)
        for g, group in enumerate(beams.groups):
            count = len(group.requests)
            contexts = [self._context(batch, int(beams.source[row])) for row in beams.rows[g, :count]]
            expected = [seen(request.token_ids, self.config.windows) for request in group.requests]
            assert contexts == expected, "the KV is not the beam's"
            assert np.isneginf(beams.scores[g, count:]).all()
            columns = best_candidates(contexts, beams.scores[g, :count].tolist(), size)
            for out, column in zip((scores, which, tokens), columns, strict=True):
                out[g, : len(column)] = column
        return SimpleNamespace(scores=scores, beams=which, tokens=tokens)


def fake_engine(num_blocks: int = 64, **options: Any) -> LLMEngine:
    sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    config = EngineConfig(num_blocks=num_blocks, check_integrity=True, **{**sizes, **options})
    runner = FakeRunner(config)
    engine = LLMEngine(runner, config)
    runner.engine = engine
    return engine


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps to the end, checking all books after each step; the last outputs by id."""
    outputs = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_integrity()
    return outputs


def device_of(engine: LLMEngine) -> FakeRunner:
    """The fake device, with its counters."""
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner
