"""Explained answers in the terminal: plain text for ``print``, and colours with rich."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whyformer.show import answers, colours
from whyformer.show.terminal import Line, colourless, fitted, on_background
from whyformer.show.words import format_score, percent, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.show.answers import Conversation, Message

_STEPS = 40  # in a listing
_MUTED = "rgb({},{},{})".format(*bytes.fromhex(colours.SOFT[1:]))


def plain(g: Generation) -> str:
    """Return the messages as text, and each token of the answer with its probability, the share of its scores on
    pictures, and the words with the largest |score|."""
    talk = answers.conversation(g)
    g = talk.g
    wide = max(cell_len(visible(m.label)) for m in talk.messages)
    messages = [f"  {visible(m.label):{wide}}  {fitted(answers.one_line(m.text), 100)}" for m in talk.messages]
    lines = [f"{answers.source(g)}:", *messages]
    summary = "  ".join(part for part in (talk.picture_note(None), _named(talk, None), talk.special_note(None)) if part)
    names = [_name(g, t) for t in range(min(len(g), _STEPS))]
    wide = max(map(cell_len, names))
    lines += ["", f"  whole answer  {summary}", ""]
    for t, name in enumerate(names):
        reasons = "  ".join(part for part in (talk.picture_note(t), _named(talk, t)) if part)
        share = f"{100 * g.probability(t):5.1f} %  " if g.unit == "token" else ""
        lines.append(f"  {name}{' ' * (wide - cell_len(name))}  {share}{reasons}")
    if len(g) > _STEPS:
        lines.append(f"  ({_STEPS} of {len(g)} {g.unit}s shown)")
    return "\n".join([*lines, *answers.remarks(g)])


def _named(talk: Conversation, step: int | None) -> str:
    return ", ".join(f"{r.text} {format_score(r.score)}" for r in talk.reasons(step))


def _name(g: Generation, step: int) -> str:
    return fitted(repr(answers.one_line(g.pieces[g.start + step])), 24)


def render(g: Generation) -> RenderableType:
    """Render the messages, the prompt coloured by its scores for the whole answer; then each step with its reasons."""
    talk = answers.conversation(g)
    notes = (Line(note, "") for note in answers.remarks(talk.g))
    return Group(Line(answers.source(talk.g)), _Answer(talk), *notes)


@dataclass(frozen=True)
class _Answer:
    """Prompt and answer as text, and a table of the steps; words on their colours, on a console with colours."""

    talk: Conversation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bare = colourless(console)
        yield from (*self._whole(bare), Text(), *self._steps(bare))

    def _whole(self, bare: bool) -> Iterator[RenderableType]:
        """Yield the text, the prompt coloured by its scores summed over steps; below, the shares left out."""
        talk, text = self.talk, Text(overflow="fold")
        for message in talk.messages:
            if talk.in_turns:
                text.append(f"\n{visible(message.label)}  " if text else f"{visible(message.label)}  ", style=_MUTED)
            if message.collapsed:
                line = f"{fitted(answers.one_line(message.text), 60)}  {100 * talk.share(message):.0f} %"
                text.append(line, style=_MUTED)
            else:
                self._write(text, message)
        if bare:
            yield Line(text.plain, "")
        else:
            yield Padding(text, (0, 1), style=f"{colours.INK} on {colours.PAGE}")
        parts = ["colours: the whole answer", talk.picture_note(None), talk.special_note(None)]
        yield Line(" · ".join(part for part in parts if part), "dim")

    def _write(self, text: Text, message: Message) -> None:
        """Append the words of a message, those of the prompt on their colours."""
        talk, unit = self.talk, self.talk.unit(None)
        for i in message.places:
            piece = visible(talk.g.pieces[i], keep="\n")
            # without spaces and line breaks at both ends of a message
            piece = piece.lstrip() if i == (message.first if talk.in_turns else 0) else piece
            piece = piece.rstrip() if talk.in_turns and i == message.end - 1 else piece
            on = on_background(colours.background(float(unit[i]), talk.signed))
            text.append(piece, style=f"{colours.INK} {on}" if i < talk.g.start else f"bold {colours.INK}")

    def _steps(self, bare: bool) -> Iterator[RenderableType]:
        """Yield a row for each step: token, probability, alternatives, and reasons on their colours."""
        talk, g = self.talk, self.talk.g
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        heads = ["written", "prob", "or else", "because of"] if g.unit == "token" else ["written", "because of"]
        for head in heads:
            table.add_column(head, no_wrap=head in ("written", "prob"), justify="right" if head == "prob" else "left")
        for t in range(min(len(g), _STEPS)):
            because = Text(f"{talk.picture_note(t)}  " if g.seen else "")
            for r in talk.reasons(t):
                on = on_background(colours.background(r.unit, talk.signed))
                because.append(r.text, style=f"{colours.INK} {on}")
                because.append(f" {format_score(r.score)}  ", style="dim")
            cells: list[RenderableType] = [Line(_name(g, t), "")]
            if g.unit == "token":
                else_ = "  ".join(f"{visible(name)} {100 * share:.0f} %" for name, share in answers.alternatives(g, t))
                cells += [percent(g.probability(t)), Line(else_, "dim")]
            table.add_row(*cells, Line(because.plain, "") if bare else because)
        yield table
        if len(g) > _STEPS:
            yield Text(f"({_STEPS} of {len(g)} {g.unit}s shown)", style="dim")
