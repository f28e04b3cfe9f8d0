"""The baselines of the benchmarks: the buddy allocator, what policies reserve, and a server's clock by hand."""

import pytest
from benchmark_scripts import load
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import SimulatedRequest, StepCost

contiguous, server = load("contiguous"), load("contiguous_server")

COST = StepCost(base_s=1.0, s_per_token=0.25, s_per_sequence=0.5, s_per_context_token=0.125)


# --- the buddy allocator


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 80))))
def test_regions_never_overlap_and_coalesce_fully(num_slots, actions):
    memory = contiguous.BuddyAllocator(num_slots)
    whole, held = memory.free_regions(), []
    for allocates, number in actions:
        if allocates:
            largest = max((region.size for region in memory.free_regions()), default=0)
            region = memory.allocate(number)
            assert (region is None) == (largest < number)
            if region is not None:
                assert number <= region.size < 2 * number
                held.append(region)
        elif held:
            memory.free(held.pop(number % len(held)))
        memory.check_integrity(held)
    for region in held:
        memory.free(region)
    memory.check_integrity([])
    assert memory.free_regions() == whole


def test_buddies_by_hand():
    memory = contiguous.BuddyAllocator(24)  # 16 + 8
    assert memory.free_regions() == [(0, 16), (16, 8)]
    regions = [memory.allocate(size) for size in (3, 5, 9, 8)]
    assert regions == [(16, 4), (0, 8), None, (8, 8)]
    assert memory.num_allocated_slots == 20
    memory.free(regions[1])
    assert memory.free_regions() == [(0, 8), (20, 4)]
    memory.free(regions[3])
    memory.free(regions[0])
    assert memory.free_regions() == [(0, 16), (16, 8)]


def test_a_lost_region_is_found():
    memory = contiguous.BuddyAllocator(8)
    region = memory.allocate(4)
    with pytest.raises(AssertionError, match="lost"):
        memory.check_integrity([])
    with pytest.raises(AssertionError, match="two regions"):
        memory.check_integrity([region, region])


# --- policies


@pytest.mark.parametrize(("output_len", "reserved"), [(1, 1), (2, 2), (25, 32), (32, 32), (33, 64)])
def test_pow2_reserves_the_next_power_of_two(output_len, reserved):
    """25 is the paper's example."""
    assert contiguous.policies(2048)["Pow2"](100, output_len) == 100 + reserved


def test_policies_stay_within_the_model():
    policies = contiguous.policies(2048)
    assert {name: policy(1000, 1040) for name, policy in policies.items()} == {
        "Oracle": 2040,
        "Pow2": 2048,
        "Max": 2048,
    }


# --- the server


def request(arrival_s, prompt, output_len):
    return SimulatedRequest(arrival_s=arrival_s, prompt=prompt, output_len=output_len)


def test_a_clock_by_hand_is_that_of_the_simulator():
    """The case of `test_simulation.py`: with room for all, both serve alike."""
    requests = [request(0.0, 5, 3), request(1.0, 4, 2), request(20.0, 1, 1)]
    result = server.ContiguousServer(contiguous.policies(64)["Oracle"], 64, COST).run(requests)
    assert result.first_token_s.tolist() == [3.375, 7.875, 21.875]
    assert result.finish_s.tolist() == [11.875, 11.875, 21.875]
    assert (result.num_steps, result.mean_requests_per_step) == (4, 6 / 4)


def test_who_comes_first_waits_for_its_region():
    """16 slots: A has 8, B needs 16 and waits for them, C would fit and waits behind B."""
    uses = []
    oracle = server.ContiguousServer(
        contiguous.policies(16)["Oracle"], 16, StepCost(base_s=1.0), observe=lambda *use: uses.append(use)
    )
    result = oracle.run([request(0.0, 3, 2), request(0.0, 10, 2), request(0.0, 1, 1)])
    assert result.first_token_s.tolist() == [1, 3, 5]
    assert result.finish_s.tolist() == [2, 4, 5]
    # A: 3 of 5 tokens, in a region of 8; then 4 of 5. B: 10 and 11 of 12, in 16. C: 1 of 2.
    assert [tuple(use) for use, _ in uses] == [
        (3, 2, 0, 3, 8),
        (4, 1, 0, 3, 8),
        (10, 2, 0, 4, 0),
        (11, 1, 0, 4, 0),
        (1, 1, 0, 0, 14),
    ]
    assert [is_blocked for _, is_blocked in uses] == [True, True, True, True, False]
    oracle.memory.check_integrity([])


def test_what_is_reserved_for_nothing():
    """Max: 16 slots for 3 + 2 tokens."""
    uses = []
    largest = server.ContiguousServer(
        contiguous.policies(16)["Max"], 24, StepCost(base_s=1.0), observe=lambda *use: uses.append(use)
    )
    largest.run([request(0.0, 3, 2)])
    assert [tuple(use) for use, _ in uses] == [(3, 2, 11, 0, 8), (4, 1, 11, 0, 8)]


def test_a_step_has_a_budget():
    """Of two prompts of 30 tokens one fits the budget of 32; one of 40 comes alone."""
    oracle = server.ContiguousServer(
        contiguous.policies(256)["Oracle"], 256, StepCost(base_s=1.0), max_num_batched_tokens=32
    )
    result = oracle.run([request(0.0, 30, 1), request(0.0, 30, 1), request(0.0, 40, 1)])
    assert result.finish_s.tolist() == [1, 2, 3]


def test_a_batch_has_a_limit():
    oracle = server.ContiguousServer(contiguous.policies(64)["Oracle"], 64, StepCost(base_s=1.0), max_num_seqs=2)
    result = oracle.run([request(0.0, 1, 2)] * 3)
    assert result.finish_s.tolist() == [2, 2, 4]


def test_what_can_never_fit_is_a_mistake():
    with pytest.raises(AssertionError, match="request 0 can never fit"):
        server.ContiguousServer(contiguous.policies(64)["Max"], 32, COST).run([request(0.0, 1, 1)])
