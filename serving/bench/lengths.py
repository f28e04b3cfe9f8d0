"""How many tokens the prompts and answers of a run have: as in a file of a trace, or drawn."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

PAPER_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
"""Tokens of the mean prompt and answer in the PagedAttention paper's traces (arXiv 2309.06180, section 6.1)."""
SPREADS = (0.9, 0.9)
"""Standard deviations of the logarithms of lengths that are drawn; real chats have 0.5 to 1.3."""
COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("input_len", "output_len"),
    ("prompt_len", "output_len"),
)
"""Names that public traces have for the two lengths: Etalon's, Azure's, Mooncake's, Helix', and plain ones."""

Pairs = Int64[np.ndarray, "n 2"]


class Lengths(NamedTuple):
    """Tokens of prompt and answer for each request, and where they come from in words."""

    source: str
    pairs: Pairs
    num_shortened: int = 0
    """Requests that were longer than the server takes."""


def draw_lengths(spec: str, num_requests: int, *, seed: int = 0, means: str | None = None) -> Lengths:
    """Lengths for a run.

    `spec` is "sharegpt" or "alpaca" (drawn with the paper's means), "IN,OUT" (drawn with these means), or a CSV file,
    of which rows are taken at random; with `means`, "IN,OUT", its lengths are scaled to these. Raises ValueError that
    names the argument, or OSError.
    """
    rng = np.random.default_rng(seed)
    if spec.lower() in PAPER_MEANS:
        if means is not None:
            raise ValueError(f"means scale the lengths of a file, but lengths is {spec!r}: give means as lengths")
        pair = PAPER_MEANS[spec.lower()]
        return Lengths(f"lognormal with the means of the paper's {spec}", _lognormal(pair, num_requests, rng))
    if "," in spec and not Path(spec).exists():
        if means is not None:
            raise ValueError(f"means scale the lengths of a file, but lengths is {spec!r}: give one of them")
        return Lengths(f"lognormal with means {spec}", _lognormal(_pair("lengths", spec), num_requests, rng))
    pairs = read_trace(Path(spec))
    source = f"{Path(spec).name}, {len(pairs)} rows"
    if means is not None:
        pairs = pairs * (np.array(_pair("means", means)) / pairs.mean(axis=0))
        source += f", scaled to means {means}"
    chosen = rng.permutation(len(pairs))[:num_requests]
    if len(chosen) < num_requests:  # more than there are: some come again
        chosen = rng.integers(0, len(pairs), num_requests)
    return Lengths(source, np.maximum(np.rint(pairs[chosen]), 1).astype(np.int64))


def read_trace(file: Path) -> Pairs:
    """Prompt and output lengths of a CSV with a header that has the columns of one of `COLUMNS`. Rows without prompt or
    output are left out. Raises ValueError that names the file and what is wrong with it, or OSError."""
    if not file.is_file():
        names = ", ".join(PAPER_MEANS)
        raise ValueError(f"lengths: got {str(file)!r}, expected one of {names}, means such as 161,338, or a CSV file")
    with file.open(newline="", encoding="utf-8-sig") as opened:
        rows = csv.DictReader(opened)
        header = list(rows.fieldnames or [])
        columns = next((pair for pair in COLUMNS if set(pair) <= set(header)), None)
        if columns is None:
            known = "; ".join(", ".join(pair) for pair in COLUMNS)
            raise ValueError(f"{file}: got the columns {', '.join(header)[:200]}, expected two such as {known}")
        found = []
        for row in rows:
            try:
                found.append([int(float(row[column])) for column in columns])
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{file}, line {rows.line_num}: {columns} must be numbers, got {row}") from error
    pairs = np.array([pair for pair in found if min(pair) > 0], np.int64)
    if not len(pairs):
        raise ValueError(f"{file} has no row with a prompt and an output")
    return pairs


def shorten(lengths: Lengths, max_model_len: int | None, reserve: int = 0) -> Lengths:
    """Requests that are longer than the server's context, less `reserve` tokens, cut in the ratio of their parts."""
    if max_model_len is None:
        return lengths
    most = max_model_len - reserve
    if most < 2:
        raise ValueError(f"the server's context of {max_model_len} tokens is too short for a benchmark")
    pairs, totals = lengths.pairs, lengths.pairs.sum(axis=1)
    is_long = totals > most
    prompts = np.clip(pairs[:, 0] * most // totals, 1, most - 1)
    cut = np.stack([prompts, most - prompts], axis=1)
    return Lengths(lengths.source, np.where(is_long[:, None], cut, pairs), int(is_long.sum()))


def _pair(name: str, text: str) -> tuple[float, float]:
    try:
        prompt, output = (float(part) for part in text.split(","))
    except ValueError:
        prompt = output = float("nan")
    if not (1 <= prompt <= 1e7 and 1 <= output <= 1e7):
        raise ValueError(f"{name}: got {text!r}, expected two means of at least 1 token, such as 161,338")
    return prompt, output


def _lognormal(means: Sequence[float], num_requests: int, rng: np.random.Generator) -> Pairs:
    """Each length from another of `num_requests` equal parts of its distribution: few have nearly the means, too."""
    columns = []
    for mean, spread in zip(means, SPREADS, strict=True):
        shares = (rng.permutation(num_requests) + rng.random(num_requests)) / num_requests
        normal = np.array([NormalDist().inv_cdf(share) for share in np.clip(shares, 1e-6, 1 - 1e-6)])
        columns.append(mean * np.exp(spread * normal - spread**2 / 2))
    return np.maximum(np.rint(np.stack(columns, axis=1)), 1).astype(np.int64)
