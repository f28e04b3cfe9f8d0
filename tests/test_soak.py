"""The soak test, for a few turns: nothing is wrong, and whatever is planted is found."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from test_sharing_benchmark import load
from tiny_engine import prompt_of, tiny_engine

from pagedjax import SamplingParams

soak, soak_check, soak_user, soak_watch = map(load, ("soak", "soak_check", "soak_user", "soak_watch"))


@pytest.fixture
def setup(monkeypatch):
    """Two engines and the reference, for short rounds."""
    monkeypatch.setattr(soak, "TURNS_PER_ROUND", 40)
    return soak.set_up("tiny", seed=3, warm_up=False)


def run(setup: Any) -> list[str]:
    """A round of requests."""
    watch = soak_watch.Watch()
    try:
        return soak.soak(setup, watch, lambda num_results: True)
    finally:
        watch.close()


@pytest.mark.slow
def test_a_short_soak_finds_nothing(setup):
    assert run(setup) == []
    assert setup.reference.num_checked >= 30
    counts = setup.users[0].counts + setup.users[1].counts
    assert counts.keys() >= {"greedy", "seeded", "penalties", "logprobs", "n > 1", "beams", "forks", "streams"}
    assert sum(user.engine.stats().num_preemptions for user in setup.users) > 0


def test_a_wrong_token_is_reported(setup):
    scheduler, count = setup.users[0].engine.scheduler, 0
    resolve = scheduler.resolve

    def wrong(scheduled: Any, sampled: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        if count % 5 == 0:
            sampled = [[token ^ 1 for token in each] if scheduled.num_decodes else each ^ 1 for each in sampled]
        return resolve(scheduled, sampled, *others)

    scheduler.resolve = wrong
    problems = run(setup)
    assert any("swap: " in problem and "instead of" in problem for problem in problems)
    assert not any("recompute: " in problem for problem in problems)


def test_a_leak_is_reported(setup):
    scheduler = setup.users[1].engine.scheduler
    scheduler.allocator.allocate()
    problems = run(setup)
    assert all(problem.startswith("recompute: check_integrity") for problem in problems)
    assert problems


def test_what_an_idle_engine_keeps_is_reported(setup):
    user = setup.users[0]
    user.engine.runner.host_pool._blocks[1] = np.zeros(8, np.float32)
    user.engine.inboxes["x"] = []
    assert soak_check.leftovers(user) == [
        "swap: 32 bytes of the host pool are left when all has ended",
        "swap: 1 inboxes are left when all has ended",
    ]


def test_the_process_is_watched():
    watch = soak_watch.Watch()
    assert soak_watch.rss_mb() > 10
    watch.rss_mb.extend([500.0] * 20 + [100.0] * 30 + [110.0] * 30 + [120.0] * 30)
    assert watch.thirds_mb() == pytest.approx((100.0, 120.0), abs=5)
    engine = tiny_engine()
    engine.add_request(prompt_of(3), SamplingParams(max_tokens=1))
    jax.jit(lambda x: x * 5 + 1)(np.float32(1))
    found = watch.wrong(16.0)
    watch.close()
    assert len(found) == 3
    assert "the memory grew from" in found[0]
    assert "programs were compiled" in found[1]
    assert "are alive" in found[2]
    jax.jit(lambda x: x * 7 + 1)(np.float32(1))
    assert f"{watch.num_compiles} programs" in found[1]


def test_near_ties_are_told_from_wrong_tokens():
    """The reference takes a token for a tie if moving the logits by the tolerance gives it."""
    reference = soak_check.Reference(SimpleNamespace(engine=tiny_engine(enable_prefix_caching=False)))
    asked = soak_user.Asked("greedy", prompt_of(5), SamplingParams(temperature=0.0, max_tokens=4))
    expected = reference._alone(asked, [])
    done = soak_user.Done(asked, expected, is_whole=True)
    assert reference.check(done) is None
    assert reference.num_near_ties == 0
    expected.outputs[0].token_ids[2] ^= 1
    assert "from place 2 on" in (reference.check(done) or "")
    runner_up = reference._alone(asked, [], {expected.outputs[0].token_ids[1]: -100.0}).outputs[0].token_ids[1]
    assert runner_up != expected.outputs[0].token_ids[1]


@pytest.mark.parametrize("wrong", [[], ["planted"]])
def test_the_command_ends_with_1_if_anything_is_wrong(wrong, setup, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(soak, "set_up", lambda *_: setup)
    monkeypatch.setattr(soak, "soak", lambda setup, watch, is_over: watch.sample() or list(wrong))
    assert soak.main(["--requests", "1", "--output", str(tmp_path)]) == len(wrong)
    text = capsys.readouterr().out
    assert ("- planted" in text) == bool(wrong)
    assert ("Nothing was wrong." in text) != bool(wrong)
    assert (tmp_path / "soak.json").exists()
