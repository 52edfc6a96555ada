"""Benchmark ``activation``: Ali et al. 2022, AUAC of the activation curve and AU-MSE of pruning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.encoding import fill_id
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import check_labels, geometry, limit, maps, patch_size, pool, read_batch
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.benchmarks.sentences import accuracy, match_labels, read_texts, token_scores
from whyformer.benchmarks.study import Benchmark, Measured, Study, Values, counts_of, values_of
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import STEPS, au_mse, auac, prune_masks, reveal_masks, squared_change
from whyformer.evaluate.statistics import bootstrap
from whyformer.inputs.removal import picture_filler
from whyformer.jobs.records import Record


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    read = _patches if study.modality == "image" else _tokens
    truth, clean, scores, run = read(study, samples, configurations)
    asked: dict[tuple[int, bytes], tuple[int, NDArray[np.bool_]]] = {}
    keys: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for (c, i), found in scores.items():
        if not isinstance(found, Unusable):
            hidden, pruned = ~reveal_masks(found), prune_masks(found)
            keys[c, i] = hidden.tobytes(), pruned.tobytes()
            for masks in (hidden, pruned):
                asked.setdefault((i, masks.tobytes()), (i, masks))
    logits = dict(zip(asked, np.split(run(list(asked.values())), len(asked)) if asked else [], strict=True))
    for c, configuration in enumerate(configurations):
        for i, sample in enumerate(samples):
            found = scores[c, i]
            if isinstance(found, Unusable):
                yield sample.id, configuration, found
                continue
            shown, pruned_logits = (logits[i, key] for key in keys[c, i])
            values: Values = {
                "probability": study.probabilities(shown)[:, truth[i]].tolist(),
                "change": squared_change(clean[i], pruned_logits).tolist(),
                "correct_class": int(clean[i].argmax() == truth[i]),
            }
            yield sample.id, configuration, values


def _tokens(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Any:
    """(true classes, clean logits, scores, a function that runs masked texts)."""
    batch = read_texts(study, samples)
    truth = [s.label for s in samples]
    fill = fill_id(study.processor, study.options["fill"])
    scores = {
        (c, i): s for c, one in enumerate(configurations) for i, s in enumerate(token_scores(study, batch, one, truth))
    }

    def run(asked: list[tuple[int, NDArray[np.bool_]]]) -> NDArray[np.float64]:
        return study.forwards.ids([batch.encoded[i].replaced(row, fill) for i, masks in asked for row in masks])

    return truth, batch.logits, scores, run


def _patches(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Any:
    """The same for pictures, whose features are the model's patches: a patch's score is the mean of its pixels'."""
    batch = read_batch(study, samples)
    truth = [s.label for s in samples]
    height, width = patch_size(study)
    empty = picture_filler("black", batch.pixels, -batch.spec.mean / batch.spec.std)
    scores: dict[tuple[int, int], Any] = {}
    for c, one in enumerate(configurations):
        for i, found in enumerate(maps(study, batch, one, truth)):
            scores[c, i] = found if isinstance(found, Unusable) else pool(found, height, width).reshape(-1)
    grid = (batch.spec.size[0] // height, batch.spec.size[1] // width)

    def run(asked: list[tuple[int, NDArray[np.bool_]]]) -> NDArray[np.float64]:
        def pictures() -> Iterator[torch.Tensor]:
            for i, masks in asked:
                for row in masks:
                    pixels = np.kron(row.reshape(grid), np.ones((height, width), dtype=bool))
                    yield torch.where(torch.from_numpy(pixels).to(empty.device), empty[i], batch.pixels[i])

        return study.forwards.pixels(pictures())

    return truth, batch.logits, scores, run


def prepare(study: Study) -> None:
    limit(study)
    if study.modality == "image":
        check_labels(study)
        size, patch = read_batch(study, study.pictures[:1]).spec.size, patch_size(study)
        if size[0] % patch[0] or size[1] % patch[1]:
            raise InputError(f"the input of {size} pixels is not a whole number of patches of {patch}")
    else:
        match_labels(study)
        fill_id(study.processor, study.options["fill"])


def column_of(study: Study) -> str:
    """The paper's name of the data set, as far as it can be told; the option ``column`` says it otherwise."""
    if study.options["column"]:
        return str(study.options["column"])
    last = Path(study.data_name).name
    return last if study.reader == "tweeteval" else study.reader


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    labels = tuple(c.label for c in study.configurations)
    values = {label: values_of(study, records, label) for label in labels}
    column = column_of(study)
    cells = {}
    for c in study.configurations:
        vs = values[c.label]
        if vs:
            figure = published.AUAC.get(column, {}).get(c.published or "")
            cells[c.label, f"{column} AUAC ↑"] = Cell(bootstrap(auac([v["probability"] for v in vs])), figure)
            cells[c.label, f"{column} AU-MSE ↓"] = Cell(bootstrap(au_mse([v["change"] for v in vs])))
    table = Table(
        "activation",
        "Activation and pruning (Ali et al. 2022)",
        "Method",
        labels,
        (f"{column} AUAC ↑", f"{column} AU-MSE ↓"),
        cells,
        digits=3,
    )
    curves = [
        Curves(
            name,
            title,
            x,
            y,
            {
                la: (list(STEPS), [float(a) for a in np.mean([v[key] for v in vs], 0)])
                for la, vs in values.items()
                if vs
            },
        )
        for name, title, x, y, key in (
            ("activation", "activation", "fraction revealed", "probability of the true class", "probability"),
            ("pruning", "pruning", "fraction pruned", "Σ (change of the logits)²", "change"),
        )
    ]
    text = study.modality == "text"
    conventions = {
        "class explained": "the true class",
        "start": "every token [UNK], special ones included"
        if text
        else "a black picture; features are the model's patches, each the mean of its pixels' scores",
        "order": "activation: descending signed score; pruning: ascending |score|; ⌈f · N⌉ features at f = 0, 0.1 … 1",
        "special tokens": "score 0, and they count among the N" if text else "not scored, always there",
        "AUAC": "trapezoid over f of the probability of the true class; AU-MSE: of Σ_c (change of logit c)², a "
        "sum over classes",
        "padding": "none: each text is run at its own length" if text else "–",
        "accuracy": accuracy(values[labels[0]]),
        **({"longest text": f"{study.options['longest']} tokens, cut off behind"} if text else geometry(study)),
    }
    return Report("activation", (table,), tuple(curves), conventions, counts_of(study, records), tuple(study.remarks))


BENCHMARK = Benchmark(
    "activation",
    "activation curve (AUAC) and pruning (AU-MSE) of Ali et al. 2022",
    "both",
    published.ALI_METHODS,
    published.ALI_SETTINGS,
    {"fill": "unk", "longest": 256, "column": None, "resample": None, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: 2.0 * len(STEPS),
)
