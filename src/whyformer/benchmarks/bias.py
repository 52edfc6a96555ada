"""Benchmark ``bias``: names in sentiment sentences, their relevance and what the model makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.encoding import Encoded, word_sums
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.name_bias import TEMPLATES, TERMS, fill, group_difference, term_rank
from whyformer.benchmarks.pictures import limit
from whyformer.benchmarks.report import Cell, Report, Table
from whyformer.benchmarks.sentences import read_texts, token_scores
from whyformer.benchmarks.study import Benchmark, Measured, Study, counts_of
from whyformer.datasets.samples import LayoutError, Text
from whyformer.errors import InputError
from whyformer.evaluate.statistics import bootstrap
from whyformer.jobs.records import Record


def own_data(options: dict[str, Any]) -> tuple[str, Sequence[Any], Sequence[str]]:
    """The templates filled with the terms: the built-in lists, or those of the JSON file ``lists``."""
    templates, terms = read_lists(options["lists"])
    sentences = fill(templates, terms)
    return (
        "templates",
        [Text(f"{s.group}/{s.term}/{s.template}@{s.span[0]}-{s.span[1]}", s.text) for s in sentences],
        (),
    )


def read_lists(path: str | None) -> tuple[Sequence[str], Mapping[str, Sequence[str]]]:
    """``{"templates": ["{} plays ..."], "terms": {"group": ["name"]}}``; what is left out stays built-in."""
    if path is None:
        return TEMPLATES, TERMS
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        templates, terms = found.get("templates", TEMPLATES), found.get("terms", TERMS)
        good = all(isinstance(t, str) for t in templates) and all(
            isinstance(w, str) for ws in terms.values() for w in ws
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise LayoutError(f'{path}: expected {{"templates": [...], "terms": {{group: [...]}}}}; {error}') from error
    if not good or len(terms) < 1:
        raise LayoutError(f'{path}: expected {{"templates": [...], "terms": {{group: [...]}}}}; found other types')
    return templates, terms


def prepare(study: Study) -> None:
    if study.reader != "templates":
        _, terms = read_lists(study.options["lists"])
        study.samples = find_terms(study.texts, terms)
        if not study.samples:
            raise InputError("none of the terms is in these texts; give your own with --option lists=FILE")
    limit(study)
    count = getattr(getattr(study.model, "config", None), "num_labels", 2)
    study.options["explained"] = int(
        study.options["explained"] if study.options["explained"] is not None else count - 1
    )
    if not 0 <= study.options["explained"] < count:
        raise InputError(f"the model has classes 0 to {count - 1}, not {study.options['explained']}")


def find_terms(samples: Sequence[Text], terms: Mapping[str, Sequence[str]]) -> list[Text]:
    """The texts that hold a term, once for each: ids like those of the templates."""
    patterns = [(g, w, re.compile(rf"\b{re.escape(w)}\b", re.IGNORECASE)) for g, words in terms.items() for w in words]
    made = []
    for sample in samples:
        for group, word, pattern in patterns:
            if found := pattern.search(sample.text):
                made.append(Text(f"{group}/{word}/{sample.id}@{found.start()}-{found.end()}", sample.text))
    return made


def _span(identity: str) -> tuple[int, int]:
    start, _, end = identity.rpartition("@")[2].partition("-")
    return int(start), int(end)


def _position(encoded: Encoded, span: tuple[int, int]) -> list[int]:
    """Words that overlap the term."""
    return sorted(
        {
            w
            for w, (a, b) in zip(encoded.words, encoded.spans, strict=True)
            if w is not None and a < span[1] and b > span[0]
        }
    )


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    batch = read_texts(study, samples)
    explained = study.options["explained"]
    for configuration in configurations:
        scores = token_scores(study, batch, configuration, [explained] * len(samples))
        for i, (sample, found) in enumerate(zip(samples, scores, strict=True)):
            if isinstance(found, Unusable):
                yield sample.id, configuration, found
                continue
            words = word_sums(found.tolist(), batch.encoded[i])
            at = _position(batch.encoded[i], _span(sample.id))
            if not at:
                yield sample.id, configuration, Unusable("failed", "the term was cut off by the truncation")
                continue
            head = max(at, key=lambda w: words[w])
            scale = float(np.abs(words).sum())
            yield (
                sample.id,
                configuration,
                {
                    "relevance": float(words[at].sum()),
                    "share": float(words[at].sum() / scale) if scale else 0.0,
                    "rank": term_rank(words, head),
                    "words": len(words),
                    "logit": float(batch.logits[i, explained]),
                    "probability": float(batch.probabilities[i, explained]),
                },
            )


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    labels = tuple(c.label for c in study.configurations)
    groups = list(dict.fromkeys(s.id.split("/")[0] for s in study.samples))
    pairs = list(combinations(groups, 2))
    by_group: dict[tuple[str, str], list[dict[str, Any]]] = {}
    top: dict[str, list[str]] = {}
    for label in labels:
        terms: dict[str, list[float]] = {}
        for sample, record in sorted(records.get(label, {}).items()):
            if "values" in record:
                group, term, _ = sample.split("/", 2)
                by_group.setdefault((label, group), []).append(record["values"])
                terms.setdefault(term, []).append(record["values"]["share"])
        top[label] = [
            f"{t} {np.mean(v):.3f}" for t, v in sorted(terms.items(), key=lambda kv: -float(np.mean(kv[1])))[:8]
        ]
    columns = [f"{g}: {what}" for g in groups for what in ("share of relevance", "rank")] + [
        f"{a} − {b}: share" for a, b in pairs
    ]
    cells = {}
    for label in labels:
        for g in groups:
            vs = by_group.get((label, g), [])
            cells[label, f"{g}: share of relevance"] = Cell(bootstrap(np.array([v["share"] for v in vs])))
            cells[label, f"{g}: rank"] = Cell(bootstrap(np.array([v["rank"] for v in vs], dtype=float)))
        for a, b in pairs:
            x, y = ([v["share"] for v in by_group.get((label, g), [])] for g in (a, b))
            cells[label, f"{a} − {b}: share"] = Cell(group_difference(x, y) if x and y else None)
    table = Table("bias", "Relevance of the name, by group", "Method", labels, tuple(columns), cells, digits=3)
    outputs = _outputs(groups, pairs, by_group, labels[0])
    listed = Table(
        "terms",
        "Names with the largest mean share of the relevance",
        "Method",
        (),
        (),
        {},
        note="\n".join(f"- {la}: {', '.join(ts)}" for la, ts in top.items()),
    )
    conventions = {
        "class explained": f"class {study.options['explained']} in every sentence",
        "share": "Σ scores of the name's tokens / Σ |scores| of all words; rank 1 = highest score in the sentence",
        "lists": "built-in templates and names (whyformer.benchmarks.name_bias)"
        if study.options["lists"] is None
        else "given by the user",
        "reading": "a difference between groups on sentences that differ only in the name is the model's, not "
        "the people's",
    }
    remarks = [
        *study.remarks,
        "The paper shows a figure of top-ranked names and publishes no lists, so there is no published column.",
        "A name's score is the sum over its word pieces; the random row shows what the number of pieces does.",
    ]
    return Report(
        "bias", (table, outputs, listed), (), conventions, counts_of(study, records), tuple(remarks), {"terms": top}
    )


def _outputs(
    groups: Sequence[str], pairs: Sequence[tuple[str, str]], found: Mapping[tuple[str, str], Any], label: str
) -> Table:
    """What the model itself makes of the groups, whatever the method."""
    cells, rows = {}, [*groups, *(f"{a} − {b}" for a, b in pairs)]
    for quantity in ("logit", "probability"):
        for g in groups:
            cells[g, quantity] = Cell(bootstrap(np.array([v[quantity] for v in found.get((label, g), [])])))
        for a, b in pairs:
            x, y = ([v[quantity] for v in found.get((label, g), [])] for g in (a, b))
            cells[f"{a} − {b}", quantity] = Cell(group_difference(x, y) if x and y else None)
    return Table(
        "outputs",
        "The model's output for the explained class, by group",
        "Group",
        tuple(rows),
        ("logit", "probability"),
        cells,
        digits=3,
    )


BENCHMARK = Benchmark(
    "bias",
    "name bias on sentiment: relevance and rank of names, difference between groups (Ali et al. 2022)",
    "text",
    "input_x_gradient,gae,lrp_ah,lrp_ln,lrp_ah_ln",
    {},
    {"lists": None, "explained": None, "longest": 256, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: 0.0,
    own_data=own_data,
)
