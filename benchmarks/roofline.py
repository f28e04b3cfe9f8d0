"""The shortest time that work can take on a card: its bytes over the bandwidth, or its operations over their rate."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Card(NamedTuple):
    """Bytes and bf16 operations per second."""

    name: str
    bandwidth: float
    flops: float
    source: str


DATASHEETS = ("A100", "H100", "H200")
CARDS = {
    "A100": Card("A100", 2.04e12, 312e12, "datasheet of the A100 SXM 80 GB"),
    "H100": Card("H100", 3.35e12, 989e12, "datasheet of the H100 SXM"),
    "H200": Card("H200", 4.8e12, 989e12, "datasheet of the H200 SXM"),
    "H200-measured": Card("H200-measured", 4.3e12, 790e12, "a copy of 8.6 GB and a product of 8192^3 on one, 2026-10"),
}


class Floor(NamedTuple):
    """A lower bound, and what sets it."""

    seconds: float
    bound: str


def floor_of(num_bytes: float, num_flops: float, bandwidth: float, flops: float) -> Floor:
    """The larger of the two times."""
    memory, compute = num_bytes / bandwidth, num_flops / flops
    return Floor(memory, "memory") if memory >= compute else Floor(compute, "compute")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """A Markdown table, its first `num_left` columns aligned left."""
    rule = ["---"] * num_left + ["--:"] * (len(header) - num_left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def prediction(cards: Sequence[str], work: Sequence[tuple[str, int, int]]) -> str:
    """What the cards would need at least for the work, given as (name, bytes, operations): nothing of it measured."""
    chosen = [CARDS[name] for name in cards]
    header = ["shape", "MB, predicted", "GFLOP, predicted"]
    header += [f"{card.name}: floor µs, predicted" for card in chosen]
    rows = []
    for name, num_bytes, num_flops in work:
        cells = [name, f"{num_bytes / 1e6:,.1f}", f"{num_flops / 1e9:,.1f}"]
        for card in chosen:
            floor = floor_of(num_bytes, num_flops, card.bandwidth, card.flops)
            cells.append(f"{1e6 * floor.seconds:,.1f} ({floor.bound})")
        rows.append(cells)
    sources = [
        f"- {card.name}: {card.bandwidth / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s in bf16 ({card.source})"
        for card in chosen
    ]
    return "\n".join(["Every number is predicted, none measured.", "", *sources, "", markdown(header, rows)])


def cards_named(names: Sequence[str]) -> list[str]:
    """The cards by their datasheets, and as measured if they were."""
    return [card for card in CARDS if card.removesuffix("-measured") in names]


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go, and `--predict`: the same for whatever is measured against a floor."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument(
        "--predict", nargs="+", choices=DATASHEETS, help="print what it needs at least; needs no device"
    )
