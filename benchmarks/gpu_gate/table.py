"""What the gate found, as a Markdown table for people and as JSON for programs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.gpu_gate.aot import Program
from benchmarks.gpu_gate.cases import CONTEXT, Case
from benchmarks.gpu_gate.ptx import Kernel, widest


class Result(NamedTuple):
    case: Case
    program: Program
    breaches: list[str]

    @property
    def predicted_us(self) -> float:
        """Microseconds in which the card's memory moves what must move. Predicted: nothing was run."""
        return self.case.moved_bytes / self.program.card.bytes_per_second * 1e6


HEADER = """\
# GPU programs, compiled with jax {version}

Made by `make gpu-gate`: compiled ahead of time, and never run. What the columns mean stands in
[the gate's README](../../gpu_gate/README.md). "Must move" counts weights, KV at {context:,} tokens a request, and what
goes in and out; "predicted" is that over the card's memory bandwidth: no time here was measured.
"""
COLUMNS = (
    "case",
    "kernel",
    "registers",
    "spills, B",
    "shared, B",
    "threads",
    "mma",
    "wgmma",
    "cp.async",
    "widest load, B",
    "widest store, B",
    "atomics",
    "temporary, MB",
    "in place, MB",
    "must move, MB",
    "predicted, us",
    "verdict",
)


def write(results: list[Result], folder: Path) -> Path:
    """Writes `jax-VERSION.md` and `.json` into a folder; the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"jax-{jax.__version__}.md"
    path.write_text(markdown(results))
    programs = [_program_json(result) for result in results]
    path.with_suffix(".json").write_text(json.dumps({"jax": jax.__version__, "programs": programs}, indent=1) + "\n")
    return path


def markdown(results: list[Result]) -> str:
    """A table per card."""
    parts = [HEADER.format(version=jax.__version__, context=CONTEXT)]
    for card in dict.fromkeys(result.program.card for result in results):
        rows = [row for result in results if result.program.card == card for row in _rows(result)]
        lines = [" | ".join(COLUMNS), "|".join(["---"] * 2 + ["---:"] * (len(COLUMNS) - 3) + ["---"])]
        lines += [" | ".join(row) for row in rows]
        parts.append(f"## {card.name}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n")
    return "\n".join(parts)


def _rows(result: Result) -> list[list[str]]:
    """A line for each Pallas kernel, and one for those of XLA together where there is no other and in whole steps."""
    program, pallas = result.program, result.program.pallas_kernels
    lines = [[f"`{kernel.name}`", *_cells([kernel])] for kernel in sorted(pallas, key=lambda kernel: kernel.name)]
    others = [kernel for kernel in program.kernels if kernel not in pallas]
    if others and (not pallas or result.case.donates_pool):
        lines.append([f"{len(others)} of XLA", *_cells(others)])
    lines = lines or [["none", *[""] * 10]]
    memory = [f"{size / 1e6:,.1f}" for size in (program.temp_bytes, program.alias_bytes, result.case.moved_bytes)]
    last = [*memory, f"{result.predicted_us:,.1f}", "REFUSED" if result.breaches else "ok"]
    rows = [[result.case.name, *line, *last] for line in lines[:1]]
    return rows + [["", *line, *[""] * len(last)] for line in lines[1:]]


def _cells(kernels: list[Kernel]) -> list[str]:
    """The largest need of several kernels, and the sum of their instructions."""
    numbers = (
        max(kernel.registers for kernel in kernels),
        sum(kernel.spill_bytes for kernel in kernels),
        max(kernel.shared_bytes for kernel in kernels),
        max(kernel.num_threads for kernel in kernels),
        sum(kernel.mma for kernel in kernels),
        sum(kernel.wgmma for kernel in kernels),
        sum(kernel.cp_async for kernel in kernels),
        max(widest(kernel.loads) for kernel in kernels),
        max(widest(kernel.stores) for kernel in kernels),
        sum(kernel.atomics for kernel in kernels),
    )
    return [f"{number:,}" for number in numbers]


def _program_json(result: Result) -> dict[str, Any]:
    program = result.program
    return {
        "case": result.case.name,
        "card": program.card.name,
        "breaches": result.breaches,
        "argument_bytes": program.argument_bytes,
        "output_bytes": program.output_bytes,
        "temp_bytes": program.temp_bytes,
        "alias_bytes": program.alias_bytes,
        "moved_bytes": result.case.moved_bytes,
        "predicted_us": round(result.predicted_us, 2),
        "num_xla_kernels": len(program.kernels) - len(program.pallas_kernels),
        "pallas_kernels": [
            {name: value for name, value in vars(kernel).items() if name != "ptx"}
            for kernel in sorted(program.pallas_kernels, key=lambda kernel: kernel.name)
        ],
    }
