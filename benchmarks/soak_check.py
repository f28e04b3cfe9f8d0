"""What must come of each request of `soak.py`, and what nobody may leave behind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soak_user import Asked, Done, User

from pagedjax import LLM, CompletionOutput, RequestOutput, SamplingParams

LOGIT_TOLERANCE = 2e-3
"""How far f32 rounding may move a logit when tokens are cut into other batches: three times the largest difference seen
with the tiny model, whose logits are up to about 100; those of SmolLM2 are smaller."""


class Reference:
    """Compares results with those of the same request alone, in an engine where nothing disturbs it.

    Where a token differs, the request runs once more with the two tokens' logits moved by `LOGIT_TOLERANCE` each: if
    that gives the other token, rounding decided between near ties, and the rest is compared after that token.
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.num_checked = self.num_tokens = self.num_near_ties = 0

    def check(self, done: Done) -> str | None:
        """What is wrong with a result, if anything is."""
        asked, output, _ = done
        self.num_checked += 1
        if output.prompt_token_ids != asked.prompt:
            return f"{asked.kind}: the prompt became {output.prompt_token_ids}"
        expected = self._alone(asked, asked.known)
        if asked.kind == "beams":
            return self._check_beams(done, expected)
        if done.is_whole and (wrong := _check_prompt_logprobs(output, expected)):
            return f"{asked.kind}: {wrong}"
        for completion in output.outputs:
            wrong = self._check_completion(asked, completion, expected, done.is_whole)
            if wrong is not None:
                return f"{asked.kind} {asked.params}, prompt {asked.prompt}, completion {completion.index}: {wrong}"
        return None

    def _check_completion(
        self, asked: Asked, ours: CompletionOutput, expected: RequestOutput, is_whole: bool
    ) -> str | None:
        token_ids, index = ours.token_ids, ours.index
        is_whole = is_whole or ours.finish_reason in ("stop", "length")
        self.num_tokens += len(token_ids)
        theirs = expected.outputs[index]
        while (place := _first_difference(token_ids, theirs.token_ids)) < len(token_ids):
            if place == len(theirs.token_ids):
                return f"{token_ids} is longer than {theirs.token_ids}"
            bias = {token_ids[place]: LOGIT_TOLERANCE, theirs.token_ids[place]: -LOGIT_TOLERANCE}
            known = [] if len(expected.outputs) > 1 else theirs.token_ids[:place]
            moved = self._alone(asked, max(asked.known, known, key=len), bias).outputs[index].token_ids
            if moved[: place + 1] != token_ids[: place + 1]:
                return f"{token_ids} instead of {theirs.token_ids}, from place {place} on"
            self.num_near_ties += 1
            if len(expected.outputs) > 1:
                return None  # one of several cannot go on from there by itself
            theirs = self._alone(asked, token_ids[: place + 1]).outputs[0]
        if is_whole and len(theirs.token_ids) > len(token_ids):
            return f"{token_ids} ends ({ours.finish_reason}) before {theirs.token_ids}"
        if is_whole and (ours.finish_reason, ours.stop_reason) != (theirs.finish_reason, theirs.stop_reason):
            return f"ended with {ours.finish_reason} {ours.stop_reason} instead of {theirs.finish_reason}"
        if is_whole and not asked.known and ours.text != theirs.text:
            return f"the text {ours.text!r} instead of {theirs.text!r}"
        return _check_logprobs(ours.logprobs or (), theirs.logprobs or ())

    def _check_beams(self, done: Done, expected: RequestOutput) -> str | None:
        """Rank by rank: the same ids, or those of a hypothesis that scores as much."""
        if not done.is_whole:
            return None
        for ours, theirs in zip(done.output.outputs, expected.outputs, strict=True):
            self.num_tokens += len(ours.token_ids)
            assert ours.score is not None
            assert theirs.score is not None
            tolerance = 2 * LOGIT_TOLERANCE * max(len(ours.token_ids), 1)
            if abs(ours.score - theirs.score) > tolerance:
                return f"beams {done.asked.params}: {ours} instead of {theirs}"
            self.num_near_ties += ours.token_ids != theirs.token_ids
        return None

    def _alone(self, asked: Asked, known: Sequence[int], bias: dict[int, float] | None = None) -> RequestOutput:
        """The output of a request whose first outputs are `known`."""
        params = asked.params
        if isinstance(params, SamplingParams):
            old = params.logit_bias or {}
            moved = {token: old.get(token, 0.0) + value for token, value in (bias or {}).items()}
            edits: dict[str, Any] = {"logit_bias": {**old, **moved}} if bias else {}
            if known:  # tokens that are appended have no log-probabilities
                edits |= {"logprobs": None, "prompt_logprobs": None}
            params = replace(params, seed=asked.seed, **edits)
            if len(known) == params.max_tokens:
                return RequestOutput("", None, asked.prompt, [CompletionOutput(0, "", list(known), "length")])
        name = self.engine.add_request(asked.prompt, params)
        if known:
            self.engine.append(name, known)
        outputs: list[RequestOutput] = []
        while self.engine.has_unfinished():
            outputs += self.engine.step()
        assert self.engine.stats().num_preemptions == 0, "the reference was disturbed"
        return outputs[-1]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _check_prompt_logprobs(ours: RequestOutput, theirs: RequestOutput) -> str | None:
    if ours.prompt_logprobs is None or theirs.prompt_logprobs is None:
        return None
    if len(ours.prompt_logprobs) != len(theirs.prompt_logprobs):
        return "another number of prompt_logprobs"
    return _check_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def _check_logprobs(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """At each position those tokens that both have; the others tie with the last."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if (mine is None) != (other is None):
            return f"log-probabilities at {place} are missing"
        for token in (mine or {}).keys() & (other or {}).keys():
            if abs(mine[token].logprob - other[token].logprob) > 2 * LOGIT_TOLERANCE:
                return f"log-probability of token {token} at {place}: {mine[token]} instead of {other[token]}"
    return None


def leftovers(user: User) -> list[str]:
    """What an idle engine still holds, after its user has let go of all handles."""
    engine, scheduler = user.engine, user.engine.scheduler
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        return [f"{user.name}: check_integrity: {error}"]
    counts = Counter(
        {
            "blocks": scheduler.allocator.num_used_blocks,
            "references": scheduler.allocator.num_references,
            "host blocks": scheduler.swap.host.num_used_blocks,
            "bytes of the host pool": engine.runner.host_pool.num_bytes,
            "held or pinned sequences": len(scheduler.kv.held) + len(scheduler.kv.pinned),
            "kept requests": len(engine._keeping),
            "inboxes": len(engine.inboxes),
            "outputs": len(engine.outputs.groups) + len(engine.outputs.names) + len(engine.outputs._group_of),
        }
    )
    return [f"{user.name}: {count} {what} are left when all has ended" for what, count in counts.items() if count]
