"""Audits in the terminal: streams, attentions, operations with their rules, the program, and methods."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from whyformer.show.terminal import printed

if TYPE_CHECKING:
    from whyformer.auditing import Audit, AuditedUnit


def render(audit: Audit) -> Group:
    """Render all tables."""
    parts: list[Any] = [Text(audit.model, style="bold")]
    tables = {
        "inputs": _streams(audit),
        "attentions": _attentions(audit),
        "operations that carry relevance, and their rules": _operations(audit),
        "Σ relevance at the input of each block, as a share of what started": _blocks(audit),
        "relevance that operations lost (+) or made (−), in the same share": _lost(audit),
        "methods": _methods(audit),
    }
    for title, table in tables.items():
        if table.row_count:
            parts += [Text(), Text(title, style="bold"), table]
    if audit.program:
        parts += [Text(), Text("program", style="bold"), *_program(audit)]
    return Group(*parts)


def plain(audit: Audit, width: int = 160) -> str:
    """Return the tables as text."""
    return printed(render(audit), width)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _streams(audit: Audit) -> Table:
    table = _table("input", "made of", "scores", "blocks")
    for s in audit.streams:
        size = "" if s.size is None else "×".join(map(str, s.size))
        level = "cannot be placed" if s.level is None else f"{size} {s.level}{'s' if s.level != 'patch' else 'es'}"
        table.add_row(Text(s.name), Text("" if s.input == s.name else s.input), level, str(s.blocks))
    return table


def _attentions(audit: Audit) -> Table:
    """Return the table of attentions, with a row for each run of equal ones."""
    table = _table("attentions", "queries", "keys", "depths", "blocks", "map")
    runs: list[list[int]] = []
    for i, a in enumerate(audit.attentions):
        before = audit.attentions[runs[-1][-1]] if runs else None
        alike = before is not None and (before.queries, before.keys, before.shape) == (a.queries, a.keys, a.shape)
        if not alike:
            runs.append([])
        runs[-1].append(i)
    for run in runs:
        first, last = audit.attentions[run[0]], audit.attentions[run[-1]]
        rows = [Text(" + ".join(keys) or "learned") for keys in (first.queries, first.keys)]
        depths, blocks = _span(first.depth, last.depth), _span(first.block, last.block)
        table.add_row(_span(run[0], run[-1]), *rows, depths, blocks, f"{first.shape[1]}×{first.shape[2]}")
    return table


def _span(first: int | None, last: int | None) -> str:
    if first is None or last is None:
        return "outside"
    return str(first) if first == last else f"{first} to {last}"


def _operations(audit: Audit) -> Table:
    """Return the table of operations, their rules, and the methods of each rule."""
    table = _table("operation", "kind", "times", "rule: methods")
    table.columns[0].min_width = min(32, max((len(o.name) for o in audit.operations), default=0))
    for o in audit.operations:
        by_rule: dict[str | None, list[str]] = {}
        for name, rule in o.rules.items():
            by_rule.setdefault(rule, []).append(name)
        text = Text()
        for rule, names in by_rule.items():
            every = len(by_rule) == 1 and len(names) == len(audit.sums.keys() | audit.blocks.keys())
            text.append("; " if text else "")
            text.append("no rule" if rule is None else rule, style="red" if rule is None else None)
            text.append(": all" if every else f": {', '.join(names)}")
        table.add_row(Text(o.name), Text(o.kind), str(o.count), text)
    return table


def _program(audit: Audit) -> list[Text]:
    """Return a line for each unit, below the path of its module; blocks equal to the previous block share a line."""
    texts = [(u.kind, u.name, "×".join(map(str, u.shape)) or "number") for u in audit.program]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines, alike, before = list[Text](), list[int](), list[Any]()
    for block, units in itertools.groupby(zip(audit.program, texts, strict=True), lambda pair: pair[0].block):
        members = list(units)
        current = [(text, u.unknown) for u, text in members]
        if block >= 0 and current == before:
            alike.append(block)
            continue
        lines += _repeated(alike)
        before, alike = current, []
        for module, inside in itertools.groupby(members, lambda pair: pair[0].module):
            lines.append(Text(f"  {module or 'the model itself'}", style="dim"))
            lines += [_line(u, text, widths) for u, text in inside]
    return lines + _repeated(alike)


def _repeated(blocks: list[int]) -> list[Text]:
    if not blocks:
        return []
    named = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"
    return [Text(f"  {named}: as the block before", style="bold")]


def _line(unit: AuditedUnit, texts: tuple[str, ...], widths: list[int]) -> Text:
    columns = "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
    line = Text(f"{unit.number:8}  {columns}  of {', '.join(map(str, unit.entries))}")
    return line.append(f"  no rule: {', '.join(unit.unknown)}", style="red") if unit.unknown else line


def _blocks(audit: Audit) -> Table:
    table = _table("method", "block: share")
    for name in dict.fromkeys([*audit.blocks, *audit.sums]):
        shares = [f"{block}: {share:.3f}" for block, share in sorted(audit.blocks.get(name, {}).items())]
        shares += [f"at the input: {audit.sums[name]:.3f}"] if name in audit.sums else []
        if shares:
            table.add_row(name, Text("   ".join(s.replace(" ", "\N{NO-BREAK SPACE}") for s in shares)))
    return table


def _lost(audit: Audit) -> Table:
    table = _table("method", "kind: share")
    for name, shares in audit.lost.items():
        if shares:
            table.add_row(name, Text(", ".join(f"{rule}: {shares[rule]:+z.3f}" for rule in sorted(shares))))
    return table


def _methods(audit: Audit) -> Table:
    table = _table("method", "")
    for name, reason in audit.methods.items():
        table.add_row(name, Text("applies", style="green") if reason is None else Text(reason))
    return table
