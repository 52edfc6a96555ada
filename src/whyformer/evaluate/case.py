"""One batch of maps to be scored: what the model is fed, what the scores lie on, and how to take features away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from whyformer.benchmarks.substrates import substrate
from whyformer.errors import InputError
from whyformer.evaluate.forwards import probabilities
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs import Inputs
from whyformer.models.readout import plain_logits
from whyformer.models.structure import class_names


@dataclass
class Case:
    """A model, its input and one map a sample.

    Attributes:
        scores: pictures ``[B, H, W]`` at the input's size, text ``[B, N]``.
        target: ``[B]`` class whose probability is followed.
        content: text, ``[B, N]`` True at tokens that are neither special nor padding.
        mean, std: of the image processor's normalisation, None if unknown.
        explanation: where the scores came from, if from this library.
    """

    model: nn.Module
    inputs: Inputs
    scores: NDArray[np.float64]
    target: NDArray[np.int64]
    logits: NDArray[np.float64]
    content: NDArray[np.bool_] | None
    mean: Tensor | None
    std: Tensor | None
    batch_size: int
    processor: Any = None
    explanation: Explanation | None = None
    grid: tuple[int, int] | None = None
    forwards: int = field(default=0)

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    @property
    def image(self) -> bool:
        return self.inputs.modality == "image"

    @cached_property
    def clean(self) -> NDArray[np.float64]:
        """``[B]`` probability of the target."""
        return self.probabilities(self.logits)[np.arange(len(self)), self.target]

    def probabilities(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Softmax, or the sigmoid of each where the model's classes do not exclude one another."""
        return probabilities(logits, class_names(self.model)[1])

    def features(self, sample: int) -> NDArray[np.float64]:
        """``[n]`` scores of what can be removed: all pixels, or the content tokens."""
        flat = self.scores[sample].reshape(-1)
        return flat if self.content is None else flat[self.content[sample]]

    def constant(self, sample: int) -> bool:
        """Whether all features have one score, so that they have no order."""
        scores = self.features(sample)
        return scores.size > 1 and float(scores.max()) == float(scores.min())

    def run(
        self, sample: int, removed: Sequence[NDArray[np.bool_]], how: str, *, reveal: bool = False
    ) -> NDArray[np.float64]:
        """``[F, C]`` logits of one sample with some features (True) replaced.

        Args:
            removed: flat masks over :meth:`features`; how: substrate of pictures, or for text "unk", "mask", "pad" or
                "delete"; reveal: replace the others instead.
        """
        masks = [~m if reveal else m for m in removed]
        return self._pixels(sample, masks, how) if self.image else self._tokens(sample, masks, how)

    def _pixels(self, sample: int, masks: Sequence[NDArray[np.bool_]], how: str) -> NDArray[np.float64]:
        pixels = self.inputs.tensor[sample : sample + 1]
        if how == "black" and self.mean is None:
            raise InputError(
                "what black is in the model's space is unknown: pass processor=, or substrate='mean' or 'blur'"
            )
        unknown = torch.zeros(pixels.shape[1])
        ground = substrate(
            how, pixels, unknown if self.mean is None else self.mean, unknown + 1 if self.std is None else self.std
        )
        shape = pixels.shape[-2:]
        found = []
        for start in range(0, len(masks), self.batch_size):
            gone = (
                torch.from_numpy(np.stack(masks[start : start + self.batch_size]))
                .reshape(-1, 1, *shape)
                .to(pixels.device)
            )
            found.append(self._logits(sample, torch.where(gone, ground, pixels)))
        return np.concatenate(found)

    def _tokens(self, sample: int, masks: Sequence[NDArray[np.bool_]], how: str) -> NDArray[np.float64]:
        assert self.content is not None
        ids = self.inputs.tensor[sample]
        content = self.content[sample]
        fills = dict(self.inputs.fill_ids)
        if how != "delete" and how not in fills:
            raise InputError(
                f"there is no {how} token to put in place of others: pass processor=tokenizer, or replace='delete'"
            )
        found = []
        for start in range(0, len(masks), self.batch_size):
            rows = []
            for mask in masks[start : start + self.batch_size]:
                at = np.zeros(len(ids), dtype=bool)
                at[content] = mask
                rows.append((ids, torch.from_numpy(at)))
            if how == "delete":
                found += [self._deleted(sample, row, at) for row, at in rows]
            else:
                filled = torch.stack([row.masked_fill(at.to(row.device), fills[how]) for row, at in rows])
                found.append(self._logits(sample, filled))
        return np.concatenate(found)

    def _deleted(self, sample: int, ids: Tensor, gone: Tensor) -> NDArray[np.float64]:
        kept = ~gone.to(ids.device)
        width = len(ids)

        def cut(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (self.inputs.batch, width)
            return value[sample : sample + 1, kept] if whole else value

        args = tuple(cut(a) for a in self.inputs.args)
        return self._read(args, {k: cut(v) for k, v in self.inputs.kwargs.items()})

    def _logits(self, sample: int, tensor: Tensor) -> NDArray[np.float64]:
        one = self.inputs.select(slice(sample, sample + 1))
        args, kwargs = one.with_tensor(tensor).feed
        return self._read(args, kwargs)

    def _read(self, args: Any, kwargs: Any) -> NDArray[np.float64]:
        logits = plain_logits(self.model, args, kwargs).double().cpu().numpy()
        self.forwards += len(logits)
        return logits


def read_case(
    model: nn.Module,
    inputs: Inputs,
    explanation: Explanation | ArrayLike | Tensor,
    processor: Any,
    target: Any,
    batch_size: int,
) -> Case:
    """Check that the scores fit the input, and bring them to its features.

    Scores of a picture may be ``[B, H, W]`` of any size, ``[B, C, H, W]`` (summed over channels) or ``[B, P]``
    patches of a square grid; those of a text ``[B, N]``. A missing batch axis is added for a single sample.
    """
    args, kwargs = inputs.feed
    logits = plain_logits(model, args, kwargs).double().cpu().numpy()
    ours = explanation if isinstance(explanation, Explanation) else None
    raw: Any = explanation
    if ours is not None:
        raw = ours.heatmap(inputs.image_size) if inputs.modality == "image" else ours.scores
    grid = ours.grid if ours else None
    scores = torch.as_tensor(np.asarray(raw.detach().cpu() if isinstance(raw, Tensor) else raw, dtype=np.float64))
    if not bool(torch.isfinite(scores).all()):
        raise InputError("the scores hold NaN or infinity, so they cannot be judged")
    scores = _picture(scores, inputs) if inputs.modality == "image" else _text(scores, inputs)
    content = None
    if inputs.modality != "image":
        hidden = torch.zeros(scores.shape, dtype=torch.bool)
        for known in (inputs.special, None if inputs.mask is None else ~inputs.mask):
            if known is not None and known.shape == hidden.shape:
                hidden |= known.cpu()
        content = (~hidden).numpy()
    chosen = _target(target, ours, logits)
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    normalised = inputs.modality == "image" and mean is not None and std is not None
    return Case(
        model,
        inputs,
        scores.numpy(),
        chosen,
        logits,
        content,
        torch.tensor(mean) if normalised else None,
        torch.tensor(std) if normalised else None,
        batch_size,
        processor,
        ours,
        grid,
    )


def _picture(scores: Tensor, inputs: Inputs) -> Tensor:
    size = inputs.image_size
    assert size is not None
    batch = inputs.batch
    if scores.dim() == 4:
        scores = scores.sum(1)
    if scores.dim() == 2 and scores.shape[0] == batch and scores.shape != size:
        side = round(scores.shape[1] ** 0.5)
        if side * side == scores.shape[1]:
            scores = scores.reshape(batch, side, side)
    if scores.dim() == 2 and batch == 1:
        scores = scores[None]
    if scores.dim() != 3 or scores.shape[0] != batch:
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {batch} pictures of {size[0]}×{size[1]} pixels: "
            f"give [B, H, W] or [B, patches]"
        )
    return resize(scores, size)


def _text(scores: Tensor, inputs: Inputs) -> Tensor:
    wanted = tuple(inputs.tensor.shape[:2])
    scores = scores[None] if scores.dim() == 1 and wanted[0] == 1 else scores
    if tuple(scores.shape) != wanted:
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {wanted[0]} texts of {wanted[1]} tokens: give one "
            f"score a token, special ones included"
        )
    if inputs.mask is not None and inputs.mask.shape == scores.shape:
        scores = scores.masked_fill(~inputs.mask.cpu(), 0)
    return scores


def _target(target: Any, explanation: Explanation | None, logits: NDArray[np.float64]) -> NDArray[np.int64]:
    """The class given, else the explained one, else the predicted one."""
    if target is None and explanation is not None and bool((explanation.target >= 0).all()):
        target = explanation.target.numpy()
    chosen = logits.argmax(-1) if target is None else np.broadcast_to(np.asarray(target), (len(logits),))
    if chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= logits.shape[1]:
        raise InputError(f"the target is a class 0 to {logits.shape[1] - 1}, or one a sample, not {target!r}")
    return chosen.astype(np.int64)
