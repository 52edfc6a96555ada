"""Measure the pieces of a benchmark, a few samples each, in this process or in the actors of a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from torch import Tensor, nn

from whyformer.benchmarks.batches import read_batch, read_pixels
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.records import Record
from whyformer.benchmarks.study import Benchmark, Exclusion, Measured, Study
from whyformer.errors import LoadError
from whyformer.explanation.storage import plain
from whyformer.jobs.actors import actor_results, connected
from whyformer.jobs.batching import prefetch
from whyformer.models.loading import fingerprint, resolve_model

Read = Tensor | None | Exception
"""The pixels of a picture, None for a text, or the error of reading a sample."""


@dataclass(frozen=True)
class Engine:
    """The engine that measures pieces; attributes are those of :class:`~whyformer.jobs.description.Job`."""

    engine: str = "local"
    workers: int = 2
    address: str | None = None
    actors: int = 1


@dataclass(frozen=True)
class Piece:
    """Indices of samples in the study, and labels of the configurations to measure for all of them."""

    samples: tuple[int, ...]
    labels: tuple[str, ...]


def pieces_of(study: Study, lacking: dict[str, list[Configuration]], size: int) -> list[Piece]:
    """Divide the samples and configurations without records into pieces.

    A piece never crosses a multiple of ``size`` samples, so that a resumed run measures the same pieces as a run
    without interruption: the last digits of figures depend on the samples of a batch.

    Args:
        study: the study.
        lacking: configurations without a record for each sample.
        size: largest number of samples in a piece.
    """
    labels = [tuple(c.label for c in lacking[s.id]) for s in study.samples]
    pieces = []
    for start in range(0, len(labels), size):
        numbers = range(start, min(start + size, len(labels)))
        for missing, alike in groupby(numbers, key=lambda i: labels[i]):
            if missing:
                pieces.append(Piece(tuple(alike), missing))
    return pieces


@dataclass(frozen=True, eq=False)
class Measurer:
    """Reads and measures the samples of pieces for a study with a loaded model.

    Attributes:
        keys: key of the record of each (sample, label of a configuration).
    """

    benchmark: Benchmark
    study: Study
    keys: dict[tuple[str, str], str]

    def read(self, piece: Piece) -> list[Read]:
        """Read each sample of a piece, or return the error of reading it."""
        return [self._read(self.study.samples[i]) for i in piece.samples]

    def _read(self, sample: Any) -> Read:
        try:
            return read_pixels(self.study, sample)
        except Exception as error:  # a user's reader may raise any exception
            return error

    def records(self, piece: Piece, read: Sequence[Read]) -> list[Record]:
        """Return a record for each sample and configuration: its figures, or the reason for having none."""
        samples = [self.study.samples[i] for i in piece.samples]
        by_label = {c.label: c for c in self.study.configurations}
        configurations = [by_label[label] for label in piece.labels]
        good = [(s, data) for s, data in zip(samples, read, strict=True) if not isinstance(data, Exception)]
        results = self._measured([s for s, _ in good], configurations, [data for _, data in good]) if good else []
        for sample, data in zip(samples, read, strict=True):
            if isinstance(data, Exception):
                results += _failed(sample, configurations, data)
        return [self._record(*result) for result in results]

    def _measured(
        self, samples: Sequence[Any], configurations: Sequence[Configuration], read: Sequence[Any]
    ) -> list[Measured]:
        """Measure all samples together; after an error, one sample and then one configuration at a time."""
        try:
            return list(self.benchmark.measure(read_batch(self.study, samples, read), configurations))
        except Exception as error:
            if len(samples) == len(configurations) == 1:
                return _failed(samples[0], configurations, error)
        if len(samples) > 1:
            single = [self._measured([s], configurations, [data]) for s, data in zip(samples, read, strict=True)]
        else:
            single = [self._measured(samples, [c], read) for c in configurations]
        return list(chain.from_iterable(single))

    def _record(self, identity: str, configuration: Configuration, values: Any) -> Record:
        label = configuration.label
        record: Record = {"sample": identity, "configuration": label, "key": self.keys[identity, label]}
        if isinstance(values, Exclusion):
            return record | {"error": values.message, "kind": values.kind}
        return record | {"values": values}


def _failed(sample: Any, configurations: Sequence[Configuration], error: Exception) -> list[Measured]:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return [(sample.id, c, Exclusion("failed", reason)) for c in configurations]


class Actor:
    """An actor that loads the model once and measures pieces one after another.

    Args:
        measurer: the measurer, whose study has no model.
        pieces: all pieces.
        model: the model or its name.
        device: device of a model that is sent by name.
        weights: expected fingerprint of the model's weights.

    Raises:
        LoadError: the weights of the model differ on this machine.
    """

    def __init__(
        self, measurer: Measurer, pieces: list[Piece], model: nn.Module | str, device: str | None, weights: str
    ) -> None:
        study = measurer.study
        loaded, _ = resolve_model(model, study.processor, device=device if isinstance(model, str) else None)
        if fingerprint(loaded) != weights:
            raise LoadError(f"the weights of '{model}' on the actor's machine differ from those on this machine")
        self.pieces, self.measurer = pieces, replace(measurer, study=replace(study, model=loaded))

    def __call__(self, item: Mapping[str, int]) -> dict[str, Any]:
        """Return the records of the piece ``number`` as JSON."""
        piece = self.pieces[item["number"]]
        records = self.measurer.records(piece, self.measurer.read(piece))
        return {**item, "records": json.dumps(plain(records, finite=True, digits=6))}


def measured(
    measurer: Measurer, pieces: list[Piece], engine: Engine, model: nn.Module | str, device: str | None
) -> Generator[tuple[Piece, list[Record]], None, None]:
    """Yield the pieces in order, with their records."""
    if engine.engine == "local":
        reads = prefetch(pieces, lambda piece: (piece, measurer.read(piece)), engine.workers, 2 * engine.workers)
        yield from ((piece, measurer.records(piece, read)) for piece, read in reads)
        return
    study = measurer.study
    bare = replace(measurer, study=replace(study, model=nn.Identity()))
    values = (bare, pieces, model, device, fingerprint(study.model))
    numbers = [{"number": number} for number in range(len(pieces))]
    place = str(study.forwards.place["device"])  # a module on a GPU needs a GPU in the actor
    with (
        connected(engine.address, engine.actors) as ray,
        closing(actor_results(ray, Actor, values, numbers, actors=engine.actors, device=place)) as results,
    ):
        for result in results:
            yield pieces[result["number"]], json.loads(result["records"])
