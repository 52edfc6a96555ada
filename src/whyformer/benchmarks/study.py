"""What every benchmark is given, and what it has to tell the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.report import Report
from whyformer.datasets.samples import Picture, Text
from whyformer.errors import InputError
from whyformer.evaluate.forwards import Forwards, probabilities
from whyformer.jobs.records import Record
from whyformer.models.structure import class_names

Sample = Picture | Text
Values = dict[str, Any]
Measured = tuple[str, Configuration, Values | Unusable]
"""(sample id, configuration, its figures or why there are none)."""


@dataclass
class Study:
    """One run of a benchmark: the model, the samples and the options.

    Attributes:
        reader: name of the data's reader; labels: the data set's own names of its classes.
        options: the benchmark's options, complete.
        remarks: what the reader of the report must know, gathered on the way.
    """

    model: nn.Module
    processor: Any
    modality: str
    samples: Sequence[Sample]
    configurations: Sequence[Configuration]
    options: dict[str, Any]
    forwards: Forwards
    reader: str = ""
    labels: Sequence[str] = ()
    model_name: str = ""
    data_name: str = ""
    seed: int = 0
    remarks: list[str] = field(default_factory=list)

    def probabilities(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Softmax over the last axis, or the sigmoid of each logit where several classes may be true at once."""
        return probabilities(logits, class_names(self.model)[1])

    @property
    def pictures(self) -> list[Picture]:
        """The samples that are pictures: all, in a benchmark on pictures."""
        return [s for s in self.samples if isinstance(s, Picture)]

    @property
    def texts(self) -> list[Text]:
        """The samples that are texts: all, in a benchmark on text."""
        return [s for s in self.samples if isinstance(s, Text)]

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


@dataclass(frozen=True)
class Benchmark:
    """A row of the table of benchmarks.

    Attributes:
        modality: "image", "text" or "both".
        methods: compared by default, as text; published: label or method -> settings of the papers' figures.
        options: name -> default.
        prepare: checks the data and the options, before anything runs; may replace samples.
        measure: figures of some samples under some configurations.
        summarize: the report out of all records, by configuration label and sample.
        forwards_per_sample: plain forwards of one sample and configuration, beside those of the method.
        ceiling: whether :data:`~whyformer.benchmarks.configurations.CEILING` has a meaning.
        own_data: the benchmark brings samples of its own, so --data may be left out.
    """

    name: str
    summary: str
    modality: str
    methods: str
    published: dict[str, dict[str, Any]]
    options: dict[str, Any]
    prepare: Callable[[Study], None]
    measure: Callable[[Study, Sequence[Any], Sequence[Configuration]], Iterator[Measured]]
    summarize: Callable[[Study, dict[str, dict[str, Record]]], Report]
    forwards_per_sample: Callable[[Study], float]
    ceiling: Callable[[Study], bool] = lambda study: False
    own_data: Callable[[dict[str, Any]], tuple[str, Sequence[Any], Sequence[str]]] | None = None


CONSTANT = ("leave_out", "count")
"""What becomes of constant maps (option ``constant``): left out of the figures, or counted as the reference does."""


def check_constant(study: Study) -> None:
    if study.options["constant"] not in CONSTANT:
        raise InputError(f"constant must be one of {', '.join(CONSTANT)}, not {study.options['constant']!r}")


def counts_of(study: Study, records: dict[str, dict[str, Record]]) -> dict[str, dict[str, int]]:
    """label -> number of samples scored, failed, constant and with NaN; constant ones that are counted are scored."""
    made = {}
    for configuration in study.configurations:
        found = {"scored": 0, "failed": 0, "constant": 0, "nan": 0}
        for record in records.get(configuration.label, {}).values():
            left_out = "values" in record and _left_out(study, record)
            found["constant" if left_out else record["kind"] if "error" in record else "scored"] += 1
        made[configuration.label] = found
    return made


def values_of(study: Study, records: dict[str, dict[str, Record]], label: str) -> list[Values]:
    """The figures of the samples that have any, in the order of the samples' ids."""
    found = sorted(records.get(label, {}).items())
    return [r["values"] for _, r in found if "values" in r and not _left_out(study, r)]


def _left_out(study: Study, record: Record) -> bool:
    return bool(record["values"].get("constant")) and study.options.get("constant") != "count"


def constant_remarks(study: Study, records: dict[str, dict[str, Record]], meaning: str) -> list[str]:
    """One sentence for each configuration whose constant maps are counted."""
    made = []
    for label in (c.label for c in study.configurations):
        flat = sum(bool(v.get("constant")) for v in values_of(study, records, label))
        if flat:
            made.append(f"{flat} maps of {label} are constant and are counted: {meaning}.")
    return made
