"""Baselines: the values that replace features removed from an input.

:data:`BASELINES` lists all of them. Methods, metrics, benchmarks, the command line, the web page and the schema of its
output read names, help texts and choices from it. To add a baseline, write a function and add a row. The command line
reads the names before it imports torch, so this module imports torch only in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whyformer.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

BLUR = (5.0, 5)
"""(σ, radius) in pixels of the blur that metrics use: kernel 11, RISE's insertion."""


@dataclass(frozen=True)
class Filling:
    """The input and settings from which a baseline of pictures or vectors is computed.

    Attributes:
        values: the input, pixels ``[B, C, H, W]`` in the model's space or vectors ``[B, N, D]``.
        axes: the axes of ``values`` that index features; (-2, -1) for pictures.
        black, white: ``[C]`` in the space of ``values``; None if unknown, and for vectors.
        zero: ``[C]`` the values that the model reads as 0; None if ``values`` are in the model's space (then 0).
        blur: (σ, radius) in pixels; radius None means 3σ.
        uniform: function that draws numbers from 0 to 1 in the shape of ``values``; default: one fixed draw that all
            samples share.
    """

    values: Tensor
    axes: tuple[int, ...] = (-2, -1)
    black: Sequence[float] | Tensor | None = None
    white: Sequence[float] | Tensor | None = None
    zero: Sequence[float] | Tensor | None = None
    blur: tuple[float, int | None] = BLUR
    uniform: Callable[[Tensor], Tensor] | None = None

    def level(self, channels: Sequence[float] | Tensor | None) -> Tensor:
        """Broadcast ``[C]`` over the picture to the shape of ``values``."""
        import torch

        if channels is None:
            raise InputError("the model's value of black is unknown: pass processor=, or choose another baseline")
        return torch.as_tensor(channels).to(self.values)[:, None, None].expand_as(self.values)


def _zero(filling: Filling) -> Tensor:
    if filling.zero is None:
        return filling.values.new_zeros(()).expand_as(filling.values)
    return filling.level(filling.zero)


def _black(filling: Filling) -> Tensor:
    return filling.level(filling.black)


def _mean(filling: Filling) -> Tensor:
    return filling.values.mean(filling.axes, keepdim=True).expand_as(filling.values)


def _blur(filling: Filling) -> Tensor:
    from whyformer.explanation.views import gaussian_blur

    (sigma, radius), size = filling.blur, filling.values.shape[-2:]
    if radius is not None and min(size) <= radius:
        raise InputError(f"a picture of {list(size)} pixels is too small for a blur of radius {radius}")
    return gaussian_blur(filling.values, sigma, radius)


def _noise(filling: Filling) -> Tensor:
    black, white = filling.level(filling.black), filling.level(filling.white)
    return black + (white - black) * (filling.uniform or _fixed_noise)(filling.values)


def _fixed_noise(values: Tensor) -> Tensor:
    """Uniform noise that is the same for every sample, so that a sample's place in the batch does not matter."""
    import torch

    noise = torch.rand(values.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return noise.to(values).expand_as(values)


@dataclass(frozen=True)
class Baseline:
    """A row of the table: a baseline, and the kinds of input that it is for.

    Attributes:
        kinds: modality of the input ("image", "tensor" for vectors, "text") -> description for help and reports.
        fill: function from a :class:`Filling` to ``[B, C, H, W]`` or ``[B, N, D]``, for pictures and vectors.
        token: for text, the special token that replaces others: ``mask`` is the tokenizer's ``mask_token_id``. None
            deletes the tokens.
    """

    name: str
    kinds: dict[str, str]
    fill: Callable[[Filling], Tensor] | None = None
    token: str | None = None


BASELINES: dict[str, Baseline] = {
    row.name: row
    for row in (
        Baseline(
            "zero", {"image": "0 after normalisation (mean colour)", "tensor": "0"}, _zero
        ),  # RISE's deletion (Petsiuk et al. 2018)
        Baseline("black", {"image": "0 before normalisation (black)"}, _black),  # Chefer et al. 2021
        Baseline(
            "mean", {"image": "each channel's mean over the picture", "tensor": "the mean over the sequence"}, _mean
        ),
        Baseline("blur", {"image": "Gaussian blur, kernel 11, σ 5"}, _blur),  # RISE's insertion
        Baseline(
            "noise", {"image": "uniform noise between 0 and 1 before normalisation (by benchmarks per picture)"}, _noise
        ),
        Baseline("mask", {"text": "the tokenizer's mask token"}, token="mask"),
        Baseline("unk", {"text": "the tokenizer's token for unknown words"}, token="unk"),
        Baseline("pad", {"text": "the tokenizer's padding token"}, token="pad"),
        Baseline("delete", {"text": "nothing: the token is deleted, and the others move up"}),
    )
}


def names_for(kind: str) -> tuple[str, ...]:
    """Return the names of a modality's baselines, in the order of the table."""
    return tuple(row.name for row in BASELINES.values() if kind in row.kinds)


TOKENS = {row.name: row.token for row in BASELINES.values() if row.token}
"""Text baseline -> name of its special token. The default is the first that the tokenizer has."""
