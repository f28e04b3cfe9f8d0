"""The naive loop and the engine agree on any workload: arrivals, aborts, budgets, pools, blocks, dirty memory."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import (
    MAX_MODEL_LEN,
    POOL_BLOCKS,
    VOCAB_SIZE,
    ascii_tokenizer,
    assert_clean,
    assert_greedy,
    fill_pool,
    reference,
    text_of,
    tiny_engine,
)

from pagedjax.sampling.params import SamplingParams


@dataclass(frozen=True)
class Plan:
    """One request of a drawn workload; steps are counted from the start."""

    arrival_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    n: int
    seed: int | None
    """None is greedy."""
    abort_step: int | None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=0.0 if self.seed is None else 20.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
        )


token_ids = st.integers(0, VOCAB_SIZE - 1)
plans = st.builds(
    Plan,
    arrival_step=st.integers(0, 20) | st.just(0),
    prompt=st.lists(token_ids, min_size=1, max_size=30).map(tuple),
    max_tokens=st.integers(1, 24),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    n=st.sampled_from([1, 1, 1, 2]),
    seed=st.sampled_from([None, None, None, 7]),
    abort_step=st.none() | st.none() | st.integers(0, 40),
)
SIZES = [(1, 24), (4, 7), (4, 24), (16, 2)]
"""Block sizes and budgets. Few, as each two of them compile some ten programs of their own: between them they hold each
block size and each budget, many blocks to a chunk and many chunks to a block. Any two: `test_sharing_schedules`."""
workloads = {
    "workload": st.lists(plans, min_size=2, max_size=8),
    "sizes": st.sampled_from(SIZES),
    "max_num_seqs": st.just(8),
    "num_slots": st.integers(32, 48) | st.integers(32, 200),
    "fill": st.sampled_from([np.nan, np.nan, 0.0, 1e30]),
}


def run_workload(workload: list[Plan], sizes: tuple[int, int], max_num_seqs: int, num_slots: int, fill: float) -> int:
    """Checks every output; returns the number of preemptions."""
    block_size, budget = sizes
    num_blocks = min(num_slots // block_size, POOL_BLOCKS)
    engine = tiny_engine(
        num_blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        tokenizer=ascii_tokenizer(),
    )
    fill_pool(engine, fill)
    limit = min(MAX_MODEL_LEN, num_blocks * block_size + 1)
    outputs, streamed = {}, {str(i): [[] for _ in range(plan.n)] for i, plan in enumerate(workload)}
    last_arrival = max(plan.arrival_step for plan in workload)
    for step in range(2000):
        for i, plan in enumerate(workload):
            if plan.arrival_step == step:
                assert engine.add_request(plan.prompt, plan.params, str(i)) == str(i)
        for i, plan in enumerate(workload):
            if plan.abort_step == step and (output := engine.abort(str(i))) is not None:
                outputs[str(i)] = output
        for output in engine.step():
            assert output.request_id not in outputs, "an output after the last one"
            for ids, completion in zip(streamed[output.request_id], output.outputs, strict=True):
                assert completion.token_ids[: len(ids)] == ids, "a token was taken back"
                assert len(completion.token_ids) <= len(ids) + 1
                ids[:] = completion.token_ids
            if output.finished:
                outputs[output.request_id] = output
        engine.scheduler.check_integrity()
        if step >= last_arrival and not engine.has_unfinished():
            break
    assert_clean(engine)

    for i, plan in enumerate(workload):
        output = outputs.pop(str(i))
        assert output.prompt_token_ids == list(plan.prompt)
        assert len(output.outputs) == plan.n
        for completion in output.outputs:
            check_completion(plan, completion, min(plan.max_tokens, limit - len(plan.prompt)))
        assert [completion.token_ids for completion in output.outputs] == streamed[str(i)]
    assert not outputs
    return engine.stats().num_preemptions


def check_completion(plan, completion, max_tokens: int) -> None:
    ids = completion.token_ids
    if plan.seed is None:
        assert_greedy(plan.prompt, ids)
    else:
        assert ids == seeded_reference(plan.prompt, plan.seed, completion.index)[: len(ids)]
    assert completion.text == text_of(ids)
    assert not set(ids[:-1]) & set(plan.stop_token_ids)
    match completion.finish_reason:
        case "stop":
            assert completion.stop_reason == ids[-1]
            assert ids[-1] in plan.stop_token_ids
        case "length":
            assert len(ids) == max_tokens
        case reason:
            assert reason == "abort"
            assert plan.abort_step is not None
            assert len(ids) < max_tokens


def seeded_reference(prompt: tuple[int, ...], seed: int, index: int) -> list[int]:
    params = SamplingParams(temperature=20.0, seed=seed, n=index + 1, max_tokens=24)
    return reference(prompt, params, index)


@given(**workloads)
def test_the_engine_agrees_with_the_naive_loop(workload, sizes, max_num_seqs, num_slots, fill):
    run_workload(workload, sizes, max_num_seqs, num_slots, fill)


def test_such_workloads_do_preempt():
    """Else the test above would not say much: of 30 drawn workloads with small pools, several preempt."""
    rng = np.random.default_rng(0)
    num_preemptions = []
    for _ in range(30):
        workload = [
            Plan(
                arrival_step=int(rng.integers(0, 10)),
                prompt=tuple(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 24))).tolist()),
                max_tokens=int(rng.integers(1, 25)),
                stop_token_ids=(),
                n=int(rng.integers(1, 3)),
                seed=None,
                abort_step=None,
            )
            for _ in range(int(rng.integers(2, 9)))
        ]
        sizes = SIZES[rng.integers(len(SIZES))]
        num_preemptions.append(
            run_workload(workload, sizes, max_num_seqs=8, num_slots=int(rng.integers(32, 60)), fill=np.nan)
        )
    assert sum(number > 0 for number in num_preemptions) >= 10
    assert max(num_preemptions) >= 3
