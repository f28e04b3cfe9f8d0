"""What one compiled GPU kernel needs and does, read from its PTX and from the assembler's report."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One entry function. Counts of instructions are of the program text, not of what runs."""

    name: str
    target: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    num_threads: int
    grid: tuple[int, ...]
    mma: int
    wgmma: int
    cp_async: int
    atomics: int
    loads: dict[str, int]
    """How often each kind of load from global memory occurs, say {"v4.b32": 8}; cp.async of 16 bytes is "async16"."""
    stores: dict[str, int]
    ptx: str

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class Launch:
    """How XLA starts a kernel."""

    grid: tuple[int, ...]
    num_threads: int
    shared_bytes: int


_LAUNCH = re.compile(r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\].*?shared_memory: (\d+) bytes")
_ACCESS = re.compile(r"\b(ld|st)\.(?:[a-z_]+(?:::\w+)?\.)*global(?:\.[a-zA-Z_:0-9]+)*?((?:\.v\d)?\.[busf]\d+)\b")
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global(?:\.\w+)*\s*\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)")


def parse_launches(thunk_sequence: str) -> dict[str, Launch]:
    """XLA's dump of what an executable starts, by kernel."""
    launches = {}
    for name, grid, threads, shared in _LAUNCH.findall(thunk_sequence):
        x, y, z = (int(n) for n in threads.split(","))
        launches[name] = Launch(tuple(int(n) for n in grid.split(",")), x * y * z, int(shared))
    return launches


def parse_kernels(ptx: str, launches: dict[str, Launch]) -> list[Kernel]:
    """The kernels of one PTX file, assembled once more for the assembler's report."""
    if ".entry" not in ptx:
        return []
    match = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert match, "PTX without a target"
    target = match.group(1)
    kernels = []
    for name, report in _assemble(ptx, target).items():
        used = {
            field: int(found.group(1)) if (found := re.search(pattern, report)) else 0
            for field, pattern in _REPORT.items()
        }
        launch = launches.get(name, Launch((), 0, 0))
        kernels.append(
            Kernel(
                name=name,
                target=target,
                dynamic_shared_bytes=launch.shared_bytes,
                num_threads=launch.num_threads,
                grid=launch.grid,
                mma=len(re.findall(r"\bmma\.sync\.", ptx)),
                wgmma=len(re.findall(r"\bwgmma\.mma_async\.", ptx)),
                cp_async=len(re.findall(r"\bcp\.async\.(?:c[ag]|bulk)\.(?!commit|wait)", ptx)),
                atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
                loads=_accesses(ptx, "ld"),
                stores=_accesses(ptx, "st"),
                ptx=ptx,
                **used,
            )
        )
    return kernels


_REPORT = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "static_shared_bytes": r"(\d+) bytes smem",
}


def _accesses(ptx: str, kind: str) -> dict[str, int]:
    counts = Counter(match.group(2).lstrip(".") for match in _ACCESS.finditer(ptx) if match.group(1) == kind)
    if kind == "ld":
        counts.update(f"async{int(size, 0)}" for size in _CP_ASYNC.findall(ptx))
    return dict(counts)


def access_bytes(access: str) -> int:
    """Bytes that one thread moves with it: "v4.b32" is 16."""
    if access.startswith("async"):
        return int(access.removeprefix("async"))
    vector, _, scalar = access.rpartition(".")
    return int(vector.removeprefix("v") or 1) * int(scalar[1:]) // 8


def widest(accesses: dict[str, int]) -> int:
    """Bytes of the widest of some accesses, 0 without any."""
    return max((access_bytes(access) for access in accesses), default=0)


@cache
def _assemble(ptx: str, target: str) -> dict[str, str]:
    """The report of ptxas on each entry function."""
    command = [_ptxas(), "-v", f"--gpu-name={target}", "-o", "/dev/null", "-"]
    run = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"ptxas refused the kernel: {run.stderr.strip()[:500]}")
    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", run.stderr)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def _ptxas() -> str:
    """The assembler that came with pip's nvidia-cuda-nvcc, or else the one on the PATH."""
    for folder in sys.path:
        for package in ("cuda_nvcc", "cu13"):
            program = Path(folder) / "nvidia" / package / "bin" / "ptxas"
            if program.is_file():
                return str(program)
    program = shutil.which("ptxas")
    if program is None:
        raise FileNotFoundError("no ptxas: pip install nvidia-cuda-nvcc-cu12")
    return program
