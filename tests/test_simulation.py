"""The simulator: its clock by hand and against a slow loop over the scheduler, what it counts, what it keeps."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import SamplingParams, SimulatedRequest, StepCost, StepLoad, poisson_requests, simulate
from pagedjax.config import EngineConfig
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.simulation.timeline import TimelineRecorder
from pagedjax.simulation.workload import prompt_of_blocks

COST = StepCost(base_s=1.0, s_per_token=0.25, s_per_sequence=0.5, s_per_context_token=0.125)
SECOND = StepCost(base_s=1.0)


def config(num_blocks: int = 16, **options: Any) -> EngineConfig:
    sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    return EngineConfig(num_blocks=num_blocks, **{**sizes, "check_integrity": True, **options})


def request(arrival_s: float, prompt: Any, output_len: int, n: int = 1) -> SimulatedRequest:
    return SimulatedRequest(arrival_s=arrival_s, prompt=prompt, output_len=output_len, n=n)


# --- the clock


def test_a_tiny_case_by_hand():
    """Seconds of a step: 1 + tokens/4 + sequences/2 + context/8.

    A (5 tokens in, 3 out) comes at 0, B (4 in, 2 out) at 1, C (1 in, 1 out) long after.
    Step 1: A's prompt, 5 tokens of 5: 1 + 1.25 + 0.5 + 0.625 = 3.375.
    Step 2: A's 6th and B's prompt: 5 tokens, 2 sequences, a context of 10: 1 + 1.25 + 1 + 1.25 = 4.5, until 7.875.
    Step 3: A's 7th and B's 5th: 2 tokens, a context of 12: 1 + 0.5 + 1 + 1.5 = 4, until 11.875; both are done.
    Step 4: C, from 20 on: 1 + 0.25 + 0.5 + 0.125 = 1.875.
    """
    result = simulate([request(0.0, 5, 3), request(1.0, 4, 2), request(20.0, 1, 1)], config(), COST)
    assert result.first_token_s.tolist() == [3.375, 7.875, 21.875]
    assert result.finish_s.tolist() == [11.875, 11.875, 21.875]
    assert result.ttft_s.tolist() == [3.375, 6.875, 1.875]
    assert result.normalized_latency_s.tolist() == [11.875 / 3, 10.875 / 2, 1.875]
    assert (result.num_steps, result.num_computed_tokens, result.end_s) == (4, 13, 21.875)
    assert result.mean_requests_per_step == 6 / 4
    timeline = result.timeline
    assert timeline.end_s.tolist() == [3.375, 7.875, 11.875, 20.0, 21.875]
    assert timeline.num_requests.tolist() == [1, 2, 2, 0, 1]
    assert timeline.num_used_blocks.tolist() == [2, 3, 4, 0, 1]
    assert timeline.num_context_tokens.tolist() == [5, 10, 12, 0, 1]
    assert timeline.num_empty_slots.tolist() == [3, 2, 4, 0, 3]
    assert timeline.mean("num_requests") == pytest.approx((3.375 + 2 * 8.5 + 1.875) / 21.875)


def test_any_function_of_the_load_is_a_step_time():
    loads = []

    def step_time(load: StepLoad) -> float:
        loads.append(load)
        return 0.5

    result = simulate([request(0.0, 40, 2), request(0.0, 3, 2)], config(), step_time)
    # The budget is 32: the rest of the long prompt comes with the short one.
    assert loads == [StepLoad(32, 1, 32), StepLoad(11, 2, 43), StepLoad(2, 2, 45)]
    assert result.first_token_s.tolist() == [1.0, 1.0]
    assert result.finish_s.tolist() == [1.5, 1.5]


def slow_times(requests: list[SimulatedRequest], config: EngineConfig, cost: StepCost) -> dict[str, list[Any]]:
    """The same, plainly: every request waits in the scheduler from its arrival on, and each step asks each request."""
    scheduler, now, token = Scheduler(config), 0.0, 0
    first, finish = [math.nan] * len(requests), [math.nan] * len(requests)
    sequences: list[Request] = []
    empty, batches = [], []
    num_added = 0
    while num_added < len(requests) or scheduler.has_unfinished:
        while num_added < len(requests) and (requests[num_added].arrival_s <= now or not scheduler.has_unfinished):
            each, now = requests[num_added], max(now, requests[num_added].arrival_s)
            assert isinstance(each.prompt, list)
            params = SamplingParams(n=each.n, max_tokens=each.output_len)
            length = len(each.prompt) + each.output_len
            group = [
                Request(f"{num_added}-{k}", each.prompt, params, (num_added, k), length, num_added)
                for k in range(each.n)
            ]
            sequences += group
            scheduler.add(SequenceGroup(group))
            num_added += 1
        step = scheduler.schedule()
        tables = [sequence.block_table for sequence in sequences if not sequence.block_table.is_freed]
        held: dict[int, int] = {}
        for block_table in tables:
            for i, block in enumerate(block_table.blocks):
                filled = min(config.block_size, block_table.num_tokens - i * config.block_size)
                held[block] = max(held.get(block, 0), filled)
        empty.append(len(held) * config.block_size - sum(held.values()))
        batches.append(len({sequence.seed for sequence in sequences if sequence.status.value == "running"}))
        context = sum(sequence.num_computed_tokens + new for sequence, new in step.num_new_tokens.items())
        now += cost(StepLoad(step.num_tokens, len(step.num_new_tokens), context))
        scheduler.update(step, [token := token + 1 for _ in step.sampling])
        for sequence in sequences:
            index = sequence.seed
            if sequence.num_output_tokens and math.isnan(first[index]):
                first[index] = now
            is_done = all(other.is_finished for other in sequences if other.seed == index)
            if is_done and math.isnan(finish[index]):
                finish[index] = now
    return {
        "first": first,
        "finish": finish,
        "empty": empty,
        "batches": batches,
        "preemptions": [scheduler.num_preemptions],
        "steps": [len(batches)],
    }


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, list[int], int, int]]:
    """Arrivals, prompts that share beginnings, output lengths and completions, in bursts and far apart."""
    now, requests = 0.0, []
    for i in range(draw(st.integers(1, 7))):
        now += draw(st.sampled_from([0.0, 0.5, 8.0, 200.0]))
        shared = [draw(st.integers(1, 2))] * draw(st.integers(0, 12))
        prompt = [*shared, *range(100 * i + 10, 100 * i + 10 + draw(st.integers(1, 20)))]
        requests.append((now, prompt, draw(st.integers(1, 20)), draw(st.sampled_from([1, 1, 1, 3]))))
    return requests


@given(workloads(), st.integers(13, 40), st.booleans(), st.sampled_from([3, 8]))
def test_it_agrees_with_a_slow_loop(drawn, num_blocks, caches, max_num_seqs):
    requests = [request(*each) for each in drawn]
    sizes = config(num_blocks, enable_prefix_caching=caches, max_num_seqs=max_num_seqs)
    expected = slow_times(requests, sizes, COST)
    batches = []

    def observe(now: float, scheduler: Scheduler, step: Any) -> None:
        batches.append(len({each.seed for each in scheduler.requests(scheduler.running)}))

    result = simulate(requests, sizes, COST, observe=observe)
    assert result.first_token_s.tolist() == expected["first"]
    assert result.finish_s.tolist() == expected["finish"]
    assert [result.num_preemptions] == expected["preemptions"]
    assert [result.num_steps] == expected["steps"]
    assert batches == expected["batches"]
    is_busy = result.timeline.num_requests > 0
    assert result.timeline.num_empty_slots[is_busy] == pytest.approx(np.array(expected["empty"]))


def test_the_same_arguments_give_the_same_result():
    lengths = np.random.default_rng(0).integers(1, 30, (30, 2)).tolist()
    one, two, other = (simulate(poisson_requests(lengths, 0.5, seed=seed), config(), COST) for seed in (3, 3, 4))
    assert one.finish_s.tolist() == two.finish_s.tolist()
    assert one.num_preemptions == two.num_preemptions > 0
    assert one.finish_s.tolist() != other.finish_s.tolist()


# --- sharing


def test_a_prompt_is_computed_once_for_its_completions():
    result = simulate([request(0.0, 8, 3, n=4)], config(), SECOND)
    # All four first tokens come from one row, then each computes two more.
    assert (result.num_computed_tokens, result.num_steps) == (8 + 4 * 2, 3)
    assert result.timeline.num_used_blocks.tolist() == [2, 2 + 4, 2 + 4]
    assert result.timeline.num_empty_slots.tolist() == [0, 12, 8]


def test_prefix_cache_hits_are_counted():
    """Prompts of 12 tokens of which 8, two blocks, are alike; the first one computes all."""
    prompts = [[7] * 8 + [100 + i] * 4 for i in range(3)]
    result = simulate([request(10.0 * i, prompt, 2) for i, prompt in enumerate(prompts)], config(), SECOND)
    assert (result.num_lookup_tokens, result.num_cached_tokens) == (36, 16)
    assert result.num_computed_tokens == 3 * 13 - 16
    off = simulate(
        [request(10.0 * i, prompt, 2) for i, prompt in enumerate(prompts)],
        config(enable_prefix_caching=False),
        SECOND,
    )
    assert (off.num_lookup_tokens, off.num_cached_tokens, off.num_computed_tokens) == (0, 0, 39)


def test_prompts_given_by_length_share_nothing():
    result = simulate([request(10.0 * i, 12, 2) for i in range(3)], config(), SECOND)
    assert (result.num_lookup_tokens, result.num_cached_tokens) == (36, 0)


def test_outputs_share_nothing():
    """Two requests of the same prompt, the second preempted: it finds the prompt again, and not the other's output."""
    prompt = list(range(8))
    result = simulate([request(0.0, prompt, 20), request(1.0, prompt, 20)], config(num_blocks=9), SECOND)
    assert result.num_preemptions > 0
    # Computed again is what it generated. The last token of a prompt is computed always, so one block is found.
    assert result.num_cached_tokens == 4
    assert result.num_computed_tokens > 2 * 27 - 4


def test_prompts_by_the_names_of_their_blocks():
    assert prompt_of_blocks([5, 9], 6, 4) == [5, 5, 5, 5, 9, 9]
    with pytest.raises(ValueError, match=r"names must have one for each of the 2 blocks of 4 .* got 3"):
        prompt_of_blocks([1, 2, 3], 6, 4)


def test_swap_is_work_too():
    """Two requests that outgrow the pool: what is swapped comes back, and nothing is computed again."""
    loads = []

    def step_time(load: StepLoad) -> float:
        loads.append(load)
        return COST(load)

    requests = [request(0.0, 8, 20), request(0.0, 8, 20)]
    result = simulate(requests, config(num_blocks=9, preemption="swap", num_swap_blocks=9), step_time)
    assert result.num_preemptions == 1
    assert result.num_computed_tokens == 2 * 27
    assert [load.num_swapped_blocks for load in loads if load.num_swapped_blocks] == [4, 4]
    again = simulate(requests, config(num_blocks=9, enable_prefix_caching=False), COST)
    assert again.num_computed_tokens > 2 * 27


# --- wrong input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": -1.0}, "arrival_s"),
        ({"arrival_s": math.nan}, "arrival_s"),
        ({"prompt": 0}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [3, -1]}, "prompt"),
        ({"prompt": [3, 2**29]}, "prompt"),
        ({"output_len": 0}, "output_len"),
        ({"n": 0}, "n must"),
    ],
)
def test_a_bad_request_names_its_field(change, message):
    with pytest.raises(ValueError, match=message):
        SimulatedRequest(**{"arrival_s": 0.0, "prompt": 1, "output_len": 1, **change})


@pytest.mark.parametrize(
    "name", ["base_s", "s_per_token", "s_per_sequence", "s_per_context_token", "s_per_swapped_block"]
)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_bad_cost_names_its_field(name, value):
    with pytest.raises(ValueError, match=name):
        StepCost(**{"base_s": 1.0, name: value})


def test_a_step_takes_time():
    with pytest.raises(ValueError, match="base_s must be more than 0"):
        StepCost(base_s=0.0)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="step_time must give seconds above 0"):
            simulate([request(0.0, 1, 1)], config(), lambda _, seconds=seconds: seconds)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_bad_rate_is_refused_at_once(rate):
    with pytest.raises(ValueError, match="request_rate"):
        poisson_requests([(1, 1)], rate)


def test_requests_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"requests\[1\].arrival_s must be in order, got 1.0 after 2.0"):
        simulate([request(2.0, 1, 1), request(1.0, 1, 1)], config(), SECOND)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match=r"requests\[1\]: prompt and output_len are 30 \+ 36 tokens, .* than 64 fit"):
        simulate([request(0.0, 1, 1), request(0.0, 30, 36)], config(), SECOND)
    with pytest.raises(ValueError, match=r"than 9 fit: num_blocks=2 of block_size=4"):
        simulate([request(0.0, 5, 5)], config(num_blocks=2), SECOND)


def test_steps_of_several_tokens_are_refused():
    with pytest.raises(ValueError, match="num_decode_steps must be 1 in a simulation, got 4"):
        simulate([request(0.0, 1, 1)], config(num_decode_steps=4), SECOND)


def test_nothing_to_do():
    result = simulate([], config(), SECOND)
    assert (len(result.finish_s), result.num_steps, result.end_s, result.timeline.mean("num_requests")) == (0, 0, 0, 0)


# --- arrivals and memory


def test_gaps_are_exponential():
    requests = list(poisson_requests([(1, 1)] * 4000, 5.0))
    gaps = np.diff([each.arrival_s for each in requests])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_a_timeline_stays_short_and_loses_nothing():
    recorder = TimelineRecorder(max_stretches=4)
    for i in range(1, 101):
        recorder.add((0.5 * i, i, 0, 0, 2 * i, 0))
    timeline = recorder.timeline()
    assert 4 <= len(timeline.seconds) <= 9
    assert timeline.seconds.sum() == timeline.end_s[-1] == 0.5 * 5050
    squares = 100 * 101 * 201 / 6
    assert timeline.mean("num_requests") == pytest.approx(squares / 5050)
    assert timeline.mean("num_context_tokens") == pytest.approx(2 * squares / 5050)


MEMORY = """
import tracemalloc
from pagedjax import EngineConfig, SimulatedRequest, StepCost, simulate

def peak(num_requests):
    config = EngineConfig(num_blocks=256, max_model_len=64, max_num_seqs=64)
    requests = (SimulatedRequest(arrival_s=0.0, prompt=20, output_len=2) for _ in range(num_requests))
    tracemalloc.start()
    simulate(requests, config, StepCost(base_s=1.0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most

peak(200)
print(peak(4000) - peak(1000))
"""


def test_memory_is_that_of_the_result():
    """3,000 requests more, all there from the start, cost 40 bytes each in the result, twice while that is made. One
    that is kept, its tokens, its list or its names would cost 500. By itself, as the type checks allocate too."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 3000 * 150
