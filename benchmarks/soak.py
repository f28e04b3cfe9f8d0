"""Two engines under random users for a long time, in one process: nothing leaks, grows, compiles or goes wrong.

    python benchmarks/soak.py [--minutes 10] [--model tiny|smollm2-135m-instruct] [--seed S] [--output FOLDER]

Each user's requests arrive at random (Poisson, in turns of the engine): greedy, seeded, with penalties or logprobs, n >
1, beams, forks, appended to, from handles, as streams; some are aborted in whatever state they are, some streams are
closed in the middle. The pools are so small that somebody is always preempted. Both engines have a prefix cache,
several decodes per step and asynchronous scheduling; one swaps and has priorities, the other recomputes.

Every result is compared with that of the same request alone in a third, undisturbed engine (`soak_check.py`). All books
are recounted now and then; after each round of requests, when all has ended, every block must be free. The memory of
the last third of the run is compared with that of the first after a warm-up. Prints a table, and exits with 1 if
anything was wrong. A run of the tiny model depends on the seed alone. Needs Linux.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from soak_check import Reference, leftovers
from soak_user import Sizes, User
from soak_watch import Watch
from tables import Report, publish, section, table
from tiny_model import TINY, VOCAB_SIZE, new_llm

SIZES = {
    TINY: Sizes(
        block_size=4, num_blocks=24, max_model_len=64, max_prompt=24, max_output=10, budget=16, max_num_seqs=8,
        vocab=(0, VOCAB_SIZE),
    ),
    "smollm2-135m-instruct": Sizes(
        block_size=16, num_blocks=24, max_model_len=256, max_prompt=96, max_output=40, budget=64, max_num_seqs=8,
        vocab=(10, 49_000),
    ),
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "swap": {
        "preemption": "swap",
        "num_swap_blocks": 20,  # not enough for all: some are recomputed
        "num_decode_steps": 4,
        "async_scheduling": True,
        "scheduling_policy": "priority",
    },
    "recompute": {"num_decode_steps": 2, "async_scheduling": True},
}
TURNS_PER_ROUND = 150
TURNS_PER_CHECK = 10
MOST_PROBLEMS = 20
"""Problems that end the run: more of them say no more."""


class Setup(NamedTuple):
    """Engines that are ready to run."""

    users: list[User]
    reference: Reference


def set_up(model: str, seed: int, warm_up: bool | str = "all") -> Setup:
    """Two engines with their users, and the reference; everything is compiled, unless `warm_up` is False."""
    sizes = SIZES[model]
    options = {"num_blocks": sizes.num_blocks, "block_size": sizes.block_size, "max_model_len": sizes.max_model_len}
    options |= {"max_num_seqs": sizes.max_num_seqs, "max_num_batched_tokens": sizes.budget}
    users = [
        User(name, new_llm(model, **options, **own, seed=seed, warm_up=warm_up), sizes, seed)
        for name, own in ENGINES.items()
    ]
    options |= {"max_num_batched_tokens": sizes.max_prompt + sizes.max_output, "enable_prefix_caching": False}
    return Setup(users, Reference(new_llm(model, **options, warm_up=warm_up)))


def soak(setup: Setup, watch: Watch, is_over: Callable[[int], bool]) -> list[str]:
    """Rounds of requests until `is_over`, which is asked after each with the number of results so far; the problems."""
    users, reference = setup
    problems: list[str] = []
    while len(problems) < MOST_PROBLEMS:
        for i in range(TURNS_PER_ROUND):
            for user in users:
                user.turn()
                problems += compare(user, reference)
            if i % TURNS_PER_CHECK == 0:
                problems += recount(users)
                watch.sample()
        while not all(user.is_idle for user in users):
            for user in users:
                user.advance()
                problems += compare(user, reference)
        for user in users:
            user.free_all()
            problems += leftovers(user)
        watch.sample()
        if is_over(reference.num_checked):
            break
    return problems


def compare(user: User, reference: Reference) -> list[str]:
    """What is wrong with the results that a user has got since."""
    wrong = [reference.check(done) for done in user.done]
    user.done.clear()
    return [f"{user.name}: {each}" for each in wrong if each is not None]


def recount(users: Sequence[User]) -> list[str]:
    """What is wrong with the engines' books in the middle of their work."""
    found = []
    for user in users:
        try:
            user.engine.scheduler.check_integrity()
        except AssertionError as error:
            found.append(f"{user.name}: check_integrity: {error}")
    return found


def report(model: str, setup: Setup, watch: Watch, problems: Sequence[str], seconds: float) -> Report:
    """The table, and what was wrong."""
    users, reference = setup
    stats = [user.engine.stats() for user in users]
    names = sorted({name for user in users for name in user.counts})
    rows = [[name, *(user.counts[name] for user in users)] for name in names]
    counters = {
        "steps": "num_steps",
        "output tokens": "num_output_tokens",
        "preemptions": "num_preemptions",
        "blocks swapped out": "num_swapped_out_blocks",
        "blocks swapped in": "num_swapped_in_blocks",
        "prompt tokens found in the cache": "prefix_cache_hit_tokens",
        "blocks copied on write": "num_block_copies",
    }
    rows += [[name, *(getattr(each, field) for each in stats)] for name, field in counters.items()]
    first, last = watch.thirds_mb()
    facts = {
        "seconds": round(seconds, 1),
        "results compared": reference.num_checked,
        "tokens compared": reference.num_tokens,
        "near ties": reference.num_near_ties,
        "memory, first third, MB": round(first, 1),
        "memory, last third, MB": round(last, 1),
        "compilations after the warm-up": watch.num_compiles,
        "problems": len(problems),
    }
    markdown = section(
        f"Soak: {model}",
        table(["", *(user.name for user in users)], rows),
        table(["both engines", ""], list(facts.items())),
        "\n".join(f"- {problem}" for problem in problems) or "Nothing was wrong.",
    )
    counts = {user.name: dict(user.counts) for user in users}
    data = {"model": model, "counts": counts, "rows": rows, "facts": facts, "problems": list(problems)}
    return Report("soak", markdown, data)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, after everything is compiled")
    parser.add_argument("--requests", type=int, help="stop after so many results instead")
    parser.add_argument("--model", choices=SIZES, default=TINY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth-mb", type=float, default=16.0, help="of the memory, between the thirds")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write soak.md and soak.json there as well")
    args = parser.parse_args(argv)
    setup, watch = set_up(args.model, args.seed), Watch()
    start = time.monotonic()

    def is_over(num_results: int) -> bool:
        if args.requests is not None:
            return num_results >= args.requests
        return time.monotonic() - start >= 60 * args.minutes

    problems = soak(setup, watch, is_over)
    seconds = time.monotonic() - start
    problems += watch.wrong(args.max_growth_mb)
    watch.close()
    command = " ".join(["python benchmarks/soak.py", *sys.argv[1:]])
    publish(report(args.model, setup, watch, problems, seconds), command, args.output)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
