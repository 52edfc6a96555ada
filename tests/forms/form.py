"""A form: one implementation of a model, its inputs, and how it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Inputs = Tensor | dict[str, Tensor]
Group = tuple[str, str, str]

SCORES, SIGNS = "scores", "signs"


@dataclass(frozen=True, eq=False)
class Form:
    """One implementation of a function in one model.

    Attributes:
        kind: kind of the function ("softmax", "containers"); function: its name ("gelu tanh"); base: the model.
            Forms equal in these three are a group, whose first form is the reference of the others.
        way: name of the implementation.
        build: builder of the model in eval mode; inputs: builder of its inputs.
        regroups: whether sums or products are grouped differently, so that rules at sums or products may differ.
        target: the target of ``explain``.
        single: whether each sample is explained alone, without its padding.
        rows_first: whether the model takes ``[N, B]``, so that scores may be transposed.
        compared: "scores", which are equal, or "signs", which are equal where scores are not near 0.
        same_output: whether the output equals that of the first form.
        undefined: methods whose definition allows the forms of the group to differ.
        reference: whether the form is a further reference of its group.
    """

    kind: str
    function: str
    way: str
    base: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    regroups: bool = False
    target: Any = 1
    single: bool = False
    rows_first: bool = False
    compared: str = SCORES
    same_output: bool = True
    reference: bool = False
    undefined: tuple[str, ...] = ()

    @property
    def group(self) -> Group:
        return self.kind, self.function, self.base

    @property
    def id(self) -> str:
        return " / ".join(dict.fromkeys((self.kind, self.function, self.base, self.way)))
