"""Checks of a tape: values that were written outside of torch.

A dispatch mode sees only the calls of torch. Numpy, another thread, or a kernel that gets an address may write values
that no recorded call computed. Relevance would be lost there silently, so these checks find such values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.recording import RAW
from whyformer.tape.tables import KINDS
from whyformer.tape.values import Tape

__all__ = ["foreign_leaves", "reads_of_unset"]

_WRITES = frozenset(
    ("copy", "fill", "zero", "uniform", "normal", "bernoulli", "exponential", "random", "set", "resize")
)
_CLONES = frozenset(("clone", "contiguous", "_to_copy"))


def reads_of_unset(tape: Tape) -> list[Call]:
    """Return the calls that read memory that no recorded call wrote, such as a tensor from ``torch.empty`` that a
    kernel filled through its address."""
    raw, calls = set[int](), []
    for call in tape.calls:
        if call.name in RAW:
            raw.update(call.results)
        elif any(o in raw for o in call.operands) and not (_reads_no_numbers(call, raw) or _fills(call, tape, raw)):
            if KINDS.get(call.name) == "view" and call.name not in _CLONES and not call.writes:
                raw.update(call.results)
            else:
                calls.append(call)
    return calls


def _reads_no_numbers(call: Call, raw: set[int]) -> bool:
    """Return True if a call reads only the shape of unset memory, or writes it."""
    overwrites = bool(call.writes) and call.name in _WRITES and not any(o in raw for o in call.operands[1:])
    return overwrites or call.name == "overlay" or call.name.endswith("_like") or call.name.startswith("new_")


def _fills(call: Call, tape: Tape, raw: set[int]) -> bool:
    """Return True if a call overwrites all of the unset memory that it writes to, so that its result does not depend on
    the previous content."""
    if not call.writes or call.random or any(o in raw for o in call.operands[1:]):
        return False
    old, *others = (tape[o] for o in call.operands)
    first, second = (call([torch.full_like(old, value), *others])[0] for value in (0, 1))
    return _same(first, second)


def foreign_leaves(tape: Tape, other: Tape, weights: Iterable[int]) -> list[int]:
    """Return the leaves that differ in a pass on other inputs, so that they were computed from inputs by numpy, another
    thread or a foreign kernel.

    Args:
        tape: a recorded pass.
        other: a pass of the same model on changed inputs.
        weights: numbers of parameters and buffers, which need no comparison.
    """
    suspects = sorted(n for n in tape.leaves - tape.inputs - set(weights) if tape.floating(n))
    # compared by value, since the numbers differ if the other pass took another path
    others = [other[n] for n in other.leaves - other.inputs if other.floating(n)]
    return [n for n in suspects if not any(_same(tape[n], t) for t in others)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()))
