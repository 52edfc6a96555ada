"""Many methods as single points on one panel are numbered, because there are more methods than colours."""

from __future__ import annotations

import io

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from whyformer.benchmarks.report import FRONT, Curves, curves_png


def test_point_numbers_match_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    annotated: dict[tuple[float, float], str] = {}
    legends: list[list[str]] = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, at, *_, **__: annotated.update({at: text}))
    legend = Figure.legend

    def recorded_legend(self: Figure, handles: object, labels: object, **options: object) -> object:
        legends.append(list(labels))
        return legend(self, handles, labels, **options)

    monkeypatch.setattr(Figure, "legend", recorded_legend)
    points = {f"method {i}": ([float(i)], [2.0 * i]) for i in range(12)}
    lines = {**points, "random": ([3.0], [0.5]), FRONT: ([0.0, 11.0], [0.0, 22.0])}
    panel = Curves("quality", "Quality", "cost", "quality", lines)
    drawn = curves_png([panel, panel])
    assert annotated == {(float(i), 2.0 * i): str(i + 1) for i in range(12)}
    assert legends == [[*(f"{i + 1}  method {i}" for i in range(12)), "random", FRONT]]
    assert Image.open(io.BytesIO(drawn)).width > 1000
