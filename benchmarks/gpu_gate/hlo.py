"""Finds in an optimised XLA program what makes or rewrites an array as large as the pool."""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Instruction(NamedTuple):
    name: str
    opcode: str
    shapes: tuple[tuple[int, ...], ...]
    """Of its outputs."""
    computation: str
    is_root: bool
    text: str


_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\b[a-z]+\d+\w*\[([\d,]*)\]")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")

PASSES_ON = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"})
"""Instructions that move no data: what they call is looked at by itself."""
IN_PLACE = frozenset({"scatter", "dynamic-update-slice"})
"""Instructions that write parts of their first operand. XLA copies it first where it may not, and that is a `copy`."""
NEVER = frozenset({"copy", "copy-start", "convert", "transpose"})
"""What an array of the pool's size must not go through, not even inside of a fusion."""


def instructions(hlo: str) -> Iterator[Instruction]:
    """All instructions of a program, with the computation that each is part of."""
    computation = ""
    for line in hlo.splitlines():
        if match := _INSTRUCTION.match(line):
            root, name, outputs, opcode = match.groups()
            shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for dims in _SHAPE.findall(outputs))
            yield Instruction(name, opcode, shapes, computation, root is not None, line.strip())
        elif match := _HEADER.match(line):
            computation = match.group(1)


def pool_copies(hlo: str, pool_elements: int) -> list[str]:
    """Descriptions of the instructions that make at least `pool_elements` numbers anew instead of updating some.

    Views count, whatever their shape: a reshaped pool is as large as the pool.
    """
    program = list(instructions(hlo))
    fused = {match.group(1) for each in program if each.opcode == "fusion" and (match := _CALLS.search(each.text))}
    roots = {each.computation: each for each in program if each.is_root}
    opcodes = {(each.computation, each.name): each.opcode for each in program}

    def makes_pool(each: Instruction) -> bool:
        if all(prod(shape) < pool_elements for shape in each.shapes):
            return False
        if each.computation in fused:  # it may exist in parts only, as a matrix that is converted for a product does
            return each.opcode in NEVER and any(prod(shape) == pool_elements for shape in each.shapes)
        if each.opcode in PASSES_ON | IN_PLACE:
            return False
        if each.opcode == "custom-call":
            return "output_to_operand_aliasing" not in each.text
        if each.opcode == "fusion" and (match := _CALLS.search(each.text)):
            return not writes_in_place(roots[match.group(1)])
        return True

    def writes_in_place(root: Instruction) -> bool:
        if root.opcode == "tuple":
            operands = re.findall(r"%([\w.-]+)", root.text.partition("tuple(")[2].partition(")")[0])
            large = [name for name, shape in zip(operands, root.shapes, strict=True) if prod(shape) >= pool_elements]
            return all(opcodes[root.computation, name] in IN_PLACE for name in large)
        return root.opcode in IN_PLACE | {"bitcast"}

    return [f"{each.opcode} %{each.name} {list(each.shapes[0])}" for each in program if makes_pool(each)]
