"""Plain forward passes of many perturbed inputs, in batches, counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whyformer.inputs.feed import place_of
from whyformer.models.kinds import last_row_alone
from whyformer.models.readout import plain_logits


@dataclass
class Forwards:
    """Runs the model on inputs, ``batch_size`` at a time; ``pad`` fills up shorter rows of ids, which are masked."""

    model: nn.Module
    batch_size: int = 64
    pad: int = 0

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype of the model."""
        parameter = next((p for p in self.model.parameters() if p.is_floating_point()), torch.zeros(()))
        return {"device": place_of(self.model), "dtype": parameter.dtype}

    def pixels(self, pictures: Iterable[Tensor]) -> NDArray[np.float64]:
        """``[n, C]`` logits of pictures ``[C, H, W]``, which may be made as they are needed."""
        iterator, found = iter(pictures), []
        while batch := list(islice(iterator, self.batch_size)):
            found.append(self._run(torch.stack(batch).to(**self.place)))
        return np.concatenate(found) if found else np.zeros((0, 0))

    def ids(self, rows: Sequence[Any]) -> NDArray[np.float64]:
        """``[n, C]`` logits of token rows of any lengths; rows of like length share a batch, of a language model that
        can compute its last row alone those of the same length."""
        order, device = sorted(range(len(rows)), key=lambda i: len(rows[i])), self.place["device"]
        found: list[NDArray[np.float64]] = []
        alone = last_row_alone(self.model)
        groups = [list(own) for _, own in groupby(order, key=lambda i: len(rows[i]))] if alone else [order]
        chunks = [own[i : i + self.batch_size] for own in groups for i in range(0, len(own), self.batch_size)]
        for chunk in chunks:
            ids, mask = padded([rows[i] for i in chunk], self.pad)
            more: dict[str, Any] = alone or {"attention_mask": mask.to(device)}
            found.append(self._run(input_ids=ids.to(device), **more))
        return np.concatenate(found)[np.argsort(order)] if found else np.zeros((0, 0))

    def _run(self, *args: Tensor, **kwargs: Any) -> NDArray[np.float64]:
        return plain_logits(self.model, args, kwargs).double().cpu().numpy()


def padded(rows: Sequence[Any], pad: int) -> tuple[Tensor, Tensor]:
    """(ids ``[B, N]``, attention mask) of rows of different lengths."""
    ids = nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=pad)
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths).long()


def activated(logits: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    """What is followed of logits: "softmax" over the last axis, the "sigmoid" of each, or "identity": the numbers."""
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if activation == "identity" or not logits.size:  # nothing was asked: no map of the batch could be used
        return logits
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
