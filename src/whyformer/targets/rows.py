"""Targets over one row of logits a sample: callables that turn ``[B, C]`` into ``[B]``.

Classes are indices, or one a sample; ``explain`` also takes their names, and the text of a language model's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def _pick(values: Tensor, index: int | str | Sequence[int | str] | Tensor) -> Tensor:
    chosen = torch.as_tensor(index, device=values.device).expand(values.shape[0])
    return values.gather(-1, chosen[:, None])[:, 0]


@dataclass(frozen=True)
class Logit:
    """f_c: the logit of a class, an int for all samples or a list of one a sample."""

    index: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index)


@dataclass(frozen=True)
class Probability:
    """softmax(f)_c, or sigmoid(f_c) with ``multi_label=True``."""

    index: int | str | Sequence[int | str]
    multi_label: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, -1), self.index)


@dataclass(frozen=True)
class LogProbability:
    """log softmax(f)_c, or log sigmoid(f_c) with ``multi_label=True``."""

    index: int | str | Sequence[int | str]
    multi_label: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        scores = torch.nn.functional.logsigmoid(logits) if self.multi_label else torch.log_softmax(logits, -1)
        return _pick(scores, self.index)


@dataclass(frozen=True)
class Contrast:
    """f_a − f_b: why class a *rather than* class b."""

    index: int | str | Sequence[int | str]
    other: int | str | Sequence[int | str]

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, self.index) - _pick(logits, self.other)
