"""Tables of a benchmark as Markdown, CSV and JSON: *published* beside *measured*, with intervals and counts."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyformer.evaluate.statistics import Interval


@dataclass(frozen=True)
class Cell:
    """One figure; ``published`` is the paper's, None where it gives none."""

    measured: Interval | None
    published: float | None = None


@dataclass(frozen=True)
class Table:
    """A table in the paper's layout.

    Attributes:
        rows, columns: names in order; cells: (row, column) -> figure; digits: after the point.
        along: which axis has a published and a measured column: "columns" (methods across, as in CVPR 2021) or
            "rows" (methods down, as in Ali et al.); it changes only the words.
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
        """A pipe table; each column with any published figure becomes two."""
        if not self.columns:
            return "\n".join([f"### {self.title}", "", self.note, ""])
        twice = {c: any(self._cell(r, c).published is not None for r in self.rows) for c in self.columns}
        head = [self.corner]
        for column in self.columns:
            head += [f"{column}: published", f"{column}: measured"] if twice[column] else [column]
        lines = [f"### {self.title}", "", _row(head), _row(["---", *["---:"] * (len(head) - 1)])]
        for row in self.rows:
            found = [row]
            for column in self.columns:
                cell = self._cell(row, column)
                if twice[column]:
                    found.append("–" if cell.published is None else f"{cell.published:.{self.digits}f}")
                found.append(self._measured(cell.measured))
            lines.append(_row(found))
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def facts(self) -> dict[str, Any]:
        """What stands around the figures; the figures themselves are :meth:`entries`."""
        return {
            "table": self.name,
            "title": self.title,
            "corner": self.corner,
            "rows": self.rows,
            "columns": self.columns,
            "digits": self.digits,
            "note": self.note,
        }

    def entries(self) -> list[dict[str, Any]]:
        """One dict a cell: table, row, column, measured, low, high, samples, published."""
        made = []
        for row in self.rows:
            for column in self.columns:
                cell = self._cell(row, column)
                m = cell.measured
                made.append(
                    {
                        "table": self.name,
                        "row": row,
                        "column": column,
                        "measured": _number(m.value if m else None),
                        "low": _number(m.low if m else None),
                        "high": _number(m.high if m else None),
                        "samples": m.count if m else 0,
                        "published": cell.published,
                    }
                )
        return made

    def _cell(self, row: str, column: str) -> Cell:
        return self.cells.get((row, column), Cell(None))

    def _measured(self, interval: Interval | None) -> str:
        if interval is None or not math.isfinite(interval.value):
            return "–"
        text = f"{interval.value:.{self.digits}f}"
        if not interval.high > interval.low:
            return text
        return f"{text} [{interval.low:.{self.digits}f}, {interval.high:.{self.digits}f}]"


@dataclass(frozen=True)
class Curves:
    """Lines for one panel of the picture: label -> (x, y)."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: dict[str, tuple[list[float], list[float]]]
    points: bool = False


@dataclass(frozen=True)
class Report:
    """All that a benchmark found.

    Attributes:
        conventions: every choice behind the figures, in words.
        counts: label -> {"scored", "failed", "constant", "nan"} samples.
        remarks: what a reader must know (small data, skipped samples ...).
    """

    benchmark: str
    tables: tuple[Table, ...]
    curves: tuple[Curves, ...]
    conventions: dict[str, Any]
    counts: dict[str, dict[str, int]]
    remarks: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def unscored(self) -> int:
        """Samples × configurations without figures."""
        return sum(n for c in self.counts.values() for kind, n in c.items() if kind != "scored")

    def markdown(self) -> str:
        parts = [f"## {self.benchmark}", "", *(t.markdown() for t in self.tables)]
        if self.unscored:
            columns = ("scored", "failed", "constant", "nan")
            parts += ["### Samples without figures", "", _row(["", *columns]), _row(["---", *["---:"] * 4])]
            parts += [_row([label, *(str(c.get(k, 0)) for k in columns)]) for label, c in self.counts.items()] + [""]
        parts += [f"- {r}" for r in self.remarks]
        parts += ["", "### Conventions", ""] + [f"- **{k}**: {v}" for k, v in self.conventions.items()]
        return "\n".join(parts).rstrip() + "\n"

    def facts(self) -> dict[str, Any]:
        """Everything as plain values, NaN as None: what ``report.json`` holds."""
        return _plain(
            {
                "benchmark": self.benchmark,
                "conventions": self.conventions,
                "counts": self.counts,
                "remarks": self.remarks,
                "tables": [t.facts() for t in self.tables],
                "figures": [e for t in self.tables for e in t.entries()],
                "curves": {c.name: {k: {"x": x, "y": y} for k, (x, y) in c.lines.items()} for c in self.curves},
                "extra": self.extra,
            }
        )

    def write(self, folder: Path) -> list[Path]:
        """``table.md``, ``table.csv``, ``report.json`` and, where there are curves, ``curves.png``; each whole or
        not at all."""
        entries = [e for t in self.tables for e in t.entries()]
        text = io.StringIO(newline="")
        if entries:
            writer = csv.DictWriter(text, list(entries[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(entries)
        made = [
            _replace(folder / "table.md", self.markdown().encode()),
            _replace(folder / "table.csv", text.getvalue().encode()),
            _replace(
                folder / "report.json",
                (json.dumps(self.facts(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
            ),
        ]
        if self.curves:
            from whyformer.benchmarks.plots import curves_png

            made.append(_replace(folder / "curves.png", curves_png(self.curves)))
        return made


def _replace(path: Path, data: bytes) -> Path:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)
    return path


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Ready for JSON: NaN as null, tuples as lists, anything else by its words."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
