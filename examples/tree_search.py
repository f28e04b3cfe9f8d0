"""A tree search over text: branches are forks in the KV pool, which cost what they add.

    python examples/tree_search.py [--model smollm2-135m-instruct] [--width 2] [--samples 4]

A list is written point by point. From each branch that is left the model samples several next points; those with the
best mean log-probability stay, the others are freed. `expand` samples from a branch and keeps each result as a new
branch on the same blocks, `append` puts tokens of our own behind it (here the number of the next point), and `free`
gives blocks up, of which others keep those that they share.
"""

import argparse

import pagedjax

QUESTION = "Three short reasons to go for a walk:\n1."
NUM_POINTS = 3


def value(branch: pagedjax.Sequence) -> float:
    """Mean log-probability of what was sampled last."""
    assert branch.output is not None and branch.output.cumulative_logprob is not None
    return branch.output.cumulative_logprob / max(1, len(branch.output.token_ids))


def search(llm: pagedjax.LLM, width: int, num_samples: int, seed: int = 0) -> tuple[str, float]:
    """The text of the best list that was found, and the sum of its points' values."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    branches: list[tuple[float, pagedjax.Sequence]] = [(0.0, llm.sequence(QUESTION))]
    for point in range(1, NUM_POINTS + 1):
        params = pagedjax.SamplingParams(n=num_samples, max_tokens=24, stop=["\n"], seed=seed + point, logprobs=0)
        children = llm.expand([branch for _, branch in branches], params)
        found = [
            (total + value(child), child) for (total, _), each in zip(branches, children, strict=True) for child in each
        ]
        found.sort(key=lambda entry: -entry[0])
        for _, branch in [*branches, *found[width:]]:
            branch.free()
        branches = found[:width]
        output = branches[0][1].output
        print(f"point {point}: {len(found)} candidates, best {output.text.strip() if output else ''!r}")
        if point < NUM_POINTS:
            for _, branch in branches:
                branch.append(tokenizer.encode(f"{point + 1}.", add_special_tokens=False))
    total, best = branches[0]
    text = tokenizer.decode(best.token_ids)
    for _, branch in branches:
        branch.free()
    return text, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    llm = pagedjax.LLM(args.model, max_model_len=256, num_blocks=256, block_size=16)
    text, total = search(llm, args.width, args.samples)
    stats = llm.stats()
    print(f"\n{text}\n\nvalue {total:.2f}")
    print(
        f"{stats.num_prompt_tokens} prompt tokens computed, {stats.num_output_tokens} sampled, "
        f"{stats.num_block_copies} blocks copied, at most {stats.peak_blocks_used} blocks in use, "
        f"{stats.num_blocks - stats.num_free_blocks} now"
    )


if __name__ == "__main__":
    main()
