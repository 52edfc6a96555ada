"""What scores belong to: tokens and their texts, or pictures and the grid on them. Carried from inputs to results."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from PIL import Image
from torch import Tensor

from whyformer.explanation.geometry import Box, Geometry


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a batch of one input of a model; lists have an entry a sample, and None is unknown or not there.

    Attributes:
        tokens: token strings of each sample (padding included), for text.
        offsets: (start, end) characters of each token in ``texts``; (0, 0) for special tokens.
        texts: the raw sentences, where given.
        extent: (begin, end) characters of each of ``texts`` that the model read; the rest was cut off.
        unknown: places in ``tokens`` that stand for what the tokenizer has no token for ([UNK]), for each sample.
        special: places in ``tokens`` of special tokens ([CLS], [SEP], <s> ...), for each sample.
        image_size: (height, width) in pixels of the model's input, for pictures.
        grid: (rows, columns) of patches, where scores are of patches.
        cells: (left, top, right, bottom) of that grid in pixels of the model's input. It ends before the input does
            where the model does not read the rest, and reaches beyond where the model pads. None for just the input.
        read: likewise, the pixels of its input that the model reads; None for all of them.
        frames: how many steps of time have a grid (or a frame of pixels) of their own, for a video; None for a picture.
        pictures: ``[B, H, W, 3]`` uint8, the pictures as the model saw them.
        sounds: ``[B, T]`` the waves of sounds, 0 behind the end; sampling_rate: their samples a second; durations: how
            many seconds each lasts.
        rate: of a sound, how many scores a second has.
        originals: the pictures as they were given (RGB, any size), where it is known what the model saw of them.
        geometry: for each of them, where the model's input lies on it.
    """

    tokens: list[list[str]] | None = None
    offsets: list[list[tuple[int, int]]] | None = None
    texts: list[str] | None = None
    extent: list[tuple[int, int]] | None = None
    unknown: list[list[int]] | None = None
    special: list[list[int]] | None = None
    image_size: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    cells: Box | None = None
    read: Box | None = None
    frames: int | None = None
    pictures: Tensor | None = None
    sounds: Tensor | None = None
    sampling_rate: int | None = None
    durations: list[float] | None = None
    rate: float | None = None
    originals: list[Image.Image] | None = None
    geometry: list[Geometry] | None = None

    def sample(self, index: int) -> Features:
        """Those of one sample, again with a batch axis of 1."""
        whole = {f.name: getattr(self, f.name) for f in fields(self)}
        return Features(**{n: v[index : index + 1] if _is_batched(v) else v for n, v in whole.items()})

    def of_texts(self, numbers: list[int]) -> Features:
        """Those of some texts by their numbers, counted through where ``tokens`` has several texts of each sample."""
        tokens: list[Any] | None = self.tokens
        if tokens and tokens[0] and isinstance(tokens[0][0], list):
            tokens = [text for texts in tokens for text in texts]
        return Features(None if tokens is None else [tokens[i] for i in numbers])


def _is_batched(value: Any) -> bool:
    return isinstance(value, list | Tensor)
