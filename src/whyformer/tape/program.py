"""Say what the calls of a tape compute.

    program = read_program(tape, roots=[tape.number(pixels)], outputs=[tape.number(logits)])
    print(program)

A program is structure only: numbers of values and calls, never tensors. It serves every pass with the same signature,
and is read once for each. Reading looks at calls, shapes and constants; never at classes, module names, or recorded
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whyformer.errors import ModelError
from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call
from whyformer.tape.regions import find_regions
from whyformer.tape.sums import find_sums
from whyformer.tape.units import CallReader, Unit, dominators, reach, weights
from whyformer.tape.values import Tape

__all__ = ["Program", "read_program"]


@dataclass(eq=False)
class Program:
    """The units between roots and outputs, in the order of execution.

    Attributes:
        units: those that lie on a path from a root to an output.
        roots: numbers of the values whose relevance is asked for.
        outputs: numbers of the values that are explained; mostly one.
        carry: of each value, whether it depends on a root through floating-point values.
        weight: of each value, whether it is made of parameters, buffers and constants alone.
        dominator: of each value that carries, the nearest one through which all paths from the roots pass; −1 for
            none.
        shapes: of each value.
        plans: what walks under composites visit; filled by :mod:`whyformer.tape.walking`.
    """

    units: list[Unit]
    roots: tuple[int, ...]
    outputs: tuple[int, ...]
    carry: list[bool]
    weight: list[bool]
    dominator: dict[int, int]
    shapes: list[Any]
    plans: Recent[Any] = field(default_factory=lambda: Recent(64), repr=False)

    @cached_property
    def makers(self) -> dict[int, Unit]:
        """For each value the unit that makes it."""
        return {r: u for u in self.units for r in u.exits}

    @property
    def output(self) -> int:
        """Number of the first output."""
        return self.outputs[0]

    def lines(self, modules: Mapping[int, str] | None = None) -> list[str]:
        """Return a line for each unit: number of the exit, kind, call, shape, entries, and the module that made it.

        Args:
            modules: call number -> path of the module that made it.
        """
        found = []
        for u in self.units:
            entries, shape = ", ".join(map(str, u.entries)), "×".join(map(str, self.shapes[u.exit])) or "number"
            module = (modules or {}).get(u.calls[-1], "")
            line = f"{u.exit:5}  {u.kind:14} {u.name:22} {shape:16} <- {entries:14} {module}"
            found.append(line.rstrip())
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


_PROGRAMS: Recent[Program] = Recent(64)


def read_program(tape: Tape, roots: Iterable[int], outputs: int | Iterable[int]) -> Program:
    """Return the program between roots and outputs.

    Args:
        tape: a recorded pass.
        roots: numbers of the values whose relevance is asked for.
        outputs: number of the value that is explained, or several of them.
    """
    ends = (outputs,) if isinstance(outputs, int) else tuple(sorted(outputs))
    key = tape.signature, tuple(sorted(roots)), ends
    return _PROGRAMS.get(key) or _PROGRAMS.put(key, _read(tape, key[1], ends))


def _read(tape: Tape, roots: tuple[int, ...], outputs: tuple[int, ...]) -> Program:
    carry, weight, needed = reach(tape, roots), weights(tape), set(outputs)
    for call in reversed(tape.calls):
        if any(r in needed for r in call.results):
            needed.update(o for o in call.operands if carry[o])
    live = [
        c for c in tape.calls if any(carry[o] for o in c.operands) and any(r in needed and carry[r] for r in c.results)
    ]
    _refuse_unseen(live, carry)
    above = dominators(tape, carry)
    units = find_regions(tape, carry, weight, live, above, frozenset((*roots, *outputs)))
    covered = {n for u in units for n in u.calls}
    sums = list(find_sums(tape, carry, [c for c in live if c.number not in covered], frozenset((*roots, *outputs))))
    units, covered = [*units, *sums], covered.union(*(u.calls for u in sums))
    reading = CallReader(tape, carry, weight, needed, units)
    units += [reading.unit(c) for c in live if c.number not in covered]
    units.sort(key=lambda u: tape.maker[u.exit].number)
    return Program(units, roots, outputs, carry, weight, above, tape.shapes)


def _refuse_unseen(calls: Iterable[Call], carry: list[bool]) -> None:
    """Raise if a declared operation reads a value that carries relevance without being given it."""
    for call in calls:
        if any(carry[n] for n in call.beside):
            raise ModelError(
                f"'{call.name}' is declared to be like an operation, but what it gives depends on a tensor that it was "
                "not given: hand it over as an argument, or leave the operation undeclared"
            )
