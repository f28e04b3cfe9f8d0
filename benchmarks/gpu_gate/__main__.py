"""Compiles every case for every card, writes the table, and fails if something is wrong.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_gate [--cards A100 H200] [--cases REGEX] [--output FOLDER] [--self-test]

`make gpu-gate` makes the environment for it: jax with its CUDA plugin, and NVIDIA's assembler.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import jax

from benchmarks.gpu_gate import self_test, table
from benchmarks.gpu_gate.aot import compile_for
from benchmarks.gpu_gate.cards import CARDS, Card
from benchmarks.gpu_gate.cases import Case, kernel_cases
from benchmarks.gpu_gate.checks import breaches
from benchmarks.gpu_gate.model_step import step_cases


def judge(case: Case, card: Card) -> table.Result:
    """Compiles a case for a card and holds it against what is known about it."""
    donate = case.pool if case.donates_pool else ()
    try:
        program = compile_for(card, case.function, case.args, donate=donate, **case.options)
    except Exception as error:
        error.add_note(f"This was {case.name!r} for {card.name}.")
        raise
    return table.Result(case, program, breaches(program, case))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose name contains a match")
    parser.add_argument("--output", type=Path, help="the folder for the table and the JSON; else nothing is written")
    parser.add_argument("--self-test", action="store_true", help="only check that the gate reports faults")
    args = parser.parse_args()

    start = time.perf_counter()
    failures = self_test.failures()
    for failure in failures:
        print(f"SELF-TEST FAILED  {failure}", file=sys.stderr)
    print(f"jax {jax.__version__}: self-test {'failed' if failures else 'passed'}, {time.perf_counter() - start:.0f} s")
    if failures or args.self_test:
        return 1 if failures else 0

    cases = [case for case in (*kernel_cases(), *step_cases()) if re.search(args.cases, case.name)]
    if not cases:
        parser.error(f"--cases {args.cases!r} matches no case")
    results = []
    for name in args.cards:
        for case in cases:
            result = judge(case, CARDS[name])
            results.append(result)
            for breach in result.breaches:
                print(f"REFUSED  {case.name}, {name}: {breach}", file=sys.stderr, flush=True)
    num_refused = sum(bool(result.breaches) for result in results)
    print(f"{len(results)} programs, {num_refused} refused, {time.perf_counter() - start:.0f} s")
    if args.output:
        print(f"see {table.write(results, args.output)}")
    return 1 if num_refused else 0


if __name__ == "__main__":
    sys.exit(main())
