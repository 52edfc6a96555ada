"""A generated text in the terminal: plain, and with colours where there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whyformer.show import answers, colours
from whyformer.show.colours import array
from whyformer.show.words import figure_of, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_STEPS = 40  # in a listing


def plain(g: Generation) -> str:
    """The answer token by token: its probability, how much of its scores is on pictures, and the words before it that
    made it so."""
    g = answers.folded(g)
    lines = [f"{answers.title(g)}:", f"  prompt  {_cut(answers.shown(g.prompt), 100)}",
             f"  answer  {_cut(answers.shown(g.text), 100)}", ""]  # fmt: skip
    names = [_name(g, t) for t in range(min(len(g), _STEPS))]
    wide = max(map(cell_len, names))
    for t, name in enumerate(names):
        made = ", ".join(f"{r.text} {figure_of(r.score)}" for r in answers.reasons(g, t))
        made = "  ".join(part for part in (answers.seen(g, t), made) if part)
        share = f"{100 * g.probability(t):5.1f}%  " if g.unit == "token" else ""
        lines.append(f"  {name}{' ' * (wide - cell_len(name))}  {share}{made}")
    if len(g) > _STEPS:
        lines.append(f"  ({_STEPS} of {len(g)} {g.unit}s shown)")
    return "\n".join([*lines, *answers.remarks(g)])


def _name(g: Generation, step: int) -> str:
    return _cut(repr(answers.shown(g.pieces[g.start + step])), 24)


def _cut(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else chop_cells(text, cells - 1)[0] + "…"


def render(g: Generation) -> RenderableType:
    """The prompt with what each of its words did for the whole answer, then each step with its reasons."""
    g = answers.folded(g)
    return Group(Text(answers.title(g), style="bold"), _Whole(g), Text(), _Steps(g), *map(Text, answers.remarks(g)))


class _Whole:
    """Prompt and answer as text, the prompt coloured by the sum over all steps."""

    def __init__(self, g: Generation) -> None:
        self.g = g

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        g, text = self.g, Text(overflow="fold")
        sums = array(g.matrix).sum(0)
        scale, signed = colours.scale(sums[: max(1, g.start - 1)]), answers.signed(g)
        for i, piece in enumerate(g.pieces):
            if i < g.start:
                value = float(scale.unit(np.array(sums[i])))
                text.append(visible(piece, keep="\n"), style=f"{colours.INK} {_on(colours.ground(value, signed))}")
            else:
                text.append(visible(piece, keep="\n"), style=f"bold {colours.INK}")
        if console.color_system is None or console.no_color:
            yield Text(text.plain)
        else:
            yield Padding(text, (0, 1), style=f"{colours.INK} on {colours.PAGE}")


class _Steps:
    """A line a step: the token, its probability, what else was likely, and its reasons on their colours."""

    def __init__(self, g: Generation) -> None:
        self.g = g

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        g, bare = self.g, console.color_system is None or console.no_color
        signed = answers.signed(g)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        heads = ["written", "prob", "or else", "because of"] if g.unit == "token" else ["written", "because of"]
        for head in heads:
            table.add_column(head, no_wrap=head in ("written", "prob"), justify="right" if head == "prob" else "left")
        for t in range(min(len(g), _STEPS)):
            because = Text(f"{answers.seen(g, t)}  " if g.seen else "")
            for r in answers.reasons(g, t):
                because.append(r.text, style="" if bare else f"{colours.INK} {_on(colours.ground(r.unit, signed))}")
                because.append(f" {figure_of(r.score)}  ", style="dim")
            cells = [Text(_name(g, t))]
            if g.unit == "token":
                else_ = "  ".join(f"{visible(name)} {100 * share:.0f}%" for name, share in answers.others(g, t))
                cells += [Text(f"{100 * g.probability(t):.1f}%"), Text(else_, style="dim")]
            table.add_row(*cells, because)
        yield table
        if len(g) > _STEPS:
            yield Text(f"({_STEPS} of {len(g)} {g.unit}s shown)", style="dim")


def _on(colour: colours.Bytes) -> str:
    return "on rgb({},{},{})".format(*colour)
