"""Relevance through declared operations: linear ones whose weights nobody sees, and those with a derivative only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.rules.linear import Back, MatrixLayer, Share, wide
from whyformer.tape.units import Unit
from whyformer.tape.walking import Parts, Step, Walk, repeat_unit

__all__ = ["ROUNDING", "hidden_layer_rule", "read_weights", "refuse_adjoint"]

ROUNDING = 1e-3
"""How far what is read off may be from the run's own values, as a share of the largest."""
_ROWS = 1024  # unit vectors at a time

_MULTIPLIERS = (
    'take one of the methods that carry multipliers, for which like="adjoint" holds (attnlrp, cp_lrp, lrp_ah_ln)'
)


@dataclass(frozen=True)
class HiddenLayer(MatrixLayer):
    """A layer whose weights were read off what it does.

    Attributes:
        bias: ``[O]``.
    """

    bias: Tensor | float = 0.0

    def z(self) -> Tensor:
        return self.y() - self.bias


def hidden_layer_rule(share: Share, otherwise: Back) -> Back:
    """The rule of an operation that is declared to be linear.

    Where it multiplies each row with the same weights it is a layer, and gets the rule of layers. Else it is a weighted
    sum, unless weights of the model are among what it was given: their rule cannot be kept then.

    Args:
        share: the rule of layers.
        otherwise: that of weighted sums.
    """

    def back(walk: Walk, step: Step, flows: dict[int, Tensor]) -> Parts:
        tape, unit, (flow,) = walk.tape, step.unit, flows.values()
        (entry,) = unit.entries
        x = tape[entry]
        found = read_weights(lambda rows: repeat_unit(tape, unit, {entry: rows})[0], x, tape[unit.exit])
        if found is None:
            if _has_weights(walk, unit):
                raise UnknownOperation(
                    f"'{unit.name}' is declared to be linear and multiplies with weights of the model that cannot be "
                    "read off what it does (it mixes rows, or rounds what enters it), and rules of relevance need "
                    f"these: {_MULTIPLIERS}, explain the model before it was quantised, or give it a rule of its own, "
                    "rule=whyformer.rules.core.Rule(...)"
                )
            return otherwise(walk, step, flows)
        weight, bias = (wide(t) for t in found)
        rows = [wide(t).reshape(-1, t.shape[-1]) for t in (x, flow)]
        return [(entry, share(HiddenLayer(tape, unit, rows[0], rows[1], weight.mT, None, bias)).reshape(x.shape))]

    return back


@torch.no_grad()
def read_weights(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return W ``[O, I]`` and b ``[O]`` of y = W x + b, from what unit vectors give; None if y is no such thing.

    Args:
        function: of ``[..., I]``, with as many axes as x and any number of rows.
        x, y: ``[..., I]`` and ``[..., O]``, what it was given and gave.
    """
    if x.dim() < 2 or x.shape[:-1] != y.shape[:-1] or x.is_complex() or y.is_complex():
        return None

    def of(rows: Tensor) -> Tensor:
        """What it makes of rows ``[M, I]``: ``[M, O]``."""
        return function(rows.reshape(*(1,) * (x.dim() - 2), *rows.shape)).reshape(-1, y.shape[-1])

    width, flat, wanted = x.shape[-1], x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    try:  # it may take no other number of rows
        bias = 2 * wanted[0] - of(2 * flat[:1])[0]
        bias = bias.masked_fill(bias.abs() <= 8 * torch.finfo(y.dtype).eps * wanted[0].abs().max(), 0)
        units = torch.eye(width, dtype=x.dtype, device=x.device).split(_ROWS)
        weight = torch.cat([of(some) - bias for some in units]).mT.contiguous()
        off = (flat @ weight.mT + bias - wanted).abs().max()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return (weight, bias) if bool(off <= ROUNDING * wanted.abs().max()) else None


def _has_weights(walk: Walk, unit: Unit) -> bool:
    """Return True if a matrix of weights is among what a declared operation reads."""
    tape, call = walk.tape, walk.tape.calls[unit.calls[0]]
    given = any(walk.program.weight[o] and len(tape.shapes[o]) > 1 for o in call.operands)
    return given or getattr(call.operator, "holds_weights", False)


def refuse_adjoint(walk: Walk, step: Step, flows: dict[int, Tensor]) -> Parts:
    """An operation of which only the derivative is known."""
    if not any(bool(flow.any()) for flow in flows.values()):
        return []  # no relevance arrives
    name = step.unit.name.split(".")[-1]
    raise UnknownOperation(
        f"relevance arrives at '{step.unit.name}', of which only the derivative is known: say what it is like, such as "
        f'whyformer.rules.register({name}, like="linear"); or {_MULTIPLIERS}; or explain the model before it was '
        "quantised"
    )

