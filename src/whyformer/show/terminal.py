"""Explanations and methods in the terminal, drawn by rich; on consoles without colours as bars and shades."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whyformer.defaults import grouped
from whyformer.show import colours
from whyformer.show.bars import strongest
from whyformer.show.colours import array
from whyformer.show.layout import Section, sections
from whyformer.show.painting import base, drawable, overlay
from whyformer.show.words import (
    Word,
    bar_labels,
    format_score,
    heading,
    input_notes,
    is_further,
    legend_labels,
    position_name,
    remarks,
    special_tokens,
    truncated_parts,
    values,
    visible,
    words,
)  # fmt: skip

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation
    from whyformer.methods import Method

_ROWS = 24  # words or patches in a plain listing
_BAR = 16
_NAME = 44  # cells for a class name
_MUTED = "italic rgb(90,90,90)"
_TRUNCATED = f"{_MUTED} on rgb(225,225,225)"
_FACTS = ("name", "summary", "family", "level", "modality", "class_specific", "citation")  # of a method
_SHADES, _ASCII = " ░▒▓█", " .:*#"


# -- plain text --------------------------------------------------------------------------------------------------
def plain(e: Explanation, top: int = 5) -> str:
    """Return :func:`render` as text without colours."""
    return printed(render(e, top))


def printed(renderable: RenderableType, width: int = 160) -> str:
    """Return what a console without colours prints."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def top_classes(e: Explanation, k: int = 5) -> str:
    """Format the k classes with the highest logits of the first sample in columns: index, name, logit, probability;
    or the first k outputs of a regression model."""
    if numbers := values(e)[:k]:
        head, wide = "Value:" if len(numbers) == 1 else "Values:", max(cell_len(fitted(n, _NAME)) for n, _ in numbers)
        return "\n".join([head, *(f"  {set_cell_size(fitted(n, _NAME), wide)}  value = {v:.3f}" for n, v in numbers)])
    best = [(i, name, value, share or 0) for i, name, value, share in e.top(0, k)]
    names = [fitted(visible(name), _NAME) for _, name, _, _ in best]
    wide = max(map(cell_len, names), default=0)
    logits = [f"{value:.3f}" for _, _, value, _ in best]
    digits, lengths = max(len(str(i)) for i, *_ in best), max(map(len, logits))
    lines = [f"Top {len(best)} classes:" if len(best) > 1 else "Class:"]
    for (index, _, _, share), name, value in zip(best, names, logits, strict=True):
        padded = set_cell_size(name, wide)
        lines.append(f"  {index:>{digits}} : {padded}  value = {value:>{lengths}}  prob = {100 * share:5.1f}%")
    return "\n".join(lines)


def _listing(e: Explanation) -> list[str]:
    """Return a line for each of the strongest words, or patches without a grid, of a sample, in order, with a bar."""
    scale = colours.scale_of(e)
    if e.level == "token":
        rows = [(_label(word), word.score) for word in words(e)[0]]
        sound, worded = e.sounds is not None, e.offsets is not None and e.texts is not None
        kind = "stretches of time" if sound else "words" if worded else "tokens"
    else:
        rows = [(position_name(e, i), score) for i, score in enumerate(array(e.scores[0]).tolist())]
        kind = "patches"
    largest = sorted(range(len(rows)), key=lambda i: -abs(rows[i][1]))[:_ROWS]
    lines = []
    for text, score in (rows[i] for i in sorted(largest)):
        bar = ("-" if score < 0 else "█") * round(abs(float(scale.unit(np.array(score)))) * _BAR)
        lines.append(f"  {format_score(score):>10}  {bar:<{_BAR}}  {fitted(text, 46)}")
    if len(rows) > _ROWS:
        lines.append(f"  ({_ROWS} of {len(rows)} {kind} shown)")
    low, high = legend_labels(e)
    lines.append(f"  ({'-: against, █: ' if low else '█: '}{visible(high)})")
    if (special := special_tokens(e)) is not None:
        lines.append(f"  ({special.text}: {visible(special.sum or special.parts[0][0])})")
    return lines + [f"  ({part.label})" for part in truncated_parts(e)]


def _label(word: Word) -> str:
    return visible(word.text) + ("  [UNK]: unknown to the model" if word.unknown else "")


def fitted(text: str, cells: int) -> str:
    """Cut text to at most so many cells, with an ellipsis."""
    return text if cell_len(text) <= cells else chop_cells(text, cells - 1)[0] + "…"


_EXACT = 1e-6  # it prints scores, so opposite maps of different sizes are both printed


# -- colours -----------------------------------------------------------------------------------------------------
def render(explanations: Explanation | Iterable[Explanation], top: int = 5) -> RenderableType:
    """Render the top classes of each input, then the map of each method and target, at the width of the console."""
    blocks: list[RenderableType] = []
    for part in sections(explanations, tolerance=_EXACT):
        above: list[RenderableType] = list(map(_note, input_notes([part.first])))
        if not is_further(part.first):
            above = [Line(top_classes(part.first, top), ""), *above] if top else above
            if part.first.unknown is not None and any(part.first.unknown):
                above.append(Text("underlined: unknown to the model ([UNK])", style="dim"))
        blocks += [*above, Text()] if above else []
        blocks += _sentences(part) if part.first.level == "token" else [_Pictures(part)]
        lines = remarks(part.explanations)
        blocks += [*map(_note, lines), Text()] if lines else []
    return Group(*blocks)


def _note(line: str) -> Line:
    return Line(line, "yellow" if line.startswith("warning: ") else "dim")


def _sentences(part: Section) -> Iterator[RenderableType]:
    """Yield the maps of a text: for each class the question, then the name of each method and its words."""
    for named, rows in part.columns:
        yield Line(heading(named))
        for name, e in rows:
            note = colours.scale_of(e).note
            yield from (Line(name, "dim"), Text(f"({note})") if note else _Sentence(e), Text())


@dataclass(frozen=True)
class _Pictures:
    """A row for each method: in the first the picture, if there are colours; then the maps, each below its question."""

    part: Section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        part, count, coloured = self.part, len(self.part.targets) + 1, not colourless(console)
        wide = min(console.width, max(24, min(40, console.width // count - 2)))  # cells of a picture
        picture, blocks = base(part.first), list[RenderableType]()
        if coloured and picture is not None:
            blocks.append(Group(Text("Input\n", style="bold"), _Pixels(np.asarray(picture.convert("RGB")), wide)))
        for name, row in zip(part.methods, part.cells, strict=True):
            for e in (e for e in row if e is not None):
                if note := colours.scale_of(e).note:
                    map_: RenderableType = Text(f"({note})")
                elif coloured and drawable(e):
                    bar = _bar(*bar_labels(e), colours.ramp(colours.scale_of(e), 8))
                    map_ = Group(_Pixels(overlay(e, longest=640), wide), bar)
                else:
                    map_ = _shades(e, options.max_width)
                blocks.append(Group(Line(heading(e)), Line(name, "dim"), map_, Text()))
            yield Columns(blocks, padding=(0, 2))
            blocks = []


@dataclass(frozen=True)
class _Pixels:
    """A picture ``[H, W, 3]`` as lines of ``wide`` cells of two pixels each, the upper as text colour."""

    pixels: Any
    wide: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        high = max(1, round(self.wide * self.pixels.shape[0] / self.pixels.shape[1] / 2))
        resized = Image.fromarray(self.pixels).resize((self.wide, 2 * high), Image.Resampling.BOX)
        small = np.asarray(resized).astype(int)
        for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
            line = Text(no_wrap=True)
            for ink, background in zip(upper, lower, strict=True):
                line.append("▀", style=f"{colours.code(ink)} on {colours.code(background)}")
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wide = min(options.max_width, self.wide)
        return Measurement(wide, wide)


def _shades(e: Explanation, room: int) -> RenderableType:
    """Return a map as shades, at most ``room`` cells wide, "-" before negative scores, with its five strongest patches
    or pixels; list patches without a grid."""
    if not drawable(e):
        return Line("\n".join(_listing(e)), "")
    cells = array(e.scores[0]).reshape(e.grid or e.scores.shape[-2:])
    # two maps of pixels fit side by side in 80 columns
    step = -(-cells.shape[1] // max(4, min(room // 2, 18 if e.level == "pixel" else 37)))
    if step > 1:
        cells = np.asarray(Image.fromarray(cells.astype(np.float32)).reduce(step))
    scale = colours.scale(cells, signed=colours.scale_of(e).signed)
    rows = [
        "".join((("-" if v < 0 and round(abs(v) * 4) else "") + 2 * _SHADES[round(abs(v) * 4)])[:2] for v in row)
        for row in scale.unit(cells).tolist()
    ]
    remark = f" (means of {step} x {step})" if step > 1 else ""
    lines = [" to ".join(_legend(e, scale)) + remark]
    lines += [f"{format_score(score):>10}  {name}" for name, score in strongest(e)[:5]]
    return Constrain(Group(Line("\n".join(rows), ""), Line("\n".join(lines), "dim")), max(38, 2 * cells.shape[1]))


@dataclass(frozen=True)
class Line:
    """A text in one style, in ASCII for a console without Unicode."""

    text: str
    style: str = "bold"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(_ascii(self.text, options), style=self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(_ascii(self.text, options)))


@dataclass(frozen=True)
class _Sentence:
    """Words on their colours; a listing with bars on a console without colours."""

    e: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if colourless(console):
            yield Line("\n".join(_listing(self.e)), "")
            return
        pieces, rest = words(self.e)
        cut = truncated_parts(self.e)
        text = Text(overflow="fold")
        for part in (part for part in cut if part.before):
            text.append(f"[{part.label}] ", style=_TRUNCATED)
        for piece in pieces:
            text.append(visible(piece.gap, keep="\n"))
            mark = "underline " if piece.unknown else ""
            background = colours.code(colours.background(piece.unit, piece.signed))
            text.append(visible(piece.text), style=f"{mark}{colours.INK} on {background}")
        text.append(visible(rest.rstrip(), keep="\n"))
        if (special := special_tokens(self.e)) is not None:
            text.append(f" [{special.text}]", style=_MUTED)
        for part in (part for part in cut if not part.before):
            text.append(f" [{part.label}]", style=_TRUNCATED)
        # black on white in every terminal, so that white always means 0
        yield Padding(text, (0, 1), style=f"{colours.INK} on {colours.PAGE}")
        scale = colours.scale_of(self.e)
        yield _bar(*_legend(self.e, scale), colours.ramp(scale, 13, words=True))


def _legend(e: Explanation, scale: colours.Scale) -> tuple[str, str]:
    """Return the score and the meaning at both ends of a scale."""
    (low, high), (against, favour) = scale.ends, legend_labels(e)
    return f"{against} {low}".lstrip(), f"{high} {visible(favour)}"


def _bar(low: str, high: str, ramp: Iterable[colours.Bytes]) -> Text:
    """Return a small colour bar between the labels of its ends."""
    bar = Text(f"{low} ".lstrip(), style="dim")
    for colour in ramp:
        bar.append(" ", style=f"not dim on {colours.code(colour)}")
    return bar.append(f" {high}")


def colourless(console: Console) -> bool:
    """Return True if the console shows no colours, or has no characters but ASCII to show them with."""
    return console.color_system is None or console.no_color or console.options.ascii_only


def _ascii(text: str, options: ConsoleOptions) -> str:
    if not options.ascii_only:
        return text
    plain = text.translate(str.maketrans(_SHADES + "“”·", _ASCII + '""-')).replace("…", "...")
    return plain.encode("ascii", "backslashreplace").decode()


# -- methods -------------------------------------------------------------------------------------------------------
def facts(method: Method) -> dict[str, Any]:
    """Return the public facts of a method as JSON values; defaults without a JSON form become text."""
    settings = json.loads(json.dumps(dict(method.settings), default=str))
    return {**{name: getattr(method, name) for name in _FACTS}, "settings": settings}


def catalogue(methods: Sequence[tuple[Mapping[str, Any], bool]]) -> Table:
    """Return a table of methods, recommended ones first, then by family.

    Args:
        methods: (:func:`facts`, whether scores have a sign) of each.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="center")
    table.add_column()
    table.add_column(style="dim")
    table.add_row("  method", "sign", "what a score is", "note", style="dim")
    listed = {facts["name"]: (facts, signed) for facts, signed in methods}
    for title, names in grouped({name: facts["family"] for name, (facts, _) in listed.items()}).items():
        table.add_row(Text(f"\n{title}", style="bold"))
        for facts, signed in map(listed.__getitem__, names):
            reads = {"both": "", "image": "pictures only", "text": "text only"}[facts["modality"]]
            limits = ", ".join(filter(None, (reads, "" if facts["class_specific"] else "class-agnostic")))
            table.add_row(Text(f"  {facts['name']}"), "±" if signed else "", Text(facts["summary"]), limits)
    return table


def describe(method: Mapping[str, Any], *, signed: bool) -> Group:
    """Return the description of a method; ``signed``: whether its scores have a sign by default."""
    reads = {"both": "pictures and text", "image": "pictures", "text": "text"}[method["modality"]]
    scope = "for the class asked" if method["class_specific"] else "the same for every class"
    scope += ", with a sign" if signed else ", without a sign"
    settings = "\n".join(f"{name} = {value!r}" for name, value in method["settings"].items()) or "none"
    rows = [("family", method["family"]), ("explains", reads), ("scores", f"{method['level']}; {scope}"),
            ("published", method["citation"]), ("settings", settings)]  # fmt: skip
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return Group(Text(method["name"], style="bold"), Text(method["summary"]), Text(), table)
