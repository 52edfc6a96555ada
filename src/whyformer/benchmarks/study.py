"""The definition of a benchmark, one run of it (a study), and batches of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whyformer import explaining
from whyformer.benchmarks.configurations import RANDOM, TRUTH, Configuration
from whyformer.benchmarks.report import Report, Results, Values
from whyformer.errors import FOREIGN_ERRORS, InputError
from whyformer.evaluation.forwards import Forwards, activated
from whyformer.explanation.result import Explanation
from whyformer.methods import find
from whyformer.methods.sharing import SharedPasses, sharing
from whyformer.models.ends import final_activation, known_end_function
from whyformer.models.structure import class_count, class_names
from whyformer.prepared import Prepared


@dataclass(frozen=True)
class Exclusion:
    """The reason why a sample has no figures: ``kind`` is "constant" (``scores`` is the map), "nan" or "failed"."""

    kind: str
    message: str
    scores: NDArray[np.float64] | None = None


Scores = NDArray[np.float64] | Exclusion
Measured = tuple[str, Configuration, Values | Exclusion]
"""(sample id, configuration, its measurements or the reason for having none)."""


def seconds(model: nn.Module) -> float:
    """Return a clock for ratios: process time, or on a GPU wall-clock time after synchronization."""
    if any(p.is_cuda for p in model.parameters()):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def usable(scores: NDArray[np.float64]) -> Scores:
    """Return the scores if they are finite and not all equal, otherwise the reason."""
    if not np.isfinite(scores).all():
        return Exclusion("nan", "the map holds NaN or infinity")
    if scores.size > 1 and scores.max() == scores.min():
        return Exclusion("constant", "all scores are equal, so they have no order", scores)
    return scores


@dataclass
class Study:
    """One run of a benchmark.

    Attributes:
        model: the model.
        processor: its processor.
        modality: "image" or "text".
        samples: pictures or texts of a data set.
        configurations: configurations to compare.
        options: options of the benchmark, defaults included.
        reader: name of the reader of the data.
        labels: names of the classes in the data set.
        model_name: name of the model.
        data_name: name of the data.
        seed: random seed.
        batch_size: samples in one plain forward pass.
        remarks: notes for the reader of the report, collected during the run.
    """

    model: nn.Module
    processor: Any
    modality: str
    samples: Sequence[Any]
    configurations: Sequence[Configuration]
    options: dict[str, Any]
    reader: str = ""
    labels: Sequence[str] = ()
    model_name: str = ""
    data_name: str = ""
    seed: int = 0
    batch_size: int = 64
    remarks: list[str] = field(default_factory=list)

    @property
    def forwards(self) -> Forwards:
        """Plain forward passes of the model."""
        return Forwards(self.model, self.batch_size, getattr(self.processor, "pad_token_id", None) or 0)

    def probabilities(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the softmax over the last axis, or the sigmoid of each logit for a multi-label model."""
        end = known_end_function(self.model)
        return activated(logits, final_activation(self.model, end, logits.shape[-1]))

    def check(self, option: str, valid: Sequence[str | None], several: bool = False) -> None:
        """Check that an option is valid; with ``several``, a sequence or comma-separated values become a tuple."""
        value = self.options[option]
        choices = _as_tuple(value) if several else (value,)
        if not choices or not set(choices) <= set(valid):
            listing = ", ".join(v for v in valid if v is not None)
            raise InputError(f"{option} must be {'some' if several else 'one'} of {listing}, not {value!r}")
        self.options[option] = choices if several else value

    def limit(self) -> None:
        """Apply the options ``files`` (comma-separated ids of samples) and ``count`` (so many, evenly spaced)."""
        names, count = set(_as_tuple(self.options.get("files") or ())), self.options.get("count")
        if names:
            self.samples = [s for s in self.samples if s.id in names]
            if absent := sorted(names - {s.id for s in self.samples}):
                raise InputError(f"{len(absent)} of the files are not in the data, such as {absent[0]}")
        if count and count < len(self.samples):
            step = len(self.samples) / count
            self.samples = [self.samples[int(i * step)] for i in range(count)]
        if len({s.id for s in self.samples}) < len(self.samples):
            raise InputError("two samples have the same id, so their records cannot be distinguished")
        if not self.samples:
            raise InputError("there are no samples")

    def leave_out(self, excluded: set[str], description: str) -> None:
        """Remove samples by id, and add a remark with their description."""
        if excluded:
            self.samples = [s for s in self.samples if s.id not in excluded]
            self.remarks.append(f"{len(excluded)} {description} were left out: {', '.join(sorted(excluded)[:5])}")
            if not self.samples:
                raise InputError(f"all samples are {description}")

    def check_labels(self) -> None:
        """Check that each sample has a label of the model, after matching the order of classes by their names."""
        if missing := sum(s.label is None for s in self.samples):
            raise InputError(
                f"{missing} of {len(self.samples)} samples have no label among the model's classes, which this "
                "benchmark needs: use labelled data, or explain the predicted class only"
            )
        classes, mismatch = class_count(self.model), ""
        if self.labels and not self._ordered_by_name() and classes != len(self.labels):
            mismatch = f"the data have {len(self.labels)} classes ({', '.join(self.labels)}) and the model {classes}"
        elif classes is not None and (largest := max(s.label or 0 for s in self.samples)) >= classes:
            mismatch = f"the data have class {largest} and the model has {classes} classes (0 to {classes - 1})"
        if mismatch and classes is not None:
            raise InputError(f"{mismatch}: label sets do not match")

    def _ordered_by_name(self) -> bool:
        """Reorder labels by class names, or by their first three letters; return False if the names do not match."""
        names, _ = class_names(self.model)
        data_names = [label.casefold() for label in self.labels]
        if not names or len(names) != len(data_names):
            return False
        by_name = {name.casefold(): index for index, name in names.items()}
        by_prefix = {name[:3]: index for name, index in by_name.items()}
        in_order = list(range(len(data_names)))
        full = [by_name.get(name, by_name.get(name[:3])) for name in data_names]
        for order in (full, [by_prefix.get(name[:3]) for name in data_names]):
            if sorted(-1 if i is None else i for i in order) == in_order:
                if order != in_order:
                    self.samples = [replace(s, label=order[s.label or 0]) for s in self.samples]
                    self.remarks.append(f"labels were reordered by name to match {', '.join(names.values())}")
                return True
        both = f"the model's classes are {', '.join(names.values())}, those of the data {', '.join(self.labels)}"
        self.remarks.append(f"{both}: assumed to be in the same order")
        return False


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(names.split(",") if isinstance(names, str) else names)


@dataclass(frozen=True)
class Batch:
    """A batch of preprocessed samples.

    ``PictureBatch`` and ``TextBatch`` (:mod:`whyformer.benchmarks.batches`) define the inputs of the model and the
    removal of features.

    Attributes:
        study: the study.
        samples: the samples.
        logits: ``[B, C]`` of the clean samples.
        baseline: replacement of features in :meth:`without`.
        inputs: (indices of samples) -> inputs of the model.
        random_map: (index) -> random map, the floor.
        truth: (index) -> map of the ground truth, the ceiling.
        read: (index, explanation) -> its map.
        features: (index, map) -> scores ``[n]`` of removable features.
        covered: (index, features ``[S, n]``) -> masks ``[S, ...]`` of their pixels or tokens.
        run: (index, mask, baseline), ... -> logits ``[F, C]`` without the pixels or tokens that are True.
    """

    study: Study
    samples: Sequence[Any]
    logits: NDArray[np.float64]
    baseline: ClassVar[str]
    inputs: ClassVar[Callable[..., Any]]
    random_map: ClassVar[Callable[..., NDArray[np.float64]]]
    truth: ClassVar[Callable[..., Scores]]
    read: ClassVar[Callable[..., Scores]]
    features: ClassVar[Callable[..., NDArray[np.float64]]]
    covered: ClassVar[Callable[..., NDArray[np.bool_]]]
    run: ClassVar[Callable[..., NDArray[np.float64]]]

    @property
    def image(self) -> bool:
        return self.study.modality == "image"

    @property
    def predicted(self) -> list[int]:
        return [int(i) for i in self.logits.argmax(-1)]

    @property
    def probabilities(self) -> NDArray[np.float64]:
        return self.study.probabilities(self.logits)

    def count(self, index: int) -> int:
        """Return the number of removable features."""
        return self.features(index, self.random_map(index)).size

    @cached_property
    def ready(self) -> Prepared:
        """The prepared inputs of all samples."""
        opened = explaining.open_model(self.study.model, self.study.processor)
        return opened.prepare(self.inputs(range(len(self.samples))))

    def explanations(
        self, configuration: Configuration, targets: Sequence[int], shared: SharedPasses | None = None
    ) -> list[Explanation | Exclusion]:
        """Explain each sample for its target in one batch; scores of padding are last.

        An error for a single sample is returned.

        Raises:
            Exception: a batch of several samples failed; the caller then measures each sample alone.
        """
        if not self.samples:
            return []
        try:
            explain = partial(self.ready.explain, configuration.method, list(targets), **configuration.settings)
            return list(explain() if shared is None else shared.run(explain))
        except FOREIGN_ERRORS as error:
            if len(self.samples) > 1:
                raise
            return [Exclusion("nan" if "NaN" in str(error) else "failed", f"{type(error).__name__}: {error}")]

    def scores(
        self, configuration: Configuration, targets: Sequence[int], shared: SharedPasses | None = None
    ) -> list[Scores]:
        """Return the maps, ``[H, W]`` for pictures and ``[N]`` for texts, or the reasons for having none."""
        if configuration.kind in (RANDOM, TRUTH):
            reference = self.random_map if configuration.kind == RANDOM else self.truth
            return [reference(i) for i in range(len(self.samples))]
        results = enumerate(self.explanations(configuration, targets, shared))
        return [result if isinstance(result, Exclusion) else self.read(i, result) for i, result in results]

    def maps(self, configurations: Sequence[Configuration], targets: Sequence[int]) -> Maps:
        """Return :meth:`scores` by configuration and index of the sample; methods share passes."""
        with sharing([find(c.method) for c in configurations if c.kind == "method"]) as shared:
            return {(c, i): map_ for c in configurations for i, map_ in enumerate(self.scores(c, targets, shared))}

    def outputs(self, requests: Iterable[tuple[Any, int, Iterable[Any], str]]) -> dict[Any, NDArray[np.float64]]:
        """Return logits ``[F, C]`` of samples with parts removed; equal perturbed inputs run once.

        Args:
            requests: (key of the result, index of the sample, masks ``[F, ...]``, baseline), as for ``run``.
        """
        rows: dict[tuple[int, tuple[int, ...], bytes, str], int] = {}
        places: dict[Any, list[int]] = {}
        for key, index, masks, baseline in requests:
            jobs = [(index, mask.shape, np.packbits(mask).tobytes(), baseline) for mask in masks]
            places[key] = [rows.setdefault(job, len(rows)) for job in jobs]
        logits = self.run((i, _unpacked(bits, shape), baseline) for i, shape, bits, baseline in rows)
        return {key: logits[place] for key, place in places.items()}

    def without(self, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return logits ``[S, C]`` of a sample without subsets of its features ``[S, n]``: black, or [UNK]."""
        return self.run((index, mask, self.baseline) for mask in self.covered(index, removed))


Maps = dict[tuple[Configuration, int], Scores]


def _unpacked(bits: bytes, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=int(np.prod(shape)))
    return flags.reshape(shape).astype(bool)


@dataclass(frozen=True)
class Benchmark:
    """The definition of a benchmark.

    Attributes:
        name: name of the benchmark.
        summary: one line of description.
        modality: "image", "text" or "both".
        methods: default methods, see :func:`~whyformer.benchmarks.configurations.parse_methods`.
        published: label or method -> settings of the papers' figures.
        options: name -> default.
        prepare: checks data and options before the run; may replace samples.
        measure: yields the measurements of a batch of samples for some configurations.
        summarize: computes the report from all measurements.
        ceiling: returns True if :data:`~whyformer.benchmarks.configurations.CEILING` applies.
        own_data: options -> (name, samples), for a benchmark that needs no --data.
        choices: option -> valid values, or valid elements of a tuple.
    """

    name: str
    summary: str
    modality: str
    methods: str
    published: dict[str, dict[str, Any]]
    options: dict[str, Any]
    prepare: Callable[[Study], None]
    measure: Callable[[Any, Sequence[Configuration]], Iterator[Measured]]
    summarize: Callable[[Study, Results], Report]
    ceiling: Callable[[Study], bool] = lambda study: False
    own_data: Callable[[dict[str, Any]], tuple[str, Sequence[Any]]] | None = None
    choices: dict[str, Sequence[str | None]] = field(default_factory=dict)


CONSTANT = ("leave_out", "count")
"""Values of the option ``constant``: leave constant maps out of the figures, or count them as the reference code."""


def constant_remarks(results: Results, meaning: str) -> tuple[str, ...]:
    """Return a sentence for each configuration whose constant maps are counted."""
    flat = {label: sum(bool(v.get("constant")) for v in values.values()) for label, values in results.items()}
    return tuple(f"{n} maps of {label} are constant and counted: {meaning}." for label, n in flat.items() if n)
