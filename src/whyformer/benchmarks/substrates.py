"""What a removed pixel is replaced by: black, the mean colour, or a blur of the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.views import gaussian_blur

SUBSTRATES = ("black", "mean", "blur")
BLUR_RADIUS, BLUR_SIGMA = 5, 5.0


def substrate(name: str, pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The picture that shows where features are removed, in the model's (normalised) space.

    - "black": 0 in the un-normalised picture (0..1), that is −mean/std: Chefer et al. 2021;
    - "mean": 0 in normalised space, the data set's mean colour: RISE's deletion;
    - "blur": Gaussian blur, kernel 11, σ = 5: RISE's insertion.

    Args:
        pixels: ``[B, C, H, W]`` normalised; mean, std: ``[C]`` of the processor.
    """
    if name == "black":
        return (-mean / std).to(pixels)[None, :, None, None].expand_as(pixels)
    if name == "mean":
        return torch.zeros_like(pixels)
    if name == "blur":
        if min(pixels.shape[-2:]) <= BLUR_RADIUS:
            raise InputError(f"a picture of {list(pixels.shape[-2:])} pixels is too small for the blur (radius 5)")
        return gaussian_blur(pixels, BLUR_SIGMA, BLUR_RADIUS)
    raise InputError(f"substrate must be one of {', '.join(SUBSTRATES)}, not {name!r}")
