"""Blocks of a program, read off the dominators of its output: from the last value that everything passes through before
one attention to the last before the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from whyformer.program.dominators import START, chain, dominators
from whyformer.program.operations import KINDS, is_in_place, kind_of, plain_name
from whyformer.program.record import Call, Program


@dataclass(frozen=True)
class ProgramBlock:
    """A block as a part of the program.

    Attributes:
        number: among the blocks.
    """

    number: int


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module that a container lists.

    Attributes:
        name: of the container; last_listed: whether it is the last module there.
        first, last: the calls of operations in it; last < first where there are none.
        entry, exit: numbers of what carries into it and out of it; −1 where nothing does.
    """

    name: str
    last_listed: bool
    first: int
    last: int
    entry: int
    exit: int


def blocks(program: Program, attentions: Sequence[Call]) -> tuple[tuple[int, int], ...]:
    """(the call that makes what enters a block, the call that makes what leaves it), of each block; none where the
    program is no chain of blocks on rows ``[B, N, D]``."""
    output = next((v for v in program.outputs if program.values[v].carries), None)
    if output is None:
        return ()
    borders, line = _borders(program, output, attentions), chain(program, output)
    if not borders:
        return ()
    places = [line.index(b) for b in borders]
    steps = [_names(program, line[a + 1 : b + 1]) for a, b in pairwise(places)]
    last = _end(program, line, places[-1], steps[-1] if steps else None)
    if last is None or last <= places[-1]:
        return ()
    ends = [*borders[1:], line[last]]
    found = [(_made(program, a), _made(program, b)) for a, b in zip(borders, ends, strict=True)]
    shape = program.values[borders[0]].shape
    alike = all(program.values[v].shape == shape for v in (*borders, ends[-1])) and len(shape) == 3
    return tuple(found) if alike and all(a >= 0 and b > a for a, b in found) else ()


def _borders(program: Program, output: int, attentions: Sequence[Call]) -> list[int]:
    """The last values through which everything passes before attentions that lead to the output; none where one of them
    lies beside the chain."""
    line, nearest, leading = set(chain(program, output)), dominators(program), _ancestors(program, output)
    found: dict[int, None] = {}
    for call in attentions:
        made = next((r for r in call.results if r in leading), None)
        if made is None:
            continue
        value = nearest.get(made, START)
        while value != START and value not in line:
            value = nearest.get(value, START)
        if value == START:
            return []
        found[_first(program, value, nearest)] = None
    return sorted(found)


def _first(program: Program, value: int, nearest: dict[int, int]) -> int:
    """The same values where they were made: before copies, and views of the same shape."""
    while True:
        call, before = program.maker(value), nearest.get(value, START)
        same = before != START and program.values[before].shape == program.values[value].shape
        if call is None or not same or kind_of(call.name) != "view" or is_in_place(call.name):
            return value
        if [o for o in call.operands if program.values[o].carries] != [before]:
            return value
        value = before


def _end(program: Program, line: list[int], place: int, steps: list[str] | None) -> int | None:
    """Where on the chain the last block ends: behind the same operations as in the block before it, or, of one block
    alone, at the last sum of two branches."""
    if steps is not None:
        left = [name for name in steps if kind_of(name) != "view"]
        if not left:
            return None
        for i in range(place + 1, len(line)):
            (name,) = _names(program, line[i : i + 1])
            if kind_of(name) == "view":
                continue
            if name != left.pop(0):
                return None
            if not left:
                return i
        return None
    sums = [i for i in range(place + 1, len(line)) if _joins(program, line[i])]
    shape = program.values[line[place]].shape
    return max((i for i in sums if program.values[line[i]].shape == shape), default=None)


def _joins(program: Program, value: int) -> bool:
    call = program.maker(value)
    carrying = set() if call is None else {o for o in call.operands if program.values[o].carries}
    return call is not None and plain_name(call.name) == "add" and len(carrying) > 1


def _names(program: Program, values: Sequence[int]) -> list[str]:
    makers = [program.maker(v) for v in values]
    return ["" if c is None else plain_name(c.name) for c in makers]


def _made(program: Program, value: int) -> int:
    call = program.maker(value)
    return -1 if call is None or len(call.results) != 1 else call.number


def _ancestors(program: Program, value: int) -> set[int]:
    seen, ahead = {value}, [value]
    while ahead:
        new = [p for p in program.values[ahead.pop()].parents if p not in seen]
        seen.update(new)
        ahead += new
    return seen


# -- whether containers of modules hold the blocks -------------------------------------------------------------------
def fits(
    program: Program, listed: Sequence[ModuleCall], attentions: Sequence[Call], spans: Sequence[tuple[int, int]]
) -> bool:
    """Whether the calls of listed modules are the blocks: each attention lies in one of them, all in one container, its
    last module runs last, each attends or mixes rows in another way, everything passes through what leaves it, and it
    is not several blocks that are alike."""
    if not listed:
        return False
    output = next(v for v in program.outputs if program.values[v].carries)
    line = set(chain(program, output))
    owners = [next((m for m in listed if m.first <= a.number <= m.last), None) for a in attentions]
    containers = {owner.name if owner else None for owner in owners}
    own = [module for module in listed if module.name in containers]
    if None in containers or len(containers) > 1 or not own or not own[-1].last_listed:
        return False
    for module in own:
        inside = [s for s in spans if module.first <= s[1] and s[1] <= module.last + 1]
        if module.exit not in line or (module not in owners and not _mixes_rows(program, module)):
            return False
        if len(inside) > 1 and len({tuple(_operations(program, *s)) for s in inside}) == 1:
            return False
    return True


def _operations(program: Program, first: int, last: int) -> list[str]:
    calls = program.calls[first + 1 : last + 1]
    return [plain_name(c.name) for c in calls if any(program.values[r].carries for r in c.results)]


_ROW_BY_ROW = ("view", "activation", "power", "normalisation", "statistic", "selection", "softmax", "silent")
_MIXERS = ["cumsum", "roll", "flip", "fold", "unfold", "pad", "gather", "scatter", "index_select", "index_add"]


def _mixes_rows(program: Program, module: ModuleCall) -> bool:
    """Whether rows of what enters have a part in other rows of what leaves."""
    for call in program.calls[module.first : module.last + 1]:
        name, carrying = plain_name(call.name), [o for o in call.operands if program.values[o].carries]
        if not carrying or (kind_of(name) in _ROW_BY_ROW and name not in _MIXERS):
            continue
        product = kind_of(name) == "matrix product" or name in ("einsum", "addmm", "baddbmm")
        if name not in KINDS or name.startswith(("conv", "fft")) or name in _MIXERS:
            return True
        if product and (len(set(carrying)) > 1 or call.operands[0] not in carrying):
            return True
    return False
