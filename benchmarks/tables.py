"""What a part of a benchmark gives back: Markdown for people, data for a JSON file, and how they are made and kept."""

import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from offline_throughput import cpu_name


class Report(NamedTuple):
    """One part's results."""

    name: str
    markdown: str
    data: dict[str, Any]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [list(columns), ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def section(title: str, *paragraphs: str) -> str:
    """A heading and what stands under it."""
    return "\n\n".join([f"## {title}", *paragraphs]) + "\n"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    packages = {name: version(name) for name in ("jax", "flax", "numpy", "transformers")}
    return {"cpu": cpu_name(), "python": platform.python_version(), **packages}


def publish(report: Report, command: str, folder: Path | None) -> None:
    """Prints a report, and with a folder writes NAME.md and NAME.json there."""
    print(f"\n{report.markdown}", flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{report.name}.md").write_text(f"`{command}`\n\n{report.markdown}")
        data = {"command": command, "machine": machine(), **report.data}
        (folder / f"{report.name}.json").write_text(json.dumps(data, indent=1))
