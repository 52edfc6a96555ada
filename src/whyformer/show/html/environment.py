"""The environment of the templates: all that is put into one is escaped, with control characters written out."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whyformer.show import colours, painting, words
from whyformer.show.html import parts

# what a template may call
_FUNCTIONS = (
    colours.code, colours.ground, colours.scale_of, painting.base, painting.drawable, parts.gradient, parts.minimap,
    parts.overlaid, parts.plain, parts.way, words.agnostic, words.figure_of, words.heading, words.probability,
    words.target_name, words.words,
)  # fmt: skip


def render(template: str, **facts: Any) -> str:
    """A template of this folder, filled with facts; only :class:`markupsafe.Markup` among them is not escaped."""
    return _environment().get_template(template).render(**facts)


def asset(name: str) -> Markup:
    """A style sheet or a script among the templates, as it stands."""
    return Markup((resources.files("whyformer.show.html") / "templates" / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    # finalize comes before the escaping; both leave alone what is markup already
    made = Environment(
        loader=PackageLoader("whyformer.show.html"), autoescape=True, undefined=StrictUndefined, finalize=_visible,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.globals.update({function.__name__: function for function in (*_FUNCTIONS, asset)})
    return made


def _visible(value: Any) -> Any:
    return words.visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
