"""Paged attention by itself: our implementations and JAX's own functions on named shapes, side by side in one run.

    python benchmarks/paged_attention.py [--shapes decode prompt-1x4096] [--repeat 20] [--json FILE] [--markdown FILE]
    python benchmarks/paged_attention.py --predict H200

Every result is first compared with the plain reference in f32 (some tokens) and with the first implementation's (all).
Times are per call, several calls one after another without a wait, over several sets of inputs in turn that are
together at least three times as large as the L2 cache. Bytes are the fewest that must move; the share is of a large
copy's bandwidth, measured in the same run. On a CPU the shapes are small and the times say little: it is to see that
all works.
"""

import argparse
import os
import sys
import time
from typing import Any

from measured_shapes import QUICK, SHAPES, MeasuredShape, choose
from roofline import add_result_arguments, cards_named, floor_of, markdown, prediction

Json = dict[str, Any]
BUDGET = 0.5
"""Seconds of timing for one function on one shape."""
FAULTS = (NotImplementedError, ValueError, TypeError, RuntimeError, AssertionError, ImportError, AttributeError)
"""What a function that cannot run raises, jax's own errors among them: it is reported, and the others go on."""


def measure_shape(shape: MeasuredShape, names: list[str], args: argparse.Namespace, report: Any) -> None:
    """Calls `report` with a row for every function, as soon as it is there."""
    import attention_contenders as cases
    import jax.numpy as jnp

    itemsize = jnp.dtype(args.dtype).itemsize
    num_sets = 2 if args.small else cases.num_sets_for(shape, itemsize)
    case = cases.make_case(shape, args.dtype, num_sets)
    expected = cases.expected_of(case)
    first_out = None
    for name in names:
        row: Json = {"shape": shape.name, "name": name}
        try:
            out, timed = measure_function(name, case, expected, first_out, args.repeat)
            first_out = out if first_out is None else first_out
            row |= timed
        except cases.CannotRunError as reason:
            row["skipped"] = str(reason)
        except FAULTS as error:
            # Of a baseline it is no fault of ours; "NotImplementedError" is how ours say what they cannot do.
            kind = "skipped" if name in cases.BASELINES or isinstance(error, NotImplementedError) else "failed"
            row[kind] = f"{type(error).__name__}: {first_line(error)}"
        report(row)


def measure_function(name: str, case: Any, expected: Any, first_out: Any, repeat: int) -> tuple[Any, Json]:
    """Its output on the first set, and what was measured."""
    import attention_contenders as cases
    import jax
    from device_timing import time_over_sets

    contender = cases.contender(name, case)
    function = jax.jit(contender.function)
    out = jax.block_until_ready(function(*contender.sets[0]))
    tolerance = cases.TOLERANCE[out.dtype]
    error = cases.error_of(out, expected)
    assert error <= tolerance, f"wrong: error {error:.1e} against the reference, allowed {tolerance:.0e}"
    timed: Json = {"error": error}
    if first_out is not None:
        timed["difference"] = between = cases.difference(out, first_out)
        assert between <= 2 * tolerance, f"wrong: differs by {between:.1e} from the first, allowed {2 * tolerance:.0e}"
    sample, method = time_over_sets(function, contender.sets, repeat=repeat, budget=BUDGET)
    timed |= {"median_s": sample.median, "min_s": sample.least, "num_calls": sample.num_calls, "method": method}
    return out, timed


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200].replace("|", "/")


def measure(args: argparse.Namespace) -> Json:
    """Everything; written out after every row, as a fault on a GPU can take the whole process."""
    import attention_contenders as cases
    import jax.numpy as jnp
    from device_timing import ceilings, environment, write_results

    start = time.monotonic()
    itemsize = jnp.dtype(args.dtype).itemsize
    result: Json = {**environment(), "dtype": args.dtype, "small": args.small, **ceilings(args.dtype), "shapes": {}}
    result |= {"rows": [], "left_out": []}
    unknown = set(args.only or ()) - set(cases.ALL)
    if unknown:
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but {', '.join(cases.ALL)}")
    names = [name for name in cases.ALL if args.only is None or name in args.only]
    print(title(result), flush=True)

    def report(row: Json) -> None:
        result["rows"].append(row)
        write_results(result, table(result), args.json, args.markdown)
        print(line_of(row), flush=True)

    for shape in choose(args.shapes):
        if args.time_limit and time.monotonic() - start > args.time_limit:
            result["left_out"].append(shape.name)
            continue
        shape = shape.small() if args.small else shape
        result["shapes"][shape.name] = {
            "num_bytes": shape.num_bytes(itemsize),
            "num_flops": shape.num_flops,
            "is_decode": shape.max_query_len == 1,
        }
        measure_shape(shape, names, args, report)
    write_results(result, table(result), args.json, args.markdown)
    return result


def title(result: Json) -> str:
    driver = f", driver {result['driver']}" if result["driver"] else ""
    return (
        f"{result['device']}{driver}, jax {result['jax']}, {result['date']}, {result['dtype']}"
        f"{', small shapes' if result['small'] else ''}. Measured in this run: a large copy"
        f" {result['copy_bytes_per_s'] / 1e12:.3f} TB/s (read + written), a large product"
        f" {result['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s."
    )


def line_of(row: Json) -> str:
    status = next((f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row), None)
    if status is None:
        status = f"{1e6 * row['median_s']:,.1f} µs, least {1e6 * row['min_s']:,.1f} ({row['method']})"
    return f"  {row['shape']:<20} {row['name']:<18} {status}"


def table(result: Json) -> str:
    """Every time of ours beside those of the baselines: `x` is the baseline's time divided by it."""
    from attention_contenders import BASELINES

    header = ["shape", "function", "median µs", "least µs", "MB", "TB/s", "of copy", "TFLOP/s", "of floor", "error"]
    header += [f"x {name}" for name in BASELINES]
    timed = {(row["shape"], row["name"]): row for row in result["rows"] if "median_s" in row}
    rows = []
    for (shape, name), row in timed.items():
        work, seconds = result["shapes"][shape], row["median_s"]
        bandwidth, rate = work["num_bytes"] / seconds, work["num_flops"] / seconds
        floor = floor_of(work["num_bytes"], work["num_flops"], result["copy_bytes_per_s"], result["matmul_flops_per_s"])
        cells = [shape, name, f"{1e6 * seconds:,.1f}", f"{1e6 * row['min_s']:,.1f}", f"{work['num_bytes'] / 1e6:,.1f}"]
        cells += [f"{bandwidth / 1e12:.3f}", f"{bandwidth / result['copy_bytes_per_s']:.1%}"]
        cells += ["" if work["is_decode"] else f"{rate / 1e12:.2f}", f"{floor.seconds / seconds:.1%} {floor.bound}"]
        cells.append(f"{row['error']:.1e}")
        for baseline in BASELINES:
            other = timed.get((shape, baseline))
            cells.append("" if other is None or name in BASELINES else f"{other['median_s'] / seconds:.2f}")
        rows.append(cells)
    parts = [title(result), "", markdown(header, rows, num_left=2)]
    if reasons := not_measured(result["rows"]):
        parts += ["", "Not measured:", "", *reasons]
    if result["left_out"]:
        parts += ["", f"Left out at the end of the time: {', '.join(result['left_out'])}"]
    return "\n".join(parts)


def not_measured(rows: list[Json]) -> list[str]:
    """A line for each function and reason, with the shapes that it holds for."""
    shapes: dict[str, list[str]] = {}
    for row in rows:
        for status in {"skipped", "failed"} & row.keys():
            shapes.setdefault(f"{row['name']}, {status}: {row[status]}", []).append(row["shape"])
    num_shapes = len({row["shape"] for row in rows})
    return [f"- {why}" + ("" if len(on) == num_shapes else f" ({', '.join(on)})") for why, on in shapes.items()]


def predict(cards: list[str]) -> str:
    work = [(shape.name, shape.num_bytes(), shape.num_flops) for shape in SHAPES.values()]
    return prediction(cards_named(cards), work)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[""], metavar="TEXT", help="those whose names contain it")
    parser.add_argument("--quick", action="store_true", help=f"six shapes: {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="functions, by name; default: all that run here")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help="small shapes; default: on a CPU")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16, on a CPU float32")
    parser.add_argument("--repeat", type=int, default=20, help="samples of each time; median and least are shown")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no more shapes after that")
    add_result_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.predict:
        print(predict(args.predict))
        return
    # No graphs: kernels of several calls in one program run one after another, as they were launched.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    import jax

    is_cpu = jax.default_backend() == "cpu"
    args.small = is_cpu if args.small is None else args.small
    args.dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    args.shapes = list(QUICK) if args.quick else args.shapes
    result = measure(args)
    print(f"\n{table(result)}")
    failed = [row for row in result["rows"] if "failed" in row]
    if failed:
        sys.exit(f"failed: {', '.join(row['name'] + ' on ' + row['shape'] for row in failed)}")


if __name__ == "__main__":
    main()
