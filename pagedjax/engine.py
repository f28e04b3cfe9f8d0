"""The engine: requests go in, steps run, outputs come out. One step reads schedule, launch, resolve."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from numbers import Integral
from typing import Any

import jax
import numpy as np

from pagedjax.blocks.memory_map import MemoryMap, build_memory_map
from pagedjax.config import EngineConfig
from pagedjax.launch import LaunchedStep, launch
from pagedjax.model_runner import ModelRunner
from pagedjax.outputs import CompletionOutput, EngineStats, RequestOutput
from pagedjax.requests import Params, Prompt, RequestFactory, child_id
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import FinishReason, HeldKV, Request
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.scheduling.sequences import Sequence as HeldSequence
from pagedjax.text.output_processor import OutputProcessor

IN_FLIGHT = ("recompute", "finish", "abort")
"""What `update_params` may do with unfinished requests."""


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
        if config.preemption == "auto":
            config = replace(config, preemption=runner.faster_preemption() if config.num_swap_blocks else "recompute")
        self.runner = runner
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config)
        self.outputs = OutputProcessor(tokenizer)
        self.requests = RequestFactory(tokenizer, runner.model.config.vocab_size, eos_token_ids, seed)
        self._request_numbers = count()
        self._deferred: dict[str, RequestOutput] = {}
        self._keeping: dict[str, list[Request]] = {}
        self._is_interrupted = self._is_stepping = False
        self._in_flight: LaunchedStep | None = None
        self._unprocessed: deque[LaunchedStep] = deque()
        self.clock: Callable[[], float] = time.monotonic
        """Seconds, for priorities that age."""
        self.on_schedule: Callable[[SchedulerOutput], None] | None = None
        """Called with what each step will compute, before it does: for those who watch."""
        self.inboxes: dict[str, deque[RequestOutput]] = {}
        """Where the outputs of a request go, up to its last one, instead of being returned by `step`."""
        self._num_steps = self._num_finished = self._num_prompt_tokens = self._num_output_tokens = 0

    def add_request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keeps_kv: bool = False,
    ) -> str:
        """Queues a prompt; returns the request's id, a fresh one if none is given.

        With `scheduling_policy="priority"` a request of a lower `priority` goes before one of a higher, unless that has
        waited `priority_aging_s` longer for each level between them. With `keeps_kv`, the KV of its completions stays
        in the pool when they have ended, for `take_kept`.

        Raises ValueError, and queues nothing, for a prompt that is empty, not in the vocabulary or too long for
        `max_model_len` or the pool, for an id that an unfinished request has, and for a priority where there are none.
        """
        params = SamplingParams() if params is None else params
        request_id = self._new_id(request_id, params.n if isinstance(params, SamplingParams) else 1)
        text, token_ids = self.requests.tokenize(prompt)
        if isinstance(prompt, HeldSequence) and prompt.store is not self.scheduler.kv:
            raise ValueError("prompt is a sequence of another engine: pass its token_ids")
        group = self._new_group(request_id, token_ids, params, priority)
        for request in group.requests:
            request.source = prompt.kv if isinstance(prompt, HeldSequence) else None
            request.keeps_kv = keeps_kv
        if keeps_kv and group.search is not None:
            raise ValueError("params must be SamplingParams where KV is kept, got BeamSearchParams")
        self.outputs.add(request_id, text, group)  # may raise: it asks the tokenizer
        requests = list(group.requests)  # `add` may split the group
        try:
            self.scheduler.add(group)
        except BaseException:
            self.outputs.discard(request_id)
            raise
        if keeps_kv:
            self._keeping[request_id] = requests
        self._num_prompt_tokens += len(token_ids)
        return request_id

    def take_kept(self, request_id: str) -> list[HeldKV]:
        """The tokens of a request's completions and their KV; each can be taken once.

        Raises ValueError before the request has ended.
        """
        if request_id in self.outputs.groups:
            raise ValueError(f"request_id: request {request_id!r} has not ended yet")
        return [request.kept or HeldKV(request.token_ids.copy()) for request in self._keeping.pop(request_id, ())]

    def discard_kept(self, request_id: str) -> None:
        """Frees what `take_kept` would give, now or later."""
        for request in self._keeping.pop(request_id, ()):
            request.keeps_kv = False
            if request.kept is not None:
                self.scheduler.kv.drop(request.kept)

    def handle(
        self, kv: HeldKV, output: CompletionOutput | None = None, guard: AbstractContextManager[Any] | None = None
    ) -> HeldSequence:
        """A handle on what `take_kept` or `pin` gave."""
        return HeldSequence(self.scheduler.kv, kv, self.requests.checked_ids, guard=guard, output=output)

    def memory_map(self) -> MemoryMap:
        """What each block of the pool holds, and for whom."""
        self._settle()
        return build_memory_map(self.scheduler)

    def fork(self, request_id: str, params: SamplingParams | None = None, new_id: str | None = None) -> str:
        """Lets an unfinished request go on in two ways: the new one starts with all that it has generated, and shares
        its KV blocks, until one of the two writes to them (copy-on-write). Returns the new request's id.

        The new one stands right behind the old one in line. With `params`, whose `max_tokens` counts what has been
        generated already, it goes on by those; otherwise by the same ones, with a random stream of its own, which
        depends on the seed of the old one and on how often that was forked.
        Raises ValueError for an id that no unfinished request has, and for one with several completions or beams.
        """
        self._settle()
        parent = self._single(request_id)
        params = parent.params if params is None else params
        if not isinstance(params, SamplingParams) or params.n != 1:
            raise ValueError(f"params must be SamplingParams with n=1, got {params!r:.80}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and getattr(parent.params, name) is None:
                raise ValueError(f"{name}: request {request_id!r} has none of the tokens before the fork")
        new_id = self._new_id(new_id)
        (child,) = self._new_group(new_id, parent.prompt_token_ids, params).requests
        if child.max_num_tokens <= parent.num_tokens:
            raise ValueError(
                f"max_tokens must be more than the {parent.num_output_tokens} tokens generated already, "
                f"got {params.max_tokens}"
            )
        parent.num_forks += 1
        if params is parent.params or params.seed is None:
            child.seed = random.Random(f"{parent.seed} {parent.num_forks}").getrandbits(64)
        child.arrival = (*parent.arrival, parent.num_forks)
        child.token_ids = parent.token_ids.copy()
        child.num_known_prompt_logprobs = parent.num_known_prompt_logprobs
        child.num_cached_tokens = len(parent.prompt_token_ids)
        with self._recovering():
            self.scheduler.fork(parent, child)
        try:
            self.outputs.add_fork(new_id, parent, child)  # may raise: it asks the tokenizer
        except BaseException:
            self.outputs.discard(new_id)
            self.scheduler.finish(child, FinishReason.ABORT)
            raise
        return new_id

    def append(self, request_id: str, token_ids: Sequence[int] | np.ndarray | jax.Array) -> None:
        """Adds tokens to the output of an unfinished request as if they had been sampled, whatever they are; the next
        steps compute them and go on from there.

        Raises ValueError for an id that no unfinished request has, for one with several completions, beams or
        log-probabilities of outputs, and for tokens that are too many or not in the vocabulary.
        """
        self._settle()
        request, token_ids = self._single(request_id), self.requests.checked_ids(token_ids)
        if request.params.logprobs is not None:
            raise ValueError(f"request {request_id!r} wants logprobs, which appended tokens have none of")
        if request.num_tokens + len(token_ids) >= request.max_num_tokens:
            raise ValueError(
                f"token_ids: {len(token_ids)} more tokens leave none to generate: request {request_id!r} has "
                f"{request.num_tokens} of at most {request.max_num_tokens}, its prompt included"
            )
        request.token_ids.extend(token_ids)

    def free(self, request_id: str) -> None:
        """`abort`, for those who fork: its blocks stay with whoever shares them. ValueError if it is not unfinished."""
        if self.abort(request_id) is None:
            raise ValueError(f"request_id: no unfinished request has the id {request_id!r}")

    def pin(self, token_ids: list[int]) -> HeldKV:
        """Computes the KV of checked tokens in the next steps and keeps it until it is unpinned: prompts that begin
        with them find it. ValueError if an unfinished request may need the room."""
        if len(token_ids) > self.config.max_model_len:
            raise ValueError(
                f"a prefix of {len(token_ids)} tokens is longer than max_model_len={self.config.max_model_len}"
            )
        held = HeldKV(token_ids)
        try:
            self.scheduler.pin(held)
            self._compute_pinned(held)
        except BaseException:
            self.scheduler.kv.unpin(held)
            raise
        return held

    def update_params(self, params: Any, in_flight: str = "recompute") -> None:
        """Goes on with other weights of the same shapes and dtypes, without compiling. What the old ones have computed
        is forgotten. Unfinished requests keep their tokens and go on with the new weights, their KV computed again
        ("recompute"), or are finished with the old ones before ("finish"), or end as they are ("abort").

        Raises ValueError, and changes nothing, if `params` differ from the old ones in more than their values.
        """
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {in_flight!r}")
        params = self.runner.checked_params(params)
        if in_flight == "finish":
            self._finish_all()
        elif in_flight == "abort":
            self._settle()
            with self._recovering():
                ended = [self.outputs.abort(request_id, self.scheduler) for request_id in list(self.outputs.groups)]
                self._hand_out(output for output in ended if output is not None)
        self.runner.params = params
        self._recompute_all()

    def _finish_all(self) -> None:
        while self.scheduler.has_unfinished or self._in_flight is not None:
            for output in self.step():
                if output.finished:
                    self.defer(output)  # for whoever calls `step`

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state; its last output, or None if no unfinished request has this id."""
        with self._recovering():
            output = self.outputs.abort(request_id, self.scheduler)
        if output is not None:
            self._hand_out([output])
            self._deferred.pop(request_id, None)  # nor one of before: this call returns the last
        if not self._is_stepping:  # else blocks may be on their way back
            self._forget_swapped()
        return output

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        has_leftovers = self._is_interrupted and any(group.finished for group in self.outputs.groups.values())
        return self.scheduler.has_unfinished or bool(self._deferred or self._unprocessed) or has_leftovers

    def defer(self, output: RequestOutput) -> None:
        """Gives a finished request's output back, for the next `step` to return: it is for another caller."""
        self._deferred[output.request_id] = output

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns the requests that got a token, with all of their output so far.

        With `async_scheduling` it launches one and returns what came of the one before, which the device has computed
        meanwhile. If the step raises, every running request goes back to the queue and is computed again.
        """
        self._catch_up()
        with self._recovering():
            self._forget_swapped()
            scheduled = self.scheduler.schedule()
            if self.on_schedule is not None:
                self.on_schedule(scheduled)
            if scheduled.swap_out:  # which a step that computes nothing may have, too
                self.runner.swap_out(scheduled.swap_out)
            if not scheduled or not scheduled.is_plain:  # the host needs to know the tokens first
                self._resolve()
            if scheduled:
                launched = launch(self.runner, scheduled, self.config, self.requests.vocab_size)
                self._resolve()
                self.scheduler.advance(scheduled)
                self._in_flight = launched
                if not self.config.async_scheduling or not scheduled.is_plain:
                    self._resolve()
        self._process()
        outputs = list(self._deferred.values())
        self._deferred.clear()
        return outputs

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of the pool and the queues now."""
        allocator, cache = self.scheduler.allocator, self.scheduler.kv.prefix_cache
        return EngineStats(
            num_running=len(self.scheduler.requests(self.scheduler.running)),
            num_waiting=len(self.scheduler.requests(self.scheduler.waiting)),
            num_blocks=allocator.num_blocks,
            num_free_blocks=allocator.num_free_blocks,
            peak_blocks_used=allocator.peak_blocks_used,
            num_block_references=allocator.num_references,
            num_cached_blocks=allocator.num_named_blocks,
            num_block_copies=self.scheduler.num_block_copies,
            prefix_cache_query_tokens=cache.num_query_tokens if cache else 0,
            prefix_cache_hit_tokens=cache.num_hit_tokens if cache else 0,
            num_preemptions=self.scheduler.num_preemptions,
            num_swap_blocks=self.config.num_swap_blocks,
            num_free_swap_blocks=self.scheduler.swap.host.num_free_blocks,
            num_swapped_out_blocks=self.scheduler.swap.num_swapped_out,
            num_swapped_in_blocks=self.scheduler.swap.num_swapped_in,
            num_steps=self._num_steps,
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_programs=self.runner.num_programs,
        )

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Puts each output into its request's inbox, or else where the end of `step` finds it."""
        for output in outputs:
            request_id = output.request_id
            inbox = self.inboxes.get(request_id)
            if inbox is None:
                self._deferred[request_id] = output
            else:
                inbox.append(output)
            if output.finished:
                self.inboxes.pop(request_id, None)
                self.outputs.discard(request_id)
                self._num_finished += 1

    def _resolve(self) -> None:
        """Waits for the step in flight, if there is one, and lets the scheduler know what came of it."""
        if self._in_flight is None:
            return
        step = self._in_flight
        tokens = self.runner.fetch(step.tokens)[..., : len(step.scheduled.sampling)].T.tolist()
        self._in_flight = None
        self._unprocessed.append(step)
        step.updated = self.scheduler.resolve(step.scheduled, tokens, step.candidates, step.failed)

    def _process(self) -> None:
        """Makes and hands out the outputs of those that got a token or ended in the steps that were resolved."""
        with self._recovering():
            while self._unprocessed:
                step = self._unprocessed[0]
                scheduled, logprobs, step.logprobs = step.scheduled, step.logprobs, None
                searches = [group for group in scheduled.beams if group.search is not None and group.search.is_done]
                touched = [*step.updated, *scheduled.scored, *step.failed]
                self._hand_out(self.outputs.process(touched, self.scheduler, logprobs, searches))
                self._num_steps += 1
                self._num_output_tokens += len(step.updated) + sum(len(group.requests) for group in scheduled.beams)
                self._unprocessed.popleft()

    def _catch_up(self) -> None:
        """After an exception: the outputs that it kept from being made."""
        if self._is_interrupted:
            self._process()
            with self._recovering():
                self._hand_out(self.outputs.leftovers(self.scheduler))
            self._is_interrupted = False

    def _settle(self) -> None:
        """Waits for the step in flight: all tokens are known. The next `step` returns the outputs."""
        self._catch_up()
        with self._recovering():
            self._resolve()
        self._process()

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """After an exception all KV is computed again. The step's, and with a donated pool all KV, is gone; the tokens
        are not, but for those in flight, which will be the same."""
        was_stepping, self._is_stepping = self._is_stepping, True
        try:
            yield
        except BaseException:
            self._is_interrupted = True
            self.runner.restore_kv_cache()
            self._recompute_all()
            raise
        finally:
            self._is_stepping = was_stepping

    def _forget_swapped(self) -> None:
        """Frees the host's memory of those who ended, or are recomputed after all, while they were swapped out."""
        host = self.scheduler.swap.host
        self.runner.host_pool.retain(host.num_used_blocks, host.ref_count)

    def _recompute_all(self) -> None:
        """For all KV is lost, or of no use any more. Queues and blocks may be in any state: they are made anew."""
        self._in_flight = None
        requests = [request for each in self.outputs.groups.values() for request in each.requests]
        self.scheduler.restart(request for request in requests if not request.is_finished)
        for held in self.scheduler.kv.pinned:
            self._compute_pinned(held)

    def _compute_pinned(self, held: HeldKV) -> None:
        if held.computed_by is not None and not held.computed_by.is_finished:
            return  # it starts again by itself
        request_id = self._new_id(None)
        group = self._new_group(request_id, held.token_ids, SamplingParams(max_tokens=0, detokenize=False))
        (request,) = group.requests
        held.computed_by = request
        request.max_num_tokens = len(held.token_ids)
        request.keeps_kv, request.kept = True, held
        self.outputs.add(request_id, None, group)
        self.inboxes[request_id] = deque(maxlen=0)  # nobody's
        self.scheduler.add(group)

    def _new_group(self, request_id: str, token_ids: list[int], params: Params, priority: int = 0) -> SequenceGroup:
        max_seq_len = self.config.max_seq_len_in(self.scheduler.kv.num_usable_blocks)
        return self.requests.new_group(request_id, token_ids, params, max_seq_len, self._rank(priority))

    def _rank(self, priority: int) -> float:
        """Each level of priority counts as if the request had come so much later."""
        if isinstance(priority, bool) or not isinstance(priority, Integral) or abs(priority) >= 2**31:
            raise ValueError(f"priority must be an int of 32 bits, got {priority!r:.80}")
        if self.config.scheduling_policy == "priority":
            return self.clock() + int(priority) * self.config.priority_aging_s
        if priority:
            raise ValueError(f'priority={priority} needs scheduling_policy="priority", this engine has "fcfs"')
        return 0.0

    def _new_id(self, request_id: str | None, n: int = 1) -> str:
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a str, got {request_id!r:.80}")
        if request_id is None:
            return next(name for i in self._request_numbers if self._taken(name := str(i), n) is None)
        if (taken := self._taken(request_id, n)) is not None:
            raise ValueError(f"request_id {taken!r} is in use by an unfinished request")
        return request_id

    def _taken(self, request_id: str, n: int) -> str | None:
        """The first of the ids of a request and its n completions that is another's."""
        names = (request_id, *(child_id(request_id, i, n) for i in range(n)))
        return next((name for name in names if name in self.outputs.names or name in self._deferred), None)

    def _single(self, request_id: str) -> Request:
        """The one sequence of an unfinished request."""
        group = self.outputs.groups.get(request_id)
        if group is None:
            raise ValueError(f"request_id: no unfinished request has the id {request_id!r}")
        if group.beams is not None or len(group.completions) != 1:
            raise ValueError(
                f"request_id: request {request_id!r} has several completions: fork or append to one with one"
            )
        return group.completions[0].request
