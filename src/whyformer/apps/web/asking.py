"""What a visitor has entered, read from whatever a browser sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whyformer.apps import DEFAULT_MODEL
from whyformer.errors import InputError
from whyformer.show.look import OPACITY


@dataclass(frozen=True)
class Asked:
    """What the visitor has entered: the values of the page's controls, in their order there."""

    kind: str
    picture: str | None
    sentence: str
    model: str
    methods: list[str]
    classes: list[str]
    truncate: bool
    look: dict[str, Any]
    settings: Any = ""

    @classmethod
    def read(cls, entered: Sequence[Any]) -> Asked:
        """From what a browser sent, which may be anything."""
        kind, picture, sentence, model, methods, classes, truncate, style, opacity, keep, settings = entered
        if kind not in DEFAULT_MODEL:
            raise InputError("choose a picture or a sentence")
        path = picture.get("path") if isinstance(picture, dict) else None
        names, wanted = (
            # a number that came as a number is an index, whatever the classes are called
            [f"#{v}" if isinstance(v, int) else str(v) for v in c] if isinstance(c, list) else []
            for c in (methods, classes)
        )
        return cls(
            kind, path, sentence if isinstance(sentence, str) else "", str(model or ""), names, wanted, bool(truncate),
            look_of(style, opacity, keep), settings,
        )  # fmt: skip


def look_of(style: Any, opacity: Any, keep: Any) -> dict[str, Any]:
    """Options of :class:`whyformer.show.look.Look` from three controls, which may hold anything."""
    if style == "kept" and isinstance(keep, int | float):
        return {"keep": min(1.0, max(0.01, float(keep)))}
    given = min(1.0, max(0.0, float(opacity))) if isinstance(opacity, int | float) else OPACITY
    look: dict[str, Any] = {} if given == OPACITY else {"opacity": given}
    return look | ({"contours": 4} if style == "contours" else {})
