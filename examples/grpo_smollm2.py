"""A whole small RL loop on two CPU cores: SmolLM2-135M learns to add digits, with GRPO (arXiv 2402.03300).

    python examples/grpo_smollm2.py [--steps 30] [--output FOLDER]        # pip install optax matplotlib

Each step samples eight answers to each of a few sums through the engine (the prompt's blocks are computed once and
shared by its samples), rewards those that are right, scores the same tokens with `functional.score`, takes one
gradient step and hands the new weights to the engine with `update_params`: one set of params, no copy, no recompile.
It also reports how far the sampler's log-probabilities are from the trainer's on the same weights. Writes grpo.png.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pagedjax
from pagedjax import functional

EXAMPLES = "2+5=7\n4+3=7\n6+2=8\n"
NUM_SAMPLES = 8
MAX_TOKENS = 4
WIDTH = 32
"""Tokens of a prompt and its answer, padded: one shape, one program."""
CLIP = 0.2

Sum = tuple[int, int]


def reward(numbers: Sum, text: str) -> float:
    """1 for the right sum, 0 for anything else."""
    return float(text.strip() == str(sum(numbers)))


def prompts_of(sums: list[Sum]) -> list[str]:
    return [f"{EXAMPLES}{a}+{b}=" for a, b in sums]


def sample(llm: pagedjax.LLM, sums: list[Sum], seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """A batch for the trainer, the rewards [sums, samples], and how many tokens were sampled."""
    params = pagedjax.SamplingParams(n=NUM_SAMPLES, max_tokens=MAX_TOKENS, stop=["\n"], seed=seed, logprobs=0)
    outputs = llm.generate(prompts_of(sums), params, use_tqdm=False)
    rewards = np.array([[reward(s, c.text) for c in o.outputs] for s, o in zip(sums, outputs, strict=True)])
    # Relative to the other answers to the same prompt: no value model is needed.
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    rows = len(sums) * NUM_SAMPLES
    batch: dict[str, np.ndarray] = {
        "token_ids": np.zeros((rows, WIDTH), np.int32),
        "lens": np.zeros(rows, np.int32),
        "sampled": np.zeros((rows, WIDTH - 1), np.float32),  # the sampler's log-probabilities, at their tokens
        "mask": np.zeros((rows, WIDTH - 1), np.float32),
        "advantages": advantages.reshape(-1).astype(np.float32),
    }
    row = 0
    for output in outputs:
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            ids, start = [*prompt, *completion.token_ids], len(prompt)
            batch["token_ids"][row, : len(ids)], batch["lens"][row] = ids, len(ids)
            batch["sampled"][row, start - 1 : len(ids) - 1] = [
                entry[token].logprob
                for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
            ]
            batch["mask"][row, start - 1 : len(ids) - 1] = 1
            row += 1
    return batch, rewards, int(batch["mask"].sum())


def make_train_step(model: Any, optimizer: optax.GradientTransformation) -> Any:
    """One gradient step of GRPO's clipped objective; also the largest difference of sampler and trainer."""

    def loss_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        logprobs = functional.score(model, params, batch["token_ids"], batch["lens"])
        difference = jnp.where(batch["mask"] > 0, logprobs - batch["sampled"], 0)
        ratio = jnp.exp(difference)
        advantages = batch["advantages"][:, None]
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return -(gain * batch["mask"]).sum() / batch["mask"].sum(), jnp.abs(difference).max()

    @jax.jit
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        (_, gap), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, gap

    return train_step


def accuracy(llm: pagedjax.LLM) -> float:
    """Of greedy answers to all 100 sums of two digits."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    params = pagedjax.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop=["\n"])
    outputs = llm.generate(prompts_of(sums), params, use_tqdm=False)
    return float(np.mean([reward(s, o.outputs[0].text) for s, o in zip(sums, outputs, strict=True)]))


def plot(history: list[dict[str, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    steps = range(1, len(history) + 1)
    rewards = np.array([entry["reward"] for entry in history])
    axes[0].plot(steps, rewards, alpha=0.35)
    window = min(8, len(rewards))
    axes[0].plot(list(steps)[window - 1 :], np.convolve(rewards, np.ones(window) / window, "valid"), linewidth=2)
    axes[0].set(title="reward: share of right answers", xlabel="step", ylim=(0, 1))
    axes[1].semilogy(steps, [entry["gap"] for entry in history])
    axes[1].set(title="largest |sampler - trainer| log-probability", xlabel="step")
    axes[2].plot(steps, [entry["tokens_per_s"] for entry in history])
    axes[2].set(title="sampled tokens per second", xlabel="step", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> int:
    """Returns the exit status: 0 if the reward rose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sums", type=int, default=4, help="prompts of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path())
    args = parser.parse_args()

    model, params, tokenizer = pagedjax.load("smollm2-135m-instruct")
    llm = pagedjax.LLM(model, params=params, tokenizer=tokenizer, max_model_len=64, num_blocks=128, block_size=16)
    optimizer = optax.adam(args.learning_rate)
    state, train_step = optimizer.init(params), make_train_step(model, optimizer)
    rng = np.random.default_rng(args.seed)
    before, history = accuracy(llm), []
    print(f"greedy accuracy before: {before:.2f}")
    for step in range(args.steps):
        sums = [(int(a), int(b)) for a, b in rng.integers(0, 10, (args.sums, 2))]
        start = time.perf_counter()
        batch, rewards, num_tokens = sample(llm, sums, seed=args.seed + step)
        sampled_s = time.perf_counter() - start
        params, state, gap = train_step(params, state, batch)
        llm.update_params(params)
        entry = {"reward": float(rewards.mean()), "gap": float(gap), "tokens_per_s": num_tokens / sampled_s}
        history.append(entry | {"step_s": time.perf_counter() - start, "sampled_s": sampled_s})
        print(f"step {step + 1:3d}  " + "  ".join(f"{name} {value:.3g}" for name, value in history[-1].items()))
    after = accuracy(llm)
    print(f"greedy accuracy after: {after:.2f}")
    args.output.mkdir(parents=True, exist_ok=True)
    result = {"before": before, "after": after, "steps": history}
    (args.output / "grpo.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    plot(history, args.output / "grpo.png")
    return 0 if np.mean([e["reward"] for e in history[-8:]]) > np.mean([e["reward"] for e in history[:8]]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
