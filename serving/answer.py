"""OpenAI's response objects, whole and in chunks, made of the engine's outputs."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.outputs import RequestOutput
from pagedjax.serving.choices import Choice, EchoedPrompt, Json, News, chat_logprobs, completion_logprobs
from pagedjax.serving.job import EngineError


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What an answer is to look like."""

    model: str
    is_chat: bool
    n: int = 1
    num_logprobs: int | None = None
    """How many most likely tokens to list for each; None for no log-probabilities."""
    echoed: Sequence[EchoedPrompt] | None = None
    """The prompts, where completions begin with theirs."""
    return_token_ids: bool = False
    include_usage: bool = False
    skip_special_tokens: bool = True


def new_id(is_chat: bool) -> str:
    """The id of an answer."""
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"


class Answer:
    """What one call gets: choice i * n + j is completion j of prompt i."""

    def __init__(self, answer_id: str, request_ids: Sequence[str], wanted: AnswerFormat, tokenizer: Any) -> None:
        self.id = answer_id
        self.created = int(time.time())
        self._format = wanted
        self._tokenizer = tokenizer
        self._position = {request_id: i for i, request_id in enumerate(request_ids)}
        self._outputs: dict[str, RequestOutput] = {}
        for_offsets = tokenizer if wanted.num_logprobs is not None else None
        self._choices = [
            Choice(
                i * wanted.n + j,
                for_offsets,
                wanted.echoed[i] if wanted.echoed is not None else None,
                wanted.skip_special_tokens,
            )
            for i in range(len(request_ids))
            for j in range(wanted.n)
        ]
        self._has_begun = [False] * len(self._choices)

    def chunks(self, output: RequestOutput) -> Iterator[Json]:
        """What a stream sends for a request's newest output. Raises EngineError for a completion that failed."""
        for choice, news in self._news(output):
            if self._format.is_chat and not self._has_begun[choice.index]:
                yield self._chunk([self._chat_chunk(choice.index, None, output)])
            if self._format.is_chat:
                yield self._chunk([self._chat_chunk(choice.index, news, output)])
            else:
                yield self._chunk([self._completion_choice(choice.index, news, output)])

    def last_chunk(self) -> Json:
        """The chunk with the usage alone."""
        return {**self._chunk([]), "usage": self.usage()}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer to a call that does not stream, from the last output of each request."""
        choices = [
            (self._chat_choice if self._format.is_chat else self._completion_choice)(choice.index, news, output)
            for output in outputs
            for choice, news in self._news(output)
        ]
        choices.sort(key=lambda choice: choice["index"])
        kind = "chat.completion" if self._format.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens of all prompts, each counted once, and of all completions."""
        prompt = sum(len(output.prompt_token_ids) for output in self._outputs.values())
        cached = sum(output.num_cached_tokens for output in self._outputs.values())
        completion = sum(len(each.token_ids) for output in self._outputs.values() for each in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _news(self, output: RequestOutput) -> Iterator[tuple[Choice, News]]:
        self._outputs[output.request_id] = output
        first = self._position[output.request_id] * self._format.n
        for j, completion in enumerate(output.outputs):
            if completion.finish_reason == "error":
                raise EngineError(f"completion {first + j} failed")
            choice = self._choices[first + j]
            if not choice.is_finished and (news := choice.news(completion, output.prompt_logprobs)) is not None:
                yield choice, news

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self._format.model}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._format.is_chat else "text_completion"
        chunk = {**self._head(kind), "choices": choices}
        if self._format.include_usage:
            chunk["usage"] = None
        return chunk

    def _completion_choice(self, index: int, news: News, output: RequestOutput) -> Json:
        choice = {"index": index, "text": news.text, **self._end(news), "logprobs": None}
        if self._format.num_logprobs is not None:
            choice["logprobs"] = completion_logprobs(news.scored, self._tokenizer, self._format.num_logprobs)
        return choice | self._token_ids(index, news, output)

    def _chat_choice(self, index: int, news: News, output: RequestOutput) -> Json:
        message = {"role": "assistant", "content": news.text, "refusal": None}
        return {"index": index, "message": message, **self._end(news), **self._chat_extras(index, news, output)}

    def _chat_chunk(self, index: int, news: News | None, output: RequestOutput) -> Json:
        if news is None:
            return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        delta = {"content": news.text} if news.text else {}
        return {"index": index, "delta": delta, **self._end(news), **self._chat_extras(index, news, output)}

    def _chat_extras(self, index: int, news: News, output: RequestOutput) -> Json:
        extras: Json = {"logprobs": None}
        if self._format.num_logprobs is not None:
            extras["logprobs"] = chat_logprobs(news.scored, self._tokenizer, self._format.num_logprobs)
        return extras | self._token_ids(index, news, output)

    def _end(self, news: News) -> Json:
        return {"finish_reason": news.finish_reason, "stop_reason": news.stop_reason}

    def _token_ids(self, index: int, news: News, output: RequestOutput) -> Json:
        is_first, self._has_begun[index] = not self._has_begun[index], True
        if not self._format.return_token_ids:
            return {}
        return {"prompt_token_ids": output.prompt_token_ids if is_first else None, "token_ids": news.token_ids}
