"""How far the maps on the page may be believed: deletion curves beside random ones, and what the runs say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whyformer.evaluate.trust import SEEDS, STEPS, Trust
from whyformer.explanation.result import Explanation
from whyformer.show.html import render

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 320, 170, 34, 8, 26, 8


def panel(judged: Sequence[tuple[Explanation, Trust | str]]) -> str:
    """A chart and a sentence for each map, and the warnings."""
    cells = [(e, found, None if isinstance(found, str) else _lines(found)) for e, found in judged]
    warnings = dict.fromkeys(line for _, found in judged if isinstance(found, Trust) for line in found.warnings[0])
    checked = any({"conservation", "completeness"} & e.diagnostics.keys() for e, _ in judged)
    return render(
        "web/trust.html", cells=cells, warnings=list(warnings), checked=checked, steps=STEPS, draws=len(SEEDS),
        width=_WIDTH, height=_HEIGHT, left=_LEFT, right=_WIDTH - _RIGHT, top=_TOP, bottom=_HEIGHT - _BOTTOM,
    )  # fmt: skip


def _lines(found: Trust) -> dict[str, str] | None:
    """Points of the map's curve, of the mean of random ones, and of the band that these fill; None without a curve."""
    curve, random = found.curves[0], found.random[:, 0]
    if not np.isfinite(curve).all():
        return None
    x = np.linspace(_LEFT, _WIDTH - _RIGHT, len(curve))

    def points(x: NDArray[np.float64], values: NDArray[np.float64]) -> str:
        y = _TOP + (1 - np.clip(values, 0, 1)) * (_HEIGHT - _TOP - _BOTTOM)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))

    band = f"{points(x, random.max(0))} {points(x[::-1], random.min(0)[::-1])}"
    return {"curve": points(x, curve), "random": points(x, random.mean(0)), "band": band}
