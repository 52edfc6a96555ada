"""Benchmark ``perturbation``: Table 1 of Chefer et al. 2021, and AOPC, LOdds, insertion and deletion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.curves import EXPLAINED, summarize
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import Batch, Map, check_labels, limit, maps, read_batch
from whyformer.benchmarks.study import Benchmark, Measured, Study, Values, check_constant
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import (
    FRACTIONS,
    removal_mask,
    removal_order,
    removed_count,
)
from whyformer.inputs.removal import picture_filler

SUBSTRATES = {"black": "black", "mean": "zero", "blur": "blur"}
"""Option values -> baselines of :mod:`whyformer.inputs.removal`."""
MEASURES = ("positive", "negative", "deletion", "insertion")


@dataclass(frozen=True)
class Job:
    """One removal order of one picture: what several maps may ask for and is run once.

    Attributes:
        order: flat indices in the order of removal; with the option ``ties=topk`` the scores, highest to be removed
            first.
    """

    sample: int
    order: NDArray[Any]
    measure: str

    def mask(self, fraction: float, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """True at what is removed."""
        count = removed_count(self.order.size, fraction)
        removed = removal_mask if self.order.dtype.kind == "i" else topk_mask
        return removed(self.order, count, shape)


TIES = ("index", "topk")
"""Which of equal scores goes first: the lower index, or what ``torch.topk`` picks (option ``ties``)."""


def topk_mask(scores: ArrayLike, count: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True at the ``count`` highest scores, equal ones as ``torch.topk`` picks them on a CPU (Chefer's code does).

    Deterministic, but the sets of two counts need not be nested, and no order is documented. For comparisons alone.
    """
    flat = torch.from_numpy(np.asarray(scores, dtype=np.float32).reshape(-1))
    mask = np.zeros(flat.numel(), dtype=bool)
    mask[torch.topk(flat, count).indices.numpy()] = True
    return mask.reshape(shape)


def _order(scores: Any, highest_first: bool, ties: str) -> NDArray[Any]:
    if ties == "index":
        return removal_order(scores, highest_first=highest_first).astype(np.int32)
    flat = np.asarray(scores, dtype=np.float32).reshape(-1)
    low, high = flat.min(), flat.max()
    scaled = (flat - low) / (high - low) if high > low else np.zeros_like(flat)  # its rounding makes ties, too
    return scaled if highest_first else -scaled


def steps_of(study: Study, measure: str) -> tuple[float, ...]:
    if measure in ("positive", "negative"):
        return FRACTIONS
    return tuple(np.linspace(0, 1, study.options["steps"] + 1))


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    batch = read_batch(study, samples)
    wanted: dict[tuple[int, int, str], Map] = {}
    for c, configuration in enumerate(configurations):
        for i, classes in enumerate(_maps_by_class(study, batch, configuration)):
            for name, found in classes.items():
                wanted[c, i, name] = found
    curves = run_curves(study, batch, wanted)
    for c, configuration in enumerate(configurations):
        for i, sample in enumerate(samples):
            mine = {name: curves[c, i, name] for name in study.options["explained"]}
            error = next((m for m in mine.values() if isinstance(m, Unusable)), None)
            if error is not None:
                yield sample.id, configuration, error
                continue
            clean = {
                "correct": int(batch.predicted[i] == sample.label),
                "probability": float(batch.probabilities[i, batch.predicted[i]]),
                "predicted": batch.predicted[i],
            }
            flat = {"constant": 1} if any(_flat(wanted[c, i, name]) for name in mine) else {}
            yield sample.id, configuration, {"clean": clean, **mine, **flat}


def _maps_by_class(study: Study, batch: Batch, configuration: Configuration) -> Iterator[dict[str, Map]]:
    """The map for the predicted and for the target class; run once where they are one."""
    predicted, truth = batch.predicted, [-1 if s.label is None else s.label for s in batch.samples]
    first = maps(study, batch, configuration, predicted)
    other: dict[int, Map] = {}
    if "target" in study.options["explained"] and configuration.class_specific and configuration.kind == "method":
        differ = [i for i, (p, t) in enumerate(zip(predicted, truth, strict=True)) if p != t]
        other = dict(zip(differ, maps(study, batch, configuration, truth, differ), strict=True)) if differ else {}
    for i, one in enumerate(first):
        yield {name: other.get(i, one) if name == "target" else one for name in study.options["explained"]}


def run_curves(
    study: Study, batch: Batch, wanted: dict[tuple[int, int, str], Map]
) -> dict[tuple[int, int, str], Values | Unusable]:
    """Perturb as every map asks, each distinct (picture, order) once, all in full batches."""
    jobs: dict[tuple[int, str, bytes], Job] = {}
    needs: dict[tuple[int, int, str], dict[str, tuple[int, str, bytes]]] = {}
    result: dict[tuple[int, int, str], Values | Unusable] = {}
    for key, found in wanted.items():
        scores = found.scores if isinstance(found, Unusable) and _flat(found) else found
        if scores is None or isinstance(scores, Unusable):
            result[key] = found if isinstance(found, Unusable) else Unusable("failed", "no map")
            continue
        needs[key] = {}
        for name in study.options["measures"]:
            order = _order(scores, name != "negative", study.options["ties"])
            place = (
                key[1],
                name if name not in ("positive", "negative") else "remove",
                order.tobytes(),
            )
            jobs.setdefault(place, Job(key[1], order, name))
            needs[key][name] = place
    logits = _run_jobs(study, batch, list(jobs.values()))
    found_logits = dict(zip(jobs, logits, strict=True))
    for key, by_measure in needs.items():
        label, top = batch.samples[key[1]].label, batch.predicted[key[1]]
        result[key] = {name: _curve(study, found_logits[place], label, top) for name, place in by_measure.items()}
    return result


def _flat(found: Map) -> bool:
    """A constant map: its pixels go by index, and the record says so."""
    return isinstance(found, Unusable) and found.kind == "constant"


def _curve(study: Study, logits: NDArray[np.float64], label: int | None, top: int) -> Values:
    return {
        "correct": [int(i == label) for i in logits.argmax(-1)],
        "probability": [float(p) for p in study.probabilities(logits)[:, top]],
    }


def _run_jobs(study: Study, batch: Batch, jobs: list[Job]) -> list[NDArray[np.float64]]:
    """Logits ``[F, C]`` of each job."""
    mean, std = batch.spec.mean, batch.spec.std
    empty = {
        name: picture_filler(SUBSTRATES[name], batch.pixels, -mean / std)
        for name in {study.options["substrate"], *_curve_substrates(study)}
    }

    def stream() -> Iterator[Tensor]:
        shape = batch.pixels.shape[-2:]
        for job in jobs:
            picture = batch.pixels[job.sample]
            name = (
                study.options["substrate"]
                if job.measure in ("positive", "negative")
                else study.options[f"{job.measure}_substrate"]
            )
            ground = empty[name][job.sample]
            for fraction in steps_of(study, job.measure):
                mask = torch.from_numpy(job.mask(fraction, tuple(shape))).to(picture.device)
                yield (
                    torch.where(mask, picture, ground)
                    if job.measure == "insertion"
                    else torch.where(mask, ground, picture)
                )

    logits = study.forwards.pixels(stream())
    ends = np.cumsum([len(steps_of(study, job.measure)) for job in jobs])
    return np.split(logits, ends[:-1]) if jobs else []


def _curve_substrates(study: Study) -> list[str]:
    return [study.options[f"{m}_substrate"] for m in study.options["measures"] if m in ("deletion", "insertion")]


def prepare(study: Study) -> None:
    limit(study)
    options = study.options
    for name, valid in (("measures", MEASURES), ("explained", EXPLAINED)):
        given = options[name]
        options[name] = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
        unknown = [g for g in options[name] if g not in valid]
        if unknown or not options[name]:
            raise InputError(f"{name} must be some of {', '.join(valid)}, not {', '.join(unknown) or 'nothing'}")
    for name in ("substrate", "deletion_substrate", "insertion_substrate"):
        if options[name] not in SUBSTRATES:
            raise InputError(f"{name} must be one of {', '.join(SUBSTRATES)}, not {options[name]!r}")
    if options["ties"] not in TIES:
        raise InputError(f"ties must be one of {', '.join(TIES)}, not {options['ties']!r}")
    if not isinstance(options["steps"], int) or options["steps"] < 1:
        raise InputError(f"steps must be a whole number from 1, not {options['steps']!r}")
    check_constant(study)
    check_labels(study)


def forwards_per_sample(study: Study) -> float:
    """An upper bound: maps that agree share their forwards."""
    return sum(len(steps_of(study, m)) for m in study.options["measures"]) * len(study.options["explained"])


def has_masks(study: Study) -> bool:
    return all(s.mask is not None for s in study.pictures)


OPTIONS: dict[str, Any] = {
    "explained": EXPLAINED,
    "measures": ("positive", "negative"),
    "substrate": "black",
    "constant": "leave_out",
    "ties": "index",
    "steps": 28,
    "deletion_substrate": "mean",
    "insertion_substrate": "blur",
    "resample": None,
    "count": None,
    "files": None,
}

BENCHMARK = Benchmark(
    "perturbation",
    "positive and negative perturbation, top-1 AUC (CVPR 2021, Table 1)",
    "image",
    published.CVPR_METHODS,
    published.CVPR_SETTINGS,
    OPTIONS,
    prepare,
    measure,
    summarize,
    forwards_per_sample,
    has_masks,
)
