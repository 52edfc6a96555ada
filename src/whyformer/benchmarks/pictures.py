"""What the benchmarks on pictures share: pixels, masks and maps of a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whyformer.benchmarks.configurations import Configuration, random_scores
from whyformer.benchmarks.explaining import Unusable, explain_pixels, usable
from whyformer.benchmarks.pixels import PixelSpec, pixel_spec
from whyformer.benchmarks.study import Study
from whyformer.datasets.samples import Picture
from whyformer.errors import InputError
from whyformer.explanation.views import resize
from whyformer.models.structure import class_count

Map = NDArray[np.float64] | Unusable


@dataclass(frozen=True)
class Batch:
    """Some pictures as the model sees them, with its clean predictions."""

    samples: Sequence[Picture]
    pixels: Tensor
    logits: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    spec: PixelSpec

    @property
    def predicted(self) -> list[int]:
        return [int(i) for i in self.logits.argmax(-1)]

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """The object's mask at the model's size."""
        load = self.samples[index].mask
        return None if load is None else self.spec.mask(load())


def spec_of(study: Study) -> PixelSpec:
    return pixel_spec(study.model, study.processor, study.options.get("resample"))


def read_batch(study: Study, samples: Sequence[Picture]) -> Batch:
    spec = spec_of(study)
    pixels = torch.stack([spec.pixels(s.load()) for s in samples])
    logits = study.forwards.pixels(pixels)
    return Batch(samples, pixels.to(**study.forwards.place), logits, study.probabilities(logits), spec)


def maps(
    study: Study, batch: Batch, configuration: Configuration, targets: Sequence[int], which: Sequence[int] | None = None
) -> list[Map]:
    """``[H, W]`` maps of some samples of a batch (all by default), each for its target; or why there is none.

    The floor has one uniform score a patch (16 pixels where the model tells no patch size), resized like any map.
    """
    chosen = list(range(len(batch.samples)) if which is None else which)
    if configuration.kind == "random":
        size = batch.spec.size
        patch = patch_size(study)
        shape = (max(1, size[0] // patch[0]), max(1, size[1] // patch[1]))
        drawn = [random_scores(batch.samples[i].id, shape, study.seed) for i in chosen]
        return [resize(torch.from_numpy(d)[None], size)[0].numpy() for d in drawn]
    if configuration.kind == "ground_truth":
        return [_truth(batch, i) for i in chosen]
    found = explain_pixels(
        study.model, study.processor, configuration, batch.pixels[chosen], [targets[i] for i in chosen]
    )
    made: list[Map] = []
    for one in found:
        try:
            made.append(one.map())
        except Unusable as error:
            made.append(error)
    return made


def _truth(batch: Batch, index: int) -> Map:
    mask = batch.mask(index)
    if mask is None:
        return Unusable("failed", "this picture has no mask")
    try:
        return usable(mask.astype(np.float64))
    except Unusable as error:
        return error


def patch_size(study: Study) -> tuple[int, int]:
    size = getattr(getattr(study.model, "config", None), "patch_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return 16, 16


def pool(pixels: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    """``[H, W]`` -> one mean a patch."""
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    return pixels[: rows * height, : columns * width].reshape(rows, height, columns, width).mean((1, 3))


def check_labels(study: Study, *, required: bool = True) -> None:
    """Labels must be there and lie within the model's classes."""
    labels = [s.label for s in study.samples]
    missing = sum(label is None for label in labels)
    if missing and required:
        raise InputError(
            f"{missing} of {len(labels)} pictures have no label in the model's classes, which this benchmark needs. "
            "Give labelled data; segmentation data whose classes are not the model's can only be used with the "
            "predicted class"
        )
    classes = class_count(study.model)
    worst = max((label for label in labels if label is not None), default=0)
    if classes is not None and worst >= classes:
        raise InputError(
            f"the data hold class {worst} and the model has {classes} classes (0 to {classes - 1}): label sets "
            f"do not match"
        )


def limit(study: Study) -> None:
    """Apply ``count`` (that many, spread evenly over the data) and ``files`` (these only; comma-separated)."""
    files, count = study.options.get("files"), study.options.get("count")
    if files:
        names = set(files.split(",") if isinstance(files, str) else files)
        chosen = [s for s in study.samples if s.id in names]
        absent = sorted(names - {s.id for s in chosen})
        if absent:
            raise InputError(f"{len(absent)} of the files named are not in the data, {absent[0]} among them")
        study.samples = chosen
    if count and count < len(study.samples):
        step = len(study.samples) / count
        study.samples = [study.samples[int(i * step)] for i in range(count)]
    ids = [s.id for s in study.samples]
    if len(set(ids)) < len(ids):
        raise InputError("two samples have the same id, so their records could not be told apart")
    if not ids:
        raise InputError("there are no samples")


def geometry(study: Study) -> dict[str, str]:
    """Convention lines that every benchmark on pictures states."""
    spec = spec_of(study)
    return {
        "pictures": f"squashed to {spec.size[0]}×{spec.size[1]} ({spec.resample}), aspect ratio not kept, "
        f"nothing cropped",
        "maps": "patch scores resized bilinearly to the model's input, one score a pixel",
        "ties": "equal scores are taken by index, row by row",
        "floor": f"random: one uniform score a patch, seed {study.seed}",
    }
