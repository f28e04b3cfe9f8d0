"""Several decodes per step and asynchronous scheduling: throughput, and the host's share of a step's time.

    python benchmarks/multi_step.py [--requests 64] [--steps 1 2 4 8 16] [--repeat 3] [--output FOLDER]

All requests decode together from their first token to their last: nobody joins or leaves, so that a step is a decode of
all of them. An engine for each `num_decode_steps`, with and without `async_scheduling`, all on the same params; they
take turns in one run, medians count, and the tokens must be the same. Prints a Markdown table; `--output` keeps it, and
all that was measured as JSON.

Two shares are given, of the wall time of the steps. "Host": all that is neither a call of the runner nor waiting for
tokens, that is Python that schedules, builds batches, resolves and processes. "Exposed": the part of it in which the
device had nothing to do, at most (`host_clock.py`); asynchronous scheduling hides the rest behind the device's work. A
call of the runner gives the device a program after the other, and waits where its queue is full: with several decodes
that is most of their time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from host_clock import HostClock
from tables import Report, publish, section, table
from tiny_model import new_llm

DECODE_STEPS = (1, 2, 4, 8, 16)
PARTS = ("step_ms", "launch_ms", "wait_ms", "host_ms", "exposed_ms", "host_share", "exposed_share")
WARM_UP_STEPS = 4
"""Steps of the first run, which compiles and does not count."""


class Work(NamedTuple):
    """Requests that run together."""

    prompts: list[list[int]]
    num_decodes: int
    """Tokens of each after the first."""


def draw_work(vocab_size: int, num_requests: int, prompt_len: int, num_decodes: int) -> Work:
    """Prompts of random ids, the same at every call."""
    rng = np.random.default_rng(0)
    return Work(rng.integers(10, vocab_size, (num_requests, prompt_len)).tolist(), num_decodes)


def new_engine(model: str, work: Work, num_decode_steps: int, async_scheduling: bool) -> Any:
    """An engine in which all requests have room, and whose first step computes all prompts."""
    num_tokens, block_size = len(work.prompts[0]) + work.num_decodes + 1, 64
    return new_llm(
        model,
        block_size=block_size,
        num_blocks=len(work.prompts) * (1 + -(-num_tokens // block_size)),  # and one each that admission leaves free
        max_num_seqs=len(work.prompts),
        max_num_batched_tokens=sum(map(len, work.prompts)),
        max_model_len=num_tokens,
        enable_prefix_caching=False,
        num_decode_steps=num_decode_steps,
        async_scheduling=async_scheduling,
    ).engine


def decode(engine: Any, work: Work) -> tuple[dict[str, Any], list[list[int]]]:
    """Decodes all of `work`: what the clock says of the steps after the prompts, and the tokens."""
    from pagedjax import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=work.num_decodes + 1, ignore_eos=True, detokenize=False)
    names = [engine.add_request(prompt, params) for prompt in work.prompts]
    started: set[str] = set()
    clock = HostClock(engine)
    while len(started) < len(names):
        started |= {output.request_id for output in engine.step()}
    clock.clear()
    token_ids, num_before, start = {}, engine.stats().num_output_tokens, time.perf_counter()
    while engine.has_unfinished():
        for output in engine.step():
            token_ids[output.request_id] = output.outputs[0].token_ids
    seconds = time.perf_counter() - start
    clock.close()
    num_tokens = engine.stats().num_output_tokens - num_before
    result = {"output_tokens_per_s": num_tokens / seconds, "num_steps": clock.num_steps, **clock.per_step()}
    return result, [token_ids[name] for name in names]


def multi_step(
    model: str, *, num_requests: int, prompt_len: int, num_decodes: int, decode_steps: Sequence[int], repeat: int
) -> Report:
    """All ways in turns."""
    ways = [(steps, is_async) for is_async in (False, True) for steps in decode_steps]
    work = draw_work(_vocab_size(model), num_requests, prompt_len, num_decodes)
    first = work._replace(num_decodes=min(WARM_UP_STEPS * max(decode_steps), num_decodes))
    engines = {way: new_engine(model, work, *way) for way in ways}
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {way: [] for way in ways}
    expected: list[list[int]] | None = None
    for i in range(repeat + 1):
        for way, engine in engines.items():
            result, token_ids = decode(engine, work if i > 0 else first)
            if i == 0:
                continue
            runs[way].append(result)
            expected = token_ids if expected is None else expected
            assert token_ids == expected, f"other tokens with (num_decode_steps, async_scheduling) = {way}"
            print(f"{num_requests} requests, {way}: {result['output_tokens_per_s']:.1f} tokens/s", flush=True)
    data = {
        "model": model,
        "num_requests": num_requests,
        "prompt_len": prompt_len,
        "num_decodes": num_decodes,
        "results": [
            {"num_decode_steps": steps, "async_scheduling": is_async, **_median(runs[steps, is_async]),
             "runs": runs[steps, is_async]}
            for steps, is_async in ways
        ],
    }  # fmt: skip
    return Report(f"multi_step_{num_requests}", _text(data, repeat), data)


def _vocab_size(model: str) -> int:
    return new_llm(model, num_blocks=1, max_model_len=8, max_num_seqs=1).engine.requests.vocab_size


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in ("output_tokens_per_s", *PARTS)}


def _text(data: dict[str, Any], repeat: int) -> str:
    results = data["results"]
    base = results[0]["output_tokens_per_s"]
    rows = []
    for r in results:
        speed = r["output_tokens_per_s"]
        times = [f"{r[part]:.2f}" for part in PARTS if part.endswith("_ms")]
        shares = [f"**{100 * r[part]:.2f} %**" for part in PARTS if part.endswith("_share")]
        way = f"{r['num_decode_steps']}{', async' if r['async_scheduling'] else ''}"
        rows.append([way, f"{speed:.1f}", f"{speed / base:.3f}x", *times, *shares])
    columns = ["decodes per step", "output tok/s", f"to {results[0]['num_decode_steps']}, not async", "step, ms"]
    columns += ["calls of the runner", "waiting", "host", "exposed", "host's share", "exposed share"]
    return section(
        f"Several decodes per step: {data['num_requests']} running requests of {data['model']}",
        f"Prompts of {data['prompt_len']} tokens, {data['num_decodes']} decodes of all of them; medians of {repeat} "
        "runs of each engine in turns; milliseconds of a mean step. All have the same tokens.",
        table(columns, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help='a name, a folder, a .gguf file or "tiny"')
    parser.add_argument("--requests", type=int, nargs="+", default=[64], help="running requests; a table for each")
    parser.add_argument("--steps", type=int, nargs="+", default=DECODE_STEPS, help="num_decode_steps, the base first")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--decodes", type=int, default=32, help="of each request; a multiple of all --steps is fair")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine that medians are taken of")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write NAME.md and NAME.json there")
    args = parser.parse_args()
    command = " ".join(["python benchmarks/multi_step.py", *sys.argv[1:]])
    for num_requests in args.requests:
        report = multi_step(
            args.model,
            num_requests=num_requests,
            prompt_len=args.prompt_len,
            num_decodes=args.decodes,
            decode_steps=args.steps,
            repeat=args.repeat,
        )
        publish(report, command, args.output)


if __name__ == "__main__":
    main()
