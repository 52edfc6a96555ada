"""The explanations of a report, grouped by their inputs."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from whyformer.show.layout import input_of, method_names
from whyformer.show.words import format_score, model_title, short, target_name, trust_figures

if TYPE_CHECKING:
    from collections.abc import Hashable

    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class SavedMap:
    """An explanation of one sample.

    Attributes:
        e: the explanation.
        title: name of the input.
        file: where it was found; several lines if several files hold it.
        versions: versions of the packages that made it.
        id: its anchor on the page.
        label: the method, with the settings in which maps of this input differ.
    """

    e: Explanation
    title: str
    file: str
    versions: dict[str, str]
    id: str = ""
    label: str = ""

    @property
    def model(self) -> str:
        """Name of the model."""
        return model_title(self.e.model or "unnamed model")

    @property
    def diagnostics(self) -> str:
        """Diagnostics in words, without warnings and the faithfulness check, which are under the map."""
        under = ("warnings", "class_specific", "trust")
        return "; ".join(f"{k}: {_brief(v)}" for k, v in self.e.diagnostics.items() if k not in under) or "none"


@dataclass(frozen=True)
class InputSection:
    """A picture or a sentence with all maps of one model."""

    number: int
    title: str
    maps: list[SavedMap]

    @property
    def first(self) -> Explanation:
        """The first explanation."""
        return self.maps[0].e

    @property
    def files(self) -> str:
        """The first file that holds a map, and the number of other files."""
        first, *others = dict.fromkeys(file for saved_map in self.maps for file in saved_map.file.split("\n"))
        return f"{first} and {len(others)} more" if others else first

    def searched(self, m: SavedMap) -> str:
        """Return the words by which the page's script finds a map."""
        predicted = self.first.top(0, 1)[0][1]
        words = (self.title, m.file, m.label, target_name(m.e), predicted, m.model, *(self.first.texts or ()))
        return " ".join(" ".join(words).casefold().split())


def once(saved: Sequence[SavedMap]) -> list[SavedMap]:
    """Return each map once, with all files that hold it: same input, method, settings, target and scores.

    A map that does not depend on the class may have been saved with each of several classes. Of two equal maps, one
    with a faithfulness check is preferred. Scores that differ by more than 1e-3 of the largest score are two maps:
    those of other weights or of another version.
    """
    groups: dict[Hashable, list[SavedMap]] = {}
    for saved_map in saved:
        e = saved_map.e
        key = (e.model, input_of(e), e.input, method_names([e])[0], e.method, str(e.settings), target_name(e))
        group = groups.setdefault(key, [])
        same = next((i for i, other in enumerate(group) if _alike(e, other.e)), None)
        if same is None:
            group.append(saved_map)
            continue
        other = group[same]
        preferred = saved_map if trust_figures(e) and not trust_figures(other.e) else other
        files = dict.fromkeys([*other.file.split("\n"), saved_map.file])
        group[same] = replace(preferred, title=other.title, file="\n".join(files))
    return [saved_map for group in groups.values() for saved_map in group]


def _alike(a: Explanation, b: Explanation) -> bool:
    if a.scores.shape != b.scores.shape:
        return False
    most = float(max(a.scores.abs().max(), b.scores.abs().max()))
    return float((a.scores.double() - b.scores.double()).abs().max()) <= 1e-3 * most


def inputs_of(saved: Sequence[SavedMap]) -> list[InputSection]:
    """Group maps by model and input, in order of appearance."""
    groups: dict[Hashable, list[SavedMap]] = {}
    for saved_map in saved:
        groups.setdefault((saved_map.e.model, input_of(saved_map.e)), []).append(saved_map)
    sections = []
    for number, group in enumerate(groups.values(), 1):
        labels = method_names([saved_map.e for saved_map in group])
        maps = [replace(saved_map, id=f"i{number}-{k}", label=labels[k - 1]) for k, saved_map in enumerate(group, 1)]
        sections.append(InputSection(number, _title(group), maps))
    return sections


def _title(group: Sequence[SavedMap]) -> str:
    """Return the sentence, or the beginning that the names of the maps' files share."""
    first = group[0]
    if first.e.texts is not None:
        return short(" ".join(first.e.texts[0].split()), 90)
    shared = os.path.commonprefix([saved_map.title for saved_map in group])  # noqa: RUF071 - not a path
    return shared.rstrip("-_., ") or first.title


def _brief(value: Any) -> str:
    """Return a number in four digits, or the beginning of a list."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_brief(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        more = f", … {len(value)} in all" if len(value) > 4 else ""
        return _brief(value[0]) if len(value) == 1 else f"[{', '.join(map(_brief, value[:4]))}{more}]"
    return format_score(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
