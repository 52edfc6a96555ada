"""The metrics that ``evaluate`` offers: name -> what it measures, which way is better, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError, unknown

Array = NDArray[np.float64]
Curves = tuple[Array, Array | None]
Score = Callable[[Array, float, Array], tuple[Any, Array | None]]


@dataclass(frozen=True)
class Plan:
    """What a metric takes out of one sample, and its figure from what the model then puts out.

    Attributes:
        masks: scores ``[n]`` -> ``[F, n]`` True at the features that are taken out, each row at once.
        score: (scores ``[n]``, clean output, outputs ``[F]``) -> (figure, curve, None where there is none).
    """

    masks: Callable[[Array], NDArray[np.bool_]]
    score: Score


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    Attributes:
        name: what ``evaluate(metric=...)`` takes; summary: one line.
        better: "higher" or "lower".
        modality: "image", "text" or "both".
        needs: settings that must be given, e.g. ("mask",).
        settings: setting -> default.
        baselines: what stands in for a feature of pictures and of text by default, None if nothing is taken out.
        plan: settings -> :class:`Plan`, of metrics that follow one output of the model.
        of_classes: whether it is defined for a class alone: by its rank or the ratio of its probabilities.
    """

    name: str
    summary: str
    better: str
    modality: str
    needs: tuple[str, ...]
    settings: dict[str, Any]
    baselines: tuple[str, str] | None
    function: Callable[..., Any] = field(repr=False)
    plan: Callable[..., Plan] | None = field(default=None, repr=False)
    of_classes: bool = False

    def check_activation(self, activation: str) -> None:
        """Raise where it is defined for classes and the model gives a number ("identity")."""
        if self.of_classes and activation == "identity":
            raise InputError(
                f"the metric {self.name} is about classes, and what is explained is a number: take deletion, "
                "insertion, aopc, comprehensiveness or sufficiency, which follow the number itself"
            )

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Settings with defaults; refuses unknown ones and asks for what is missing.

        ``substrate`` and ``replace`` are earlier names of ``baseline`` and still taken.
        """
        known = {**self.settings, **dict.fromkeys(self.needs)}
        earlier = [n for n in ("substrate", "replace") if n in given and self.baselines]
        if len(earlier) + ("baseline" in given) > 1:
            raise InputError(f"baseline and {earlier[0]}, its earlier name, are one setting: give baseline alone")
        for old in earlier:  # what pictures called "mean" is 0 in model space
            value = given[old]
            given = {k: v for k, v in given.items() if k != old}
            given["baseline"] = "zero" if (old, value) == ("substrate", "mean") else value
        for name in given:
            if name not in known:
                listing = f"Its settings: {', '.join(known) or 'none'}"
                raise unknown(f"the metric {self.name} has no setting", name, known, listing)
        if missing := [n for n in self.needs if given.get(n) is None]:
            raise InputError(f"the metric {self.name} needs {', '.join(f'{m}=' for m in missing)}")
        return {**self.settings, **given}


METRICS: dict[str, Metric] = {}


def metric(
    name: str, summary: str, *, better: str, modality: str = "both", needs: tuple[str, ...] = (),
    baselines: tuple[str, str] | None = None, of_classes: bool = False, **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register a function ``(case, **settings) -> values [B] or (values [B], curves [B, F])``.

    One with ``baselines`` (see :class:`Metric`) has the setting ``baseline`` too.
    """
    settings = settings | ({"baseline": None} if baselines else {})

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        METRICS[name] = Metric(
            name, summary, better, modality, needs, settings, baselines, function, of_classes=of_classes
        )
        return function

    return register


def perturbation(
    name: str, summary: str, masks: Callable[..., Any], score: Score, *, better: str, baselines: tuple[str, str],
    modality: str = "both", of_classes: bool = False, **settings: Any,
) -> None:  # fmt: skip
    """Register a metric that follows the probability of the target, or the number that it is: a :class:`Plan` whose
    ``masks`` take settings."""

    def plan(**given: Any) -> Plan:
        return Plan(partial(masks, **given), score)

    def function(case: Any, *, baseline: str | int, **given: Any) -> Curves:
        made, found = plan(**given), []
        for i in range(len(case)):
            scores = case.features(i)
            outputs = case.follow(i, made.masks(scores), baseline)
            found.append(made.score(scores, float(case.clean[i]), outputs))
        figures, curves = zip(*found, strict=True)
        return np.array(figures), None if curves[0] is None else np.stack(curves)

    full = {**settings, "baseline": None}
    METRICS[name] = Metric(name, summary, better, modality, (), full, baselines, function, plan, of_classes)


def find_metric(name: str) -> Metric:
    """The metric of that name, or an error that lists the names."""
    if not isinstance(name, str):
        raise InputError(f"a metric is given by its name, such as 'deletion', one at a time, not as {name!r}")
    if name in METRICS:
        return METRICS[name]
    raise unknown("there is no metric", name, METRICS, f"Metrics: {', '.join(sorted(METRICS))}")


def list_metrics() -> list[Metric]:
    """All metrics, by name."""
    return [METRICS[name] for name in sorted(METRICS)]
