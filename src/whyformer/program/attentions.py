"""Attentions of a program: the calls by which weights of rows mix the values of rows."""

from __future__ import annotations

from collections.abc import Iterable

from whyformer.program.operations import kind_of, plain_name
from whyformer.program.record import Call, Program
from whyformer.program.regions import Region

_WHOLE = ("multi_head_attention_forward", "_native_multi_head_attention", "flex_attention")
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm", "tensordot")
_STEPS = 6
"""Calls between a softmax and the product with values, at most."""


def attentions(program: Program, regions: Iterable[Region]) -> list[Call]:
    """The calls that mix, in order: fused ones, and products of what a softmax gave with other values."""
    readers = program.readers()
    maps = {r.exit for r in regions if r.kind == "softmax"}
    softmaxes = [c for c in program.calls if kind_of(c.name) == "softmax"]
    maps |= {c.results[0] for c in softmaxes if program.values[c.results[0]].carries}
    found = {c.number: c for c in program.calls if kind_of(c.name) == "attention" or plain_name(c.name) in _WHOLE}
    for value in maps:
        ahead, seen = [(value, 0)], {value}
        while ahead:
            now, steps = ahead.pop()
            for call in readers.get(now, ()):
                if _mixes(program, call):
                    found[call.number] = call
                elif steps < _STEPS:
                    new = [r for r in call.results if r not in seen and program.values[r].carries]
                    seen.update(new)
                    ahead += [(r, steps + 1) for r in new]
    return [found[n] for n in sorted(found) if any(program.values[r].carries for r in found[n].results)]


def _mixes(program: Program, call: Call) -> bool:
    carrying = {o for o in call.operands if program.values[o].carries}
    return plain_name(call.name) in _PRODUCTS and len(carrying) > 1
