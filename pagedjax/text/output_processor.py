"""From sampled tokens to what the user sees: text, stop strings, and the n completions of a request put together."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagedjax.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput
from pagedjax.sampling.log_entries import StepLogprobs, entry_of
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import FinishReason, Request
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Completion:
    request: Request
    detokenizer: Detokenizer | None
    logprobs: list[LogprobsOfPosition] = field(default_factory=list)
    prompt_logprobs: list[LogprobsOfPosition | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_logprobs = [None] * self.request.num_known_prompt_logprobs

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
    """What one `add_request` made: n completions of one prompt, or the beams of one search."""

    request_id: str
    prompt: str | None
    completions: list[_Completion]
    beams: SequenceGroup | None = None
    """Whose outputs are those of its search; then `completions` is just its first sequence, for the prompt."""

    is_discarded: bool = False
    """Whether its last output was taken."""

    @property
    def requests(self) -> list[Request]:
        """Its sequences; those of a search that have not ended."""
        return [each.request for each in self.completions] if self.beams is None else list(self.beams.requests)

    @property
    def names(self) -> set[str]:
        return {self.request_id, *(each.request.request_id for each in self.completions)}

    @property
    def finished(self) -> bool:
        return all(request.is_finished for request in self.requests)

    @property
    def has_new_tokens(self) -> bool:
        """Whether any completion has tokens that its text does not have yet."""
        return self.beams is None and any(
            each.detokenizer is not None
            and not each.detokenizer.is_finished
            and each.detokenizer.num_tokens < len(each.request.output_token_ids)
            for each in self.completions
        )

    def output(self, outputs: list[CompletionOutput] | None = None) -> RequestOutput:
        first = self.completions[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.request.prompt_token_ids),  # the caller may change it
            outputs=[completion.output() for completion in self.completions] if outputs is None else outputs,
            finished=self.finished,
            prompt_logprobs=None if first.request.params.prompt_logprobs is None else list(first.prompt_logprobs),
            num_cached_tokens=min(first.request.num_cached_tokens, len(first.request.prompt_token_ids)),
        )


class OutputProcessor:
    """Keeps the text of every unfinished request; a finished one leaves nothing behind."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.groups: dict[str, _Group] = {}
        self.names: set[str] = set()
        """Ids of all unfinished requests and of their completions: the scheduler goes by either."""
        self._group_of: dict[Request | SequenceGroup, _Group] = {}
        self._texts: dict[int, str | None] = {}  # of single tokens, for log-probabilities

    def add(self, request_id: str, prompt: str | None, group: SequenceGroup) -> None:
        """Registers the completions of one prompt, or its search."""
        has_search = group.search is not None
        completions = [_Completion(each, None if has_search else self._detokenizer(each)) for each in group.requests]
        added = _Group(request_id, prompt, completions, beams=group if has_search else None)
        self._group_of.update((request, added) for request in group.requests)
        self.names |= added.names
        if has_search:
            self._group_of[group] = added
        self.groups[request_id] = added

    def add_fork(self, request_id: str, parent: Request, child: Request) -> None:
        """Registers a request that goes on from where another one is."""
        self.add(request_id, self._group_of[parent].prompt, child.group)
        before, after = self._completion_of(parent), self._completion_of(child)
        if before and after:
            after.logprobs, after.cumulative_logprob = list(before.logprobs), before.cumulative_logprob
            after.prompt_logprobs = list(before.prompt_logprobs)
            if after.detokenizer is not None and (stop := after.detokenizer.append(child.output_token_ids)) is not None:
                raise ValueError(f"stop: the text has {stop!r} before the fork already")

    def discard(self, request_id: str) -> None:
        """Forgets what `add` registered."""
        if (group := self.groups.get(request_id)) is not None:
            group.is_discarded = True
            self._forget(group)
            del self.groups[request_id]

    def process(
        self,
        updated: Iterable[Request],
        scheduler: Scheduler,
        logprobs: StepLogprobs | None = None,
        searches: Iterable[SequenceGroup] = (),
    ) -> list[RequestOutput]:
        """Adds each request's newest token to its text and ends those that complete a stop string.

        Returns one output per user's request that got a token or ended, in that order, and then those of `searches`,
        which have ended. Whoever takes them discards those that are finished.
        """
        touched: dict[_Group, None] = {}
        if logprobs is not None:
            self._add_logprobs(logprobs)
        for request in updated:
            group = self._group_of.get(request)
            if group is None:
                continue  # aborted since the step began
            touched[group] = None
            detokenizer = group.completions[request.sample_index].detokenizer
            if detokenizer is None or detokenizer.is_finished:
                continue
            # Usually one token; more after several decodes, or if an exception kept an earlier one from its text.
            try:
                known = len(request.token_ids) - request.num_pending_tokens
                start = len(request.prompt_token_ids) + detokenizer.num_tokens
                stop = detokenizer.append(request.token_ids[start:known])
                if request.is_finished:
                    detokenizer.finish()
            except Exception:
                # A tokenizer that fails on one request's tokens must not take the text or the end of the others. It may
                # raise anything; the scheduler's own errors are not caught here.
                logger.exception("request %r ends with an error: no text for its tokens", request.request_id)
                scheduler.finish(request, FinishReason.ERROR)
                continue
            if stop is not None:
                scheduler.finish(request, FinishReason.STOP, stop, num_outputs=detokenizer.num_tokens)
        touched.update((self._group_of[search], None) for search in searches if search in self._group_of)
        return [self._output(group) for group in touched]

    def leftovers(self, scheduler: Scheduler) -> list[RequestOutput]:
        """The outputs of those that have ended, or got a token, and did not get any, as an exception came between."""
        for group in [group for group in self.groups.values() if group.is_discarded]:
            self.discard(group.request_id)  # which was interrupted
        groups = [group for group in self.groups.values() if group.finished or group.has_new_tokens]
        searches = [group.beams for group in groups if group.beams is not None]
        requests = [request for group in groups if group.beams is None for request in group.requests]
        return self.process(requests, scheduler, None, searches)

    def abort(self, request_id: str, scheduler: Scheduler) -> RequestOutput | None:
        """Ends all unfinished completions of a request: its last output, or None for an id that nobody has."""
        group = self.groups.get(request_id)
        if group is None:
            return None
        unfinished = [request for request in group.requests if not request.is_finished]
        for request in unfinished:
            scheduler.finish(request, FinishReason.ABORT)
        for completion in group.completions:
            try:
                if completion.detokenizer is not None and completion.request in unfinished:
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
        return group.output(None if group.beams is None else self._beam_outputs(group))

    def _forget(self, group: _Group) -> None:
        self.names -= group.names
        for key in (*(each.request for each in group.completions), group.beams):
            if key is not None:
                self._group_of.pop(key, None)

    def _beam_outputs(self, group: _Group) -> list[CompletionOutput]:
        assert group.beams is not None
        assert group.beams.search is not None
        outputs = []
        for index, found in enumerate(group.beams.search.hypotheses()):
            output = CompletionOutput(
                index=index,
                text="",
                token_ids=list(found.token_ids),
                finish_reason=found.finish_reason or FinishReason.ABORT,
                stop_reason=found.stop_reason,
                cumulative_logprob=found.cumulative_logprob,
                score=found.score,
            )
            try:
                if (detokenizer := self._detokenizer(group.completions[0].request)) is not None:
                    detokenizer.append(output.token_ids)
                    detokenizer.finish()
                    output.text = detokenizer.text
            except Exception:  # as in `process`
                logger.exception("request %r: no text for the tokens of output %d", group.request_id, index)
                output.finish_reason = FinishReason.ERROR
            outputs.append(output)
        return outputs

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
