"""What an audit found, in the terminal: streams, attentions, operations with their rules, the program, and methods."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from whyformer.auditing import Audit, AuditedUnit


def render(found: Audit) -> Group:
    """All tables, one below the other."""
    parts: list[Any] = [Text(found.model, style="bold")]
    tables = {
        "inputs": _streams(found),
        "attentions": _attentions(found),
        "operations that carry relevance, and their rules": _operations(found),
        "Σ relevance at the input of each block, as a share of what started": _blocks(found),
        "relevance that operations lost (+) or made (−), in the same share": _lost(found),
        "methods": _methods(found),
    }
    for title, table in tables.items():
        if table.row_count:
            parts += [Text(), Text(title, style="bold"), table]
    if found.program:
        parts += [Text(), Text("program", style="bold"), *_program(found)]
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
    table = _table("input", "made of", "scores", "blocks")
    for s in found.streams:
        size = "" if s.size is None else "×".join(map(str, s.size))
        level = "cannot be placed" if s.level is None else f"{size} {s.level}{'s' if s.level != 'patch' else 'es'}"
        table.add_row(Text(s.name), Text("" if s.input == s.name else s.input), level, str(s.blocks))
    return table


def _attentions(found: Audit) -> Table:
    """Runs of alike attentions in one line."""
    table = _table("attentions", "queries", "keys", "depths", "blocks", "map")
    runs: list[list[int]] = []
    for i, a in enumerate(found.attentions):
        before = found.attentions[runs[-1][-1]] if runs else None
        alike = before is not None and (before.queries, before.keys, before.shape) == (a.queries, a.keys, a.shape)
        if not alike:
            runs.append([])
        runs[-1].append(i)
    for run in runs:
        first, last = found.attentions[run[0]], found.attentions[run[-1]]
        rows = [Text(" + ".join(keys) or "learned") for keys in (first.queries, first.keys)]
        depths, blocks = _span(first.depth, last.depth), _span(first.block, last.block)
        table.add_row(_span(run[0], run[-1]), *rows, depths, blocks, f"{first.shape[1]}×{first.shape[2]}")
    return table


def _span(first: int | None, last: int | None) -> str:
    if first is None or last is None:
        return "outside"
    return str(first) if first == last else f"{first} to {last}"


def _operations(found: Audit) -> Table:
    """Each with its rules, and the methods of each: a column a method would break words on a narrow terminal."""
    table = _table("operation", "kind", "times", "rule: methods")
    table.columns[0].min_width = min(32, max((len(o.name) for o in found.operations), default=0))
    for o in found.operations:
        by_rule: dict[str | None, list[str]] = {}
        for name, rule in o.rules.items():
            by_rule.setdefault(rule, []).append(name)
        said = Text()
        for rule, names in by_rule.items():
            every = len(by_rule) == 1 and len(names) == len(found.sums.keys() | found.blocks.keys())
            said.append("; " if said else "").append_text(_rule(rule))
            said.append(": all" if every else f": {', '.join(names)}")
        table.add_row(Text(o.name), Text(o.kind), str(o.count), said)
    return table


def _rule(rule: str | None) -> Text:
    return Text("no rule", style="red") if rule is None else Text(rule)


def _program(found: Audit) -> list[Text]:
    """A line for each unit, below the path of its module. Blocks that compute the same as the one before are named in
    one line."""
    texts = [(u.kind, u.name, "×".join(map(str, u.shape)) or "number") for u in found.program]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines, alike, before = list[Text](), list[int](), list[Any]()
    for block, units in itertools.groupby(zip(found.program, texts, strict=True), lambda pair: pair[0].block):
        own = list(units)
        now = [(text, u.unknown) for u, text in own]
        if block >= 0 and now == before:
            alike.append(block)
            continue
        lines += _folded(alike)
        before, alike = now, []
        for module, inside in itertools.groupby(own, lambda pair: pair[0].module):
            lines.append(Text(f"  {module or 'the model itself'}", style="dim"))
            lines += [_line(u, text, widths) for u, text in inside]
    return lines + _folded(alike)


def _folded(blocks: list[int]) -> list[Text]:
    if not blocks:
        return []
    named = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"
    return [Text(f"  {named}: as the block before", style="bold")]


def _line(unit: AuditedUnit, texts: tuple[str, ...], widths: list[int]) -> Text:
    columns = "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
    line = Text(f"{unit.number:8}  {columns}  of {', '.join(map(str, unit.entries))}")
    return line.append(f"  no rule: {', '.join(unit.unknown)}", style="red") if unit.unknown else line


def _blocks(found: Audit) -> Table:
    table = _table("method", "block: share")
    for name in dict.fromkeys([*found.blocks, *found.sums]):
        said = [f"{block}: {share:.3f}" for block, share in sorted(found.blocks.get(name, {}).items())]
        said += [f"at the input: {found.sums[name]:.3f}"] if name in found.sums else []
        if said:
            table.add_row(name, Text("   ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in said)))
    return table


def _lost(found: Audit) -> Table:
    table = _table("method", "kind: share")
    for name, own in found.lost.items():
        if own:
            table.add_row(name, Text(", ".join(f"{rule}: {own[rule]:+.3f}" for rule in sorted(own))))
    return table


def _methods(found: Audit) -> Table:
    table = _table("method", "")
    for name, reason in found.methods.items():
        table.add_row(name, Text("applies", style="green") if reason is None else Text(reason))
    return table
