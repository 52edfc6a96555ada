"""The values of the page's controls, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from whyformer.errors import InputError
from whyformer.options import DEFAULTS, NAMES, PER_INPUT, Options, kind_of
from whyformer.show.look import OPACITY

FIELDS = {
    "image": ("picture", "classes", "target"),
    "text": ("sentence", "pair", "truncate", "classes", "target"),
    "answer": ("picture", "sentence", "length", "chat"),
}
"""Kinds of explanations, and the controls of their inputs."""
OPTIONS = tuple(name for name in PER_INPUT if not any(name in names for names in FIELDS.values()))
"""The options of all kinds of explanations."""
STYLES = ("colours", "contours", "kept")


@dataclass(frozen=True)
class PageInput(Options):
    """The values of :data:`CONTROLS`, with their defaults; among them the options of the model.

    Attributes:
        picture: path of the picture.
        pair: the second text, or nothing.
        target: a written target that reads a row of the output, in which ``classes`` are, or nothing.
        style, opacity, keep: how maps on pictures are drawn.
        number: how often the input had been changed; the page shows results for the newest input only.
        settings: values of the form of settings, as a browser sent them.
    """

    kind: str
    picture: str | None = None
    sentence: str = ""
    pair: str = ""
    model: str = ""
    methods: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    target: str = ""
    style: str = "colours"
    opacity: float = OPACITY
    keep: float = 0.2
    length: int = 16
    chat: bool = False
    number: int = 0
    settings: Any = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        """The input and the model. Results hold for one subject."""
        picture, sentence = None if self.kind == "text" else self.picture, "" if self.kind == "image" else self.sentence
        return self.kind, picture, sentence, self.pair, self.model, self.truncate, self.target

    @property
    def options(self) -> Options:
        return Options(**self.named)

    @property
    def controls(self) -> dict[str, Any]:
        """The values of the controls by their names."""
        return {name: getattr(self, name) for name in CONTROLS}

    @property
    def look(self) -> dict[str, Any]:
        """Options of :class:`whyformer.show.look.Look` that differ from the defaults."""
        if self.style == "kept":
            return {"keep": self.keep}
        look: dict[str, Any] = {} if self.opacity == OPACITY else {"opacity": self.opacity}
        return look | ({"contours": 4} if self.style == "contours" else {})

    @classmethod
    def read(cls, entered: Mapping[str, Any]) -> PageInput:
        """Read the values that a browser sent, of any type, by the names of :data:`CONTROLS`."""
        names = ("kind", "picture", "sentence", "pair", "target", "length")
        kind, picture, sentence, pair, target, length = (entered[name] for name in names)
        if not isinstance(kind, str) or kind not in FIELDS:
            raise InputError("choose a picture, a sentence or an answer")
        methods, classes = (
            # a JSON number is an index, even if a class has a number as its name
            [f"#{v}" if isinstance(v, int) else str(v) for v in c] if isinstance(c, list) else []
            for c in (entered["methods"], entered["classes"])
        )
        return cls(
            kind,
            picture=picture.get("path") if isinstance(picture, dict) else None,
            sentence=sentence if isinstance(sentence, str) else "",
            pair=pair if kind == "text" and isinstance(pair, str) and pair.strip() else "",
            model=str(entered["model"] or ""),
            methods=methods,
            classes=classes,
            target=target.strip() if kind != "answer" and isinstance(target, str) else "",
            **{name: option_of(name, entered[name]) for name in PER_INPUT if name in (*FIELDS[kind], *OPTIONS)},
            **drawing_of(entered["style"], entered["opacity"], entered["keep"]),
            length=length if type(length) is int else 0,
            chat=bool(entered["chat"]),
            number=number_of(entered),
            settings=entered["settings"],
        )


CONTROLS = tuple(f.name for f in fields(PageInput) if f.name in PER_INPUT or f.name not in NAMES)
"""Names of the controls. The last two are added by the browser: the number of the input, and the settings of a form."""


def option_of(name: str, value: Any) -> Any:
    """Return the value of an option of the model, from a value of any type; the default for no value."""
    kind = kind_of(name)
    if kind is bool:
        return bool(value)
    if value in (None, ""):
        return getattr(DEFAULTS, name)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a {kind.__name__}, not {value!r}") from None


def number_of(entered: Mapping[str, Any]) -> int:
    """Return the number of the input, from a value of any type."""
    number = entered.get("number")
    return number if type(number) is int else 0


def drawing_of(style: Any, opacity: Any, keep: Any) -> dict[str, Any]:
    """Return the values of the three controls of the drawing, from values of any type."""
    shares = {"opacity": (opacity, 0.0), "keep": (keep, 0.01)}
    valid = {name: min(1.0, max(least, float(v))) for name, (v, least) in shares.items() if isinstance(v, int | float)}
    return {"style": style if style in STYLES else "colours", **valid}
