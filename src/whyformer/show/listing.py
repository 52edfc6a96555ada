"""Methods in the terminal: the catalogue, and one method in full. From the facts of a registry row alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from whyformer.methods import Method

_FACTS = ("name", "summary", "family", "level", "modality", "class_specific", "citation")


def facts(method: Method) -> dict[str, Any]:
    """The public facts of a method as plain values, ready for JSON; a default without a JSON form becomes text."""
    settings = {name: _plain(value) for name, value in method.settings.items()}
    return {**{name: getattr(method, name) for name in _FACTS}, "settings": settings}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _table(rows: Sequence[tuple[str, str]], style: str = "") -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=style)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def catalogue(methods: Sequence[Method]) -> Group:
    """Name and summary of each method, by family."""
    order = list(dict.fromkeys(m.family for m in methods))
    wide = max(len(m.name) for m in methods)
    shown: list[Any] = []
    for family, found in groupby(sorted(methods, key=lambda m: order.index(m.family)), lambda m: m.family):
        rows = [(f"  {m.name:{wide}}", m.summary) for m in found]
        shown += [Text(family, style="bold"), _table(rows), Text()]
    return Group(*shown[:-1])


def describe(method: Method) -> Group:
    """Everything a user may want to know of one method."""
    reads = {"both": "pictures and text", "image": "pictures", "text": "text"}[method.modality]
    scope = "for the class asked" if method.class_specific else "the same for every class"
    settings = "\n".join(f"{name} = {value!r}" for name, value in method.settings.items()) or "none"
    rows = [("family", method.family), ("explains", reads), ("scores", f"{method.level}; {scope}"),
            ("published", method.citation), ("settings", settings)]  # fmt: skip
    summary = Padding(Text(method.summary), (0, 0, 1, 0))
    return Group(Text(method.name, style="bold"), summary, _table(rows, "dim"))
