"""``evaluate``: compute a metric for an explanation, or for a map of any other tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

import whyformer.evaluation.metrics  # noqa: F401 - fills METRICS
from whyformer.errors import InputError, check_count
from whyformer.evaluation.case import Case, plain_numbers, read_case, read_flags, read_target, score_tensor
from whyformer.evaluation.registry import Metric, find_metric
from whyformer.explaining import prepared
from whyformer.explanation.result import Explanation
from whyformer.options import shows_options, split
from whyformer.prepared import Prepared
from whyformer.targets import Target, of_samples

_MARKS = ("mask", "rationale")
"""Settings that hold a reference for each sample, which the map is compared with."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of a metric for a batch of explanations.

    Attributes:
        metric: name of the metric.
        better: "higher" or "lower".
        values: ``[B]`` value of each sample.
        curves: ``[B, F]`` curve that each value is computed from; None if the metric has no curve.
        settings: settings of the metric, defaults included.
        forwards: number of perturbed samples passed through the model.
    """

    metric: str
    better: str
    values: NDArray[np.float64]
    curves: NDArray[np.float64] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    forwards: int = 0

    @property
    def value(self) -> float:
        """Mean over the samples."""
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
    """Compute a metric for an explanation: its faithfulness to the model, or its agreement with a mask or rationale.

    Args:
        model, inputs, processor: as for :func:`whyformer.explain`.
        explanation: an :class:`~whyformer.Explanation`, or the scores of any tool: for pictures ``[B, H, W]`` (any
            size, resized bilinearly), ``[B, C, H, W]`` or ``[B, patches]`` of square patches; for text ``[B, N]`` with
            special tokens, for multiple choice those of the text that the target is about.
        metric: a name from :func:`whyformer.evaluation.registry.list_metrics`.
        target: class (index or name) whose probability is measured; by default the explained class, or the predicted
            class if scores are passed. For regression models and targets that are values, the value is measured.
        batch_size: perturbed samples in one forward pass.
        **options_and_settings: options as for :func:`whyformer.explain`, and settings of the metric, e.g. ``mask=``
            (``[B, H, W]`` at the size of the model's input). Metrics that remove features have ``baseline=``: for
            pictures "zero" (the processor's mean colour), "black", "mean" (of the picture), "blur" or "noise"; for text
            "unk", "mask", "pad", a token id or "delete". The default depends on the metric.

    Returns:
        The value of each sample, and the curve behind it if the metric has one.

    Raises:
        InputError: the scores do not fit the inputs, are constant or not finite; a mask is empty; a setting is unknown.
    """
    options, settings = split(options_and_settings)
    definition = find_metric(metric)
    full = definition.complete(settings)
    check_count("batch_size", batch_size)
    ready = prepared(model, inputs, processor, **options)
    modality = "image" if ready.inputs.modality == "image" else "text"
    if definition.modality not in ("both", modality):
        raise InputError(
            f"the metric {metric} is for {'pictures' if definition.modality == 'image' else 'text'}, and this input "
            f"is {modality}: choose another metric"
        )
    if not ready.singles:
        case = read_case(ready, explanation, target, batch_size)
        return _evaluated(definition, case, full, range(len(case)))
    return _evaluate_singles(definition, ready, explanation, target, full, batch_size)


def _evaluated(metric: Metric, case: Case, settings: dict[str, Any], samples: Sequence[int]) -> Evaluation:
    """Compute a metric for a case; ``samples`` are the user's indices of its samples, for error messages."""
    metric.check_activation(case.activation)
    full, kind = dict(settings), case.ready.inputs.modality
    if metric.baselines and full["baseline"] is None:
        full["baseline"] = "zero" if kind == "tensor" else metric.baselines[0 if kind == "image" else 1]
    for i, number in enumerate(samples):
        if case.constant(i):
            raise InputError(f"the map of sample {number} is constant, so it has no order and no region to evaluate")
    result = metric.function(case, **full)
    given, curves = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    values = plain_numbers(given)
    if values is None or values.shape != (len(case),) or (curves is not None and len(curves) != len(case)):
        raise InputError(
            f"the metric {metric.name} must return a number for each sample, [{len(case)}], and perhaps a curve for "
            f"each, not {result!r:.60}"
        )
    plain = {k: v for k, v in full.items() if k not in _MARKS}
    return Evaluation(metric.name, metric.better, values, curves, plain, case.forwards)


def _evaluate_singles(
    metric: Metric, ready: Prepared, explanation: Any, target: Target, settings: dict[str, Any], batch_size: int
) -> Evaluation:
    """Evaluate samples that cannot be batched one at a time, each without the scores of its padding."""
    explained = explanation if isinstance(explanation, Explanation) else None
    raw = explanation if explained is None else ready.main_part(explained).scores
    scores = score_tensor(raw)
    columns, results = ready.columns(scores), list[Evaluation]()
    given = {name: settings[name] for name in _MARKS if settings.get(name) is not None}
    marks = {name: read_flags(name, value, scores.shape, False) for name, value in given.items()}
    for i, (single, goal) in enumerate(ready.batches(read_target(target, explained))):
        cut: dict[str, Any] = {name: flags[[i]][:, columns[i]] for name, flags in marks.items()}
        if settings.get("label") is not None:
            cut["label"] = of_samples(settings["label"], [i])
        case = read_case(single, scores[[i]][:, columns[i]], goal, batch_size)
        case.explanation = None if explained is None else [explained[i]]
        results.append(_evaluated(metric, case, {**settings, **cut}, [i]))
    values = np.concatenate([result.values for result in results])
    curves = [result.curves for result in results if result.curves is not None]
    all_curves = np.concatenate(curves) if len(curves) == len(results) else None
    forwards = sum(result.forwards for result in results)
    return Evaluation(metric.name, metric.better, values, all_curves, results[-1].settings, forwards)
