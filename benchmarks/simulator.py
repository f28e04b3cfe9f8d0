"""Wall time of `pagedjax.simulate` for a million requests, on the server of `opt13b.py`.

    python benchmarks/simulator.py [--trace ShareGPT] [--requests 1000000] [--output FOLDER]

A generator gives the requests, of a trace's lengths and faster than they can be served, so the batch is always full.
What one step of the scheduler costs, by number of requests, is in `host_overhead.py`.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from opt13b import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, step_seconds
from tables import Report, publish, section, table
from traces import ORIGINS, Trace, add_traces_argument, load_trace

from pagedjax.config import EngineConfig
from pagedjax.simulation.simulator import simulate
from pagedjax.simulation.workload import poisson_requests

REQUEST_RATE = 1e4
"""Requests per simulated second."""


def time_simulation(trace: Trace, num_requests: int, max_num_seqs: int) -> Report:
    """One simulation."""
    lengths = trace.draw(num_requests)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
    )
    start, processor_start = time.perf_counter(), time.process_time()
    result = simulate(poisson_requests(map(tuple, lengths), REQUEST_RATE), config, step_seconds)
    seconds, processor_s = time.perf_counter() - start, time.process_time() - processor_start
    assert np.isfinite(result.finish_s).all()
    data = {
        "trace": trace.name,
        "source": trace.source,
        "num_requests": num_requests,
        "wall_s": seconds,
        "processor_s": processor_s,
        "us_per_output_token": 1e6 * processor_s / int(lengths[:, 1].sum()),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "num_steps": result.num_steps,
        "mean_batched": result.mean_requests_per_step,
        "num_preemptions": result.num_preemptions,
        "simulated_s": result.end_s,
        "requests_per_simulated_s": num_requests / result.end_s,
    }
    return Report(f"simulator_{trace.name.lower()}", _text(data), data)


def _text(data: dict) -> str:
    rows = [
        ["wall time", f"{data['wall_s']:.0f} s"],
        ["processor time", f"{data['processor_s']:.0f} s"],
        ["the same per output token", f"{data['us_per_output_token']:.2f} µs"],
        ["largest resident set", f"{data['max_rss_mib']:.0f} MiB"],
        ["steps", f"{data['num_steps']:,}"],
        ["requests in a mean step", f"{data['mean_batched']:.1f}"],
        ["preemptions", f"{data['num_preemptions']:,}"],
        ["simulated time", f"{data['simulated_s'] / 3600:.1f} h"],
        ["requests that it served per second of that", f"{data['requests_per_simulated_s']:.2f}"],
    ]
    return section(
        f"{data['num_requests']:,} simulated requests with the lengths of {data['trace']}",
        f"Lengths: {data['source']}. OPT-13B on an A100 with 40 GB, as in `opt13b.py`.",
        table(["", ""], rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=ORIGINS, default="Alpaca", help="whose lengths")
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most requests in a step")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write simulator_TRACE.md and .json there")
    add_traces_argument(parser)
    args = parser.parse_args()
    report = time_simulation(load_trace(args.trace, args.traces), args.requests, args.max_num_seqs)
    publish(report, " ".join(["python benchmarks/simulator.py", *sys.argv[1:]]), args.output)


if __name__ == "__main__":
    main()
