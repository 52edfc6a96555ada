"""The position of a model's input on the original picture, to invert resizing, cropping and padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whyformer.errors import InputError

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels, possibly fractional."""


@dataclass(frozen=True)
class Geometry:
    """The part of an original picture that the model's input shows.

    Pixel (i, j) of an input of H × W pixels covers, on the original, the rows top + (bottom − top)·[i, i + 1]/H and the
    columns left + (right − left)·[j, j + 1]/W.

    Attributes:
        size: (height, width) of the original in pixels.
        box: (left, top, right, bottom) of the model's input in original pixels, possibly fractional. The box extends
            beyond the picture after padding, and excludes a border after cropping.
        seen: the box of the part that the model read, if ``box`` is that of a map instead.
    """

    size: tuple[int, int]
    box: Box
    seen: Box | None = None

    def __post_init__(self) -> None:
        for left, top, right, bottom in filter(None, (self.box, self.seen)):
            if min(self.size) < 1 or not (left < right and top < bottom):
                raise InputError(f"invalid geometry: size {self.size}, box {(left, top, right, bottom)}")

    @classmethod
    def whole(cls, size: tuple[int, int]) -> Geometry:
        """Return the geometry of an input that shows the whole picture, whatever its aspect ratio."""
        return cls(size, (0.0, 0.0, float(size[1]), float(size[0])))

    def part(self, box: Box | None, size: tuple[int, int]) -> Box:
        """Return the box of a part of the model's input in pixels of the original.

        Args:
            box: the part, in pixels of the input; None for the whole input.
            size: (height, width) of the input in pixels.
        """
        if box is None:
            return self.box
        left, top, right, bottom = self.box
        across, down = (right - left) / size[1], (bottom - top) / size[0]
        return left + across * box[0], top + down * box[1], left + across * box[2], top + down * box[3]

    def scaled(self, size: tuple[int, int]) -> Geometry:
        """Return the geometry on the picture resized to another (height, width)."""
        down, across = size[0] / self.size[0], size[1] / self.size[1]
        by = across, down, across, down
        boxes: list[Any] = [box and tuple(v * f for v, f in zip(box, by, strict=True)) for box in (self.box, self.seen)]
        return Geometry(size, *boxes)
