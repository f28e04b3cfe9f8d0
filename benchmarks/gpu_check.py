"""Everything that only a GPU can show, in one command from a bare checkout: the GPU tests and the two benchmarks.

    make gpu-check DIR=FOLDER [PYTHON=python3] [ARGS=--quick]

Runs with the machine's own Python and packages (jax with CUDA, flax, numpy, jaxtyping, pytest, hypothesis, chex) and
installs nothing. A part that fails or takes too long does not stop the others; the exit status says that one did. The
folder then holds each part's output, the benchmarks' JSON and tables, and `summary.md`. Without a GPU it refuses;
ALLOW_CPU=1 runs the same parts on the CPU with small shapes, to see that they work.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROBE = """
import json, jax, jaxlib
device = jax.devices()[0]
print(json.dumps({"jax": jax.__version__, "jaxlib": jaxlib.__version__, "platform": device.platform,
                  "device": device.device_kind, "count": jax.device_count()}))
"""


class Part(NamedTuple):
    """A command, and the seconds after which it is stopped."""

    name: str
    command: list[str]
    limit: float
    variables: Mapping[str, str] = {}
    """Of the environment, besides those of every part."""


class Outcome(NamedTuple):
    """What became of a part."""

    part: Part
    status: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.status.startswith("passed")


def gpu_test_files() -> list[str]:
    """Only files with GPU tests: others may import what the machine lacks."""
    return [str(file) for file in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in file.read_text()]


def parts(folder: Path, scratch: Path, *, quick: bool, on_gpu: bool) -> list[Part]:
    """What is to run. All limits together leave room in ten minutes on a GPU; a CPU may be a slow one."""
    # A configuration of its own instead of the project's, which names plugins that the machine may lack.
    (scratch / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: GPU\n    oracle: torch\n    slow: slow\n")
    pytest = [sys.executable, "-m", "pytest", "-c", str(scratch / "pytest.ini"), f"--rootdir={ROOT}"]
    pytest += ["-p", "no:cacheprovider", "-m", "gpu", "-ra", "--durations=10", f"--junit-xml={scratch / 'tests.xml'}"]
    if importlib.util.find_spec("xdist"):  # most of a GPU test's time is the compiler's, on the host
        pytest += ["-n", str(max(1, min(8, (os.cpu_count() or 2) // 2)))]
    attention = [sys.executable, str(ROOT / "benchmarks" / "paged_attention.py"), *outputs(folder, "paged_attention")]
    step = [sys.executable, str(ROOT / "benchmarks" / "decode_step.py"), *outputs(folder, "decode_step")]
    if quick:
        attention += ["--quick", "--repeat", "5"]
        step += ["--cases", "decode-4k", "--repeat", "2"]
    limits = (90, 100, 90) if quick else (150, 180, 140)
    limits = limits if on_gpu else tuple(4 * limit for limit in limits)
    # A shape takes some ten seconds, a step up to a minute to compile.
    attention += ["--time-limit", str(0.75 * limits[1])]
    step += ["--time-limit", str(0.45 * limits[2])]
    files = gpu_test_files()
    shared_gpu = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # or the first process would take most of the memory
    return [
        *([Part("gpu_tests", pytest + files, limits[0], shared_gpu)] if files else []),
        Part("paged_attention", attention, limits[1]),
        Part("decode_step", step, limits[2]),
    ]


def outputs(folder: Path, name: str) -> list[str]:
    return ["--json", str(folder / f"{name}.json"), "--markdown", str(folder / f"{name}.md")]


def environment(*, use_gpu: bool) -> dict[str, str]:
    """Of every part: this checkout before any installed package, one cache of compiled programs."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cache = os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "pagedjax-gpu-check-programs")
    )
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cuda,cpu" if use_gpu else "cpu",  # the first is the default; tests may want both
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def probe(*, use_gpu: bool) -> dict[str, Any] | str:
    """What jax sees, or why it sees nothing: with the GPU alone named, it does not fall back to the CPU."""
    env = environment(use_gpu=use_gpu) | {"JAX_PLATFORMS": "cuda" if use_gpu else "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return "jax did not start within 120 s"
    if done.returncode:
        last_line = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit status {done.returncode}")
        return f"with JAX_PLATFORMS={env['JAX_PLATFORMS']} it ends with {last_line}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(part: Part, folder: Path, env: dict[str, str]) -> Outcome:
    """Runs it with its output in FOLDER/NAME.log and here; at its limit it is stopped with all that it started."""
    print(f"--- {part.name} (at most {part.limit:.0f} s)", flush=True)
    start = time.monotonic()
    log = folder / f"{part.name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env={**env, **part.variables},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=part.limit)
            status = "passed" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"failed: stopped after {part.limit:.0f} s"
        finally:
            stop(process)
    print(log.read_text(errors="replace"), flush=True)
    return Outcome(part, status, time.monotonic() - start)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of ours and its children, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def count_tests(outcome: Outcome, xml: Path, *, must_pass: bool) -> Outcome:
    """The outcome of pytest with its counts. Nothing but skipped tests is no success on a GPU."""
    if not xml.is_file():
        return outcome
    suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    num_passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    status = outcome.status
    if outcome.is_good and must_pass and not num_passed:
        status = "failed: no test ran"
    broken = count["failures"] + count["errors"]
    return outcome._replace(status=f"{status} ({num_passed} passed, {broken} failed, {count['skipped']} skipped)")


def nvidia_smi() -> str:
    """Card, driver and memory in the driver's words."""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.memory"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi says nothing: {error}"


def commit() -> str:
    """The commit of the checkout, where there is git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def summary(folder: Path, seen: dict[str, Any], outcomes: list[Outcome], *, on_gpu: bool) -> str:
    """Card, versions, what became of every part, and the tables."""
    card = nvidia_smi() if on_gpu else "none: a dry run on the CPU, whose times say nothing about a GPU"
    lines = ["# GPU check", "", f"- date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, commit {commit()}"]
    lines += [f"- card, driver: {card}", f"- jax sees: {seen['count']} x {seen['device']} ({seen['platform']})"]
    lines += [f"- jax {seen['jax']}, jaxlib {seen['jaxlib']}, Python {platform.python_version()}", ""]
    lines += ["| part | outcome | seconds |", "|---|---|--:|"]
    lines += [f"| {o.part.name} | {o.status} | {o.seconds:.0f} |" for o in outcomes]
    if not any(outcome.part.name == "gpu_tests" for outcome in outcomes):
        lines += ["", "There are no tests marked `gpu`."]
    for outcome in outcomes:
        table = folder / f"{outcome.part.name}.md"
        if table.is_file():
            lines += ["", f"## {outcome.part.name}", "", table.read_text().strip()]
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="the folder for everything that it writes")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions: under five minutes in all")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    allow_cpu = os.environ.get("ALLOW_CPU") == "1"
    seen = probe(use_gpu=True)
    on_gpu = isinstance(seen, dict) and seen["platform"] == "gpu"
    if not on_gpu:
        print(f"gpu-check: jax finds no NVIDIA GPU: {seen}; {nvidia_smi()}", file=sys.stderr)
        if not allow_cpu:
            sys.exit("gpu-check needs a GPU and jax with CUDA. ALLOW_CPU=1 makes a dry run on the CPU.")
        seen = probe(use_gpu=False)
    if isinstance(seen, str):
        sys.exit(f"gpu-check: jax does not start: {seen}")
    folder = args.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("gpu_tests", "paged_attention", "decode_step"):  # of an earlier run
        for suffix in ("log", "json", "md"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for part in parts(folder, scratch, quick=args.quick, on_gpu=on_gpu):
            outcome = run(part, folder, environment(use_gpu=on_gpu))
            if part.name == "gpu_tests":
                outcome = count_tests(outcome, scratch / "tests.xml", must_pass=on_gpu)
            outcomes.append(outcome)
            # After every part: a machine that is taken away leaves what there is.
            text = summary(folder, seen, outcomes, on_gpu=on_gpu)
            (folder / "summary.md").write_text(text)
    print(f"--- {folder / 'summary.md'}\n\n{text}")
    failed = [outcome.part.name for outcome in outcomes if not outcome.is_good]
    sys.exit(f"gpu-check: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
