"""What a compiled program must not be: each breach is one line that says what is wrong."""

from benchmarks.gpu_gate.aot import Program
from benchmarks.gpu_gate.cases import Case
from benchmarks.gpu_gate.hlo import pool_copies
from benchmarks.gpu_gate.offsets import widenings
from benchmarks.gpu_gate.ptx import Kernel


def breaches(program: Program, case: Case) -> list[str]:
    """Everything that is wrong with the program of a case, [] if nothing is."""
    if program.error:
        return [f"does not compile: {' '.join(program.error.split())[:300]}"]
    if not program.kernels:
        return ["the compiler wrote no PTX: nothing could be checked"]
    found = [breach for kernel in program.kernels for breach in _kernel_breaches(program, kernel)]
    if program.alias_bytes < case.in_place_bytes:
        found.append(f"of {case.in_place_bytes:,} bytes of the pool only {program.alias_bytes:,} are updated in place")
    if case.temp_limit is not None and program.temp_bytes > case.temp_limit:
        found.append(f"needs {program.temp_bytes:,} bytes of temporaries, more than {case.temp_limit:,}")
    if case.pool:
        copies = pool_copies(program.hlo, case.pool_elements)
        found += [f"makes an array as large as the pool: {copy}" for copy in copies]
    if not case.allows_atomics:
        found += [f"{kernel.name} has {kernel.atomics} atomics" for kernel in program.kernels if kernel.atomics]
    if case.largest_index is not None:
        found += _offset_breaches(program, case.largest_index)
    return found


def _kernel_breaches(program: Program, kernel: Kernel) -> list[str]:
    found = []
    if kernel.spill_bytes:
        found.append(
            f"{kernel.name} spills registers: {kernel.spill_store_bytes} bytes stored, {kernel.spill_load_bytes} loaded"
        )
    if kernel.shared_bytes > program.card.shared_memory_limit:
        limit = program.card.shared_memory_limit
        found.append(f"{kernel.name} needs {kernel.shared_bytes:,} bytes of shared memory, there are {limit:,}")
    return found


def _offset_breaches(program: Program, largest_index: int) -> list[str]:
    found = []
    all_widenings = {kernel.name: widenings(kernel.ptx, largest_index) for kernel in program.kernels}
    for name, of_kernel in all_widenings.items():
        found += [f"{name} may overflow 32 bits before: {each.statement}" for each in of_kernel if each.may_overflow]
    if not any(all_widenings.values()):
        found.append("no address depends on a loaded index: the check of 64-bit offsets saw nothing")
    return found
