"""How far the maps on the page may be believed: deletion curves beside random ones, and what the runs say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whyformer.apps.web.work import DRAWS, STEPS, Judged
from whyformer.explanation.result import Explanation
from whyformer.show.html import text
from whyformer.show.words import words

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 320, 170, 34, 26, 8


def panel(judged: Sequence[Judged]) -> str:
    """A chart and a sentence for each map, and the warnings."""
    cells = "".join(f'<figure class="wf-cell">{_cell(j)}</figure>' for j in judged)
    how = (
        f"The highest scores are taken out first, in {STEPS} steps, and the model is asked again: the sooner its "
        f"probability falls, the better the map. Grey: {DRAWS} random maps of the same kind."
    )
    return f'<p class="wf-note">{how}</p><div class="wf-grid">{cells}</div>{remarks(judged)}'


def _cell(j: Judged) -> str:
    e = j.explanation
    # a map of no class is measured for a class all the same
    target = int(e.target[0])
    followed = f"{e.label(target)} {100 * float(e.probabilities()[0, target]):.1f}%"
    head = f"<figcaption><b>{text(e.method)}</b> <bdi>{text(followed)}</bdi></figcaption>"
    if j.curve is None or j.random is None:
        return f'{head}<p class="wf-note">not measured: {text(j.refusal or "")}</p>'
    return f"{head}{_chart(j)}<p>{text(verdict(j))}</p>"


def verdict(j: Judged) -> str:
    """The comparison in words."""
    mean, low = float(np.mean(j.chance)), min(j.chance)
    figures = f"area {j.area:.3f}, random {mean:.3f}"
    if j.area < low:
        return f"Better than each random map ({figures})."
    if j.area < mean:
        return f"Better than random maps on average, not than each ({figures}): weak evidence."
    return f"Not better than random ({figures}): do not trust this map here."


def _chart(j: Judged) -> str:
    assert j.curve is not None
    assert j.random is not None
    x = np.linspace(_LEFT, _WIDTH - 8, len(j.curve))

    def y(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return _TOP + (1 - np.clip(values, 0, 1)) * (_HEIGHT - _TOP - _BOTTOM)

    def line(values: NDArray[np.float64], look: str) -> str:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y(values), strict=True))
        return f'<polyline class="{look}" points="{points}"/>'

    low, high = y(j.random.min(0)), y(j.random.max(0))
    band = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)])
    ticks = "".join(
        f'<text x="{_LEFT - 5}" y="{float(y(np.array(p))) + 3:.1f}" text-anchor="end">{p:g}</text>' for p in (0, 0.5, 1)
    ) + "".join(
        f'<text x="{x[round(f * STEPS)]:.1f}" y="{_HEIGHT - 12}" text-anchor="{at}">{f:.0%}</text>'
        for f, at in ((0, "middle"), (0.5, "middle"), (1, "end"))
    )
    label = text(f"{j.explanation.method}: probability of the class as more is removed. {verdict(j)}")
    return (
        f'<svg class="wf-chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'<polygon class="wf-band" points="{band}"/>{line(j.random.mean(0), "wf-random")}{line(j.curve, "wf-curve")}'
        f'<path class="wf-axis" d="M{_LEFT},{_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - 8}"/>{ticks}'
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 1}" text-anchor="middle">removed</text></svg>'
    )


def remarks(judged: Sequence[Judged]) -> str:
    """What a reader should know before believing a map, as a list."""
    found = list(dict.fromkeys(line for j in judged for line in warnings(j.explanation)))
    if not found:
        clean = '<p class="wf-note">No warnings: the relevance that was checked is conserved.</p>'
        return clean if _checked(judged) else ""
    lines = "".join(f"<li>{text(line)}</li>" for line in found)
    return f'<h3>Before you believe it</h3><ul class="wf-warnings">{lines}</ul>'


def _checked(judged: Sequence[Judged]) -> bool:
    return any({"conservation", "completeness"} & j.explanation.diagnostics.keys() for j in judged)


def warnings(e: Explanation) -> list[str]:
    """Sentences about one map, from its diagnostics and its scores."""
    found = []
    conservation = e.diagnostics.get("conservation")
    if isinstance(conservation, dict) and (error := float(conservation["error"][0])) > 0.01:
        found.append(
            f"{e.method}: relevance is not conserved. On the way through the blocks its sum moves by "
            f"{_percent(error)} of what it started from, so the sizes of scores mean little; their order may help."
        )
    completeness = e.diagnostics.get("completeness")
    if isinstance(completeness, dict):
        whole, error = abs(float(completeness["difference"][0])), abs(float(completeness["error"][0]))
        if error > 0.05 * max(whole, 1e-12):
            found.append(
                f"{e.method}: the scores miss what they should add up to by {_percent(error / max(whole, 1e-12))}; "
                "more steps come closer."
            )
    if e.diagnostics.get("class_specific") is False:
        found.append(
            f"{e.method}: the same map for every class. It shows where the model looks, not what speaks for a class."
        )
    if not bool((e.scores != 0).any()):
        found.append(f"{e.method}: all scores are 0, so this map says nothing.")
    elif e.level == "token" and len(words(e)[0]) < 3:
        found.append("With one or two words there is little to compare.")
    return found


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 10 else f"a factor of {share:,.0f}"
