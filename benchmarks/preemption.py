"""Recomputation against swapping, by block size: Figure 19 of the PagedAttention paper (arXiv 2309.06180).

    python benchmarks/preemption.py [--parts micro engine] [--block-sizes 8 16 32 64 128 256] [--output FOLDER]

micro: milliseconds to move the KV of a context out of the pool, and in again, and to compute it anew, as the engine
does it: in chunks of its budget. engine: output tokens a second of requests that fit the pool together ("none": no
preemption), and of the same requests in a pool of a part of that, where they are preempted and recomputed, or swapped
out; the three engines of a block size take turns, medians count, and ratios are to "none". Tokens may differ
where rounding decides between near ties of random prompts; how many requests have the same is printed. The last
column is what `preemption="auto"` chooses.

Prints Markdown tables; `--output` keeps them, all that was measured as JSON, and a figure (needs matplotlib).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from step_clock import Turns
from tables import Report, publish, section, table
from tiny_model import new_llm

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 1024)
PARTS = ("micro", "engine")
NUM_WARM_UPS = 2
"""Runs that do not count: they compile, the second one for a pool that was written to."""
PROMPT_LENS, OUTPUT_LENS = (16, 48), (48, 128)
"""From the shortest to the longest, in the engine's part: outputs that outgrow the pool."""


def micro(model: str, *, block_sizes: Sequence[int], contexts: Sequence[int], budget: int, repeat: int) -> Report:
    """Times of moving and of computing contexts, in turns, for each block size."""
    results = [
        {"block_size": size, "context": context, **_time_context(model, size, context, budget, repeat)}
        for context in contexts
        for size in block_sizes
    ]
    rows = []
    for r in results:
        swap_ms = r["swap_out_ms"] + r["swap_in_ms"]
        cells = [f"{ms:.1f}" for ms in (r["swap_out_ms"], r["swap_in_ms"], swap_ms, r["recompute_ms"])]
        rows.append([r["block_size"], r["context"], *cells, f"**{r['recompute_ms'] / swap_ms:.1f}x**"])
    columns = ["block size", "tokens", "swap out, ms", "swap in, ms", "both, ms", "recompute, ms", "recompute / swap"]
    text = f"{model}, chunks of {budget} tokens; medians of {repeat} runs in turns."
    data = {"model": model, "budget": budget, "results": results}
    return Report("preemption_micro", section("Figure 19a: swapping and recomputing", text, table(columns, rows)), data)


def _time_context(model: str, block_size: int, context: int, budget: int, repeat: int) -> dict[str, Any]:
    import jax

    from pagedjax import SamplingParams

    num_blocks = -(-context // block_size)
    engine = new_llm(
        model,
        block_size=block_size,
        num_blocks=num_blocks + 1,
        max_model_len=context,
        max_num_seqs=1,
        max_num_batched_tokens=min(budget, context),
        enable_prefix_caching=False,
        preemption="swap",
    ).engine
    runner, moves = engine.runner, {block: block for block in range(1, num_blocks + 1)}
    prompt = np.random.default_rng(0).integers(10, engine.requests.vocab_size, context).tolist()

    def swap_out() -> None:
        runner.swap_out(moves)
        jax.block_until_ready(list(runner.host_pool._blocks.values()))

    def swap_in() -> None:
        runner.swap_in(moves)
        jax.block_until_ready(runner.kv_cache)

    def recompute() -> None:
        engine.add_request(prompt, SamplingParams(max_tokens=0, detokenize=False))
        while engine.has_unfinished():
            engine.step()
        jax.block_until_ready(runner.kv_cache)

    ways: dict[str, Callable[[], None]] = {"swap_out": swap_out, "swap_in": swap_in, "recompute": recompute}
    turns = Turns()
    for i in range(-NUM_WARM_UPS, repeat):
        for way, function in ways.items():
            turns.time(way, function) if i >= 0 else function()
    print(f"micro: blocks of {block_size}, {context} tokens", flush=True)
    return {f"{way}_ms": 1e3 * turns.median(way) for way in ways} | turns.as_dict()


def end_to_end(
    model: str, *, block_sizes: Sequence[int], num_requests: int, pool_share: float, budget: int, repeat: int
) -> Report:
    """Throughput without preemption, with recomputation and with swapping, in turns, for each block size."""
    prompts, output_lens = draw_work(num_requests)
    results = [
        {"block_size": size, **_run_engines(model, size, prompts, output_lens, pool_share, budget, repeat)}
        for size in block_sizes
        if size <= OUTPUT_LENS[1]  # in larger blocks nobody grows
    ]
    rows = []
    for r in results:
        speed, count = r["output_tokens_per_s"], r["num_preemptions"]
        rows.append(
            [
                r["block_size"],
                *(f"{speed[way]:.1f}" for way in speed),
                *(f"**{speed[way] / speed['none']:.2f}x**" for way in ("recompute", "swap")),
                f"{speed['swap'] / speed['recompute']:.2f}x",
                *(f"{count[way]:g}" for way in ("recompute", "swap")),
                f"{r['num_swapped_out_blocks']:g}",
                f"{r['num_same']['recompute']}, {r['num_same']['swap']}",
                r["auto"],
            ]
        )
    columns = ["block size", "none, tok/s", "recompute, tok/s", "swap, tok/s", "recompute / none", "swap / none"]
    columns += [
        "swap / recompute",
        "preemptions, recompute",
        "preemptions, swap",
        "blocks swapped out",
        "same ids",
        "auto chose",
    ]
    text = (
        f"{model}: {num_requests} requests at once, {sum(map(len, prompts)):,} prompt and {sum(output_lens):,} output "
        f"tokens; the small pool has {pool_share:.0%} of the slots that all need at their ends. Output tokens a "
        f"second, medians of {repeat} runs in turns."
    )
    data = {"model": model, "num_requests": num_requests, "pool_share": pool_share, "results": results}
    return Report("preemption", section("Figure 19b: the engine", text, table(columns, rows)), data)


def draw_work(num_requests: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of random ids, and lengths of outputs; the same at every call, within any vocabulary."""
    rng = np.random.default_rng(0)
    input_lens, output_lens = (rng.integers(a, b + 1, num_requests) for a, b in (PROMPT_LENS, OUTPUT_LENS))
    return [rng.integers(10, 128, length).tolist() for length in input_lens], output_lens.tolist()


def _run_engines(
    model: str,
    block_size: int,
    prompts: Sequence[list[int]],
    output_lens: Sequence[int],
    pool_share: float,
    budget: int,
    repeat: int,
) -> dict[str, Any]:
    from pagedjax import SamplingParams

    most = [-(-(len(prompt) + n) // block_size) for prompt, n in zip(prompts, output_lens, strict=True)]
    small = max(round(pool_share * sum(most)), max(most) + 1)
    options = {"block_size": block_size, "max_num_seqs": len(prompts), "max_model_len": PROMPT_LENS[1] + OUTPUT_LENS[1]}
    options |= {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
    engines = {
        "none": new_llm(model, num_blocks=sum(most) + len(prompts), **options),
        "recompute": new_llm(model, num_blocks=small, **options),
        "swap": new_llm(model, num_blocks=small, preemption="swap", num_swap_blocks=sum(most), **options),
    }
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
    turns, ids = Turns(), {}
    for i in range(-NUM_WARM_UPS, repeat):
        for way, llm in engines.items():
            run = partial(llm.generate, prompts, params, use_tqdm=False)
            outputs = turns.time(way, run) if i >= 0 else run()
            ids[way] = [output.outputs[0].token_ids for output in outputs]
        print(f"engine: blocks of {block_size}, run {i + 1} of {repeat}", flush=True)

    def per_run(way: str, counter: str) -> float:
        return getattr(engines[way].stats(), counter) / (NUM_WARM_UPS + repeat)

    return {
        "num_blocks": small,
        "output_tokens_per_s": {way: sum(output_lens) / turns.median(way) for way in engines},
        "num_preemptions": {way: per_run(way, "num_preemptions") for way in engines},
        "num_swapped_out_blocks": per_run("swap", "num_swapped_out_blocks"),
        "num_same": {way: sum(a == b for a, b in zip(ids["none"], ids[way], strict=True)) for way in engines},
        "auto": engines["swap"].engine.runner.faster_preemption(),
        **turns.as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--model", default="smollm2-135m-instruct", help='a name, a folder, a .gguf file or "tiny"')
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES, help="tokens per block")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of a context (micro)")
    parser.add_argument("--requests", type=int, default=16, help="at once (engine)")
    parser.add_argument("--pool-share", type=float, default=0.4, help="of what all requests need (engine)")
    parser.add_argument("--budget", type=int, default=256, help="most tokens in a step")
    parser.add_argument("--repeat", type=int, default=3, help="runs that medians are taken of")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write NAME.md, NAME.json and a figure there")
    args = parser.parse_args()
    common = {"block_sizes": args.block_sizes, "budget": args.budget, "repeat": args.repeat}
    reports = []
    if "micro" in args.parts:
        reports.append(micro(args.model, contexts=args.contexts, **common))
    if "engine" in args.parts:
        reports.append(end_to_end(args.model, num_requests=args.requests, pool_share=args.pool_share, **common))
    command = " ".join(["python benchmarks/preemption.py", *sys.argv[1:]])
    for report in reports:
        publish(report, command, args.output)
    if args.output is not None:
        from preemption_plot import plot_preemption

        plot_preemption({report.name: report.data["results"] for report in reports}, args.output / "preemption.png")


if __name__ == "__main__":
    main()
