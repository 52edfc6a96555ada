"""Where the model's input lies on the original picture: what resizing, cropping and padding did, undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from whyformer.errors import InputError

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels, fractions included."""


@dataclass(frozen=True)
class Geometry:
    """The part of an original picture that a model saw.

    Pixel (i, j) of an input of H × W pixels covers, on the original, the rows top + (bottom − top)·[i, i + 1]/H and the
    columns left + (right − left)·[j, j + 1]/W.

    Attributes:
        size: (height, width) of the original in pixels.
        box: (left, top, right, bottom) in original pixels, fractions included. It reaches beyond the picture where
            the processor padded, and leaves a border out where it cropped.
    """

    size: tuple[int, int]
    box: Box

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        if min(self.size) < 1 or not (left < right and top < bottom):
            raise InputError(f"an impossible geometry: size {self.size}, box {self.box}")

    @classmethod
    def whole(cls, size: tuple[int, int]) -> Geometry:
        """Everything is seen, whatever the aspect ratio."""
        return cls(size, (0.0, 0.0, float(size[1]), float(size[0])))

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Geometry:
        """What :meth:`to_dict` wrote."""
        height, width = facts["size"]
        left, top, right, bottom = facts["box"]
        return cls((int(height), int(width)), (float(left), float(top), float(right), float(bottom)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: list(value) for name, value in asdict(self).items()}

    def part(self, box: Box | None, size: tuple[int, int]) -> Box:
        """Where a part of the model's input lies on the original.

        Args:
            box: of the part in pixels of the input; None for all of it.
            size: (height, width) of the input.
        """
        if box is None:
            return self.box
        left, top, right, bottom = self.box
        across, down = (right - left) / size[1], (bottom - top) / size[0]
        return left + across * box[0], top + down * box[1], left + across * box[2], top + down * box[3]

    def scaled(self, size: tuple[int, int]) -> Geometry:
        """The same on the picture drawn at another (height, width)."""
        down, across = size[0] / self.size[0], size[1] / self.size[1]
        left, top, right, bottom = self.box
        return Geometry(size, (left * across, top * down, right * across, bottom * down))
