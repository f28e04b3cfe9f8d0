"""Figures of the benchmarks as PNG files; needs matplotlib (`pip install -e '.[dev]'`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = {"paged": "#1b7837", "Oracle": "#2166ac", "Pow2": "#e08214", "Max": "#b2182b"}
USES = {
    "token states": "#5aae61",
    "reserved for later": "#d9ef8b",
    "internal fragmentation": "#fdae61",
    "external fragmentation, others": "#bdbdbd",
}


def plot_memory(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Figure 2: a bar for each system, of the shares that its memory is used for."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    names = [result["name"] for result in results]
    left = [0.0] * len(names)
    for i, (use, color) in enumerate(USES.items()):
        widths = [result["percent"][i] for result in results]
        bars = axes.barh(names, widths, left=left, color=color, label=use)
        axes.bar_label(bars, [f"{width:.1f}" if width > 3 else "" for width in widths], label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("% of KV memory, a request waiting")
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(file, dpi=100)


def plot_capacity(
    curves: Mapping[str, Sequence[Mapping[str, float]]], batched: Mapping[str, float], file: Path
) -> None:
    """Figures 12a and 13a: normalized latency against the request rate, and the mean batch at one rate."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for name, points in curves.items():
        rates, latencies = ([point[key] for point in points] for key in ("request_rate", "normalized_latency_s"))
        left.plot(rates, latencies, marker="o", markersize=3, color=COLORS[name], label=name)
    left.set(xlabel="request rate, req/s", ylabel="normalized latency, s/token", ylim=(0, 1), xlim=(0, None))
    left.legend(frameon=False)
    bars = right.bar(list(batched), list(batched.values()), color=[COLORS[name] for name in batched])
    right.bar_label(bars, fmt="%.1f")
    right.margins(y=0.12)
    right.set_ylabel("requests in a mean step, 2 req/s")
    figure.savefig(file, dpi=100)
