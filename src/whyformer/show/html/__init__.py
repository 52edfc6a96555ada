"""HTML, the only place that makes it: Jinja templates with autoescape, and the functions that fill them.

What is made of an explanation needs nothing else: no script, no style sheet, no request. All that is put into a
template is escaped, with control characters written out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from whyformer.show import colours, layout, painting, typeface, words
from whyformer.show.look import Look

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

PIXELS = 672
"""Longest side of a picture in a page: sharp at 260 to 340 CSS pixels on any screen, and still a small file."""
_LONG, _PARTS = 120, 100  # words from which a text has a mini-map, and its parts


def fragment(e: Explanation, **look: Any) -> str:
    """A card for each sample, for notebooks: the map, its scale, and the top classes; inline styles only.

    Args:
        **look: options of :class:`~whyformer.show.look.Look`, for pictures.
    """
    chosen = Look.of(look)
    shown = [part for sample in e for part in layout.by_input(sample, chosen.smooth)]
    return render("cards.html", samples=shown, look=chosen)


def page(explanations: Explanation | Iterable[Explanation], title: str = "whyformer", **look: Any) -> str:
    """A whole document: for pictures a table of methods x classes, for text one line a method under each class."""
    chosen = Look.of(look)
    return render("page.html", sections=layout.sections(explanations, chosen.smooth), title=title, look=chosen)


def render(template: str, **facts: Any) -> str:
    """A template of this folder, filled with facts; only :class:`markupsafe.Markup` among them is not escaped."""
    return _environment().get_template(template).render(**facts)


def asset(name: str) -> Markup:
    """A style sheet or a script of this folder, filled in."""
    return Markup(render(name))


def variables(*, dark: bool = False) -> Markup:
    """The colours of pages as CSS variables, on a light or a dark ground. Claims are bytes, ``rgb(var(--for)/.5)``;
    ``--strong`` is how opaque their strongest is, and ``--night`` the filter for pictures on white paper."""
    claims = {name: "{} {} {}".format(*(one.dark if dark else one.light)) for name, one in colours.CLAIMS.items()}
    tones = {name: pair[dark] for name, pair in colours.TONES.items()}
    more = {"strong": ".9", "night": "invert(.91) hue-rotate(180deg)"} if dark else {"strong": ".7", "night": "none"}
    return Markup("".join(f"--{name}:{value};" for name, value in {**claims, **tones, **more}.items()))


def faces() -> Markup:
    """The typeface as rules of a style sheet which hold its files, for a whole page."""
    rule = "@font-face{{font-family:{};font-weight:{};src:url({})}}".format
    rules = [
        rule(typeface.NAME, weight, data_uri(face.with_suffix(".woff2").read_bytes(), "font/woff2"))
        for weight, face in typeface.FACES.items()
    ]
    return Markup("".join(rules))


def data_uri(data: bytes, kind: str = "image/png") -> Markup:
    """The bytes of a file as an address that holds them."""
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")


# -- what a template may call --------------------------------------------------------------------------------------
def plain(e: Explanation) -> Markup | None:
    """The picture itself, of the size at which its maps are drawn."""
    picture = painting.base(e)
    if picture is None:
        return None
    high, wide = painting.drawn_size(e, 0, PIXELS)
    return data_uri(painting.encoded(picture.resize((wide, high), Image.Resampling.BICUBIC)))


def overlaid(e: Explanation, look: Look) -> Markup:
    """The map on its picture."""
    return data_uri(painting.encoded(painting.overlay(e, longest=PIXELS, **asdict(look))))


def gradient(e: Explanation, look: Look | None = None) -> str:
    """The colours of a colour bar, from left to right, as a CSS image."""
    steps = colours.ramp(colours.scale_of(e), 9, look.cmap if look else None, words=e.level == "token")
    return f"linear-gradient(to right,{','.join(map(colours.code, steps))})"


def minimap(pieces: Sequence[words.Word]) -> list[tuple[int, str, words.Word]]:
    """A long text in parts, each as its strongest word: (its first word, what is said of it, that word)."""
    if len(pieces) < _LONG:
        return []
    cells = []
    bounds = np.linspace(0, len(pieces), min(_PARTS, len(pieces) // 4) + 1).astype(int).tolist()
    for begin, end in pairwise(bounds):
        top = max(pieces[begin:end], key=lambda word: abs(word.unit))
        said = f"words {begin + 1} to {end}, strongest {top.value} · {words.short(top.text, 40)}"
        cells.append((begin, said, top))
    return cells


def way(pieces: Sequence[words.Word]) -> str:
    """The direction in which a text runs, as HTML names it."""
    return "rtl" if words.right_to_left("".join(word.text for word in pieces)) else "ltr"


def curves(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Points of a map's deletion curve, of the mean of random ones, and of the band that these fill, in an SVG's
    pixels (x 34 to 312, y 144 to 8), and the figures at the ends and in the middle of the upright axis, 0 to 1 but for
    a number; None where there is no curve."""
    lines = {name: np.array(found[name], dtype=float) for name in ("curve", "mean", "lowest", "highest")}
    if not all(np.isfinite(line).all() for line in lines.values()):
        return None
    low, high = 0.0, 1.0
    if found.get("numeric"):
        low, high = min(line.min() for line in lines.values()), max(line.max() for line in lines.values())

    def points(line: Any) -> list[str]:
        x, y = np.linspace(34, 312, len(line)), 144 - 136 * np.clip((line - low) / ((high - low) or 1), 0, 1)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]

    band = points(lines["highest"]) + points(lines["lowest"])[::-1]
    ticks = [f"{n:.3g}" for n in (low, (low + high) / 2, high)]
    joined = {name: " ".join(points(lines[name])) for name in ("curve", "mean")}
    return {**joined, "band": " ".join(band), "ticks": ticks}


_FUNCTIONS = (
    asset, colours.code, colours.ground, colours.legend, colours.scale_of, curves, faces, gradient, layout.written,
    minimap, overlaid, painting.base, painting.drawable, plain, way, words.agnostic, words.asides, words.claims,
    words.doubts, words.figure_of, words.followed, words.heading, words.measured, words.method_name, words.notes,
    words.probability, variables, words.folded, words.is_further, words.target_name, words.unread, words.value,
    words.values, words.words,
)  # fmt: skip


@cache
def _environment() -> Environment:
    # finalize comes before the escaping; both leave alone what is markup already
    made = Environment(
        loader=PackageLoader("whyformer.show.html"), autoescape=lambda name: not (name or "").endswith(".py.txt"),
        undefined=StrictUndefined, finalize=_visible, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.globals.update({function.__name__: function for function in _FUNCTIONS})
    made.globals.update(CLAIMS=colours.CLAIMS, LIGHT=colours.LIGHT, FAMILIES=",".join(typeface.PAGES))
    return made


def _visible(value: Any) -> Any:
    return words.visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
