"""Memory that sharing saves within requests (the paper's figure 15): blocks saved / blocks without sharing.

"Computed by the number of blocks we saved by sharing divided by the number of total blocks without sharing"
(arXiv 2309.06180, section 6.3). Blocks are counted in every step, when all that it writes to has been allocated and
copied, and both numbers are summed over the steps. So a request counts by its blocks and steps, and it does not matter
which requests run together. The prefix cache is off: nothing is shared between requests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from tables import Report, section, table
from traces import ORIGINS, Trace

from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.config import EngineConfig
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_BLOCKS = 8192
"""Of the scheduler without a device: with enough blocks nothing is preempted."""
WIDTHS = (2, 4, 6)
VOCAB_SIZE = 32_000

PAPER: dict[tuple[str, str], dict[int, float | None]] = {
    ("parallel", "Alpaca"): {2: 6.1, 4: 8.5, 6: 9.8},
    ("parallel", "ShareGPT"): {2: 16.2, 4: None, 6: 30.5},
    ("beams", "Alpaca"): {2: 37.6, 4: 53.1, 6: 55.2},
    ("beams", "ShareGPT"): {2: 44.3, 4: None, 6: 66.3},
}
"""Per cent; of ShareGPT the text gives the range alone, whose ends are taken for the widths 2 and 6."""


class BlockCount:
    """Blocks over the steps of one run."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.num_saved = self.num_without_sharing = self.num_steps = 0
        self._sum_of_ratios = 0.0

    def count(self, num_to_fork: int = 0) -> None:
        """Counts one step. `num_to_fork` blocks are being filled for others too, who fork them after the step: without
        sharing they would have their own."""
        num_references = self.allocator.num_references + num_to_fork
        num_saved = num_references - self.allocator.num_used_blocks
        self.num_saved += num_saved
        self.num_without_sharing += num_references
        self.num_steps += 1
        self._sum_of_ratios += num_saved / num_references

    @property
    def saving(self) -> float:
        """The share of the blocks that sharing saves."""
        return self.num_saved / self.num_without_sharing

    @property
    def mean_of_ratios(self) -> float:
        """The same, every step counting alike, however few requests it has."""
        return self._sum_of_ratios / self.num_steps

    def as_dict(self) -> dict[str, Any]:
        return {
            "saving": self.saving,
            "mean_of_ratios": self.mean_of_ratios,
            "num_saved": self.num_saved,
            "num_without_sharing": self.num_without_sharing,
            "num_steps": self.num_steps,
        }


def count_steps(scheduler: Scheduler) -> BlockCount:
    """From now on counts the blocks of each step that `scheduler` schedules."""
    blocks, schedule = BlockCount(scheduler.allocator), scheduler.schedule

    def counted() -> Any:
        scheduled = schedule()
        if scheduled:
            blocks.count(num_to_fork=sum(map(_num_to_fork, scheduler.running.values())))
        return scheduled

    scheduler.schedule = counted
    return blocks


def _num_to_fork(group: SequenceGroup) -> int:
    """Blocks of a prompt that is being computed, once for each sequence that will share them."""
    leader, *others = group.requests
    if group.search is not None and not others and leader.num_output_tokens == 0:
        return (group.max_num_seqs - 1) * len(leader.block_table)
    return sum(other.fork_of is leader for other in others) * len(leader.block_table)


def parallel_saving(
    lengths: Int64[np.ndarray, "n 2"], n: int, *, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS
) -> BlockCount:
    """`n` samples of each request through the engine's scheduler, a full queue, without a device: tokens are random,
    and all samples of a request are as long as its output in the trace."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=int(lengths.sum(axis=1).max()),
        block_size=block_size,
        enable_prefix_caching=False,
    )
    scheduler, rng = Scheduler(config), np.random.default_rng(0)
    blocks = count_steps(scheduler)
    for i, (prompt_len, output_len) in enumerate(lengths.tolist()):
        prompt = rng.integers(0, VOCAB_SIZE, prompt_len).tolist()
        params = SamplingParams(n=n, max_tokens=output_len, ignore_eos=True)
        requests = [
            Request(f"{i}[{k}]", prompt, params, (i * n + k,), prompt_len + output_len, seed=i, sample_index=k)
            for k in range(n)
        ]
        scheduler.add(SequenceGroup(requests))
    while scheduled := scheduler.schedule():
        scheduler.update(scheduled, rng.integers(0, VOCAB_SIZE, len(scheduled.sampling)))
    assert scheduler.num_preemptions == 0, "the pool is too small: what is preempted is counted twice"
    return blocks


def beam_saving(llm: Any, prompts: Sequence[Sequence[int]], output_lens: Sequence[int], width: int) -> BlockCount:
    """Beam searches of all prompts in one call of the real engine: which beams survive is the model's choice."""
    from pagedjax import BeamSearchParams

    blocks = count_steps(llm.engine.scheduler)
    each = [BeamSearchParams(beam_width=width, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
    llm.beam_search(prompts, each, use_tqdm=False)
    del llm.engine.scheduler.schedule  # the method again
    return blocks


def written_prompts(llm: Any, prompt_lens: Sequence[int]) -> list[list[int]]:
    """Messages that the model itself writes, at temperature 1, with the chat template's tokens around them, so that a
    search answers them: prompts of these lengths, or of 10 tokens where that is more."""
    from pagedjax import SamplingParams

    opening, closing = (
        llm.tokenizer.encode(text, add_special_tokens=False)
        for text in ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    )
    no_end = dict.fromkeys(llm.tokenizer.all_special_ids, -100.0)
    num_template = len(opening) + len(closing)
    each = [
        SamplingParams(
            max_tokens=max(1, n - num_template), seed=i, ignore_eos=True, logit_bias=no_end, detokenize=False
        )
        for i, n in enumerate(prompt_lens)
    ]
    outputs = llm.generate([opening] * len(each), each, use_tqdm=False)
    return [[*opening, *output.outputs[0].token_ids, *closing] for output in outputs]


def fig15(
    traces: Sequence[Trace],
    new_llm: Callable[[], Any],
    *,
    num_parallel: int,
    num_beam_requests: dict[str, int],
    widths: Sequence[int] = WIDTHS,
) -> Report:
    """Both kinds of sharing on both traces."""
    results: list[dict[str, Any]] = []
    for trace in traces if num_parallel else ():
        lengths = trace.sample(num_parallel)
        results += [_result("parallel", trace, n, lengths, parallel_saving(lengths, n)) for n in widths]
    if any(num_beam_requests.values()):
        llm = new_llm()
        for trace in traces:
            if not num_beam_requests[trace.name]:
                continue
            lengths = trace.quantiles(num_beam_requests[trace.name])
            prompt_lens, output_lens = lengths.T.tolist()
            prompts = written_prompts(llm, prompt_lens)
            lengths = np.stack([list(map(len, prompts)), output_lens], axis=1)
            results += [
                _result("beams", trace, width, lengths, beam_saving(llm, prompts, output_lens, width))
                for width in widths
            ]
    return Report("fig15", _fig15_text(traces, results), {"results": results})


def _result(
    kind: str, trace: Trace, width: int, lengths: Int64[np.ndarray, "n 2"], blocks: BlockCount
) -> dict[str, Any]:
    paper = PAPER[kind, trace.name].get(width)
    print(f"fig15: {kind}, {trace.name}, {width}: {blocks.saving:.1%}, the paper has {paper}", flush=True)
    return {
        "kind": kind,
        "trace": trace.name,
        "source": trace.source,
        "width": width,
        "num_requests": len(lengths),
        "mean_prompt": float(lengths[:, 0].mean()),
        "mean_output": float(lengths[:, 1].mean()),
        "paper_percent": paper,
        **blocks.as_dict(),
    }


def _fig15_text(traces: Sequence[Trace], results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        paper = "" if r["paper_percent"] is None else f"{r['paper_percent']:.1f} %"
        name = "parallel sampling, n" if r["kind"] == "parallel" else "beam search, width"
        lengths = f"{r['mean_prompt']:.1f} / {r['mean_output']:.1f}"
        saving, mean = f"**{100 * r['saving']:.1f} %**", f"{100 * r['mean_of_ratios']:.1f} %"
        rows.append([f"{r['trace']}, {name} = {r['width']}", saving, paper, mean, r["num_requests"], lengths])
    columns = ["", "saved", "paper", "mean of the steps' ratios", "requests", "mean prompt / output"]
    origins = "; ".join(
        f"{trace.name}: {trace.source} (means {trace.means[0]:.2f} / {trace.means[1]:.2f} over {len(trace.lengths)} "
        f"requests, the paper's are {ORIGINS[trace.name].paper_means[0]} / {ORIGINS[trace.name].paper_means[1]})"
        for trace in traces
    )
    return section(
        "Figure 15: memory saved by sharing within a request",
        f"Blocks saved over blocks without sharing, both summed over all steps; blocks of {BLOCK_SIZE}, prefix cache "
        "off. Parallel sampling runs through the engine's scheduler without a device; beam search runs SmolLM2-135M on "
        "prompts that it has written itself, a sample of requests by quantile of their length. Outputs are as long as "
        "in the trace, all samples or beams of a request alike.",
        f"Lengths: {origins}.",
        table(columns, rows),
    )
