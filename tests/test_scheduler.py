"""The scheduler with a fake device: whatever the order, chunking, preemption, each request gets its own tokens.

The device below keeps a pool of token ids instead of KV, written and read through the tables of `build_batch`, and its
next token is a checksum of everything that a request can see there. One slot that is stale, missing or someone else's
changes all that follows. REF is the same checksum over the plain list of tokens.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.batch import build_batch
from pagedjax.config import EngineConfig
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import FinishReason, Request, RequestStatus
from pagedjax.scheduling.scheduler import Scheduler

VOCAB_SIZE = 128


def next_token(token_ids) -> int:
    """The fake model: depends on every token and on their order."""
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes()) % VOCAB_SIZE


def reference(prompt: list[int], num_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """REF: prompt and outputs of the request alone, up to `num_tokens` or a stop token."""
    token_ids = list(prompt)
    while len(token_ids) < num_tokens and (len(token_ids) == len(prompt) or token_ids[-1] not in stop):
        token_ids.append(next_token(token_ids))
    return token_ids


class Engine:
    """A scheduler, a fake device, and checks of every step."""

    def __init__(self, *, num_blocks, block_size=4, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64):
        self.config = EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            check_integrity=True,
        )
        self.scheduler = Scheduler(self.config)
        self.num_steps = self.num_added = 0
        self.lose_pool()

    def lose_pool(self):
        self.pool = np.full((self.config.num_blocks + 1) * self.config.block_size, -1, np.int32)

    def add(self, name, prompt, max_tokens=None, **kwargs) -> Request:
        limit = len(prompt) + (max_tokens or self.config.max_model_len)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0),
            arrival=(self.num_added,),
            max_num_tokens=min(limit, self.config.max_seq_len),
            seed=0,
            **kwargs,
        )
        self.num_added += 1
        self.scheduler.add(SequenceGroup([request]))
        return request

    def abort(self, name) -> Request | None:
        """Ends a request in any state, also between `schedule` and `update`; None if no unfinished one has this id."""
        scheduler = self.scheduler
        unfinished = scheduler.requests(scheduler.running) + scheduler.requests(scheduler.waiting)
        request = next((request for request in unfinished if request.request_id == name), None)
        if request is not None:
            scheduler.finish(request, FinishReason.ABORT)
        return request

    def run_device(self, scheduled: SchedulerOutput) -> np.ndarray:
        batch = build_batch(scheduled, self.config)
        num_tokens = int(batch.attn.query_start_loc[-1])
        assert not scheduled.copies, "each request here is alone in its group: what it shares is full"
        self.pool[batch.attn.slot_mapping[:num_tokens]] = batch.token_ids[:num_tokens]
        sampled = []
        for index in batch.logits_indices[: int(batch.num_samples)]:
            row = np.searchsorted(batch.attn.query_start_loc, index, side="right") - 1
            blocks = self.pool.reshape(-1, self.config.block_size)[batch.attn.block_tables[row]]
            sampled.append(next_token(blocks.ravel()[: batch.attn.context_lens[row]]))
        return np.array(sampled, np.int32)

    def schedule(self) -> SchedulerOutput:
        config, scheduler = self.config, self.scheduler
        before = scheduler.requests(scheduler.running)
        decoding = [request for request in before if request.num_left == 1]
        scheduled = scheduler.schedule()
        self.num_steps += 1
        batch = scheduled.num_new_tokens

        assert scheduled.num_tokens == sum(batch.values()) <= config.max_num_batched_tokens
        assert len(batch) <= config.max_num_running
        assert batch or not scheduler.has_unfinished, "nothing computed, and something to do"
        assert set(batch) == set(scheduler.requests(scheduler.running)), "a running request is starved"
        assert set(decoding) <= {*batch, *scheduled.preempted}, "a decode is starved"
        assert set(scheduled.preempted) == set(before) - set(batch)
        if before:
            assert before[0] in batch, "the oldest was preempted"
        assert not scheduled.preempted or set(batch) <= set(before), "an admission right after a preemption"
        for victim in scheduled.preempted:
            assert all(survivor.arrival < victim.arrival for survivor in batch), "not the newest was preempted"
        singles = [request.num_computed_tokens for request, n in batch.items() if n == 1]
        assert list(batch.values())[: len(singles)] == [1] * len(singles), "a chunk in front of a decode"
        assert singles == sorted(singles)
        return scheduled

    def step(self) -> list[Request]:
        scheduled = self.schedule()
        updated = self.scheduler.update(scheduled, self.run_device(scheduled)) if scheduled else []
        self.scheduler.check_integrity()
        return updated

    def run(self, max_steps=1000):
        while self.scheduler.has_unfinished:
            assert self.num_steps < max_steps, "no end in sight"
            self.step()
        self.assert_clean()

    def assert_clean(self):
        """CLEAN: nothing runs, nothing waits, every block is free."""
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert not scheduler.schedule()
        assert scheduler.allocator.num_free_blocks == self.config.num_blocks
        assert not any(scheduler.allocator.ref_count(block) for block in range(self.config.num_blocks + 1))
        scheduler.check_integrity()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def assert_reference(request: Request, num_outputs: int, reason: FinishReason = FinishReason.LENGTH):
    assert request.num_output_tokens == num_outputs
    assert request.token_ids == reference(request.prompt_token_ids, len(request.prompt_token_ids) + num_outputs)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, reason)


def test_the_fake_device_notices_a_stale_slot():
    engine = Engine(num_blocks=4)
    request = engine.add("a", prompt_of(6), max_tokens=6)
    engine.step()
    engine.pool[request.block_table.blocks[0] * 4 + 2] += 1
    engine.run()
    assert request.token_ids != reference(request.prompt_token_ids, 12)


@pytest.mark.parametrize(("budget", "num_blocks"), [(64, 9), (3, 8)])  # chunks of 3: the peak is 8
def test_b06_a_preempted_request_replays_its_outputs(budget, num_blocks):
    engine = Engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
    requests = [engine.add(str(i), prompt_of(10, i), max_tokens=10) for i in range(2)]
    streamed = {request: [] for request in requests}
    while engine.scheduler.has_unfinished:
        for request in engine.step():
            streamed[request].append(request.token_ids[-1])
    for request in requests:
        assert_reference(request, 10)
        assert streamed[request] == request.output_token_ids
        assert len(request.prompt_token_ids) == 10
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert engine.scheduler.num_preemptions == 1
    engine.assert_clean()


def test_b06_preempted_twice():
    engine = Engine(num_blocks=7)
    sizes = [(8, 5), (4, 17), (6, 8)]  # (prompt, outputs)
    requests = [engine.add(str(i), prompt_of(length, i), max_tokens=n) for i, (length, n) in enumerate(sizes)]
    engine.run()
    for request, (_, max_tokens) in zip(requests, sizes, strict=True):
        assert_reference(request, max_tokens)
    assert [request.num_preemptions for request in requests] == [0, 0, 2]


@pytest.mark.parametrize("max_tokens", [1, 4, 5])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_b12_a_pool_of_exactly_the_right_size(length, max_tokens):
    num_blocks = -(-(length + max_tokens - 1) // 4)
    engine = Engine(num_blocks=num_blocks)
    request = engine.add("a", prompt_of(length), max_tokens=max_tokens)
    engine.run()
    assert_reference(request, max_tokens)
    assert engine.scheduler.num_preemptions == 0
    assert engine.num_steps == max_tokens
    assert engine.scheduler.allocator.peak_blocks_used == num_blocks
    if num_blocks > 1:  # one block less: either refused, or the output is cut where the pool ends
        engine = Engine(num_blocks=num_blocks - 1)
        if length > 4 * (num_blocks - 1):
            with pytest.raises(ValueError, match="can never fit"):
                engine.add("a", prompt_of(length), max_tokens=max_tokens)
        else:
            request = engine.add("a", prompt_of(length), max_tokens=max_tokens)
            engine.run()
            assert_reference(request, 4 * (num_blocks - 1) + 1 - length)


def test_b13_the_edge_of_max_model_len():
    engine = Engine(num_blocks=100, max_model_len=16)
    request = engine.add("a", prompt_of(15), max_tokens=10)
    engine.run()
    assert_reference(request, 1)
    for length in (16, 17):
        with pytest.raises(ValueError, match=f"prompt has {length} tokens .* expected 1 to 15.*max_model_len is 16"):
            engine.add("b", prompt_of(length), max_tokens=10)
    with pytest.raises(ValueError, match="prompt has 0 tokens"):
        engine.add("b", [], max_tokens=10)
    engine.assert_clean()


def test_b16_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody():
    engine = Engine(num_blocks=4)
    with pytest.raises(
        ValueError, match=r"'big' can never fit: its prompt has 20 tokens \(5 blocks of 4\), .* 4 blocks"
    ):
        engine.add("big", prompt_of(20), max_tokens=1)
    request = engine.add("small", prompt_of(4), max_tokens=4)
    engine.run()
    assert_reference(request, 4)


def test_b16_an_output_that_outgrows_the_pool_ends_with_length():
    engine = Engine(num_blocks=4)
    request = engine.add("a", prompt_of(10), max_tokens=50)
    engine.run(max_steps=10)
    assert_reference(request, 7)  # 16 slots and the last token, which needs none
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_blocks", [6, 5])
def test_b17_no_livelock(num_blocks):
    engine = Engine(num_blocks=num_blocks)
    requests = [engine.add(str(i), prompt_of(8, i), max_tokens=12) for i in range(4)]
    engine.run(max_steps=150)
    for request in requests:
        assert_reference(request, 12)
    assert engine.scheduler.num_preemptions >= 1
    assert requests[0].num_preemptions == 0


def test_b18_a_long_prompt_stops_no_decode():
    engine = Engine(num_blocks=100, max_model_len=128, max_num_batched_tokens=8)
    first = engine.add("S1", prompt_of(4), max_tokens=40)
    assert engine.step() == [first]
    long = engine.add("L", prompt_of(64, 1), max_tokens=4)
    second = engine.add("S2", prompt_of(4, 2), max_tokens=4)
    for _ in range(9):  # 7 tokens of the budget are left for L: 63 after 9 steps
        assert engine.step() == [first]
    assert engine.step() == [first, long, second]  # and the rest of the tenth step is enough for S2
    engine.run()
    assert_reference(first, 40)
    assert_reference(long, 4)
    assert_reference(second, 4)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(1, 8), (3, 8), (64, 1), (8, 8)])
def test_b18_budgets_smaller_than_prompts_and_batches(budget, max_num_seqs):
    engine = Engine(num_blocks=100, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    requests = [engine.add(str(i), prompt_of(20, i), max_tokens=5) for i in range(6)]
    engine.run()
    for request in requests:
        assert_reference(request, 5)


def test_a_prompt_that_has_no_room_as_a_whole_is_not_admitted():
    """Else it would lose its first half again and again, whenever it came to the end of the pool."""
    engine = Engine(num_blocks=6, max_num_batched_tokens=8)
    first = engine.add("first", prompt_of(8), max_tokens=9)
    engine.step()
    assert list(engine.scheduler.running) == ["first"]
    second = engine.add("second", prompt_of(18, 1), max_tokens=2)
    for _ in range(7):
        engine.step()
        assert list(engine.scheduler.waiting) == ["second"]
    engine.run()
    assert_reference(first, 9)
    assert_reference(second, 2)
    assert engine.scheduler.num_preemptions == 0


def test_admission_leaves_a_block_to_grow_into_for_each_that_runs():
    engine = Engine(num_blocks=7)
    requests = [engine.add(str(i), prompt_of(8, i), max_tokens=5) for i in range(3)]
    engine.step()  # 2 + 2 blocks are taken, 3 are free: the third would need 2, and the others need 1 each next
    assert list(engine.scheduler.running) == ["0", "1"]
    engine.run()
    for request in requests:
        assert_reference(request, 5)
    assert engine.scheduler.num_preemptions == 0

    engine = Engine(num_blocks=8)
    for i in range(3):
        engine.add(str(i), prompt_of(8, i), max_tokens=5)
    engine.step()
    assert list(engine.scheduler.running) == ["0", "1", "2"]


def bring_to(state: str) -> tuple[Engine, Request]:
    """An engine with an old request that decodes, and a newer one in the given state."""
    engine = Engine(num_blocks=7, max_num_batched_tokens=12, max_num_seqs=2)
    engine.add("other", prompt_of(6), max_tokens=14)
    engine.step()
    request = engine.add("x", prompt_of(13 if state == "mid-chunk" else 8, 1), max_tokens=3 if state == "done" else 12)
    if state in ("mid-chunk", "decoding"):
        engine.step()
    if state == "preempted":
        while request.status is not RequestStatus.PREEMPTED:
            engine.step()
    if state == "done":
        while not request.is_finished:
            engine.step()
    assert "other" in engine.scheduler.running
    return engine, request


@pytest.mark.parametrize("moment", ["between steps", "between schedule and update"])
@pytest.mark.parametrize("state", ["waiting", "mid-chunk", "decoding", "preempted", "done"])
def test_b20_abort_in_every_state(state, moment):
    engine, request = bring_to(state)
    expected_status = {"waiting": "waiting", "preempted": "preempted", "done": "finished"}.get(state, "running")
    assert request.status.value == expected_status
    assert (request.num_computed_tokens == 12 - 1) == (state == "mid-chunk")
    (other,) = engine.scheduler.running["other"].requests

    scheduled = engine.schedule() if moment == "between schedule and update" else None
    token_ids = list(request.token_ids)
    assert engine.abort("x") is (None if state == "done" else request)
    assert engine.abort("x") is None
    assert engine.abort("unknown") is None
    if scheduled:
        updated = engine.scheduler.update(scheduled, engine.run_device(scheduled))
        assert updated == [other]
    engine.run()

    assert request.token_ids == token_ids, "a late result was kept"
    assert request.finish_reason is (FinishReason.LENGTH if state == "done" else FinishReason.ABORT)
    assert_reference(other, 14)


def test_b22_an_id_is_unique_while_its_request_is_unfinished():
    engine = Engine(num_blocks=20)
    first = engine.add("x", prompt_of(10), max_tokens=5)
    with pytest.raises(AssertionError, match="x is not finished"):
        engine.add("x", prompt_of(6), max_tokens=5)
    engine.step()
    with pytest.raises(AssertionError, match="x is not finished"):
        engine.add("x", prompt_of(6), max_tokens=5)

    scheduled = engine.schedule()
    sampled = engine.run_device(scheduled)
    assert engine.abort("x") is first
    second = engine.add("x", prompt_of(6, 1), max_tokens=5)
    assert engine.scheduler.update(scheduled, sampled) == []  # the first one's token does not go to the second
    engine.run()
    assert_reference(second, 5)
    third = engine.add("x", prompt_of(6, 2), max_tokens=2)
    engine.run()
    assert_reference(third, 2)


@pytest.mark.parametrize(("kind", "stop_reason"), [("eos_token_ids", False), ("stop_token_ids", True), ("both", False)])
def test_stop_tokens(kind, stop_reason):
    prompt = prompt_of(6, 1)
    stop = reference(prompt, 9)[8]
    assert stop not in reference(prompt, 8)[6:]
    names = ("eos_token_ids", "stop_token_ids") if kind == "both" else (kind,)
    engine = Engine(num_blocks=20)
    request = engine.add("a", prompt, max_tokens=3, **{name: frozenset({stop, 500}) for name in names})
    engine.run()
    assert_reference(request, 3, FinishReason.STOP)  # not "length", though the limit is reached as well
    assert request.stop_reason == (stop if stop_reason else None)


def test_a_stop_string_found_in_the_last_token_replaces_the_reason():
    engine = Engine(num_blocks=20)
    first, second = engine.add("a", prompt_of(6), max_tokens=1), engine.add("b", prompt_of(6, 1), max_tokens=5)
    assert engine.step() == [first, second]
    assert first.finish_reason == "length"
    again = engine.add("a", prompt_of(6, 2), max_tokens=2)
    engine.scheduler.finish(first, FinishReason.STOP, "end")
    engine.scheduler.finish(second, FinishReason.STOP, "end")
    for request in (first, second):
        assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == ("stop", "end", 1)
    engine.run()
    assert_reference(again, 2)


def test_a_lost_pool_is_recomputed():
    engine = Engine(num_blocks=20, max_num_batched_tokens=12)
    requests = [engine.add(str(i), prompt_of(7, i), max_tokens=6) for i in range(3)]
    engine.step()
    engine.step()
    assert [request.num_computed_tokens for request in requests] == [8, 7, 7]
    scheduled = engine.schedule()
    engine.scheduler.preempt_all()
    engine.lose_pool()
    assert engine.scheduler.update(scheduled, [1, 2, 3]) == []  # late results are dropped, if there are any
    assert engine.scheduler.requests(engine.scheduler.waiting) == requests
    assert engine.scheduler.allocator.num_free_blocks == 20
    engine.run()
    for request in requests:
        assert_reference(request, 6)


def test_the_order_in_a_batch():
    engine = Engine(num_blocks=50, max_num_batched_tokens=20)
    a = engine.add("a", prompt_of(9), max_tokens=9)
    b = engine.add("b", prompt_of(4, 1), max_tokens=9)
    engine.step()
    c = engine.add("c", prompt_of(5, 2), max_tokens=9)
    d = engine.add("d", prompt_of(30, 3), max_tokens=9)
    scheduled = engine.schedule()
    assert scheduled.num_new_tokens == {b: 1, a: 1, c: 5, d: 13}
    assert list(scheduled.num_new_tokens) == [b, a, c, d]
    assert scheduled.sampling == [b, a, c]
    assert scheduled.num_tokens == 20
    assert scheduled.preempted == []


def test_a_sample_too_few_is_an_error():
    engine = Engine(num_blocks=20)
    engine.add("a", prompt_of(6), max_tokens=5)
    with pytest.raises(ValueError, match="shorter"):
        engine.scheduler.update(engine.scheduler.schedule(), [])


@dataclass
class Plan:
    """One request of a drawn workload; steps are counted from the start."""

    arrival_step: int
    prompt: list[int]
    max_tokens: int
    eos: frozenset[int]
    abort_step: int | None
    abort_in_step: bool


plans = st.builds(
    Plan,
    arrival_step=st.integers(0, 30),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 30),
    eos=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=4),
    abort_step=st.none() | st.integers(0, 60),
    abort_in_step=st.booleans(),
)


@given(
    workload=st.lists(plans, min_size=1, max_size=10),
    num_blocks=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(2, 64),
    failing_steps=st.frozensets(st.integers(0, 40), max_size=2),
)
def test_any_workload(workload, num_blocks, block_size, budget, max_num_seqs, max_model_len, failing_steps):
    engine = Engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    scheduler, requests = engine.scheduler, {}
    # The oldest goes on in every step that does not fail, so each request ends soon after it has become the oldest.
    limit = 31 + len(failing_steps) * 65 + sum(len(plan.prompt) + plan.max_tokens for plan in workload)
    for step in range(limit):
        for i, plan in enumerate(workload):
            if plan.arrival_step == step:
                if len(plan.prompt) < engine.config.max_seq_len:
                    requests[i] = engine.add(str(i), plan.prompt, plan.max_tokens, eos_token_ids=plan.eos)
                else:
                    with pytest.raises(ValueError, match="can never fit"):
                        engine.add(str(i), plan.prompt, plan.max_tokens)
        aborts = [i for i in requests if workload[i].abort_step == step]
        for i in aborts:
            if not workload[i].abort_in_step:
                engine.abort(str(i))
        scheduled = engine.schedule()
        if step in failing_steps:
            scheduler.preempt_all()
            engine.lose_pool()
        sampled = engine.run_device(scheduled) if scheduled and step not in failing_steps else []
        for i in aborts:
            engine.abort(str(i))
        if step not in failing_steps:
            updated = scheduler.update(scheduled, sampled)
            assert updated == [r for r in scheduled.sampling if r.finish_reason is not FinishReason.ABORT]
        scheduler.check_integrity()
        if step > 30 and not scheduler.has_unfinished:
            break
    engine.assert_clean()

    for i, request in requests.items():
        plan = workload[i]
        expected = reference(plan.prompt, min(len(plan.prompt) + plan.max_tokens, engine.config.max_seq_len), plan.eos)
        if request.finish_reason is FinishReason.ABORT:
            assert plan.abort_step is not None
            assert request.token_ids == expected[: request.num_tokens]
        else:
            assert request.token_ids == expected
            assert request.finish_reason == ("stop" if expected[-1] in plan.eos else "length")
