"""A batch of maps to evaluate, and the model's outputs for inputs without some of their features."""

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
from whyformer.errors import InputError, ModelError, check_type
from whyformer.evaluation.forwards import activated
from whyformer.evaluation.registry import Array
from whyformer.explanation.counts import amount
from whyformer.explanation.mosaic import on_patches
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs import Inputs
from whyformer.inputs.removal import Removal, content_of, logits_without, removal, values_of
from whyformer.prepared import Prepared
from whyformer.targets import Resolver, Target


@dataclass
class Case:
    """A model, its inputs and a map for each sample.

    Attributes:
        ready: the model and its prepared inputs.
        scores: ``[B, H, W]`` for pictures, at the size of the model's input; ``[B, N]`` for text.
        target: ``[B]`` index of the class whose probability is measured, or of the output of a regression.
        logits: ``[B, C]`` of the plain forward pass.
        content: ``[B, N]`` True at tokens that are neither special nor padding, for text; None for pictures.
        batch_size: perturbed samples in one forward pass.
        resolver: resolves the row of the model's output that ``logits`` are, and the target in it.
        choice: ``[B]`` for multiple choice, the text of each sample that the scores belong to.
        explanation: the explanations that the scores belong to, if they are from this library.
        forwards: number of perturbed samples evaluated so far.
    """

    ready: Prepared
    scores: Array
    target: NDArray[np.int64]
    logits: Array
    content: NDArray[np.bool_] | None
    batch_size: int
    resolver: Resolver
    choice: Tensor | None = None
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
        """``[B]`` probability of the target; its value if it has none (a regression, a span, a user's function)."""
        return self.outcomes(self.logits)[np.arange(len(self)), self.target]

    @cached_property
    def activation(self) -> str:
        """Function that turns logits into the measured output: "softmax", "sigmoid", or "identity" for numbers."""
        return self.resolver.activation(torch.from_numpy(self.logits))

    def outcomes(self, logits: Array) -> Array:
        """Return probabilities of logits, or the logits themselves if they have none."""
        return activated(logits, self.activation)

    def features(self, sample: int) -> Array:
        """Return the scores ``[n]`` of the features that can be removed: all pixels, or the content tokens."""
        flat = self.scores[sample].reshape(-1)
        return flat if self.content is None else flat[self.content[sample]]

    def flags(self, name: str, values: Any) -> NDArray[np.bool_]:
        """Return a flag for each score, see :func:`read_flags`."""
        return read_flags(name, values, self.scores.shape, self.image)

    def labels(self, label: Any) -> NDArray[np.int64]:
        """Return the classes ``[B]`` of a user's label: an index or a name, or one per sample."""
        logits = torch.from_numpy(self.logits)
        return class_indices("label", self.ready.resolver(label).indices(logits), logits, label)

    def constant(self, sample: int) -> bool:
        """Return True if all features have the same score, so that they have no order."""
        scores = self.features(sample)
        return scores.size > 1 and float(scores.max()) == float(scores.min())

    def perturbed_logits(
        self, sample: int, masks: Sequence[NDArray[np.bool_]] | NDArray[np.bool_], baseline: str | int
    ) -> Array:
        """Return the logits ``[F, C]`` of one sample without the :meth:`features` that are True in ``masks [F, n]``."""
        task = self.ready.task(self.resolver, "removing features")
        if baseline not in self._removals:
            patch = 1 if self.image else None
            self._removals[baseline] = removal(task, baseline, patch=patch, blur=BLUR, choice=self.choice)
        removed = self._removals[baseline]
        indices = np.arange(removed.features.shape[1])
        indices = indices if self.content is None else indices[self.content[sample]]
        jobs: list[Any] = [(sample, indices[mask]) for mask in masks]
        logits = logits_without(task, removed, jobs, self.batch_size, "removing features")
        self.forwards += len(jobs)
        if bool(torch.isnan(logits).any()):
            raise ModelError(f"the logits without some features are NaN (baseline {baseline!r}): choose another")
        return logits.double().cpu().numpy()

    def perturbed(self, sample: int, masks: NDArray[np.bool_], baseline: str | int) -> Array:
        """Return the probability, or value, ``[F]`` of the target, as in :attr:`clean`, in :meth:`perturbed_logits`."""
        return self.outcomes(self.perturbed_logits(sample, masks, baseline))[:, self.target[sample]]

    def target_values(self, sample: int, logits: Array) -> Array:
        """Return the explained target ``[F]``, such as a logit or a contrast, for logits ``[F, C]`` of one sample."""
        clean, rows = torch.from_numpy(self.logits), torch.from_numpy(logits)
        return values_of(self.ready.task(self.resolver).resolve(clean), rows, [sample] * len(rows), clean).numpy()


def read_case(ready: Prepared, explanation: Explanation | ArrayLike | Tensor, target: Target, batch_size: int) -> Case:
    """Check that scores fit the inputs, and convert them to a score for each pixel or token.

    Args:
        ready: the model and its prepared inputs.
        explanation: an explanation, or scores: for pictures ``[B, H, W]`` of any size, ``[B, C, H, W]`` (summed over
            channels) or ``[B, P]`` square patches; for text ``[B, N]``, for multiple choice those of the text
            that the target is about. A missing batch axis is added for a single sample.
        target: the target, see :func:`read_target`.
        batch_size: perturbed samples in one forward pass.

    Raises:
        InputError: the scores do not fit the inputs or are not finite, or the target is not a class.
    """
    ready.refuse_singles("removing features")
    inputs, image = ready.inputs, ready.inputs.modality == "image"
    known_explanation = ready.main_part(explanation) if isinstance(explanation, Explanation) else None
    raw: Any = explanation
    if known_explanation is not None:
        raw = known_explanation.heatmap(inputs.image_size) if image else known_explanation.scores
        if inputs.mosaic is not None and inputs.mosaic.places is not None:
            raw = on_patches(known_explanation, inputs.mosaic, inputs.extent[-1])
    scores = score_tensor(raw)
    if not bool(torch.isfinite(scores).all()):
        raise InputError("the scores hold NaN or infinity, so they cannot be evaluated")
    resolver = ready.resolver(read_target(target, known_explanation))
    logits = ready.forward(ready.task(resolver))
    choice = None
    if inputs.choices:
        scored = ready.resolver(read_target(None if known_explanation else target, known_explanation))
        choice = ready.task(scored).value_index(logits).cpu()
    text = ... if choice is None else (torch.arange(inputs.batch), choice)
    scores = _picture(scores, inputs) if image else _text(scores, inputs, text)
    content = None if image else content_of(inputs)[text].numpy()
    classes = class_indices("target", resolver.indices(logits), logits, target)
    values = logits.double().cpu().numpy()
    return Case(ready, scores.numpy(), classes, values, content, batch_size, resolver, choice, known_explanation)


def class_indices(name: str, indices: Tensor, logits: Tensor, value: Any) -> NDArray[np.int64]:
    """Return the classes ``[B]`` that a user's ``value`` names; raise InputError unless logits ``[B, C]`` have them."""
    if int(indices.min()) < 0:
        raise InputError(f"evaluate measures the probability of a class: the {name} must be a class, not a function")
    if int(indices.max()) >= logits.shape[1]:
        last = logits.shape[1] - 1
        raise InputError(f"the {name} must be a class from 0 to {last}, or one for each sample, not {value!r}")
    return indices.cpu().numpy().astype(np.int64)


def read_flags(name: str, values: Any, shape: Sequence[int], image: bool) -> NDArray[np.bool_]:
    """Convert a mask or a rationale to a flag for each score; a missing batch axis is added.

    Args:
        name: name of the setting.
        values: what the user passed.
        shape: shape of the scores.
        image: whether they are scores of pixels.

    Raises:
        InputError: these are no flags, or they have another shape.
    """
    numbers = plain_numbers(values)
    if numbers is None or bool(np.isnan(numbers).any()):
        raise InputError(f"the {name} must be an array of flags, True or 1 where it is set, not {values!r:.60}")
    flags = numbers[None] != 0 if numbers.ndim == len(shape) - 1 else numbers != 0
    if flags.shape != tuple(shape):
        expected = "it at the size of the model's input" if image else "one flag for each token"
        shapes = f"the shape {list(flags.shape)} and the scores {list(shape)}"
        raise InputError(f"the {name} has {shapes}: pass {expected}")
    return flags


def check_explanation(value: Any) -> None:
    """Raise InputError unless ``value`` is an explanation."""
    check_type("explanation", value, Explanation, "the result of whyformer.explain")


def score_tensor(scores: Any) -> Tensor:
    """Return scores that a user passed as a tensor on the CPU.

    Raises:
        InputError: they are no numbers.
    """
    numbers = plain_numbers(scores)
    if numbers is None:
        way = f"; whyformer.explain(model, inputs, {scores!r}) returns one" if isinstance(scores, str) else ""
        raise InputError(f"explanation must be an Explanation or an array of scores, not {scores!r}{way}")
    return torch.from_numpy(numbers)


def plain_numbers(values: Any) -> Array | None:
    """Return the real numbers that a user passed as a tensor, an array or lists; None if they are others."""
    try:
        plain = values.detach().cpu() if isinstance(values, Tensor) else values
        # NumPy has no bfloat16
        plain = plain.double() if isinstance(plain, Tensor) and plain.dtype.is_floating_point else plain
        found = np.asarray(plain)
        return None if values is None or found.dtype.kind in "cSU" else found.astype(np.float64)
    except (TypeError, ValueError):
        return None


def _picture(scores: Tensor, inputs: Inputs) -> Tensor:
    size = inputs.image_size
    assert size is not None
    batch = inputs.batch
    if scores.dim() == 4:
        channels = inputs.tensor.shape[1] if inputs.tensor.dim() == 4 else scores.shape[1]
        if scores.shape[1] not in (1, channels):  # such as [B, H, W, C], which would be summed over rows
            raise InputError(
                f"scores of shape {list(scores.shape)} do not fit pictures of {amount(channels, 'channel')}: pass "
                "[B, C, H, W], or [B, H, W] with a score for each pixel"
            )
        scores = scores.sum(1)
    rows = max(1, round((scores.shape[-1] * size[0] / size[1]) ** 0.5))
    columns = scores.shape[-1] // rows
    if scores.shape == (batch, rows * columns) and scores.shape != size and rows * size[1] == columns * size[0]:
        scores = scores.reshape(batch, rows, columns)
    if scores.dim() == 2 and batch == 1:
        scores = scores[None]
    if scores.dim() != 3 or scores.shape[0] != batch:
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {batch} pictures of {size[0]}×{size[1]} pixels: "
            f"pass [B, H, W], or [B, patches] of square patches"
        )
    return resize(scores, size)


def _text(scores: Tensor, inputs: Inputs, text: Any) -> Tensor:
    expected = (inputs.batch, inputs.extent[-1])
    scores = scores[None] if scores.dim() == 1 and expected[0] == 1 else scores
    if tuple(scores.shape) != expected:
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {expected[0]} texts of {expected[1]} tokens: pass one "
            f"score for each token, special tokens included"
        )
    if inputs.mask is not None and inputs.mask[text].shape == scores.shape:
        scores = scores.masked_fill(~inputs.mask[text].cpu(), 0)
    return scores


def read_target(target: Target, explanation: Explanation | None) -> Target:
    """Return ``target``; if it is None, the target of the explanation, or None for the predicted class."""
    if target is None and explanation is not None:
        if "target" in explanation.diagnostics:
            target = explanation.diagnostics["target"]
        elif bool((explanation.target >= 0).all()):
            target = explanation.target.tolist()
    return target
