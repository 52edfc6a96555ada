"""A rule of a user's own for an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Call", "Grads", "Rule"]

Grads = Sequence[Tensor | None]


@dataclass(frozen=True)
class Call:
    """One recorded operation.

    Attributes:
        operands: its tensors.
        output: what it made of them.
        needs: which operands lie on the way back.
        compute: operands -> the output.
        constant: which operands depend on no input.
    """

    operands: tuple[Tensor, ...]
    output: Tensor
    needs: tuple[bool, ...]
    compute: Callable[..., Tensor]
    constant: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Rule:
    """How an operation hands on what flows back to it.

    Attributes:
        name: what errors call it.
        relevance: (call, R of the output) -> R of each operand, None for those that get none.
        gradient: the same where multipliers flow.
        hold: operands that are constant where multipliers flow, by position.
        share: factor of each multiplier that is handed on.
    """

    name: str
    relevance: Callable[[Call, Tensor], Grads] | None = None
    gradient: Callable[[Call, Tensor], Grads] | None = None
    hold: tuple[int, ...] = ()
    share: float = 1.0
