"""Tables and curves of perturbation: Table 1 of Chefer et al. 2021, AOPC, LOdds, insertion and deletion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whyformer.benchmarks import published
from whyformer.benchmarks.pictures import geometry
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.benchmarks.study import Study, Values, constant_remarks, counts_of, values_of
from whyformer.evaluate.metrics.faithfulness import accuracy_auc, aopc, curve_fractions, log_odds, mean_curve_area
from whyformer.evaluate.statistics import Interval, bootstrap
from whyformer.jobs.records import Record

EXPLAINED = ("predicted", "target")


def auc_interval(values: Sequence[Values], explained: str, direction: str) -> Interval:
    """AUC of the top-1 accuracy with its interval over samples."""
    rows = [
        accuracy_auc(curve_fractions(), [v["clean"]["correct"], *v[explained][direction]["correct"]]) for v in values
    ]
    return bootstrap(np.array(rows))


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    tables, curves = [], []
    labels = tuple(c.label for c in study.configurations)
    values = {label: values_of(study, records, label) for label in labels}
    plain = study.options["substrate"] == "black"
    directions = [d for d in ("negative", "positive") if d in study.options["measures"]]
    cells = {}
    rows = [f"{d}/{e}" for d in directions for e in EXPLAINED if e in study.options["explained"]]
    for row in rows:
        direction, explained = row.split("/")
        for c in study.configurations:
            figure = published.TABLE_1[row].get(c.published or "") if plain else None
            cells[published.TABLE_1_ROWS[row], c.label] = Cell(
                auc_interval(values[c.label], explained, direction), figure
            )
        curves.append(_accuracy_curves(study, values, direction, explained))
    if rows:
        tables.append(
            Table(
                "auc",
                "Top-1 accuracy under perturbation, AUC in % (CVPR 2021, Table 1)",
                "Perturbation, class explained",
                tuple(published.TABLE_1_ROWS[r] for r in rows),
                labels,
                cells,
            )
        )
    more = _probability_table(study, values, labels)
    tables += [more] if more.rows else []
    accuracy = [v["clean"]["correct"] for v in values[labels[0]]]
    remarks = [*study.remarks, *constant_remarks(study, records, "their pixels go row by row")]
    conventions = {
        "class explained": ", ".join(study.options["explained"]) + "; accuracy always against the label",
        "removed": "per pixel, exactly ⌊f · pixels⌋ at f = 0.1 … 0.9; positive: highest scores first, negative: "
        "lowest first",
        "substrate": {
            "black": "0 before normalisation (black)",
            "mean": "0 after normalisation (mean colour)",
            "blur": "Gaussian blur, kernel 11, σ 5",
        }[study.options["substrate"]],
        "AUC": "100 · trapezoid of top-1 accuracy over f = 0 … 0.9 from the clean point, not divided by 0.9; at "
        "most 90",
        "AOPC, LOdds": "probability of the class first predicted, mean over f = 0.1 … 0.9, positive perturbation",
        "clean accuracy": f"{100 * float(np.mean(accuracy)):.1f} % of {len(accuracy)}"
        if accuracy
        else "nothing scored",
        **geometry(study),
    }
    return Report("perturbation", tuple(tables), tuple(curves), conventions, counts_of(study, records), tuple(remarks))


def _accuracy_curves(study: Study, values: dict[str, list[Values]], direction: str, explained: str) -> Curves:
    lines = {}
    for label, found in values.items():
        if found:
            y = np.mean([[v["clean"]["correct"], *v[explained][direction]["correct"]] for v in found], 0)
            lines[label] = (list(curve_fractions()), [float(a) for a in y])
    return Curves(
        f"{direction}/{explained}",
        f"{direction} perturbation, {explained} class",
        "fraction of pixels removed",
        "top-1 accuracy",
        lines,
    )


def _probability_table(study: Study, values: dict[str, list[Values]], labels: tuple[str, ...]) -> Table:
    explained = study.options["explained"][0]
    rows: dict[str, Any] = {}
    if "positive" in study.options["measures"]:
        rows["AOPC ↑"] = lambda v: aopc(v["clean"]["probability"], v[explained]["positive"]["probability"])
        rows["LOdds ↓"] = lambda v: log_odds(v["clean"]["probability"], v[explained]["positive"]["probability"])
    for name, title in (("deletion", "Deletion ↓"), ("insertion", "Insertion ↑")):
        if name in study.options["measures"]:
            rows[title] = lambda v, name=name: mean_curve_area(v[explained][name]["probability"])
    cells = {}
    for row, figure in rows.items():
        for label in labels:
            cells[row, label] = (
                Cell(bootstrap(np.array([float(figure(v)) for v in values[label]]))) if values[label] else Cell(None)
            )
    return Table(
        "probability",
        f"Probability of the predicted class ({explained} class explained)",
        "Figure",
        tuple(rows),
        labels,
        cells,
        digits=3,
    )
