"""Pictures and predictions as the highest (or lowest) scores of a picture are removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whyformer.baselines import Filling, names_for
from whyformer.errors import InputError, check_count
from whyformer.evaluation.case import check_explanation, read_case
from whyformer.evaluation.metrics.faithfulness import FRACTIONS, curve_fractions, removal_masks
from whyformer.explaining import prepared
from whyformer.explanation.display import actual_method
from whyformer.explanation.result import Explanation
from whyformer.inputs.pictures import normalisation_of
from whyformer.inputs.removal import fill

ORDERS = ("highest scores first", "lowest scores first")


@dataclass(frozen=True, eq=False)
class Strip:
    """A picture with more and more pixels removed, in both orders. Axis letters: O :data:`ORDERS`, F fractions.

    Attributes:
        pictures: ``[O, F, H, W, 3]`` uint8, the preprocessed pictures that the model saw; the first is unchanged.
        fractions: ``[F]`` fraction of the pixels removed.
        probabilities: ``[O, F]`` probability of the target, or its value for a regression.
        predicted: ``[O][F]`` name of the predicted class.
        target: name of the target.
        method: method of the explanation; for ``auto`` the method that it chose.
        baseline: replacement of removed pixels.
        numeric: True if ``probabilities`` are values rather than probabilities.
    """

    pictures: NDArray[np.uint8]
    fractions: tuple[float, ...]
    probabilities: NDArray[np.float64]
    predicted: list[list[str]]
    target: str
    method: str
    baseline: str
    numeric: bool = False


def perturbation_strip(
    model: nn.Module | str,
    inputs: Any,
    explanation: Explanation,
    processor: Any = None,
    *,
    sample: int = 0,
    baseline: str = "black",
    fractions: tuple[float, ...] = FRACTIONS,
    batch_size: int = 16,
) -> Strip:
    """Remove 10–90 % of the pixels of a picture, by descending and by ascending scores.

    The masks are those of the positive and negative perturbation test (Chefer et al. 2021, section 4.1).

    Args:
        model, inputs, processor: as for the call of :func:`whyformer.explain` that returned ``explanation``.
        explanation: explanation of the pictures.
        sample: index of the picture in the batch.
        baseline: replacement of removed pixels, one of :data:`~whyformer.baselines.BASELINES` for pictures.
        fractions: removed fractions, increasing, above 0 and up to 1.
        batch_size: perturbed pictures in one forward pass.

    Raises:
        InputError: the input is not a picture, the map is constant, or the fractions do not increase.
    """
    check_explanation(explanation)
    check_count("batch_size", batch_size)
    if baseline not in names_for("image"):
        raise InputError(f"baseline must be one of {', '.join(names_for('image'))}, not {baseline!r}")
    if not fractions or any(a >= b for a, b in zip((0.0, *fractions), (*fractions, 1.0001), strict=True)):
        raise InputError(f"fractions must increase between 0 and 1, not {fractions}")
    ready = prepared(model, inputs, processor)
    if ready.inputs.modality != "image" or ready.inputs.features.pictures is None:
        raise InputError("only pictures can be shown with parts removed")
    case = read_case(ready, explanation, None, batch_size)
    if case.constant(sample):
        raise InputError("the map is constant, so there is no order in which to remove pixels")
    index, numeric = int(case.target[sample]), case.activation == "identity"
    steps = curve_fractions(fractions)
    # the model's input before normalisation, which maps the mean colour to 0
    picture = ready.inputs.features.pictures[sample].permute(2, 0, 1)[None].double() / 255
    mean, _ = normalisation_of(ready.processor) or ([0.5], [1.0])
    base = fill(baseline, Filling(picture, black=[0.0], white=[1.0], zero=mean))
    pictures, shares, predicted = [], [], []
    for first in (True, False):
        masks = removal_masks(case.features(sample), steps, highest_first=first)
        logits = case.perturbed_logits(sample, masks, baseline)
        shares.append(case.outcomes(logits)[:, index])
        predicted.append([explanation.label(index if numeric else i) for i in logits.argmax(-1).tolist()])
        removed = torch.from_numpy(masks).reshape(len(masks), 1, *picture.shape[-2:])
        masked = (torch.where(removed, base, picture) * 255).round().clamp(0, 255).to(torch.uint8)
        pictures.append(masked.permute(0, 2, 3, 1).numpy())
    name, method = explanation.label(index), actual_method(explanation)
    return Strip(np.stack(pictures), steps, np.stack(shares), predicted, name, method, baseline, numeric)
