"""Pictures as the benchmarks feed them: squashed to the model's size (methods.md §6.1, 6.2), with masks and maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from whyformer.benchmarks.configurations import random_scores
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
        picture = Image.fromarray(mask.astype(np.uint8) * 255)
        return np.asarray(picture.resize(self.size[::-1], Image.Resampling.NEAREST)) > 127


def pixel_spec(model: nn.Module, processor: Any, resample: str | None = None) -> PixelSpec:
    """Size, filter (the processor's by default, or bilinear) and normalisation of a model's image processor."""
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
    """Some pictures as the model sees them: ``pixels [B, C, H, W]``; what can be taken out are patches."""

    pixels: Tensor
    spec: PixelSpec
    baseline = "black"

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """The object's mask at the model's size."""
        load = self.samples[index].mask
        return None if load is None else self.spec.mask(load())

    def some(self, which: Sequence[int]) -> Pictures:
        """Some of the pictures."""
        chosen = list(which)
        samples = [self.samples[i] for i in chosen]
        return replace(self, samples=samples, logits=self.logits[chosen], pixels=self.pixels[chosen])

    def inputs(self, which: Sequence[int]) -> Tensor:
        return self.pixels[list(which)]

    def drawn(self, index: int) -> NDArray[np.float64]:
        """One uniform score a patch (16 pixels where the model tells no patch size), resized like any map."""
        shape = (max(1, side // patch) for side, patch in zip(self.spec.size, self.patch, strict=True))
        drawn = random_scores(self.samples[index].id, tuple(shape), self.study.seed)
        return resize(torch.from_numpy(drawn)[None], self.spec.size)[0].numpy()

    def truth(self, index: int) -> Scores:
        mask = self.mask(index)
        return Unusable("failed", "this picture has no mask") if mask is None else usable(mask.astype(np.float64))

    def read(self, index: int, explanation: Explanation) -> Scores:
        return usable(explanation.heatmap()[0].double().numpy())

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return patch_size(self.study.model)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        size, patch = self.spec.size, self.patch
        if size[0] % patch[0] or size[1] % patch[1]:
            raise InputError(f"the input of {size} pixels is not a whole number of patches of {patch}")
        return size[0] // patch[0], size[1] // patch[1]

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each patch has the mean of its pixels."""
        (rows, columns), (height, width) = self.grid, self.patch
        return scores.reshape(rows, height, columns, width).mean((1, 3)).reshape(-1)

    def count(self, index: int) -> int:
        return self.grid[0] * self.grid[1]

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return features.reshape(-1, *self.grid).repeat(self.patch[0], 1).repeat(self.patch[1], 2)

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        black = -self.spec.mean / self.spec.std
        empty = cache(lambda baseline: picture_filler(baseline, self.pixels, black))

        def perturbed() -> Iterator[Tensor]:
            for index, gone, baseline in jobs:
                where = torch.from_numpy(gone).to(self.pixels.device)
                yield torch.where(where, empty(baseline)[index], self.pixels[index])

        return self.study.forwards.pixels(perturbed())


def read_pictures(study: Study, samples: Sequence[Picture]) -> Pictures:
    spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
    pixels = torch.stack([spec.pixels(s.load()) for s in samples])
    logits = study.forwards.pixels(pixels)
    return Pictures(study, samples, logits, pixels.to(**study.forwards.place), spec)
