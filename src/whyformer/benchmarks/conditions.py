"""Benchmark ``conditions``: robustness of perturbation results to the baseline, to ties and to upsampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.baselines import BASELINES, names_for
from whyformer.benchmarks import perturbation
from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.published import CONVENTIONS, conventions
from whyformer.benchmarks.report import Cell, Report, Results, Table, Values
from whyformer.benchmarks.study import CONSTANT, Benchmark, Exclusion, Measured, Study, constant_remarks
from whyformer.errors import InputError
from whyformer.evaluation.metrics import faithfulness
from whyformer.evaluation.statistics import bootstrap

CONDITIONS: dict[str, dict[str, str]] = {
    "black": {},
    **{name: {"baseline": name} for name in names_for("image") if name != "black"},
    "last": {"ties": "last"},
    "nearest": {"per": "nearest"},
    "nearest-last": {"per": "nearest", "ties": "last"},
    "patch": {"per": "patch"},
}
"""Name -> differences from the published protocol, which is the first condition."""
PUBLISHED = {"baseline": "black", "ties": "index", "per": "pixel", "measures": perturbation.DIRECTIONS}
EXPLAINED = "predicted"


def figure(values: Values, condition: str, direction: str, of: str) -> float:
    """Return a sample's area under the curve in %, ``of`` top-1 correctness or the explained class's probability."""
    curve = [values["clean"][of], *values[condition][direction][of]]
    return float(faithfulness.accuracy_auc(faithfulness.curve_fractions(), curve))


FIGURES = {
    "Positive ↓": (partial(figure, direction="positive", of="correct"), False),
    "Negative ↑": (partial(figure, direction="negative", of="correct"), True),
    "Positive, probability ↓": (partial(figure, direction="positive", of="probability"), False),
    "Negative, probability ↑": (partial(figure, direction="negative", of="probability"), True),
}
"""Title -> (figure of a sample in a condition, True if higher is better)."""


def prepare(study: Study) -> None:
    if len(study.options["conditions"]) < 2:
        raise InputError("conditions must have at least two values to compare")
    study.options |= {**PUBLISHED, "explained": (EXPLAINED,)}
    study.limit()
    study.check_labels()


def measure(batch: PictureBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    conditions = {name: {**batch.study.options, **CONDITIONS[name]} for name in batch.study.options["conditions"]}
    for sample, c, values in perturbation.measure_conditions(batch, configurations, conditions):
        if isinstance(values, Exclusion):
            yield sample, c, values
        else:
            yield sample, c, {name: v[EXPLAINED] if name in conditions else v for name, v in values.items()}


# -- the report ----------------------------------------------------------------------------------------------------
def tau(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Kendall's τ_a of the two halves of the last axis: (concordant − discordant) / all pairs."""
    pairs = list(combinations(range(means.shape[-1] // 2), 2))
    first, second = np.split(means, 2, axis=-1)
    a, b = (np.stack([x[..., i] - x[..., j] for i, j in pairs], -1) for x in (first, second))
    return np.asarray((np.sign(a) * np.sign(b)).mean(-1))


def summarize(study: Study, results: Results) -> Report:
    names = tuple(study.options["conditions"])
    labels = tuple(c.label for c in study.configurations if results[c.label])
    shared = sorted(set.intersection(*(set(results[label]) for label in labels))) if labels else []
    if len(labels) < 2 or not shared:
        return Report((), (), _stated(names, shared), ("Fewer than two methods have figures for the same pictures.",))
    tables, counts, orders = [], [], {}
    for title, (read, higher_is_better) in FIGURES.items():
        # [condition, sample, method]
        figures = np.array([[[read(results[m][s], name) for m in labels] for s in shared] for name in names])
        sign = 1 if higher_is_better else -1
        by_first = [labels[j] for j in np.argsort(-sign * figures[0].mean(0), kind="stable")]
        cells = {(m, n): Cell(bootstrap(figures[k, :, j])) for k, n in enumerate(names) for j, m in enumerate(labels)}
        ahead = [_ahead(sign * values) for values in figures]
        name, note = title[:-2].lower().replace(", ", "-"), _verdict(labels, names, ahead)
        tables.append(Table(name, title, "Method", tuple(by_first), names, cells, note=note))
        counts.append(f"{title}: {', '.join(str(sum(pairs.values())) for pairs in ahead)}")
        for name, values in zip(names, figures, strict=True):
            orders[title, name] = Cell(bootstrap(np.concatenate([figures[0], values], 1), tau))
    heading = f"Order of the methods: Kendall's τ with the order of '{names[0]}'"
    pairs = len(labels) * (len(labels) - 1) // 2
    note = f"Pairs of {pairs} with a significant difference, by condition: {'; '.join(counts)}."
    tables.append(Table("order", heading, "Figure", tuple(FIGURES), names, orders, note=note))
    remarks = constant_remarks(results, "their pixels go row by row, from the last row if ties=last")
    return Report(tuple(tables), (), _stated(names, shared), remarks)


def _ahead(good: NDArray[np.float64]) -> dict[tuple[int, int], bool]:
    """Return (i, j) -> True if method i is significantly ahead of j, by paired differences of ``[sample, method]``."""
    every = [(i, j) for i in range(good.shape[1]) for j in range(good.shape[1]) if i != j]
    return {(i, j): bootstrap(good[:, i] - good[:, j]).low > 0 for i, j in every}


def _verdict(labels: Sequence[str], names: Sequence[str], ahead: list[dict[tuple[int, int], bool]]) -> str:
    """Describe differences that are significant in all conditions, and pairs whose order depends on the condition."""
    lines = []
    for i, label in enumerate(labels):
        worse = [labels[j] for j in range(len(labels)) if i != j and all(pairs[i, j] for pairs in ahead)]
        if worse:
            lines.append(f"- in every condition {label} is ahead of {', '.join(worse)}")
    for i, j in combinations(range(len(labels)), 2):
        first, second = ([n for n, pairs in zip(names, ahead, strict=True) if pairs[pair]] for pair in ((i, j), (j, i)))
        if first and second:
            where = f"in {', '.join(first)}, behind it in {', '.join(second)}"
            lines.append(f"- {labels[i]} is ahead of {labels[j]} {where}")
    if not lines:
        return "No pair has a significant difference in all conditions."
    return "\n".join(["Significant by the interval of the paired difference:", "", *lines])


def _stated(names: Sequence[str], shared: Sequence[str]) -> dict[str, Any]:
    sections = {"removed": "per", "ties": "ties"}

    def described(name: str) -> str:
        options = {**PUBLISHED, **CONDITIONS[name]}
        others = [CONVENTIONS[section][options[key]] for section, key in sections.items()]
        return "; ".join([BASELINES[str(options["baseline"])].kinds["image"], *others])

    return conventions("conditions", samples=len(shared)) | {name: described(name) for name in names}


BENCHMARK = Benchmark(
    "conditions", "perturbation under other baselines, ties and upsampling: which differences hold in all", "image",
    "libragrad,attnlrp:share=1.0,gae,gae:composite=libra,transformer_attribution:start_layer=1,gradcam,"
    "raw_attention,rollout", {},
    {"conditions": tuple(CONDITIONS), "constant": "count", "resample": None, "count": None, "files": None},
    prepare, measure, summarize, choices={"constant": CONSTANT, "conditions": tuple(CONDITIONS)},
)  # fmt: skip
