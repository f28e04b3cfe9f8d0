"""Host time of one step, by number of running requests: schedule + build_batch + update, without a device.

    python benchmarks/host_overhead.py [--steps 200] [--context 128] [--max-model-len 2048] [--json]

Every request decodes, as in the steady state of a server; block growth, finishing and admission happen as they come:
outputs have different lengths and each request that ends is replaced. Times are microseconds per step. How they grow is
the slope of their logarithms from 64 requests on, where what a step costs by itself is small: 1 is linear.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from pagedjax.batch import build_batch
from pagedjax.config import EngineConfig
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import Scheduler

PARTS = ("schedule", "build_batch", "update")
MIN_FOR_SLOPE = 64


def time_steps(num_running: int, num_steps: int, context: int, max_model_len: int) -> dict[str, list[float]]:
    """Microseconds of each part in each of `num_steps` steps with `num_running` decoding requests."""
    assert context * 2 <= max_model_len, "prompts and outputs of up to `context` tokens must fit max_model_len"
    block_size = 16
    config = EngineConfig(
        num_blocks=num_running * -(-2 * context // block_size),
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, 2 * num_running),
    )
    scheduler, rng = Scheduler(config), np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, max_tokens=None)
    num_added = 0

    def refill() -> None:
        nonlocal num_added
        while len(scheduler.running) + len(scheduler.waiting) < num_running:
            prompt = rng.integers(0, 32000, int(rng.integers(context // 2, context + 1))).tolist()
            max_num_tokens = len(prompt) + int(rng.integers(context // 2, context + 1))
            request = Request(str(num_added), prompt, params, (num_added,), max_num_tokens, seed=num_added)
            scheduler.add(SequenceGroup([request]))
            num_added += 1

    refill()
    while scheduler.waiting:  # prompts in
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, rng.integers(0, 32000, len(scheduled.sampling)))

    microseconds: dict[str, list[float]] = {part: [] for part in PARTS}
    gc.disable()  # a collection of this benchmark's own garbage is not a step's cost
    try:
        for _ in range(num_steps):
            refill()
            sampled = rng.integers(0, 32000, num_running)
            times = [time.perf_counter()]
            scheduled = scheduler.schedule()
            times.append(time.perf_counter())
            build_batch(scheduled, config)
            times.append(time.perf_counter())
            scheduler.update(scheduled, sampled[: len(scheduled.sampling)])
            times.append(time.perf_counter())
            for part, start, end in zip(PARTS, times, times[1:], strict=False):
                microseconds[part].append((end - start) * 1e6)
    finally:
        gc.enable()
    return microseconds


def growth(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The slope of log(time) over log(requests) by part, from `MIN_FOR_SLOPE` requests on; empty with less than two."""
    rows = [row for row in results if row["num_running"] >= MIN_FOR_SLOPE]
    if len(rows) < 2:
        return {}
    logs = np.log([row["num_running"] for row in rows])
    return {
        part: float(np.polyfit(logs, np.log([row[f"{part}_median_us"] for row in rows]), 1)[0])
        for part in (*PARTS, "total")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--running", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096], help="numbers of requests"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps timed for each")
    parser.add_argument("--context", type=int, default=128, help="longest prompt and longest output, tokens")
    parser.add_argument("--max-model-len", type=int, default=2048, help="decides the width of the block tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()

    results = []
    for num_running in args.running:
        microseconds = time_steps(num_running, args.steps, args.context, args.max_model_len)
        microseconds["total"] = [sum(step) for step in zip(*microseconds.values(), strict=True)]
        row: dict[str, float] = {"num_running": num_running}
        for part, values in microseconds.items():
            row |= {f"{part}_median_us": statistics.median(values), f"{part}_min_us": min(values)}
        row["total_median_us_per_request"] = row["total_median_us"] / num_running
        results.append(row)

    if args.json:
        slopes = growth(results)
        print(json.dumps({"steps": args.steps, "context": args.context, "results": results, "slopes": slopes}))
        return
    print(f"{'running':>8}" + "".join(f"{part:>18}" for part in (*PARTS, "total")) + f"{'per request':>14}")
    for row in results:
        cells = [f"{row[f'{part}_median_us']:.0f} ({row[f'{part}_min_us']:.0f})" for part in (*PARTS, "total")]
        per_request = f"{row['total_median_us_per_request']:.2f}"
        print(f"{row['num_running']:>8}" + "".join(f"{cell:>18}" for cell in cells) + f"{per_request:>14}")
    print("median (min) microseconds per step")
    if slopes := growth(results):
        cells = ", ".join(f"{part} {slope:.2f}" for part, slope in slopes.items())
        print(f"slope of the logarithms from {MIN_FOR_SLOPE} requests on: {cells}")


if __name__ == "__main__":
    main()
