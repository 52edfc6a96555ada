"""Pieces of a benchmark, a few samples each, measured by this process or by the actors of a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from whyformer.benchmarks.batches import read_batch, read_pixels
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.study import Benchmark, Measured, Study, Unusable
from whyformer.errors import LoadError
from whyformer.evaluation.forwards import Forwards
from whyformer.jobs.actors import connected, made_by_actors
from whyformer.jobs.records import Record, plain
from whyformer.jobs.threads import Behind, ahead
from whyformer.models.loading import fingerprint, opened

Read = Tensor | None | Exception
"""A picture's pixels, nothing of a text, or why a sample cannot be read."""


@dataclass(frozen=True)
class Engine:
    """Where pieces are measured, as for :class:`~whyformer.jobs.description.Job`."""

    engine: str = "local"
    workers: int = 2
    address: str | None = None
    actors: int = 1


@dataclass(frozen=True)
class Piece:
    """Numbers of samples of the study, and labels of the configurations that are measured of all of them."""

    samples: tuple[int, ...]
    labels: tuple[str, ...]


def pieces_of(study: Study, lacking: dict[str, list[Configuration]], size: int) -> list[Piece]:
    """What has no record yet, in pieces.

    A piece never reaches over a multiple of ``size`` samples, so that what a run that was stopped left undone is
    measured in the pieces of one that was not: figures depend, in their last digits, on what is computed together.
    """
    labels = [tuple(c.label for c in lacking[s.id]) for s in study.samples]
    found = []
    for start in range(0, len(labels), size):
        numbers = range(start, min(start + size, len(labels)))
        for missing, alike in groupby(numbers, key=lambda i: labels[i]):
            if missing:
                found.append(Piece(tuple(alike), missing))
    return found


@dataclass(frozen=True, eq=False)
class Measurer:
    """A study whose model is loaded: reads the samples of pieces, and measures them."""

    benchmark: Benchmark
    study: Study
    keys: dict[str, str]

    def read(self, piece: Piece) -> list[Read]:
        """Each sample of a piece, or what is wrong with it."""
        return [self._read(self.study.samples[i]) for i in piece.samples]

    def _read(self, sample: Any) -> Read:
        try:
            return read_pixels(self.study, sample)
        except Exception as error:  # a reader of the user's own may raise anything
            return error

    def records(self, piece: Piece, read: Sequence[Read]) -> list[Record]:
        """A record for each sample and configuration: its figures, or why there are none."""
        samples = [self.study.samples[i] for i in piece.samples]
        known = {c.label: c for c in self.study.configurations}
        configurations = [known[label] for label in piece.labels]
        good = [(s, one) for s, one in zip(samples, read, strict=True) if not isinstance(one, Exception)]
        found = self._measured([s for s, _ in good], configurations, [one for _, one in good]) if good else []
        for sample, one in zip(samples, read, strict=True):
            if isinstance(one, Exception):
                found += _failed(sample, configurations, one)
        return [self._record(*one) for one in found]

    def _measured(self, samples: Sequence[Any], asked: Sequence[Configuration], read: Sequence[Any]) -> list[Measured]:
        """All at once; if anything is wrong, one sample and then one configuration at a time."""
        try:
            return list(self.benchmark.measure(read_batch(self.study, samples, read), asked))
        except Exception as error:
            if len(samples) == len(asked) == 1:
                return _failed(samples[0], asked, error)
        if len(samples) > 1:
            return [one for s, own in zip(samples, read, strict=True) for one in self._measured([s], asked, [own])]
        return [one for c in asked for one in self._measured(samples, [c], read)]

    def _record(self, identity: str, configuration: Configuration, values: Any) -> Record:
        label = configuration.label
        record: Record = {"sample": identity, "configuration": label, "key": self.keys[label]}
        if isinstance(values, Unusable):
            return record | {"error": values.message, "kind": values.kind}
        return record | {"values": values}


def _failed(sample: Any, asked: Sequence[Configuration], error: Exception) -> list[Measured]:
    said = " ".join(str(error).split())
    return [(sample.id, c, Unusable("failed", f"{type(error).__name__}: {said}")) for c in asked]


class Actor:
    """An actor: the model, loaded once, and the samples; measures one piece after another."""

    def __init__(self, sent: Sent) -> None:
        self.sent, self.measurer = sent, sent.opened()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """The records of each piece, as JSON."""
        pieces = [self.sent.pieces[number] for number in batch["number"].tolist()]
        made = [self.measurer.records(piece, self.measurer.read(piece)) for piece in pieces]
        return {"number": batch["number"].tolist(), "records": [json.dumps(plain(records, 6)) for records in made]}


@dataclass(frozen=True, eq=False)
class Sent:
    """What an actor is sent; a model given by name is loaded there.

    Attributes:
        study: without its model.
        weights: the fingerprint that the model's weights must have.
    """

    benchmark: Benchmark
    study: Study
    keys: dict[str, str]
    pieces: list[Piece]
    model: nn.Module | str
    device: str | None
    weights: str

    def opened(self) -> Measurer:
        """With the model.

        Raises:
            LoadError: under its name another model lies there.
        """
        model, _ = opened(self.model, self.study.processor, device=self.device if isinstance(self.model, str) else None)
        if fingerprint(model) != self.weights:
            raise LoadError(f"'{self.model}' has other weights on the actor's machine than on the one that asks")
        forwards = Forwards(model, self.study.forwards.batch_size, self.study.forwards.pad)
        return Measurer(self.benchmark, replace(self.study, model=model, forwards=forwards), self.keys)


def measured(
    measurer: Measurer, pieces: list[Piece], engine: Engine, model: nn.Module | str, device: str | None, keep: Any
) -> Iterator[Piece]:
    """Each piece once it is measured and what was made of it was given to ``keep``; in their order."""
    if engine.engine == "local":
        reads = ahead(pieces, lambda piece: (piece, measurer.read(piece)), engine.workers, 2 * engine.workers)
        with Behind() as writer:
            for piece, read in reads:
                writer.write(keep, measurer.records(piece, read))
                yield piece
            writer.drain()
        return
    study, forwards = measurer.study, measurer.study.forwards
    bare = replace(study, model=nn.Identity(), forwards=Forwards(nn.Identity(), forwards.batch_size, forwards.pad))
    sent = Sent(measurer.benchmark, bare, measurer.keys, pieces, model, device, fingerprint(study.model))
    numbers = [{"number": number} for number in range(len(pieces))]
    place = str(forwards.place["device"])  # a module that lies on a GPU wants one where it is sent
    with (
        connected(engine.address, engine.actors) as ray,
        closing(made_by_actors(ray, Actor, (sent,), numbers, actors=engine.actors, device=place)) as found,
    ):
        for one in found:
            keep(json.loads(one["records"]))
            yield pieces[one["number"]]
