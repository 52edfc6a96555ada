"""Methods and settings as text, for the command line and benchmarks: ``name:key=value:key=value,name ...``."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from whyformer.errors import InputError


def parts(text: str, separator: str = ",") -> list[str]:
    """Split a text at separators outside of brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def value_of(text: str) -> Any:
    """Parse a value: JSON, a Python literal or text. ``None`` and ``null`` are None, ``none`` is a text."""
    text = text.strip()
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return {"true": True, "false": False}.get(text.casefold(), text)


def settings_in(texts: Iterable[str] | None, subject: str = "a setting") -> dict[str, Any]:
    """Parse settings that are written ``key=value``."""
    settings = {}
    for text in texts or ():
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise InputError(f"{subject} is written key=value, not '{text}'")
        settings[key.strip()] = value_of(value)
    return settings


def method_in(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name:key=value:key=value`` to the name and the settings of a method."""
    name, *settings = parts(text, ":") or [""]
    return name, settings_in(settings)
