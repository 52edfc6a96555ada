"""Tables that a reader can sort by the names of their columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from whyformer.show.html import text


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what it is sorted by (what it shows, if None)."""

    html: str
    by: float | str | None = None


def table(
    name: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]], numeric: Collection[int] = (),
    *, titled: bool = True,
) -> str:  # fmt: skip
    """A table in a box that scrolls by itself.

    Args:
        name: its caption; where it is not ``titled``, because a heading says the same, for screen readers alone.
        rows: (attributes of the row, cells). numeric: columns of figures, set to the right.
    """
    titles = "".join(
        f'<th scope="col"{_numeric(i, numeric)}><button type="button" data-sort disabled>{text(title)}</button></th>'
        for i, title in enumerate(head)
    )
    body = "".join(
        f"<tr {attributes}>{''.join(_cell(cell, i, numeric) for i, cell in enumerate(cells))}</tr>"
        for attributes, cells in rows
    )
    unseen = ' class="unseen"'
    label = name if titled else f"{name}, table"  # the section with the heading has the plain name
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(label)}"><table class="sortable">'
        f"<caption{'' if titled else unseen}>{text(name)}</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell, column: int, numeric: Collection[int]) -> str:
    by = "" if cell.by is None else f' data-by="{text(str(cell.by))}"'
    return f"<td{by}{_numeric(column, numeric)}>{cell.html}</td>"


def _numeric(column: int, numeric: Collection[int]) -> str:
    return ' class="n"' if column in numeric else ""
