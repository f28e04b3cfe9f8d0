"""Sampling in one jit: `functional.generate` beside a contiguous cache in plain JAX and beside the engine.

    python benchmarks/functional_sampler.py [--prompts 8] [--samples 8] [--prompt-len 512] [--new-tokens 64]
        [--dtype float32] [--repeat 3] [--output FOLDER]

All take the same prompts, weights and keys, in turns, after a first call that compiles. Tokens per second are new
tokens over the wall time of a call, prompts included; the ratio is of the best calls, and the median is given. KV
memory is that of the caches' arrays; temporaries are what XLA's memory analysis says that the program needs beside its
arguments, with the cache. Tokens are compared: they must agree, but where rounding decides a draw.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contiguous_sampler
import jax
import jax.numpy as jnp
import numpy as np
from tables import Report, publish, section, table

import pagedjax
from pagedjax import functional
from pagedjax.kv_cache import bytes_per_block

SEED = 0
MIB = 2**20


def paged_bytes(model: Any, sizes: dict[str, Any], dtype: Any) -> int:
    """Of the whole pool, with the null block."""
    state = jax.eval_shape(lambda: functional.init_kv_cache(model, **sizes, dtype=dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.kv_cache))


def new_engine(model: Any, params: Any, args: argparse.Namespace) -> Any:
    """An engine with room for all samples at once."""
    num_tokens = args.prompt_len + args.new_tokens
    return pagedjax.LLM(
        model,
        params=params,
        block_size=args.block_size,
        num_blocks=2 * args.prompts * (args.samples + 1) * -(-num_tokens // args.block_size),
        max_num_seqs=args.prompts * args.samples,
        max_num_batched_tokens=512,
        max_model_len=num_tokens,
        warm_up=False,
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compiled(function: Any, *args: Any) -> tuple[Any, float, int]:
    """The program, the seconds that it took to compile, and the bytes of its temporaries."""
    seconds, program = timed(lambda: jax.jit(function).lower(*args).compile())
    return program, seconds, program.memory_analysis().temp_size_in_bytes


def measure(args: argparse.Namespace) -> Report:
    model, params, _ = pagedjax.load(args.model, dtype=args.dtype)
    rng = np.random.default_rng(SEED)
    ids = rng.integers(10, model.config.vocab_size, (args.prompts, args.prompt_len)).astype(np.int32)
    lens = np.full(args.prompts, args.prompt_len, np.int32)
    seeds = list(range(args.prompts))
    keys = functional.request_keys(seeds)
    sizes: dict[str, Any] = {"max_new_tokens": args.new_tokens, "num_samples": args.samples}
    shape = {"num_prompts": args.prompts, "prompt_len": args.prompt_len, **sizes}

    def paged(block_size: int, known: bool, params: Any, ids: Any, lens: Any, keys: Any) -> Any:
        lens = None if known else lens
        return functional.generate(model, params, ids, lens, keys, **sizes, block_size=block_size)

    def contiguous(transposed: bool, params: Any, ids: Any, lens: Any, keys: Any) -> Any:
        return contiguous_sampler.generate(
            model, params, ids, keys, jnp.float32(1), **sizes, transposed_keys=transposed
        )

    num_rows, room = args.prompts * args.samples, args.prompt_len + args.new_tokens
    kv = contiguous_sampler.cache_bytes(model.config, num_rows, room, args.dtype)
    ways: dict[str, tuple[Any, int]] = {"contiguous cache, keys transposed": (partial(contiguous, True), kv)}
    if args.plain_rival:
        ways["contiguous cache, keys as values"] = (partial(contiguous, False), kv)
    for known, block_size in ((True, args.block_size), (False, args.block_size // 2)):
        name = f"functional.generate, blocks of {block_size}, {'all prompts of one length' if known else 'any lengths'}"
        kv = paged_bytes(model, {**shape, "block_size": block_size, "exact_lens": known}, args.dtype)
        ways[name] = (partial(paged, block_size, known), kv)

    calls: dict[str, Callable[[], Any]] = {}
    compile_s, temporaries = {}, {}
    device_args = jax.device_put((params, ids, lens, keys))
    for name, (function, _) in ways.items():
        program, compile_s[name], temporaries[name] = compiled(function, *device_args)
        calls[name] = lambda program=program: jax.block_until_ready(program(*device_args))
        print(f"{name}: compiled in {compile_s[name]:.1f} s", file=sys.stderr, flush=True)
    if not args.no_engine:
        llm = new_engine(model, params, args)
        sampling = [
            pagedjax.SamplingParams(
                n=args.samples, seed=s, max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
            )
            for s in seeds
        ]
        calls["LLM.generate"] = lambda: llm.generate(ids.tolist(), sampling, use_tqdm=False)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens: dict[str, np.ndarray] = {}
    for turn in range(args.repeat + 1):
        for name, call in calls.items():
            spent, result = timed(call)
            print(f"{name}: {spent:.2f} s", file=sys.stderr, flush=True)
            seconds[name] += [spent] if turn else []
            is_engine = name == "LLM.generate"
            tokens[name] = np.array(
                [[c.token_ids for c in o.outputs] for o in result] if is_engine else result.token_ids
            )
    return report(args, model, seconds, tokens, {n: kv for n, (_, kv) in ways.items()}, compile_s, temporaries)


def report(
    args: argparse.Namespace,
    model: Any,
    seconds: dict[str, list[float]],
    tokens: dict[str, np.ndarray],
    kv_bytes: dict[str, int],
    compile_s: dict[str, float],
    temporaries: dict[str, int],
) -> Report:
    num_tokens = args.prompts * args.samples * args.new_tokens
    first = next(iter(seconds))
    if "LLM.generate" in seconds:  # its pool is larger than what a run uses: what it uses at most
        per_block = bytes_per_block(
            num_pools=model.config.layer_groups.num_pools,
            block_size=args.block_size,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=args.dtype,
        )
        own = -(-(args.prompt_len % args.block_size + args.new_tokens - 1) // args.block_size)
        shared = args.prompt_len // args.block_size
        kv_bytes = {**kv_bytes, "LLM.generate": args.prompts * (shared + args.samples * own) * per_block}
    rows, data = [], {}
    for name, runs in seconds.items():
        best, median = num_tokens / min(runs), num_tokens / statistics.median(runs)
        same = float((tokens[name] == tokens[first]).mean())
        ratio, kv_ratio = best / (num_tokens / min(seconds[first])), kv_bytes[name] / kv_bytes[first]
        data[name] = {"seconds": runs, "kv_bytes": kv_bytes[name], "same_tokens": same, "tokens_per_s": best}
        data[name] |= {"compile_s": compile_s.get(name), "temporaries": temporaries.get(name)}
        rows.append(
            [
                name,
                f"{best:.1f}",
                f"{median:.1f}",
                f"{ratio:.2f}",
                f"{kv_bytes[name] / MIB:.1f}",
                f"{kv_ratio:.3f}",
                f"{temporaries[name] / MIB:.0f}" if name in temporaries else "",
                f"{compile_s[name]:.0f}" if name in compile_s else "",
                f"{100 * same:.2f} %",
            ]
        )
    columns = ["", "tok/s, best", "median", "ratio", "KV MiB", "ratio", "temporaries MiB", "compile s", "same tokens"]
    title = (
        f"{args.prompts} prompts of {args.prompt_len}, {args.samples} samples of {args.new_tokens} tokens, {args.dtype}"
    )
    return Report(
        f"functional-{args.dtype}",
        section(title, table(columns, rows)),
        {"ways": data, "args": {k: str(v) for k, v in vars(args).items()}},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-engine", action="store_true", help="leave the engine out")
    parser.add_argument("--plain-rival", action="store_true", help="with the rival whose keys lie as values do, too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = measure(args)
    publish(report, f"python benchmarks/functional_sampler.py {' '.join(sys.argv[1:])}".strip(), args.output)


if __name__ == "__main__":
    main()
