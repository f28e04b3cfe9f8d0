"""Sharing in thousands of drawn schedules, on the fake device: groups, beams, forks, handles, pins, lost pools."""

import contextlib
import itertools
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_device import (
    VOCAB_SIZE,
    DeviceError,
    beam_reference,
    completion_reference,
    device_of,
    fake_engine,
    next_token,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.beams.params import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.sequences import Sequence

COMMON = random.Random(9).choices(range(VOCAB_SIZE), k=40)


@dataclass
class World:
    """An engine under a random user, who remembers what must come out."""

    engine: LLMEngine
    rng: random.Random
    asked: dict[str, tuple[list[int], Any, list[int]]] = field(default_factory=dict)
    """Request -> prompt, params, outputs that it did not choose itself."""
    limits: dict[str, int] = field(default_factory=dict)
    """Most tokens that the pool had room for when it was added."""
    fork_seeds: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    handles: list[Sequence] = field(default_factory=list)
    num_failures: int = 0

    def prompt(self) -> list[int]:
        num_common = self.rng.choice([0, 3, 8, 12, 21, 40])
        return COMMON[:num_common] + self.rng.choices(range(VOCAB_SIZE), k=self.rng.randint(1, 6))

    def params(self) -> Any:
        n, max_tokens = self.rng.randint(1, 4), self.rng.randint(1, 14)
        match self.rng.randrange(4):
            case 0:
                return BeamSearchParams(beam_width=n, max_tokens=max_tokens, length_penalty=self.rng.choice([0.0, 1.0]))
            case 1:
                return SamplingParams(temperature=1.0, seed=self.rng.randrange(2**64), n=n, max_tokens=max_tokens)
            case _:
                stops = self.rng.sample(range(VOCAB_SIZE), self.rng.choice([0, 0, 3, 12]))
                return SamplingParams(
                    temperature=0.0, n=self.rng.choice([1, n]), max_tokens=max_tokens, stop_token_ids=stops
                )

    def act(self) -> None:
        """One thing that a user may do between two steps."""
        action = self.rng.choice([self.add, self.add, self.fork, self.append, self.abort, self.hold, self.drop])
        if self.rng.random() < 0.05:
            action = self.rng.choice([self.pin, self.reset, self.update_params, self.fail])
        try:
            action()
        except ValueError as error:
            known = ["can never fit", "may be needed"]
            if self.engine.config.async_scheduling:  # the token in flight was the last
                known += ["no unfinished request", "leave none to generate", "max_tokens must be more"]
            if not any(reason in str(error) for reason in known):
                raise

    def add(self) -> None:
        prompt, params = self.prompt(), self.params()
        if self.handles and self.rng.random() < 0.4:
            prompt = self.rng.choice(self.handles)
        token_ids = prompt.token_ids if isinstance(prompt, Sequence) else prompt
        keeps = self.rng.random() < 0.3 and not isinstance(params, BeamSearchParams)
        levels = range(-2, 3) if self.engine.config.scheduling_policy == "priority" else (0,)
        request_id = self.engine.add_request(prompt, params, keeps_kv=keeps, priority=self.rng.choice(levels))
        self.limits[request_id] = self.engine.config.max_seq_len_in(self.engine.scheduler.kv.num_usable_blocks)
        self.asked[request_id] = (token_ids, params, [])

    def single(self) -> str | None:
        groups = self.engine.outputs.groups
        names = [
            n for n, group in groups.items() if n in self.asked and not group.beams and len(group.completions) == 1
        ]
        return self.rng.choice(names) if names else None

    def known_outputs(self, request_id: str) -> list[int]:
        return self.engine.outputs.groups[request_id].completions[0].request.output_token_ids

    def fork(self) -> None:
        if (name := self.single()) is not None:
            prompt, params, _ = self.asked[name]
            fork = self.engine.fork(name)
            self.asked[fork] = (prompt, params, self.known_outputs(fork))
            self.fork_seeds[fork] = self.engine.outputs.groups[fork].completions[0].request.seed

    def append(self) -> None:
        if (name := self.single()) is not None:
            request = self.engine.outputs.groups[name].completions[0].request
            if request.max_num_tokens - request.num_tokens > 2:
                self.engine.append(name, self.rng.choices(range(VOCAB_SIZE), k=2))
                prompt, params, _ = self.asked[name]
                self.asked[name] = (prompt, params, self.known_outputs(name))

    def abort(self) -> None:
        if self.engine.outputs.groups and self.rng.random() < 0.5:
            name = self.rng.choice(list(self.engine.outputs.groups))
            if name in self.asked:
                output = self.engine.abort(name)
                assert output is not None
                self.outputs[name] = output

    def hold(self) -> None:
        for name in [name for name in self.engine._keeping if name in self.outputs]:
            self.take(name)
        if self.handles:
            fork = self.rng.choice(self.handles).fork()
            fork.append(self.rng.choices(range(VOCAB_SIZE), k=self.rng.randint(1, 3)))
            self.handles.append(fork)

    def take(self, name: str) -> None:
        store = self.engine.scheduler.kv
        for kv, completion in zip(self.engine.take_kept(name), self.outputs[name].outputs, strict=True):
            assert kv.token_ids == self.outputs[name].prompt_token_ids + completion.token_ids
            if len(kv.token_ids) < 55:
                self.handles.append(self.engine.handle(kv))
            else:
                store.drop(kv)

    def drop(self) -> None:
        if self.handles:
            self.handles.pop(self.rng.randrange(len(self.handles))).free()

    def pin(self) -> None:
        self.handles.append(self.engine.handle(self.engine.pin(self.prompt())))

    def reset(self) -> None:
        self.engine.scheduler.forget_prefixes()

    def update_params(self) -> None:
        self.engine.update_params({})

    def fail(self) -> None:
        device_of(self.engine).fails = True

    def step(self) -> None:
        try:
            for output in self.engine.step():
                if output.finished:
                    assert output.request_id not in self.outputs
                    self.outputs[output.request_id] = output
        except DeviceError:
            self.num_failures += 1
        self.engine.scheduler.check_integrity()

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            if self.rng.random() < 0.6:
                self.act()
            self.step()
        for _ in range(3000):
            self.step()
            if not self.engine.has_unfinished():
                break
        else:
            raise AssertionError("no end in sight")
        self.check_outputs()
        self.check_clean()

    def check_outputs(self) -> None:
        windows = self.engine.config.windows
        for name, (prompt, params, known) in self.asked.items():
            output = self.outputs[name]
            assert output.prompt_token_ids == prompt
            for completion in output.outputs:
                if completion.finish_reason == "abort":
                    continue
                if isinstance(params, BeamSearchParams):
                    max_tokens = min(params.max_tokens or 0, self.limits[name] - len(prompt))
                    found = beam_reference(prompt, params, max_tokens, windows)[completion.index]
                    assert (completion.token_ids, completion.score) == (list(found.token_ids), found.score)
                else:
                    seed = self.fork_seeds.get(name, params.seed or 0) if params.temperature else 0
                    num_tokens = len(completion.token_ids)
                    expected = completion_reference(prompt, num_tokens, seed, completion.index, known, windows)
                    assert completion.token_ids == expected
                    self.check_end(name, completion, len(prompt), params, known)

    def check_end(self, name: str, completion: Any, num_prompt: int, params: SamplingParams, known: list[int]) -> None:
        """It ends where it has to, and not before."""
        chosen = completion.token_ids[len(known) :]
        if completion.finish_reason == "stop":
            assert completion.stop_reason == chosen.pop()
            assert completion.stop_reason in params.stop_token_ids
        elif name in self.limits:
            limit = self.limits[name] - num_prompt
            assert len(completion.token_ids) == min(params.max_tokens or 0, limit)
        assert not set(chosen) & set(params.stop_token_ids)

    def check_clean(self) -> None:
        engine = self.engine
        for name in list(engine._keeping):
            engine.discard_kept(name)
        while self.handles:
            self.handles.pop().free()
        for held in list(engine.scheduler.kv.held):
            engine.scheduler.kv.drop(held)
        engine.scheduler.check_integrity()
        assert engine.scheduler.allocator.num_free_blocks == engine.config.num_blocks
        assert engine.scheduler.allocator.num_references == 0
        assert not engine.outputs.groups
        assert not engine.outputs._group_of
        assert not engine.inboxes


def drawn_world(seed: int) -> World:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    engine = fake_engine(
        num_blocks=max(4, rng.choice([56, 70, 120, 400]) // block_size),
        block_size=block_size,
        max_num_batched_tokens=(budget := rng.choice([5, 9, 24, 64])),
        max_num_seqs=min(budget, rng.choice([4, 8])),
        enable_prefix_caching=rng.random() < 0.7,
        preemption=rng.choice(["recompute", "swap", "swap", "auto"]),
        num_swap_blocks=rng.choice([1, 8, 40]),
        num_decode_steps=rng.choice([1, 1, 2, 5]),
        async_scheduling=rng.random() < 0.6,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        windows=rng.choice([(None,), (None,), (7,), (None, 5), (16, None, 16), (1, 9)]),
    )
    now = itertools.count()
    engine.clock = lambda: float(next(now))
    return World(engine, rng)


@given(seed=st.integers(0, 2**32))
def test_any_schedule(seed):
    drawn_world(seed).run(num_actions=40)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_hundreds_of_schedules(part):
    """And they do share, copy, preempt, hit, fork, hold and fail. `python tests/test_sharing_schedules.py FIRST COUNT`
    runs any number of them."""
    totals = dict.fromkeys(("copies", "preemptions", "hits", "failures", "windowed hits"), 0)
    for seed in range(part * 100, part * 100 + 100):
        world = drawn_world(seed)
        try:
            world.run(num_actions=40)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        stats = world.engine.stats()
        totals["copies"] += device_of(world.engine).num_copies
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += stats.prefix_cache_hit_tokens
        totals["failures"] += world.num_failures
        totals["windowed hits"] += stats.prefix_cache_hit_tokens * any(world.engine.config.windows)
    assert all(total >= 15 for total in totals.values()), totals


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_alone_can_be_computed_for_several(n):
    engine = fake_engine()
    engine.add_request(COMMON[:10], SamplingParams(n=n, max_tokens=0), "x")
    (output,) = engine.step()
    assert [completion.finish_reason for completion in output.outputs] == ["length"] * n
    assert engine.stats().num_free_blocks == engine.config.num_blocks


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True, "num_decode_steps": 3, "preemption": "swap"}])
@pytest.mark.parametrize("where", ["schedule", "advance", "resolve", "process"])
def test_an_interrupt_anywhere_on_the_host_loses_nothing(where, options, monkeypatch):
    """At lines of each of them in turn: the pool and the queues are made anew, and outputs come later."""
    for line in range(1, 400, 7):
        engine = fake_engine(num_blocks=24, num_swap_blocks=24, **options)
        prompts = {name: COMMON[: 6 + i] for i, name in enumerate("abc")}
        engine.add_request(prompts["a"], SamplingParams(temperature=0.0, max_tokens=5), "a")
        engine.add_request(prompts["b"], SamplingParams(temperature=0.0, max_tokens=5, n=3), "b")
        engine.add_request(prompts["c"], BeamSearchParams(beam_width=2, max_tokens=5), "c")
        outputs = {}
        owner: Any = engine.outputs if where == "process" else engine.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, interrupted_at(getattr(owner, where), line))
            for _ in range(40):
                with contextlib.suppress(KeyboardInterrupt):
                    outputs |= {output.request_id: output for output in engine.step() if output.finished}
                if not engine.has_unfinished():
                    break
        for name in "ab":
            expected = completion_reference(prompts[name], 5)
            assert all(completion.token_ids == expected for completion in outputs[name].outputs), line
        assert len(outputs["b"].outputs) == 3
        best = beam_reference(prompts["c"], BeamSearchParams(beam_width=2, max_tokens=5), 5)
        assert [tuple(completion.token_ids) for completion in outputs["c"].outputs] == [h.token_ids for h in best], line
        engine.scheduler.check_integrity()
        assert engine.stats().num_free_blocks == 24


def interrupted_at(function: Any, line: int) -> Any:
    """`function`, which is interrupted when so many lines of it, or of what it calls, have run."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    def traced(*args: Any, **kwargs: Any) -> Any:
        sys.settrace(trace)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(None)

    return traced


def test_the_fake_model_sees_every_token():
    assert next_token([1, 2, 3]) != next_token([3, 2, 1])


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        try:
            drawn_world(seed).run(num_actions=60)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
