"""One batch of maps to be scored: one score a feature, and what the model says without some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from whyformer.baselines import BLUR
from whyformer.errors import InputError
from whyformer.evaluation.forwards import activated
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs import Inputs
from whyformer.inputs.removal import Removal, content_of, logits_without, removal
from whyformer.prepared import Prepared
from whyformer.targets import Resolver, Target

Array = NDArray[np.float64]


@dataclass
class Case:
    """A model, its inputs and one map a sample.

    Attributes:
        scores: pictures ``[B, H, W]`` at the input's size, text ``[B, N]``.
        target: ``[B]`` class whose probability is followed, or which of the model's numbers.
        logits: ``[B, C]`` of the plain forward pass.
        content: text, ``[B, N]`` True at tokens that are neither special nor padding.
        resolver: which row of the output ``logits`` are, and what of it the target is.
        explanation: where the scores came from, if from this library.
        forwards: plain forward passes of changed samples, so far.
    """

    ready: Prepared
    scores: Array
    target: NDArray[np.int64]
    logits: Array
    content: NDArray[np.bool_] | None
    batch_size: int
    resolver: Resolver
    explanation: Explanation | Sequence[Explanation] | None = None
    forwards: int = field(default=0)
    _removals: dict[str | int, Removal] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    @property
    def image(self) -> bool:
        return self.ready.inputs.modality == "image"

    @cached_property
    def clean(self) -> Array:
        """``[B]`` probability of the target; its value where it has none (a regression, a span, a user's function)."""
        return self.outcomes(self.logits)[np.arange(len(self)), self.target]

    @cached_property
    def activation(self) -> str:
        """What turns logits into what is followed: "softmax", "sigmoid", or "identity" for numbers."""
        return self.resolver.activation(torch.from_numpy(self.logits))

    def outcomes(self, logits: Array) -> Array:
        """What is followed of these logits: probabilities, or numbers that have none as they are."""
        return activated(logits, self.activation)

    def features(self, sample: int) -> Array:
        """``[n]`` scores of what can be taken out: all pixels, or the content tokens."""
        flat = self.scores[sample].reshape(-1)
        return flat if self.content is None else flat[self.content[sample]]

    def flags(self, what: str, given: Any) -> NDArray[np.bool_]:
        """A mask or a rationale, one flag a score; a missing batch axis is added."""
        found = np.asarray(given).astype(bool)
        found = found[None] if found.ndim == self.scores.ndim - 1 else found
        if found.shape != self.scores.shape:
            place = "it at the model's input size" if self.image else "one flag a token"
            shapes = f"the shape {list(found.shape)} and the scores {list(self.scores.shape)}"
            raise InputError(f"the {what} has {shapes}: give {place}")
        return found

    def constant(self, sample: int) -> bool:
        """Whether all features have one score, so that they have no order."""
        scores = self.features(sample)
        return scores.size > 1 and float(scores.max()) == float(scores.min())

    def run(self, sample: int, masks: Sequence[NDArray[np.bool_]] | NDArray[np.bool_], baseline: str | int) -> Array:
        """``[F, C]`` logits of one sample, each time without some of :meth:`features` (True in ``masks [F, n]``)."""
        task = self.ready.task(self.resolver, "taking features out")
        if baseline not in self._removals:
            self._removals[baseline] = removal(task, baseline, patch=1 if self.image else None, blur=BLUR)
        removed = self._removals[baseline]
        places = np.arange(removed.features.shape[1])
        places = places if self.content is None else places[self.content[sample]]
        jobs: list[Any] = [(sample, places[mask]) for mask in masks]
        found = logits_without(task, removed, jobs, self.batch_size, "taking features out")
        self.forwards += len(jobs)
        return found.double().cpu().numpy()

    def follow(self, sample: int, masks: NDArray[np.bool_], baseline: str | int) -> Array:
        """``[F]`` probability, or value, of the target in :meth:`run`."""
        return self.outcomes(self.run(sample, masks, baseline))[:, self.target[sample]]


def read_case(ready: Prepared, explanation: Explanation | ArrayLike | Tensor, target: Target, batch_size: int) -> Case:
    """Check that the scores fit the input, and bring them to its features.

    Scores of a picture may be ``[B, H, W]`` of any size, ``[B, C, H, W]`` (summed over channels) or ``[B, P]``
    patches of a square grid; those of a text ``[B, N]``. A missing batch axis is added for a single sample.
    """
    ready.refuse_singles("taking features out")
    inputs, image = ready.inputs, ready.inputs.modality == "image"
    ours = explanation if isinstance(explanation, Explanation) else None
    raw: Any = explanation
    if ours is not None:
        raw = ours.heatmap(inputs.image_size) if image else ours.scores
    scores = torch.as_tensor(np.asarray(raw.detach().cpu() if isinstance(raw, Tensor) else raw, dtype=np.float64))
    if not bool(torch.isfinite(scores).all()):
        raise InputError("the scores hold NaN or infinity, so they cannot be judged")
    scores = _picture(scores, inputs) if image else _text(scores, inputs)
    content = None if image else content_of(inputs).numpy()
    resolver = ready.resolver(read_target(target, ours))
    logits = ready.task(resolver).forward()
    chosen = resolver.indices(logits)
    if int(chosen.min()) < 0:
        raise InputError("evaluate follows the probability of a class: the target must be a class, not a function")
    if int(chosen.max()) >= logits.shape[1]:
        raise InputError(f"the target is a class 0 to {logits.shape[1] - 1}, or one a sample, not {target!r}")
    classes, values = chosen.cpu().numpy().astype(np.int64), logits.double().cpu().numpy()
    return Case(ready, scores.numpy(), classes, values, content, batch_size, resolver, ours)


def _picture(scores: Tensor, inputs: Inputs) -> Tensor:
    size = inputs.image_size
    assert size is not None
    batch = inputs.batch
    if scores.dim() == 4:
        scores = scores.sum(1)
    side = round(scores.shape[-1] ** 0.5)
    if scores.dim() == 2 and scores.shape != size and scores.shape == (batch, side * side):
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
    wanted = inputs.extent[:2]
    scores = scores[None] if scores.dim() == 1 and wanted[0] == 1 else scores
    if tuple(scores.shape) != wanted:
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {wanted[0]} texts of {wanted[1]} tokens: give one "
            f"score a token, special ones included"
        )
    if inputs.mask is not None and inputs.mask.shape == scores.shape:
        scores = scores.masked_fill(~inputs.mask.cpu(), 0)
    return scores


def read_target(target: Target, explanation: Explanation | None) -> Target:
    """The target given, else the explained one, else the predicted class (None)."""
    if target is None and explanation is not None:
        if "target" in explanation.diagnostics:
            target = explanation.diagnostics["target"]
        elif bool((explanation.target >= 0).all()):
            target = explanation.target.tolist()
    return target
