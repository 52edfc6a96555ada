"""``evaluate``: score one explanation, or a map made by any other tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

import whyformer.evaluate.metrics  # noqa: F401 - fills METRICS
from whyformer.errors import InputError
from whyformer.evaluate.case import read_case
from whyformer.evaluate.registry import find_metric
from whyformer.explaining import begin
from whyformer.explanation.result import Explanation
from whyformer.targets import Target


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a metric says about a batch of explanations.

    Attributes:
        metric: its name; better: "higher" or "lower".
        values: ``[B]`` one figure a sample.
        curves: ``[B, F]`` the curve behind each figure, None where there is none.
        settings: complete; forwards: plain forward passes (of one sample) that it took.
    """

    metric: str
    better: str
    values: NDArray[np.float64]
    curves: NDArray[np.float64] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    forwards: int = 0

    @property
    def value(self) -> float:
        """The mean over the samples."""
        return float(np.mean(self.values))

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Evaluation({self.metric} = {self.value:.4g}, {self.better} is better, {len(self.values)} samples)"


def evaluate(
    model: nn.Module | str,
    inputs: Any,
    explanation: Explanation | Tensor | ArrayLike,
    metric: str = "deletion",
    processor: Any = None,
    *,
    target: Target = None,
    batch_size: int = 32,
    device: str | torch.device | None = None,
    truncate: bool = False,
    **settings: Any,
) -> Evaluation:
    """Score an explanation: what becomes of the prediction, or how well it agrees with a mask or a rationale.

    Args:
        model, inputs, processor, device, truncate: as for :func:`whyformer.explain`.
        explanation: an :class:`~whyformer.Explanation`, or the scores of any tool: pictures ``[B, H, W]`` (any
            size, resized bilinearly), ``[B, C, H, W]`` or ``[B, patches]``; text ``[B, N]`` with special tokens.
        metric: a name from :func:`whyformer.evaluate.registry.metrics`.
        target: class (index or name) whose probability is followed; the explained one, or else the predicted one, by
            default.
        batch_size: perturbed samples in one forward pass.
        **settings: the metric's, e.g. ``mask=`` (``[B, H, W]`` at the model's input size). Metrics that take features
            out have ``baseline=``: "zero" (the processor's mean colour), "black", "mean" (of this picture) or "blur"
            for pictures, "unk", "mask", "pad", a token's id or "delete" for text; the default is the metric's own.

    Raises:
        InputError: scores that do not fit, are constant or not finite; a mask that is empty; unknown settings.
    """
    chosen = find_metric(metric)
    full = chosen.complete(settings)
    if batch_size < 1:
        raise InputError("batch_size must be at least 1")
    ready = begin(model, inputs, processor, device=device, truncate=truncate)
    modality = "image" if ready.inputs.modality == "image" else "text"
    if chosen.modality not in ("both", modality):
        raise InputError(
            f"the metric {metric} is for {'pictures' if chosen.modality == 'image' else 'text'}, and this input "
            f"is {modality}"
        )
    if chosen.baselines and full["baseline"] is None:
        default = chosen.baselines[0 if modality == "image" else 1]
        full["baseline"] = "zero" if ready.inputs.modality == "tensor" else default
    case = read_case(ready, explanation, target, batch_size)
    for i in range(len(case)):
        if case.constant(i):
            raise InputError(f"the map of sample {i} is constant, so it gives no order and no region to judge")
    found = chosen.function(case, **full)
    values, curves = found if isinstance(found, tuple) else (found, None)
    plain = {k: v for k, v in full.items() if k not in ("mask", "rationale")}
    return Evaluation(metric, chosen.better, np.asarray(values, dtype=np.float64), curves, plain, case.forwards)
