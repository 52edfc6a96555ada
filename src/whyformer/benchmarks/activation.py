"""Benchmark ``activation``: AUAC of the activation curve and AU-MSE of pruning (Ali et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whyformer.baselines import TOKENS, names_for
from whyformer.benchmarks.configurations import Configuration, settings_of
from whyformer.benchmarks.published import PUBLISHED, conventions
from whyformer.benchmarks.report import Curves, Report, Results, mean, mean_lines, method_table, percent
from whyformer.benchmarks.study import Batch, Benchmark, Exclusion, Measured, Study
from whyformer.evaluation.metrics.faithfulness import STEPS, au_mse, auac, prune_masks, reveal_masks, squared_change


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Measure both curves; features are all tokens, special tokens included, or patches."""
    truth = [s.label or 0 for s in batch.samples]
    maps = batch.maps(configurations, truth)

    def requests() -> Iterator[tuple[Any, int, Any, str]]:
        baseline = batch.study.options["baseline"] or batch.baseline
        for (c, i), scores in maps.items():
            if not isinstance(scores, Exclusion):
                features = batch.features(i, scores) if batch.image else scores
                for kind, masks in (("shown", ~reveal_masks(features)), ("pruned", prune_masks(features))):
                    yield (c, i, kind), i, batch.covered(i, masks) if batch.image else masks, baseline

    logits = batch.outputs(requests())
    for (c, i), scores in maps.items():
        figures = scores if isinstance(scores, Exclusion) else {
            "probability": batch.study.probabilities(logits[c, i, "shown"])[:, truth[i]].tolist(),
            "change": squared_change(batch.logits[i], logits[c, i, "pruned"]).tolist(),
            "correct_class": int(batch.predicted[i] == truth[i]),
        }  # fmt: skip
        yield batch.samples[i].id, c, figures


def prepare(study: Study) -> None:
    study.limit()
    study.check_labels()
    study.check("baseline", (None, *(names_for("image") if study.modality == "image" else TOKENS)))


def summarize(study: Study, results: Results) -> Report:
    # name of the data set in the paper
    default = Path(study.data_name).name if study.reader == "tweeteval" else study.reader
    column = str(study.options["column"] or default)
    titles = f"{column} AUAC ↑", f"{column} AU-MSE ↓"
    table = method_table(
        "activation", "Activation and pruning (Ali et al. 2022)", "Method", study.configurations, results,
        {titles[0]: mean(lambda v: auac(v["probability"])), titles[1]: mean(lambda v: au_mse(v["change"]))},
        published={titles[0]: PUBLISHED["activation"].get(column, {})}, digits=3, down=True,
    )  # fmt: skip
    revealed = mean_lines(results, STEPS, lambda v: v["probability"])
    pruned = mean_lines(results, STEPS, lambda v: v["change"])
    curves = (
        Curves("activation", "activation", "fraction revealed", "probability of the true class", revealed),
        Curves("pruning", "pruning", "fraction pruned", "Σ (change of the logits)²", pruned),
    )
    baseline = study.options["baseline"] or ("unk" if study.modality == "text" else "black")
    texts = {
        **conventions("activation", accuracy=percent(results, lambda v: v["correct_class"])),
        **conventions(f"activation_{study.modality}", **{**study.options, "baseline": baseline}),
    }
    return Report((table,), curves, texts)


BENCHMARK = Benchmark(
    "activation", "activation curve (AUAC) and pruning (AU-MSE) of Ali et al. 2022", "both",
    "raw_attention,rollout,gae,input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln",
    settings_of(PUBLISHED["activation"]["methods"]),
    {"baseline": None, "longest": 256, "column": None, "resample": None, "count": None, "files": None},
    prepare, measure, summarize,
)  # fmt: skip
