"""Targets over one row of logits a sample: callables that turn ``[B, C]`` into ``[B]``.

Classes are indices, or one a sample; ``explain`` also takes their names, and the text of a language model's tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.errors import InputError


class RowTarget:
    """A target over one row of logits: a frozen dataclass that is called with ``[B, C]`` and returns ``[B]``.

    Its fields are one value for all samples or a list of one a sample. ``index`` and ``other`` are classes, which may
    be named; ``index`` is the class that is explained, which every subclass needs: a target that names no class is a
    function of the logits. A subclass of :mod:`whyformer.targets` can also be written out, as ``"Contrast(3, 4)"``.

    Raises:
        TypeError: a subclass has no field ``index``.
    """

    index: int | str | Sequence[int | str]

    def __init_subclass__(cls) -> None:
        if not any("index" in inspect.get_annotations(c) for c in cls.__mro__ if c is not RowTarget):
            raise TypeError(
                f"{cls.__name__} has no field 'index', the class that is explained; a target that names no class is a "
                "function of the logits"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """``[B]`` the value of each sample."""
        raise NotImplementedError

    def title(self, name: Callable[[int], str]) -> str:
        """What is explained, in words.

        Args:
            name: what a class is called. Fields are those of one sample.
        """
        return name(self.index)  # type: ignore[arg-type]


def _pick(values: Tensor, index: int | str | Sequence[int | str] | Tensor) -> Tensor:
    chosen = torch.as_tensor(index, device=values.device).expand(values.shape[0])
    return values.gather(-1, chosen[:, None])[:, 0]


@dataclass(frozen=True)
class Logit(RowTarget):
    """f_c: the logit of a class, an int for all samples or a list of one a sample."""

    index: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index)


@dataclass(frozen=True)
class Probability(RowTarget):
    """softmax(f)_c, or sigmoid(f_c) with ``multi_label=True``."""

    index: int | str | Sequence[int | str]
    multi_label: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, -1), self.index)


@dataclass(frozen=True)
class LogProbability(RowTarget):
    """log softmax(f)_c, or log sigmoid(f_c) with ``multi_label=True``.

    Args:
        among: softmax over this many likeliest classes (and c) alone, as where a language model's next token is drawn
            from these: why c *rather than* the other words that might stand there. One a sample too; None: over all.

    Raises:
        InputError: ``among`` is no number from 2, or given with ``multi_label``.
    """

    index: int | str | Sequence[int | str]
    multi_label: bool = False
    among: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = self.among if isinstance(self.among, list | tuple) else [2 if self.among is None else self.among]
        if any(isinstance(k, bool) or not isinstance(k, int) or k < 2 for k in given):
            raise InputError(f"LogProbability: among is a whole number of classes from 2 on, not {self.among!r}")
        if self.multi_label and self.among is not None:
            raise InputError("LogProbability: of several labels each has a probability of its own: leave out among")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.among is not None:
            logits = _likeliest(logits, self.index, self.among)
        scores = torch.nn.functional.logsigmoid(logits) if self.multi_label else torch.log_softmax(logits, -1)
        return _pick(scores, self.index)

    def title(self, name: Callable[[int], str]) -> str:
        return super().title(name) + ("" if self.among is None else f" among the {self.among} likeliest")


def _likeliest(logits: Tensor, index: int | str | Sequence[int | str], among: int | Sequence[int]) -> Tensor:
    """Logits of the likeliest classes and of the one meant; −∞ elsewhere."""
    several = torch.as_tensor(among, device=logits.device).expand(len(logits)).clamp(max=logits.shape[-1])
    least = logits.detach().sort(descending=True).values.gather(-1, several[:, None] - 1)
    own = torch.as_tensor(index, device=logits.device).expand(len(logits))
    kept = (logits.detach() >= least).scatter(-1, own[:, None], True)
    return logits.masked_fill(~kept, float("-inf"))


@dataclass(frozen=True)
class Contrast(RowTarget):
    """f_a − f_b: why class a *rather than* class b."""

    index: int | str | Sequence[int | str]
    other: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index) - _pick(logits, self.other)

    def title(self, name: Callable[[int], str]) -> str:
        return f"{super().title(name)} rather than {name(self.other)}"  # type: ignore[arg-type]
