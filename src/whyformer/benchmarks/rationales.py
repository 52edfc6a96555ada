"""Benchmark ``rationales``: agreement with human rationales (CVPR 2021, Figure 4), and the figures of ERASER."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whyformer.benchmarks import report
from whyformer.benchmarks.batches import TextBatch
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.published import PUBLISHED, conventions
from whyformer.benchmarks.report import Curves, Figure, Report, Results, Values, mean, mean_lines, method_table
from whyformer.benchmarks.study import Benchmark, Exclusion, Measured, Study
from whyformer.errors import InputError
from whyformer.evaluation.metrics.faithfulness import SHARES, rationale_masks
from whyformer.evaluation.metrics.plausibility import TOP_K, auprc, f1, token_counts, top_words, word_scores
from whyformer.evaluation.statistics import bootstrap

KINDS = ("comprehensiveness", "sufficiency")


def measure(batch: TextBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    options = batch.study.options
    target = options["explained"] == "target"
    maps = batch.maps(configurations, [s.label or 0 for s in batch.samples] if target else batch.predicted)
    words = {
        (c, i): word_scores(np.maximum(s, 0) if options["clamp"] else s, batch.encoded[i].words, batch.encoded[i].count)
        for (c, i), s in maps.items()
        if not isinstance(s, Exclusion)
    }

    def requests() -> Iterator[tuple[Any, int, Any, str]]:
        """Yield inputs without, and with only, the words of the highest scores among those that the model read."""
        for (c, i), scores in words.items() if options["erasure"] else ():
            scored = ~np.isnan(scores)
            rationales = np.zeros((len(SHARES), scores.size), dtype=bool)
            rationales[:, scored] = rationale_masks(scores[scored])
            tokens = rationales[:, [word for word in batch.encoded[i].words if word is not None]]
            yield (c, i, "comprehensiveness"), i, batch.covered(i, tokens), "delete"
            yield (c, i, "sufficiency"), i, batch.covered(i, ~tokens), "delete"

    logits = batch.outputs(requests())
    for (c, i), map_ in maps.items():
        sample, top = batch.samples[i], batch.predicted[i]
        if isinstance(map_, Exclusion):
            yield sample.id, c, map_
            continue
        scores, truth = words[c, i], np.asarray(sample.rationale)
        values: Values = {
            "counts": {str(k): token_counts(top_words(scores, k), truth) for k in TOP_K},
            "auprc": auprc(scores, truth),
            "words": len(truth),
            "scored": int((~np.isnan(scores)).sum()),
            "correct_class": int(top == sample.label),
        }
        for kind in KINDS if options["erasure"] else ():
            remaining = batch.study.probabilities(logits[c, i, kind])[:, top]
            values[kind] = (batch.probabilities[i, top] - remaining).tolist()
        yield sample.id, c, values


def prepare(study: Study) -> None:
    study.limit()
    missing = [s.id for s in study.samples if s.rationale is None or s.words is None]
    if missing:
        raise InputError(
            f"{len(missing)} texts have no human rationale, such as {missing[0]}: this benchmark needs data such as "
            "ERASER's"
        )
    study.leave_out({s.id for s in study.samples if not any(s.rationale)}, "texts with an empty rationale")
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
    curve = Curves("token-F1", "token-F1 of the top k words", "k", "token-F1 (macro)", lines)
    explained, truncated = study.options["explained"], [v["scored"] < v["words"] for v in report.scored(results)]
    texts = conventions(
        "rationales", explained=explained + (" (the ground truth, as in the paper)" if explained == "target" else ""),
        clamped="clamped at 0 from below, " if study.options["clamp"] else "",
        cut=100 * float(np.mean(truncated or [0])), accuracy=report.percent(results, lambda v: v["correct_class"]),
    )  # fmt: skip
    return Report((table,), (curve,), texts)


BENCHMARK = Benchmark(
    "rationales",
    "agreement with human rationales: token-F1, AUPRC, comprehensiveness, sufficiency (CVPR 2021, Figure 4)", "text",
    PUBLISHED["perturbation"]["methods"], {},
    {"explained": "target", "clamp": True, "erasure": True, "longest": 512, "count": None, "files": None},
    prepare, measure, summarize, lambda study: True, choices={"explained": ("target", "predicted")},
)  # fmt: skip
