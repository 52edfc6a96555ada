"""Colours of all drawings (:data:`HUES`, :data:`TONES`), and the mapping from scores to colours.

Scaling is for display only and changes no score. Scores are divided by a limit: the largest |score| of a map, for
patches and pixels the 99th percentile, so that an outlier does not leave the rest pale. Signed scores get two colours,
from -limit to limit with nothing in the middle; scores without a sign get a third hue, from 0 to limit. On a picture
a colour has the opacity alpha = |score / limit|^0.7: 0 shows the picture itself, higher scores differ more from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError
from whyformer.explanation.units import shown_groups, unit_scores

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

Array = NDArray[Any]
Bytes = tuple[int, int, int]


@dataclass(frozen=True)
class Hue:
    """The colour of one meaning of a score.

    Attributes:
        name: of the colour, for legends.
        light, dark: RGB bytes behind words on a light and on a dark page.
        deep: RGB bytes of the highest score of a map.
    """

    name: str
    light: Bytes
    dark: Bytes
    deep: Bytes


HUES = {
    "for": Hue("orange", (222, 94, 12), (190, 82, 10), (190, 70, 0)),
    "against": Hue("blue", (34, 108, 190), (38, 104, 178), (22, 88, 172)),
    "mattered": Hue("green", (0, 140, 104), (0, 112, 84), (0, 110, 80)),
}
"""Meanings of scores, each with its colour; ``--for`` to ``--mattered`` in style sheets."""
TONES = {
    "ink": ("#111111", "#e8eaed"),
    "soft": ("#555555", "#b3b9c2"),
    "line": ("#d5d5d5", "#3b4047"),
    "paper": ("#ffffff", "#15171a"),
    "sheet": ("#f6f7f8", "#1e2125"),
    "link": ("#0a58b5", "#84b9ff"),
    "accent": ("#226cbe", "#9cc8ff"),
    "warn": ("#8a4b00", "#ffbe6b"),
    "error": ("#a40e26", "#ffb3b3"),
}
"""All other colours, on a light and on a dark page; variables of style sheets too. ``accent`` marks the focus."""
POSITIVE, NEGATIVE, MATTERED = (hue.light for hue in HUES.values())
LIGHT = {name: light for name, (light, _) in TONES.items()}
INK, SOFT, PAGE, WARN, ERROR = (LIGHT[name] for name in ("ink", "soft", "paper", "warn", "error"))
PALER = "paler than another input"
"""Key of ``diagnostics`` while several inputs are drawn: how much higher the scores of the strongest input are."""
ALL_ZERO = "all scores are 0"
QUANTILE = 0.99
# A float32 sum that should be 0 may be slightly negative; this alone must not make a map signed.
_NOISE = 1e-6

SEQUENTIAL = HUES["mattered"].name
DIVERGING = f"{HUES['against'].name}-{HUES['for'].name}"


def array(tensor: Any) -> Array:
    """Convert a tensor of any floating type to a float64 array (NumPy has no bfloat16)."""
    return np.asarray(tensor.detach().double().cpu().numpy())


@dataclass(frozen=True)
class Scale:
    """The mapping from the scores of a map to colours.

    Attributes:
        limit: |score| drawn in full colour; 0 if every score is 0.
        signed: True if scores have a sign, so that the scale runs from -limit to limit.
        clipped: True if some scores lie beyond the limit; they are drawn like the limit.
    """

    limit: float
    signed: bool
    clipped: bool = False

    @property
    def note(self) -> str | None:
        """The text to show if there is nothing to draw."""
        return ALL_ZERO if self.limit == 0 else None

    @property
    def ends(self) -> tuple[str, str]:
        """Labels of the scores at both ends of a colour bar."""
        high = f"{self.limit:.3g}" if self.limit >= 1e-3 or not self.limit else f"{self.limit:.1e}".replace("e-0", "e-")
        low = f"-{high}" if self.signed else "0"
        return (f"≤{low}" if self.signed else low, f"≥{high}") if self.clipped else (low, high)

    def unit(self, scores: Array) -> Array:
        """Divide scores by ``limit``: 0 to 1, or -1 to 1 if signed; all 0 if the limit is 0."""
        scores = np.asarray(scores, dtype=np.float64)
        if self.limit == 0:
            return np.zeros_like(scores)
        return np.clip(scores / self.limit, -1.0 if self.signed else 0.0, 1.0)


def scale(scores: Array, quantile: float = 1.0, signed: bool = False) -> Scale:
    """Return the scale of scores of any shape.

    Args:
        quantile: of |score| that becomes the limit; by default the largest.
        signed: whether scores below 0 are possible; scores with any below 0 are signed in any case.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.size == 0:
        return Scale(0.0, False)
    size = np.abs(scores)
    largest = float(size.max())
    limit = float(np.quantile(size, quantile, method="higher"))
    limit = limit or largest  # a quantile of 0: almost all scores are 0
    return Scale(limit, signed or bool(scores.min() < -_NOISE * largest), clipped=limit < largest)


def has_sign(e: Explanation) -> bool:
    """Return True if scores below 0 are possible or present."""
    return e.diagnostics.get("signed") is True or bool((e.scores < -_NOISE * e.scores.abs().amax()).any())


def scale_of(e: Explanation) -> Scale:
    """Return the scale of the map of a single sample; of a text its words, without special tokens, set the limit.

    The limit of one of several inputs (:func:`whyformer.show.layout.by_input`) is higher if another has higher scores:
    up to ten times, so that weak maps stay visible.
    """
    scores, signed = array(e.scores[0]), e.diagnostics.get("signed") is True
    if e.level != "token":
        alone = scale(scores, QUANTILE, signed)
    else:
        alone = Scale(float(np.abs(_words(e, scores)).max(initial=0.0)), scale(scores, signed=signed).signed)
    limit = alone.limit * min(10.0, e.diagnostics.get(PALER, 1.0))
    return Scale(limit, alone.signed, alone.clipped and bool(np.abs(scores).max() > limit))


def _words(e: Explanation, scores: Array) -> Array:
    places = [tokens for _, _, tokens in shown_groups(e.features, len(scores), 0)]
    return np.array(unit_scores(scores, places))


def strongest(e: Explanation) -> float:
    """Return the largest |score| of a word or of a patch of a single sample."""
    scores = array(e.scores[0])
    units = _words(e, scores) if e.level == "token" else patch_sums(scores)
    return float(np.abs(np.nan_to_num(units)).max(initial=0.0))


def patch_sums(maps: Array) -> Array:
    """Sum maps ``[..., H, W]`` of more than 32 pixels along an axis over 16 patches along it."""
    for axis in (-2, -1) if maps.ndim > 1 else ():
        if (size := maps.shape[axis]) > 32:
            maps = np.add.reduceat(maps, range(0, size, math.ceil(size / 16)), axis)
    return maps


def largest(e: Explanation) -> str:
    """Format the largest |score| of a single sample in two digits; it may exceed the limit of the scale."""
    return f"{float(e.scores[0].abs().max()):.2g}"


def paint(unit: Array, signed: bool, cmap: str | None = None) -> Array:
    """Return the colours, ``[..., 3]`` in 0..1, of scores scaled by :meth:`Scale.unit`.

    Args:
        cmap: a matplotlib colour map such as "viridis" or the papers' "jet"; by default :data:`SEQUENTIAL`, from paper
            white to one hue, or :data:`DIVERGING` for signed scores. Both are safe for the colour-blind.
    """
    unit = np.asarray(unit, dtype=np.float64)
    position = (unit + 1) / 2 if signed else unit
    table = lookup(cmap or default_cmap(signed))
    return np.asarray(table[np.rint(position * (len(table) - 1)).astype(int)])


def default_cmap(signed: bool) -> str:
    """Return the name of the default colour map."""
    return DIVERGING if signed else SEQUENTIAL


@cache
def lookup(cmap: str) -> Array:
    """Return the 256 colours ``[256, 3]`` of a colour map, in 0..1."""
    if cmap == DIVERGING:
        rising = alpha(np.linspace(0, 1, 128))
        return np.concatenate([mix(HUES["against"].deep, rising[::-1]), mix(HUES["for"].deep, rising)])
    if cmap == SEQUENTIAL:
        return mix(HUES["mattered"].deep, alpha(np.linspace(0, 1, 256)))
    import matplotlib

    if cmap not in matplotlib.colormaps:
        raise InputError(f"unknown colour map {cmap!r}: use {SEQUENTIAL!r}, {DIVERGING!r}, 'viridis', 'jet' ...")
    return np.asarray(matplotlib.colormaps[cmap](np.linspace(0, 1, 256)))[:, :3]


def alpha(unit: Array) -> Array:
    """Return the opacity of scaled scores: |unit|^0.7."""
    return np.asarray(np.abs(unit) ** 0.7)


def hue_of(score: float, signed: bool) -> str:
    """Return the meaning of the sign of a score, a key of :data:`HUES`."""
    return "mattered" if not signed else "for" if score >= 0 else "against"


def colour_of(score: float, signed: bool) -> Bytes:
    """Return the colour of the sign of a score."""
    return HUES[hue_of(score, signed)].light


def background(unit: float, signed: bool = True) -> Bytes:
    """Return the colour behind a word of a scaled score (-1 to 1): white for 0, light enough for black letters.

    ``signed`` is that of the map's scale.
    """
    return _bytes(mix(colour_of(unit, signed), np.array(min(1.0, abs(unit)) * 0.85)))


def ramp(scale: Scale, steps: int, cmap: str | None = None, *, words: bool = False) -> list[Bytes]:
    """Return the colours of a colour bar from low to high: those behind words, or those of maps."""
    units = np.linspace(-1 if scale.signed else 0, 1, steps)
    if words:
        return [background(float(u), scale.signed) for u in units]
    return [_bytes(c) for c in paint(units, scale.signed, cmap)]


def legend(signed: bool, subject: str = "it") -> str:
    """Return the meaning of the colours as text."""
    if not signed:
        return f"{HUES['mattered'].name}: mattered (no sign)"
    return f"{HUES['for'].name}: for {subject}, {HUES['against'].name}: against it"


def code(rgb: Bytes) -> str:
    """Format three bytes as ``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _bytes(colour: Array) -> Bytes:
    red, green, blue = np.rint(colour * 255).astype(int).tolist()
    return red, green, blue


def mix(colour: Bytes, amount: Array) -> Array:
    """Blend white (0) into a colour (1), as the opacity of a colour on a white page; colours in 0..1."""
    return np.asarray(1 - np.asarray(amount)[..., None] * (1 - np.array(colour) / 255))
