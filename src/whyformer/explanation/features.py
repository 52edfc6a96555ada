"""The features that scores belong to: tokens and their texts, or pictures and their patch grid."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from PIL import Image
from torch import Tensor

from whyformer.explanation.geometry import Box, Geometry


@dataclass(frozen=True, eq=False)
class Features:
    """The features of one model input for a batch. Lists have an entry for each sample; None means unknown or absent.

    Attributes:
        tokens: token strings of each sample, padding included, for text.
        offsets: (start, end) character offsets of each token in ``texts``; (0, 0) for special tokens.
        texts: raw text of each sample, if known.
        extent: (begin, end) character offsets of the part of each text that the model read; None if all was read.
        skipped: (begin, end) character offsets of the truncated parts inside of ``extent``, such as the end of the
            first text of a pair.
        unknown: indices of the unknown tokens ([UNK]) of each sample; None if there are none.
        special: indices of the special tokens ([CLS], [SEP], <s> ...) of each sample, if the tokenizer is known. They
            have scores like all tokens; figures, pages and :func:`print` show the sum of their scores.
        image_size: (height, width) of the model's input in pixels, for pictures.
        grid: (rows, columns) of the patch grid, for ``level="patch"``.
        cells: (left, top, right, bottom) of the patch grid in pixels of the model's input. It is smaller than the input
            if the model ignores a border, and extends beyond the input if the model pads. None if it covers the input.
        read: (left, top, right, bottom) of the part of its input that the model reads, in pixels; None if it reads all.
        frames: number of time steps that have their own grid or frame of pixels, for a video; None for a picture.
        pictures: ``[B, H, W, 3]`` uint8, the preprocessed pictures that the model saw.
        sounds: ``[B, T]`` waveforms, zero-padded at the end.
        sampling_rate: sampling rate of the waveforms in Hz.
        durations: duration of each sound in seconds.
        rate: scores per second of a sound; None for other inputs.
        originals: original pictures (RGB, any size); None for one whose ``geometry`` is unknown.
        geometry: position of the model's input on each original picture; None if it is unknown, for one or for all.
    """

    tokens: list[list[str]] | None = None
    offsets: list[list[tuple[int, int]]] | None = None
    texts: list[str] | None = None
    extent: list[tuple[int, int]] | None = None
    skipped: list[list[tuple[int, int]]] | None = None
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
    originals: list[Image.Image | None] | None = None
    geometry: list[Geometry | None] | None = None

    def sample(self, index: int) -> Features:
        """Return the features of one sample, with a batch axis of 1."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        selected = {n: v[index : index + 1] if _is_batched(v) else v for n, v in values.items()}
        return Features(**{n: None if isinstance(v, list) and v == [None] else v for n, v in selected.items()})

    def of_texts(self, numbers: list[int]) -> Features:
        """Return the features of some texts by index; several texts of each sample are numbered consecutively."""
        tokens: list[Any] | None = self.tokens
        if tokens and tokens[0] and isinstance(tokens[0][0], list):
            tokens = [text for texts in tokens for text in texts]
        return Features(None if tokens is None else [tokens[i] for i in numbers])


def _is_batched(value: Any) -> bool:
    return isinstance(value, list | Tensor)
