"""Who goes first: first come, first served, or by priorities that age, so that nobody waits for ever."""

import random
from typing import Any

import pytest
from fake_device import completion_reference, fake_engine, greedy, run
from tiny_engine import greedy as tiny_greedy
from tiny_engine import prompt_of, reference, tiny_llm, unchecked, unchecked_engine

from pagedjax.engine import LLMEngine
from pagedjax.llm import LLM

AGING_S = 10.0


class VirtualTime:
    """An engine whose clock is counted in steps, a second each."""

    def __init__(self, **options: object) -> None:
        self.engine: LLMEngine = fake_engine(
            scheduling_policy="priority", priority_aging_s=AGING_S, **{"num_blocks": 16, "max_num_seqs": 2, **options}
        )
        self.now = 0.0
        self.engine.clock = lambda: self.now
        self.first_token: dict[str, float] = {}
        self.finished: dict[str, float] = {}

    def add(self, name: str, priority: int, num_prompt: int = 6, num_outputs: int = 6) -> None:
        self.engine.add_request([len(name)] * num_prompt, greedy(num_outputs), name, priority=priority)

    def step(self) -> None:
        for output in self.engine.step():
            self.first_token.setdefault(output.request_id, self.now)
            if output.finished:
                self.finished[output.request_id] = self.now
                num_outputs = len(output.outputs[0].token_ids)
                expected = completion_reference(output.prompt_token_ids, num_outputs)
                assert output.outputs[0].token_ids == expected
        self.engine.scheduler.check_integrity()
        self.now += 1


def test_the_lower_level_goes_first():
    time = VirtualTime(max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 0), ("d", 1)):
        time.add(name, priority)
    while time.engine.has_unfinished():
        time.step()
    assert sorted(time.finished, key=lambda name: time.finished[name]) == ["c", "b", "d", "a"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(16, 2), (6, 8)])
def test_it_does_not_wait_for_those_behind_it_that_run(num_blocks, max_num_seqs, preemption):
    """Neither for a row nor for blocks; they go on later as if nothing had been, and those before it stay."""
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "preemption": preemption, "num_swap_blocks": 9}
    time = VirtualTime(**options)
    time.add("first", 0, num_outputs=8)
    time.add("second", 5, num_outputs=8)
    for _ in range(3):
        time.step()
    time.add("third", 1)
    time.step()
    assert "third" in time.first_token
    running = {request.request_id for request in time.engine.scheduler.requests(time.engine.scheduler.running)}
    assert running == {"first", "third"}
    while time.engine.has_unfinished():
        time.step()
    assert time.finished["first"] < time.finished["second"]
    assert time.engine.stats().num_preemptions >= 1


def test_nobody_is_preempted_for_one_who_would_not_fit_even_then():
    time = VirtualTime(num_blocks=8, max_num_seqs=8)
    time.add("first", 0, num_prompt=18, num_outputs=2)
    time.add("second", 5, num_prompt=4, num_outputs=2)
    time.step()
    time.add("too large", 1, num_prompt=20)
    num_preemptions = time.engine.stats().num_preemptions
    time.step()
    assert time.engine.stats().num_preemptions == num_preemptions
    assert "too large" not in time.first_token
    while time.engine.has_unfinished():
        time.step()


def test_nobody_is_preempted_for_blocks_that_others_hold_too():
    time = VirtualTime(num_blocks=16, max_num_seqs=8)
    prompt = list(range(24))
    for name, priority in (("first", 0), ("second", 5)):
        time.engine.add_request(prompt, greedy(8), name, priority=priority)
        time.step()
    assert time.engine.scheduler.allocator.num_references > time.engine.scheduler.allocator.num_used_blocks
    time.engine.add_request([30] * 44, greedy(4), "large", priority=1)
    time.step()
    assert time.engine.stats().num_preemptions == 0
    while time.engine.has_unfinished():
        time.step()


def test_whoever_waits_is_not_overtaken_for_ever():
    """The bound: with levels l and l + d, by those that arrive at most d x aging later, and by no others."""
    time = VirtualTime(max_num_seqs=1)
    time.add("patient", 3, num_outputs=4)
    num_added = 0
    while "patient" not in time.finished:
        assert time.now < 200
        time.add(f"urgent {num_added}", 0, num_outputs=3)  # one each second, and each takes three: an endless queue
        num_added += 1
        time.step()
    overtook = [int(name.split()[1]) for name in time.finished if name != "patient"]
    assert sorted(overtook) == list(range(30))  # those that came less than 3 x aging seconds later
    assert time.finished["patient"] <= 30 * 3 + 4


@pytest.mark.parametrize("seed", range(6))
def test_everyone_is_done_when_the_work_before_him_is(seed):
    """Drawn arrivals in a tight pool: the first in line gets a token every step, so that the wait is bounded by the
    tokens of those who are before him in line."""
    rng = random.Random(seed)
    time = VirtualTime(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=8)
    arrived: dict[str, tuple[float, float, int]] = {}
    for i in range(60):
        for _ in range(rng.choice([0, 0, 1])):
            name, priority, num_prompt, num_outputs = str(i), rng.randint(0, 3), rng.randint(1, 12), rng.randint(1, 12)
            time.add(name, priority, num_prompt, num_outputs)
            arrived[name] = (time.now, time.now + priority * AGING_S, num_prompt + num_outputs)
        time.step()
    while time.engine.has_unfinished():
        time.step()
    for name, (arrival, rank, _) in arrived.items():
        work = sum(tokens for _, other_rank, tokens in arrived.values() if other_rank <= rank)
        assert time.finished[name] - arrival <= work, name


def test_forks_and_completions_stand_where_their_request_does():
    time = VirtualTime(max_num_seqs=4, num_blocks=64)
    time.engine.add_request([1] * 5, greedy(8, n=2), "pair", priority=2)
    time.add("urgent", 0)
    time.step()
    time.step()
    fork = time.engine.fork("urgent")
    time.engine.scheduler.check_integrity()
    assert [group.name for group in time.engine.scheduler.running.values()] == ["urgent", fork, "pair[0]"]
    outputs = run(time.engine)
    assert outputs[fork].outputs[0].token_ids == completion_reference([6] * 6, 6)


def test_first_come_first_served_has_no_priorities():
    engine: Any = unchecked_engine()
    with pytest.raises(ValueError, match=r'priority=1 needs scheduling_policy="priority"'):
        engine.add_request([1, 2], tiny_greedy(2), priority=1)
    with pytest.raises(ValueError, match="priority must be an int of 32 bits, got 'high'"):
        engine.add_request([1, 2], tiny_greedy(2), priority="high")
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling_policy", "lifo"),
        ("priority_aging_s", 0.0),
        ("priority_aging_s", float("nan")),
        ("priority_aging_s", "x"),
        ("priority_aging_s", True),
        ("preemption", "x"),
        ("num_swap_blocks", False),
    ],
)
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        unchecked_engine(**{name: value})


def test_a_wrong_option_is_named_before_the_model_is_looked_at():
    with pytest.raises(ValueError, match="preemption must be one of"):
        LLM("no/such-model", preemption="x")
    with pytest.raises(ValueError, match='warm_up must be True, False or "all"'):
        unchecked("pagedjax.llm").LLM("no/such-model", warm_up="no")


def test_llm_takes_priorities():
    llm = tiny_llm(scheduling_policy="priority", max_num_seqs=1)
    prompts = [prompt_of(4, i) for i in range(3)]
    outputs = llm.generate(prompts, tiny_greedy(4), use_tqdm=False, priority=[2, 0, 1])
    assert [o.outputs[0].token_ids for o in outputs] == [reference(prompt, tiny_greedy(4)) for prompt in prompts]
    (last,) = llm.stream(prompts[0], tiny_greedy(1), priority=5)
    assert last.finished
    with pytest.raises(ValueError, match="priority must be one for all or one per prompt: 2 for 3"):
        llm.generate(prompts, tiny_greedy(4), use_tqdm=False, priority=[1, 2])
