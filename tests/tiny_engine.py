"""A tiny random model with large gaps between its best tokens, engines around it, and what they are compared with.

Compiled programs are shared by all tests of a process that have the same shapes: `tiny_engine` keeps a device pool of
`POOL_BLOCKS` whatever part of it the engine may hand out, and the sizes below are the ones to use.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_scripts import load
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from pagedjax.batch import build_batch
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.kv_cache import KVCache
from pagedjax.llm import LLM
from pagedjax.model_input import ModelInput
from pagedjax.model_runner import ModelRunner
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, paged_step
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.sampler import sample

POOL_BLOCKS = 64
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 8
BUDGET = 24

tiny_model = load("tiny_model")
VOCAB_SIZE: int = tiny_model.VOCAB_SIZE
CONFIG: ModelConfig = replace(tiny_model.checkpoint()[0].config, max_position_embeddings=256)
MODEL = CausalLM(CONFIG)

LOGIT_TOLERANCE = 2e-3
"""How far f32 rounding may move a logit when tokens are cut into other batches: logits are up to about 100 here, with a
standard deviation of 25, and the largest difference seen is 6e-4."""


def tiny_params() -> dict[str, Any]:
    """Weights whose greedy text depends on the whole context: attention weighs as much as the token itself."""
    return tiny_model.checkpoint()[1]


@lru_cache
def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the character chr(i): the text of any ids is `text_of(ids)`."""
    alphabet = {ord(char) for char in ByteLevel.alphabet()}
    others = [byte for byte in range(256) if byte not in alphabet]
    vocab = {chr(i) if i in alphabet else chr(256 + others.index(i)): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def greedy(max_tokens: int | None = 16, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@dataclass(frozen=True)
class TinyConfig(EngineConfig):
    """With block tables for the whole device pool: their width is a shape too, and would follow `num_blocks`."""

    pool_blocks: int = POOL_BLOCKS

    @property
    def max_blocks_per_seq(self) -> int:
        return min(self.table_len(self.max_model_len), self.pool_blocks)


def tiny_config(
    num_blocks: int = POOL_BLOCKS, config_class: type[EngineConfig] = EngineConfig, **options: Any
) -> EngineConfig:
    sizes = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
    }
    return config_class(num_blocks=num_blocks, check_integrity=True, **{**sizes, **options})


def tiny_engine(
    num_blocks: int = POOL_BLOCKS,
    *,
    pool_blocks: int = POOL_BLOCKS,
    tokenizer: Any = None,
    eos_token_ids: Sequence[int] = (),
    whole_step: bool | None = None,
    attention_implementation: str | None = None,
    engine_class: type[LLMEngine] = LLMEngine,
    **options: Any,
) -> LLMEngine:
    """An engine that may use `num_blocks` of a device pool of `pool_blocks`."""
    pool_blocks = max(num_blocks, pool_blocks)
    config = tiny_config(num_blocks, TinyConfig, pool_blocks=pool_blocks, **options)
    pool_config = tiny_config(pool_blocks, **options)
    runner = ModelRunner(
        MODEL,
        tiny_params(),
        pool_config,
        kv_dtype=jnp.float32,
        whole_step=whole_step,
        attention_implementation=attention_implementation,
    )
    return engine_class(runner, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids)


def tiny_llm(llm_class: type[LLM] = LLM, **options: Any) -> LLM:
    sizes = {
        "num_blocks": POOL_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "tokenizer": ascii_tokenizer(),
    }
    return llm_class(MODEL, params=tiny_params(), check_integrity=True, warm_up=False, **{**sizes, **options})


@lru_cache
def unchecked(name: str) -> ModuleType:
    """A copy of a host module without the run-time type checks of these tests: what a user's wrong arguments meet."""
    original = importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"{name}_unchecked", original.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unchecked_engine(**options: Any) -> LLMEngine:
    return tiny_engine(engine_class=unchecked_engine_class(), **options)


def unchecked_engine_class() -> type[LLMEngine]:
    module: Any = unchecked("pagedjax.engine")
    module.RequestFactory = unchecked("pagedjax.requests").RequestFactory
    return module.LLMEngine


def unchecked_llm(**options: Any) -> LLM:
    module: Any = unchecked("pagedjax.llm")
    module.LLMEngine = unchecked_engine_class()
    for name in ("SharedEngine", "Stream", "AsyncStream", "Inbox"):
        setattr(module, name, getattr(unchecked("pagedjax.streaming"), name))
    return tiny_llm(module.LLM, **options)


@jax.jit
def _dense(params: Any, token_ids: jax.Array) -> Any:
    return MODEL.apply({"params": params}, token_ids)


def dense_logits(token_ids: Sequence[int]) -> np.ndarray:
    """f32[len, V] logits of the dense model, without a cache; padded behind, which causal attention does not see."""
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_dense(tiny_params(), padded))[0, : len(token_ids)]


def naive_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The slow, obvious loop: the whole sequence through the dense model for each token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(dense_logits(token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def assert_greedy(prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token of `output` is the dense model's best after all before it, or ties with it within the tolerance."""
    logits = dense_logits([*prompt, *output])[len(prompt) - 1 : -1]
    lost = logits.max(axis=-1) - logits[np.arange(len(output)), output]
    assert (lost <= LOGIT_TOLERANCE).all(), f"{output} is not greedy after {prompt}: {lost} below the best"


def reference(prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
    """REF: the ids of the same request alone, in a large pool, without chunks and without a prefix cache."""
    engine = tiny_engine(max_num_batched_tokens=MAX_MODEL_LEN, enable_prefix_caching=False)
    engine.add_request(prompt, params)
    (output,) = run_all(engine).values()
    return output.outputs[index].token_ids


def run_all(engine: LLMEngine, max_steps: int = 1000) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the final outputs by id. Each request has one, and nothing follows it."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        for output in engine.step():
            assert output.request_id not in finished, "an output after the last one"
            if output.finished:
                finished[output.request_id] = output
        if not engine.has_unfinished():
            assert_clean(engine)
            return finished
    raise AssertionError("no end in sight")


@jax.jit
def _head(params: Any, hidden: jax.Array, batch: ModelInput) -> tuple[Any, Any]:
    logits: Any = MODEL.apply({"params": params}, hidden[batch.logits_indices], method="logits")
    return sample(logits, batch.sampling), logits


def step_with_logits(engine: LLMEngine) -> dict[str, np.ndarray]:
    """One step; the logits that each request sampled from. As `runner.run_with_logits`, but compiled."""
    scheduled = engine.scheduler.schedule()
    runner, batch = engine.runner, jax.device_put(build_batch(scheduled, engine.config))
    runner.copy_blocks(scheduled.copies)
    hidden, runner.kv_cache = paged_step(CONFIG, runner.params, batch, runner.kv_cache)
    tokens, logits = map(np.asarray, _head(runner.params, hidden, batch))
    updated = engine.scheduler.update(scheduled, tokens[: len(scheduled.sampling)])
    for output in engine.outputs.process(updated, engine.scheduler):
        if output.finished:
            engine.outputs.discard(output.request_id)
    return {request.request_id: logits[row] for row, request in enumerate(scheduled.sampling)}


def fill_pool(engine: LLMEngine, value: float) -> None:
    """Overwrites every slot of the device pool, the null block included."""
    runner = engine.runner
    runner.kv_cache = jax.tree.map(lambda pool: jnp.full(pool.shape, value, pool.dtype), runner.kv_cache)


def pool_of(engine: LLMEngine) -> list[np.ndarray]:
    """A copy of the pool, keys and values of all layers, as [N, bs, rest] each; the block size is not 2, nor 16."""
    cache: KVCache = engine.runner.kv_cache
    pools = [np.array(pool) for pool in (*cache.k, *cache.v)]
    slot_axis = pools[0].shape.index(engine.config.block_size, 1)
    return [np.moveaxis(pool, slot_axis, 1).reshape(*np.moveaxis(pool, slot_axis, 1).shape[:2], -1) for pool in pools]


def assert_clean(engine: LLMEngine) -> None:
    """CLEAN: every block is free, nothing is held, and no request left anything behind but names of free blocks."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished()
    assert not scheduler.running
    assert not scheduler.waiting
    scheduler.check_integrity()
    assert scheduler.allocator.num_free_blocks == engine.config.num_blocks
    assert scheduler.allocator.num_references == 0
    assert not any(scheduler.allocator.ref_count(block) for block in range(engine.config.num_blocks + 1))
    assert scheduler.swap.host.num_used_blocks == 0
    assert engine.runner.host_pool.num_bytes == 0
    assert not scheduler.kv.held
    assert not scheduler.kv.pinned
    assert not engine._keeping
    assert not engine.inboxes
    assert not engine.outputs.groups
    assert not engine.outputs.names
    assert not engine.outputs._group_of
    assert engine.step() == []
