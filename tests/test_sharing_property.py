"""Whatever is shared, copied, cached, forked or preempted: every output is that of its request alone."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import (
    MAX_MODEL_LEN,
    POOL_BLOCKS,
    VOCAB_SIZE,
    assert_clean,
    assert_greedy,
    dense_logits,
    fill_pool,
    prompt_of,
    reference,
    tiny_engine,
)

from pagedjax.beams.params import BeamSearchParams
from pagedjax.beams.search import BeamSearch
from pagedjax.engine import LLMEngine
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling.params import SamplingParams

TEMPERATURE = 20.0
LOGPROB_TOLERANCE = 2e-3  # logits are up to about 100 here: tests/tiny_engine.py
COMMON = prompt_of(30, seed=9)


@dataclass(frozen=True)
class Plan:
    """One request of a drawn workload; steps are counted from the start."""

    prompt: tuple[int, ...]
    kind: str
    """"greedy", "seeded" or "beams"."""
    n: int
    """Completions, or beams."""
    max_tokens: int
    length_penalty: float = 1.0
    arrival_step: int = 0
    abort_step: int | None = None
    fork_step: int | None = None
    """When it is forked, if it can be then; the fork may get tokens appended."""
    appended: tuple[int, ...] = ()

    @cached_property
    def params(self) -> SamplingParams | BeamSearchParams:
        match self.kind:
            case "greedy":
                return SamplingParams(temperature=0.0, n=self.n, max_tokens=self.max_tokens)
            case "seeded":
                options = {"temperature": TEMPERATURE, "seed": 7, "logprobs": 0}
                return SamplingParams(n=self.n, max_tokens=self.max_tokens, **options)
        return BeamSearchParams(beam_width=self.n, max_tokens=self.max_tokens, length_penalty=self.length_penalty)


@dataclass
class Run:
    """What a workload gave."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    forks: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Fork -> the request it comes from, and how many of its tokens were there or appended by then."""
    engine: LLMEngine | None = None


def run_workload(workload: list[Plan], engine: LLMEngine, fill: float = np.nan) -> Run:
    fill_pool(engine, fill)
    run = Run(engine=engine)
    last_arrival = max(plan.arrival_step for plan in workload)
    for step in range(3000):
        for i, plan in enumerate(workload):
            if plan.arrival_step == step:
                engine.add_request(plan.prompt, plan.params, str(i))
            if plan.fork_step == step and str(i) in engine.outputs.groups:
                fork_for(engine, run, str(i), plan)
            if plan.abort_step == step and (output := engine.abort(str(i))) is not None:
                run.outputs[str(i)] = output
        for output in engine.step():
            assert output.request_id not in run.outputs, "an output after the last one"
            if output.finished:
                run.outputs[output.request_id] = output
        engine.scheduler.check_integrity()
        if step >= last_arrival and not engine.has_unfinished():
            assert_clean(engine)
            return run
    raise AssertionError("no end in sight")


def fork_for(engine: LLMEngine, run: Run, request_id: str, plan: Plan) -> None:
    fork = engine.fork(request_id, new_id=f"fork of {request_id}")
    (completion,) = engine.outputs.groups[request_id].completions
    num_known = completion.request.num_output_tokens
    if plan.appended and num_known + len(plan.appended) < completion.request.max_num_tokens - len(plan.prompt):
        engine.append(fork, plan.appended)
        num_known += len(plan.appended)
    run.forks[fork] = (request_id, num_known)


def check_outputs(workload: list[Plan], run: Run, max_seq_len: int) -> None:
    outputs = dict(run.outputs)
    for i, plan in enumerate(workload):
        output = outputs.pop(str(i))
        max_tokens = min(plan.max_tokens, max_seq_len - len(plan.prompt))
        assert output.prompt_token_ids == list(plan.prompt)
        assert output.num_cached_tokens < len(plan.prompt)
        if plan.kind == "beams":
            check_beams(plan, output, max_tokens)
            continue
        assert len(output.outputs) == plan.n
        for completion in output.outputs:
            check_completion(plan, completion, max_tokens)
            if plan.kind == "seeded":
                ids = completion.token_ids
                assert ids == seeded_reference(plan.prompt, 7, completion.index)[: len(ids)]
    for fork, (request_id, num_known) in run.forks.items():
        plan = workload[int(request_id)]
        (completion,) = outputs.pop(fork).outputs
        max_tokens = min(plan.max_tokens, max_seq_len - len(plan.prompt))
        check_completion(plan, completion, max_tokens, num_known=num_known)
    assert not outputs


def check_completion(plan: Plan, completion: CompletionOutput, max_tokens: int, num_known: int = 0) -> None:
    """The first `num_known` tokens were not its own choice."""
    ids = completion.token_ids
    if plan.kind == "greedy":
        assert_greedy([*plan.prompt, *ids[:num_known]], ids[num_known:])
    if completion.logprobs is not None:
        reported = [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
        np.testing.assert_allclose(reported, teacher_forced(plan.prompt, ids), atol=LOGPROB_TOLERANCE)
    if completion.finish_reason == "length":
        assert len(ids) == max_tokens
    else:
        assert completion.finish_reason == "abort"
        assert len(ids) < max_tokens


def check_beams(plan: Plan, output: RequestOutput, max_tokens: int) -> None:
    if output.outputs[0].finish_reason == "abort":
        return
    expected = beam_reference(plan.prompt, plan.params, max_tokens)
    assert [found.score for found in output.outputs] == pytest.approx([score for _, score in expected], abs=2e-3)
    for i, (found, (token_ids, score)) in enumerate(zip(output.outputs, expected, strict=True)):
        is_tie = any(abs(score - other) < 4e-3 for j, (_, other) in enumerate(expected) if j != i)
        assert is_tie or found.token_ids == list(token_ids)
        total = sum(teacher_forced(plan.prompt, found.token_ids))
        assert found.cumulative_logprob == pytest.approx(total, abs=2e-2)
    assert len({tuple(found.token_ids) for found in output.outputs}) == len(output.outputs), "beams are not distinct"


def teacher_forced(prompt: tuple[int, ...], ids: list[int]) -> list[float]:
    """Log-probability of each of `ids` by the dense model, given all before it."""
    if not ids:
        return []
    logits = dense_logits([*prompt, *ids])[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return (logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(axis=-1))).tolist()


def seeded_reference(prompt: tuple[int, ...], seed: int, index: int) -> list[int]:
    params = SamplingParams(temperature=TEMPERATURE, seed=seed, n=index + 1, max_tokens=16)
    return reference(prompt, params, index)


@lru_cache(maxsize=10_000)
def beam_reference(
    prompt: tuple[int, ...], params: BeamSearchParams, max_tokens: int
) -> list[tuple[tuple[int, ...], float]]:
    """The slow, obvious search: each beam's whole sequence through the dense model for each token."""
    search = BeamSearch(params, frozenset(), max_tokens)
    while not search.is_done:
        totals = []
        for ids, score in zip(search.token_ids, search.scores, strict=True):
            logits = dense_logits([*prompt, *ids])[-1].astype(np.float64)
            totals.append(score + logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        flat = np.concatenate(totals)
        best = np.argsort(-flat, kind="stable")[: search.num_candidates]
        search.advance(flat[best].tolist(), (best // VOCAB_SIZE).tolist(), (best % VOCAB_SIZE).tolist())
    return [(found.token_ids, found.score) for found in search.hypotheses()]


prompts = st.builds(
    lambda num_common, own: (*COMMON[:num_common], *own),
    st.sampled_from([0, 3, 8, 16, 30]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kind = draw(st.sampled_from(["greedy", "seeded", "beams"]))
    n = draw(st.integers(1, 4))
    can_fork, can_append = kind != "beams" and n == 1, kind == "greedy"
    return Plan(
        prompt=draw(prompts),
        kind=kind,
        n=n,
        max_tokens=draw(st.integers(1, 8 if kind == "beams" else 16)),
        length_penalty=draw(st.sampled_from([1.0, 0.0])),
        arrival_step=draw(st.integers(0, 12) | st.just(0)),
        abort_step=draw(st.none() | st.none() | st.integers(0, 30)),
        fork_step=draw(st.none() | st.integers(1, 20)) if can_fork else None,
        # With log-probabilities nothing can be appended.
        appended=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple)) if can_append else (),
    )


@given(
    workload=st.lists(plans(), min_size=2, max_size=6),
    sizes=st.sampled_from([(1, 24), (4, 7), (16, 24)]),  # few, as in test_engine_property
    num_slots=st.integers(48, 64) | st.integers(48, 240),
    enable_prefix_caching=st.booleans(),
    fill=st.sampled_from([np.nan, np.nan, 1e30]),
)
def test_sharing_changes_no_output(workload, sizes, num_slots, enable_prefix_caching, fill):
    block_size, budget = sizes
    num_blocks = min(num_slots // block_size, POOL_BLOCKS)
    engine = tiny_engine(
        num_blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=min(8, budget),
        enable_prefix_caching=enable_prefix_caching,
    )
    max_seq_len = min(MAX_MODEL_LEN, num_blocks * block_size + 1)
    workload = [plan for plan in workload if may_fit(plan, engine, max_seq_len)]
    if workload:
        check_outputs(workload, run_workload(workload, engine, fill), max_seq_len)


def may_fit(plan: Plan, engine: LLMEngine, max_seq_len: int) -> bool:
    """Whether the pool can hold a request alone; all beams of a search at a time."""
    if len(plan.prompt) >= max_seq_len:
        return False
    if plan.kind != "beams":
        return True
    num_tokens = min(len(plan.prompt) + plan.max_tokens, max_seq_len)
    num_each, num_shared = engine.config.num_blocks_for(num_tokens - 1), len(plan.prompt) // engine.config.block_size
    return num_shared + plan.n * (num_each - num_shared) <= engine.config.num_blocks


def test_such_workloads_share_copy_preempt_and_hit():
    """Else the test above would not say much."""
    rng = np.random.default_rng(0)
    totals: dict[str, int] = {}
    for _ in range(12):
        workload = []
        for _ in range(5):
            prompt = (
                *COMMON[: int(rng.choice([3, 8, 16]))],
                *rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 6))).tolist(),
            )
            max_tokens = int(rng.integers(4, 16))
            kind, n = [("greedy", 1), ("seeded", 3), ("beams", 3)][int(rng.integers(3))]
            plan = Plan(
                prompt,
                kind,
                n,
                max_tokens=max_tokens if n == 1 else min(8, max_tokens),
                arrival_step=int(rng.integers(0, 8)),
                fork_step=4 if n == 1 else None,
            )
            workload.append(plan)
        engine = tiny_engine(20, max_num_seqs=8)
        run = run_workload(workload, engine)
        check_outputs(workload, run, MAX_MODEL_LEN)
        stats = engine.stats()
        for name in ("num_block_copies", "num_preemptions", "prefix_cache_hit_tokens"):
            totals[name] = totals.get(name, 0) + getattr(stats, name)
        totals["forks"] = totals.get("forks", 0) + len(run.forks)
    assert totals["num_block_copies"] >= 50
    assert totals["num_preemptions"] >= 10
    assert totals["prefix_cache_hit_tokens"] >= 100
    assert totals["forks"] >= 5
