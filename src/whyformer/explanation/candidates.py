"""Reduce the logits of many classes, such as a vocabulary, to the most likely and the explained classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MANY = 1000
"""Number of classes above which only some logits are stored."""
KEPT = 20
"""Number of the most likely classes that are stored."""


@dataclass(frozen=True)
class Candidates:
    """Logits of some classes of each sample.

    Attributes:
        logits: ``[B, K]`` in descending order; or ``[B, C]`` of all classes in order of their indices.
        classes: ``[B, K]`` class indices; None if ``logits`` holds all classes.
        normalizer: ``[B]`` log Σ exp over the logits of all classes, so that logits − normalizer are log-probabilities;
            None if ``logits`` holds all classes.
    """

    logits: Tensor
    classes: Tensor | None = None
    normalizer: Tensor | None = None


def likeliest(logits: Tensor, also: Sequence[Tensor]) -> Candidates:
    """Keep the :data:`KEPT` highest logits of more than :data:`MANY` classes, and those of the classes in ``also``.

    Args:
        logits: ``[B, C]`` logits of all classes.
        also: tensors ``[B]`` of class indices whose logits are always kept; −1 for none.
    """
    logits = logits.detach().cpu()
    if logits.shape[-1] <= MANY:
        return Candidates(logits)
    ranked, wide = logits.float().clone(), logits.double()
    for index in also:
        column = index.cpu()[:, None]
        ranked.scatter_(1, torch.where(column >= 0, column, wide.argmax(1, keepdim=True)), float("inf"))
    classes = ranked.topk(KEPT + len(also)).indices
    values = logits.gather(1, classes)
    order = values.argsort(dim=1, descending=True, stable=True)
    return Candidates(values.gather(1, order), classes.gather(1, order), wide.logsumexp(1))
