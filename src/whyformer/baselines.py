"""Baselines: what stands in the place of features that are taken out of an input.

:data:`BASELINES` is the one table of them. Whatever takes a baseline reads its names, its help and its choices there:
methods, metrics, benchmarks, the command line, the page and the schema of its output. A new one is a function and a
row. The module imports torch only when something is filled, since the command line reads the names before that.
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
    """What a baseline of pictures or vectors is made from.

    Attributes:
        values: the input, pixels ``[B, C, H, W]`` in the model's space or vectors ``[B, N, D]``.
        axes: the axes of ``values`` along which features stand, (-2, -1) for pictures.
        black, white: ``[C]`` in the space of ``values``, None where they are unknown and for vectors.
        zero: ``[C]`` what the model reads as 0; None where ``values`` are in the model's space, in which that is 0.
        blur: (σ, radius) in pixels, radius None for 3σ.
        uniform: numbers between 0 and 1 in the shape of ``values``; by default the same ones for each sample.
    """

    values: Tensor
    axes: tuple[int, ...] = (-2, -1)
    black: Sequence[float] | Tensor | None = None
    white: Sequence[float] | Tensor | None = None
    zero: Sequence[float] | Tensor | None = None
    blur: tuple[float, int | None] = BLUR
    uniform: Callable[[Tensor], Tensor] | None = None

    def level(self, channels: Sequence[float] | Tensor | None) -> Tensor:
        """``[C]`` over the whole picture, of the shape of ``values``."""
        import torch

        if channels is None:
            raise InputError("what is black to the model is unknown: pass processor=, or choose another baseline")
        return torch.as_tensor(channels).to(self.values)[:, None, None].expand_as(self.values)


def _zero(given: Filling) -> Tensor:
    return given.values.new_zeros(()).expand_as(given.values) if given.zero is None else given.level(given.zero)


def _black(given: Filling) -> Tensor:
    return given.level(given.black)


def _mean(given: Filling) -> Tensor:
    return given.values.mean(given.axes, keepdim=True).expand_as(given.values)


def _blur(given: Filling) -> Tensor:
    from whyformer.explanation.views import gaussian_blur

    (sigma, radius), size = given.blur, given.values.shape[-2:]
    if radius is not None and min(size) <= radius:
        raise InputError(f"a picture of {list(size)} pixels is too small for the blur (radius {radius})")
    return gaussian_blur(given.values, sigma, radius)


def _noise(given: Filling) -> Tensor:
    black, white = given.level(given.black), given.level(given.white)
    return black + (white - black) * (given.uniform or _drawn_alike)(given.values)


def _drawn_alike(values: Tensor) -> Tensor:
    """Drawn once and for each sample the same, so that a sample has it wherever it stands in a batch."""
    import torch

    drawn = torch.rand(values.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(values).expand_as(values)


@dataclass(frozen=True)
class Baseline:
    """A row of the table: a baseline, and the kinds of input that it is for.

    Attributes:
        kinds: modality of the input ("image", "tensor" for vectors, "text") -> what stands there, as help and
            reports have it.
        fill: makes ``[B, C, H, W]`` or ``[B, N, D]`` of a :class:`Filling`, for pictures and vectors.
        token: name of the special token that stands there, for text: ``mask`` is the tokenizer's ``mask_token_id``.
            Text without one has its tokens taken out.
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
            "noise", {"image": "uniform noise between 0 and 1 before normalisation, drawn for each picture"}, _noise
        ),
        Baseline("mask", {"text": "the tokenizer's mask token"}, token="mask"),
        Baseline("unk", {"text": "the tokenizer's token for unknown words"}, token="unk"),
        Baseline("pad", {"text": "the tokenizer's padding token"}, token="pad"),
        Baseline("delete", {"text": "nothing: the token is taken out, and the others move up"}),
    )
}


def names_for(kind: str) -> tuple[str, ...]:
    """Names of the baselines of a modality, in the order of the table."""
    return tuple(row.name for row in BASELINES.values() if kind in row.kinds)


TOKENS = {row.name: row.token for row in BASELINES.values() if row.token}
"""Baselines of text that are a special token -> its name; the first that a tokenizer has is the default."""
