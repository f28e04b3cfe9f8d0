"""A benchmark's figures as tables for people and as JSON for programs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagedjax.serving.bench.client import Outcome
from pagedjax.serving.bench.metrics import Quantiles, Summary

LATENCIES = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "inter-token latency": "itl_s",
    "end to end": "e2e_s",
    "normalized latency": "normalized_s",
}


@dataclass(frozen=True, kw_only=True)
class RateResult:
    """One rate's figures, and what they were made of."""

    rate: float
    """Requests a second that were sent; infinite for all at once."""
    summary: Summary
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All rates of a call, with what it was called with."""

    settings: dict[str, Any]
    notes: Sequence[str]
    """What the requests were like, in words."""
    results: Sequence[RateResult]

    def as_dict(self, with_requests: bool = False) -> dict[str, Any]:
        """For JSON, which has no infinity: that rate is "inf"."""
        results = []
        for result in self.results:
            entry = {"rate": _rate(result.rate), **asdict(result.summary)}
            if with_requests:
                entry["requests"] = [asdict(outcome) for outcome in result.outcomes]
            results.append(entry)
        return {"settings": self.settings, "notes": list(self.notes), "results": results}

    def write(self, folder: Path) -> None:
        """results.json, with every request. OSError if that is not possible."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_dict(with_requests=True), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text, encoding="utf-8")


def print_report(result: BenchResult, console: Console | None = None) -> None:
    """The tables, on stdout unless told otherwise."""
    (console or Console()).print(as_table(result))


def as_table(result: BenchResult) -> RenderableType:
    """A table for each rate; one more with a line for each if there are several."""
    parts: list[RenderableType] = [Text(note) for note in result.notes]
    parts += [_rate_table(each) for each in result.results]
    if len(result.results) > 1:
        parts.append(_rates_table(result.results))
    return Group(*parts)


def _rate_table(result: RateResult) -> Table:
    summary = result.summary
    pace = "all at once" if math.isinf(result.rate) else f"{result.rate:g} requests/s"
    table = Table("ms", title=f"{pace}: {summary.num_completed} of {summary.num_requests} requests completed")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name, field in LATENCIES.items():
        values: Quantiles | None = getattr(summary, field)
        table.add_row(name, *(["-"] * 5 if values is None else [f"{1e3 * v:,.1f}" for v in asdict(values).values()]))
    table.caption = "\n".join(_lines(summary))
    table.caption_justify = "left"
    return table


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:,.1f} output tokens/s, "
        f"{summary.total_tokens_per_s:,.1f} tokens/s with prompts, over {summary.duration_s:.1f} s",
        f"{summary.num_prompt_tokens:,} prompt and {summary.num_output_tokens:,} output tokens, "
        f"at most {summary.max_in_flight} requests in flight",
    ]
    if summary.goodput is not None:
        lines.append(f"goodput {summary.goodput:.2f} requests/s: {summary.num_good} met the objectives")
    if summary.failures:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.failures.items()))
        lines.append(f"FAILED: {kinds}")
    if summary.num_short:
        lines.append(f"{summary.num_short} answers ended before the tokens that were asked for")
    if summary.num_late:
        lines.append(f"{summary.num_late} requests were sent late, at most by {summary.max_late_s:.3f} s")
    return lines


def _rates_table(results: Sequence[RateResult]) -> Table:
    table = Table(title="All rates; latencies in ms")
    columns = ("rate", "done", "req/s", "good\nreq/s", "output\ntok/s", "ttft\np50", "p99", "tpot\np50", "p99")
    for name in (*columns, "normalized\nmean"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        summary = result.summary
        latencies = (
            (summary.ttft_s, "p50"),
            (summary.ttft_s, "p99"),
            (summary.tpot_s, "p50"),
            (summary.tpot_s, "p99"),
            (summary.normalized_s, "mean"),
        )
        table.add_row(
            f"{result.rate:g}",
            f"{summary.num_completed}/{summary.num_requests}",
            f"{summary.requests_per_s:.2f}",
            "-" if summary.goodput is None else f"{summary.goodput:.2f}",
            f"{summary.output_tokens_per_s:,.1f}",
            *("-" if values is None else f"{1e3 * getattr(values, name):,.0f}" for values, name in latencies),
        )
    return table


def _rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate
