"""Random augmentations of a picture in each step, and its total variation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """Random augmentations to which the activation should be robust, drawn in each step, with settings of
    :func:`~whyformer.maximize.maximize_activation`; 0 disables each."""

    jitter: int
    scale: float
    rotate: float
    colour: float
    noise: float

    def apply(self, picture: Tensor, draws: torch.Generator) -> Tensor:
        """Augment a picture ``[1, C, H, W]`` differentiably; areas outside the picture are filled by reflection."""
        if self.jitter:
            shift = torch.randint(-self.jitter, self.jitter + 1, (2,), generator=draws).tolist()
            picture = torch.roll(picture, shift, (-2, -1))
        if self.scale or self.rotate:
            size, rotation = (torch.rand(2, generator=draws, dtype=torch.float64) * 2 - 1).tolist()
            picture = _turned(picture, 1 + size * self.scale, math.radians(rotation * self.rotate))
        if self.colour:
            uniform = torch.rand(2, picture.shape[1], 1, 1, generator=draws, dtype=torch.float64) * 2 - 1
            shift, factor = (uniform * self.colour).to(picture)
            picture = (picture - shift) * torch.exp(factor)
        if self.noise:
            picture = picture + self.noise * torch.randn(picture.shape, generator=draws).to(picture)
        return picture


def _turned(picture: Tensor, size: float, angle: float) -> Tensor:
    """Return the picture scaled by ``size`` and rotated by ``angle`` about its centre."""
    height, width = picture.shape[-2:]
    cos, sin = math.cos(angle) / size, math.sin(angle) / size
    matrix = picture.new_tensor([[cos, sin * height / width, 0], [-sin * width / height, cos, 0]])
    grid = torch.nn.functional.affine_grid(matrix[None], list(picture.shape), align_corners=False)
    return torch.nn.functional.grid_sample(picture, grid, "bilinear", "reflection", align_corners=False)


def total_variation(picture: Tensor) -> Tensor:
    """Return mean |I(y+1, x) − I(y, x)| + mean |I(y, x+1) − I(y, x)| over channels and pixels (Rudin et al. 1992)."""
    differences = [picture.diff(dim=axis).abs() for axis in (-2, -1) if picture.shape[axis] > 1]
    return sum((difference.mean() for difference in differences), picture.new_zeros(()))
