"""The registry of metrics for ``evaluate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError, unknown

Array = NDArray[np.float64]
Curves = tuple[Array, Array | None]
Score = Callable[[Array, float, Array], tuple[Any, Array | None]]


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    Attributes:
        name: name of the metric, for ``evaluate(metric=...)``.
        summary: one line of description.
        better: "higher" or "lower".
        modality: "image", "text" or "both".
        needs: names of required settings, e.g. ("mask",).
        settings: setting -> default.
        baselines: default baselines for pictures and for text; None if the metric removes no features.
        function: ``(case, **settings) -> values [B]`` or ``(values [B], curves [B, F])``.
        of_classes: True if the metric is defined for classes only, by rank or ratio of probabilities.
        masks: (scores ``[n]``, **settings) -> ``[F, n]``, each row True at features that are removed together; None
            unless the metric measures one output of the model.
        score: (scores ``[n]``, clean output, outputs ``[F]``) -> (value, curve or None), for metrics with ``masks``.
    """

    name: str
    summary: str
    better: str
    modality: str
    needs: tuple[str, ...]
    settings: dict[str, Any]
    baselines: tuple[str, str] | None
    function: Callable[..., Any] = field(repr=False)
    of_classes: bool = False
    masks: Callable[..., NDArray[np.bool_]] | None = field(default=None, repr=False)
    score: Score | None = field(default=None, repr=False)

    def check_activation(self, activation: str) -> None:
        """Raise InputError if the metric is defined for classes only and the target is a number ("identity")."""
        if self.of_classes and activation == "identity":
            raise InputError(
                f"the metric {self.name} is for classes, and the explained target is a number: use one that measures "
                f"the number, {', '.join(m.name for m in METRICS.values() if m.masks and not m.of_classes)}"
            )

    def complete(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings with defaults filled in.

        Raises:
            InputError: a setting is unknown, or a required one is missing.
        """
        valid = {**self.settings, **dict.fromkeys(self.needs)}
        for name in settings:
            if name not in valid:
                listing = f"Its settings: {', '.join(valid) or 'none'}"
                raise unknown(f"the metric {self.name} has no setting", name, valid, listing)
        if missing := [n for n in self.needs if settings.get(n) is None]:
            raise InputError(f"the metric {self.name} needs {', '.join(f'{m}=' for m in missing)}")
        return {**self.settings, **settings}


METRICS: dict[str, Metric] = {}


def metric(
    name: str, summary: str, *, better: str, modality: str = "both", needs: tuple[str, ...] = (),
    baselines: tuple[str, str] | None = None, of_classes: bool = False, **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Return a decorator that registers a function ``(case, **settings) -> values [B]`` or ``(values, curves [B, F])``.

    The arguments are those of :class:`Metric`; a metric with ``baselines`` also has the setting ``baseline``.
    """
    if better not in ("higher", "lower"):
        raise InputError(f"the metric {name}: better must be 'higher' or 'lower', not {better!r}")
    settings = settings | ({"baseline": None} if baselines else {})

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        METRICS[name] = Metric(name, summary, better, modality, needs, settings, baselines, function, of_classes)
        return function

    return register


def perturbation(name: str, summary: str, masks: Callable[..., Any], score: Score, **described: Any) -> None:
    """Register a metric of the target's probability, or of its value, as features are removed.

    Args:
        name, summary, masks, score: as for :class:`Metric`.
        **described: as for :func:`metric`; other settings are those of ``masks``.
    """

    def function(case: Any, *, baseline: str | int, **settings: Any) -> Curves:
        results = []
        for i in range(len(case)):
            scores = case.features(i)
            outputs = case.perturbed(i, masks_of(METRICS[name], scores, **settings), baseline)
            results.append(score_of(METRICS[name], scores, float(case.clean[i]), outputs))
        values, curves = zip(*results, strict=True)
        if len({np.shape(curve) for curve in curves}) > 1:
            raise InputError(f"the metric {name}: the curves of all samples must have the same length, or be None")
        return np.array(values), None if curves[0] is None else np.stack(curves)

    metric(name, summary, **described)(function)
    METRICS[name] = replace(METRICS[name], masks=masks, score=score)


def masks_of(metric: Metric, scores: Array, **settings: Any) -> NDArray[np.bool_]:
    """Return the masks ``[F, n]`` of a metric for scores ``[n]``.

    Raises:
        InputError: the metric's function returned something else.
    """
    assert metric.masks is not None
    result = metric.masks(scores, **settings)
    masks = np.asarray(result) if result is not None else np.zeros(0)
    if masks.dtype != bool or masks.ndim != 2 or masks.shape[1] != scores.size:
        raise InputError(
            f"the metric {metric.name}: masks must return booleans [F, {scores.size}], a flag for each feature, not "
            f"{masks.dtype} {list(masks.shape)}"
        )
    return masks


def score_of(metric: Metric, scores: Array, clean: float, outputs: Array) -> tuple[Any, Array | None]:
    """Return the value of a metric and its curve or None; arguments as in :class:`Metric`.

    Raises:
        InputError: the metric's function returned something else.
    """
    assert metric.score is not None
    result = metric.score(scores, clean, outputs)
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"the metric {metric.name}: score must return (value, curve or None), not {result!r:.50}")
    return result


def find_metric(name: str) -> Metric:
    """Return the metric of a name.

    Raises:
        InputError: there is no such metric; the message lists the names.
    """
    if not isinstance(name, str):
        raise InputError(f"metric must be the name of one metric, such as 'deletion', not {name!r}")
    if name in METRICS:
        return METRICS[name]
    raise unknown("there is no metric", name, METRICS, f"Metrics: {', '.join(sorted(METRICS))}")


def list_metrics() -> list[Metric]:
    """Return all metrics, sorted by name."""
    return [METRICS[name] for name in sorted(METRICS)]
