"""The metrics that ``evaluate`` offers: name -> what it measures, which way is better, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whyformer.errors import InputError, unknown


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    Attributes:
        name: what ``evaluate(metric=...)`` takes; summary: one line.
        better: "higher" or "lower".
        modality: "image", "text" or "both".
        needs: settings that must be given, e.g. ("mask",).
        settings: setting -> default.
    """

    name: str
    summary: str
    better: str
    modality: str
    needs: tuple[str, ...]
    settings: dict[str, Any]
    function: Callable[..., Any] = field(repr=False)

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Settings with defaults; refuses unknown ones and asks for what is missing."""
        known = {**self.settings, **dict.fromkeys(self.needs)}
        for name in given:
            if name not in known:
                listing = f"Its settings: {', '.join(known) or 'none'}"
                raise unknown(f"the metric {self.name} has no setting", name, known, listing)
        missing = [n for n in self.needs if given.get(n) is None]
        if missing:
            raise InputError(f"the metric {self.name} needs {', '.join(f'{m}=' for m in missing)}")
        return {**self.settings, **given}


METRICS: dict[str, Metric] = {}


def metric(
    summary: str,
    *,
    better: str,
    modality: str = "both",
    needs: tuple[str, ...] = (),
    name: str | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function ``(case, **settings) -> values [B] or (values [B], curves [B, F])``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        title = name or function.__name__
        METRICS[title] = Metric(title, summary, better, modality, needs, settings, function)
        return function

    return register


def find_metric(name: str) -> Metric:
    """The metric of that name, or an error that lists the names."""
    if name in METRICS:
        return METRICS[name]
    raise unknown("there is no metric", name, METRICS, f"Metrics: {', '.join(sorted(METRICS))}")


def metrics() -> list[Metric]:
    """All metrics, by name."""
    return [METRICS[name] for name in sorted(METRICS)]
