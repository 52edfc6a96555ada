"""Look up classes and tokens by index or name."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from textwrap import shorten
from typing import Any

from torch import Tensor

from whyformer.errors import LONGEST, InputError

_FEW = 5
"""Number of texts that an error lists."""


def class_index(name_or_index: Any, labels: Mapping[int, str] | None, classes: int | None = None) -> int:
    """Return the index of a class from an index or a name.

    An int is an index. Text is an index if it is a number (``"3"``), else a name or one of a class's comma-separated
    names, matched case-insensitively. ``"#3"`` is always an index, and text in quotes (``'"3"'``) is always a name.

    Args:
        name_or_index: name or index of the class.
        labels: class index -> name; None if the model names no classes.
        classes: number of classes; None if unknown.

    Raises:
        InputError: no such class, several classes of that name, or a number that also names another class.
    """
    if not isinstance(name_or_index, str):
        if isinstance(name_or_index, bool) or not hasattr(name_or_index, "__index__"):
            raise InputError(f"a class is an index or a name, not {name_or_index!r}")
        return in_range(operator.index(name_or_index), classes)
    names = labels or {}
    return _matching_index(name_or_index, names, classes, lambda name: _named(name, names), _unknown_class)


def text_index(target: str, texts: Sequence[str], tokenizer: Any) -> int:
    """Return the index of a text among the texts that are the classes of a sample.

    Numbers and quotes are read as in :func:`class_index`; any other text must have the tokens of one of the texts.

    Args:
        target: index or text.
        texts: the texts, as returned by :func:`distinct_texts`.
        tokenizer: the tokenizer that they were read by.

    Raises:
        InputError: no such text, several such texts, or a number that also is another text.
    """

    def equal(name: str) -> list[int]:
        content = tokenizer.decode(tokenizer.encode(name, add_special_tokens=False)).strip()
        return [i for i, text in enumerate(texts) if text in (name, content)]

    return _matching_index(target, dict(enumerate(texts)), len(texts), equal, _unknown_text)


def distinct_texts(tokenizer: Any, ids: Tensor, special: Tensor) -> list[str]:
    """Return the content of texts ``[T, N]``, without special tokens and without the parts that all of them share, such
    as the question before each answer of multiple choice.

    Args:
        ids: token ids.
        special: ``[T, N]`` True at special tokens, which separate the parts.
    """
    parts = []
    for row in zip(ids.tolist(), special.tolist(), strict=True):
        runs = groupby(zip(*row, strict=True), lambda token: token[1])
        parts.append([[number for number, _ in run] for is_special, run in runs if not is_special])
    if len(parts) > 1 and len(set(map(len, parts))) == 1:
        columns = list(zip(*parts, strict=True))
        differing = [column for column in columns if any(part != column[0] for part in column)] or columns[-1:]
        parts = [list(row) for row in zip(*differing, strict=True)]
    return [" ".join(tokenizer.decode(part).strip() for part in row) for row in parts]


def _matching_index(
    target: str,
    labels: Mapping[int, str],
    classes: int | None,
    named: Callable[[str], list[int]],
    unknown: Callable[[str, Mapping[int, str]], InputError],
) -> int:
    """Resolve a text to an index: a number is an index; otherwise ``named`` must return exactly one class."""
    text = target.strip()
    if text[:1] == "#" and _is_number(text[1:]):
        return in_range(int(text[1:]), classes)
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    name = text[1:-1] if quoted else text
    matches = named(name)
    listing = ", ".join(f"{i} ({labels[i]})" for i in matches)
    if _is_number(text):
        index = int(text)
        if any(other != index for other in matches):
            raise InputError(
                f"'{text}' is ambiguous: it is the index of a class and the name of another, {listing}. "
                f"Write #{index} for the index, or '\"{text}\"' with the inner quotes for the name"
            )
        return in_range(index, classes)
    if len(matches) > 1:
        raise InputError(f"'{target}' names several classes: {listing}. Pass the index")
    if not matches:
        raise unknown(name, labels)
    return matches[0]


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
        valid = f"the model has {classes} classes, 0 to {classes - 1}" if classes else "classes count from 0"
        valid = "there is a single output, 0" if classes == 1 else valid
        raise InputError(f"class {index} is out of range: {valid}")
    return index


def _unknown_class(name: str, labels: Mapping[int, str]) -> InputError:
    pool = {part.strip().casefold(): part.strip() for label in labels.values() for part in label.split(",")}
    name = name if len(name) <= LONGEST else name[:LONGEST] + "…"
    query = name.casefold().strip()
    as_words = [part for part in pool if query and re.search(rf"\b{re.escape(query)}\b", part)]
    inside = [part for part in pool if query in part]
    candidates = [*as_words, *difflib.get_close_matches(query, pool, 3), *inside]  # "cat": tiger cat before crate
    close = list(dict.fromkeys(candidates))[: max(3, min(len(as_words), 6))]
    hint = f" Did you mean {', '.join(repr(pool[part]) for part in close)}?" if close else ""
    return InputError(
        f"the model has no class '{name}'.{hint}" + ("" if labels else " Its config names no classes: pass an index.")
    )


def _unknown_text(name: str, texts: Mapping[int, str]) -> InputError:
    def short(text: str) -> str:
        return repr(text if len(text) <= LONGEST else text[:LONGEST] + "…")

    listing = ", ".join(f"{i} ({short(text)})" for i, text in list(texts.items())[:_FEW])
    more = f" ... {len(texts) - 1} ({short(texts[len(texts) - 1])})" if len(texts) > _FEW else ""
    return InputError(
        f"none of the texts that this model chooses from is {short(name)}. They are {listing}{more}: pass one of "
        "them (a list of one per sample where they differ), or its index"
    )


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text's tokens.

    A text in quotes is used without them. If the text is the exact name of a token in the vocabulary, return its id
    alone.

    Raises:
        InputError: the tokenizer reads a part of the text as unknown.
    """
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    text = text[1:-1] if quoted else text
    ids = continuation_ids(tokenizer, text)
    vocabulary = tokenizer.get_vocab() if len(ids) != 1 else {}
    if text in vocabulary:
        return [int(vocabulary[text])]
    unknown = getattr(tokenizer, "unk_token", None)
    if unknown and getattr(tokenizer, "unk_token_id", None) in ids and unknown not in text:
        raise InputError(f"the tokenizer does not know {shorten(repr(text), LONGEST)}: it reads {unknown!r}")
    return ids


def continuation_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text's tokens as the continuation of another text.

    A leading space separates the two texts; tokenizers that prepend a space to every text would count it twice.
    """

    def encoded(part: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(part, add_special_tokens=False)]

    for before in ("a", ".") if text[:1] == " " else ():
        first, joined = encoded(before), encoded(before + text)
        if joined[: len(first)] == first and len(joined) > len(first):
            return joined[len(first) :]
    return encoded(text)
