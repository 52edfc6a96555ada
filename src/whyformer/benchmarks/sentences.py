"""What the benchmarks on text share: encoded samples and token scores of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.configurations import Configuration, random_scores
from whyformer.benchmarks.encoding import Encoded, encode, longest_text
from whyformer.benchmarks.explaining import Unusable, explain_ids, usable
from whyformer.benchmarks.study import Study
from whyformer.datasets.samples import Text
from whyformer.errors import InputError
from whyformer.models.structure import class_names

TokenScores = NDArray[np.float64] | Unusable


@dataclass(frozen=True)
class TextBatch:
    """Some texts as the model sees them, with its clean predictions."""

    samples: Sequence[Text]
    encoded: Sequence[Encoded]
    logits: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    @property
    def predicted(self) -> list[int]:
        return [int(i) for i in self.logits.argmax(-1)]


def read_texts(study: Study, samples: Sequence[Text]) -> TextBatch:
    longest = longest_text(study.model, study.processor, study.options.get("longest"))
    encoded = [encode(s, study.processor, longest) for s in samples]
    logits = study.forwards.ids([e.ids for e in encoded])
    return TextBatch(samples, encoded, logits, study.probabilities(logits))


def token_scores(
    study: Study, batch: TextBatch, configuration: Configuration, targets: Sequence[int]
) -> list[TokenScores]:
    """``[N]`` of each text, 0 at special tokens; or why there is none."""
    if configuration.kind == "random":
        drawn = [
            random_scores(s.id, (len(e.ids),), study.seed) for s, e in zip(batch.samples, batch.encoded, strict=True)
        ]
        return [np.where(e.special, 0.0, d) for d, e in zip(drawn, batch.encoded, strict=True)]
    rows = [e.ids for e in batch.encoded]
    made: list[TokenScores] = []
    found = explain_ids(study.model, study.processor, configuration, rows, targets, study.forwards.pad)
    for one, encoded in zip(found, batch.encoded, strict=True):
        try:
            scores = one.scores()[: len(encoded.ids)]
            usable(scores[~np.asarray(encoded.special)] if sum(map(int, encoded.special)) < len(scores) - 1 else scores)
            made.append(scores)
        except Unusable as error:
            made.append(error)
    return made


def match_labels(study: Study, *, required: bool = True) -> None:
    """Bring the data's labels into the order of the model's classes, by name; refuse sets that do not match."""
    if any(s.label is None for s in study.samples):
        if required:
            raise InputError("some texts have no label, which this benchmark needs")
        return
    names, _ = class_names(study.model)
    classes = getattr(getattr(study.model, "config", None), "num_labels", None)
    wanted = [label.casefold() for label in study.labels]
    if names and wanted and len(names) == len(wanted):
        known = {name.casefold(): index for index, name in names.items()}
        found = [known.get(label, known.get(label[:3])) for label in wanted]
        in_order = list(range(len(wanted)))
        if sorted(-1 if i is None else i for i in found) == in_order:
            if found != in_order:
                study.samples = _relabelled(study, found)
                study.remark(f"labels were put into the model's order by name: {', '.join(names.values())}")
            return
        short = {k[:3]: v for k, v in known.items()}
        if sorted(w[:3] for w in wanted) == sorted(short):
            order = [short[w[:3]] for w in wanted]
            study.samples = _relabelled(study, order)
            return
        study.remark(
            f"the model calls its classes {', '.join(names.values())}, the data {', '.join(study.labels)}: taken "
            f"to be in the same order"
        )
    if classes is not None and wanted and classes != len(wanted):
        raise InputError(
            f"the data have {len(wanted)} classes ({', '.join(study.labels)}) and the model {classes}: label "
            f"sets do not match"
        )
    highest = max((s.label for s in study.texts if s.label is not None), default=0)
    if classes is not None and highest >= classes:
        raise InputError(f"the data hold class {highest} and the model has {classes} classes: label sets do not match")


def accuracy(values: Sequence[dict[str, object]]) -> str:
    """ "91.2 % of 200" from records that have ``correct_class``."""
    if not values:
        return "nothing scored"
    return f"{100 * float(np.mean([float(v['correct_class']) for v in values])):.1f} % of {len(values)}"  # type: ignore[arg-type]


def _relabelled(study: Study, order: Sequence[int | None]) -> list[Text]:
    """The texts with label i replaced by ``order[i]``."""
    return [replace(s, label=None if s.label is None else order[s.label]) for s in study.texts]
