"""Reduce the logits of many classes, such as a vocabulary, to the most likely and the explained classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MANY = 1000
"""Number of classes above which only some logits are stored."""
STORED = 20
"""Number of the most likely classes that are stored."""


def likeliest(logits: Tensor, also: Sequence[Tensor], count: int = STORED) -> dict[str, Tensor]:
    """Keep the ``count`` highest logits of more than :data:`MANY` classes, and those of the classes in ``also``.

    Args:
        logits: ``[B, C]`` logits of all classes.
        also: tensors ``[B]`` of class indices whose logits are always kept; −1 for none.
        count: number of the most likely classes, at most :data:`MANY`.

    Returns:
        The fields ``logits``, ``classes`` and ``normalizer`` of an explanation; the last two only if some logits are
        left out.
    """
    logits = logits.detach().cpu()
    if logits.shape[-1] <= MANY:
        return {"logits": logits}
    ranked, wide = logits.float().clone(), logits.double()
    for index in also:
        column = index.cpu()[:, None]
        ranked.scatter_(1, torch.where(column >= 0, column, wide.argmax(1, keepdim=True)), float("inf"))
    classes = ranked.topk(min(count + len(also), ranked.shape[-1])).indices
    values = logits.gather(1, classes)
    order = values.argsort(dim=1, descending=True, stable=True)
    return {
        "logits": values.gather(1, order), "classes": classes.gather(1, order), "normalizer": wide.logsumexp(1)
    }  # fmt: skip
