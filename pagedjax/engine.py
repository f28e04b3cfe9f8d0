"""The engine: requests go in, steps run, outputs come out. One step reads schedule, run, update."""

import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import jax
import numpy as np

from pagedjax.batch import build_batch
from pagedjax.config import EngineConfig
from pagedjax.model_runner import ModelRunner
from pagedjax.output_processor import OutputProcessor
from pagedjax.outputs import EngineStats, RequestOutput
from pagedjax.request import FinishReason, Request
from pagedjax.sampling.checks import check_vocabulary
from pagedjax.sampling.edits import tokenize_bad_words
from pagedjax.sampling.extras import build_extras
from pagedjax.sampling.log_entries import StepLogprobs
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.pipeline import check_processors
from pagedjax.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Mapping[str, Any]
"""Text, token ids, or a mapping with one of the keys "prompt" and "prompt_token_ids"."""


class LLMEngine:
    """Continuous batching over paged KV blocks (PagedAttention, arXiv 2309.06180). Not thread-safe: one owner."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        tokenizer: Any | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config)
        self.outputs = OutputProcessor(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = runner.model.config.vocab_size
        self._arrivals = count()
        self._request_numbers = count()
        self._seeds = random.Random(seed)
        self._deferred: dict[str, RequestOutput] = {}
        self.inboxes: dict[str, deque[RequestOutput]] = {}
        """Where the outputs of a request go, up to its last one, instead of being returned by `step`."""
        self._num_steps = self._num_finished = self._num_prompt_tokens = self._num_output_tokens = 0

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queues a prompt; returns the request's id, a fresh one if none is given.

        Raises ValueError, and queues nothing, for a prompt that is empty, not in the vocabulary or too long for
        `max_model_len` or the pool, and for an id that an unfinished request has.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a str, got {request_id!r:.80}")
        text, token_ids = self.tokenize(prompt)
        self._check_params(params)
        check_processors(params.logits_processors, token_ids, self._vocab_size)
        if request_id is None:
            request_id = next(name for n in self._request_numbers if not self._name_in_use(name := str(n), params.n))
        elif taken := self._name_in_use(request_id, params.n):
            raise ValueError(f"request_id {taken!r} is in use by an unfinished request")
        requests = self._new_requests(request_id, token_ids, params)
        try:
            for request in requests:
                self.scheduler.add(request)  # if the first one fits, so do the others
            self.outputs.add(request_id, text, requests)  # may raise: it asks the tokenizer
        except BaseException:
            self.outputs.discard(request_id, requests)
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        self._num_prompt_tokens += len(token_ids)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state; its last output, or None if no unfinished request has this id."""
        output = self.outputs.abort(request_id, self.scheduler)
        self._num_finished += output is not None
        if output is not None:
            self._deliver(output)
        return output

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return self.scheduler.has_unfinished or bool(self._deferred)

    def defer(self, output: RequestOutput) -> None:
        """Gives a finished request's output back, for the next `step` to return: it is for another caller."""
        self._deferred[output.request_id] = output

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns the requests that got a token, with all of their output so far.

        If the step raises, every running request goes back to the queue and is computed again by the next steps.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return self._pop_deferred()
        updated, ended, logprobs = self._run(scheduled)
        outputs = self.outputs.process([*updated, *ended], self.scheduler, logprobs)

        self._num_steps += 1
        self._num_output_tokens += len(updated)
        self._num_finished += sum(output.finished for output in outputs)
        return self._pop_deferred() + [output for output in outputs if not self._deliver(output)]

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of the pool and the queues now."""
        allocator = self.scheduler.allocator
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=allocator.num_blocks,
            num_free_blocks=allocator.num_free_blocks,
            peak_blocks_used=allocator.peak_blocks_used,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_programs=self.runner.num_programs,
        )

    def tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A `Prompt`'s text, if it has one, and its token ids. Raises ValueError that says what is wrong with it."""
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValueError(
                    f'prompt must have the key "prompt" or "prompt_token_ids" alone, got {sorted(map(str, keys))}'
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text, but this model has no tokenizer: pass token ids")
            try:
                token_ids = self.tokenizer(prompt)["input_ids"]
            except TypeError as error:  # what tokenizers raises for a lone surrogate
                raise ValueError(f"prompt cannot be tokenized: {error}") from error
            return prompt, _checked_token_ids(token_ids, self._vocab_size)
        return None, _checked_token_ids(prompt, self._vocab_size)

    def _deliver(self, output: RequestOutput) -> bool:
        """Puts an output into its request's inbox; False if it has none."""
        request_id = output.request_id
        inbox = self.inboxes.pop(request_id, None) if output.finished else self.inboxes.get(request_id)
        if inbox is not None:
            inbox.append(output)
        return inbox is not None

    def _pop_deferred(self) -> list[RequestOutput]:
        outputs = list(self._deferred.values())
        self._deferred.clear()
        return outputs

    def _run(self, scheduled: SchedulerOutput) -> tuple[list[Request], list[Request], StepLogprobs | None]:
        """The requests that got a token, those that ended without one, and log-probabilities if anyone wants them."""
        try:
            batch = build_batch(scheduled, self.config)
            extras = build_extras(scheduled, self.config.extras_buckets, self._vocab_size)
            failed: dict[Request, Exception] = {}
            if extras is None:
                sampled, logprobs = self.runner.run(batch), None
            else:
                result, failed = self.runner.run_with(batch, extras), extras.failed
                sampled = result.token_ids
                logprobs = StepLogprobs(scheduled.sampling, extras.prompt, result.logprobs, result.prompt_logprobs)
            for request, error in failed.items():
                logger.error("request %r ends with an error: %s", request.request_id, error, exc_info=error)
                self.scheduler.finish(request, FinishReason.ERROR)
            updated = self.scheduler.update(scheduled, sampled[: len(scheduled.sampling)])
            return updated, [*scheduled.scored, *failed], logprobs
        except BaseException:
            # The step's KV, and with a donated pool all KV, is gone; the tokens are not, they are on the host.
            self.scheduler.preempt_all()
            self.runner.restore_kv_cache()
            raise

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        if self.tokenizer is None and any(isinstance(word, str) for word in params.bad_words):
            raise ValueError("bad_words as text need a tokenizer, and this model has none: use lists of token ids")
        check_vocabulary(params, self._vocab_size)

    def _name_in_use(self, request_id: str, n: int) -> str | None:
        """The first of a request's id and of those of its n completions that an unfinished request has."""
        names = [request_id, *(_child_id(request_id, i, n) for i in range(n))]
        holders = (self.outputs.groups, self.scheduler, self._deferred)
        return next((name for name in names if any(name in holder for holder in holders)), None)

    def _new_requests(self, request_id: str, token_ids: list[int], params: SamplingParams) -> list[Request]:
        limit = self.config.max_seq_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + int(params.max_tokens))
        bad_word_ids = tokenize_bad_words(params.bad_words, self.tokenizer, self._vocab_size)
        seed = self._seeds.getrandbits(64) if params.seed is None else int(params.seed)
        return [
            Request(
                request_id=_child_id(request_id, i, params.n),
                prompt_token_ids=token_ids,
                params=params,
                arrival=next(self._arrivals),
                max_num_tokens=limit,
                seed=seed,
                sample_index=i,
                eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
                stop_token_ids=frozenset(params.stop_token_ids),
                ignored_eos_token_ids=self._eos_token_ids if params.ignore_eos else frozenset(),
                bad_word_ids=bad_word_ids,
            )
            for i in range(params.n)
        ]


def _child_id(request_id: str, index: int, n: int) -> str:
    return request_id if n == 1 else f"{request_id}[{index}]"


def _checked_token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Token ids as a list of ints; ValueError for anything else. On the device a bad id would read another row."""
    if hasattr(prompt, "__array__"):
        prompt = np.asarray(prompt)  # a jax array, on the host
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (Sequence, np.ndarray)):
        raise ValueError(f"prompt must be text, token ids or a mapping, got {type(prompt).__name__}")
    is_flat = not isinstance(prompt, np.ndarray) or prompt.ndim == 1
    if not is_flat or not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in prompt):
        raise ValueError(f"prompt token ids must be a flat list of ints, got {prompt!r:.80}")
    if not len(prompt):
        raise ValueError("prompt is empty: it needs at least one token")
    ids = np.asarray(prompt)
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"prompt token ids must be in [0, {vocab_size}), the vocabulary, got {bad}")
    return ids.tolist()
