"""Offline use: a model by name or path, prompts in, completions out in the order of the prompts."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm.auto import tqdm

from pagedjax.beams.params import BeamSearchParams
from pagedjax.blocks.memory_map import MemoryMap
from pagedjax.compilation_cache import use_compilation_cache
from pagedjax.engine import LLMEngine
from pagedjax.model_runner import ModelRunner
from pagedjax.models.decoder import CausalLM, Params
from pagedjax.models.load import load_tensors
from pagedjax.models.quantization import float_dtype, quantize_params
from pagedjax.models.tokenizer import apply_chat_template
from pagedjax.models.weights import check_params
from pagedjax.outputs import CompletionOutput, EngineStats, RequestOutput, ScoreOutput
from pagedjax.planning.build import plan_memory
from pagedjax.planning.plan import MemoryPlan
from pagedjax.requests import Params as RequestParams
from pagedjax.requests import Prompt
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.request import HeldKV
from pagedjax.scheduling.sequences import Sequence as HeldSequence
from pagedjax.scoring import score_of, split_for_score
from pagedjax.streaming import AsyncStream, Inbox, SharedEngine, Stream

Message = Mapping[str, Any]


def generate(
    model: str | Path,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: RequestParams | Sequence[RequestParams] | None = None,
    *,
    use_tqdm: bool = True,
    **options: Any,
) -> list[RequestOutput]:
    """Completions of `prompts`, in their order: `LLM(model, **options).generate(...)` for a script that asks once.

    It compiles only what these prompts need. Keep an `LLM` to ask again.
    """
    llm = LLM(model, progress=use_tqdm, warm_up=False, **options)
    return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)


class LLM:
    """A model with its KV pool and its engine, for offline use."""

    def __init__(
        self,
        model: str | Path | CausalLM,
        *,
        params: Params | None = None,
        tokenizer: Any | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        quantize_embeddings: bool = False,
        block_size: int | None = None,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        allow_longer_context: bool = False,
        seed: int = 0,
        attention_implementation: str | None = None,
        logprobs_mode: str = "raw_logprobs",
        enable_prefix_caching: bool = True,
        preemption: str = "recompute",
        num_swap_blocks: int | None = None,
        scheduling_policy: str = "fcfs",
        priority_aging_s: float = 10.0,
        num_decode_steps: int = 1,
        async_scheduling: bool = False,
        batch_invariant: bool = False,
        check_integrity: bool = False,
        warm_up: bool | Literal["all"] = True,
        progress: bool = False,
    ) -> None:
        """Loads the model, makes the pool and compiles every program.

        Args:
          model: what `load` takes, or a Flax module together with its `params` (shared, never copied) and `tokenizer`.
          dtype: of params and pool; "auto" is float32 on a CPU and bfloat16 on a GPU.
            Params that are passed in keep theirs.
          quantization: "int8" for kernels and activations; of params that are passed in, kernels are copied for that.
            With `quantize_embeddings` the embedding table and the head too.
          block_size: tokens per KV block; None takes 64 on a CPU, where it reads faster from memory, and 16 elsewhere.
          num_blocks: size of the pool; None takes at most 1 GiB on a CPU and what `gpu_memory_utilization` allows on a
            GPU. ValueError if it does not fit beside weights and programs (see `plan`), before anything is allocated.
          gpu_memory_utilization: share, for weights, pool and programs, of the memory that JAX may take of the GPU,
            which is 75% unless XLA_PYTHON_CLIENT_MEM_FRACTION was set before JAX started.
          max_num_seqs: most requests in a step. max_num_batched_tokens: most tokens in a step; None picks by platform.
          max_model_len: most tokens of a request; None takes the model's own limit, and `allow_longer_context` one
            beyond it. Rope that depends on the length ("dynamic", "longrope") has this one, for every request.
          seed: where the seeds of requests without one are drawn from.
          attention_implementation: one of `paged_attention`, as "xla" or "pallas_triton"; None picks what is best here.
          logprobs_mode: "raw_logprobs" gives the log-softmax of the model's logits, "processed_logprobs" that of what
            is drawn from, after everything that `SamplingParams` does to them.
          enable_prefix_caching: find the KV of a prompt's first full blocks in what earlier requests have computed.
          preemption: what becomes of the KV of requests that have to make room: "recompute" forgets it, "swap" moves it
            to the host and back, "auto" takes what measures faster at the start.
          num_swap_blocks: size of the host pool; None takes as many as the pool has, and none without swapping. Only
            what is swapped out takes memory.
          scheduling_policy: "fcfs" serves first come, first served; "priority" those with the lowest `priority`, where
            `priority_aging_s` seconds of waiting make up for a level, so that nobody waits for ever.
          num_decode_steps: most tokens that each request gets from one step while all are decoding. They come together,
            and new requests wait for the end of the step.
          async_scheduling: prepare a step on the host while the device computes the one before.
          batch_invariant: no bit of a request's result depends on what else runs, on chunks, cached blocks or
            preemption, and `functional.score` gives the same log-probabilities. On a CPU alone; it costs what padding
            each step to 64 tokens does.
          check_integrity: recount all blocks and check all tables before each step, for debugging.
          warm_up: compile all programs now. Without it each compiles when it is first needed. What goes beyond plain
            sampling (penalties, masks, log-probabilities) does so anyway, unless it is "all".
          progress: show bars for loading and compiling on stderr.
        """
        if not (isinstance(warm_up, bool) or warm_up == "all"):
            raise ValueError(f'warm_up must be True, False or "all", got {warm_up!r}')
        if isinstance(model, CausalLM):
            if params is None:
                raise ValueError("params: a model that is passed as a module needs its params as well")
            check_params(model.config, params)
        elif params is not None or tokenizer is not None:
            raise ValueError("params and tokenizer go with a module: a model by name or path brings its own")
        use_compilation_cache()
        self.memory_plan, header = plan_memory(
            model,
            params,
            dtype=dtype,
            quantization=quantization,
            quantize_embeddings=quantize_embeddings,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            with_tensors=True,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            allow_longer_context=allow_longer_context,
            logprobs_mode=logprobs_mode,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            num_swap_blocks=num_swap_blocks,
            scheduling_policy=scheduling_policy,
            priority_aging_s=priority_aging_s,
            num_decode_steps=num_decode_steps,
            async_scheduling=async_scheduling,
            batch_invariant=batch_invariant,
            check_integrity=check_integrity,
        )
        self.memory_plan.check()
        kind = self.memory_plan.quantization
        if header is not None:
            config, params, tokenizer = load_tensors(header, self.memory_plan.dtype, progress, quantization=kind)
            model = CausalLM(config)
        elif params is not None and kind is not None:
            params = quantize_params(params, kind)
        assert isinstance(model, CausalLM)
        assert params is not None
        self.tokenizer = tokenizer
        engine_config = self.memory_plan.config
        runner = ModelRunner(
            model.clone(config=model.config.served_up_to(engine_config.max_model_len)),
            params,
            engine_config,
            kv_dtype=float_dtype(params),
            attention_implementation=attention_implementation,
        )
        eos_token_ids = model.config.eos_token_ids
        self.engine = LLMEngine(runner, engine_config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, seed=seed)
        self._shared = SharedEngine(self.engine)
        if warm_up:
            runner.warm_up(extras=warm_up == "all", progress=progress)

    @classmethod
    def plan(
        cls,
        model: str | Path | CausalLM,
        *,
        num_requests: int | None = None,
        context: int | None = None,
        memory_bytes: int | None = None,
        platform: str | None = None,
        compile: bool = True,
        **options: Any,
    ) -> MemoryPlan:
        """What `LLM(model, **options)` would take of the memory, and how many requests fit: print it for a table.
        Nothing is loaded; of a hub id only its config is downloaded. `memory_plan` is the plan of an engine.

        Args:
          num_requests, context: whether so many requests of so many tokens, prompt and output together, fit at once.
          memory_bytes: plan for a card with so much memory instead, or with platform="cpu" for such a machine.
          platform: "cpu" or "gpu"; None is this machine's, with `memory_bytes` a GPU.
          compile: ask XLA what the largest programs take (seconds on a CPU, minutes for a large model on a GPU), if
            they are for this machine. Without it bounds in closed form stand alone.
        """
        use_compilation_cache()
        given = inspect.signature(cls).bind(model, **options)
        given.apply_defaults()
        own = ("tokenizer", "warm_up", "progress")  # what takes no memory
        arguments = {name: value for name, value in given.arguments.items() if name not in own}
        asked = {"num_requests": num_requests, "context": context, "memory_bytes": memory_bytes, "platform": platform}
        return plan_memory(**arguments, **asked, compile=compile)[0]

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: RequestParams | Sequence[RequestParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Completions of one prompt or of a list, in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. One SamplingParams serves
        all prompts, a list has one for each; so it is with `priority` (see `LLMEngine.add_request`). Raises ValueError
        before anything runs if any prompt is bad; after an exception or an interrupt no request of this call is left in
        the engine.
        """
        prompt_list = _as_list(prompts)
        params = _params_per_prompt(sampling_params, len(prompt_list))
        priorities = priority if isinstance(priority, Sequence) else [priority] * len(prompt_list)
        if len(priorities) != len(prompt_list):
            raise ValueError(
                f"priority must be one for all or one per prompt: {len(priorities)} for {len(prompt_list)}"
            )
        return self._generate(prompt_list, params, use_tqdm, priorities=priorities)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> Stream:
        """A request's output after each step in which it got a token: all of it so far, so the last is the result.

        The request is queued now, and a bad one raises ValueError now. Several streams may be read in turn, also
        between calls of `generate` and of `engine.step`. To close one, or to drop it, aborts its request.
        """
        return Stream(self._shared, prompt, sampling_params, priority=priority)

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncStream:
        """As `stream`, for asyncio: steps run in a worker thread, one at a time and for all tasks together.

        A bad request raises ValueError at the first output, as the tokenizer is the worker's as well. While one of
        these is read, leave `engine` itself alone: it is not thread-safe.
        """
        return AsyncStream(self._shared, prompt, sampling_params, priority=priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation, a list of {"role": ..., "content": ...}, or to a list of conversations.

        `template_options` (tools, chat_template, ...) are those of `render_chat`, for all conversations.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self.render_chat(each, **template_options)} for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """A conversation as prompt token ids, by the tokenizer's chat template, ready for the assistant's turn.

        `tools` are functions that the model may call, as OpenAI's API describes them: {"type": "function", "function":
        {"name": ..., "description": ..., "parameters": JSON schema}}. `chat_template` (Jinja) takes the place of the
        tokenizer's; whatever else is given reaches the template under its name. Raises ValueError for messages or tools
        of another form, without a template, and when the template refuses them.
        """
        if self.tokenizer is None:
            raise ValueError("messages need a tokenizer with a chat template, and this model has no tokenizer")
        return apply_chat_template(
            self.tokenizer, messages, add_generation_prompt, chat_template, tools=tools, **template_kwargs
        )

    def score(
        self, prompts: Prompt | Iterable[Prompt], continuations: Prompt | Iterable[Prompt] | None = None
    ) -> list[ScoreOutput]:
        """Teacher-forced log-probabilities of each continuation after its prompt, or without continuations of each
        prompt's tokens from the second on. Nothing is sampled.

        Text and text are tokenized together, as a tokenizer may join what meets; then what the prompt's own tokens do
        not cover is the continuation (at least one token). Special tokens stand before prompts alone.
        """
        prompt_list = _as_list(prompts)
        continuation_list = [None] * len(prompt_list) if continuations is None else _as_list(continuations)
        if len(continuation_list) != len(prompt_list):
            raise ValueError(f"continuations: {len(continuation_list)} of them for {len(prompt_list)} prompts")
        pairs = zip(prompt_list, continuation_list, strict=True)
        split = [split_for_score(self.engine, i, *pair) for i, pair in enumerate(pairs)]
        each = [
            SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start, detokenize=False)
            for _, start in split
        ]
        outputs = self.generate([token_ids for token_ids, _ in split], each, use_tqdm=False)
        return [score_of(output, start) for output, (_, start) in zip(outputs, split, strict=True)]

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The most likely continuations of each prompt that a beam search finds, best first: `outputs` with their
        `score`. It equals transformers' (`num_beams`). `generate` takes BeamSearchParams too, mixed with others."""
        each = [params] if isinstance(params, SamplingParams | BeamSearchParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(one, BeamSearchParams) for one in each):
            raise ValueError(f"params must be BeamSearchParams or a list of them, got {params!r:.80}")
        return self.generate(prompts, params, use_tqdm)

    def sequence(self, prompt: Prompt) -> HeldSequence:
        """A handle on a prompt, or a fork of another handle: to be forked, appended to, freed, and passed as a prompt.

        Its KV is computed when somebody goes on from it; after `expand` it is kept. See `pagedjax.Sequence`.
        """
        if isinstance(prompt, HeldSequence):
            return prompt.fork()
        return self._handle(HeldKV(self.engine.requests.tokenize(prompt)[1]))

    def expand(
        self,
        sequences: HeldSequence | Sequence[HeldSequence],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[list[HeldSequence]]:
        """Generates n continuations of each sequence, and gives each as a new sequence that keeps its KV: a step of a
        tree search. `output` of a new one is what was generated; the old ones stay as they are."""
        roots = [sequences] if isinstance(sequences, HeldSequence) else sequences
        is_list = isinstance(roots, Sequence) and not isinstance(roots, str)
        if not is_list or not all(isinstance(root, HeldSequence) for root in roots):
            raise ValueError(f"sequences must be handles, as `sequence` gives them, got {sequences!r:.80}")
        params = _params_per_prompt(sampling_params, len(roots))
        kept: list[list[HeldKV]] = []
        outputs = self._generate(roots, params, use_tqdm, kept)
        return [
            [self._handle(kv, output) for kv, output in zip(each, result.outputs, strict=True)]
            for each, result in zip(kept, outputs, strict=True)
        ]

    def pin_prefix(self, prompt: Prompt) -> HeldSequence:
        """Computes the KV of a prompt now and keeps it in the pool: prompts that begin with it find its full blocks
        there (the provider-defined prefix of the paper, section 4.4). Free the handle to unpin it.

        Raises ValueError if it does not fit the pool beside what unfinished requests may need.
        """
        with self._shared:
            kv = self.engine.pin(self.engine.requests.tokenize(prompt)[1])
        try:
            while True:
                with self._shared:  # or another's step may be in the middle of recomputing it
                    if not kv.block_table.is_freed:
                        break
                    if kv.computed_by is not None and kv.computed_by.is_finished:
                        raise RuntimeError("the computation of the prefix was aborted")
                self._shared.step()
        except BaseException:
            self._handle(kv).free()
            raise
        return self._handle(kv)

    def reset_prefix_cache(self) -> None:
        """Forgets all KV that requests have left behind; pinned prefixes stay."""
        with self._shared:
            self.engine.scheduler.forget_prefixes()

    def update_params(self, params: Params, in_flight: str = "recompute") -> None:
        """Goes on with other weights of the same form: nothing is compiled, nothing copied that is on the device, the
        prefix cache is emptied and pinned prefixes are computed again. An engine in int8 takes float weights as well,
        and quantises them.

        Args:
            params: Weights with the shapes and dtypes of the old ones.
            in_flight: What becomes of requests that streams and other threads wait for. "recompute": they keep their
                tokens and go on with the new weights, their KV computed again. "finish": this call finishes them with
                the old weights first. "abort": they end, with the tokens that they have and finish_reason "abort".

        Raises:
            ValueError: For other values, and for `params` of another form; then nothing has changed.
        """
        with self._shared:
            self.engine.update_params(params, in_flight)

    def memory_map(self) -> MemoryMap:
        """What each block of the pool holds, and for whom. Print it for a picture."""
        with self._shared:
            return self.engine.memory_map()

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of the pool and the queues now."""
        return self.engine.stats()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Any],
        use_tqdm: bool,
        kept: list[list[HeldKV]] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs; with `kept`, which is filled, the KV of all completions stays."""
        inbox = Inbox()
        try:
            for i, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
                priority = 0 if priorities is None else priorities[i]
                try:
                    self._shared.add(inbox, prompt, prompt_params, keeps_kv=kept is not None, priority=priority)
                except ValueError as error:
                    raise ValueError(f"prompts[{i}]: {error}") from error
            outputs = self._run(inbox, use_tqdm)
            if kept is not None:
                kept += [self.engine.take_kept(request_id) for request_id in inbox.request_ids]
            return outputs
        finally:
            self._shared.close(inbox)

    def _handle(self, kv: HeldKV, output: CompletionOutput | None = None) -> HeldSequence:
        return self.engine.handle(kv, output, guard=self._shared)

    def _run(self, inbox: Inbox, use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(inbox.request_ids), desc="generating", unit="request", disable=not use_tqdm) as bar:
            while len(finished) < len(inbox.request_ids):
                self._shared.step()
                while inbox.outputs:
                    if (output := inbox.outputs.popleft()).finished:
                        finished[output.request_id] = output
                        bar.update()
        return [finished[request_id] for request_id in inbox.request_ids]


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list: a flat run of ints is one prompt."""
    if isinstance(prompts, (str, Mapping, HeldSequence)):
        return [prompts]
    if hasattr(prompts, "__array__"):
        prompts = np.asarray(prompts)  # a jax array, on the host
    if not isinstance(prompts, Iterable) or (isinstance(prompts, np.ndarray) and not prompts.ndim):
        raise ValueError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    if not isinstance(prompts, (Sequence, np.ndarray)):
        prompts = list(prompts)  # an iterator can be looked through only once
    is_ids = prompts.ndim == 1 if isinstance(prompts, np.ndarray) else all(isinstance(x, Integral) for x in prompts)
    return [prompts] if is_ids and len(prompts) else list(prompts)


def _params_per_prompt(params: RequestParams | Sequence[RequestParams] | None, num_prompts: int) -> list[RequestParams]:
    if params is None or isinstance(params, RequestParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params must be one for all or one per prompt: {len(params)} for {num_prompts}")
    return list(params)
