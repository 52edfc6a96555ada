"""What a whole data set's explanations say together: words, mean maps, and what changed between two runs."""

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
from whyformer.evaluation.statistics import Interval, bootstrap
from whyformer.explanation.result import Explanation
from whyformer.show.words import words as words_of
from whyformer.targets import class_index

if TYPE_CHECKING:
    from whyformer.jobs.reading import Maps


_MARKS = "".join(chr(c) for c in range(33, 127) if not chr(c).isalnum()) + "“”‘’…–—«»"


@dataclass(frozen=True)
class WordShare:
    """A word over all texts that have it.

    Attributes:
        share: mean of the share of a text's Σ |score| that the word holds, with its sign; 95 % bootstrap interval over
            texts, whose count is how many have it.
        examples: texts in which it holds most, the largest share first.
    """

    word: str
    share: Interval
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """The words of one method and class, the largest mean share first; ``texts`` were looked at."""

    method: str
    target: str
    texts: int
    words: tuple[WordShare, ...]

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.target}: {self.texts} texts"]
        for one in self.words:
            s = one.share
            lines.append(f"{s.value:+8.3f}  [{s.low:+.3f}, {s.high:+.3f}]  {s.count:5d}  {one.word}")
        return "\n".join(lines)


def words(
    maps: Maps, target: int | str | None = None, method: str | None = None, *, count: int = 20, least: int = 3,
    examples: int = 3,
) -> Words:  # fmt: skip
    """Which words carry most relevance for a class over a data set.

    A word's share in a text is Σ score over its tokens and occurrences / Σ |score| of the tokens of all words (special
    tokens are none); words are compared without regard to case. The figure is the mean over texts that have the word.

    Args:
        target: class, by name or number; the only one there is by default.
        method: the only one there is by default.
        count: how many words; least: texts that must have a word; examples: texts that are kept of each.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    seen: dict[str, list[tuple[float, str]]] = defaultdict(list)
    texts, named = 0, ""
    for e in chosen(maps, target, method):
        listed, text = words_of(e)
        values: dict[str, float] = defaultdict(float)
        for one in listed:
            word = one.text.casefold().strip(_MARKS)
            if word:
                values[word] += one.score
        held = [place for one in listed for place in one.places]
        total = float(e.scores[0, held].abs().sum()) or 1.0
        texts, named, method = texts + 1, _target_of(e), e.method
        for word, value in values.items():
            shares[word].append(value / total)
            if examples:
                best = [*seen[word], (value / total, e.texts[0] if e.texts else text)]
                seen[word] = sorted(best, key=lambda pair: -pair[0])[:examples]
    if not texts:
        raise InputError("there are no explanations of texts for this class and method")
    found = [
        WordShare(word, bootstrap(own), tuple(text for _, text in seen[word]))
        for word, own in sorted(shares.items(), key=lambda pair: (-float(np.mean(pair[1])), pair[0]))
        if len(own) >= least
    ]
    return Words(str(method), named, texts, tuple(found[:count]))


@dataclass(frozen=True)
class MeanMap:
    """``mean`` and ``deviation``, ``[rows, columns]``, of ``count`` pictures' maps, each scaled to Σ|score| = 1."""

    method: str
    target: str
    count: int
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


def mean_map(maps: Maps, target: int | str | None = None, method: str | None = None) -> MeanMap:
    """The mean map of pictures that are aligned (all faces in the middle, all scans in one position).

    Args:
        target: class, by name or number; all that there are, together, by default. method: the only one by default.
    """
    total = squares = None
    count, named = 0, set()
    for e in chosen(maps, target, method, every=True):
        if e.level == "token":
            raise InputError("mean maps are of pictures, and these are texts: words() is for them")
        own = e.scores[0].double().numpy().reshape(e.grid or e.scores.shape[1:])
        own = own / (np.abs(own).sum() or 1.0)
        if total is not None and own.shape != total.shape:
            raise InputError(f"maps of {total.shape} and of {own.shape} are not aligned, so they have no mean")
        total = own if total is None else total + own
        squares = own**2 if squares is None else squares + own**2
        count, method = count + 1, e.method
        named.add(_target_of(e))
    if total is None or squares is None:
        raise InputError("there are no explanations of pictures for this class and method")
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return MeanMap(str(method), ", ".join(sorted(named)[:5]), count, mean, deviation)


@dataclass(frozen=True)
class Drift:
    """What changed from one run to another of the same rows.

    Attributes:
        rows: that both runs have; changed: of them with another predicted class.
        agreement: mean rank correlation (Spearman) of the scores of one row, method and class in both runs.
        probability: mean change of the explained class's probability.
        largest: (row's id, correlation) of those that agree least.
    """

    rows: int
    changed: int
    agreement: Interval
    probability: Interval
    largest: tuple[tuple[str, float], ...]


def drift(before: Maps, after: Maps, *, count: int = 10) -> Drift:
    """What changed between two runs over the same input: two models, two dates, two versions.

    Rows are matched by number and content (their SHA-256), explanations by method and class.
    """
    columns = ["row", "id", "method", "target", "scores", "shape", "logits", "features", "probability", "input_sha256"]
    if any(str(m.manifest["job"]["scores"]).startswith("top-") for m in (before, after)):
        raise InputError("drift compares whole maps, and one of these runs kept only the top of them")
    agreement, moved, pairs = [], [], []
    rows: dict[int, bool] = {}
    for old, new in _together(_rows(before, columns), _rows(after, columns)):
        predicted = [_predicted(one) for one in (old, new)]
        rows[old["row"]] = rows.get(old["row"], False) or predicted[0] != predicted[1]
        if (old["method"], old["target"]) != (new["method"], new["target"]) or old["shape"] != new["shape"]:
            continue
        value = _spearman(np.asarray(old["scores"], float), np.asarray(new["scores"], float))
        pairs.append((old["id"], value))
        agreement.append(value)
        if old["probability"] is not None and new["probability"] is not None:
            moved.append(new["probability"] - old["probability"])
    if not rows:
        raise InputError("the two runs have no row in common: drift is for two runs over the same input")
    pairs.sort(key=lambda pair: pair[1])
    changed = sum(rows.values())
    return Drift(len(rows), changed, bootstrap(agreement), bootstrap(moved), tuple(pairs[:count]))


def _predicted(row: Mapping[str, Any]) -> int:
    """The class with the highest logit."""
    best, classes = int(np.argmax(row["logits"])), json.loads(row["features"]).get("classes")
    return best if classes is None else int(classes[best])


def _rows(maps: Maps, columns: list[str]) -> Iterator[dict[str, Any]]:
    for table in maps.tables(columns):
        for batch in table.to_batches(max_chunksize=256):
            yield from batch.to_pylist()


def _together(
    before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of the same input, method and place among its targets; both are in the order of the input."""
    left, right = _by_row(before), _by_row(after)
    old, new = next(left, None), next(right, None)
    while old is not None and new is not None:
        if old[0] < new[0]:
            old = next(left, None)
        elif new[0] < old[0]:
            new = next(right, None)
        else:
            mine = {(r["method"], r["target"]): r for r in new[1]}
            for row in old[1]:
                if row["input_sha256"] == new[1][0]["input_sha256"]:
                    yield row, mine.get((row["method"], row["target"]), new[1][0])
            old, new = next(left, None), next(right, None)


def _by_row(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for number, own in groupby(rows, key=lambda r: int(r["row"])):
        yield number, list(own)


def _spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Rank correlation, ties at their mean rank; 1 where both are constant."""
    ranks = [_ranks(v) for v in (a, b)]
    spread = [r.std() for r in ranks]
    if not all(spread):
        return 1.0 if not any(spread) else 0.0
    return float(np.mean((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())) / (spread[0] * spread[1]))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: NDArray[np.float64] = (ends - (counts - 1) / 2)[where]
    return mean


# -- which explanations are meant --------------------------------------------------------------------------------------
def chosen(maps: Maps, target: Any, method: str | None, *, every: bool = False) -> Iterator[Explanation]:
    """The explanations of one method and class.

    Raises:
        InputError: there are several, and none was named (``every``: all classes are meant then), or there is no such.
    """
    there: Mapping[tuple[str, int], None] = {
        (row["method"], row["target"]): None for row in maps.table(["method", "target"]).group_by(
            ["method", "target"], use_threads=False).aggregate([]).to_pylist()
    }  # fmt: skip
    methods = list(dict.fromkeys(m for m, _ in there))
    if method is None and len(methods) > 1:
        raise InputError(f"which method? There are {', '.join(methods)}")
    if method is not None and method not in methods:
        raise InputError(f"there is no method '{method}' in {maps.path}; there are {', '.join(methods) or 'none'}")
    wanted = None if target is None else class_index(target, maps.labels, None)
    classes = sorted({t for m, t in there if method in (None, m)})
    if wanted is None and len(classes) > 1 and not every:
        names = [(maps.labels or {}).get(c, str(c)) for c in classes[:10]]
        raise InputError(f"which class? There are {', '.join(names)}")
    for e in maps:
        if method in (None, e.method) and wanted in (None, int(e.target[0])):
            yield e


def _target_of(e: Explanation) -> str:
    return e.target_names[0] if e.target_names else e.label(int(e.target[0]))
