"""Benchmark ``activation``: Ali et al. 2022, AUAC of the activation curve and AU-MSE of pruning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.pictures import Pictures, conventions
from whyformer.benchmarks.report import Curves, Report, Results, mean, mean_lines, method_table, percent
from whyformer.benchmarks.study import Benchmark, Measured, Study, Unusable
from whyformer.benchmarks.texts import Texts
from whyformer.evaluate.metrics.faithfulness import STEPS, au_mse, auac, prune_masks, reveal_masks, squared_change
from whyformer.inputs.removal import PICTURE_BASELINES, TEXT_BASELINES

Job = tuple[int, bytes]
"""(sample, masks of its features), to be run once."""


def measure(batch: Pictures | Texts, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Features are all tokens, special ones too, or the patches; what several methods ask for is run once."""
    image, truth = isinstance(batch, Pictures), [s.label or 0 for s in batch.samples]
    baseline = batch.study.options["baseline"] or batch.baseline
    scores = {(c.label, i): one for c in configurations for i, one in enumerate(batch.scores(c, truth))}
    jobs: dict[Job, list[tuple[int, NDArray[np.bool_], str]]] = {}
    needs: dict[tuple[str, int], list[Job]] = {}
    for (label, i), one in scores.items():
        if not isinstance(one, Unusable):
            features = batch.features(i, one) if image else one
            for masks in (~reveal_masks(features), prune_masks(features)):
                needs.setdefault((label, i), []).append((i, masks.tobytes()))
                jobs.setdefault(
                    (i, masks.tobytes()), [(i, batch.covered(i, mask) if image else mask, baseline) for mask in masks]
                )
    run = batch.run(one for masked in jobs.values() for one in masked)
    logits = dict(zip(jobs, np.split(run, len(jobs) or 1), strict=False))
    for configuration in configurations:
        for i, sample in enumerate(batch.samples):
            place = configuration.label, i
            if isinstance(found := scores[place], Unusable):
                yield sample.id, configuration, found
                continue
            shown, pruned = (logits[job] for job in needs[place])
            yield sample.id, configuration, {
                "probability": batch.study.probabilities(shown)[:, truth[i]].tolist(),
                "change": squared_change(batch.logits[i], pruned).tolist(),
                "correct_class": int(batch.predicted[i] == truth[i]),
            }  # fmt: skip


def prepare(study: Study) -> None:
    study.limit()
    study.check_labels()
    study.check_one("baseline", (None, *(PICTURE_BASELINES if study.modality == "image" else TEXT_BASELINES[:3])))


def column_of(study: Study) -> str:
    """The paper's name of the data set, as far as it can be told; the option ``column`` says it otherwise."""
    if study.options["column"]:
        return str(study.options["column"])
    return Path(study.data_name).name if study.reader == "tweeteval" else study.reader


def summarize(study: Study, results: Results) -> Report:
    column, text = column_of(study), study.modality == "text"
    baseline = study.options["baseline"] or ("unk" if text else "black")
    titles = f"{column} AUAC ↑", f"{column} AU-MSE ↓"
    table = method_table(
        "activation", "Activation and pruning (Ali et al. 2022)", "Method", study.configurations, results,
        {titles[0]: mean(lambda v: auac(v["probability"])), titles[1]: mean(lambda v: au_mse(v["change"]))},
        published={titles[0]: published.AUAC.get(column, {})}, digits=3, down=True,
    )  # fmt: skip
    shown = mean_lines(results, STEPS, lambda v: v["probability"])
    pruned = mean_lines(results, STEPS, lambda v: v["change"])
    curves = (
        Curves("activation", "activation", "fraction revealed", "probability of the true class", shown),
        Curves("pruning", "pruning", "fraction pruned", "Σ (change of the logits)²", pruned),
    )
    stated = {
        "class explained": "the true class",
        "start": f"every token {baseline}, special ones included"
        if text
        else f"baseline {baseline}; features are the model's patches, each the mean of its pixels' scores",
        "order": "activation: descending signed score; pruning: ascending |score|; ⌈f · N⌉ features at f = 0, 0.1 … 1",
        "special tokens": "score 0, and they count among the N" if text else "not scored, always there",
        "AUAC": "trapezoid over f of the probability of the true class; AU-MSE: of Σ_c (change of logit c)², a "
        "sum over classes",
        "padding": "none: each text is run at its own length" if text else "–",
        "accuracy": percent(list(next(iter(results.values())).values()), lambda v: v["correct_class"]),
        **({"longest text": f"{study.options['longest']} tokens, cut off behind"} if text else conventions(study)),
    }
    return Report((table,), curves, stated)


BENCHMARK = Benchmark(
    "activation", "activation curve (AUAC) and pruning (AU-MSE) of Ali et al. 2022", "both",
    published.ALI_METHODS, published.ALI_SETTINGS,
    {"baseline": None, "longest": 256, "column": None, "resample": None, "count": None, "files": None},
    prepare, measure, summarize,
)  # fmt: skip
