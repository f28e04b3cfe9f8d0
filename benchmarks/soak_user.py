"""A random user of one engine, for `soak.py`: asks for all that there is, in any order, and keeps what came of it."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedjax import LLM, BeamSearchParams, RequestOutput, SamplingParams

ARRIVALS_PER_TURN = 0.6
MAX_UNFINISHED = 12
"""Who comes when so many wait or run is turned away: the queue stays short, the pool stays full."""
MAX_HANDLES = 4
LATE = ("no unfinished request", "leave none to generate", "max_tokens must be more")
"""Why a fork or an append may be refused: with `async_scheduling` the token in flight was the last one."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A pool that any request fits alone, and hardly two of them."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_prompt: int
    max_output: int
    budget: int
    max_num_seqs: int
    vocab: tuple[int, int]
    """Token ids are drawn from this range."""


@dataclass(eq=False)
class Asked:
    """A request, and all that its tokens depend on."""

    kind: str
    prompt: list[int]
    params: Any
    known: list[int] = field(default_factory=list)
    """Outputs that it did not choose itself, and those before them."""
    seed: int | None = None


class Done(NamedTuple):
    """What came of a request; `is_whole` if it ended by itself."""

    asked: Asked
    output: RequestOutput
    is_whole: bool


class User:
    """Asks, forks, appends, holds, aborts and reads streams, all at random, and steps the engine in between."""

    def __init__(self, name: str, llm: LLM, sizes: Sizes, seed: int) -> None:
        self.name, self.llm, self.engine, self.sizes = name, llm, llm.engine, sizes
        self.rng = random.Random(f"{name} {seed}")
        self.common = self._ids(sizes.max_prompt)
        """What prompts have in common at their beginning."""
        self.asked: dict[str, Asked] = {}
        """All that are unfinished, by id."""
        self.streams: dict[str, Any] = {}
        self.seen: dict[str, RequestOutput] = {}
        """The last output that was read of a stream."""
        self.handles: list[Any] = []
        self.done: list[Done] = []
        """What has ended and nobody has looked at yet."""
        self.counts: Counter[str] = Counter()
        self._now = self._next_arrival = 0.0
        self.engine.clock = lambda: self._now  # the same priorities at every run

    def turn(self) -> None:
        """What a user may do between two steps, and a step."""
        self._now += 1
        while self._next_arrival <= self._now:
            self._next_arrival += self.rng.expovariate(ARRIVALS_PER_TURN)
            if len(self.asked) < MAX_UNFINISHED:
                self.add()
        if self.rng.random() < 0.4:
            acts: list[Callable[[], None]] = [self.fork, self.append, self.abort, self.close, self.use_handle]
            self.rng.choice(acts)()
        self.advance()

    def advance(self) -> None:
        """A step, or the next output of a stream, which steps if it has to."""
        if self.streams and (self.rng.random() < 0.3 or not self.engine.has_unfinished()):
            self._read(self.rng.choice(list(self.streams)))
            return
        for output in self.engine.step():
            if output.finished:
                self._finish(output)

    @property
    def is_idle(self) -> bool:
        """Whether all has ended and been read."""
        return not (self.asked or self.streams or self.engine.has_unfinished())

    def add(self) -> None:
        kind = self.rng.choice(["greedy", "seeded", "penalties", "logprobs", "n > 1", "beams"])
        asked = Asked(kind, self._prompt(), self._params(kind))
        is_priority = self.engine.config.scheduling_policy == "priority"
        options: dict[str, Any] = {"priority": self.rng.randint(-2, 2) if is_priority else 0}
        prompt: Any = asked.prompt
        if self.handles and self.rng.random() < 0.4:
            prompt = self.rng.choice(self.handles)
            asked.prompt = prompt.token_ids
            self.counts["from a handle"] += 1
        if kind != "beams" and self.rng.random() < 0.25:
            stream = self.llm.stream(prompt, asked.params, **options)
            (name,) = stream._inbox.request_ids
            self.streams[name] = stream
            self.counts["streams"] += 1
        else:
            keeps = kind != "beams" and self.rng.random() < 0.3
            name = self.engine.add_request(prompt, asked.params, keeps_kv=keeps, **options)
        if isinstance(asked.params, SamplingParams):
            asked.seed = asked.params.seed
        self.asked[name] = asked

    def fork(self) -> None:
        if (name := self._single()) is None:
            return
        parent = self.asked[name]
        with self._maybe_late():
            fork = self.engine.fork(name)
            request = self._request(fork)
            self.asked[fork] = Asked("forks", parent.prompt, parent.params, request.output_token_ids, request.seed)

    def append(self) -> None:
        if (name := self._single()) is not None and self.asked[name].params.logprobs is None:
            with self._maybe_late():
                self.engine.append(name, self._ids(2))
                self.asked[name].known = self._request(name).output_token_ids
                self.counts["appended to"] += 1

    def abort(self) -> None:
        names = [name for name in self.asked if name not in self.streams]
        if names:
            group = self.engine.outputs.groups.get(name := self.rng.choice(names))  # None: its output is yet to come
            status = group.requests[0].status.value if group and group.requests else "finished"
            if (output := self.engine.abort(name)) is not None:
                self.counts[f"aborted while {status}"] += 1
                self.engine.discard_kept(name)
                self.done.append(Done(self.asked.pop(name), output, is_whole=False))

    def close(self) -> None:
        """Closes a stream, or drops it, in the middle."""
        if not self.streams:
            return
        name = self.rng.choice(list(self.streams))
        stream = self.streams.pop(name)
        if self.rng.random() < 0.5:
            stream.close()
        del stream
        self.counts["streams closed"] += 1
        asked = self.asked.pop(name)
        if name in self.seen:
            self.done.append(Done(asked, self.seen.pop(name), is_whole=False))

    def use_handle(self) -> None:
        """Forks and appends to one that is kept, and frees another."""
        if not self.handles:
            return
        fork = self.rng.choice(self.handles).fork()
        fork.append(self._ids(self.rng.randint(1, 3)))
        self._hold(fork)
        self.handles.pop(self.rng.randrange(len(self.handles))).free()

    def free_all(self) -> None:
        """Lets go of every handle."""
        while self.handles:
            self.handles.pop().free()

    def _read(self, name: str) -> None:
        output = next(self.streams[name])
        self.seen[name] = output
        if output.finished:
            del self.streams[name], self.seen[name]
            self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        asked = self.asked.pop(output.request_id)
        self.counts[asked.kind] += 1
        self.done.append(Done(asked, output, is_whole=True))
        store = self.engine.scheduler.kv
        for kv, completion in zip(self.engine.take_kept(output.request_id), output.outputs, strict=False):
            assert kv.token_ids == output.prompt_token_ids + completion.token_ids, "other tokens were kept"
            self._hold(self.engine.handle(kv)) if completion.index == 0 else store.drop(kv)

    def _hold(self, handle: Any) -> None:
        if len(self.handles) < MAX_HANDLES and len(handle) <= self.sizes.max_prompt:
            self.handles.append(handle)
        else:
            handle.free()

    def _single(self) -> str | None:
        """A request that may be forked or appended to; once in a while one that has just ended."""
        names = [name for name, asked in self.asked.items() if asked.kind not in ("n > 1", "beams")]
        return self.rng.choice(names) if names else None

    def _request(self, name: str) -> Any:
        return self.engine.outputs.groups[name].completions[0].request

    @contextmanager
    def _maybe_late(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if not any(reason in str(error) for reason in LATE):
                raise

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(*self.sizes.vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        longest = self.sizes.max_prompt - 4
        num_common = self.rng.choice([0, longest // 4, longest // 2, longest])
        return self.common[:num_common] + self._ids(self.rng.randint(1, 4))

    def _params(self, kind: str) -> Any:
        rng, max_tokens = self.rng, self.rng.randint(1, self.sizes.max_output)
        if kind == "beams":
            penalty = rng.choice([0.0, 1.0])
            return BeamSearchParams(beam_width=rng.randint(1, 4), max_tokens=max_tokens, length_penalty=penalty)
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
        if kind == "seeded" or rng.random() < 0.3:
            options |= {"temperature": rng.choice([0.7, 1.0, 10.0]), "seed": rng.randrange(2**64)}
            options |= {"top_k": rng.choice([0, 0, 7]), "top_p": rng.choice([1.0, 1.0, 0.9])}
        if kind == "penalties":
            options |= {"presence_penalty": rng.choice([0.0, 0.5]), "repetition_penalty": rng.choice([1.0, 1.2])}
            options |= {"min_tokens": rng.randint(0, max_tokens), "bad_words": [self._ids(1)]}
            options["logit_bias"] = {rng.randrange(*self.sizes.vocab): 1.0}
        if kind == "logprobs":
            options |= {"logprobs": rng.choice([0, 2, 5]), "prompt_logprobs": rng.choice([None, 0, 2])}
        if kind == "n > 1":
            options["n"] = rng.randint(2, 4)
        if rng.random() < 0.3:
            options["stop_token_ids"] = self._ids(rng.choice([1, 4, 12]))
        return SamplingParams(**options)
