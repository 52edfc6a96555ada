"""Attentions of a program: the calls by which weights of rows mix the values of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from whyformer.program.operations import kind_of, plain_name
from whyformer.program.record import Call, Program
from whyformer.program.regions import Region

_WHOLE = ("multi_head_attention_forward", "_native_multi_head_attention", "flex_attention")
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm", "rmatmul")
_STEPS = 8
"""Calls between a softmax and the product with values, at most."""


@dataclass(frozen=True)
class Mixing:
    """An attention.

    Attributes:
        call: that mixes.
        weights: the position of the map among its tensor operands; −1 of a fused one.
        square: whether its map is of rows by the same rows, more than one.
        direct: whether the map is what one call of softmax gave along its last axis, in this shape or only rearranged.
    """

    call: Call
    weights: int = -1
    square: bool = False
    direct: bool = True


def attentions(program: Program, regions: Iterable[Region]) -> list[Mixing]:
    """In order: fused ones, and products of other values with what a softmax gave, or with what was made of that
    element by element or head by head (talking heads, a scale, a difference of two)."""
    readers, found = program.readers(), {}
    for call in program.calls:
        if kind_of(call.name) == "attention" or plain_name(call.name) in _WHOLE:
            found[call.number] = Mixing(call)
    ends = {c.results[0]: c for c in program.calls if kind_of(c.name) == "softmax"}
    maps = [(v, _along_the_last(program, c)) for v, c in ends.items() if program.values[v].carries]
    maps += [(r.exit, False) for r in regions if r.kind == "softmax" and r.exit not in ends]
    for value, plain in maps:
        ahead, seen = [(value, plain, 0)], {value}
        while ahead:
            now, direct, steps = ahead.pop()
            for call in readers.get(now, ()):
                place = call.operands.index(now)
                carrying = {o for o in call.operands if program.values[o].carries}
                if plain_name(call.name) in _PRODUCTS and len(carrying) > 1:
                    known = found.get(call.number)
                    if known is None or (direct and not known.direct):
                        queries, keys = ([1, 1, *program.values[now].shape])[-2:]
                        found[call.number] = Mixing(call, place, queries == keys > 1, direct and place == 0)
                elif steps < _STEPS and _same_sizes(program, call, now):
                    new = [r for r in call.results if r not in seen and program.values[r].carries]
                    seen.update(new)
                    still = direct and kind_of(call.name) == "view" and len(program.values[now].shape) in (3, 4)
                    ahead += [(r, still, steps + 1) for r in new]
    return [found[n] for n in sorted(found) if any(program.values[r].carries for r in found[n].call.results)]


def _along_the_last(program: Program, call: Call) -> bool:
    """Whether the rows of what a softmax gave sum to 1 along its last axis."""
    value = program.values[call.results[0]]
    rows = value.rows.get(len(value.shape) - 1)
    if rows is None or len(value.shape) not in (3, 4):
        return False
    total = rows.double().sum(-1)
    return bool((((total - 1).abs() < 1e-2) | (total.abs() < 1e-6)).all())


def _same_sizes(program: Program, call: Call, value: int) -> bool:
    """Whether what it makes of a map has as many queries, keys and heads."""
    shape = program.values[value].shape
    made = program.values[call.results[0]].shape if call.results else ()
    return torch.Size(made).numel() == torch.Size(shape).numel() or sorted(made) == sorted(shape)
