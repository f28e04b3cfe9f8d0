"""What `batch_invariant=True` costs: tokens per second with and without it, by how many requests run together.

    python benchmarks/batch_invariance.py [--requests 1 8 32 64] [--repeat 3] [--output FOLDER]

Every request decodes from its first token to its last beside all others. Two engines on the same params take turns in
one run, and medians count. Steps of fewer than 64 tokens are padded to 64 with the option, so few requests pay most. On
a CPU alone, as the option is.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tables import Report, publish, section, table
from tiny_model import new_llm


def new_engines(model: str, num_requests: int, num_tokens: int) -> dict[bool, Any]:
    """Without the option and with it; all requests have room."""
    sizes = {
        "block_size": 64,
        "num_blocks": num_requests * (2 + num_tokens // 64),
        "max_num_seqs": num_requests,
        "max_model_len": num_tokens,
        "enable_prefix_caching": False,
    }
    return {is_invariant: new_llm(model, batch_invariant=is_invariant, **sizes) for is_invariant in (False, True)}


def measure(model: str, num_requests: int, prompt_len: int, max_tokens: int, repeat: int) -> dict[str, Any]:
    """Tokens per second of each run of each engine. The first, which compiles, does not count."""
    from pagedjax import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    engines = new_engines(model, num_requests, prompt_len + max_tokens)
    vocab_size = engines[True].engine.requests.vocab_size
    prompts = np.random.default_rng(0).integers(10, vocab_size, (num_requests, prompt_len)).tolist()
    for i in range(repeat + 1):
        for is_invariant, llm in engines.items():
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i > 0:
                speeds[is_invariant].append(num_requests * max_tokens / (time.perf_counter() - start))
                name = "batch-invariant" if is_invariant else "plain"
                print(f"{num_requests} requests, {name}: {speeds[is_invariant][-1]:.1f} tokens/s", flush=True)
    return {"num_requests": num_requests, "plain": speeds[False], "batch_invariant": speeds[True]}


def report_of(model: str, results: list[dict[str, Any]], prompt_len: int, max_tokens: int, repeat: int) -> Report:
    rows = []
    for result in results:
        plain, invariant = (statistics.median(result[name]) for name in ("plain", "batch_invariant"))
        rows.append([result["num_requests"], f"{plain:.1f}", f"{invariant:.1f}", f"**{invariant / plain:.2f}x**"])
    text = section(
        f"batch_invariant: {model}, requests that run together",
        f"Prompts of {prompt_len} tokens and {max_tokens} new ones each, float32, a CPU; medians of {repeat} runs of "
        "each engine in turns, of output tokens per second, prompts included.",
        table(["requests", "plain, tok/s", "batch-invariant, tok/s", "ratio"], rows),
    )
    return Report("batch_invariance", text, {"model": model, "results": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help='a name, a folder, a .gguf file or "tiny"')
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64], help="running together")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine that medians are taken of")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write NAME.md and NAME.json there")
    args = parser.parse_args()
    work = args.prompt_len, args.max_tokens, args.repeat
    results = [measure(args.model, num_requests, *work) for num_requests in args.requests]
    command = " ".join(["python benchmarks/batch_invariance.py", *sys.argv[1:]])
    publish(report_of(args.model, results, *work), command, args.output)


if __name__ == "__main__":
    main()
