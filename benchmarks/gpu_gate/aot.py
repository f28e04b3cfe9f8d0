"""Compiles a jax function for a card that is not here, and gathers what XLA and the assembler say about the program."""

import re
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.gpu_gate.cards import CARDS, Card, device, targeting
from benchmarks.gpu_gate.ptx import Kernel, parse_kernels, parse_launches


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled function. Bytes are the whole program's, as XLA assigned its buffers."""

    card: Card
    seconds: float
    """How long it took to lower and compile."""
    kernels: tuple[Kernel, ...] = ()
    """Each distinct kernel once, those that XLA generates among them. Library calls (cuBLAS) have none."""
    pallas_names: frozenset[str] = frozenset()
    hlo: str = ""
    """The optimised program, without the code of its Pallas kernels."""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    """Outputs that lie where a donated argument lay."""
    temp_bytes: int = 0
    error: str = ""
    """Why there is no program, if there is none."""

    @property
    def pallas_kernels(self) -> tuple[Kernel, ...]:
        """The kernels that somebody wrote; the others are XLA's."""
        return tuple(kernel for kernel in self.kernels if kernel.name in self.pallas_names)


def compile_for(
    card: Card, function: Callable[..., Any], args: tuple[Any, ...], *, donate: Iterable[int] = (), **static: Any
) -> Program:
    """Compiles `function(*args, **static)` for a card. A refusal of XLA or of Pallas is a program with an `error`.

    Args:
      function: what to compile; not jitted by itself, or else its donations are not the outer program's.
      args: trees of arrays or ShapeDtypeStructs: shapes and dtypes are all that counts.
      donate: numbers of the arguments that the caller gives up: the pool.
      static: keyword arguments as they are.
    """
    donate = tuple(donate)
    sharding = NamedSharding(Mesh([device(card)], ("card",)), PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    jitted = jax.jit(partial(function, **static), donate_argnums=donate)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-gate-") as dump:
        try:
            with targeting(card):
                lowered = jitted.lower(*args)
            # "ptx" alone: with every emitter XLA writes megabytes a kernel and takes ten times longer.
            compiled = lowered.compile({"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"})
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            return Program(card=card, error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - start)
        seconds = time.perf_counter() - start
        kernels = _read_kernels(Path(dump))
    memory: Any = compiled.memory_analysis()
    hlo = re.sub(r'\bir = "[^"]*"', 'ir = "..."', compiled.as_text() or "")
    return Program(
        card=card,
        seconds=seconds,
        kernels=kernels,
        pallas_names=frozenset(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?\bname = "(\w+)"', hlo)),
        hlo=hlo,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def _read_kernels(dump: Path) -> tuple[Kernel, ...]:
    launches = {}
    for file in dump.glob("*thunk_sequence.txt"):
        launches |= parse_launches(file.read_text())
    files = sorted(dump.glob("*.ptx"))
    return tuple(kernel for file in files for kernel in parse_kernels(file.read_text(), launches))


def report(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    cards: Iterable[str] = tuple(CARDS),
    donate: Iterable[int] = (),
    **static: Any,
) -> list[Program]:
    """`compile_for` several cards, by name, and prints a line for each kernel: to use while a kernel is written."""
    programs = []
    for name in cards:
        program = compile_for(CARDS[name], function, args, donate=donate, **static)
        programs.append(program)
        print(f"{name}: {program.error or f'{program.temp_bytes} B temporary, {program.alias_bytes} B in place'}")
        for kernel in program.kernels:
            print(
                f"  {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} B spilled, "
                f"{kernel.shared_bytes} B shared, {kernel.num_threads} threads, grid {kernel.grid}, "
                f"{kernel.mma} mma, {kernel.wgmma} wgmma, {kernel.cp_async} cp.async, {kernel.atomics} atomics, "
                f"loads {kernel.loads}, stores {kernel.stores}"
            )
    return programs
