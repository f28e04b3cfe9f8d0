"""How many requests a second a KV pool sustains: pages beside contiguous regions (the paper's figures 12a and 13a).

    python benchmarks/capacity.py [--hours 1] [--output FOLDER]
    python benchmarks/capacity.py --real [--output FOLDER]

OPT-13B on an A100 with 40 GB, ShareGPT's lengths, Poisson arrivals. Pages are the engine's own scheduler in
`pagedjax.simulate`; regions a buddy allocator under an Orca-like one. All share the step time of `opt13b.py`, whose one
free number is its efficiency; the report says what another one would have given. `--real` runs SmolLM2-135M instead.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from capacity_real import real_capacity
from contiguous import policies
from contiguous_server import ContiguousServer
from opt13b import BLOCK_SIZE, EFFICIENCY, MAX_MODEL_LEN, NUM_BLOCKS, NUM_SLOTS, step_seconds
from tables import Report, publish, section, table
from traces import Trace, add_traces_argument, load_trace

from pagedjax.config import EngineConfig
from pagedjax.simulation.cost import StepTime
from pagedjax.simulation.simulator import simulate
from pagedjax.simulation.workload import poisson_requests

PAPER_BATCHED = {"paged": 30.42, "Oracle": 13.62, "Pow2": 9.81, "Max": 7.00}
"""Figure 13a: mean number of batched requests at 2 requests a second."""
PAPER_RATIOS = {"Oracle": "1.7 to 2.7", "Pow2": "", "Max": "2.7 to 8"}
"""Section 6.2: request rates of vLLM over theirs at similar latencies, over all models, ShareGPT."""
BATCHED_RATE = 2.0
RATES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4)
MAX_LATENCY_S = 1.0
"""Seconds a token where figure 12 ends, and a curve here."""
LATENCIES_S = (0.1, 0.2, 0.5)
"""Seconds a token at which request rates are compared."""
OTHER_EFFICIENCIES = (0.44, 0.52, 0.56)
Point = dict[str, float]
Run = Callable[[float], Point]
"""From requests per second to what came out."""


class Served(NamedTuple):
    """What all systems serve: the same lengths in the same order, in gaps that scale with the rate."""

    trace: Trace
    seconds: float

    def requests(self, rate: float) -> Any:
        """Those that come in the given time."""
        return poisson_requests(self.trace.draw(max(1, round(rate * self.seconds))).tolist(), rate)


def run_paged(served: Served, step_time: StepTime, rate: float) -> Point:
    config = EngineConfig(
        num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, enable_prefix_caching=False
    )
    result = simulate(served.requests(rate), config, step_time)
    return _point(rate, result) | {
        "num_preemptions": result.num_preemptions,
        "used_blocks": result.timeline.mean("num_used_blocks"),
    }


def run_contiguous(name: str, served: Served, step_time: StepTime, rate: float) -> Point:
    server = ContiguousServer(policies(MAX_MODEL_LEN)[name], NUM_SLOTS, step_time)
    return _point(rate, server.run(served.requests(rate)))


def _point(rate: float, result: Any) -> Point:
    return {
        "request_rate": rate,
        "normalized_latency_s": float(result.normalized_latency_s.mean()),
        "ttft_s": float(result.ttft_s.mean()),
        "mean_batched": result.mean_requests_per_step,
        "num_requests": len(result.finish_s),
    }


def systems(served: Served, efficiency: float) -> dict[str, Run]:
    """All four, by name."""
    step_time = partial(step_seconds, efficiency=efficiency)
    runs: dict[str, Run] = {"paged": partial(run_paged, served, step_time)}
    return runs | {name: partial(run_contiguous, name, served, step_time) for name in policies(MAX_MODEL_LEN)}


def curve(run: Run, rates: Sequence[float]) -> list[Point]:
    """Points at ascending rates, up to the first one beyond `MAX_LATENCY_S`."""
    points = []
    for rate in rates:
        points.append(run(rate))
        if points[-1]["normalized_latency_s"] > MAX_LATENCY_S:
            break
    return points


def sustained(points: Sequence[Point], latency_s: float) -> float | None:
    """The request rate at which a curve crosses a normalized latency, on the line between two points; None if it does
    not get there."""
    latencies = [point["normalized_latency_s"] for point in points]
    above = next((i for i, latency in enumerate(latencies) if latency >= latency_s), None)
    if above is None or above == 0:
        return None
    ends = slice(above - 1, above + 1)
    return float(np.interp(latency_s, latencies[ends], [point["request_rate"] for point in points[ends]]))


def capacity(trace: Trace, *, hours: float, rates: Sequence[float], efficiencies: Sequence[float]) -> Report:
    """Both figures, and the second one for other efficiencies as well."""
    served = Served(trace, hours * 3600)
    runs = systems(served, EFFICIENCY)
    curves = {name: curve(run, rates) for name, run in runs.items()}
    at_rate = {EFFICIENCY: {name: _at(curves[name], run) for name, run in runs.items()}}
    for efficiency in efficiencies:
        at_rate[efficiency] = {name: run(BATCHED_RATE) for name, run in systems(served, efficiency).items()}
    by_latency = {s: {name: sustained(points, s) for name, points in curves.items()} for s in LATENCIES_S}
    data = {
        "source": trace.source,
        "hours": hours,
        "efficiency": EFFICIENCY,
        "curves": curves,
        "at_2_requests_a_second": at_rate,
        "sustained_rates": by_latency,
    }
    return Report("capacity", _text(trace, hours, curves, at_rate, by_latency), data)


def _at(points: Sequence[Point], run: Run) -> Point:
    """The point at `BATCHED_RATE`, which a curve may not reach."""
    return next((point for point in points if point["request_rate"] == BATCHED_RATE), None) or run(BATCHED_RATE)


def _text(trace: Trace, hours: float, curves: Any, at_rate: Any, by_latency: Any) -> str:
    return section(
        "Figures 12a and 13a: OPT-13B on one A100 with 40 GB, simulated",
        f"{NUM_SLOTS:,} KV slots, Poisson arrivals for {hours:g} h. Every system's step takes the time of a roofline "
        f"over an efficiency of {EFFICIENCY}, chosen so that pages keep up with {BATCHED_RATE:g} requests a second; "
        "nothing was measured on that GPU. Batched requests are those of a mean step.",
        f"Lengths: {trace.source}.",
        f"### Batched requests at {BATCHED_RATE:g} requests a second",
        _batched_table(at_rate[EFFICIENCY]),
        "### Requests a second at the same normalized latency, and how many times as many pages sustain",
        _rates_table(by_latency),
        f"### The same {BATCHED_RATE:g} requests a second at other efficiencies",
        _efficiencies_table(at_rate),
        "### Mean normalized latency in s/token (batched requests) by requests a second",
        _curves_table(curves),
    )


def _batched_table(points: dict[str, Point]) -> str:
    ours = {name: point["mean_batched"] for name, point in points.items()}
    rows = [
        [name, f"**{ours[name]:.2f}**", paper, _over(ours, name), _over(PAPER_BATCHED, name)]
        for name, paper in PAPER_BATCHED.items()
    ]
    return table(["", "batched", "paper", "pages have times as many", "paper"], rows)


def _rates_table(by_latency: dict[float, dict[str, float | None]]) -> str:
    rows = [
        [name, *(_rate(rates, name) for rates in by_latency.values()), PAPER_RATIOS.get(name, "")]
        for name in PAPER_BATCHED
    ]
    return table(["", *(f"{s} s/token" for s in by_latency), "paper, times"], rows)


def _efficiencies_table(at_rate: dict[float, dict[str, Point]]) -> str:
    rows = []
    for efficiency, points in sorted(at_rate.items()):
        values = {name: point["mean_batched"] for name, point in points.items()}
        latency = points["paged"]["normalized_latency_s"]
        cells = [f"{values['paged']:.2f}", f"{latency:.2f}", _over(values, "Oracle"), _over(values, "Max")]
        rows.append([efficiency, *cells])
    return table(["efficiency", "batched, pages", "s/token", "times Oracle", "times Max"], rows)


def _curves_table(curves: dict[str, list[Point]]) -> str:
    cells: dict[float, dict[str, str]] = {}
    for name, points in curves.items():
        for point in points:
            cell = f"{point['normalized_latency_s']:.3f} ({point['mean_batched']:.1f})"
            cells.setdefault(point["request_rate"], {})[name] = cell
    rows = [[f"{rate:g}", *(cells[rate].get(name, "") for name in curves)] for rate in sorted(cells)]
    return table(["", *curves], rows)


def _over(values: dict[str, float], name: str) -> str:
    return "" if name == "paged" else f"{values['paged'] / values[name]:.2f}"


def _rate(rates: dict[str, float | None], name: str) -> str:
    paged, rate = rates["paged"], rates[name]
    if rate is None:
        return "-"
    return f"{rate:.2f}" if name == "paged" or paged is None else f"{rate:.2f} ({paged / rate:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="of arrivals, simulated; the paper has one")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second, ascending")
    parser.add_argument("--efficiencies", type=float, nargs="*", default=OTHER_EFFICIENCIES, help="to compare with")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write NAME.md, NAME.json and NAME.png there")
    parser.add_argument("--real", action="store_true", help="run SmolLM2-135M here instead of simulating OPT-13B")
    parser.add_argument("--requests", type=int, default=96, help="of --real, all at once")
    parser.add_argument("--scale", type=int, default=4, help="of --real: by what lengths and pool are divided")
    parser.add_argument("--repeat", type=int, default=1, help="of --real: runs of each system, in turns")
    add_traces_argument(parser)
    args = parser.parse_args()
    trace = load_trace("ShareGPT", args.traces)
    command = " ".join(["python benchmarks/capacity.py", *sys.argv[1:]])
    if args.real:
        report = real_capacity(trace, num_requests=args.requests, scale=args.scale, repeat=args.repeat)
        publish(report, command, args.output)
        return
    report = capacity(trace, hours=args.hours, rates=args.rates, efficiencies=args.efficiencies)
    publish(report, command, args.output)
    if args.output is not None:
        from plots import plot_capacity

        batched = {name: p["mean_batched"] for name, p in report.data["at_2_requests_a_second"][EFFICIENCY].items()}
        plot_capacity(report.data["curves"], batched, args.output / "capacity.png")


if __name__ == "__main__":
    main()
