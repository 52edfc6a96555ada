"""What a visitor has entered, read from whatever a browser sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whyformer.errors import InputError
from whyformer.show.look import OPACITY

KINDS = {"image": "image", "text": "text", "answer": "both"}
"""What may be explained, and the kind of input of the model that does it where none was named."""


CONTROLS = (
    "kind", "picture", "sentence", "model", "methods", "classes", "truncate", "style", "opacity", "keep", "length",
    "chat", "settings",
)
"""The controls that hold what a visitor enters; the settings come last, as the browser sends them from a form."""


@dataclass(frozen=True)
class PageInput:
    """What the visitor has entered: the values of :data:`CONTROLS`."""

    kind: str
    picture: str | None
    sentence: str
    model: str
    methods: list[str]
    classes: list[str]
    truncate: bool
    look: dict[str, Any]
    length: int = 16
    chat: bool = False
    settings: Any = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        """The input and the model: of another one nothing that is shown holds."""
        picture, sentence = None if self.kind == "text" else self.picture, "" if self.kind == "image" else self.sentence
        return self.kind, picture, sentence, self.model, self.truncate

    @classmethod
    def read(cls, entered: Mapping[str, Any]) -> PageInput:
        """From what a browser sent, by the names of :data:`CONTROLS`, which may be anything."""
        kind, picture, sentence, length = (entered[name] for name in ("kind", "picture", "sentence", "length"))
        if not isinstance(kind, str) or kind not in KINDS:
            raise InputError("choose a picture, a sentence or an answer")
        path = picture.get("path") if isinstance(picture, dict) else None
        names, wanted = (
            # a number that came as a number is an index, whatever the classes are called
            [f"#{v}" if isinstance(v, int) else str(v) for v in c] if isinstance(c, list) else []
            for c in (entered["methods"], entered["classes"])
        )
        return cls(
            kind, path, sentence if isinstance(sentence, str) else "", str(entered["model"] or ""), names, wanted,
            bool(entered["truncate"]), look_of(entered["style"], entered["opacity"], entered["keep"]),
            length if type(length) is int else 0, bool(entered["chat"]), entered["settings"],
        )  # fmt: skip


def look_of(style: Any, opacity: Any, keep: Any) -> dict[str, Any]:
    """Options of :class:`whyformer.show.look.Look` from three controls, which may hold anything."""
    if style == "kept" and isinstance(keep, int | float):
        return {"keep": min(1.0, max(0.01, float(keep)))}
    given = min(1.0, max(0.0, float(opacity))) if isinstance(opacity, int | float) else OPACITY
    look: dict[str, Any] = {} if given == OPACITY else {"opacity": given}
    return look | ({"contours": 4} if style == "contours" else {})
