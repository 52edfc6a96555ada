"""Plain forward passes of many perturbed inputs, in batches, counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whyformer.models.readout import plain_logits


@dataclass
class Forwards:
    """Runs the model on inputs one after another, ``batch_size`` at a time.

    Attributes:
        count: samples that went through the model so far.
        pad: id that fills up shorter rows of a batch; they are masked out.
    """

    model: nn.Module
    batch_size: int = 64
    pad: int = 0
    count: int = field(default=0, init=False)

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype of the model."""
        parameter = next((p for p in self.model.parameters() if p.is_floating_point()), torch.zeros(()))
        return {"device": parameter.device, "dtype": parameter.dtype}

    def pixels(self, pictures: Iterable[Tensor]) -> NDArray[np.float64]:
        """``[n, C]`` logits of pictures ``[C, H, W]``, which may be made as they are needed."""
        found = [self._run(torch.stack(batch).to(**self.place)) for batch in _batches(pictures, self.batch_size)]
        return np.concatenate(found) if found else np.zeros((0, 0))

    def ids(self, rows: Sequence[Any]) -> NDArray[np.float64]:
        """``[n, C]`` logits of token rows of any lengths; rows of like length share a batch."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found: list[NDArray[np.float64]] = []
        for batch in _batches(order, self.batch_size):
            ids, mask = padded([rows[i] for i in batch], self.pad)
            device = self.place["device"]
            found.append(self._run(input_ids=ids.to(device), attention_mask=mask.to(device)))
        if not found:
            return np.zeros((0, 0))
        result = np.empty((len(rows), found[0].shape[1]))
        result[order] = np.concatenate(found)
        return result

    def _run(self, *args: Tensor, **kwargs: Tensor) -> NDArray[np.float64]:
        self.count += len(args[0]) if args else len(kwargs["input_ids"])
        return plain_logits(self.model, args, kwargs).double().cpu().numpy()


def padded(rows: Sequence[Any], pad: int) -> tuple[Tensor, Tensor]:
    """(ids ``[B, N]``, attention mask) of rows of different lengths."""
    width = max(len(r) for r in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, keep, row in zip(ids, mask, rows, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=torch.long)
        keep[: len(row)] = 1
    return ids, mask


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def probabilities(logits: NDArray[np.float64], multi_label: bool = False) -> NDArray[np.float64]:
    """Softmax over the last axis; the sigmoid of each logit for ``multi_label`` models and of a single logit."""
    if multi_label or logits.shape[-1] == 1:
        return 1 / (1 + np.exp(-logits))
    if not logits.size:  # nothing was asked: no map of the batch could be used
        return logits
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
