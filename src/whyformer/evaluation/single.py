"""``evaluate``: score one explanation, or a map made by any other tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

import whyformer.evaluation.metrics  # noqa: F401 - fills METRICS
from whyformer.errors import InputError
from whyformer.evaluation.case import Case, read_case, read_target
from whyformer.evaluation.registry import Metric, find_metric
from whyformer.explaining import open_model
from whyformer.explanation.result import Explanation
from whyformer.options import shows_options, split
from whyformer.prepared import Prepared
from whyformer.targets import Target, of_samples

_MARKS = ("mask", "rationale")
"""Settings that are no settings but what a map is compared with, one a sample."""


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


@shows_options
def evaluate(
    model: Any,
    inputs: Any,
    explanation: Explanation | Tensor | ArrayLike,
    metric: str = "deletion",
    processor: Any = None,
    *,
    target: Target = None,
    batch_size: int = 32,
    **options_and_settings: Any,
) -> Evaluation:
    """Score an explanation: what becomes of the prediction, or how well it agrees with a mask or a rationale.

    Args:
        model, inputs, processor: as for :func:`whyformer.explain`.
        explanation: an :class:`~whyformer.Explanation`, or the scores of any tool: pictures ``[B, H, W]`` (any
            size, resized bilinearly), ``[B, C, H, W]`` or ``[B, patches]``; text ``[B, N]`` with special tokens.
        metric: a name from :func:`whyformer.evaluation.registry.list_metrics`.
        target: class (index or name) whose probability is followed; the explained one, or else the predicted one, by
            default. Of a model for regression, and of targets that are values themselves, the number is followed.
        batch_size: perturbed samples in one forward pass.
        **options_and_settings: options as for :func:`whyformer.explain`, and settings of the metric, e.g. ``mask=``
            (``[B, H, W]`` at the model's input size). Metrics that take features out have ``baseline=``: "zero" (the
            processor's mean colour), "black", "mean" (of this picture), "blur" or "noise" for pictures, "unk", "mask",
            "pad", a token's id or "delete" for text; the default is the metric's own.

    Raises:
        InputError: scores that do not fit, are constant or not finite; a mask that is empty; unknown settings.
    """
    options, settings = split(options_and_settings)
    chosen = find_metric(metric)
    full = chosen.complete(settings)
    if batch_size < 1:
        raise InputError("batch_size must be at least 1")
    ready = open_model(model, processor, **options).prepare(inputs)
    modality = "image" if ready.inputs.modality == "image" else "text"
    if chosen.modality not in ("both", modality):
        raise InputError(
            f"the metric {metric} is for {'pictures' if chosen.modality == 'image' else 'text'}, and this input "
            f"is {modality}"
        )
    if not ready.singles:
        case = read_case(ready, explanation, target, batch_size)
        return _judged(chosen, case, full, range(len(case)))
    return _each(chosen, ready, explanation, target, full, batch_size)


def _judged(chosen: Metric, case: Case, settings: dict[str, Any], samples: Sequence[int]) -> Evaluation:
    """What the metric says of a case; ``samples`` are the numbers that its samples have for the user."""
    chosen.check_activation(case.activation)
    full, kind = dict(settings), case.ready.inputs.modality
    if chosen.baselines and full["baseline"] is None:
        full["baseline"] = "zero" if kind == "tensor" else chosen.baselines[0 if kind == "image" else 1]
    for i, number in enumerate(samples):
        if case.constant(i):
            raise InputError(f"the map of sample {number} is constant, so it gives no order and no region to judge")
    found = chosen.function(case, **full)
    values, curves = found if isinstance(found, tuple) else (found, None)
    plain = {k: v for k, v in full.items() if k not in _MARKS}
    return Evaluation(chosen.name, chosen.better, np.asarray(values, dtype=np.float64), curves, plain, case.forwards)


def _each(
    chosen: Metric, ready: Prepared, explanation: Any, target: Target, settings: dict[str, Any], batch_size: int
) -> Evaluation:
    """Of prompts that make no batch: each by itself, its scores without those of padding to the longest."""
    if any(one.inputs.modality == "image" for one in ready.singles):
        raise InputError(
            "these prompts make no batch, and of some the pixels of their one picture would be taken out, of others "
            "tokens: evaluate them one at a time"
        )
    ours = explanation if isinstance(explanation, Explanation) else None
    name = ready.inputs.name
    raw = explanation if ours is None else (ours.part(name) if name in ours.inputs else ours).scores
    scores = raw.detach().cpu() if isinstance(raw, Tensor) else torch.as_tensor(np.asarray(raw, dtype=np.float64))
    extents = [one.inputs.extent[1] for one in ready.singles]
    if tuple(scores.shape) != (wanted := (len(extents), max(extents))):
        raise InputError(
            f"scores of shape {list(scores.shape)} do not fit {wanted[0]} prompts, the longest of {wanted[1]} tokens: "
            "give one score a token, those of pictures and special ones included"
        )
    target = read_target(target, ours)
    ready.resolver(target)
    _, left = ready.padding
    found: list[Evaluation] = []
    for i, (one, wide) in enumerate(zip(ready.singles, extents, strict=True)):
        columns = slice(wanted[1] - wide, None) if left else slice(wide)
        cut = {k: np.asarray(v)[[i]][:, columns] for k, v in settings.items() if k in _MARKS and v is not None}
        case = read_case(one, scores[[i]][:, columns], of_samples(target, [i]), batch_size)
        case.explanation = None if ours is None else [ours[i]]
        found.append(_judged(chosen, case, {**settings, **cut}, [i]))
    values = np.concatenate([one.values for one in found])
    curves = [one.curves for one in found if one.curves is not None]
    drawn = np.concatenate(curves) if len(curves) == len(found) else None
    forwards = sum(one.forwards for one in found)
    return Evaluation(chosen.name, chosen.better, values, drawn, found[-1].settings, forwards)
