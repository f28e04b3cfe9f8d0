"""What KV memory is used for in a loaded server: contiguous regions beside pages (the paper's figure 2).

    python benchmarks/memory_waste.py [--requests 4000] [--output FOLDER]

A full queue of requests with ShareGPT's lengths meets the KV memory of OPT-13B on an A100 with 40 GB. Regions come from
a real buddy allocator, pages from the engine's own scheduler and allocator, and both are asked in every step what they
hold: nothing here is a formula. Counted are steps in which a request waits for memory; free memory is of no use then.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contiguous import policies
from contiguous_server import ContiguousServer, MemoryUse
from opt13b import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, NUM_SLOTS, step_seconds
from tables import Report, publish, section, table
from traces import Trace, add_traces_argument, load_trace

from pagedjax.config import EngineConfig
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.simulation.simulator import simulate
from pagedjax.simulation.workload import SimulatedRequest

PAPER = {
    "Max": (20.4, 13.3, 57.3, 8.9),
    "Pow2": (26.8, 17.9, 13.6, 41.6),
    "Oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, 0.0, 3.7, 0.0),
}
"""Per cent of figure 2: token states, reservation, internal fragmentation, external fragmentation and others."""


class Loaded:
    """The mean of what memory is used for, over steps in which somebody waits for it and after the first ones, in which
    all requests are young."""

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first
        self.num_steps = 0
        self._sums = np.zeros(len(MemoryUse._fields))

    def add(self, use: MemoryUse, is_blocked: bool) -> None:
        """The next step."""
        if self.num_first > 0:
            self.num_first -= 1
        elif is_blocked:
            self._sums += use
            self.num_steps += 1

    @property
    def mean(self) -> MemoryUse:
        """Slots for each use."""
        assert self.num_steps, "no step in which a request waited for memory: too few requests"
        return MemoryUse(*(self._sums / self.num_steps).tolist())


class LoadedPages(Loaded):
    """The same for a scheduler, from its allocator and its block tables."""

    mean_sequences = 0.0
    """Sequences in a mean step."""

    def observe(self, now: float, scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
        """Called in each step."""
        size, allocator = scheduler.config.block_size, scheduler.allocator
        tables = [request.block_table for request in scheduler.requests(scheduler.running)]
        num_tokens = sum(block_table.num_tokens for block_table in tables)
        num_used = allocator.num_used_blocks * size
        assert allocator.num_references == allocator.num_used_blocks, "shared blocks hold tokens of several"
        assert num_used - num_tokens <= len(tables) * (size - 1), "a sequence wastes a block"
        before = self.num_steps
        self.add(
            MemoryUse(num_tokens, 0, num_used - num_tokens, 0, allocator.num_free_blocks * size),
            bool(scheduler.waiting),
        )
        if self.num_steps > before:
            self.mean_sequences += (len(tables) - self.mean_sequences) / self.num_steps


def shares(use: MemoryUse, *, is_paged: bool) -> tuple[float, ...]:
    """The four shares of the paper's figure, in per cent of the memory that is allocated or cannot be: a free region is
    too small for who waits, a free block is anybody's."""
    lost = use.num_rounded + (0 if is_paged else use.num_free)
    parts = np.array([use.num_tokens, use.num_future, use.num_never, lost])
    return tuple((100 * parts / parts.sum()).tolist())


def fig2(trace: Trace, *, num_requests: int, num_first_steps: int) -> Report:
    """All four systems on the same requests."""
    lengths = trace.draw(num_requests).tolist()
    requests = [SimulatedRequest(arrival_s=0.0, prompt=prompt, output_len=output) for prompt, output in lengths]
    results = []
    for name, policy in reversed(policies(MAX_MODEL_LEN).items()):
        loaded = Loaded(num_first_steps)
        ContiguousServer(policy, NUM_SLOTS, step_seconds, observe=loaded.add).run(requests)
        results.append(_result(name, loaded, is_paged=False))
    pages = LoadedPages(num_first_steps)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, enable_prefix_caching=False
    )
    simulate(requests, config, step_seconds, observe=pages.observe)
    waste = pages.mean.num_never / pages.mean_sequences
    results.append(_result("paged", pages, is_paged=True) | {"empty_slots_per_sequence": waste})
    data = {"source": trace.source, "means": trace.means, "num_requests": num_requests, "results": results}
    return Report("memory_waste", _text(trace, results, num_requests), data)


def _result(name: str, loaded: Loaded, *, is_paged: bool) -> dict[str, Any]:
    use = loaded.mean
    return {
        "name": name,
        "percent": shares(use, is_paged=is_paged),
        "percent_of_pool": 100 * use.num_tokens / sum(use),
        "paper_percent": PAPER[name],
        "num_steps": loaded.num_steps,
        "slots": use._asdict(),
    }


def _text(trace: Trace, results: Sequence[dict[str, Any]], num_requests: int) -> str:
    rows = []
    for r in results:
        cells = [f"{ours:.1f} ({paper:.1f})" for ours, paper in zip(r["percent"], r["paper_percent"], strict=True)]
        rows.append([r["name"], f"**{cells[0]}**", *cells[1:], f"{r['percent_of_pool']:.1f}", r["num_steps"]])
    columns = ["% (the paper's)", "token states", "reserved for later", "internal", "external, others"]
    return section(
        "Figure 2: what KV memory is used for",
        f"Shares of the memory that is allocated or that nobody can use, in the mean of the steps in which a request "
        f"waits; {NUM_SLOTS:,} slots, blocks of {BLOCK_SIZE}. A region's rounding to a power of two counts as external "
        "fragmentation, as in the paper. Free blocks are usable and do not count; the column before the last has token "
        "states over the whole pool, where they do: the scheduler keeps a block for each sequence to grow into.",
        f"Lengths: {trace.source}; {num_requests:,} requests, a full queue.",
        table([*columns, "tokens of the whole pool", "steps"], rows),
        f"A sequence wastes {results[-1]['empty_slots_per_sequence']:.1f} slots of its last block in the mean, never "
        f"{BLOCK_SIZE}.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="drawn from the trace")
    parser.add_argument("--first-steps", type=int, default=1000, help="steps that do not count")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write memory_waste.md, .json and .png there")
    add_traces_argument(parser)
    args = parser.parse_args()
    trace = load_trace("ShareGPT", args.traces)
    report = fig2(trace, num_requests=args.requests, num_first_steps=args.first_steps)
    publish(report, " ".join(["python benchmarks/memory_waste.py", *sys.argv[1:]]), args.output)
    if args.output is not None:
        from plots import plot_memory

        plot_memory(report.data["results"], args.output / "memory_waste.png")


if __name__ == "__main__":
    main()
