"""Which explanation goes where when several are shown: one section an input, one row a method, one column a target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whyformer.errors import InputError
from whyformer.show.words import agnostic, target_name, visible

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class Section:
    """Explanations of one input; ``cells[row][column]`` is a single sample, or None where there is none.

    Attributes:
        methods: what the rows are called: the method, with the settings in which rows of one method differ.
        targets: what the columns are called.
    """

    methods: list[str]
    targets: list[str]
    cells: list[list[Explanation | None]]

    @property
    def first(self) -> Explanation:
        return next(e for row in self.cells for e in row if e is not None)

    @property
    def columns(self) -> list[tuple[Explanation, list[tuple[str, Explanation]]]]:
        """For each target (one that names it, which class-agnostic ones do not; name and explanation of each row)."""
        found = []
        for column in range(len(self.targets)):
            rows = [(m, e) for m, row in zip(self.methods, self.cells, strict=True) if (e := row[column]) is not None]
            found.append((next((e for _, e in rows if not agnostic(e)), rows[0][1]), rows))
        return found


def sections(explanations: Explanation | Iterable[Explanation]) -> list[Section]:
    """Sort explanations (of any number of samples) by input, method and target, each in order of appearance."""
    singles = [sample for e in listed(explanations) for sample in e]
    if not singles:
        raise InputError("there is no explanation to show")
    groups: dict[object, list[Explanation]] = {}
    for e in singles:
        groups.setdefault(_input(e), []).append(e)
    return [_section(group) for group in groups.values()]


def listed(explanations: Explanation | Iterable[Explanation]) -> list[Explanation]:
    """One explanation or several, as a list."""
    # an Explanation is itself iterable (over its samples), so ask what makes it one
    return [explanations] if hasattr(explanations, "scores") else list(explanations)  # type: ignore[list-item]


def _input(e: Explanation) -> object:
    if e.texts is not None:
        return e.texts[0]
    if e.pictures is not None:
        return e.pictures.numpy().tobytes()
    return tuple(e.tokens[0]) if e.tokens is not None else tuple(e.logits[0].tolist())


def _section(group: list[Explanation]) -> Section:
    rows: dict[tuple[str, str], dict[str, Explanation]] = {}
    for e in group:
        key = (e.method, json.dumps(e.settings, sort_keys=True, default=str))
        column = target_name(e)
        row = rows.setdefault(key, {})
        # a class-agnostic map asked for several targets is shown once for each of them
        while column in row:
            column += " "
        row[column] = e
    targets = list(dict.fromkeys(t for row in rows.values() for t in row if not t.startswith("any class")))
    if not targets:
        targets = list(dict.fromkeys(t for row in rows.values() for t in row))
    cells: list[list[Explanation | None]] = []
    for row in rows.values():
        same = next((e for t, e in row.items() if t.startswith("any class")), None)
        cells.append([row.get(t, same) for t in targets])
    return Section(_names(list(rows)), targets, cells)


def _names(keys: list[tuple[str, str]]) -> list[str]:
    """Method names, followed by the settings in which rows of the same method differ."""
    names = []
    for method, settings in keys:
        twins = [json.loads(s) for m, s in keys if m == method]
        own = json.loads(settings)
        differing = [k for k in own if any(twin.get(k) != own[k] for twin in twins)]
        extra = ", ".join(f"{k}={own[k]}" for k in differing)
        names.append(visible(f"{method} ({extra})" if extra else method))
    return names
