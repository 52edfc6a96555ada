"""What a picture looks like as its highest (or lowest) scores are removed, and what the model then says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whyformer.baselines import Filling, names_for
from whyformer.errors import InputError
from whyformer.evaluation.case import read_case
from whyformer.evaluation.metrics.faithfulness import FRACTIONS, curve_fractions, removal_masks
from whyformer.explaining import open_model
from whyformer.explanation.result import Explanation
from whyformer.inputs.removal import fill

ORDERS = ("highest scores first", "lowest scores first")


@dataclass(frozen=True, eq=False)
class Strip:
    """A picture under removal, in both orders (axis O: :data:`ORDERS`), the unchanged picture first (axis F).

    Attributes:
        pictures: ``[O, F, H, W, 3]`` uint8, as the model saw them.
        fractions: ``[F]`` share of the pixels removed.
        probabilities: ``[O, F]`` of the class whose name is ``target``; of a number its values.
        predicted: ``[O][F]`` name of the class that the model says.
        method: that made the scores; baseline: what stands in for removed pixels.
        numeric: whether what is followed is a number and no probability.
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
    """Remove 10–90 % of the pixels of a picture, the highest scores first and the lowest first.

    The masks are those of the positive and negative perturbation test (Chefer et al. 2021, section 4.1).

    Args:
        model, inputs, processor: as for :func:`whyformer.explain`, which made ``explanation``.
        sample: which picture of the batch.
        baseline: what stands in for removed pixels, one of :data:`~whyformer.baselines.BASELINES` for pictures.
        fractions: shares removed, each between 0 and 1, rising.

    Raises:
        InputError: a text; a constant map; fractions that do not rise.
    """
    if baseline not in names_for("image"):
        raise InputError(f"baseline must be one of {', '.join(names_for('image'))}, not {baseline!r}")
    if not fractions or any(a >= b for a, b in zip((0.0, *fractions), (*fractions, 1.0001), strict=True)):
        raise InputError(f"fractions must rise between 0 and 1, not {fractions}")
    ready = open_model(model, processor).prepare(inputs)
    if ready.inputs.modality != "image" or ready.inputs.features.pictures is None:
        raise InputError("only pictures can be shown with parts removed")
    case = read_case(ready, explanation, None, batch_size)
    if case.constant(sample):
        raise InputError("the map is constant, so it gives no order in which to remove pixels")
    index, numeric = int(case.target[sample]), case.activation == "identity"
    steps = curve_fractions(fractions)
    # the same as is fed, before the normalisation, where the mean colour is what becomes 0
    seen = ready.inputs.features.pictures[sample].permute(2, 0, 1)[None].double() / 255
    mean = getattr(getattr(ready.processor, "image_processor", ready.processor), "image_mean", None) or [0.5]
    base = fill(baseline, Filling(seen, black=[0.0], white=[1.0], zero=mean))
    pictures, shares, named = [], [], []
    for first in (True, False):
        masks = removal_masks(case.features(sample), steps, highest_first=first)
        logits = case.run(sample, masks, baseline)
        shares.append(case.outcomes(logits)[:, index])
        named.append([explanation.label(index if numeric else i) for i in logits.argmax(-1).tolist()])
        gone = torch.from_numpy(masks).reshape(len(masks), 1, *seen.shape[-2:])
        drawn = (torch.where(gone, base, seen) * 255).round().clamp(0, 255).to(torch.uint8)
        pictures.append(drawn.permute(0, 2, 3, 1).numpy())
    shown = explanation.label(index)
    return Strip(np.stack(pictures), steps, np.stack(shares), named, shown, explanation.method, baseline, numeric)
