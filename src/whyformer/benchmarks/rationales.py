"""Benchmark ``rationales``: agreement with human rationales on ERASER (CVPR 2021, Figure 4), and ERASER's own
figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.encoding import Encoded
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import limit
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.benchmarks.sentences import TextBatch, accuracy, match_labels, read_texts, token_scores
from whyformer.benchmarks.study import Benchmark, Measured, Study, Values, counts_of, values_of
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import SHARES
from whyformer.evaluate.metrics.plausibility import TOP_K, auprc, f1, token_counts, top_words, word_scores
from whyformer.evaluate.statistics import bootstrap
from whyformer.jobs.records import Record


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    batch = read_texts(study, samples)
    targets = [s.label or 0 for s in samples] if study.options["explained"] == "target" else batch.predicted
    words: dict[tuple[int, int], NDArray[np.float64] | Unusable] = {}
    for c, configuration in enumerate(configurations):
        for i, found in enumerate(_word_scores(study, batch, configuration, targets)):
            words[c, i] = found
    left = _erased(study, batch, [(i, w) for (_, i), w in words.items() if not isinstance(w, Unusable)])
    for c, configuration in enumerate(configurations):
        for i, sample in enumerate(samples):
            scores = words[c, i]
            if isinstance(scores, Unusable):
                yield sample.id, configuration, scores
                continue
            truth = np.asarray(sample.rationale)
            values: Values = {
                "counts": {str(k): token_counts(top_words(scores, k), truth) for k in TOP_K},
                "auprc": auprc(scores, truth),
                "words": len(truth),
                "scored": int((~np.isnan(scores)).sum()),
                "correct_class": int(batch.predicted[i] == sample.label),
            }
            if left:
                full = float(batch.probabilities[i, batch.predicted[i]])
                kinds = {
                    kind: [full - left[i, kind, _chosen(scores, share)] for share in SHARES]
                    for kind in ("without", "alone")
                }
                values["comprehensiveness"], values["sufficiency"] = kinds["without"], kinds["alone"]
            yield sample.id, configuration, values


def _word_scores(study: Study, batch: TextBatch, configuration: Configuration, targets: Sequence[int]) -> Iterator[Any]:
    if configuration.kind == "ground_truth":
        for sample, encoded in zip(batch.samples, batch.encoded, strict=True):
            seen = {w for w in encoded.words if w is not None}
            yield np.array([float(flag) if i in seen else np.nan for i, flag in enumerate(sample.rationale or ())])
        return
    for found, encoded in zip(token_scores(study, batch, configuration, targets), batch.encoded, strict=True):
        if isinstance(found, Unusable):
            yield found
            continue
        pieces = np.maximum(found, 0) if study.options["clamp"] else found
        yield word_scores(pieces, encoded.words, encoded.count)


def _chosen(scores: NDArray[np.float64], share: float) -> frozenset[int]:
    """The rationale of a given share of the words that the model saw."""
    return frozenset(int(w) for w in top_words(scores, max(1, round(share * int((~np.isnan(scores)).sum())))))


def _erased(
    study: Study, batch: TextBatch, asked: Sequence[tuple[int, Any]]
) -> dict[tuple[int, str, frozenset[int]], float]:
    """Probability of the predicted class without, and with only, the chosen words; each distinct text is run once."""
    if not study.options["erasure"]:
        return {}
    jobs: dict[tuple[int, str, frozenset[int]], list[int]] = {}
    for i, scores in asked:
        for share in SHARES:
            words = _chosen(scores, share)
            encoded: Encoded = batch.encoded[i]
            jobs.setdefault((i, "without", words), encoded.without_words(set(words)))
            jobs.setdefault((i, "alone", words), encoded.only_words(set(words)))
    found = study.probabilities(study.forwards.ids(list(jobs.values())))
    return {key: float(row[batch.predicted[key[0]]]) for key, row in zip(jobs, found, strict=True)}


def prepare(study: Study) -> None:
    limit(study)
    if study.options["explained"] not in ("target", "predicted"):
        raise InputError(f"explained must be target or predicted, not {study.options['explained']!r}")
    missing = [s.id for s in study.texts if s.rationale is None or s.words is None]
    if missing:
        raise InputError(
            f"{len(missing)} texts have no human rationale, {missing[0]} among them: this benchmark needs data "
            f"like ERASER's"
        )
    empty = {s.id for s in study.texts if not any(s.rationale or ())}
    if empty:
        study.samples = [s for s in study.samples if s.id not in empty]
        study.remark(f"{len(empty)} texts with an empty rationale were left out")
        if not study.samples:
            raise InputError("every rationale is empty")
    match_labels(study)


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    labels = tuple(c.label for c in study.configurations)
    values = {label: values_of(study, records, label) for label in labels}
    rows: dict[str, Any] = {}
    for k in TOP_K:
        rows[f"token-F1, top {k} (macro) ↑"] = lambda vs, k=k: bootstrap(
            np.array([100 * float(f1(*v["counts"][str(k)])) for v in vs])
        )
    for k in (10, 40, 80):
        rows[f"token-F1, top {k} (micro) ↑"] = lambda vs, k=k: bootstrap(
            np.array([v["counts"][str(k)] for v in vs], dtype=float),
            lambda m: 100 * f1(m[..., 0], m[..., 1], m[..., 2]),
        )
    rows["AUPRC ↑"] = lambda vs: bootstrap(np.array([100 * v["auprc"] for v in vs if v["auprc"] is not None]))
    if study.options["erasure"]:
        rows["comprehensiveness ↑"] = lambda vs: bootstrap(
            np.array([100 * np.mean(v["comprehensiveness"]) for v in vs])
        )
        rows["sufficiency ↓"] = lambda vs: bootstrap(np.array([100 * np.mean(v["sufficiency"]) for v in vs]))
    cells = {
        (row, label): Cell(figure(values[label])) for row, figure in rows.items() for label in labels if values[label]
    }
    table = Table(
        "rationales",
        "Agreement with human rationales, × 100 (CVPR 2021, Figure 4: a curve, no published numbers)",
        "Figure",
        tuple(rows),
        labels,
        cells,
    )
    lines = {
        label: (list(map(float, TOP_K)), [float(np.mean([f1(*v["counts"][str(k)]) for v in vs])) for k in TOP_K])
        for label, vs in values.items()
        if vs
    }
    some = values[labels[0]]
    cut = float(np.mean([v["scored"] < v["words"] for v in some])) if some else 0.0
    conventions = {
        "class explained": study.options["explained"]
        + (" (the ground truth, as in the paper)" if study.options["explained"] == "target" else ""),
        "scores": ("clamped at 0 from below, " if study.options["clamp"] else "")
        + "word = maximum over its word pieces; special tokens have none",
        "top k": "words with the highest scores, equal ones in reading order; words cut off by truncation are "
        "never chosen",
        "truth": "union of all evidence spans of the whole document, also beyond the truncation",
        "truncated": f"{100 * cut:.0f} % of the texts",
        "macro, micro": "mean of the documents' F1 (what Chefer's code prints); F1 of the summed counts",
        "comprehensiveness, sufficiency": "predicted class, words deleted, mean over 1, 5, 10, 20, 50 % of the words",
        "AUPRC": "words with a score, trapezoid of the precision-recall curve",
        "accuracy": accuracy(some),
    }
    curve = Curves("token-F1", "token-F1 of the top k words", "k", "token-F1 (macro)", lines)
    return Report("rationales", (table,), (curve,), conventions, counts_of(study, records), tuple(study.remarks))


BENCHMARK = Benchmark(
    "rationales",
    "agreement with human rationales: token-F1, AUPRC, comprehensiveness, sufficiency (CVPR 2021, Figure 4)",
    "text",
    "rollout:start_layer=1,raw_attention,gradcam_attention,lrp,partial_lrp,transformer_attribution:start_layer=1",
    {},
    {"explained": "target", "clamp": True, "erasure": True, "longest": 512, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: 2.0 * len(SHARES) * bool(study.options["erasure"]),
    lambda study: True,
)
