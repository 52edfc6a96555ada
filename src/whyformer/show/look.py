"""Options of drawings of maps on pictures: opacity, colours, contour lines, masks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from whyformer.errors import InputError

OPACITY = 1.0
_SHARE = (sys.float_info.min, 1, "a share of more than 0 and at most 1")
_NUMBERS = {
    "opacity": (0, 1, "between 0 and 1"),
    "keep": _SHARE,
    "above": _SHARE,
    "smooth": (0, 1000, "a number of pixels from 0 (each as it is) to 1000"),
}
"""Smallest and largest value of options, and what they must be; the default is valid too."""


@dataclass(frozen=True)
class Look:
    """Options of a drawing of a map on a picture.

    Attributes:
        opacity: of the map, 0 (picture alone) to 1.
        cmap: a matplotlib colour map such as "viridis", or the papers' "jet"; by default one hue, and for scores
            with a sign two with 0 in the middle. Both are safe for the colour-blind.
        fade: let the picture show where scores are near 0; False covers it evenly, as in the papers.
        contours: number of contour lines between 0 and the largest score, for each sign.
        keep: show only the part of the picture with the highest scores, this share of what the model saw (0 to 1).
        above: show only the part with at least this share of the highest score (0 to 1).
        smooth: σ of the Gaussian that smooths maps of single pixels with a sign before they are drawn, in pixels of
            the model's input; by default 1/64 of the shorter side (3.5 of 224), and 0, each pixel as it is, for
            pictures below 64 pixels.
    """

    opacity: float = OPACITY
    cmap: str | None = None
    fade: bool = True
    contours: int = 0
    keep: float | None = None
    above: float | None = None
    smooth: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.contours, bool) or not isinstance(self.contours, int) or not 0 <= self.contours <= 9:
            raise InputError(f"contours must be a number of lines from 0 to 9, not {self.contours!r}")
        if self.keep is not None and self.above is not None:
            raise InputError("keep and above exclude each other: pass one of them")
        for name, (least, most, meaning) in _NUMBERS.items():
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not getattr(Look, name) and not (number and least <= value <= most):
                raise InputError(f"{name} must be {meaning}, not {value!r}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> Look:
        """Return the look with these options; unknown names raise :class:`~whyformer.errors.InputError`."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise InputError(f"a drawing has no option '{name}'; its options: {', '.join(known)}")
        return cls(**options)

    @property
    def masked(self) -> bool:
        """True if parts of the picture are shown instead of colours."""
        return self.keep is not None or self.above is not None

    @property
    def note(self) -> str | None:
        """Description of the part that a masked view shows."""
        if self.keep is not None:
            return f"the {100 * self.keep:.3g} % with the highest scores"
        return None if self.above is None else f"at least {self.above:.3g} of the highest score"
