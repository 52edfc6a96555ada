"""Canvases: the numbers that gradient ascent changes, and the picture that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns: the principal axes of colour (bright, blue to red, green to purple) times their standard deviations, as
# measured over the pixels of 500 ImageNet pictures with colours from 0 to 1.
_COLOURS = ((0.244, 0.087, 0.026), (0.250, 0.004, -0.050), (0.255, -0.087, 0.024))
PARAMETRISATIONS = ("fourier", "pixel")


def hartley(pictures: Tensor) -> Tensor:
    """The orthonormal discrete Hartley transform of the last two axes, real and its own inverse.

    X(u, v) = 1/√(HW) Σ_xy I(y, x) cas 2π(uy/H + vx/W), with cas t = cos t + sin t (Bracewell 1983): the real part of
    the Fourier transform less its imaginary part, as many real numbers as the picture has pixels.
    """
    found = torch.fft.fft2(pictures, norm="ortho")
    return found.real - found.imag


def amplitudes(height: int, width: int) -> Tensor:
    """``[H, W]`` 1 / max(f, 1 / max(H, W)), with f in cycles a pixel, over its quadratic mean.

    The spectrum of natural pictures falls off like 1/f; parameters of variance 1 make a picture of variance 1.
    """
    down, right = torch.fft.fftfreq(height, dtype=torch.float64), torch.fft.fftfreq(width, dtype=torch.float64)
    frequency = (down[:, None].square() + right.square()).sqrt()
    falling = 1 / frequency.clamp(min=1 / max(height, width))
    return falling / falling.square().mean().sqrt()


@dataclass(frozen=True, eq=False)
class Canvas:
    """From parameters z ``[1, C, H, W]`` to the picture I, step by step and each step invertible.

    z → z ⊙ amplitudes → Hartley transform (``fourier``) → colour axes (``decorrelate``, of three channels) → logistic
    function, stretched to the range of colours that the model knows (``bounded``).

    Attributes:
        ends: ``[2, C, 1, 1]`` black and white in the model's space.
    """

    ends: Tensor
    fourier: bool
    decorrelate: bool
    bounded: bool

    def picture(self, parameters: Tensor) -> Tensor:
        """I of the parameters."""
        made = parameters
        if self.fourier:
            made = hartley(made * self._amplitudes(made))
        if self.decorrelate and made.shape[1] == 3:
            made = torch.einsum("rc,bchw->brhw", self._colours(made), made)
        if self.bounded:
            black, white = self.ends.to(made)
            made = black + (white - black) * torch.sigmoid(made)
        return made

    def parameters(self, picture: Tensor) -> Tensor:
        """z of a picture; colours beyond black and white (``bounded``) become almost black and white."""
        found = picture
        if self.bounded:
            found = torch.logit(self.shares(found), eps=1e-4)
        if self.decorrelate and found.shape[1] == 3:
            found = torch.einsum("rc,bchw->brhw", torch.linalg.inv(self._colours(found)), found)
        if self.fourier:
            found = hartley(found) / self._amplitudes(found)
        return found

    def shares(self, picture: Tensor) -> Tensor:
        """The picture with black as 0 and white as 1."""
        black, white = self.ends.to(picture)
        return (picture - black) / (white - black)

    @staticmethod
    def _amplitudes(like: Tensor) -> Tensor:
        return amplitudes(*like.shape[-2:]).to(like)

    @staticmethod
    def _colours(like: Tensor) -> Tensor:
        axes = torch.tensor(_COLOURS, dtype=torch.float64)
        return (axes / axes.norm(dim=0).max()).to(like)
