"""Pictures as the evaluation feeds them: squashed to the model's size, masks likewise (methods.md §6.1, 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import InputError

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


def pixel_spec(
    model: nn.Module, processor: Any, resample: str | None = None, size: tuple[int, int] | None = None
) -> PixelSpec:
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
    return PixelSpec(
        size or _size(model, processor),
        resample,
        torch.tensor(mean, dtype=torch.float32),
        torch.tensor(std, dtype=torch.float32),
    )


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
