"""From sampled tokens to what the user sees: text, stop strings, and the n completions of a request put together."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagedjax.detokenizer import Detokenizer
from pagedjax.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput
from pagedjax.request import FinishReason, Request
from pagedjax.sampling.log_entries import StepLogprobs, entry_of
from pagedjax.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Completion:
    request: Request
    detokenizer: Detokenizer | None
    logprobs: list[LogprobsOfPosition] = field(default_factory=list)
    prompt_logprobs: list[LogprobsOfPosition | None] = field(default_factory=lambda: [None])
    cumulative_logprob: float = 0.0

    def output(self) -> CompletionOutput:
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=request.sample_index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=list(self.logprobs) if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
        )


@dataclass(eq=False)
class _Group:
    """What one `add_request` made: n completions of one prompt."""

    request_id: str
    prompt: str | None
    completions: list[_Completion]

    @property
    def finished(self) -> bool:
        return all(completion.request.is_finished for completion in self.completions)

    def output(self) -> RequestOutput:
        first = self.completions[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.request.prompt_token_ids),  # the caller may change it
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=None if first.request.params.prompt_logprobs is None else list(first.prompt_logprobs),
        )


class OutputProcessor:
    """Keeps the text of every unfinished request; a finished one leaves nothing behind."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.groups: dict[str, _Group] = {}
        self._group_of: dict[Request, _Group] = {}
        self._texts: dict[int, str | None] = {}  # of single tokens, for log-probabilities

    def add(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        """Registers the completions of one prompt."""
        completions = [_Completion(request, self._detokenizer(request)) for request in requests]
        group = _Group(request_id, prompt, completions)
        self._group_of.update((request, group) for request in requests)
        self.groups[request_id] = group

    def discard(self, request_id: str, requests: Iterable[Request]) -> None:
        """Forgets what `add` registered, or a part of it if it was interrupted."""
        self.groups.pop(request_id, None)
        for request in requests:
            self._group_of.pop(request, None)

    def process(
        self, updated: Iterable[Request], scheduler: Scheduler, logprobs: StepLogprobs | None = None
    ) -> list[RequestOutput]:
        """Adds each request's newest token to its text and ends those that complete a stop string.

        Returns one output per user's request that got a token or ended, in that order.
        """
        touched: dict[_Group, None] = {}
        if logprobs is not None:
            self._add_logprobs(logprobs)
        for request in updated:
            group = self._group_of[request]
            touched[group] = None
            detokenizer = group.completions[request.sample_index].detokenizer
            if detokenizer is None:
                continue
            # Usually one token; more if an exception kept an earlier one from its text.
            try:
                stop = detokenizer.append(request.token_ids[len(request.prompt_token_ids) + detokenizer.num_tokens :])
                if stop is not None:
                    scheduler.finish(request, FinishReason.STOP, stop_reason=stop)
                if request.is_finished:
                    detokenizer.finish()
            except Exception:
                # A tokenizer that fails on one request's tokens must not take the text or the end of the others.
                logger.exception("request %r ends with an error: no text for its tokens", request.request_id)
                scheduler.finish(request, FinishReason.ERROR)
        return [self._output(group) for group in touched]

    def abort(self, request_id: str, scheduler: Scheduler) -> RequestOutput | None:
        """Ends all unfinished completions of a request: its last output, or None for an id that nobody has."""
        group = self.groups.get(request_id)
        if group is None:
            return None
        for completion in group.completions:
            if not completion.request.is_finished:
                scheduler.finish(completion.request, FinishReason.ABORT)
                try:
                    if completion.detokenizer is not None:
                        completion.detokenizer.finish()
                except Exception:  # as in `process`: it must not keep the other completions, nor the id
                    logger.exception("request %r is aborted without the end of its text", group.request_id)
        return self._output(group)

    def _add_logprobs(self, step: StepLogprobs) -> None:
        for request, row in step.of_outputs():
            completion = self._completion_of(request)
            if completion and len(completion.logprobs) < request.num_output_tokens:  # it did get its token
                token_id = request.token_ids[-1]
                entry = entry_of(step.logprobs, row, token_id, request.params.logprobs, self._text_of)
                completion.logprobs.append(entry)
                completion.cumulative_logprob += entry[token_id].logprob
        for request, row in step.of_prompts():
            if completion := self._completion_of(request):
                token_id = request.prompt_token_ids[request.num_known_prompt_logprobs]
                wanted = request.params.prompt_logprobs
                entry = entry_of(step.prompt_logprobs, row, token_id, wanted, self._text_of)
                completion.prompt_logprobs.append(entry)
                request.num_known_prompt_logprobs += 1

    def _completion_of(self, request: Request) -> _Completion | None:
        """None for a request that was aborted since the step began."""
        group = self._group_of.get(request)
        return group.completions[request.sample_index] if group else None

    def _text_of(self, token_id: int) -> str | None:
        if token_id not in self._texts:
            try:
                text = None if self.tokenizer is None else self.tokenizer.decode([token_id])
            except Exception:  # as in `process`: one token without a text must not take anything from others
                logger.exception("token %d has no text", token_id)
                text = None
            self._texts[token_id] = text
        return self._texts[token_id]

    def _output(self, group: _Group) -> RequestOutput:
        output = group.output()
        if output.finished:
            del self.groups[group.request_id]
            for completion in group.completions:
                del self._group_of[completion.request]
        return output

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            params.stop_strings,
            min_tokens=params.min_tokens,
            include_stop_str=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
