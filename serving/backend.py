"""Between HTTP and the engine: requests checked and tokenized on HTTP's threads, queued, and their answers set up."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from pagedjax.llm import LLM
from pagedjax.models.tokenizer import apply_chat_template
from pagedjax.requests import checked_token_ids
from pagedjax.sampling.params import SamplingParams
from pagedjax.serving.answer import Answer, AnswerFormat, new_id
from pagedjax.serving.choices import EchoedPrompt
from pagedjax.serving.engine_loop import EngineLoop, NewRequest
from pagedjax.serving.errors import ApiError, not_found
from pagedjax.serving.job import Job
from pagedjax.serving.metrics import ServerMetrics
from pagedjax.serving.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ForkRequest,
    Message,
    SamplingRequest,
    TokenizeRequest,
)

DEFAULT_COMPLETION_TOKENS = 16
"""As OpenAI's completions. A chat without a limit may use all of the context."""


class Backend:
    """One model behind the API."""

    def __init__(
        self,
        llm: LLM,
        model_name: str,
        *,
        max_queue: int = 2048,
        stuck_after_s: float = 120.0,
        chat_template: str | None = None,
    ) -> None:
        """Of `EngineLoop`, and a chat template (Jinja) in place of the tokenizer's."""
        self.model_name = model_name
        self.created = int(time.time())
        self.config = llm.engine.config
        self.vocab_size = llm.engine.runner.model.config.vocab_size
        self.metrics = ServerMetrics(model_name)
        self.loop = EngineLoop(llm.engine, self.metrics, max_queue=max_queue, stuck_after_s=stuck_after_s)
        self.metrics.follow(lambda: self.loop.stats)
        self.tokenizer = copy.deepcopy(llm.tokenizer)  # the engine's thread has the other one
        self._tokenizer_lock = threading.Lock()  # fast tokenizers refuse a second thread now and then
        self._chat_template = chat_template
        self._chat_answers: set[str] = set()

    def complete(self, request: CompletionRequest) -> tuple[Answer, Job]:
        """Queues what POST /v1/completions asks for."""
        self.check_model(request.model)
        if request.best_of not in (None, request.n or 1):
            raise ValueError(f"best_of must be n, which is {request.n or 1}, or left out, got {request.best_of}")
        _check_stream_options(request)
        prompts = self._prompts_of(request.prompt)
        max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        params = request.sampling_params(
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        for _, token_ids in prompts:
            self._check_fits(len(token_ids), max_tokens, "max_tokens", "prompt")
        echoed = None
        if request.echo:
            echoed = [EchoedPrompt(self._text_of(*prompt, params.skip_special_tokens), prompt[1]) for prompt in prompts]
        wanted = self._format(request, params, is_chat=False, num_logprobs=request.logprobs)
        return self._submit([ids for _, ids in prompts], params, replace(wanted, echoed=echoed), request.priority)

    def chat(self, request: ChatCompletionRequest) -> tuple[Answer, Job]:
        """Queues what POST /v1/chat/completions asks for."""
        self.check_model(request.model)
        _check_stream_options(request)
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"max_tokens is {request.max_tokens}, but max_completion_tokens, its other name, is "
                f"{request.max_completion_tokens}: give one"
            )
        max_tokens = next(iter(limits), None)
        if request.top_logprobs is not None and not request.logprobs:
            raise ValueError(f"top_logprobs needs logprobs=true, got {request.logprobs}")
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = request.sampling_params(max_tokens=max_tokens, logprobs=num_logprobs)
        token_ids = self._chat_ids(request.messages, request.chat_template_kwargs or {})
        if not token_ids:
            raise ValueError("messages: the chat template makes no tokens of them")
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self._check_fits(len(token_ids), max_tokens, name, "messages")
        wanted = self._format(request, params, is_chat=True, num_logprobs=num_logprobs)
        return self._submit([token_ids], params, wanted, request.priority)

    def fork(self, request_id: str, request: ForkRequest) -> tuple[Answer, Job]:
        """Forks an unfinished request; the answer streams and begins with all text so far."""
        is_chat = request_id.startswith("chatcmpl")
        answer_id = new_id(is_chat)
        changes = request.model_dump(exclude_none=True)

        def changed(params: SamplingParams) -> SamplingParams | None:
            return replace(params, **changes) if changes else None

        try:
            job = self.loop.fork(request_id, answer_id, changed)
        except KeyError as error:
            raise not_found(f"no unfinished request has the id {request_id!r}") from error
        wanted = AnswerFormat(model=self.model_name, is_chat=is_chat)
        return Answer(answer_id, job.request_ids, wanted, self.tokenizer), job

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a text or of a conversation."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ValueError("prompt or messages: give one of them")
        if request.messages is not None:
            return self._chat_ids(request.messages, {})
        assert request.prompt is not None
        return self._encode(request.prompt, request.add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        if not token_ids:
            return ""
        checked = checked_token_ids(list(token_ids), self.vocab_size, "tokens")
        return self._with_tokenizer(lambda tokenizer: tokenizer.decode(checked, clean_up_tokenization_spaces=False))

    def check_model(self, name: str | None) -> None:
        """Raises the API's 404 for another model than the one that is served."""
        if name not in (None, self.model_name):
            raise not_found(f"model {name!r:.200} is not here: this server has {self.model_name!r}", "model")

    def _submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, wanted: AnswerFormat, priority: int | None
    ) -> tuple[Answer, Job]:
        answer_id = new_id(wanted.is_chat)
        ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{i}" for i in range(len(prompts))]
        requests = [
            NewRequest(request_id, token_ids, params, priority or 0)
            for request_id, token_ids in zip(ids, prompts, strict=True)
        ]
        job = self.loop.submit(requests)
        return Answer(answer_id, ids, wanted, self.tokenizer), job

    def _format(
        self, request: SamplingRequest, params: SamplingParams, *, is_chat: bool, num_logprobs: int | None
    ) -> AnswerFormat:
        if num_logprobs is not None and self.tokenizer is None:
            raise ValueError("logprobs are given by text, and this model has no tokenizer")
        return AnswerFormat(
            model=self.model_name,
            is_chat=is_chat,
            n=params.n,
            num_logprobs=num_logprobs,
            return_token_ids=bool(request.return_token_ids),
            include_usage=request.include_usage,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _check_fits(self, num_prompt: int, max_tokens: int | None, name: str, prompt_name: str) -> None:
        """One rule for what is too long: refused, with the numbers. What the pool cannot hold counts as the context."""
        context = self.config.max_seq_len
        most = self.config.max_prompt_len(generates=max_tokens != 0)
        if num_prompt > most:
            text = f"{prompt_name}: {num_prompt} tokens are more than the {most} that this server can take"
            raise ApiError(400, text, prompt_name, "context_length_exceeded")
        if max_tokens is not None and num_prompt + max_tokens > context:
            text = f"{name}: {max_tokens} tokens after a prompt of {num_prompt} are more than the context of {context}"
            raise ApiError(400, text, name, "context_length_exceeded")

    def _prompts_of(self, prompt: Any) -> list[tuple[str | None, list[int]]]:
        """Text, where there is one, and checked ids of each prompt."""
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        found = []
        for each in [prompt] if is_one else prompt:
            is_text = isinstance(each, str)
            token_ids = self._encode(each) if is_text else each
            found.append((each if is_text else None, checked_token_ids(token_ids, self.vocab_size)))
        return found

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._with_tokenizer(
            lambda tokenizer: tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], "prompt"
        )

    def _chat_ids(self, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> list[int]:
        for name in sorted(template_kwargs.keys() & _not_for_templates(self.tokenizer)):
            raise ValueError(f"chat_template_kwargs must not have {name}")
        conversation = [message.as_dict() for message in messages]
        template = self._chat_template
        try:
            return self._with_tokenizer(
                lambda tokenizer: apply_chat_template(
                    tokenizer, conversation, chat_template=template, **template_kwargs
                ),
                "messages",
            )
        except ValueError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from error

    def _text_of(self, text: str | None, token_ids: list[int], skip_special_tokens: bool) -> str:
        if text is not None:
            return text
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self._with_tokenizer(lambda tokenizer: tokenizer.decode(token_ids, **options))

    def _with_tokenizer(self, function: Callable[[Any], Any], name: str = "tokens") -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{name} as text need a tokenizer, and this model has none: send token ids to completions")
        with self._tokenizer_lock:
            return function(self.tokenizer)


def _check_stream_options(request: SamplingRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ValueError("stream_options needs stream=true")


def _not_for_templates(tokenizer: Any) -> set[str]:
    """Names of options of the functions on the way to a chat template, which would be taken for those."""
    options = signature(tokenizer.apply_chat_template).parameters if tokenizer is not None else ()
    return {"self", "tokenizer", "messages", *options} - {"documents"}
