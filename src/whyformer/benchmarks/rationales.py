"""Benchmark ``rationales``: agreement with human rationales on ERASER (CVPR 2021, Figure 4), and ERASER's own
figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import TRUTH, Configuration
from whyformer.benchmarks.report import Curves, Figure, Report, Results, Values, mean, mean_lines, method_table, percent
from whyformer.benchmarks.study import Benchmark, Measured, Scores, Study, Unusable
from whyformer.benchmarks.texts import Texts
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import SHARES
from whyformer.evaluate.metrics.plausibility import TOP_K, auprc, f1, token_counts, top_words, word_scores
from whyformer.evaluate.statistics import bootstrap

KINDS = {"comprehensiveness": "without", "sufficiency": "alone"}
Erasure = tuple[int, str, frozenset[int]]
"""(text, "without" or "alone", words of its rationale)."""


def measure(batch: Texts, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    target = batch.study.options["explained"] == "target"
    targets = [s.label or 0 for s in batch.samples] if target else batch.predicted
    found = {c.label: _word_scores(batch, c, targets) for c in configurations}
    asked = [(i, w) for scores in found.values() for i, w in enumerate(scores) if not isinstance(w, Unusable)]
    left = _erased(batch, asked) if batch.study.options["erasure"] else {}
    for configuration in configurations:
        for i, (sample, scores) in enumerate(zip(batch.samples, found[configuration.label], strict=True)):
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
            full = float(batch.probabilities[i, batch.predicted[i]])
            for name, kind in KINDS.items() if left else ():
                values[name] = [full - left[i, kind, _chosen(scores, share)] for share in SHARES]
            yield sample.id, configuration, values


def _word_scores(batch: Texts, configuration: Configuration, targets: Sequence[int]) -> list[Scores]:
    if configuration.kind == TRUTH:
        flags = [np.asarray(s.rationale, dtype=float) for s in batch.samples]
        return [
            np.where(np.isin(np.arange(len(f)), e.seen), f, np.nan) for f, e in zip(flags, batch.encoded, strict=True)
        ]
    clamp = batch.study.options["clamp"]
    return [
        s if isinstance(s, Unusable) else word_scores(np.maximum(s, 0) if clamp else s, e.words, e.count)
        for s, e in zip(batch.scores(configuration, targets), batch.encoded, strict=True)
    ]


def _chosen(scores: NDArray[np.float64], share: float) -> frozenset[int]:
    """The rationale of a given share of the words that the model saw."""
    return frozenset(int(w) for w in top_words(scores, max(1, round(share * int((~np.isnan(scores)).sum())))))


def _erased(batch: Texts, asked: Sequence[tuple[int, NDArray[np.float64]]]) -> dict[Erasure, float]:
    """Probability of the predicted class without, and with only, the chosen words; each distinct text is run once."""
    jobs: dict[Erasure, list[int]] = {}
    for i, scores in asked:
        encoded = batch.encoded[i]
        for words in (_chosen(scores, share) for share in SHARES):
            jobs.setdefault((i, "without", words), encoded.only(set(encoded.seen) - words))
            jobs.setdefault((i, "alone", words), encoded.only(words))
    found = batch.study.probabilities(batch.study.forwards.ids(list(jobs.values())))
    return {key: float(row[batch.predicted[key[0]]]) for key, row in zip(jobs, found, strict=True)}


def prepare(study: Study) -> None:
    study.limit()
    study.check_one("explained", ("target", "predicted"))
    missing = [s.id for s in study.texts if s.rationale is None or s.words is None]
    if missing:
        raise InputError(
            f"{len(missing)} texts have no human rationale, {missing[0]} among them: this benchmark needs data "
            f"like ERASER's"
        )
    study.leave_out({s.id for s in study.texts if not any(s.rationale or ())}, "texts with an empty rationale")
    study.check_labels()


def _f1(v: Values, k: int) -> float:
    return float(f1(*v["counts"][str(k)]))


def summarize(study: Study, results: Results) -> Report:
    figures: dict[str, Figure] = {
        f"token-F1, top {k} (macro) ↑": mean(lambda v, k=k: 100 * _f1(v, k))  # type: ignore[misc]
        for k in TOP_K
    }
    for k in (10, 40, 80):
        figures[f"token-F1, top {k} (micro) ↑"] = lambda vs, k=k: bootstrap(  # type: ignore[misc]
            [v["counts"][str(k)] for v in vs], lambda m: 100 * f1(m[..., 0], m[..., 1], m[..., 2])
        )
    figures["AUPRC ↑"] = mean(lambda v: None if v["auprc"] is None else 100 * v["auprc"])
    if study.options["erasure"]:
        figures["comprehensiveness ↑"] = mean(lambda v: 100 * np.mean(v["comprehensiveness"]))
        figures["sufficiency ↓"] = mean(lambda v: 100 * np.mean(v["sufficiency"]))
    title = "Agreement with human rationales, × 100 (CVPR 2021, Figure 4: a curve, no published numbers)"
    table = method_table("rationales", title, "Figure", study.configurations, results, figures)
    lines = mean_lines(results, [float(k) for k in TOP_K], lambda v: [_f1(v, k) for k in TOP_K])
    some = list(next(iter(results.values())).values())
    cut = float(np.mean([v["scored"] < v["words"] for v in some])) if some else 0.0
    stated = {
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
        "accuracy": percent(some, lambda v: v["correct_class"]),
    }
    curve = Curves("token-F1", "token-F1 of the top k words", "k", "token-F1 (macro)", lines)
    return Report((table,), (curve,), stated)


BENCHMARK = Benchmark(
    "rationales",
    "agreement with human rationales: token-F1, AUPRC, comprehensiveness, sufficiency (CVPR 2021, Figure 4)", "text",
    published.CVPR_METHODS, {},
    {"explained": "target", "clamp": True, "erasure": True, "longest": 512, "count": None, "files": None},
    prepare, measure, summarize, lambda study: True,
)  # fmt: skip
