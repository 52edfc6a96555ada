"""Custom rules for operations of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Call", "Flows", "Rule"]

Flows = Sequence[Tensor | None]


@dataclass(frozen=True)
class Call:
    """A recorded operation, as a custom rule receives it.

    Attributes:
        operands: the operands that depend on an input of the model.
        output: the result.
        needs: for each operand, whether its relevance is needed.
        compute: function that computes the output from the operands.
        constant: for each operand, whether it depends on inputs only through values that the composite holds constant.
    """

    operands: tuple[Tensor, ...]
    output: Tensor
    needs: tuple[bool, ...]
    compute: Callable[..., Tensor]
    constant: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A custom rule: how an operation propagates relevance from its output to its operands.

    Attributes:
        name: name for errors and audits.
        relevance: ``relevance(call, R)``, with the relevance R of the output, returns the relevance of each operand,
            None for operands that get none. Used by composites that propagate relevance.
        gradient: the same for composites that propagate multipliers.
        constant: positions of the operands that are treated as constants.
        factor: factor of each propagated multiplier or relevance.
    """

    name: str
    relevance: Callable[[Call, Tensor], Flows] | None = None
    gradient: Callable[[Call, Tensor], Flows] | None = None
    constant: tuple[int, ...] = ()
    factor: float = 1.0
