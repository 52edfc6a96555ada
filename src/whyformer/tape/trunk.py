"""Follow the sums of a state and what is made of it, through which the rows of a stream go."""

from __future__ import annotations

from collections.abc import Mapping

from whyformer.tape.members import Members
from whyformer.tape.units import Unit

__all__ = ["Trunk"]


class Trunk:
    """The values that lead from one state of a stream to another, past branches that are added.

    It is the spine unless something leads past its sums, as where each block looks at the embedding once more.

    Args:
        makers: value -> the unit that makes it.
        members: which values hold the rows of the stream.
        first, last: numbers of the two states.

    Attributes:
        values: in the order of execution, the two states included.
    """

    def __init__(self, makers: Mapping[int, Unit], members: Members, first: int, last: int) -> None:
        self.makers = makers
        found, n = [last], last
        while n != first and n in self.makers:
            before = [e for e in dict.fromkeys(self.makers[n].entries) if members.is_whole(e)]
            if len(before) == 2 and self.makers[n].kind == "add" and self.leads(min(before), max(before)):
                n = min(before)
            elif len(before) == 1:
                (n,) = before
            else:
                break
            found.append(n)
        self.values = [*([first] if found[-1] != first else []), *found[::-1]]

    def leads(self, first: int, last: int) -> bool:
        """Return True if a path leads from a value to a later one."""
        todo, seen = [last], set[int]()
        while todo:
            n = todo.pop()
            if n == first:
                return True
            if n > first and n not in seen:
                seen.add(n)
                todo += self.makers[n].entries if n in self.makers else ()
        return False

    def last_before(self, value: int) -> int:
        """Return the position of the last value from which a path leads to another one, or −1."""
        return next((i for i in reversed(range(len(self.values))) if self.leads(self.values[i], value)), -1)
