"""Relevance through custom operations registered as "linear", whose weights are unknown, or as "adjoint"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.rules.linear import Back, LayerRule, MatrixLayer, wide
from whyformer.tape.units import Unit
from whyformer.tape.walking import Flows, Parts, Step, Walk, repeat_unit

__all__ = ["ROUNDING", "opaque_layer_rule", "read_weights", "refuse_adjoint"]

ROUNDING = 1e-3
"""Largest accepted deviation from the values of the pass, relative to the largest of these values."""
_ROWS = 1024  # number of unit vectors at a time

_MULTIPLIERS = (
    'use a method that propagates multipliers, for which like="adjoint" suffices (attnlrp, cp_lrp, lrp_ah_ln)'
)


@dataclass(frozen=True)
class OpaqueLayer(MatrixLayer):
    """A layer whose weights were determined from its outputs.

    Attributes:
        bias: ``[O]``.
    """

    bias: Tensor | float = 0.0

    def z(self) -> Tensor:
        return self.y() - self.bias


def opaque_layer_rule(rule: LayerRule, otherwise: Back) -> Back:
    """Return the rule for custom operations registered as "linear".

    If the operation multiplies each row with the same weights, it is a layer and gets the rule of layers. Otherwise, it
    gets the rule of weighted sums, or is refused if it uses weights of the model, which the rule of layers needs.

    Args:
        rule: the rule of linear layers.
        otherwise: the rule of weighted sums.
    """

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        tape, unit, (flow,) = walk.tape, step.unit, flows.values()
        (entry,) = unit.entries
        x = tape[entry]
        layer = read_weights(lambda rows: repeat_unit(tape, unit, {entry: rows})[0], x, tape[unit.exit])
        if layer is None:
            if _has_weights(walk, unit):
                raise UnknownOperation(
                    f"'{unit.name}' is registered as linear, but its weights, which rules for relevance need, cannot "
                    "be determined from its outputs (it mixes rows, or rounds its inputs): "
                    f"{_MULTIPLIERS}, explain the model before quantisation, or register a rule, "
                    "rule=whyformer.rules.Rule(...)"
                )
            return otherwise(walk, step, flows)
        weight, bias = (wide(t) for t in layer)
        rows = [wide(t).reshape(-1, t.shape[-1]) for t in (x, flow)]
        return [(entry, rule(OpaqueLayer(tape, unit, rows[0], rows[1], weight.mT, None, bias)).reshape(x.shape))]

    return back


@torch.no_grad()
def read_weights(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Determine W ``[O, I]`` and b ``[O]`` of y = W x + b from the outputs for unit vectors; return None if the
    operation is not of this form.

    Args:
        function: takes ``[..., I]`` with as many axes as ``x`` and any number of rows, returns ``[..., O]``.
        x, y: ``[..., I]`` and ``[..., O]``, recorded input and output.
    """
    if x.dim() < 2 or x.shape[:-1] != y.shape[:-1] or x.is_complex() or y.is_complex():
        return None

    def outputs(rows: Tensor) -> Tensor:
        """Return the outputs ``[M, O]`` for rows ``[M, I]``."""
        return function(rows.reshape(*(1,) * (x.dim() - 2), *rows.shape)).reshape(-1, y.shape[-1])

    width, flat, recorded = x.shape[-1], x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    try:  # the operation may fail for other numbers of rows
        bias = 2 * recorded[0] - outputs(2 * flat[:1])[0]
        bias = bias.masked_fill(bias.abs() <= 8 * torch.finfo(y.dtype).eps * recorded[0].abs().max(), 0)
        units = torch.eye(width, dtype=x.dtype, device=x.device).split(_ROWS)
        weight = torch.cat([outputs(rows) - bias for rows in units]).mT.contiguous()
        error = (flat @ weight.mT + bias - recorded).abs().max()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return (weight, bias) if bool(error <= ROUNDING * recorded.abs().max()) else None


def _has_weights(walk: Walk, unit: Unit) -> bool:
    """Return True if a custom operation reads a matrix of weights."""
    tape, call = walk.tape, walk.tape.calls[unit.calls[0]]
    has_operand = any(walk.program.weight[o] and len(tape.shapes[o]) > 1 for o in call.operands)
    return has_operand or call.holds_weights


def refuse_adjoint(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Refuse an operation of which only the derivative is known, if relevance arrives."""
    if not any(bool(flow.any()) for flow in flows.values()):
        return []
    name = step.unit.name.split(".")[-1]
    raise UnknownOperation(
        f"relevance arrives at '{step.unit.name}', of which only the derivative is known: register a similar operation,"
        f' such as whyformer.rules.register({name}, like="linear"); or {_MULTIPLIERS}; or explain the model before '
        "quantisation"
    )

