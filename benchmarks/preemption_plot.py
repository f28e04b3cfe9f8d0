"""The figure of `preemption.py` as a PNG file; needs matplotlib (`pip install -e '.[dev]'`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"swap_out": "#92c5de", "swap_in": "#4393c3", "swap": "#2166ac", "recompute": "#b2182b", "none": "#1b7837"}
STYLES = ("-", "--", ":")
"""Of the contexts, the first in front."""

Results = Sequence[Mapping[str, Any]]


def plot_preemption(parts: Mapping[str, Results], file: Path) -> None:
    """What was measured, a panel for each part: times of a context, and throughput, by block size."""
    figure = Figure(figsize=(4.6 * len(parts), 3.4), layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    draw = {"preemption_micro": _draw_times, "preemption": _draw_throughput}
    for axes, (name, results) in zip(panels, parts.items(), strict=True):
        draw[name](axes, results)
        axes.set_xlabel("block size, tokens")
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=100)


def _draw_times(axes: Axes, results: Results) -> None:
    contexts = list(dict.fromkeys(result["context"] for result in results))
    for context, style in zip(contexts, STYLES, strict=False):
        rows = [result for result in results if result["context"] == context]
        sizes = [str(row["block_size"]) for row in rows]
        for way in ("swap_out", "swap_in", "recompute"):
            times = [row[f"{way}_ms"] for row in rows]
            label = f"{way.replace('_', ' ')}, {context} tokens"
            axes.plot(sizes, times, style, marker="o", markersize=3, color=COLORS[way], label=label)
    axes.set(ylabel="ms", yscale="log")


def _draw_throughput(axes: Axes, results: Results) -> None:
    width = 0.27
    for i, way in enumerate(("none", "recompute", "swap")):
        places = [place + (i - 1) * width for place in range(len(results))]
        speeds = [result["output_tokens_per_s"][way] for result in results]
        label = "no preemption" if way == "none" else way
        axes.bar(places, speeds, width, color=COLORS[way], label=label)
    axes.set_xticks(range(len(results)), [str(result["block_size"]) for result in results])
    axes.set_ylabel("output tokens/s")
