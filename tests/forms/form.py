"""A form: one way of writing a model, its inputs, and what it is compared with."""

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
    """One way of writing a function, in one model.

    Attributes:
        kind: of what ("softmax", "containers"); function: which one ("gelu tanh"); base: in which model.
            Forms equal in these three are a group: the first one of it is what the others are compared with.
        way: how it is written.
        build: the model in eval mode; inputs: what it takes.
        regroups: whether sums or products are taken in other groups, so that rules that share at sums or products may differ.
        target: as for ``explain``.
        single: whether each sample is explained alone, without its padding.
        rows_first: whether the model takes ``[N, B]``, so that scores may stand so too.
        compared: "scores", which are equal, or "signs", which are equal where scores are not near 0.
        same_output: whether the model's output is the first form's.
        undefined: methods by whose definition the forms of the group may differ.
        reference: whether it is as good to compare with as the first one.
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
