"""The values of the page's controls, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whyformer.errors import InputError
from whyformer.options import Options
from whyformer.show.look import OPACITY

KINDS = {"image": "image", "text": "text", "answer": "both"}
"""Kinds of explanations, and the kind of input of their default models."""
FLAGS = ("truncate", "checkpoint")
"""The :class:`~whyformer.options.Options` that are controls."""
CONTROLS = (
    "kind", "picture", "sentence", "pair", "model", "methods", "classes", *FLAGS, "style", "opacity", "keep", "length",
    "chat", "number", "settings",
)
"""Names of the controls. The last two are added by the browser: the number of the input, and the settings of a form."""


@dataclass(frozen=True)
class PageInput:
    """The values of :data:`CONTROLS`.

    Attributes:
        pair: the second text, or nothing.
        number: how often the input had been changed; the page shows results for the newest input only.
    """

    kind: str
    picture: str | None
    sentence: str
    model: str
    methods: list[str]
    classes: list[str]
    options: Options
    look: dict[str, Any]
    length: int = 16
    chat: bool = False
    number: int = 0
    settings: Any = ""
    pair: str = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        """The input and the model. Results hold for one subject."""
        picture, sentence = None if self.kind == "text" else self.picture, "" if self.kind == "image" else self.sentence
        return self.kind, picture, sentence, self.pair, self.model, self.options.truncate

    @classmethod
    def read(cls, entered: Mapping[str, Any]) -> PageInput:
        """Read the values that a browser sent, of any type, by the names of :data:`CONTROLS`."""
        kind, picture, sentence, length = (entered[name] for name in ("kind", "picture", "sentence", "length"))
        pair = entered["pair"] if kind == "text" and isinstance(entered["pair"], str) else ""
        if not isinstance(kind, str) or kind not in KINDS:
            raise InputError("choose a picture, a sentence or an answer")
        path = picture.get("path") if isinstance(picture, dict) else None
        names, wanted = (
            # a JSON number is an index, even if a class has a number as its name
            [f"#{v}" if isinstance(v, int) else str(v) for v in c] if isinstance(c, list) else []
            for c in (entered["methods"], entered["classes"])
        )
        return cls(
            kind, path, sentence if isinstance(sentence, str) else "", str(entered["model"] or ""), names, wanted,
            Options(truncate=kind == "text" and bool(entered["truncate"]), checkpoint=bool(entered["checkpoint"])),
            look_of(entered["style"], entered["opacity"], entered["keep"]),
            length if type(length) is int else 0, bool(entered["chat"]), number_of(entered), entered["settings"],
            pair.strip(),
        )  # fmt: skip


def number_of(entered: Mapping[str, Any]) -> int:
    """Return the number of the input, from a value of any type."""
    number = entered.get("number")
    return number if type(number) is int else 0


def look_of(style: Any, opacity: Any, keep: Any) -> dict[str, Any]:
    """Options of :class:`whyformer.show.look.Look` from the values of three controls, of any type."""
    if style == "kept" and isinstance(keep, int | float):
        return {"keep": min(1.0, max(0.01, float(keep)))}
    share = min(1.0, max(0.0, float(opacity))) if isinstance(opacity, int | float) else OPACITY
    look: dict[str, Any] = {} if share == OPACITY else {"opacity": share}
    return look | ({"contours": 4} if style == "contours" else {})
