"""The report of a benchmark: tables of *published* and *measured* figures, and a plot of curves."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whyformer.benchmarks.configurations import RANDOM, TRUTH, Configuration
from whyformer.evaluation.statistics import Interval, bootstrap
from whyformer.explanation.serialization import written_whole
from whyformer.explanation.storage import plain

Values = dict[str, Any]
"""Measurements of one sample and configuration."""
Results = dict[str, dict[str, Values]]
"""Label of a configuration -> sample -> measurements, for samples that have any, sorted by their ids."""
Figure = Callable[[Sequence[Values]], Interval | None]


@dataclass(frozen=True)
class Cell:
    """A figure; ``published`` is that of the paper, or None."""

    measured: Interval | None
    published: float | None = None


@dataclass(frozen=True)
class Table:
    """A table in the paper's layout.

    Attributes:
        name: identifier of the table.
        title: heading.
        corner: heading of the column of row names.
        rows: names of the rows in order.
        columns: names of the columns in order.
        cells: (row, column) -> figure.
        digits: number of decimals.
        note: text below the table.
    """

    name: str
    title: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]
    digits: int = 2
    note: str = ""

    def markdown(self) -> str:
        """Return a Markdown table; a column with published figures becomes two columns."""
        columns = [[self.corner, *self.rows]]
        for column in self.columns:
            cells = [self._cell(row, column) for row in self.rows]
            twice = any(cell.published is not None for cell in cells)
            if twice:
                published = ("–" if c.published is None else f"{c.published:.{self.digits}f}" for c in cells)
                columns.append([f"{column}: published", *published])
            head = f"{column}: measured" if twice else column
            columns.append([head, *(self._measured(cell.measured) for cell in cells)])
        table = _pipes(zip(*columns, strict=True)) if self.columns else []
        note = [*([""] if table else []), self.note] if self.note else []
        return "\n".join([f"### {self.title}", "", *table, *note, ""])

    def entries(self) -> list[dict[str, Any]]:
        """Return a dictionary for each cell: table, row, column, measured, low, high, samples, published."""
        entries = []
        for row, column in ((r, c) for r in self.rows for c in self.columns):
            cell = self._cell(row, column)
            result = cell.measured or Interval(math.nan, math.nan, math.nan, 0)
            numbers = {"measured": result.value, "low": result.low, "high": result.high, "samples": result.count}
            place = {"table": self.name, "row": row, "column": column}
            entries.append(plain({**place, **numbers, "published": cell.published}, finite=True))
        return entries

    def _cell(self, row: str, column: str) -> Cell:
        return self.cells.get((row, column), Cell(None))

    def _measured(self, interval: Interval | None) -> str:
        if interval is None or not math.isfinite(interval.value):
            return "–"
        text = f"{interval.value:.{self.digits}f}"
        if not interval.high > interval.low or math.isclose(interval.high, interval.low):
            return text
        return f"{text} [{interval.low:.{self.digits}f}, {interval.high:.{self.digits}f}]"


def mean(read: Callable[[Values], Any]) -> Figure:
    """Return a function that computes the mean of ``read(sample)`` with its interval, ignoring None and NaN."""

    def over(values: Sequence[Values]) -> Interval | None:
        figures = [figure for v in values if (figure := read(v)) is not None and not np.isnan(figure)]
        return bootstrap(figures) if figures else None

    return over


def mean_of(figures: Any) -> Any:
    """Return the mean over the first axis without NaN; NaN if all values are NaN."""
    return np.ma.filled(np.ma.masked_invalid(figures).mean(0), np.nan)


def scored(results: Results) -> list[Values]:
    """Return the measurements of the first configuration."""
    return list(next(iter(results.values())).values())


def percent(results: Results, read: Callable[[Values], Any]) -> str:
    """Return the share of samples for which ``read`` holds, such as "91.2 % of 200"."""
    values = scored(results)
    return f"{100 * float(np.mean([read(v) for v in values])):.1f} % of {len(values)}" if values else "nothing scored"


def method_table(
    name: str, title: str, corner: str, compared: Sequence[Configuration], results: Results,
    figures: Mapping[str, Figure], *, published: Mapping[str, Mapping[str, float]] | None = None, digits: int = 2,
    down: bool = False,
) -> Table:  # fmt: skip
    """Return a table of the figures of all configurations.

    Args:
        name: identifier of the table.
        title: heading.
        corner: heading of the column of row names.
        compared: configurations in order.
        results: measurements.
        figures: title -> function of the measurements of a configuration's samples.
        published: title -> the papers' figures by method.
        digits: number of decimals.
        down: methods are rows, as in Ali et al. 2022; otherwise columns, as in Chefer et al. 2021.
    """
    cells = {}
    for configuration in compared:
        values = list(results[configuration.label].values())
        for figure, read in figures.items():
            paper = (published or {}).get(figure, {}).get(configuration.published or "")
            place = (configuration.label, figure) if down else (figure, configuration.label)
            cells[place] = Cell(read(values) if values else None, paper)
    labels, titles = tuple(c.label for c in compared), tuple(figures)
    rows, columns = (labels, titles) if down else (titles, labels)
    return Table(name, title, corner, rows, columns, cells, digits)


Lines = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Curves:
    """One panel of the plot: ``lines`` by label, each (x, y), or scattered ``points``."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Lines
    points: bool = False


def mean_lines(results: Results, x: Sequence[float], read: Callable[[Values], Any]) -> Lines:
    """Return the mean curve of each configuration over its samples."""
    return {
        label: ([float(i) for i in x], mean_of([read(v) for v in values.values()]).tolist())
        for label, values in results.items()
        if values
    }


@dataclass(frozen=True)
class Report:
    """The report of a benchmark.

    Attributes:
        tables: the tables.
        curves: panels of the plot.
        conventions: descriptions of all choices behind the figures.
        remarks: notes for the reader, such as on skipped samples.
        extra: further values for ``report.json``.
        benchmark: name of the benchmark, set by the runner.
        counts: label -> number of "scored", "failed", "constant" and "nan" samples, set by the runner.
    """

    tables: tuple[Table, ...]
    curves: tuple[Curves, ...] = ()
    conventions: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    benchmark: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def unscored(self) -> int:
        """Number of pairs of sample and configuration without figures."""
        return sum(n for c in self.counts.values() for kind, n in c.items() if kind != "scored")

    def markdown(self) -> str:
        parts = [f"## {self.benchmark}", "", *(t.markdown() for t in self.tables)]
        if self.unscored:
            columns = ("scored", "failed", "constant", "nan")
            rows = [[label, *(str(c.get(k, 0)) for k in columns)] for label, c in self.counts.items()]
            parts += ["### Samples without figures", "", *_pipes([["", *columns], *rows]), ""]
        parts += [f"- {r}" for r in self.remarks]
        parts += ["", "### Conventions", ""] + [f"- **{k}**: {v}" for k, v in self.conventions.items()]
        return "\n".join(parts).rstrip() + "\n"

    def facts(self) -> dict[str, Any]:
        """Return the content of ``report.json`` as plain values; NaN becomes None."""
        facts = {name: getattr(self, name) for name in ("benchmark", "conventions", "counts", "remarks", "extra")}
        around = ("title", "corner", "rows", "columns", "digits", "note")
        content: dict[str, Any] = plain({
            **facts,
            "tables": [{"table": t.name, **{name: getattr(t, name) for name in around}} for t in self.tables],
            "figures": [e for t in self.tables for e in t.entries()],
            "curves": {c.name: {k: {"x": x, "y": y} for k, (x, y) in c.lines.items()} for c in self.curves},
        }, finite=True)  # fmt: skip
        return content

    def write(self, folder: Path) -> list[Path]:
        """Write ``table.md``, ``table.csv``, ``report.json`` and, if there are curves, ``curves.png`` atomically."""
        entries = [e for t in self.tables for e in t.entries()]
        text = io.StringIO(newline="")
        if entries:
            writer = csv.DictWriter(text, list(entries[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(entries)
        facts = json.dumps(self.facts(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        files = {
            "table.md": self.markdown().encode(),
            "table.csv": text.getvalue().encode(),
            "report.json": facts.encode(),
        }
        if self.curves:
            files["curves.png"] = curves_png(self.curves)
        for name, data in files.items():
            with written_whole(folder / name) as partial:
                partial.write_bytes(data)
        return [folder / name for name in files]


def _pipes(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose first row is the header."""
    head, *cells = rows
    every = [head, ["---", *["---:"] * (len(head) - 1)], *cells]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in every]


# colours of Okabe and Ito, which color-blind readers can distinguish; then others
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
    "#8B6914", "#F0E442", "#7F7F7F", "#000000",
)  # fmt: skip
_STYLES = ("-", "--", "-.", ":")
FRONT = "Pareto front"
"""Label of the line through points that no other point beats in both figures."""


def curves_png(panels: Sequence[Curves]) -> bytes:
    """Draw panels side by side as a PNG; the floor is dotted grey, the ceiling dashed grey.

    Single points are numbered in the panel and in the legend, because there are more points than distinct colours.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    labels = list(dict.fromkeys(label for p in panels for label in p.lines if label not in (RANDOM, TRUTH, FRONT)))
    for panel, axis in zip(panels, axes, strict=False):
        for label, (x, y) in panel.lines.items():
            number = labels.index(label) if label in labels else -1
            colour = "#555555" if number < 0 else _COLOURS[number % len(_COLOURS)]
            if panel.points:
                axis.scatter(x, y, s=10, color=colour, alpha=0.7, label=label, linewidths=0)
                continue
            if len(x) == 1:
                name = label if number < 0 else f"{number + 1}  {label}"
                axis.plot(x, y, "o", color=colour, markersize=4, label=name)
                if number >= 0:
                    axis.annotate(str(number + 1), (x[0], y[0]), (3, 2), textcoords="offset points", fontsize=7)
                continue
            if label == FRONT:
                axis.plot(x, y, "-", color="#BBBBBB", linewidth=1.2, label=label, zorder=0)
                continue
            style = {RANDOM: ":", TRUTH: "--"}.get(label, _STYLES[number // len(_COLOURS) % len(_STYLES)])
            axis.plot(x, y, style, color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    # one legend for all panels below them, where it covers no curve
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        look: dict[str, Any] = {"ncols": 2 * columns + 1, "fontsize": 7, "frameon": False}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", **look)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    return data.getvalue()
