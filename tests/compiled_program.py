"""Facts of a compiled program, read from XLA's text of it: unlike seconds, the same on every machine and in every run.

A program's buffers are what its instructions outside fusions make; what a fusion has inside never lies in memory. The
instructions do not depend on how well they are turned into machine code, so tests may compile without optimising that.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*)")
ARRAY = re.compile(r"[a-z]+\d*\w*\[([\d,]*)\]")
PASSED_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "constant")
IN_PLACE = ("dynamic-update-slice", "scatter")


class Instruction(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]  # of its results
    opcode: str
    operands: tuple[str, ...]
    called: str | None  # a fusion's computation
    is_root: bool

    @property
    def sizes(self) -> list[int]:
        """Elements of its results."""
        return [math.prod(shape) for shape in self.shapes]


class Program:
    """Computations by name, each with its instructions by name."""

    def __init__(self, compiled: Any) -> None:
        self._computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in compiled.as_text().splitlines():
            if heading := COMPUTATION.match(line):
                current = self._computations.setdefault(heading[1], {})
            elif found := INSTRUCTION.match(line):
                root, name, result, opcode, rest = found.groups()
                shapes = tuple(tuple(map(int, filter(None, dims.split(",")))) for dims in ARRAY.findall(result))
                operands = tuple(re.findall(r"%([\w.-]+)", rest[: rest.index(")")]))
                called = re.search(r"calls=%?([\w.-]+)", rest) if opcode == "fusion" else None
                current[name] = Instruction(shapes, opcode, operands, called and called[1], root is not None)
        assert sum(map(len, self._computations.values())) > 1, "XLA's text is no longer what is read here"

    def made(self) -> Iterator[Instruction]:
        """Those that make a buffer's contents, all of it: neither passed on nor written in place."""
        inside = {i.called for computation in self._computations.values() for i in computation.values()}
        for name, computation in self._computations.items():
            if name not in inside:
                yield from (i for i in computation.values() if i.opcode not in PASSED_ON and not self._in_place(i))

    def made_of_size(self, sizes: set[int]) -> list[str]:
        """What makes arrays of so many elements, as texts."""
        return [f"{i.opcode} {list(shape)}" for i in self.made() for shape in i.shapes if math.prod(shape) in sizes]

    def paired_reductions(self, axis: int) -> list[str]:
        """Reductions of several arrays at once with an axis of this length, as texts: loops over scalars on a CPU."""
        found = []
        for computation in self._computations.values():
            for i in computation.values():
                if i.opcode in ("reduce", "reduce-window") and len(i.shapes) > 1:
                    shapes = [shape for name in i.operands for shape in computation[name].shapes]
                    found += [f"{i.opcode} of {list(shape)}" for shape in shapes if axis in shape]
        return found

    def opcodes(self) -> set[str]:
        """All that occur, in fusions too."""
        return {i.opcode for computation in self._computations.values() for i in computation.values()}

    def _in_place(self, instruction: Instruction) -> bool:
        if instruction.called is None:
            return instruction.opcode in IN_PLACE
        computation = self._computations[instruction.called]
        (root,) = (i for i in computation.values() if i.is_root)
        while root.opcode == "bitcast":
            root = computation[root.operands[0]]
        roots = [computation[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return all(i.opcode in IN_PLACE for i in roots)
