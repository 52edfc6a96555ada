"""What an audit found, in the terminal: streams, attentions, operations with their rules, and methods."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from whyformer.auditing import Audit


def render(found: Audit) -> Group:
    """All tables, one below the other."""
    parts: list[Any] = [Text(found.model, style="bold")]
    tables = {
        "inputs": _streams(found),
        "attentions": _attentions(found),
        "operations that carry relevance, and their rules": _operations(found),
        "Σ relevance at the input of each block call, as a share of what started": _blocks(found),
        "relevance that operations lost (+) or made (−), in the same share": _lost(found),
        "methods": _methods(found),
    }
    for title, table in tables.items():
        if table.row_count:
            parts += [Text(), Text(title, style="bold"), table]
    return Group(*parts)


def plain(found: Audit, width: int = 160) -> str:
    """The same as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _streams(found: Audit) -> Table:
    table = _table("input", "made of", "scores", "enters block call")
    for s in found.streams:
        size = "" if s.size is None else "×".join(map(str, s.size))
        level = "cannot be placed" if s.level is None else f"{size} {s.level}{'s' if s.level != 'patch' else 'es'}"
        table.add_row(
            Text(s.name), Text("" if s.input == s.name else s.input), level, "" if s.block is None else str(s.block)
        )
    return table


def _attentions(found: Audit) -> Table:
    """Runs of alike attentions in one line."""
    table = _table("attentions", "queries", "keys", "depths", "block calls", "map")
    runs: list[list[int]] = []
    for i, a in enumerate(found.attentions):
        before = found.attentions[runs[-1][-1]] if runs else None
        alike = before is not None and (before.queries, before.keys, before.shape) == (a.queries, a.keys, a.shape)
        if not alike:
            runs.append([])
        runs[-1].append(i)
    for run in runs:
        first, last = found.attentions[run[0]], found.attentions[run[-1]]
        rows = [Text(" + ".join(keys)) for keys in (first.queries, first.keys)]
        depths, calls = _span(first.depth, last.depth), _span(first.block, last.block)
        table.add_row(_span(run[0], run[-1]), *rows, depths, calls, f"{first.shape[1]}×{first.shape[2]}")
    return table


def _span(first: int | None, last: int | None) -> str:
    if first is None or last is None:
        return "outside"
    return str(first) if first == last else f"{first} to {last}"


def _operations(found: Audit) -> Table:
    """Each with its rules, and the methods of each: a column a method would break words on a narrow terminal."""
    table = _table("operation", "as", "times", "rule: methods")
    table.columns[0].min_width = min(32, max((len(o.name) for o in found.operations), default=0))
    for o in found.operations:
        by_rule: dict[str | None, list[str]] = {}
        for name, rule in o.rules.items():
            by_rule.setdefault(rule, []).append(name)
        said = Text()
        for rule, names in by_rule.items():
            said.append("; " if said else "").append_text(_rule(rule))
            said.append(": all" if len(by_rule) == 1 else f": {', '.join(names)}")
        table.add_row(Text(o.name), Text("" if o.role == o.name else o.role), str(o.count), said)
    return table


def _rule(rule: str | None) -> Text:
    return Text("no rule", style="red") if rule is None else Text(rule.replace("its ordinary adjoint", "adjoint"))


def _blocks(found: Audit) -> Table:
    table = _table("method", "block call: share")
    for name in dict.fromkeys([*found.blocks, *found.sums]):
        said = [f"{block}: {share:.3f}" for block, share in sorted(found.blocks.get(name, {}).items())]
        said += [f"at the input: {found.sums[name]:.3f}"] if name in found.sums else []
        if said:
            table.add_row(name, Text("   ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in said)))
    return table


def _lost(found: Audit) -> Table:
    table = _table("method", "rule: share")
    for name, own in found.lost.items():
        if own:
            table.add_row(name, Text(", ".join(f"{rule}: {own[rule]:+.3f}" for rule in sorted(own))))
    return table


def _methods(found: Audit) -> Table:
    table = _table("method", "")
    for name, reason in found.methods.items():
        table.add_row(name, Text("applies", style="green") if reason is None else Text(reason))
    return table
