"""What is kept of the logits of many classes, such as a vocabulary: the likeliest ones and those that are explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MANY = 1000
"""Of more classes than these the likeliest are kept."""
KEPT = 20
"""How many of them."""


@dataclass(frozen=True)
class Candidates:
    """Logits of some classes of each sample.

    Attributes:
        logits: ``[B, K]``, the highest first; or of all classes, ``[B, C]``, in order.
        classes: ``[B, K]`` the numbers of the classes; None where these are all.
        normalizer: ``[B]`` log Σ exp of the logits of all classes, so that logits − normalizer are log-probabilities;
            None where these are all.
    """

    logits: Tensor
    classes: Tensor | None = None
    normalizer: Tensor | None = None


def likeliest(logits: Tensor, also: Sequence[Tensor]) -> Candidates:
    """Keep the :data:`KEPT` highest logits of more than :data:`MANY` classes, and those of the classes in ``also``.

    Args:
        logits: ``[B, C]``.
        also: ``[B]`` a class of each sample whose logit is kept in any case; −1 for none.
    """
    logits = logits.detach().cpu()
    if logits.shape[-1] <= MANY:
        return Candidates(logits)
    ranked, wide = logits.float().clone(), logits.double()
    for index in also:
        places = index.cpu()[:, None]
        ranked.scatter_(1, torch.where(places >= 0, places, wide.argmax(1, keepdim=True)), float("inf"))
    classes = ranked.topk(KEPT + len(also)).indices
    values = logits.gather(1, classes)
    order = values.argsort(dim=1, descending=True, stable=True)
    return Candidates(values.gather(1, order), classes.gather(1, order), wide.logsumexp(1))
