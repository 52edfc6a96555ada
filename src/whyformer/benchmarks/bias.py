"""Benchmark ``bias``: the relevance of people's names for a sentiment classifier (Ali et al. 2022, section 5).

The paper shows top-ranked names in a figure and publishes no lists. ``bias.json`` has templates and lists of this
library: short neutral sentences about a person, and two groups of first names that are common in the United States.
They are placeholders for the user's lists (option ``lists``), not a claim about anybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.benchmarks.batches import TextBatch
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import Cell, Report, Results, Table, Values
from whyformer.benchmarks.study import Benchmark, Exclusion, Measured, Study
from whyformer.datasets.samples import LayoutError, Text
from whyformer.errors import InputError
from whyformer.evaluation.statistics import Interval, bootstrap, bootstrap_of

Terms = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class TermText(Text):
    """A text that contains a ``term`` of a ``group`` at the characters from ``start`` to ``end``."""

    group: str
    term: str
    start: int
    end: int


def _with_term(group: str, term: str, place: object, text: str, start: int, end: int) -> TermText:
    identity = f"{group}/{term}/{place}@{start}-{end}"
    return TermText(identity, text, group=group, term=term, start=start, end=end)


def own_data(options: dict[str, Any]) -> tuple[str, Sequence[Text]]:
    """Return the templates filled with the terms."""
    return "templates", fill(*read_lists(options["lists"]))


def read_lists(path: str | None) -> tuple[Sequence[str], Terms]:
    """Read ``{"templates": ["{} plays ..."], "terms": {"group": ["name"]}}``; missing keys keep the built-in lists."""
    built_in = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    expected = f'{path}: expected {{"templates": [...], "terms": {{group: [...]}}}}'
    try:
        lists = built_in | (json.loads(Path(path).read_text(encoding="utf-8")) if path else {})
        templates, terms = lists["templates"], lists["terms"]
        strings = [*templates, *(word for words in terms.values() for word in words)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise LayoutError(f"{expected}; {error}") from error
    if not terms or not all(isinstance(item, str) for item in strings):
        raise LayoutError(f"{expected}; the file has other types")
    return templates, terms


def fill(templates: Sequence[str], terms: Terms) -> list[TermText]:
    """Return every template with every term."""
    texts = []
    for number, template in enumerate(templates):
        if template.count("{}") != 1:
            raise InputError(f"a template must have {{}} once, in place of the name: {template!r}")
        start = template.index("{}")
        for group, word in ((g, w) for g, words in terms.items() for w in words):
            texts.append(_with_term(group, word, number, template.replace("{}", word), start, start + len(word)))
    if not texts:
        raise InputError("there are no templates or no terms")
    return texts


def find_terms(samples: Sequence[Text], terms: Terms) -> list[TermText]:
    """Return the texts that contain a term, once for each term."""
    patterns = [(g, w, re.compile(rf"\b{re.escape(w)}\b", re.IGNORECASE)) for g, words in terms.items() for w in words]
    return [
        _with_term(group, word, sample.id, sample.text, *match.span())
        for sample in samples
        for group, word, pattern in patterns
        if (match := pattern.search(sample.text))
    ]


def prepare(study: Study) -> None:
    if study.reader != "templates":
        study.samples = find_terms(study.samples, read_lists(study.options["lists"])[1])
        if not study.samples:
            raise InputError("these texts contain none of the terms: use other terms with --option lists=FILE")
    study.limit()
    count = getattr(getattr(study.model, "config", None), "num_labels", 2)
    explained = study.options["explained"]
    study.options["explained"] = int(count - 1 if explained is None else explained)
    if not 0 <= study.options["explained"] < count:
        raise InputError(f"the model has classes 0 to {count - 1}, not {study.options['explained']}")


def measure(batch: TextBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    explained = batch.study.options["explained"]
    for (c, i), scores in batch.maps(configurations, [explained] * len(batch.samples)).items():
        figures = scores if isinstance(scores, Exclusion) else _figures(batch, i, scores, explained)
        yield batch.samples[i].id, c, figures


def _figures(batch: TextBatch, index: int, scores: NDArray[np.float64], explained: int) -> Values | Exclusion:
    encoded, sample = batch.encoded[index], batch.samples[index]
    words = np.zeros(encoded.count)
    in_term = set()
    for score, word, (first, last) in zip(scores, encoded.words, encoded.spans, strict=True):
        if word is not None:
            words[word] += score
            if first < sample.end and last > sample.start:
                in_term.add(word)
    if not in_term:
        return Exclusion("failed", "the term was truncated")
    places = sorted(in_term)
    relevance, scale = float(words[places].sum()), float(np.abs(words).sum())
    return {
        "relevance": relevance,
        "share": relevance / scale if scale else 0.0,
        "rank": term_rank(words, max(places, key=lambda w: float(words[w]))),
        "words": len(words),
        "logit": float(batch.logits[index, explained]),
        "probability": float(batch.probabilities[index, explained]),
    }


def term_rank(word_scores: ArrayLike, position: int) -> int:
    """Return the rank of the term's score among the words of its text, from 1; equal scores share the better rank."""
    scores = np.asarray(word_scores)
    return int((scores > scores[position]).sum()) + 1


def group_difference(first: ArrayLike, second: ArrayLike) -> Interval:
    """Return mean(first) − mean(second) with a 95 % percentile bootstrap interval; groups are resampled separately."""
    if not np.size(first) or not np.size(second):
        raise InputError("a group is empty")
    return bootstrap_of(lambda a, b: a.mean() - b.mean(), first, second)


def summarize(study: Study, results: Results) -> Report:
    samples: dict[str, TermText] = {s.id: s for s in study.samples}
    groups = list(dict.fromkeys(s.group for s in samples.values()))
    pairs = {f"{a} − {b}": (a, b) for a, b in combinations(groups, 2)}

    def cell(label: str, group: str, key: str) -> Cell:
        """Return the mean over a group, or the difference between two groups."""
        values = results[label].items()
        parts = [[v[key] for s, v in values if samples[s].group == name] for name in pairs.get(group, (group,))]
        if len(parts) == 1:
            return Cell(bootstrap(parts[0]))
        return Cell(group_difference(parts[0], parts[1]) if all(parts) else None)

    titles = {"share of relevance": "share", "rank": "rank"}
    columns = {f"{g}: {title}": (g, key) for g in groups for title, key in titles.items()}
    columns |= {f"{pair}: share": (pair, "share") for pair in pairs}
    cells = {(label, title): cell(label, *place) for label in results for title, place in columns.items()}
    # the model's output for each group, independent of the method
    first, quantities, both = next(iter(results)), ("logit", "probability"), (*groups, *pairs)
    outputs = {(group, quantity): cell(first, group, quantity) for group in both for quantity in quantities}
    top = {label: _largest({samples[s]: v for s, v in values.items()}) for label, values in results.items()}
    notes = "\n".join(f"- {label}: {', '.join(terms)}" for label, terms in top.items())
    title = "The model's output for the explained class, by group"
    tables = (
        Table("bias", "Relevance of the name, by group", "Method", tuple(results), tuple(columns), cells, digits=3),
        Table("outputs", title, "Group", both, quantities, outputs, digits=3),
        Table("terms", "Names with the largest mean share of the relevance", "Method", (), (), {}, note=notes),
    )
    built_in = "built-in templates and names (whyformer.benchmarks.bias)"
    source = "lists of the user" if study.options["lists"] else built_in
    texts = conventions("bias", explained=study.options["explained"], lists=source)
    remarks = (
        "The paper shows a figure of top-ranked names and publishes no lists, so there is no published column.",
        "A name's score is the sum over its word pieces; the random row shows the effect of their number.",
    )
    return Report(tables, (), texts, remarks, {"terms": top})


def _largest(values: Mapping[TermText, Values]) -> list[str]:
    """Return the eight terms with the largest mean share, and the share."""
    shares: dict[str, list[float]] = {}
    for sample, figures in values.items():
        shares.setdefault(sample.term, []).append(figures["share"])
    means = sorted(((float(np.mean(v)), term) for term, v in shares.items()), key=lambda pair: -pair[0])
    return [f"{term} {share:.3f}" for share, term in means[:8]]


BENCHMARK = Benchmark(
    "bias", "name bias on sentiment: relevance and rank of names, difference between groups (Ali et al. 2022)", "text",
    "input_x_gradient,gae,lrp_ah,lrp_ln,lrp_ah_ln", {},
    {"lists": None, "explained": None, "longest": 256, "count": None, "files": None},
    prepare, measure, summarize, own_data=own_data,
)  # fmt: skip
