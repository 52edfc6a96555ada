"""Canvases: the parametrization of the picture that gradient ascent optimizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns: principal axes of colour (brightness, blue to red, green to purple) times their standard deviations, measured
# over the pixels of 500 ImageNet pictures with colours in 0..1.
_COLOURS = ((0.244, 0.087, 0.026), (0.250, 0.004, -0.050), (0.255, -0.087, 0.024))
PARAMETRISATIONS = ("fourier", "pixel")


def hartley(pictures: Tensor) -> Tensor:
    """Return the orthonormal discrete Hartley transform of the last two axes, which is real and its own inverse.

    X(u, v) = 1/√(HW) Σ_xy I(y, x) cas 2π(uy/H + vx/W) with cas t = cos t + sin t (Bracewell 1983), the real part of the
    Fourier transform minus its imaginary part. It has as many real numbers as the picture has pixels.
    """
    spectrum = torch.fft.fft2(pictures, norm="ortho")
    return spectrum.real - spectrum.imag


def amplitudes(height: int, width: int) -> Tensor:
    """Return 1 / max(f, 1 / max(H, W)) ``[H, W]``, f in cycles per pixel, divided by its quadratic mean.

    The spectrum of natural pictures decreases as 1/f. Parameters of variance 1 give a picture of variance 1.
    """
    down, right = torch.fft.fftfreq(height, dtype=torch.float64), torch.fft.fftfreq(width, dtype=torch.float64)
    frequency = (down[:, None].square() + right.square()).sqrt()
    falling = 1 / frequency.clamp(min=1 / max(height, width))
    return falling / falling.square().mean().sqrt()


@dataclass(frozen=True, eq=False)
class Canvas:
    """An invertible map from parameters z ``[1, C, H, W]`` to the picture I.

    z → z ⊙ amplitudes → Hartley transform (``fourier``) → colour axes (``decorrelate``, for three channels) → logistic
    function scaled to the range from black to white (``bounded``).

    Attributes:
        ends: ``[2, C, 1, 1]`` black and white in the model's space.
        fourier, decorrelate, bounded: whether to use these steps.
    """

    ends: Tensor
    fourier: bool
    decorrelate: bool
    bounded: bool

    def picture(self, parameters: Tensor) -> Tensor:
        """Return the picture of parameters."""
        values = parameters
        if self.fourier:
            values = hartley(values * self._amplitudes(values))
        if self.decorrelate and values.shape[1] == 3:
            values = torch.einsum("rc,bchw->brhw", self._colours(values), values)
        if self.bounded:
            black, white = self.ends.to(values)
            values = black + (white - black) * torch.sigmoid(values)
        return values

    def parameters(self, picture: Tensor) -> Tensor:
        """Return the parameters of a picture; if ``bounded``, colours are clamped to almost black and white."""
        values = picture
        if self.bounded:
            values = torch.logit(self.shares(values), eps=1e-4)
        if self.decorrelate and values.shape[1] == 3:
            values = torch.einsum("rc,bchw->brhw", torch.linalg.inv(self._colours(values)), values)
        if self.fourier:
            values = hartley(values) / self._amplitudes(values)
        return values

    def shares(self, picture: Tensor) -> Tensor:
        """Return the picture with black as 0 and white as 1."""
        black, white = self.ends.to(picture)
        return (picture - black) / (white - black)

    @staticmethod
    def _amplitudes(like: Tensor) -> Tensor:
        return amplitudes(*like.shape[-2:]).to(like)

    @staticmethod
    def _colours(like: Tensor) -> Tensor:
        axes = torch.tensor(_COLOURS, dtype=torch.float64)
        return (axes / axes.norm(dim=0).max()).to(like)
