"""Hypothesis strategies that damage valid values and files, for tests of readers."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ODD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2, 10**9, 2**31, -(2**63), 2**64, 10**30, 1e308, -0.0, float("nan"), float("inf"), "", "x", "0", "\ud800", "\x00", "\u202e", [], {}, [[]], [{}], [None], {"": None}, [[[]]]]),
    st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(-2, 5), max_size=4), st.sampled_from([20, 60]).map(_deep),
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values inside a JSON value."""
    paths = [path] if path else []
    if len(path) > 6:
        return paths
    if isinstance(value, dict):
        for key, item in value.items():
            paths += places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value[:6]):
            paths += places(item, (*path, i))
    return paths


@st.composite
def mutated(draw: Any, whole: Any) -> Any:
    """A JSON value with one to three of its places changed, dropped, doubled or swapped."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        paths = places(value)
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        how = draw(st.sampled_from(["odd", "odd", "drop", "double", "other"]))
        if how == "odd":
            inner[path[-1]] = copy.deepcopy(draw(ODD))  # drawn values are shared between examples
        elif how == "drop":
            del inner[path[-1]]
        elif how == "other":
            other = draw(st.sampled_from(paths))
            source = value
            try:
                for key in other:
                    source = source[key]
                inner[path[-1]] = copy.deepcopy(source)
            except (KeyError, IndexError, TypeError):
                pass
        elif isinstance(inner, list):
            inner.insert(path[-1], copy.deepcopy(inner[path[-1]]))
        else:
            inner[str(path[-1]) + "2"] = copy.deepcopy(inner[path[-1]])
    return value


@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """A file with bytes flipped, overwritten, truncated, removed, inserted or doubled."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            break
        # half of the places are in the header, which declares sizes and shapes
        offset = draw(st.integers(0, len(content) - 1) | st.integers(0, min(len(content), 64) - 1))
        how = draw(st.sampled_from(["flip", "flip", "set", "cut", "out", "in", "double"]))
        size = draw(st.integers(1, 16))
        if how == "flip":
            content[offset] ^= 1 << draw(st.integers(0, 7))
        elif how == "set":
            content[offset : offset + size] = draw(st.sampled_from([b"\xff", b"\x00", b"\x7f", b"9"])) * len(content[offset : offset + size])
        elif how == "cut":
            del content[offset:]
        elif how == "out":
            del content[offset : offset + size]
        elif how == "in":
            content[offset:offset] = draw(st.binary(min_size=1, max_size=16))
        else:
            content[offset:offset] = content[offset : offset + size * 8]
    return bytes(content)
