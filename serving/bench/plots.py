"""Figures of a benchmark as PNG files; needs matplotlib."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.serving.bench.client import Outcome
from pagedjax.serving.bench.metrics import e2e_s, normalized_s, tpot_s, ttft_s
from pagedjax.serving.bench.report import BenchResult, RateResult

PANELS = {
    "time to first token, s": ttft_s,
    "time per output token, s": tpot_s,
    "end to end, s": e2e_s,
    "normalized latency, s/token": normalized_s,
}


def check_matplotlib() -> None:
    """Raises RuntimeError that says what to do if it is missing; better before a long run than after it."""
    if find_spec("matplotlib") is None:
        raise RuntimeError("plots need matplotlib: pip install matplotlib, or plots=False (--no-plots)")


def write_plots(result: BenchResult, folder: Path) -> list[Path]:
    """latencies.png, timeline.png, and rates.png if there are several finite rates; the files."""
    files = [folder / "latencies.png", folder / "timeline.png"]
    _plot_latencies(result.results, files[0])
    _plot_timeline(result.results, files[1])
    finite = [each for each in result.results if not math.isinf(each.rate)]
    if len(finite) > 1:
        files.append(folder / "rates.png")
        _plot_rates(sorted(finite, key=lambda each: each.rate), files[-1])
    return files


def _plot_latencies(results: Sequence[RateResult], file: Path) -> None:
    """Which share of the requests took at most so long."""
    figure = _figure((9, 6))
    for axes, (name, latency) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for result in results:
            values = np.sort(_values(result.outcomes, latency))
            shares = np.arange(1, len(values) + 1) / max(len(values), 1)
            axes.step(values, shares, where="post", label=_label(result))
        axes.set(xlabel=name, ylabel="share of requests", ylim=(0, 1.02), xlim=(0, None))
    figure.axes[0].legend(frameon=False)
    figure.savefig(file, dpi=100)


def _plot_timeline(results: Sequence[RateResult], file: Path) -> None:
    """Time to the first token by when the request was due, and how many requests were in flight."""
    figure = _figure((9, 2.6 * len(results)))
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (left, right), result in zip(rows, results, strict=True):
        completed = [outcome for outcome in result.outcomes if outcome.error is None]
        left.plot([o.planned_s for o in completed], [ttft_s(o) for o in completed], ".", markersize=4)
        failed = [outcome for outcome in result.outcomes if outcome.error is not None]
        left.plot([o.planned_s for o in failed], [0.0] * len(failed), "x", color="#b2182b")
        left.set(title=_label(result), xlabel="due, s", ylabel="time to first token, s", ylim=(0, None), xlim=(0, None))
        moments = sorted([(o.sent_s, 1) for o in result.outcomes] + [(o.end_s, -1) for o in result.outcomes])
        in_flight = np.cumsum([change for _, change in moments])
        right.step([moment for moment, _ in moments], in_flight, where="post")
        right.set(title=_label(result), xlabel="s", ylabel="requests in flight", ylim=(0, None))
    figure.savefig(file, dpi=100)


def _plot_rates(results: Sequence[RateResult], file: Path) -> None:
    """As the PagedAttention paper's Figure 12: normalized latency against the request rate; and what was achieved."""
    figure = _figure((9, 3.4))
    left, right = figure.subplots(1, 2)
    rates = [result.rate for result in results]
    latencies = [each.summary.normalized_s.mean if each.summary.normalized_s else math.nan for each in results]
    left.plot(rates, latencies, marker="o")
    left.set(xlabel="request rate, req/s", ylabel="normalized latency, s/token", ylim=(0, None), xlim=(0, None))
    right.plot(rates, [result.summary.requests_per_s for result in results], marker="o", label="completed")
    if results[0].summary.goodput is not None:
        right.plot(rates, [result.summary.goodput for result in results], marker="s", label="met the objectives")
    right.plot(rates, rates, color="#bdbdbd", linestyle=":", label="sent")
    right.set(xlabel="request rate, req/s", ylabel="req/s", ylim=(0, None), xlim=(0, None))
    right.legend(frameon=False)
    figure.savefig(file, dpi=100)


def _figure(size: tuple[float | int, float | int]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _values(outcomes: Sequence[Outcome], latency: Any) -> list[float]:
    values = [latency(outcome) for outcome in outcomes if outcome.error is None]
    return [value for value in values if value is not None]


def _label(result: RateResult) -> str:
    return "all at once" if math.isinf(result.rate) else f"{result.rate:g} req/s"
