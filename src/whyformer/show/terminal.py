"""Explanations and methods in the terminal: plain text for ``print``, and colours with rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whyformer.defaults import grouped
from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import Section, by_input, sections
from whyformer.show.painting import base, drawable, overlay
from whyformer.show.words import (
    Word,
    bar_labels,
    format_score,
    heading,
    input_notes,
    is_further,
    legend_labels,
    method_name,
    notes,
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
    """Return each sample as text: its top classes (if any), then its strongest features with scores, in order."""
    parts = []
    for i, sample in enumerate(e):
        head = [f"sample {i + 1} of {len(e)}"] if len(e) > 1 else []
        for part in by_input(sample):
            title = f"{heading(part)} ({visible(method_name(part))}):"
            above = [] if is_further(part) else [*head, *([top_classes(part, top), ""] if top else [])]
            parts.append("\n".join([*above, title, *_listing(part), *notes([part])]))
    return "\n\n".join(parts)


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
    """Return a line for each of the strongest features of a sample, in order, with a bar."""
    scale = colours.scale_of(e)
    if scale.note is not None:
        return [f"  ({scale.note})"]
    if e.level == "token":
        pieces = words(e)[0]
        scores = [word.score for word in pieces]
        sound, worded = e.sounds is not None, e.offsets is not None and e.texts is not None
        kind, limit = ("stretches of time" if sound else "words" if worded else "tokens"), _ROWS
    else:
        scores = array(e.scores[0]).reshape(-1).tolist()
        kind, limit = ("patches" if e.level == "patch" else "pixels"), 5
    strongest = sorted(range(len(scores)), key=lambda i: -abs(scores[i]))[:limit]
    lines = []
    for i in sorted(strongest) if e.level == "token" else strongest:
        text = _label(pieces[i]) if e.level == "token" else position_name(e, i)
        bar = ("-" if scores[i] < 0 else "█") * round(abs(float(scale.unit(np.array(scores[i])))) * _BAR)
        lines.append(f"  {format_score(scores[i]):>10}  {bar:<{_BAR}}  {fitted(text, 46)}")
    if len(scores) > limit:
        lines.append(f"  ({limit} of {len(scores)} {kind} shown)")
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
    shown: list[RenderableType] = []
    for part in sections(explanations, tolerance=_EXACT):
        if top and not is_further(part.first):
            shown.append(Text(top_classes(part.first, top)))
            shown += [Text(line, style="yellow") for line in input_notes([part.first])]
            if part.first.unknown is not None and any(part.first.unknown):
                shown.append(Text("underlined: unknown to the model ([UNK])", style="dim"))
            shown.append(Text())
        shown += _sentences(part) if part.first.level == "token" else [_Pictures(part)]
        lines = remarks(part.explanations)
        shown += [Text(line, style="yellow" if line.startswith("warning: ") else "dim") for line in lines]
        shown += [Text()] if lines else []
    return Group(*shown)


def _sentences(part: Section) -> Iterator[RenderableType]:
    """Yield the maps of a text: for each class the question, then the name of each method and its words."""
    for named, rows in part.columns:
        yield _Line(heading(named))
        for name, e in rows:
            yield from (_Line(name, "dim"), _map(e), Text())


@dataclass(frozen=True)
class _Pictures:
    """A row for each method: in the first the picture, if there are colours; then the maps, each below its question."""

    part: Section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        part, count = self.part, len(self.part.targets) + 1
        picture = None if colourless(console) else base(part.first)
        blocks: list[RenderableType] = [] if picture is None else [_Input(np.asarray(picture.convert("RGB")), count)]
        for name, row in zip(part.methods, part.cells, strict=True):
            maps = (e for e in row if e is not None)
            blocks += [Group(_Line(heading(e)), _Line(name, "dim"), _map(e, count), Text()) for e in maps]
            yield Columns(blocks, padding=(0, 2))
            blocks = []


def _map(e: Explanation, count: int = 1) -> RenderableType:
    """Render the map of a sample: coloured words, or the map on one of ``count`` pictures in a row."""
    if (note := colours.scale_of(e).note) is not None:
        return Text(f"({note})")
    return _Sentence(e) if e.level == "token" else _Blocks(e, count)


@dataclass(frozen=True)
class _Line:
    """A line of a title, in ASCII for a console without Unicode."""

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
            yield Text(_ascii("\n".join(_listing(self.e)), options))
            return
        pieces, rest = words(self.e)
        cut = truncated_parts(self.e)
        text = Text(overflow="fold")
        for part in (part for part in cut if part.before):
            text.append(f"[{part.label}] ", style=_TRUNCATED)
        for piece in pieces:
            text.append(visible(piece.gap, keep="\n"))
            mark = "underline " if piece.unknown else ""
            background = on_background(colours.background(piece.unit, piece.signed))
            text.append(visible(piece.text), style=f"{mark}{colours.INK} {background}")
        text.append(visible(rest.rstrip(), keep="\n"))
        if (special := special_tokens(self.e)) is not None:
            text.append(f" [{special.text}]", style=_MUTED)
        for part in (part for part in cut if not part.before):
            text.append(f" [{part.label}]", style=_TRUNCATED)
        # black on white in every terminal, so that white always means 0
        yield Padding(text, (0, 1), style=f"{colours.INK} on {colours.PAGE}")
        scale = colours.scale_of(self.e)
        yield _bar(*_legend(self.e, scale), colours.ramp(scale, 13, words=True))


@dataclass(frozen=True)
class _Input:
    """The picture ``[H, W, 3]`` without its map, one of ``count`` in a row."""

    pixels: Any
    count: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("Input\n", style="bold")
        yield from _half_blocks(self.pixels, _cells_wide(console, self.count))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wide = min(options.max_width, _cells_wide(console, self.count))
        return Measurement(wide, wide)


def _cells_wide(console: Console, count: int) -> int:
    """Return the width in cells of each of ``count`` pictures in a row: 24 to 40, as room permits."""
    return min(console.width, max(24, min(40, console.width // count - 2)))


def _half_blocks(pixels: Any, wide: int) -> Iterator[Text]:
    """Yield a picture ``[H, W, 3]`` as lines of ``wide`` cells of two pixels each, the upper as text colour."""
    high = max(1, round(wide * pixels.shape[0] / pixels.shape[1] / 2))
    small = np.asarray(Image.fromarray(pixels).resize((wide, 2 * high), Image.Resampling.BOX)).astype(int)
    for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        line = Text(no_wrap=True)
        for ink, background in zip(upper, lower, strict=True):
            line.append("▀", style="rgb({},{},{}) ".format(*ink) + on_background(background))
        yield line


@dataclass(frozen=True)
class _Blocks:
    """The map on its picture; shades on a console without colours, with "-" before negative scores."""

    e: Explanation
    count: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if drawable(self.e) and not colourless(console):
            yield from _half_blocks(overlay(self.e, longest=640), _cells_wide(console, self.count))
            yield _bar(*bar_labels(self.e), colours.ramp(colours.scale_of(self.e), 8))
            return
        cells, remark = self._cells(options.max_width // 2)
        if cells is None:
            yield Text(_ascii("\n".join(_listing(self.e)), options))
            return
        scale = colours.scale(cells, signed=colours.scale_of(self.e).signed)
        for row in scale.unit(cells).tolist():
            shades = (("-" if v < 0 and round(abs(v) * 4) else "") + 2 * _SHADES[round(abs(v) * 4)] for v in row)
            yield Text(_ascii("".join(cell[:2] for cell in shades), options), no_wrap=True)
        yield Text(" to ".join(_legend(self.e, scale)) + remark, style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        if drawable(self.e) and not colourless(console):
            wide = _cells_wide(console, self.count)
        else:
            cells, _ = self._cells(options.max_width // 2)
            wide = options.max_width if cells is None else max(28, 2 * cells.shape[1])
        return Measurement(min(options.max_width, wide), min(options.max_width, wide))

    def _cells(self, limit: int) -> tuple[np.ndarray[Any, Any] | None, str]:
        """Return (the map in at most ``limit`` columns, a note on its cells); None for patches without a grid."""
        scores = array(self.e.scores[0])
        if not drawable(self.e):
            return None, ""
        if self.e.level == "patch":
            scores = scores.reshape(self.e.grid or ())
        # two maps of pixels fit side by side in 80 columns
        limit = max(4, min(limit, 18 if self.e.level == "pixel" else 37))
        step = -(-scores.shape[1] // limit)
        if step == 1:
            return scores, ""
        means = Image.fromarray(scores.astype(np.float32)).reduce(step)
        return np.asarray(means), f" (means of {step} x {step})"


def _legend(e: Explanation, scale: colours.Scale) -> tuple[str, str]:
    """Return the score and the meaning at both ends of a scale."""
    (low, high), (against, favour) = scale.ends, legend_labels(e)
    return f"{against} {low}".lstrip(), f"{high} {visible(favour)}"


def _bar(low: str, high: str, ramp: Iterable[colours.Bytes]) -> Text:
    """Return a small colour bar between the labels of its ends."""
    bar = Text(f"{low} ".lstrip(), style="dim")
    for colour in ramp:
        bar.append(" ", style=f"not dim {on_background(colour)}")
    return bar.append(f" {high}")


def on_background(colour: Sequence[int]) -> str:
    """Return the style of text on a colour."""
    return "on rgb({},{},{})".format(*colour)


def colourless(console: Console) -> bool:
    """Return True if the console shows no colours."""
    return console.color_system is None or console.no_color


def _ascii(text: str, options: ConsoleOptions) -> str:
    if not options.ascii_only:
        return text
    plain = text.translate(str.maketrans(_SHADES + "“”·", _ASCII + '""-')).replace("…", "...")
    return plain.encode("ascii", "backslashreplace").decode()


# -- methods -------------------------------------------------------------------------------------------------------
def facts(method: Method) -> dict[str, Any]:
    """Return the public facts of a method as JSON values; defaults without a JSON form become text."""
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
    summary = Padding(Text(method["summary"]), (0, 0, 1, 0))
    return Group(Text(method["name"], style="bold"), summary, _table(rows, "dim"))
