"""Look up classes and tokens by index or name."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping
from typing import Any

from whyformer.errors import LONGEST, InputError


def class_index(wanted: Any, labels: Mapping[int, str] | None, classes: int | None = None) -> int:
    """Return the index of a class from an index or a name.

    An int is an index. Text is an index if it is a number (``"3"``), else a name or one of a class's comma-separated
    names, matched case-insensitively. ``"#3"`` is always an index, and text in quotes (``'"3"'``) is always a name.

    Args:
        wanted: index or name of the class.
        labels: class index -> name; None if the model names no classes.
        classes: number of classes; None if unknown.

    Raises:
        InputError: no such class, several classes of that name, or a number that also names another class.
    """
    if not isinstance(wanted, str):
        if isinstance(wanted, bool) or not hasattr(wanted, "__index__"):
            raise InputError(f"a class is an index or a name, not {wanted!r}")
        return in_range(operator.index(wanted), classes)
    text = wanted.strip()
    if text[:1] == "#" and _is_number(text[1:]):
        return in_range(int(text[1:]), classes)
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    matches = _named(text[1:-1] if quoted else text, labels or {})
    if _is_number(text):
        index = int(text)
        if any(other != index for other in matches):
            listed = ", ".join(f"{i} ({(labels or {})[i]})" for i in matches)
            raise InputError(
                f"'{text}' is ambiguous: it is the index of a class and the name of another, {listed}. "
                f"Write #{index} for the index, or '\"{text}\"' with the inner quotes for the name"
            )
        return in_range(index, classes)
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"{i} ({(labels or {})[i]})" for i in matches)
        raise InputError(f"'{wanted}' names several classes: {listed}. Pass the index")
    raise _unknown_class(text[1:-1] if quoted else text, labels or {})


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 20


def _named(name: str, labels: Mapping[int, str]) -> list[int]:
    """Return the classes with that full name, else those with it among their comma-separated names."""
    query = name.strip().casefold()
    exact = [i for i, label in labels.items() if label.casefold() == query]
    return exact or [i for i, label in labels.items() if query in [p.strip().casefold() for p in label.split(",")]]


def in_range(index: int, classes: int | None, words: bool = False) -> int:
    if index < 0 or (classes is not None and index >= classes):
        if words and classes:
            raise InputError(f"token {index} is out of range: the vocabulary has {classes} tokens, 0 to {classes - 1}")
        known = f"the model has {classes} classes, 0 to {classes - 1}" if classes else "classes count from 0"
        raise InputError(f"class {index} is out of range: {known}")
    return index


def _unknown_class(name: str, labels: Mapping[int, str]) -> InputError:
    pool = dict.fromkeys(part.strip() for label in labels.values() for part in label.split(","))
    name = name if len(name) <= LONGEST else name[:LONGEST] + "…"
    query = name.casefold().strip()
    as_words = [part for part in pool if query and re.search(rf"\b{re.escape(query)}\b", part.casefold())]
    inside = [part for part in pool if query in part.casefold()]
    candidates = [*as_words, *difflib.get_close_matches(query, pool, 3), *inside]  # "cat": tiger cat before crate
    close = list(dict.fromkeys(candidates))[: max(3, min(len(as_words), 6))]
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    return InputError(
        f"the model has no class '{name}'.{hint}" + ("" if labels else " Its config names no classes: pass an index.")
    )


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text's tokens.

    A text in quotes is used without them. If the text is the exact name of a token in the vocabulary, return its id
    alone.
    """
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    text = text[1:-1] if quoted else text
    ids = continuation_ids(tokenizer, text)
    known = tokenizer.get_vocab() if len(ids) != 1 else {}
    return [int(known[text])] if text in known else ids


def continuation_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text's tokens as the continuation of another text.

    A leading space separates the two texts; tokenizers that prepend a space to every text would count it twice.
    """

    def encoded(part: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(part, add_special_tokens=False)]

    for before in ("a", ".") if text[:1] == " " else ():
        first, whole = encoded(before), encoded(before + text)
        if whole[: len(first)] == first and len(whole) > len(first):
            return whole[len(first) :]
    return encoded(text)
