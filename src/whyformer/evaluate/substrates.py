"""What a removed pixel is replaced by: black, the mean colour, or a blur of the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.errors import InputError

SUBSTRATES = ("black", "mean", "blur")
BLUR_KERNEL, BLUR_SIGMA = 11, 5.0


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
        return blur(pixels)
    raise InputError(f"substrate must be one of {', '.join(SUBSTRATES)}, not {name!r}")


def blur(pixels: Tensor, kernel: int = BLUR_KERNEL, sigma: float = BLUR_SIGMA) -> Tensor:
    """Gaussian blur of ``[B, C, H, W]``, borders mirrored; the kernel sums to 1."""
    if min(pixels.shape[-2:]) <= kernel // 2:
        raise InputError(f"a picture of {list(pixels.shape[-2:])} pixels is too small for a blur of {kernel}")
    offsets = torch.arange(kernel, dtype=pixels.dtype, device=pixels.device) - kernel // 2
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(pixels.shape[1], 1, 1, kernel)
    padded = torch.nn.functional.pad(pixels, [kernel // 2] * 4, mode="reflect")
    rows = torch.nn.functional.conv2d(padded, weights, groups=pixels.shape[1])
    return torch.nn.functional.conv2d(rows, weights.transpose(-1, -2), groups=pixels.shape[1])
