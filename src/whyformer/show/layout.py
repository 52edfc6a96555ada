"""Which explanation goes where when several are shown: one section an input, one row a method, one column a target."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    groups: dict[Hashable, list[Explanation]] = {}
    for e in singles:
        groups.setdefault(input_of(e), []).append(e)
    return [_section(group) for group in groups.values()]


def listed(explanations: Explanation | Iterable[Explanation]) -> list[Explanation]:
    """One explanation or several, as a list."""
    # an Explanation is itself iterable (over its samples), so ask what makes it one
    return [explanations] if hasattr(explanations, "scores") else list(explanations)  # type: ignore[list-item]


def input_of(e: Explanation) -> Hashable:
    """What two explanations of one input have in common: the text, or the picture as the model saw it."""
    if e.texts is not None:
        return e.texts[0]
    if e.pictures is not None:
        return e.pictures.numpy().tobytes()
    if e.originals is not None:
        return e.originals[0].tobytes()
    return tuple(e.tokens[0]) if e.tokens is not None else tuple(e.logits[0].tolist())


def method_names(explanations: Sequence[Explanation]) -> list[str]:
    """Their methods, followed by the settings in which those of one method differ."""
    names = []
    for e in explanations:
        twins = [other.settings for other in explanations if other.method == e.method]
        differing = {k: v for k, v in e.settings.items() if any(str(twin.get(k)) != str(v) for twin in twins)}
        names.append(visible(f"{e.method} ({written(differing)})" if differing else e.method))
    return names


def written(settings: Mapping[str, Any]) -> str:
    """Settings as they would be written in a call."""
    return ", ".join(f"{k}={v}" for k, v in settings.items())


def _section(group: list[Explanation]) -> Section:
    """Rows by method and settings, columns by target; a map of no class stands under each of them."""
    rows: dict[tuple[str, str], dict[str, Explanation]] = {}
    for e in group:
        key = (e.method, json.dumps(e.settings, sort_keys=True, default=str))
        column = target_name(e)
        row = rows.setdefault(key, {})
        # a class-agnostic map asked for several targets is shown once for each of them
        while column in row:
            column += " "
        row[column] = e
    asked = list(dict.fromkeys(t for row in rows.values() for t, e in row.items() if not agnostic(e)))
    targets = asked or list(dict.fromkeys(t for row in rows.values() for t in row))
    cells: list[list[Explanation | None]] = []
    for row in rows.values():
        same = next((e for e in row.values() if agnostic(e)), None)
        cells.append([row.get(t, same) for t in targets])
    return Section(method_names([next(iter(row.values())) for row in rows.values()]), targets, cells)
