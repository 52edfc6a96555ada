"""HTML of explanations: Jinja templates with autoescape, and the functions that fill them.

Documents of explanations have no script and request nothing. All text in a template is escaped, with control
characters as in :func:`whyformer.show.words.visible`. No other module writes HTML.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whyformer.explanation.display import format_settings
from whyformer.show import colours, layout, painting, typeface, words
from whyformer.show.look import Look

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

PIXELS = 672
"""Longest side of a picture in a page: sharp at 260 to 340 CSS pixels on any screen, and a small file."""
_LONG, _PARTS = 120, 100  # words from which a text has a minimap, and the most parts of a minimap


def fragment(e: Explanation, **look: Any) -> str:
    """Return a card for each sample, for notebooks: map, scale and top classes, with inline styles only.

    Args:
        **look: options of :class:`~whyformer.show.look.Look`, for pictures.
    """
    style = Look.of(look)
    parts = [part for sample in layout.samples(e) for part in layout.by_input(sample, style.smooth)]
    return render("cards.html", samples=parts, look=style)


def page(explanations: Explanation | Iterable[Explanation], title: str = "whyformer", **look: Any) -> str:
    """Return an HTML document: for pictures a table of methods and classes, for texts a line for each method under each
    class."""
    style = Look.of(look)
    return render("page.html", sections=layout.sections(explanations, style.smooth), title=title, look=style)


def render(template: str, **facts: Any) -> str:
    """Fill a template of this folder with facts; all but :class:`markupsafe.Markup` are escaped."""
    return _environment().get_template(template).render(**facts)


def asset(name: str) -> Markup:
    """Fill a style sheet or script of this folder."""
    return Markup(render(name))


def variables(*, dark: bool = False) -> Markup:
    """Return the colours of a light or dark page as CSS variables. Hues are bytes, for ``rgb(var(--for)/.5)``;
    ``--strong`` is their largest opacity, ``--night`` the filter of figures with a white background."""
    hues = {name: "{} {} {}".format(*(hue.dark if dark else hue.light)) for name, hue in colours.HUES.items()}
    tones = {name: pair[dark] for name, pair in colours.TONES.items()}
    more = {"strong": ".9", "night": "invert(.91) hue-rotate(180deg)"} if dark else {"strong": ".7", "night": "none"}
    return Markup("".join(f"--{name}:{value};" for name, value in {**hues, **tones, **more}.items()))


def faces() -> Markup:
    """Return the typeface as CSS rules that include its files, for a document."""
    rule = "@font-face{{font-family:{};font-weight:{};src:url({})}}".format
    rules = [
        rule(typeface.NAME, weight, data_uri(face.with_suffix(".woff2").read_bytes(), "font/woff2"))
        for weight, face in typeface.FACES.items()
    ]
    return Markup("".join(rules))


def data_uri(data: bytes, kind: str = "image/png") -> Markup:
    """Return a file as a ``data:`` address."""
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")


# -- functions of templates ---------------------------------------------------------------------------------------
def digest(script: str) -> Markup:
    """Return the SHA-256 of a script, by which the policy of a document names it."""
    return Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())


def plain(e: Explanation) -> Markup | None:
    """Return the address of the picture without its map."""
    picture = painting.plain(e, PIXELS)
    return None if picture is None else data_uri(painting.encoded(picture))


def overlaid(e: Explanation, look: Look) -> Markup:
    """Return the address of the map on its picture."""
    return data_uri(painting.encoded(painting.overlay(e, longest=PIXELS, **asdict(look))))


def gradient(e: Explanation, look: Look | None = None) -> str:
    """Return the colours of a colour bar as a CSS gradient."""
    steps = colours.ramp(colours.scale_of(e), 9, look.cmap if look else None, words=e.level == "token")
    return f"linear-gradient(to right,{','.join(map(colours.code, steps))})"


def minimap(pieces: Sequence[words.Word]) -> list[tuple[int, str, words.Word]]:
    """Return the parts of a long text: (index of the first word, label, strongest word); empty for a short text."""
    if len(pieces) < _LONG:
        return []
    cells = []
    bounds = np.linspace(0, len(pieces), min(_PARTS, len(pieces) // 4) + 1).astype(int).tolist()
    for begin, end in pairwise(bounds):
        top = max(pieces[begin:end], key=lambda word: abs(word.unit))
        label = f"words {begin + 1} to {end}, strongest {top.value} · {words.short(top.text, 40)}"
        cells.append((begin, label, top))
    return cells


def direction(pieces: Sequence[words.Word]) -> str:
    """Return the direction of a text as the value of ``dir``."""
    return "rtl" if words.right_to_left("".join(word.text for word in pieces)) else "ltr"


def curves(figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return SVG points (x 34 to 312, y 144 to 8) of a deletion curve, of the mean of random maps and of the band of
    random maps, with labels of the vertical axis (0 to 1, except for a regression); None without a finite curve."""
    lines = {name: np.array(figures[name], dtype=float) for name in ("curve", "mean", "lowest", "highest")}
    if not all(np.isfinite(line).all() for line in lines.values()):
        return None
    low, high = 0.0, 1.0
    if figures.get("numeric"):
        low, high = min(line.min() for line in lines.values()), max(line.max() for line in lines.values())

    def points(line: Any) -> list[str]:
        x, y = np.linspace(34, 312, len(line)), 144 - 136 * np.clip((line - low) / ((high - low) or 1), 0, 1)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]

    band = points(lines["highest"]) + points(lines["lowest"])[::-1]
    ticks = [f"{n:.3g}" for n in (low, (low + high) / 2, high)]
    joined = {name: " ".join(points(lines[name])) for name in ("curve", "mean")}
    return {**joined, "band": " ".join(band), "ticks": ticks}


_FUNCTIONS = (
    asset, colours.background, colours.code, colours.legend, colours.scale_of, curves, digest, direction, faces,
    format_settings, gradient, minimap, overlaid, painting.base, painting.drawable, plain, variables,
    words.agnostic, words.format_score, words.heading, words.input_notes, words.is_further, words.legend_labels,
    words.measured_target, words.method_name, words.method_notes, words.opposites, words.percent, words.predictions,
    words.probability, words.special_tokens, words.target_name, words.truncated_parts, words.trust_figures, words.value,
    words.warnings_of, words.words,
)  # fmt: skip


@cache
def _environment() -> Environment:
    # finalize comes before escaping; both skip Markup
    environment = Environment(
        loader=PackageLoader("whyformer.show.html"), autoescape=lambda name: not (name or "").endswith(".py.txt"),
        undefined=StrictUndefined, finalize=_visible, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals.update({function.__name__: function for function in _FUNCTIONS})
    environment.globals.update(HUES=colours.HUES, LIGHT=colours.LIGHT, FAMILIES=",".join(typeface.PAGES))
    return environment


def _visible(value: Any) -> Any:
    return words.visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
