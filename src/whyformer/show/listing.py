"""Methods in the terminal: the catalogue, and one method in full. From the facts of a registry row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from whyformer.methods import Method


def facts(method: Method) -> dict[str, Any]:
    """The public facts of a method as plain values, ready for JSON; a default without a JSON form becomes text."""
    return {
        "name": method.name, "summary": method.summary, "family": method.family, "level": method.level,
        "modality": method.modality, "class_specific": method.class_specific, "citation": method.citation,
        "settings": {name: _plain(value) for name, value in method.settings.items()},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def catalogue(methods: Sequence[Method]) -> Table:
    """Name and summary of each method, by family."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for i, family in enumerate(dict.fromkeys(m.family for m in methods)):
        if i:
            table.add_row("", "")
        table.add_row(Text(family, style="bold"), "")
        for method in methods:
            if method.family == family:
                table.add_row(Text(f"  {method.name}"), Text(method.summary))
    return table


def describe(method: Method) -> Group:
    """Everything a user may want to know of one method."""
    reads = {"both": "pictures and text", "image": "pictures", "text": "text"}[method.modality]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    table.add_row("family", Text(method.family))
    table.add_row("explains", Text(reads))
    scope = "for the class asked" if method.class_specific else "the same for every class"
    table.add_row("scores", Text(f"{method.level}; {scope}"))
    table.add_row("published", Text(method.citation))
    settings = [Text(f"{name} = {value!r}") for name, value in method.settings.items()] or [Text("none")]
    table.add_row("settings", Group(*settings))
    return Group(Text(method.name, style="bold"), Padding(Text(method.summary), (0, 0, 1, 0)), table)
