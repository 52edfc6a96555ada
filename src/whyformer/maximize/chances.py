"""What befalls a picture in each step: random shift, turn, size and colour; and how rough it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chances:
    """Random changes under which a unit should answer as well; each is drawn anew in each step, 0 is none.

    Attributes:
        jitter: shift by up to so many pixels, around the edge.
        scale: size between 1 − scale and 1 + scale times.
        rotate: turn by up to so many degrees.
        colour: shift of each channel by up to ± colour, and a factor e^±colour of it.
        noise: standard deviation of noise that is added to each pixel.
    """

    jitter: int
    scale: float
    rotate: float
    colour: float
    noise: float

    def befall(self, picture: Tensor, draws: torch.Generator) -> Tensor:
        """``[1, C, H, W]`` changed by lots, differentiably; what a turn or a smaller size lays bare is mirrored."""
        if self.jitter:
            shift = torch.randint(-self.jitter, self.jitter + 1, (2,), generator=draws).tolist()
            picture = torch.roll(picture, shift, (-2, -1))
        if self.scale or self.rotate:
            size, turn = (torch.rand(2, generator=draws, dtype=torch.float64) * 2 - 1).tolist()
            picture = _turned(picture, 1 + size * self.scale, math.radians(turn * self.rotate))
        if self.colour:
            lots = (torch.rand(2, picture.shape[1], 1, 1, generator=draws, dtype=torch.float64) * 2 - 1) * self.colour
            shift, factor = lots.to(picture)
            picture = (picture - shift) * torch.exp(factor)
        if self.noise:
            picture = picture + self.noise * torch.randn(picture.shape, generator=draws).to(picture)
        return picture


def _turned(picture: Tensor, size: float, angle: float) -> Tensor:
    """The picture ``size`` times as large and turned by ``angle`` about its middle."""
    height, width = picture.shape[-2:]
    cos, sin = math.cos(angle) / size, math.sin(angle) / size
    matrix = picture.new_tensor([[cos, sin * height / width, 0], [-sin * width / height, cos, 0]])
    places = torch.nn.functional.affine_grid(matrix[None], list(picture.shape), align_corners=False)
    return torch.nn.functional.grid_sample(picture, places, "bilinear", "reflection", align_corners=False)


def total_variation(picture: Tensor) -> Tensor:
    """Mean of |I(y+1, x) − I(y, x)| plus mean of |I(y, x+1) − I(y, x)| over channels and pixels (Rudin et al. 1992)."""
    differences = [picture.diff(dim=axis).abs() for axis in (-2, -1) if picture.shape[axis] > 1]
    return sum((one.mean() for one in differences), picture.new_zeros(()))
