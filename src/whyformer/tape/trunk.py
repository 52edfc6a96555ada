"""Follow the residual sums of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from whyformer.tape.members import Members
from whyformer.tape.units import Unit

__all__ = ["Trunk"]


class Trunk:
    """The values between two states of a stream, along the residual path rather than the branches.

    They are the spine unless a path bypasses the residual sums, as in models whose blocks all read the embedding.

    Args:
        makers: maps a value to the unit that computes it.
        members: which values hold the rows of the stream.
        first, last: numbers of the two states.

    Attributes:
        values: numbers of the values in the order of execution, including the two states.
    """

    def __init__(self, makers: Mapping[int, Unit], members: Members, first: int, last: int) -> None:
        self.makers = makers
        values, n = [last], last
        while n != first and n in self.makers:
            before = [e for e in dict.fromkeys(self.makers[n].entries) if members.is_whole(e)]
            if len(before) == 2 and self.makers[n].kind == "add" and self.leads(min(before), max(before)):
                n = min(before)
            elif len(before) == 1:
                (n,) = before
            else:
                break
            values.append(n)
        self.values = [*([first] if values[-1] != first else []), *values[::-1]]

    def leads(self, first: int, last: int) -> bool:
        """Return True if a path leads from a value to a later one."""
        todo, visited = [last], set[int]()
        while todo:
            n = todo.pop()
            if n == first:
                return True
            if n > first and n not in visited:
                visited.add(n)
                todo += self.makers[n].entries if n in self.makers else ()
        return False

    def last_before(self, value: int) -> int:
        """Return the position in ``values`` of the last one from which a path leads to ``value``, or −1."""
        return next((i for i in reversed(range(len(self.values))) if self.leads(self.values[i], value)), -1)
