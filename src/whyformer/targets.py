"""Targets: callables that turn logits ``[B, C]`` into one scalar a sample, ``[B]``; and what a user calls them.

A target says *what* is explained. Its gradient with respect to the logits is also what relevance starts from
(a one-hot vector for :class:`Logit`), so any differentiable callable of that shape may be used. Everywhere a class is
asked for, :func:`class_index` says which one is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError

Target = None | int | str | Sequence[int | str] | Callable[[Tensor], Tensor]


def _pick(values: Tensor, index: int | list[int] | Tensor) -> Tensor:
    chosen = torch.as_tensor(index, device=values.device).expand(values.shape[0])
    return values.gather(-1, chosen[:, None])[:, 0]


@dataclass(frozen=True)
class Logit:
    """f_c: the logit of a class, an int for all samples or a list of one a sample."""

    index: int | list[int]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index)


@dataclass(frozen=True)
class Probability:
    """softmax(f)_c, or sigmoid(f_c) with ``multi_label=True``."""

    index: int | list[int]
    multi_label: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, -1), self.index)


@dataclass(frozen=True)
class LogProbability:
    """log softmax(f)_c, or log sigmoid(f_c) with ``multi_label=True``."""

    index: int | list[int]
    multi_label: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        scores = torch.nn.functional.logsigmoid(logits) if self.multi_label else torch.log_softmax(logits, -1)
        return _pick(scores, self.index)


@dataclass(frozen=True)
class Contrast:
    """f_a − f_b: why class a *rather than* class b."""

    index: int | list[int]
    other: int | list[int]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index) - _pick(logits, self.other)


# -- what a user calls a target ------------------------------------------------------------------------------------
def class_index(wanted: Any, labels: Mapping[int, str] | None, classes: int | None = None) -> int:
    """The index of the class that a user means; one rule for every entrance.

    An int is an index. Text is an index if it is a number (``"3"``), else a name, in any case, or one of the
    comma-separated names of a class. ``"#3"`` is an index whatever the classes are called, and a name in quotes
    (``'"3"'``) is a name whatever it looks like.

    Args:
        labels: class index -> name; None where the model names none.
        classes: number of classes; None if unknown.

    Raises:
        InputError: no such class, several of that name, or a number that also names another class.
    """
    if not isinstance(wanted, str):
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise InputError(f"a class is an index or a name, not {wanted!r}")
        return _in_range(wanted, classes)
    text = wanted.strip()
    if text[:1] == "#" and _is_number(text[1:]):
        return _in_range(int(text[1:]), classes)
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    named = _named(text[1:-1] if quoted else text, labels or {})
    if _is_number(text):
        index = int(text)
        if any(other != index for other in named):
            listed = ", ".join(f"{i} ({(labels or {})[i]})" for i in named)
            raise InputError(
                f"'{text}' may be the number of a class or the name of another, of {listed}: "
                f"write #{index} for the number, or '\"{text}\"' with the inner quotes for the name"
            )
        return _in_range(index, classes)
    if len(named) == 1:
        return named[0]
    if named:
        listed = ", ".join(f"{i} ({(labels or {})[i]})" for i in named)
        raise InputError(f"'{wanted}' names several classes: {listed}; give the number")
    raise _unknown_class(text[1:-1] if quoted else text, labels or {})


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _named(name: str, labels: Mapping[int, str]) -> list[int]:
    """The classes of that name; if there is none, those with it among their comma-separated names."""
    wanted = name.strip().casefold()
    exact = [i for i, label in labels.items() if label.casefold() == wanted]
    return exact or [i for i, label in labels.items() if wanted in [p.strip().casefold() for p in label.split(",")]]


def _in_range(index: int, classes: int | None) -> int:
    if index < 0 or (classes is not None and index >= classes):
        known = f"the model has {classes} classes, 0 to {classes - 1}" if classes else "classes count from 0"
        raise InputError(f"class {index} is out of range: {known}")
    return index


def _unknown_class(name: str, labels: Mapping[int, str]) -> InputError:
    pool = dict.fromkeys(part.strip() for label in labels.values() for part in label.split(","))
    inside = [part for part in pool if name.casefold() in part.casefold()][:3]
    close = dict.fromkeys(difflib.get_close_matches(name.casefold(), pool, 3) + inside)
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    return InputError(
        f"the model has no class '{name}'.{hint}" + ("" if labels else " Its config names no classes: give a number.")
    )


class Resolver:
    """From what the user calls the target to a callable and to readable names; checked as early as possible.

    Args:
        target: as for :func:`whyformer.explain`: None (each sample's predicted class), a class or one a sample (see
            :func:`class_index`), or a callable.
        labels, classes: names and number of the model's classes, where known.
        batch: number of samples.
    """

    def __init__(self, target: Any, labels: dict[int, str] | None, classes: int | None, batch: int) -> None:
        if isinstance(target, Tensor):
            target = target.tolist()
        if isinstance(target, int | str):
            target = class_index(target, labels, classes)
        elif isinstance(target, Sequence):
            target = [class_index(t, labels, classes) for t in target]
            if len(target) != batch:
                raise InputError(f"{len(target)} targets for {batch} samples: give one for all, or one a sample")
        elif target is not None and not callable(target):
            raise InputError(f"a target is a class index or name, a list of these or a function, not {target!r}")
        self.target, self.labels = target, labels
        self._check_named(classes)

    def _check_named(self, classes: int | None) -> None:
        """The classes that a target of this file names."""
        if isinstance(self.target, Logit | Probability | LogProbability | Contrast):
            for named in (self.target.index, getattr(self.target, "other", 0)):
                for index in torch.as_tensor(named).flatten().tolist():
                    _in_range(index, classes)

    def callable(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """The target for samples with these logits."""
        if callable(self.target):
            self._check_named(logits.shape[-1])
            return self.target
        indices = self.indices(logits)
        _in_range(int(indices.max()), logits.shape[-1])
        return Logit(indices.tolist())

    def indices(self, logits: Tensor) -> Tensor:
        """``[B]`` class indices, −1 where a callable names none."""
        index = getattr(self.target, "index", -1) if callable(self.target) else self.target
        return logits.argmax(-1) if index is None else torch.as_tensor(index, device=logits.device).expand(len(logits))

    def describe(self, logits: Tensor) -> tuple[Tensor, list[str]]:
        """(class indices as :meth:`indices` has them, on the CPU; readable names)."""
        index = self.indices(logits).cpu().clone()
        names = [self._name(i) if i >= 0 else "custom target" for i in index.tolist()]
        other = getattr(self.target, "other", None)
        if callable(self.target) and other is not None:
            rivals = torch.as_tensor(other).expand(len(names)).tolist()
            names = [f"{n} rather than {self._name(o)}" for n, o in zip(names, rivals, strict=True)]
        return index, names

    def _name(self, index: int) -> str:
        return (self.labels or {}).get(index, str(index))
