"""Dominators on the flow of data: the values through which everything passes that reaches a value."""

from __future__ import annotations

from whyformer.program.record import Program

START = -1


def dominators(program: Program) -> dict[int, int]:
    """Value that carries -> its immediate dominator, the last value before it through which all paths from the inputs
    run; :data:`START` where there is none."""
    found: dict[int, int] = {}
    depth = {START: 0}

    def meet(a: int, b: int) -> int:
        while a != b:
            if depth[a] >= depth[b]:
                a = found[a]
            else:
                b = found[b]
        return a

    for number, value in enumerate(program.values):
        if not value.carries:
            continue
        parents = [p for p in value.parents if program.values[p].carries]
        nearest = parents[0] if parents else START
        for parent in parents[1:]:
            nearest = meet(nearest, parent)
        found[number] = nearest
        depth[number] = depth[nearest] + 1
    return found


def chain(program: Program, value: int) -> list[int]:
    """The dominators of a value from the first to itself."""
    found, nearest = [], dominators(program)
    while value != START:
        found.append(value)
        value = nearest.get(value, START)
    return found[::-1]
