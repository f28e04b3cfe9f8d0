"""Checks that a kernel computes addresses in 64 bits where a pool is too large for 32.

Block numbers and slots are 32-bit numbers in memory. What is loaded is followed through the 32-bit registers of the
PTX with an upper bound of its value. Where a register is widened to 64 bits, as every address is, the bound must fit
into 31 bits, or into 32 of an unsigned number: a block number may be widened and then multiplied, not the other way
round. A pool to check with has more than 2^32 elements, as compilers know when unsigned numbers suffice.
"""

import re
from typing import NamedTuple

_STATEMENT = re.compile(r"^(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.+)$", re.DOTALL)
_REGISTER = re.compile(r"%r\d+\b")
_LOADS = ("ld.global", "ld.shared", "ld.relaxed", "ld.volatile")
_CEILING = 1 << 48  # bounds that grow around a loop stop here


class Widening(NamedTuple):
    """A loaded number, or what was made of it, becomes a 64-bit one."""

    statement: str
    bound: int

    @property
    def may_overflow(self) -> bool:
        return self.bound >= 1 << (32 if ".u32" in self.statement else 31)


def widenings(ptx: str, largest_index: int) -> list[Widening]:
    """Everything made of loaded numbers that a kernel widens. No loaded index is larger than `largest_index`."""
    statements = _statements(ptx)
    bounds: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for opcode, operands in statements:
            for register, bound in _results(opcode, operands, bounds, largest_index).items():
                if bound > bounds.get(register, -1):
                    bounds[register] = min(bound, _CEILING)
                    changed = changed or bound <= _CEILING
    return [
        Widening(f"{opcode} {', '.join(operands)}", bounds[operands[1]])
        for opcode, operands in statements
        if _widens(opcode) and operands[1] in bounds
    ]


def _statements(ptx: str) -> list[tuple[str, list[str]]]:
    code = re.sub(r"//.*", "", ptx)
    matches = (_STATEMENT.match(part.strip()) for part in re.split(r"[;{]\s*\n|;", code))
    return [(match[1], _split(match[2])) for match in matches if match]


def _split(operands: str) -> list[str]:
    """At commas, but not at those between braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", operands)]


def _widens(opcode: str) -> bool:
    return opcode in ("cvt.s64.s32", "cvt.u64.u32") or opcode.startswith(("mul.wide.", "mad.wide."))


def _results(opcode: str, operands: list[str], bounds: dict[str, int], largest_index: int) -> dict[str, int]:
    """Bounds of the 32-bit registers that a statement writes; none if nothing in them was loaded."""
    written = _REGISTER.findall(operands[0])
    if opcode.startswith(_LOADS):
        return dict.fromkeys(written, largest_index)
    read = [bounds[register] for part in operands[1:] for register in _REGISTER.findall(part) if register in bounds]
    if not read:
        return {}
    bound = max(read)
    constant = next((int(part, 0) for part in operands[1:] if re.fullmatch(r"\d+|0x[0-9a-fA-F]+", part)), None)
    if constant is not None:
        if opcode.startswith("shl."):
            bound <<= min(constant, 48)
        elif opcode.startswith("shr."):
            bound >>= min(constant, 48)
        elif opcode.startswith("and."):
            bound = min(bound, constant)
        elif opcode.startswith(("mul.lo.", "mad.lo.")):
            bound *= constant
    return dict.fromkeys(written, bound)
