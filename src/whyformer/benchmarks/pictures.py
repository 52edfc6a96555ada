"""Pictures as the benchmarks feed them: squashed to the model's size (methods.md §6.1, 6.2), with masks and maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from whyformer.benchmarks.configurations import RANDOM, TRUTH, Configuration, random_scores
from whyformer.benchmarks.study import Batch, Scores, Study, Unusable, usable
from whyformer.datasets.samples import Picture
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs.removal import patch_size, picture_filler

RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


@dataclass(frozen=True)
class PixelSpec:
    """How a picture becomes the model's input.

    Attributes:
        size: (height, width); the aspect ratio is not kept and nothing is cropped.
        resample: name of Pillow's filter; mean, std: of the normalisation, ``[C]``.
    """

    size: tuple[int, int]
    resample: str
    mean: Tensor
    std: Tensor

    def pixels(self, picture: Image.Image) -> Tensor:
        """``[C, H, W]`` normalised."""
        height, width = self.size
        mode = "RGB" if len(self.mean) == 3 else "L"
        squashed = picture.convert(mode).resize((width, height), Image.Resampling(RESAMPLING[self.resample]))
        values = np.asarray(squashed, dtype=np.float32).reshape(height, width, -1) / 255
        return (torch.from_numpy(values).permute(2, 0, 1) - self.mean[:, None, None]) / self.std[:, None, None]

    def mask(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[H, W]``, nearest neighbour."""
        height, width = self.size
        picture = Image.fromarray(mask.astype(np.uint8) * 255)
        return np.asarray(picture.resize((width, height), Image.Resampling.NEAREST)) > 127


def pixel_spec(model: nn.Module, processor: Any, resample: str | None = None) -> PixelSpec:
    """Size, filter and normalisation of a model's image processor.

    Args:
        resample: filter; the processor's own by default (bilinear if it has none).
    """
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if mean is None or std is None:
        raise InputError(
            "what black is in the model's space is unknown: pass an image processor with image_mean and image_std"
        )
    if getattr(processor, "do_normalize", True) is False:
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    if resample is None:
        number = int(getattr(processor, "resample", None) or 2)
        resample = next((n for n, v in RESAMPLING.items() if v == number), "bilinear")
    if resample not in RESAMPLING:
        raise InputError(f"resample must be one of {', '.join(RESAMPLING)}, not {resample!r}")
    normalisation = (torch.tensor(v, dtype=torch.float32) for v in (mean, std))
    return PixelSpec(_size(model, processor), resample, *normalisation)


def _size(model: nn.Module, processor: Any) -> tuple[int, int]:
    configured = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(configured, int):
        return configured, configured
    if isinstance(configured, list | tuple) and len(configured) == 2:
        return int(configured[0]), int(configured[1])
    for name in ("crop_size", "size"):
        found = getattr(processor, name, None)
        if found is not None and {"height", "width"} <= set(dict(found)):
            return int(found["height"]), int(found["width"])
    raise InputError("the model's input size is unknown: its config has no image_size and the processor no size")


@dataclass(frozen=True)
class Pictures(Batch):
    """Some pictures as the model sees them: ``pixels [B, C, H, W]``."""

    pixels: Tensor
    spec: PixelSpec
    baseline: ClassVar = "black"

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """The object's mask at the model's size."""
        load = self.samples[index].mask
        return None if load is None else self.spec.mask(load())

    def some(self, which: Sequence[int]) -> Pictures:
        """Some of the pictures."""
        chosen = list(which)
        samples = [self.samples[i] for i in chosen]
        return replace(self, samples=samples, logits=self.logits[chosen], pixels=self.pixels[chosen])

    def explanations(
        self, configuration: Configuration, targets: Sequence[int], which: Sequence[int] | None = None
    ) -> list[Explanation | Unusable]:
        """Of some of the pictures (all by default), each for its own target."""
        chosen = range(len(self.samples)) if which is None else which
        return self.explain(configuration, [self.pixels[i] for i in chosen], [targets[i] for i in chosen], torch.stack)

    def scores(
        self, configuration: Configuration, targets: Sequence[int], which: Sequence[int] | None = None
    ) -> list[Scores]:
        """``[H, W]`` maps of some of the pictures, each for its own target; or why there is none.

        The floor has one uniform score a patch (16 pixels where the model tells no patch size), resized like any map.
        """
        chosen = list(range(len(self.samples)) if which is None else which)
        if configuration.kind == RANDOM:
            size, patch = self.spec.size, patch_size(self.study.model)
            shape = (max(1, size[0] // patch[0]), max(1, size[1] // patch[1]))
            drawn = [random_scores(self.samples[i].id, shape, self.study.seed) for i in chosen]
            return [resize(torch.from_numpy(d)[None], size)[0].numpy() for d in drawn]
        if configuration.kind == TRUTH:
            masks = [self.mask(i) for i in chosen]
            absent = Unusable("failed", "this picture has no mask")
            return [absent if mask is None else usable(mask.astype(np.float64)) for mask in masks]
        found = self.explanations(configuration, targets, chosen)
        return [one if isinstance(one, Unusable) else usable(one.heatmap()[0].double().numpy()) for one in found]

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores of what can be taken out: patches, each the mean of its pixels."""
        (rows, columns), (height, width) = self.grid, patch_size(self.study.model)
        return scores.reshape(rows, height, columns, width).mean((1, 3)).reshape(-1)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        size, patch = self.spec.size, patch_size(self.study.model)
        if size[0] % patch[0] or size[1] % patch[1]:
            raise InputError(f"the input of {size} pixels is not a whole number of patches of {patch}")
        return size[0] // patch[0], size[1] // patch[1]

    def count(self, index: int) -> int:
        """How many patches there are."""
        return self.grid[0] * self.grid[1]

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[H, W]`` True at the pixels of these patches."""
        return np.kron(features.reshape(self.grid), np.ones(patch_size(self.study.model), dtype=bool))

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        """Logits ``[n, C]`` of pictures with some pixels taken out: (its number, ``[H, W]`` True there, baseline)."""
        black = -self.spec.mean / self.spec.std
        empty = cache(lambda baseline: picture_filler(baseline, self.pixels, black))

        def perturbed() -> Iterator[Tensor]:
            for index, gone, baseline in jobs:
                where = torch.from_numpy(gone).to(self.pixels.device)
                yield torch.where(where, empty(baseline)[index], self.pixels[index])

        return self.study.forwards.pixels(perturbed())

    def without(self, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Logits ``[S, C]`` of one picture with each subset of its patches ``[S, n]`` black."""
        return self.run((index, self.covered(index, gone), self.baseline) for gone in removed)


def read_pictures(study: Study, samples: Sequence[Picture]) -> Pictures:
    spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
    pixels = torch.stack([spec.pixels(s.load()) for s in samples])
    logits = study.forwards.pixels(pixels)
    return Pictures(study, samples, logits, pixels.to(**study.forwards.place), spec)


def conventions(study: Study) -> dict[str, str]:
    """What every benchmark on pictures states; nothing for text."""
    if study.modality != "image":
        return {}
    spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
    return {
        "pictures": f"squashed to {spec.size[0]}×{spec.size[1]} ({spec.resample}), aspect ratio not kept, "
        f"nothing cropped",
        "maps": "patch scores resized bilinearly to the model's input, one score a pixel",
        "ties": "equal scores are taken by index, row by row",
        "floor": f"random: one uniform score a patch, seed {study.seed}",
    }
