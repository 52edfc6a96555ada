"""The explanations of a report: its inputs, each with all their maps, and what is written of a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from whyformer.apps.report.models import title
from whyformer.apps.report.reading import Saved
from whyformer.show.layout import input_of, method_names
from whyformer.show.words import figure_of, measured, short, target_name

if TYPE_CHECKING:
    from collections.abc import Hashable

    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class Shown:
    """One map of an input.

    Attributes:
        id: its anchor. label: the method, with the settings in which maps of this input differ.
    """

    id: str
    label: str
    source: Saved

    @property
    def e(self) -> Explanation:
        return self.source.e

    @property
    def model(self) -> str:
        return title(self.e.model or "unnamed model")

    @property
    def diagnostics(self) -> str:
        """What was measured of the run; its warnings, and how far it may be believed, stand under the map."""
        said = {k: v for k, v in self.e.diagnostics.items() if k not in ("warnings", "class_specific", "trust")}
        return "; ".join(f"{k}: {_brief(v)}" for k, v in said.items()) or "none"


@dataclass
class InputSection:
    """One picture or sentence, as one model sees it, with all its maps."""

    number: int
    title: str
    maps: list[Shown]

    @property
    def first(self) -> Explanation:
        return self.maps[0].e

    @property
    def files(self) -> str:
        """Where its maps were found."""
        found = list(dict.fromkeys(file for m in self.maps for file in m.source.file.split("\n")))
        return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"

    def searched(self, shown: Shown) -> str:
        """The words by which the page's script finds a map."""
        predicted, target = self.first.top(0, 1)[0][1], target_name(shown.e)
        said = (self.title, shown.source.file, shown.label, target, predicted, shown.model, *(self.first.texts or ()))
        return " ".join(" ".join(said).casefold().split())


def once(saved: Sequence[Saved]) -> list[Saved]:
    """Each map once, with all files that hold it: the same input, method, settings, target and scores.

    A map that speaks of no class may have been saved with each of several classes. Of two the one that was measured
    stays. Scores that differ by more than 1e-3 of the largest are two maps: other weights, or another version.
    """
    groups: dict[Hashable, list[Saved]] = {}
    for one in saved:
        e = one.e
        key = (e.model, input_of(e), e.input, method_names([e])[0], e.method, str(e.settings), target_name(e))
        same = groups.setdefault(key, [])
        found = next((k for k, other in enumerate(same) if _alike(e, other.e)), None)
        if found is None:
            same.append(one)
            continue
        kept = one if measured(e) and not measured(same[found].e) else same[found]
        files = dict.fromkeys([*same[found].file.split("\n"), one.file])
        same[found] = replace(kept, title=same[found].title, file="\n".join(files))
    order = {id(one.e): place for place, one in enumerate(saved)}
    return sorted((one for same in groups.values() for one in same), key=lambda one: order[id(one.e)])


def _alike(a: Explanation, b: Explanation) -> bool:
    if a.scores.shape != b.scores.shape:
        return False
    most = float(max(a.scores.abs().max(), b.scores.abs().max()))
    return float((a.scores.double() - b.scores.double()).abs().max()) <= 1e-3 * most


def inputs_of(saved: Sequence[Saved]) -> list[InputSection]:
    """Maps sorted by model and input, each in order of appearance."""
    groups: dict[Hashable, list[Saved]] = {}
    for one in saved:
        groups.setdefault((one.e.model, input_of(one.e)), []).append(one)
    made = []
    for number, group in enumerate(groups.values(), 1):
        labelled = zip(method_names([one.e for one in group]), group, strict=True)
        shown = [Shown(f"i{number}-{k}", label, one) for k, (label, one) in enumerate(labelled, 1)]
        made.append(InputSection(number, _title(group), shown))
    return made


def _title(group: Sequence[Saved]) -> str:
    """The sentence, or what the names of the maps' files begin with."""
    first = group[0]
    if first.e.texts is not None:
        return short(" ".join(first.e.texts[0].split()), 90)
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*(m.title for m in group), strict=False))
    return "".join(letters[0] for letters in shared).rstrip("-_., ") or first.title


def _brief(value: Any) -> str:
    """A figure in four digits; of a list only its beginning."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_brief(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        more = f", … {len(value)} in all" if len(value) > 4 else ""
        return _brief(value[0]) if len(value) == 1 else f"[{', '.join(map(_brief, value[:4]))}{more}]"
    return figure_of(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
