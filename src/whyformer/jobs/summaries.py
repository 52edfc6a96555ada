"""Summaries of the explanations of a data set: words, mean maps, and the drift between two runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError
from whyformer.evaluation.metrics.sanity import spearman
from whyformer.evaluation.statistics import Interval, bootstrap
from whyformer.explanation.result import Explanation
from whyformer.jobs.columns import shape_of
from whyformer.show.words import words as words_of
from whyformer.targets import class_index

if TYPE_CHECKING:
    from whyformer.jobs.reading import Maps


_MARKS = "".join(chr(c) for c in range(33, 127) if not chr(c).isalnum()) + "“”‘’…–—«»"


@dataclass(frozen=True)
class WordShare:
    """The relevance of a word over all texts that contain it.

    Attributes:
        word: the word.
        share: mean over texts of the word's signed share of Σ |score|, with a 95 % bootstrap interval; its count is
            the number of texts that contain the word.
        examples: texts with the largest shares, in descending order.
    """

    word: str
    share: Interval
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """The words of one method and class over ``texts`` texts, in descending order of their mean share."""

    method: str
    target: str
    texts: int
    words: tuple[WordShare, ...]

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.target}: {self.texts} texts"]
        for row in self.words:
            s = row.share
            lines.append(f"{s.value:+8.3f}  [{s.low:+.3f}, {s.high:+.3f}]  {s.count:5d}  {row.word}")
        return "\n".join(lines)


def words(
    maps: Maps, target: int | str | None = None, method: str | None = None, *, count: int = 20, least: int = 3,
    examples: int = 3,
) -> Words:  # fmt: skip
    """Return the words with the most relevance for a class over a data set.

    The share of a word in a text is Σ score over all tokens of all its occurrences / Σ |score| over the tokens of all
    words, without special tokens. Case is ignored. The result is the mean share over the texts that contain the word.

    Args:
        maps: explanations.
        target: class, by name or index, or the name of another target; may be omitted if there is only one.
        method: method; may be omitted if there is only one.
        count: largest number of words.
        least: number of texts that must contain a word.
        examples: number of example texts for each word.

    Raises:
        InputError: there are no such explanations of texts, or the class or the method is ambiguous.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    best_texts: dict[str, list[tuple[float, str]]] = defaultdict(list)
    texts, name = 0, ""
    for e in selected(maps, target, method):
        entries, text = words_of(e)
        values: dict[str, float] = defaultdict(float)
        for entry in entries:
            word = entry.text.casefold().strip(_MARKS)
            if word:
                values[word] += entry.score
        places = [place for entry in entries for place in entry.places]
        total = float(e.scores[0, places].abs().sum()) or 1.0
        texts, name, method = texts + 1, _target_of(e), e.method
        for word, value in values.items():
            shares[word].append(value / total)
            if examples:
                candidates = [*best_texts[word], (value / total, e.texts[0] if e.texts else text)]
                best_texts[word] = sorted(candidates, key=lambda pair: -pair[0])[:examples]
    if not texts:
        raise InputError("there are no explanations of texts for this class and method")
    rows = [
        WordShare(word, bootstrap(shares_of_word), tuple(text for _, text in best_texts[word]))
        for word, shares_of_word in sorted(shares.items(), key=lambda pair: (-float(np.mean(pair[1])), pair[0]))
        if len(shares_of_word) >= least
    ]
    return Words(str(method), name, texts, tuple(rows[:count]))


@dataclass(frozen=True)
class MeanMap:
    """The ``mean`` and standard ``deviation`` of ``count`` maps, each scaled to Σ |score| = 1.

    The shape is ``[rows, columns]``, or ``[time, rows, columns]`` of videos.
    """

    method: str
    target: str
    count: int
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


def mean_map(maps: Maps, target: int | str | None = None, method: str | None = None) -> MeanMap:
    """Return the mean map of aligned pictures, such as centered faces or scans of equal position.

    Args:
        maps: explanations.
        target: class, by name or index, or the name of another target; all together by default.
        method: method; may be omitted if there is only one.

    Raises:
        InputError: there are no such explanations of pictures, the maps differ in shape, or the method is ambiguous.
    """
    total = squares = None
    count, names = 0, set()
    for e in selected(maps, target, method, every=True):
        if e.level == "token":
            raise InputError("texts have no mean map: use words() instead")
        scores = e.scores[0].double().numpy().reshape(shape_of(e))
        scores = scores / (np.abs(scores).sum() or 1.0)
        if total is not None and scores.shape != total.shape:
            raise InputError(f"maps of shapes {total.shape} and {scores.shape} are not aligned, so they have no mean")
        total = scores if total is None else total + scores
        squares = scores**2 if squares is None else squares + scores**2
        count, method = count + 1, e.method
        names.add(_target_of(e))
    if total is None or squares is None:
        raise InputError("there are no explanations of pictures for this class and method")
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return MeanMap(str(method), ", ".join(sorted(names)[:5]), count, mean, deviation)


@dataclass(frozen=True)
class Drift:
    """The differences between two runs over the same rows.

    Attributes:
        rows: number of rows that both runs have.
        changed: number of these rows with another predicted class.
        agreement: mean rank correlation (Spearman) of the scores of a row, method and class in both runs.
        probability: mean change of the probability of the explained class.
        largest: (id of the row, correlation) of the maps with the lowest correlations.
    """

    rows: int
    changed: int
    agreement: Interval
    probability: Interval
    largest: tuple[tuple[str, float], ...]


def drift(before: Maps, after: Maps, *, count: int = 10) -> Drift:
    """Compare two runs over the same input, such as those of two models or two versions.

    Rows are matched by index and content (SHA-256), explanations by method and class.

    Args:
        before: the first run.
        after: the second run.
        count: number of maps in :attr:`Drift.largest`.

    Raises:
        InputError: the runs have no row in common, or contain only the top scores.
    """
    columns = [
        "row", "id", "method", "target", "diagnostics", "scores", "shape", "logits", "features", "probability",
        "input_sha256",
    ]  # fmt: skip
    if any(str(m.manifest["job"]["scores"]).startswith("top-") for m in (before, after)):
        raise InputError("drift compares all scores of a map, and one of these runs stored only the top scores")
    agreement, changes, pairs = [], [], []
    rows: dict[int, bool] = {}
    for old, new in _paired(before.rows(columns), after.rows(columns)):
        predicted = [_predicted(row) for row in (old, new)]
        rows[old["row"]] = rows.get(old["row"], False) or predicted[0] != predicted[1]
        if _key_of(old) != _key_of(new) or old["shape"] != new["shape"]:
            continue
        value = _agreement(np.asarray(old["scores"], float), np.asarray(new["scores"], float))
        pairs.append((old["id"], value))
        agreement.append(value)
        if old["probability"] is not None and new["probability"] is not None:
            changes.append(new["probability"] - old["probability"])
    if not rows:
        raise InputError("the two runs have no row in common: drift needs two runs over the same input")
    pairs.sort(key=lambda pair: pair[1])
    changed = sum(rows.values())
    return Drift(len(rows), changed, bootstrap(agreement), bootstrap(changes), tuple(pairs[:count]))


def _key_of(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return (method, class, target as text unless it is the class alone), the key of an explanation of a row."""
    return row["method"], row["target"], str(json.loads(row["diagnostics"]).get("target"))


def _predicted(row: Mapping[str, Any]) -> int:
    """Return the class with the highest logit."""
    best, classes = int(np.argmax(row["logits"])), json.loads(row["features"]).get("classes")
    return best if classes is None else int(classes[best])


def _paired(
    before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of rows of the same input, with the same method and target if possible; both in input order."""
    left, right = _by_row(before), _by_row(after)
    old, new = next(left, None), next(right, None)
    while old is not None and new is not None:
        if old[0] < new[0]:
            old = next(left, None)
        elif new[0] < old[0]:
            new = next(right, None)
        else:
            by_key = {_key_of(r): r for r in new[1]}
            for row in old[1]:
                if row["input_sha256"] == new[1][0]["input_sha256"]:
                    yield row, by_key.get(_key_of(row), new[1][0])
            old, new = next(left, None), next(right, None)


def _by_row(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for number, group in groupby(rows, key=lambda r: int(r["row"])):
        yield number, list(group)


def _agreement(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the rank correlation; 1 if both are constant, 0 if one is."""
    constant = [not np.ptp(values) for values in (a, b)]
    return float(all(constant)) if any(constant) else spearman(a, b)


# -- selection of explanations ----------------------------------------------------------------------------------------
def selected(maps: Maps, target: Any, method: str | None, *, every: bool = False) -> Iterator[Explanation]:
    """Yield the explanations of one method and class.

    Args:
        maps: explanations.
        target: class, by name or index, or the name of another target.
        method: method.
        every: without a ``target``, use all classes.

    Raises:
        InputError: the method or the class is missing or ambiguous.
    """
    keys = ["method", "target", "target_name"]
    groups = maps.table(keys).group_by(keys, use_threads=False).aggregate([]).to_pylist()
    methods = list(dict.fromkeys(group["method"] for group in groups))
    if method is None and len(methods) > 1:
        raise InputError(f"there are several methods: choose one of {', '.join(methods)}")
    if method is not None and method not in methods:
        raise InputError(f"there is no method '{method}' in {maps.path}; its methods: {', '.join(methods) or 'none'}")
    targets = {(group["target"], group["target_name"]) for group in groups if method in (None, group["method"])}
    values: dict[str, Any] = {} if method is None else {"method": method}
    if target is not None:
        named = {pair for pair in targets if pair[1] == target and not _is_class(maps, *pair)}
        if not named:
            values["target"] = class_index(target, maps.labels, None)
            targets = {pair for pair in targets if pair[0] == values["target"]}
        targets = named or {pair for pair in targets if _is_class(maps, *pair)} or targets
    if len(targets) > 1 and not (every and target is None):
        names = [str(index) if name is None else name for index, name in sorted(targets, key=str)]
        raise InputError(f"there are several targets: choose one of {', '.join(names[:10])}")
    if target is not None and targets:
        values |= {n: v for n, v in zip(("target", "target_name"), *targets, strict=True) if v is not None}
    yield from maps.explanations(**values)


def _is_class(maps: Maps, index: int, name: str | None) -> bool:
    """Return whether the name of a target is that of its class alone."""
    return name in (None, (maps.labels or {}).get(index, str(index)))


def _target_of(e: Explanation) -> str:
    return e.target_names[0] if e.target_names else e.label(int(e.target[0]))
