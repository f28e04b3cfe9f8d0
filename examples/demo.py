"""Eight questions answered together by a small model (`make demo`): continuous batching over paged KV blocks.

The prompts have different lengths and their answers end at different times; each holds only the blocks it needs.
"""

import sys
import time

from rich.console import Console
from rich.markup import escape

import pagedjax

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "Name three animals that can fly.",
    "Hi!",
    "Explain to a child of six why we sleep, in two or three short sentences.",
    "Summarise this in one sentence: An operating system gives each program the illusion of one large memory of its "
    "own. In truth memory is cut into pages of a fixed size, which lie anywhere and are found through a table. "
    "PagedAttention does the same with the keys and values of a language model: sequences grow block by block, no "
    "space is set aside for tokens that never come, and sequences with a common beginning can share their blocks.",
]


def main() -> int:
    """Returns the exit status: 0 if the model knows the capital of France."""
    console = Console(highlight=False)

    start = time.perf_counter()
    llm = pagedjax.LLM("smollm2-135m-instruct", max_num_seqs=8, progress=True)
    startup_seconds = time.perf_counter() - start

    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    results = llm.chat(conversations, pagedjax.SamplingParams(temperature=0, max_tokens=64))
    seconds = time.perf_counter() - start

    for question, result in zip(QUESTIONS, results, strict=True):
        answer = result.outputs[0]
        cut_off = " ..." if answer.finish_reason == "length" else ""
        console.print(f"\n[bold]{escape(question)}[/bold]\n{escape(answer.text.strip())}{cut_off}")

    stats = llm.stats()
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    console.print(
        f"\n{num_tokens / seconds:.1f} output tokens/s, {len(results)} requests, "
        f"peak {stats.peak_blocks_used} of {stats.num_blocks} blocks, {stats.num_preemptions} preemptions"
    )
    console.print(f"start-up (load and warm-up) {startup_seconds:.1f} s, generation {seconds:.1f} s")

    if "Paris" not in results[0].outputs[0].text:
        console.print("The answer to the first question should contain Paris.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
