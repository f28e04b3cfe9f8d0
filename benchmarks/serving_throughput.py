"""The server beside `LLM.generate`: tokens per second and time to the first token on the shared workload.

    python benchmarks/serving_throughput.py [--rounds 2] [--repeat 2] [--output FOLDER]

All 48 requests of `workload.py` come at once: as streams over the loopback to `pagedjax serve`, and in one call of
`LLM.generate`, with the same options, texts made in both. Each is a process of its own, one after another, in turns,
so that a machine that gets slower meets both. The client's work is part of the server's time: on a CPU it takes cores
from the model. Needs Linux.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from serving_process import ServerProcess, server_process
from tables import Report, publish, section, table
from workload import workload

from pagedjax.serving.bench.arrivals import send_all
from pagedjax.serving.bench.client import Client, Planned
from pagedjax.serving.bench.metrics import summarize

GOAL = 0.9
"""Of the offline throughput is what the server is to keep."""

Run = dict[str, Any]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine in both cases."""
    return {"max_num_seqs": args.max_num_seqs, "max_model_len": 1024}


def run_offline(args: argparse.Namespace) -> list[Run]:
    """`LLM.generate`, in this process."""
    import pagedjax

    prompts, lengths = requests(args)
    # Without a prefix cache: it would find the prompts of the run before.
    llm = pagedjax.LLM(args.model, **engine_options(args), enable_prefix_caching=False, progress=False)
    params = [pagedjax.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)
    return [offline_run(llm, prompts, params) for _ in range(args.repeat)]


def offline_run(llm: Any, prompts: Sequence[list[int]], params: Sequence[Any]) -> Run:
    """One call of `generate`, with the time of each request's first token."""
    first_s: dict[str, float] = {}
    process = llm.engine.outputs.process

    def timed_process(*args: Any) -> Any:
        for output in (outputs := process(*args)):
            first_s.setdefault(output.request_id, time.perf_counter() - start)
        return outputs

    llm.engine.outputs.process = timed_process
    cpu_s, start = time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start
    del llm.engine.outputs.process
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    cpu_s = time.process_time() - cpu_s
    return run_of(wall_s, num_tokens, list(first_s.values()), {"engine_cpu_s": cpu_s, "client_cpu_s": 0.0})


def run_server(args: argparse.Namespace) -> list[Run]:
    """Streams to a server, from this process."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options(args).items()]
    with server_process(args.model, [*flags, "--no-prefix-caching", "--warm-up=plain"]) as server:
        asyncio.run(stream(server, *requests(args, 2)))
        return [asyncio.run(stream(server, *requests(args))) for _ in range(args.repeat)]


async def stream(server: ServerProcess, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Run:
    """All requests at once. RuntimeError if one fails."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=server.url, timeout=600.0, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        client = Client(http, model, fields={"temperature": 0.0, "ignore_eos": True})
        planned = [
            Planned(arrival_s=0.0, prompt=prompt, num_output_tokens=n)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        server_cpu_s, client_cpu_s = server.cpu_s(), time.process_time()
        outcomes = await send_all(client, planned)
        cpu = {"engine_cpu_s": server.cpu_s() - server_cpu_s, "client_cpu_s": time.process_time() - client_cpu_s}
    summary = summarize(outcomes)
    if summary.failures or summary.num_short:
        raise RuntimeError(f"{summary.failures}, {summary.num_short} answers too short")
    ttft_s = [outcome.chunk_s[0] for outcome in outcomes]
    return run_of(summary.duration_s, summary.num_output_tokens, ttft_s, cpu)


def requests(args: argparse.Namespace, num_requests: int | None = None) -> tuple[list[list[int]], list[int]]:
    """The first requests of the workload."""
    prompts, lengths = workload()
    count = args.num_requests if num_requests is None else num_requests
    return prompts[:count], lengths[:count]


def run_of(wall_s: float, num_tokens: int, ttft_s: Sequence[float], cpu: dict[str, float]) -> Run:
    """One run in figures."""
    ordered = sorted(ttft_s)
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": num_tokens / wall_s,
        "ttft_mean_s": statistics.mean(ordered),
        "ttft_p50_s": statistics.median(ordered),
        "ttft_max_s": ordered[-1],
        **cpu,
    }


def run_part(args: argparse.Namespace, part: str) -> list[Run]:
    """A part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        command = [sys.executable, __file__, f"--part={part}", f"--json={file}", f"--model={args.model}"]
        command += [f"--repeat={args.repeat}", f"--num-requests={args.num_requests}"]
        command += [f"--max-num-seqs={args.max_num_seqs}"]
        subprocess.run(command, check=True)
        return json.loads(file.read_text())


def report(args: argparse.Namespace, rounds: Sequence[dict[str, list[Run]]]) -> Report:
    """The table, with the ratio of each round and of all."""
    runs = {part: [run for each in rounds for run in each[part]] for part in PARTS}
    rows = []
    for i, each in enumerate(rounds, start=1):
        rows += [[f"{part}, round {i}, run {j}", *cells(run)] for part in PARTS for j, run in enumerate(each[part], 1)]
    median = {part: statistics.median(run["output_tokens_per_s"] for run in runs[part]) for part in PARTS}
    best = {part: max(run["output_tokens_per_s"] for run in runs[part]) for part in PARTS}
    ratios = {
        "median": median["server"] / median["offline"],
        "best": best["server"] / best["offline"],
        "by round": [
            statistics.median(run["output_tokens_per_s"] for run in each["server"])
            / statistics.median(run["output_tokens_per_s"] for run in each["offline"])
            for each in rounds
        ],
    }
    by_round = ", ".join(f"{ratio:.3f}" for ratio in ratios["by round"])
    columns = ["", "wall s", "output tok/s", "TTFT mean s", "p50 s", "max s", "CPU s, engine", "CPU s, client"]
    markdown = section(
        f"Server and offline: {args.num_requests} requests at once, {args.model}",
        table(columns, rows),
        f"Server / offline, output tokens per second: {ratios['median']:.3f} of medians, {ratios['best']:.3f} of the "
        f"best; by round {by_round}. At least {GOAL} is the goal.",
        f"{len(os.sched_getaffinity(0))} cores for model, server and client together. The client's time is part of "
        "the server's run.",
    )
    return Report("serving_throughput", markdown, {"rounds": list(rounds), "ratios": ratios, "model": args.model})


def cells(run: Run) -> list[str]:
    """A row of the table."""
    names = ("wall_s", "output_tokens_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_max_s", "engine_cpu_s", "client_cpu_s")
    return [f"{run[name]:.1f}" if name != "ttft_mean_s" else f"{run[name]:.2f}" for name in names]


PARTS = {"offline": run_offline, "server": run_server}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a .gguf file")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind, in turns")
    parser.add_argument("--repeat", type=int, default=2, help="runs in each process")
    parser.add_argument("--num-requests", type=int, default=48, help="the first of them, to try things out")
    parser.add_argument("--max-num-seqs", type=int, default=48)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the table and JSON there as well")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        args.json.write_text(json.dumps(PARTS[args.part](args)))
        return
    rounds = []
    for i in range(args.rounds):
        parts = list(PARTS) if i % 2 == 0 else list(PARTS)[::-1]
        rounds.append({part: run_part(args, part) for part in parts})
    command = " ".join(["python benchmarks/serving_throughput.py", *sys.argv[1:]])
    publish(report(args, rounds), command, args.output)


if __name__ == "__main__":
    main()
