"""The offline workload that all engines are compared on: 48 requests with 4,482 prompt and 5,066 output tokens.

    python benchmarks/workload.py > workload.json

Lengths are lognormal, as in real traffic: many short ones, a few long ones. Token ids are random, so prompts share
nothing, and outputs run to their full length (greedy, end-of-sequence ignored): every engine does the same work.
"""

import json
from typing import Any

import numpy as np

NUM_REQUESTS = 48
SINGLE_LENGTH = 128
"""Output tokens of the request that runs alone."""


def workload() -> tuple[list[list[int]], list[int]]:
    """Prompts as token ids, and how many tokens to generate for each; the same at every call and on every machine."""
    rng = np.random.default_rng(0)

    def lengths(mean: int, spread: float, longest: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, NUM_REQUESTS)  # this has the mean `mean`
        return [int(length) for length in np.clip(drawn, 4, longest)]

    prompt_lengths = lengths(96, 0.8, longest=512)
    output_lengths = lengths(96, 0.6, longest=256)
    prompts = [rng.integers(10, 49_000, length).tolist() for length in prompt_lengths]
    return prompts, output_lengths


def workload_for_peers(
    num_requests: int = NUM_REQUESTS, *, max_model_len: int = 1024, repeat: int = 2
) -> dict[str, Any]:
    """All that a script in `peers/` reads: the first requests, and what to run them with."""
    prompts, output_lengths = workload()
    return {
        "prompts": prompts[:num_requests],
        "output_lengths": output_lengths[:num_requests],
        "single_length": SINGLE_LENGTH,
        "max_model_len": max_model_len,
        "repeat": repeat,
    }


if __name__ == "__main__":
    print(json.dumps(workload_for_peers()))
