"""What a benchmark is, what it is given, and the samples as the model sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
from whyformer.methods.together import Together, sharing
from whyformer.models.ends import final_activation, known_end_function
from whyformer.models.structure import class_count, class_names
from whyformer.prepared import Prepared


@dataclass(frozen=True)
class Unusable:
    """Why a sample has no figures: ``kind`` is "constant" (then ``scores`` is the map), "nan" or "failed"."""

    kind: str
    message: str
    scores: NDArray[np.float64] | None = None


Scores = NDArray[np.float64] | Unusable
Measured = tuple[str, Configuration, Values | Unusable]
"""(sample id, configuration, its figures or why there are none)."""


def seconds(model: nn.Module) -> float:
    """A clock for ratios: the processor's time, or on a GPU the wall clock's once what was asked of it is done."""
    if any(p.is_cuda for p in model.parameters()):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def usable(scores: NDArray[np.float64]) -> Scores:
    """The scores, if they are finite and not all equal."""
    if not np.isfinite(scores).all():
        return Unusable("nan", "the map holds NaN or infinity")
    if scores.size > 1 and scores.max() == scores.min():
        return Unusable("constant", "all scores are equal, so they say nothing", scores)
    return scores


@dataclass
class Study:
    """One run of a benchmark: the model, the samples (pictures or texts of a data set) and the options.

    Attributes:
        reader: name of the data's reader; labels: the data set's own names of its classes.
        options: the benchmark's options, complete.
        remarks: what the reader of the report must know, gathered on the way.
    """

    model: nn.Module
    processor: Any
    modality: str
    samples: Sequence[Any]
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
        end = known_end_function(self.model)
        return activated(logits, final_activation(self.model, end, logits.shape[-1]))

    def check(self, option: str, valid: Sequence[str | None], several: bool = False) -> None:
        """The option must be one of these; or some, as a sequence or with commas, of which it becomes a tuple."""
        given = self.options[option]
        chosen = _listed(given) if several else (given,)
        if not chosen or not set(chosen) <= set(valid):
            known = ", ".join(v for v in valid if v is not None)
            raise InputError(f"{option} must be {'some' if several else 'one'} of {known}, not {given!r}")
        self.options[option] = chosen if several else given

    def limit(self) -> None:
        """Apply ``count`` (that many, spread evenly over the data) and ``files`` (these only; comma-separated)."""
        names, count = set(_listed(self.options.get("files") or ())), self.options.get("count")
        if names:
            self.samples = [s for s in self.samples if s.id in names]
            if absent := sorted(names - {s.id for s in self.samples}):
                raise InputError(f"{len(absent)} of the files named are not in the data, {absent[0]} among them")
        if count and count < len(self.samples):
            step = len(self.samples) / count
            self.samples = [self.samples[int(i * step)] for i in range(count)]
        if len({s.id for s in self.samples}) < len(self.samples):
            raise InputError("two samples have the same id, so their records could not be told apart")
        if not self.samples:
            raise InputError("there are no samples")

    def leave_out(self, gone: set[str], what: str) -> None:
        """Drop these samples, and say so."""
        if gone:
            self.samples = [s for s in self.samples if s.id not in gone]
            self.remarks.append(f"{len(gone)} {what} were left out: {', '.join(sorted(gone)[:5])}")
            if not self.samples:
                raise InputError(f"all samples are {what}")

    def check_labels(self) -> None:
        """Every sample must have one among the model's classes; names bring those of texts into the model's order."""
        if missing := sum(s.label is None for s in self.samples):
            raise InputError(
                f"{missing} of {len(self.samples)} samples have no label in the model's classes, which this benchmark "
                "needs. Give labelled data; without labels of the model's, only the predicted class can be explained"
            )
        classes, found = class_count(self.model), ""
        if self.labels and not self._ordered_by_name() and classes != len(self.labels):
            found = f"the data have {len(self.labels)} classes ({', '.join(self.labels)}) and the model {classes}"
        elif classes is not None and (worst := max(s.label or 0 for s in self.samples)) >= classes:
            found = f"the data hold class {worst} and the model has {classes} classes (0 to {classes - 1})"
        if found and classes is not None:
            raise InputError(f"{found}: label sets do not match")

    def _ordered_by_name(self) -> bool:
        """Bring the labels into the order of the model's classes, if names (or their first three letters) tell it."""
        names, _ = class_names(self.model)
        wanted = [label.casefold() for label in self.labels]
        if not names or len(names) != len(wanted):
            return False
        known = {name.casefold(): index for index, name in names.items()}
        short = {name[:3]: index for name, index in known.items()}
        in_order = list(range(len(wanted)))
        for order in ([known.get(w, known.get(w[:3])) for w in wanted], [short.get(w[:3]) for w in wanted]):
            if sorted(-1 if i is None else i for i in order) == in_order:
                if order != in_order:
                    self.samples = [replace(s, label=order[s.label or 0]) for s in self.samples]
                    self.remarks.append(f"labels were put into the model's order by name: {', '.join(names.values())}")
                return True
        known_as = f"the model calls its classes {', '.join(names.values())}, the data {', '.join(self.labels)}"
        self.remarks.append(f"{known_as}: taken to be in the same order")
        return False


def _listed(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.split(",") if isinstance(given, str) else given)


@dataclass(frozen=True)
class Batch:
    """Some samples as the model sees them; ``PictureBatch`` and ``TextBatch`` (:mod:`whyformer.benchmarks.batches`) say
    how they are fed and taken apart.

    Attributes:
        logits: ``[B, C]`` of the clean samples; baseline: what :meth:`without` puts in place of features.
        inputs: (numbers of samples) -> what the model is fed.
        drawn, truth: (number) -> the map of the floor, of the ceiling; read: (number, explanation) -> its map.
        features: (number, map) -> scores ``[n]`` of what can be taken out.
        covered: (number, features ``[S, n]``) -> masks ``[S, ...]`` of the pixels or tokens they are.
        run: (number, mask, baseline), ... -> logits ``[F, C]`` without what is True.
    """

    study: Study
    samples: Sequence[Any]
    logits: NDArray[np.float64]
    baseline: ClassVar[str]
    inputs: ClassVar[Callable[..., Any]]
    drawn: ClassVar[Callable[..., NDArray[np.float64]]]
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
        """How many features there are."""
        return self.features(index, self.drawn(index)).size

    def explanations(
        self, configuration: Configuration, targets: Sequence[int], sharing: Sharing | None = None
    ) -> list[Explanation | Unusable]:
        """Each for its own target, in one batch, scores of padding last. Of one sample, what fails is told.

        Raises:
            Exception: the batch failed, of several samples: each is then measured by itself.
        """
        if not self.samples:
            return []
        study, method, settings = self.study, configuration.method, configuration.settings
        inputs, wanted = self.inputs(range(len(self.samples))), list(targets)
        try:
            if sharing is not None:
                return list(sharing.explain(method, wanted, settings))
            return list(explaining.explain(study.model, inputs, method, wanted, study.processor, **settings))
        except FOREIGN_ERRORS as error:
            if len(self.samples) > 1:
                raise
            return [Unusable("nan" if "NaN" in str(error) else "failed", f"{type(error).__name__}: {error}")]

    def scores(
        self, configuration: Configuration, targets: Sequence[int], sharing: Sharing | None = None
    ) -> list[Scores]:
        """The maps, ``[H, W]`` of pictures and ``[N]`` of texts; or why there is none."""
        if configuration.kind in (RANDOM, TRUTH):
            made = self.drawn if configuration.kind == RANDOM else self.truth
            return [made(i) for i in range(len(self.samples))]
        found = enumerate(self.explanations(configuration, targets, sharing))
        return [one if isinstance(one, Unusable) else self.read(i, one) for i, one in found]

    def maps(self, configurations: Sequence[Configuration], targets: Sequence[int]) -> Maps:
        """:meth:`scores` by configuration and number of the sample; the methods share passes."""
        with Sharing.of(self, configurations) as sharing:
            return {(c, i): one for c in configurations for i, one in enumerate(self.scores(c, targets, sharing))}

    def outputs(self, asked: Iterable[tuple[Any, int, Iterable[Any], str]]) -> dict[Any, NDArray[np.float64]]:
        """Logits ``[F, C]`` of samples with parts taken out; what several ask for runs once.

        Args:
            asked: (key of the result, number of the sample, masks ``[F, ...]``, baseline), as for ``run``.
        """
        rows: dict[tuple[int, tuple[int, ...], bytes, str], int] = {}
        places: dict[Any, list[int]] = {}
        for key, index, masks, baseline in asked:
            jobs = [(index, mask.shape, np.packbits(mask).tobytes(), baseline) for mask in masks]
            places[key] = [rows.setdefault(job, len(rows)) for job in jobs]
        found = self.run((i, _unpacked(bits, shape), baseline) for i, shape, bits, baseline in rows)
        return {key: found[place] for key, place in places.items()}

    def without(self, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Logits ``[S, C]`` of one sample without each subset of its features ``[S, n]``: black, or [UNK]."""
        return self.run((index, gone, self.baseline) for gone in self.covered(index, removed))


Maps = dict[tuple[Configuration, int], Scores]


@dataclass
class Sharing:
    """What methods of the same samples and classes share, freed at the end (:mod:`whyformer.methods.together`)."""

    batch: Batch
    together: Together
    ready: Prepared | None = None

    @classmethod
    @contextmanager
    def of(cls, batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Sharing]:
        """For these configurations; where only one is a method, nothing is."""
        with sharing([find(c.method) for c in configurations if c.kind == "method"]) as together:
            yield cls(batch, together)

    def explain(self, method: str, targets: Sequence[int], settings: Mapping[str, Any]) -> Explanation:
        """All samples."""
        if self.ready is None:
            study = self.batch.study
            inputs = self.batch.inputs(range(len(targets)))
            self.ready = explaining.open_model(study.model, study.processor).prepare(inputs)
        return self.together.around(partial(self.ready.explain, method, list(targets), **settings))


def _unpacked(bits: bytes, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=int(np.prod(shape)))
    return flags.reshape(shape).astype(bool)


@dataclass(frozen=True)
class Benchmark:
    """A row of the table of benchmarks: the data it needs, what it measures, and the columns made of that.

    Attributes:
        modality: "image", "text" or "both".
        methods: compared by default, as text; published: label or method -> settings of the papers' figures.
        options: name -> default; choices: name -> what it may be (of a tuple: what may be in it).
        prepare: checks the data and the options, before anything runs; may replace samples.
        measure: figures of a batch of samples under some configurations.
        summarize: the report out of everything that was measured.
        ceiling: whether :data:`~whyformer.benchmarks.configurations.CEILING` has a meaning.
        own_data: the benchmark brings samples of its own, (name, samples), so --data may be left out.
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
"""What becomes of constant maps (option ``constant``): left out of the figures, or counted as the reference does."""


def constant_remarks(results: Results, meaning: str) -> tuple[str, ...]:
    """One sentence for each configuration whose constant maps are counted."""
    flat = {label: sum(bool(v.get("constant")) for v in values.values()) for label, values in results.items()}
    return tuple(f"{n} maps of {label} are constant and are counted: {meaning}." for label, n in flat.items() if n)
