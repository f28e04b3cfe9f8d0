"""Prompt and output lengths like those of the PagedAttention paper's two traces (arXiv 2309.06180, section 6.1).

From real traces scaled to the paper's means, where a folder has them, and else drawn from a lognormal with these means.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

MAX_TOKENS = 2048
"""Prompt and output together: what the paper's models take."""
NUM_DRAWN = 5000
"""Requests in a trace that is drawn."""


class Origin(NamedTuple):
    """Where the lengths of a trace come from."""

    file: str
    columns: tuple[str, str]
    scales: tuple[float, float]
    """From what the file counts (words, another model's tokens) to the paper's means."""
    paper_means: tuple[float, float]
    spreads: tuple[float, float]
    """Standard deviations of the logarithms in the file, for lengths that are drawn."""


ORIGINS = {
    "Alpaca": Origin(
        "alpaca_helix_words.csv", ("input_len", "output_len"), (1.3871, 1.2091), (19.31, 58.45), (0.50, 1.04)
    ),
    "ShareGPT": Origin(
        "sharegpt_etalon_first_rounds.csv",
        ("num_prefill_tokens", "num_decode_tokens"),
        (0.8922, 0.7187),
        (161.31, 337.99),
        (1.31, 1.08),
    ),
}


class Trace(NamedTuple):
    """Lengths of requests in the order of the file, and what they are in words."""

    name: str
    source: str
    lengths: Int64[np.ndarray, "n 2"]
    """Prompt tokens and output tokens, at least one of each."""

    @property
    def means(self) -> tuple[float, float]:
        """Tokens of the mean prompt and the mean output."""
        prompt, output = self.lengths.mean(axis=0)
        return float(prompt), float(output)

    def sample(self, num_requests: int, seed: int = 0) -> Int64[np.ndarray, "n 2"]:
        """Requests at random, none twice."""
        chosen = np.random.default_rng(seed).permutation(len(self.lengths))[:num_requests]
        return self.lengths[chosen]

    def draw(self, num_requests: int, seed: int = 0) -> Int64[np.ndarray, "n 2"]:
        """Any number of requests at random, each time any of them; more begin with the same ones."""
        rng = np.random.default_rng(seed)
        return self.lengths[rng.integers(0, len(self.lengths), num_requests)]

    def quantiles(self, num_requests: int) -> Int64[np.ndarray, "n 2"]:
        """Few requests that stand for all: the middle ones of equal parts, with all in order of their tokens."""
        order = np.lexsort((*self.lengths.T, self.lengths.sum(axis=1)))
        return self.lengths[order[(np.arange(num_requests) * 2 + 1) * len(order) // (2 * num_requests)]]


def default_folder() -> Path | None:
    """Where the traces are in this project's workspace; they are not part of the repository."""
    folder = Path(__file__).parents[2] / "shared" / "traces"
    return folder if folder.is_dir() else None


def load_trace(name: str, folder: Path | None) -> Trace:
    """The trace of a name in `ORIGINS`, from `folder`, or drawn if that is None."""
    origin = ORIGINS[name]
    if folder is None:
        return Trace(name, "lognormal with the paper's means", _drawn(origin))
    with (folder / origin.file).open(newline="") as file:
        rows = [[int(row[column]) for column in origin.columns] for row in csv.DictReader(file)]
    lengths = np.maximum(np.rint(np.array(rows) * origin.scales).astype(np.int64), 1)
    source = f"{origin.file}, scaled to the paper's means"
    return Trace(name, source, lengths[lengths.sum(axis=1) <= MAX_TOKENS])


def add_traces_argument(parser: argparse.ArgumentParser) -> None:
    """`--traces`: where the traces are."""
    parser.add_argument("--traces", type=existing_folder, default=default_folder(), help="folder of the traces")


def existing_folder(name: str) -> Path:
    """An argument that is a folder."""
    if not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}")
    return Path(name)


def _drawn(origin: Origin) -> Int64[np.ndarray, "n 2"]:
    rng = np.random.default_rng(0)
    columns = []
    for mean, spread in zip(origin.paper_means, origin.spreads, strict=True):
        lengths = rng.lognormal(0.0, spread, NUM_DRAWN)
        lengths = np.minimum(lengths / lengths.mean() * mean, MAX_TOKENS // 2)
        columns.append(np.rint(lengths * (mean / lengths.mean())))  # what the limit took, the others get
    lengths = np.maximum(np.stack(columns, axis=1).astype(np.int64), 1)
    return lengths[lengths.sum(axis=1) <= MAX_TOKENS]
