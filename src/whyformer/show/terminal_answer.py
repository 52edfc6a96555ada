"""Explained answers in the terminal, drawn by rich."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whyformer.show import answers, colours
from whyformer.show.terminal import Line, colourless, fitted
from whyformer.show.words import format_score, percent, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.show.answers import Conversation, Message

_STEPS = 40  # in a listing


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
        yield from (self._text(bare), Text(), *self._steps(bare))

    def _text(self, bare: bool) -> RenderableType:
        """Return the messages, the words of the prompt on their colours for the whole answer."""
        talk, text = self.talk, Text(overflow="fold")
        separate = talk.in_turns or bare
        for message in talk.messages:
            if separate:
                text.append("\n" * bool(text) + f"{visible(message.label)}  ", style=colours.SOFT)
            if message.collapsed:
                line = f"{fitted(answers.one_line(message.text), 60)}  {100 * talk.share(message):.0f} %"
                text.append(line, style=colours.SOFT)
            else:
                self._write(text, message, separate)
        return Line(text.plain, "") if bare else Padding(text, (0, 1), style=f"{colours.INK} on {colours.PAGE}")

    def _write(self, text: Text, message: Message, separate: bool) -> None:
        """Append the words of a message, those of the prompt on their colours."""
        talk, unit = self.talk, self.talk.unit(None)
        for i in message.places:
            piece = visible(talk.g.pieces[i], keep="\n")
            # without spaces and line breaks at both ends of a message
            piece = piece.lstrip() if i == (message.first if separate else 0) else piece
            piece = piece.rstrip() if separate and i == message.end - 1 else piece
            background = colours.code(colours.background(float(unit[i]), talk.signed))
            text.append(piece, style=f"{colours.INK} on {background}" if i < talk.g.start else f"bold {colours.INK}")

    def _steps(self, bare: bool) -> Iterator[RenderableType]:
        """Yield a row for the whole answer, whose colours the text has, and for each step: token, probability,
        alternatives, and reasons on their colours."""
        g = self.talk.g
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        heads = ["written", "prob", "or else", "because of"] if g.unit == "token" else ["written", "because of"]
        for head in heads:
            table.add_column(head, no_wrap=head in ("written", "prob"), justify="right" if head == "prob" else "left")
        for t in (None, *range(min(len(g), _STEPS))):
            cells: list[RenderableType] = [Line("whole answer" if t is None else _name(g, t), "")]
            if g.unit == "token":
                others = [] if t is None else answers.alternatives(g, t)
                else_ = "  ".join(f"{visible(name)} {100 * share:.0f} %" for name, share in others)
                cells += ["" if t is None else percent(g.probability(t)), Line(else_, "dim")]
            because = self._because(t)
            table.add_row(*cells, Line(because.plain, "") if bare else because)
        yield table
        if len(g) > _STEPS:
            yield Text(f"({_STEPS} of {len(g)} {g.unit}s shown)", style="dim")

    def _because(self, step: int | None) -> Text:
        """Return the reasons of a step, or of the whole answer, with the shares of pictures and special tokens."""
        talk, reasons = self.talk, Text()
        for r in talk.reasons(step):
            reasons.append(", " if reasons else "")
            background = colours.code(colours.background(r.unit, talk.signed))
            reasons.append(r.text, style=f"{colours.INK} on {background}")
            reasons.append(f" {format_score(r.score)}", style="dim")
        special = talk.special_note(None) if step is None else ""
        return Text("  ").join(part for part in (Text(talk.picture_note(step)), reasons, Text(special)) if part)
