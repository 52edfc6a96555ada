"""Targets over one row of logits per sample: callables from ``[B, C]`` to ``[B]``.

Classes are indices, or lists of one index per sample; ``explain`` also accepts class names and, for a language model,
the text of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whyformer.errors import InputError


class RowTarget:
    """Base class of targets over one row of logits: frozen dataclasses called with ``[B, C]`` that return ``[B]``.

    Each field is one value for all samples or a list of one per sample. Every subclass needs a field ``index``, the
    class to explain; a target without a class is a plain function of the logits. Subclasses can also be passed as text,
    such as ``"Contrast(3, 4)"``.

    Attributes:
        classes: names of the fields that hold classes, which may be class names.

    Raises:
        TypeError: a subclass has no field ``index``.
    """

    classes: ClassVar[tuple[str, ...]] = ("index",)
    index: int | str | Sequence[int | str]

    def __init_subclass__(cls) -> None:
        if not any("index" in inspect.get_annotations(c) for c in cls.__mro__ if c is not RowTarget):
            raise TypeError(
                f"{cls.__name__} has no field 'index', the class to explain: add one, or use a function of the logits "
                "as the target"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the value ``[B]`` of each sample."""
        raise NotImplementedError

    def title(self, name: Callable[[int], str]) -> str:
        """Describe the target of a single sample.

        Args:
            name: function from a class index to its name.
        """
        return name(self.index)  # type: ignore[arg-type]


def _pick(values: Tensor, index: int | str | Sequence[int | str] | Tensor) -> Tensor:
    indices = torch.as_tensor(index, device=values.device).expand(values.shape[0])
    return values.gather(-1, indices[:, None])[:, 0]


@dataclass(frozen=True)
class Logit(RowTarget):
    """f_c: the logit of a class."""

    index: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index)


@dataclass(frozen=True)
class Probability(RowTarget):
    """softmax(f)_c, or sigmoid(f_c) of a multi-label model.

    Args:
        multi_label: True for the sigmoid, False for the softmax. None: the sigmoid if ``e.activation`` of the model is
            ``"sigmoid"``, else the softmax.

    Raises:
        InputError: ``multi_label`` is none of these.
    """

    index: int | str | Sequence[int | str]
    multi_label: bool | None = None

    def __post_init__(self) -> None:
        _check_multi_label(self)

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, -1), self.index)


@dataclass(frozen=True)
class LogProbability(RowTarget):
    """log softmax(f)_c, or log sigmoid(f_c) of a multi-label model.

    Args:
        multi_label: as for :class:`Probability`.
        among: take the softmax over this many likeliest classes and c only, as in top-k sampling of a language
            model's next token: why c *rather than* the other likely words. Or a list of one per sample. None: over
            all classes.

    Raises:
        InputError: ``among`` is not an integer of at least 2, or is combined with a sigmoid.
    """

    index: int | str | Sequence[int | str]
    multi_label: bool | None = None
    among: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_multi_label(self)
        counts = self.among if isinstance(self.among, list | tuple) else [2 if self.among is None else self.among]
        if not counts or any(isinstance(k, bool) or not isinstance(k, int) or k < 2 for k in counts):
            raise InputError(f"LogProbability: among must be a whole number of at least 2, not {self.among!r}")
        if self.multi_label and self.among is not None:
            raise InputError(
                "LogProbability: among is for a softmax, not for a model whose classes have a sigmoid each, nor with "
                "multi_label=True: omit it"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.among is not None:
            logits = _likeliest(logits, self.index, self.among)
        scores = torch.nn.functional.logsigmoid(logits) if self.multi_label else torch.log_softmax(logits, -1)
        return _pick(scores, self.index)

    def title(self, name: Callable[[int], str]) -> str:
        return super().title(name) + ("" if self.among is None else f" among the {self.among} likeliest")


def _check_multi_label(target: Probability | LogProbability) -> None:
    kind, value = type(target).__name__, target.multi_label
    if not isinstance(value, bool | None):
        raise InputError(f"{kind}: multi_label must be True, False or None, not {value!r}")


def _likeliest(logits: Tensor, index: int | str | Sequence[int | str], among: int | Sequence[int]) -> Tensor:
    """Set all logits to −∞ but those of the ``among`` likeliest classes and of class ``index``."""
    counts = torch.as_tensor(among, device=logits.device).expand(len(logits)).clamp(max=logits.shape[-1])
    least = logits.detach().sort(descending=True).values.gather(-1, counts[:, None] - 1)
    indices = torch.as_tensor(index, device=logits.device).expand(len(logits))
    keep = (logits.detach() >= least).scatter(-1, indices[:, None], True)
    return logits.masked_fill(~keep, float("-inf"))


@dataclass(frozen=True)
class Contrast(RowTarget):
    """f_a − f_b: why class a *rather than* class b."""

    classes = ("index", "other")
    index: int | str | Sequence[int | str]
    other: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index) - _pick(logits, self.other)

    def title(self, name: Callable[[int], str]) -> str:
        return f"{super().title(name)} rather than {name(self.other)}"  # type: ignore[arg-type]
