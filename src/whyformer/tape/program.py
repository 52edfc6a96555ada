"""Interpret the calls of a tape as a program of units: layers, norms, activations, softmaxes, products, sums, views.

    program = read_program(tape, roots=[tape.number(pixels)], outputs=[tape.number(logits)])
    print(program)

A program holds numbers of values and calls, never tensors. It is derived from calls, shapes and constants only, never
from classes, module names or recorded values, and is cached by the signature of the tape: all passes with the same
signature share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whyformer.errors import ModelError
from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call
from whyformer.tape.regions import Regions
from whyformer.tape.units import CallReader, Unit, dominators, reach, weights
from whyformer.tape.values import Tape

__all__ = ["Program", "read_program"]


@dataclass(eq=False)
class Program:
    """The units between roots and outputs, in the order of execution.

    Attributes:
        units: the units on paths from roots to outputs.
        roots: numbers of the values that receive relevance.
        outputs: numbers of the values to explain, usually one.
        carry: for each value, whether it *carries*: depends on a root through floating-point values.
        weight: for each value, whether it is computed from parameters, buffers and constants only.
        dominator: for each value that carries, its immediate dominator: the nearest value through which all paths from
            the roots to it pass; −1 if there is none.
        shapes: shape of each value.
        plans: cache of :func:`whyformer.tape.walking.plan`.
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
        """For each value, the unit that computes it."""
        return {r: u for u in self.units for r in u.exits}

    @cached_property
    def _joined(self) -> dict[int, Unit]:
        """For each call of a unit of several calls, the unit."""
        return {number: u for u in self.units if len(u.calls) > 1 for number in u.calls}

    def unit_around(self, value: int, tape: Tape) -> Unit | None:
        """Return the unit of several calls inside of which a value is computed, so that no flow of a walk arrives
        there; None if there is none."""
        unit = self._joined.get(tape.maker[value].number) if value in tape.maker else None
        return None if unit is None or value in unit.exits else unit

    @property
    def output(self) -> int:
        """Number of the first output."""
        return self.outputs[0]

    def lines(self, modules: Mapping[int, str] | None = None) -> list[str]:
        """Return a line for each unit: number of its exit, kind, call, shape, entries, and module.

        Args:
            modules: maps the number of a call to the path of the module that made it.
        """
        lines = []
        for u in self.units:
            entries, shape = ", ".join(map(str, u.entries)), "×".join(map(str, self.shapes[u.exit])) or "number"
            module = (modules or {}).get(u.calls[-1], "")
            line = f"{u.exit:5}  {u.kind:14} {u.name:22} {shape:16} <- {entries:14} {module}"
            lines.append(line.rstrip())
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


_PROGRAMS: Recent[Program] = Recent(64)


def read_program(
    tape: Tape, roots: Iterable[int], outputs: int | Iterable[int], between: Iterable[int] = ()
) -> Program:
    """Return the program between roots and outputs.

    Args:
        tape: a recorded pass.
        roots: numbers of the values that receive relevance.
        outputs: number of the value to explain, or numbers of several.
        between: numbers of values that must not lie inside a unit; a unit that would contain one is split.
    """
    ends = (outputs,) if isinstance(outputs, int) else tuple(sorted(outputs))
    key = tape.signature, tuple(sorted(roots)), ends, frozenset(between)
    return _PROGRAMS.once(key, lambda: _read(tape, *key[1:]))


def _read(tape: Tape, roots: tuple[int, ...], outputs: tuple[int, ...], between: frozenset[int]) -> Program:
    carry, weight, needed = reach(tape, roots), weights(tape), set(outputs)
    for call in reversed(tape.calls):
        if any(r in needed for r in call.results):
            needed.update(o for o in call.operands if carry[o])
    live = [
        c for c in tape.calls if any(carry[o] for o in c.operands) and any(r in needed and carry[r] for r in c.results)
    ]
    _refuse_hidden_operands(live, carry)
    above = dominators(tape, carry)
    units = Regions(tape, carry, weight, above, live, frozenset((*roots, *outputs, *between))).find()
    covered = {n for u in units for n in u.calls}
    reading = CallReader(tape, carry, weight, needed, units)
    units += [reading.unit(c) for c in live if c.number not in covered]
    units.sort(key=lambda u: tape.maker[u.exit].number)
    return Program(units, roots, outputs, carry, weight, above, tape.shapes)


def _refuse_hidden_operands(calls: Iterable[Call], carry: list[bool]) -> None:
    """Raise ModelError if a custom operation depends on a value that carries and is not one of its arguments."""
    for call in calls:
        if any(carry[n] for n in call.hidden_operands):
            raise ModelError(
                f"'{call.name}' is registered with a rule, but its result depends on a tensor that is not one of its "
                "arguments: pass the tensor as an argument, or do not register the operation"
            )
