"""Plain forward passes of many perturbed inputs, in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whyformer.inputs import Inputs
from whyformer.inputs.feed import device_of, dtype_of
from whyformer.methods.padding import depends_on_padding
from whyformer.models.kinds import last_row_only
from whyformer.models.readout import plain_logits


@dataclass
class Forwards:
    """Runs a model on many inputs in batches.

    Attributes:
        model: the model.
        batch_size: inputs in one forward pass.
        pad: id of the padding token, which is masked.
    """

    model: nn.Module
    batch_size: int = 64
    pad: int = 0

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype of the model."""
        return {"device": device_of(self.model), "dtype": dtype_of(self.model)}

    def pixels(self, pictures: Iterable[Tensor]) -> NDArray[np.float64]:
        """Return the logits ``[n, C]`` of pictures ``[C, H, W]``, which may come from a generator."""
        iterator, results = iter(pictures), []
        while batch := list(islice(iterator, self.batch_size)):
            results.append(self._run(torch.stack(batch).to(**self.place)))
        return np.concatenate(results) if results else np.zeros((0, 0))

    def ids(self, rows: Sequence[Any]) -> NDArray[np.float64]:
        """Return the logits ``[n, C]`` of token rows of any lengths.

        Rows of similar length share a batch. If a language model can compute the logits of its last position alone, or
        padding changes the logits, only rows of equal length do.
        """
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        last_only = last_row_only(self.model)
        alike = last_only or self.reads_padding(rows)
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(rows[i]))] if alike else [order]
        chunks = [group[i : i + self.batch_size] for group in groups for i in range(0, len(group), self.batch_size)]
        results = [self._run_ids([rows[i] for i in chunk], last_only) for chunk in chunks]
        return np.concatenate(results)[np.argsort(order)] if results else np.zeros((0, 0))

    def reads_padding(self, rows: Sequence[Any]) -> bool:
        """Return whether padding token rows to one length changes the model's output by more than rounding."""
        ordered = sorted(rows, key=len)
        shorter = [row for row in ordered if len(row) < len(ordered[-1])]
        if not shorter:
            return False
        measured = [shorter[0], shorter[-1], ordered[-1]]
        alone = lambda i: self._inputs([measured[i]])  # noqa: E731
        return depends_on_padding(self.model, self._inputs(measured), lambda: [0, 1], alone, pads_left=False)

    def _inputs(self, rows: Sequence[Any]) -> Inputs:
        ids, mask = (tensor.to(self.place["device"]) for tensor in padded(rows, self.pad))
        return Inputs((), {"input_ids": ids, "attention_mask": mask}, "text", "input_ids")

    def _run_ids(self, rows: Sequence[Any], last_only: Mapping[str, Any] | None = None) -> NDArray[np.float64]:
        kwargs = self._inputs(rows).kwargs
        return self._run(**({"input_ids": kwargs["input_ids"], **last_only} if last_only else kwargs))

    def _run(self, *args: Tensor, **kwargs: Any) -> NDArray[np.float64]:
        return plain_logits(self.model, args, kwargs).double().cpu().numpy()


def padded(rows: Sequence[Any], pad: int) -> tuple[Tensor, Tensor]:
    """Return (ids, attention mask) ``[B, N]`` of rows of different lengths."""
    ids = nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=pad)
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths).long()


def activated(logits: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    """Apply "softmax" (over the last axis), "sigmoid" or "identity" to logits."""
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if activation == "identity" or not logits.size:  # empty if no map of the batch could be used
        return logits
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
