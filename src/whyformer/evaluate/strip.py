"""What a picture looks like as its highest (or lowest) scores are removed, and what the model then says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whyformer.benchmarks.substrates import SUBSTRATES, substrate
from whyformer.errors import InputError
from whyformer.evaluate.case import read_case
from whyformer.evaluate.metrics import faithfulness as perturbation
from whyformer.explanation.result import Explanation
from whyformer.inputs import prepare
from whyformer.models.loading import opened

ORDERS = ("highest scores first", "lowest scores first")


@dataclass(frozen=True, eq=False)
class Strip:
    """A picture under removal, in both orders (axis O: :data:`ORDERS`), the unchanged picture first (axis F).

    Attributes:
        pictures: ``[O, F, H, W, 3]`` uint8, as the model saw them.
        fractions: ``[F]`` share of the pixels removed.
        probabilities: ``[O, F]`` of the class whose name is ``target``.
        predicted: ``[O][F]`` name of the class that the model says.
        method: that made the scores; ground: what removed pixels are replaced by.
    """

    pictures: NDArray[np.uint8]
    fractions: tuple[float, ...]
    probabilities: NDArray[np.float64]
    predicted: list[list[str]]
    target: str
    method: str
    ground: str


def perturbation_strip(
    model: nn.Module | str,
    inputs: Any,
    explanation: Explanation,
    processor: Any = None,
    *,
    sample: int = 0,
    ground: str = "black",
    fractions: tuple[float, ...] = perturbation.FRACTIONS,
    batch_size: int = 16,
) -> Strip:
    """Remove 10–90 % of the pixels of a picture, the highest scores first and the lowest first.

    The masks are those of the positive and negative perturbation test (Chefer et al. 2021, section 4.1).

    Args:
        model, inputs, processor: as for :func:`whyformer.explain`, which made ``explanation``.
        sample: which picture of the batch.
        ground: what is put in place of removed pixels: "black", "mean" or "blur".
        fractions: shares removed, each between 0 and 1, rising.

    Raises:
        InputError: a text; a constant map; fractions that do not rise.
    """
    if ground not in SUBSTRATES:
        raise InputError(f"ground must be one of {', '.join(SUBSTRATES)}, not {ground!r}")
    if not fractions or any(a >= b for a, b in zip((0.0, *fractions), (*fractions, 1.0001), strict=True)):
        raise InputError(f"fractions must rise between 0 and 1, not {fractions}")
    model, processor = opened(model, processor)
    prepared = prepare(model, inputs, processor)
    if prepared.modality != "image" or prepared.pictures is None:
        raise InputError("only pictures can be shown with parts removed")
    case = read_case(model, prepared, explanation, processor, None, batch_size)
    if case.constant(sample):
        raise InputError("the map is constant, so it gives no order in which to remove pixels")
    index = int(case.target[sample])
    steps = perturbation.curve_fractions(fractions)
    features = case.features(sample)
    pictures, shares, named = [], [], []
    seen = prepared.pictures[sample].permute(2, 0, 1)[None].double() / 255
    mean = torch.full((3,), 0.5) if case.mean is None else case.mean.expand(3)
    # the same as is fed, before the normalisation, where the mean colour is what becomes 0
    plain = mean[None, :, None, None].to(seen).expand_as(seen)
    base = plain if ground == "mean" else substrate(ground, seen, torch.zeros(3), torch.ones(3))
    for first in (True, False):
        order = perturbation.removal_order(features, highest_first=first)
        masks = [perturbation.removal_mask(order, perturbation.removed_count(order.size, f)) for f in steps]
        logits = case.run(sample, masks, ground)
        shares.append(case.probabilities(logits)[:, index])
        named.append([explanation.label(i) for i in logits.argmax(-1).tolist()])
        gone = torch.from_numpy(np.stack(masks)).reshape(len(masks), 1, *seen.shape[-2:])
        drawn = (torch.where(gone, base, seen) * 255).round().clamp(0, 255).to(torch.uint8)
        pictures.append(drawn.permute(0, 2, 3, 1).numpy())
    return Strip(
        np.stack(pictures), steps, np.stack(shares), named, explanation.label(index), explanation.method, ground
    )
