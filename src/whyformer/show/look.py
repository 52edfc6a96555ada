"""Options of drawings of maps on pictures: opacity, colours, contour lines, masks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from whyformer.errors import InputError

OPACITY = 1.0


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
        if not 0 <= self.opacity <= 1:
            raise InputError(f"opacity must be between 0 and 1, not {self.opacity!r}")
        if isinstance(self.contours, bool) or not isinstance(self.contours, int) or not 0 <= self.contours <= 9:
            raise InputError(f"contours must be a number of lines from 0 to 9, not {self.contours!r}")
        if self.smooth is not None and not 0 <= self.smooth <= 1000:
            raise InputError(f"smooth must be a number of pixels from 0 (each as it is) to 1000, not {self.smooth!r}")
        if self.keep is not None and self.above is not None:
            raise InputError("keep and above exclude each other: pass one of them")
        for name, share in (("keep", self.keep), ("above", self.above)):
            if share is not None and not 0 < share <= 1:
                raise InputError(f"{name} must be a share of more than 0 and at most 1, not {share!r}")

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
