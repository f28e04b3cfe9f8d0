"""A whole step of the engine's device side, on random weights in the shape of Llama-3-8B: 64 decodes, and a mixed one.

    python benchmarks/decode_step.py [--cases decode-4k] [--implementation pallas_triton] [--json FILE]
    python benchmarks/decode_step.py --predict H200

A step is what the engine runs: `paged_step` in one program, the head, the sampler. Its floor is the bytes of weights
and KV that it reads over the bandwidth of a large copy measured in the same run, or its products over the rate of a
large one. The target is a step within 1.25 times the floor. On a CPU the model is a tiny one, to see that all works.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import ceilings, environment, seconds_per_call, write_results
from measured_shapes import num_pairs
from model_shapes import LLAMA_3_8B
from roofline import add_result_arguments, cards_named, floor_of, markdown, prediction

from pagedjax.kv_cache import KVCache
from pagedjax.model_input import ModelInput, SamplingInput
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params, paged_step, read_out
from pagedjax.pallas_kernels.metadata import AttentionMetadata
from pagedjax.sampling.sampler import sample

Json = dict[str, Any]
TARGET = 1.25
BLOCK_SIZE = 16
TINY = replace(
    LLAMA_3_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
)


class Step(NamedTuple):
    """A batch: `num_decodes` requests with `context` tokens each, and a chunk of a prompt that ends at `context`."""

    num_decodes: int
    context: int
    chunk: int = 0

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(context, new) of every request."""
        return [(self.context, 1)] * self.num_decodes + [(self.context, self.chunk)] * bool(self.chunk)

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows)

    def small(self) -> "Step":
        return Step(min(4, self.num_decodes), self.context // 32, self.chunk // 32)


STEPS = {
    "decode-4k": Step(64, 4096),
    "mixed-512-on-4k": Step(63, 4096, chunk=512),
    "decode-1k": Step(64, 1024),
}
"""The most telling one first: a run that ends early has it. Weights and the pool of 4k are 50 GB, of 1k 24 GB."""


# --- what a step must cost


def num_layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers; norms are left out, they are a millionth."""
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def step_bytes(config: ModelConfig, step: Step, itemsize: int) -> int:
    """Weights once, KV of every context once. The embedding is looked up, not read; the head is read."""
    weights = num_layer_weights(config) + config.vocab_size * config.hidden_size
    keys = sum(context for context, _ in step.rows)
    return itemsize * (weights + 2 * config.num_layers * keys * config.num_kv_heads * config.head_dim)


def step_flops(config: ModelConfig, step: Step) -> int:
    """Of all products: layers for every token, attention, the head for one token of each request."""
    attention = 4 * config.num_layers * num_pairs(step.rows) * config.num_heads * config.head_dim
    head = 2 * len(step.rows) * config.vocab_size * config.hidden_size
    return 2 * step.num_tokens * num_layer_weights(config) + attention + head


# --- a step to run


def random_params(config: ModelConfig) -> Params:
    """Normal weights of size 0.02, norms of ones; made on the device leaf by leaf, in the config's dtype."""
    model = CausalLM(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    dtype = jnp.dtype(config.dtype)
    draw = jax.jit(lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, dtype) * 0.02, static_argnums=1)
    leaves, tree = jax.tree.flatten(shapes)
    made = [jnp.ones(x.shape, dtype) if x.ndim == 1 else draw(seed, x.shape) for seed, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, made)


def random_kv_cache(config: ModelConfig, num_blocks: int) -> KVCache:
    """A pool of random keys and values: zeros could run faster."""
    shape = (num_blocks + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.dtype(config.dtype)))
    k, v = (tuple(draw(2 * layer + part) for layer in range(config.num_layers)) for part in (0, 1))
    return KVCache(k, v)


def make_batch(config: ModelConfig, step: Step) -> ModelInput:
    """Random tokens, blocks in random order, every request sampling greedily."""
    rng = np.random.default_rng(0)
    num_rows, num_tokens = len(step.rows), step.num_tokens
    blocks_per_row = -(-step.context // BLOCK_SIZE)
    tables = 1 + rng.permutation(num_rows * blocks_per_row).astype(np.int32).reshape(num_rows, -1)
    contexts, new = np.array(step.rows, np.int32).T
    ends = np.cumsum(new, dtype=np.int32)
    rows = np.repeat(np.arange(num_rows), new)
    positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(contexts - ends, new).astype(np.int32)
    zeros = partial(np.zeros, num_rows)
    batch = ModelInput(
        token_ids=rng.integers(0, config.vocab_size, num_tokens, np.int32),
        positions=positions,
        groups=(
            AttentionMetadata(
                slot_mapping=tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
                block_tables=tables,
                context_lens=contexts.copy(),
                query_start_loc=np.concatenate([[0], ends], dtype=np.int32),
                max_query_len=num_tokens if step.chunk else 1,
            ),
        ),
        logits_indices=ends - 1,
        num_samples=np.array(num_rows, np.int32),
        sampling=SamplingInput(
            temperature=zeros(np.float32),
            top_k=zeros(np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=zeros(np.float32),
            seed=np.zeros((num_rows, 2), np.uint32),
            sample_index=zeros(np.uint32),
            num_outputs=zeros(np.uint32),
        ),
    )
    return jax.device_put(batch)


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def run_step(
    config: ModelConfig, params: Params, batch: ModelInput, kv_cache: KVCache, implementation: str | None
) -> tuple[jax.Array, jax.Array, KVCache]:
    """The tokens sampled, the largest logit (to see that it is a number), the pool. DONATES the pool."""
    hidden, kv_cache = paged_step(config, params, batch, kv_cache, implementation=implementation)
    logits = read_out(config, params, hidden[batch.logits_indices])
    return sample(logits, batch.sampling), jnp.max(logits), kv_cache


def measure_step(
    config: ModelConfig, params: Params, step: Step, implementation: str | None, num_steps: int, repeat: int
) -> Json:
    """Seconds per step, `num_steps` of them one after another, each over the pool that the last one wrote."""
    batch = make_batch(config, step)
    kv_cache = random_kv_cache(config, batch.attn.block_tables.size)

    def one_step(_: int) -> tuple[jax.Array, jax.Array]:
        nonlocal kv_cache
        tokens, peak, kv_cache = run_step(config, params, batch, kv_cache, implementation)
        return tokens, peak

    _, peak = jax.block_until_ready(one_step(0))
    assert np.isfinite(peak), f"the largest logit is {peak}"
    jax.block_until_ready(one_step(1))
    sample_ = seconds_per_call(one_step, num_steps, repeat)
    itemsize = jnp.dtype(config.dtype).itemsize
    return {
        "median_s": sample_.median,
        "min_s": sample_.least,
        "num_bytes": step_bytes(config, step, itemsize),
        "num_flops": step_flops(config, step),
        "num_tokens": step.num_tokens,
    }


# --- what is shown


def measure(args: argparse.Namespace) -> Json:
    config = TINY if args.small else LLAMA_3_8B
    result: Json = {**environment(), "model": "tiny" if args.small else "Llama-3-8B's shape", "dtype": config.dtype}
    result |= {**ceilings(config.dtype), "target": TARGET, "rows": [], "left_out": []}
    print(title(result), flush=True)
    params = random_params(config)
    start = time.monotonic()
    for name in args.cases:
        if args.time_limit and time.monotonic() - start > args.time_limit:
            result["left_out"].append(name)
            continue
        step = STEPS[name].small() if args.small else STEPS[name]
        for implementation in args.implementation:
            row: Json = {"step": name, "implementation": implementation or "default"}
            try:
                row |= measure_step(config, params, step, implementation, args.steps, args.repeat)
                print(f"  {name} {row['implementation']}: {1e3 * row['median_s']:.3f} ms", flush=True)
            except (NotImplementedError, ValueError, RuntimeError, AssertionError) as error:
                row["failed"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
                print(f"  {name} {row['implementation']}: {row['failed']}", flush=True)
            result["rows"].append(row)
            write_results(result, table(result), args.json, args.markdown)
    write_results(result, table(result), args.json, args.markdown)
    return result


def title(result: Json) -> str:
    driver = f", driver {result['driver']}" if result["driver"] else ""
    return (
        f"{result['device']}{driver}, jax {result['jax']}, {result['date']}, {result['model']}, {result['dtype']}."
        f" Measured in this run: a large copy {result['copy_bytes_per_s'] / 1e12:.3f} TB/s (read + written), a large"
        f" product {result['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s."
    )


def table(result: Json) -> str:
    """Each step against its floor."""
    header = ["step", "attention", "tokens", "median ms", "least ms", "GB", "TFLOP"]
    header += ["floor ms", "time / floor", "target"]
    rows, failed = [], []
    for row in result["rows"]:
        if "failed" in row:
            failed.append(f"- {row['step']}, {row['implementation']}: {row['failed']}")
            continue
        work = row["num_bytes"], row["num_flops"]
        floor = floor_of(*work, result["copy_bytes_per_s"], result["matmul_flops_per_s"])
        ratio = row["median_s"] / floor.seconds
        cells = [row["step"], row["implementation"], str(row["num_tokens"]), f"{1e3 * row['median_s']:.3f}"]
        cells += [f"{1e3 * row['min_s']:.3f}", f"{work[0] / 1e9:.3f}", f"{work[1] / 1e12:.3f}"]
        cells += [f"{1e3 * floor.seconds:.3f} {floor.bound}", f"{ratio:.2f}"]
        rows.append([*cells, f"{'within' if ratio <= result['target'] else 'missed'} {result['target']}"])
    parts = [title(result), "", markdown(header, rows, num_left=2)]
    parts += ["", "Failed:", "", *failed] if failed else []
    if result["left_out"]:
        parts += ["", f"Left out at the end of the time: {', '.join(result['left_out'])}"]
    return "\n".join(parts)


def predict(cards: list[str]) -> str:
    """Floors of the steps, in the units of the other benchmark's table."""
    work = [
        (name, step_bytes(LLAMA_3_8B, step, itemsize=2), step_flops(LLAMA_3_8B, step)) for name, step in STEPS.items()
    ]
    return prediction(cards_named(cards), work)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(STEPS), default=list(STEPS), help="default: all")
    parser.add_argument("--implementation", nargs="+", default=[None], metavar="NAME", help="default: the op's choice")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help="a tiny model; default: on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="steps one after another in each sample")
    parser.add_argument("--repeat", type=int, default=5, help="samples; median and least are shown")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no more cases after that")
    add_result_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.predict:
        print(predict(args.predict))
        return
    args.small = jax.default_backend() == "cpu" if args.small is None else args.small
    result = measure(args)
    print(f"\n{table(result)}")
    sys.exit("a step failed" if any("failed" in row for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
