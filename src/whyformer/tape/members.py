"""Find the values that hold the rows of a stream, and those on its residual path."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whyformer.tape.program import Program
from whyformer.tape.rows import Rows, slim
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape

__all__ = ["Members", "leads"]


class Members:
    """Tests whether values hold the rows of a stream.

    Args:
        queries: ``[B, N]``, the rows of the stream.
        rows: the rows of the pass.
    """

    def __init__(self, queries: Tensor, rows: Rows) -> None:
        self.rows, self.queries, self.count = rows, queries, queries.numel()
        self.inside = torch.zeros(len(rows), dtype=torch.bool)
        self.inside[queries.flatten()] = True
        self._looks: dict[int, tuple[bool, bool]] = {}

    def carry(self, program: Program, tape: Tape) -> list[bool]:
        """Return, for each value, whether it holds rows of the stream and is computed from all of them."""
        carry = [False] * len(tape)
        for n in program.roots:
            carry[n] = self.holds_all_rows(n)
        for call in tape.calls:
            dependent = any(carry[o] for o in call.operands)
            for r in call.results:
                carry[r] = program.carry[r] and (self.holds_only_rows(r) if dependent else self.holds_all_rows(r))
        return carry

    def holds_only_rows(self, value: int) -> bool:
        """Return True if all rows of a value, or of one side of a map, belong to the stream."""
        return any(self._look(t)[0] for t in self.rows.labels.get(value, ()))

    def holds_all_rows(self, value: int) -> bool:
        """Return True if the value holds all rows of the stream and no others."""
        label = self.rows.labels.get(value, ())
        return len(label) == 1 and self._look(label[0])[1]

    def is_state(self, value: int) -> bool:
        """Return True if the value holds each row of the stream once, and no others."""
        return self.holds_all_rows(value) and self.holds_each_once(value)

    def holds_each_once(self, value: int) -> bool:
        """Return True if the value holds rows of the stream, each of them once."""
        label = self.rows.labels.get(value, ())
        if len(label) != 1:
            return False
        numbers = slim(label[0]).flatten()
        members = numbers[self.inside[numbers]]
        return len(members) > 0 and len(members) == len(members.unique())

    def trunk(self, makers: Mapping[int, Unit], first: int, last: int) -> list[int]:
        """Return the values between two states of the stream along the residual path, in the order of execution.

        The path is followed back from the last state. If no single entry of a unit continues it, the values before
        that unit are left out.

        Args:
            makers: maps a value to the unit that computes it.
            first, last: numbers of the two states, which are included.
        """
        values = [last]
        while (n := values[-1]) != first and n in makers:
            before = [e for e in dict.fromkeys(makers[n].entries) if self.holds_all_rows(e)]
            if len(before) == 2 and makers[n].kind == "add" and leads(makers, min(before), max(before)):
                before = [min(before)]
            if len(before) != 1:
                break
            values += before
        return [*([first] if values[-1] != first else []), *values[::-1]]

    def _look(self, label: Tensor) -> tuple[bool, bool]:
        """Return (whether a label holds only rows of the stream, whether it holds all of them and no others)."""
        numbers = self.rows.distinct(label)
        if id(numbers) not in self._looks:
            inside = int(self.inside[numbers].sum())
            self._looks[id(numbers)] = len(numbers) == inside, len(numbers) == inside == self.count
        return self._looks[id(numbers)]


def leads(makers: Mapping[int, Unit], first: int, last: int) -> bool:
    """Return True if a path leads from a value to a later one, or if they are the same.

    Args:
        makers: maps a value to the unit that computes it.
        first, last: numbers of the two values.
    """
    todo, visited = [last], set[int]()
    while todo:
        n = todo.pop()
        if n == first:
            return True
        if n > first and n not in visited:
            visited.add(n)
            todo += makers[n].entries if n in makers else ()
    return False
