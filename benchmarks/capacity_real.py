"""Pages beside contiguous regions on the real engine: SmolLM2-135M on this machine, one small pool, a full queue.

A contiguous policy is the same engine behind a gate: a request enters when the policy's buddy allocator has a region
for it, which is free again when it ends. So the batches are the policy's, and everything else is the same.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from contiguous import BuddyAllocator, Policy, Region, policies
from opt13b import BLOCK_SIZE, MAX_MODEL_LEN, NUM_SLOTS
from tables import Report, section, table
from traces import Trace

MODEL = "smollm2-135m-instruct"
MAX_NUM_SEQS = 64
VOCAB = (10, 49_000)
"""Prompts are random ids from this range."""


class Work(NamedTuple):
    """Requests that are all there at the start."""

    prompts: list[list[int]]
    output_lens: list[int]


def scaled_work(trace: Trace, num_requests: int, scale: int) -> Work:
    """Requests whose lengths are those of the trace over `scale`."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(trace.draw(num_requests) // scale, 1).tolist()
    prompts = [rng.integers(*VOCAB, prompt_len).tolist() for prompt_len, _ in lengths]
    return Work(prompts, [output_len for _, output_len in lengths])


class Gate:
    """Lets a request into the engine when there is a region for it, or always if there is no policy."""

    def __init__(self, policy: Policy | None, num_slots: int) -> None:
        self.policy = policy
        self.memory = BuddyAllocator(num_slots)
        self.regions: dict[str, Region] = {}

    def admit(self, request_id: str, prompt_len: int, output_len: int) -> bool:
        """Whether it may enter now."""
        if self.policy is None:
            return True
        region = self.memory.allocate(self.policy(prompt_len, output_len))
        if region is not None:
            self.regions[request_id] = region
        return region is not None

    def leave(self, request_id: str) -> None:
        """It has ended."""
        if self.policy is not None:
            self.memory.free(self.regions.pop(request_id))


def run_gated(engine: Any, work: Work, gate: Gate) -> dict[str, float]:
    """Serves all of `work`; seconds, output tokens a second, and requests in a mean step."""
    from pagedjax import SamplingParams

    queue = deque(enumerate(zip(work.prompts, work.output_lens, strict=True)))
    num_preemptions, start = engine.stats().num_preemptions, time.perf_counter()
    with count_batches(engine.scheduler) as batches:
        while queue or engine.has_unfinished():
            while queue:
                i, (prompt, output_len) = queue[0]
                if not gate.admit(str(i), len(prompt), output_len):
                    break
                queue.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
                engine.add_request(prompt, params, str(i))
            for output in engine.step():
                if output.finished:
                    gate.leave(output.request_id)
    seconds = time.perf_counter() - start
    num_preemptions = engine.stats().num_preemptions - num_preemptions
    assert gate.policy is None or num_preemptions == 0, "a region is room for all of a request"
    return {
        "seconds": seconds,
        "output_tokens_per_s": sum(work.output_lens) / seconds,
        "mean_batched": sum(batches) / len(batches),
        "num_steps": len(batches),
        "num_preemptions": num_preemptions,
    }


@contextmanager
def count_batches(scheduler: Any) -> Iterator[list[int]]:
    """The numbers of sequences in the steps that are scheduled meanwhile."""
    schedule, batches = scheduler.schedule, []

    def counted() -> Any:
        scheduled = schedule()
        if scheduled:
            batches.append(len(scheduled.num_new_tokens))
        return scheduled

    scheduler.schedule = counted
    try:
        yield batches
    finally:
        del scheduler.schedule  # the method again


def real_capacity(trace: Trace, *, num_requests: int, scale: int, repeat: int, **options: Any) -> Report:
    """All four systems in turns; `options` are further ones of `LLM`."""
    from sharing import new_llm

    num_slots, max_model_len = NUM_SLOTS // scale, MAX_MODEL_LEN // scale
    work = scaled_work(trace, num_requests, scale)
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": max_model_len, "max_num_seqs": MAX_NUM_SEQS}
    sizes |= {"enable_prefix_caching": False, "warm_up": True, **options}
    num_blocks = num_slots // BLOCK_SIZE
    paged = new_llm(MODEL, num_blocks=num_blocks, **sizes).engine
    # Regions are room enough: the engine behind the gate never has to think of growth.
    gated = new_llm(MODEL, num_blocks=num_blocks + 2 * MAX_NUM_SEQS, **sizes).engine
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeat):
        for name, policy in {"paged": None, **policies(max_model_len)}.items():
            engine = paged if policy is None else gated
            runs.setdefault(name, []).append(run_gated(engine, work, Gate(policy, num_slots)))
    data = {"source": trace.source, "num_requests": num_requests, "scale": scale, "num_slots": num_slots, "runs": runs}
    return Report("capacity_real", _text(trace, work, scale, num_slots, runs), data)


def _text(trace: Trace, work: Work, scale: int, num_slots: int, runs: dict[str, list[dict[str, float]]]) -> str:
    paged = _median(runs["paged"], "output_tokens_per_s")
    rows = []
    for name, each in runs.items():
        speed, batched = _median(each, "output_tokens_per_s"), _median(each, "mean_batched")
        cells = [f"{_median(each, 'seconds'):.1f}", f"{speed:.1f}", f"{batched:.2f}", f"{paged / speed:.2f}"]
        rows.append([name, *cells, int(_median(each, "num_steps")), int(_median(each, "num_preemptions"))])
    num_prompt = sum(map(len, work.prompts))
    return section(
        "Pages beside contiguous regions on this machine: SmolLM2-135M",
        f"{len(work.prompts)} requests at once with {num_prompt:,} prompt and {sum(work.output_lens):,} output tokens, "
        f"a pool of {num_slots:,} slots in blocks of {BLOCK_SIZE}: lengths and pool of the simulation over {scale}. "
        "Contiguous policies run on the same engine, behind a gate that has their buddy allocator.",
        f"Lengths: {trace.source}.",
        table(["", "s", "output tokens/s", "batched", "pages are times as fast", "steps", "preemptions"], rows),
    )


def _median(runs: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)
