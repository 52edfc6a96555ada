"""The colours of everything that is drawn (:data:`CLAIMS`, :data:`TONES`), and scores as colours.

The scaling here is for display only: it never changes a score that is kept or measured. Scores are divided by a limit:
the largest |score| of a map, or of patches and pixels the 99th percentile, so that one of them does not leave the rest
pale. The colour follows from the method: scores that can speak against a class get two colours, -limit to limit with
nothing in the middle; scores without a sign get one other hue, 0 to limit. A colour lies on a picture like stained
glass, with alpha = |score / limit|^0.7: 0 is the picture itself, and a higher score always differs more from it.
"""

from __future__ import annotations

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
class Claim:
    """The colour of one thing that a score can say.

    Attributes:
        name: what legends call the colour.
        light, dark: it in bytes, behind words on a light and on a dark ground.
        deep: of the highest score of a map.
    """

    name: str
    light: Bytes
    dark: Bytes
    deep: Bytes


CLAIMS = {
    "for": Claim("orange", (222, 94, 12), (190, 82, 10), (190, 70, 0)),
    "against": Claim("blue", (34, 108, 190), (38, 104, 178), (22, 88, 172)),
    "mattered": Claim("green", (0, 140, 104), (0, 112, 84), (0, 110, 80)),
}
"""What scores say, and in which colour. Style sheets have these as variables, ``--for`` to ``--mattered``."""
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
"""All other colours, on a light and on a dark ground; also variables of style sheets. ``accent`` marks what has the
focus."""
POSITIVE, NEGATIVE, MATTERED = (claim.light for claim in CLAIMS.values())
LIGHT = {name: light for name, (light, _) in TONES.items()}
INK, SOFT, PAGE, WARN, ERROR = (LIGHT[name] for name in ("ink", "soft", "paper", "warn", "error"))
PAPER = (255, 255, 255)
ALL_ZERO = "all scores are 0"
QUANTILE = 0.99
# A float32 sum that should be 0 may come out slightly below it; that alone must not turn the map into a signed one.
_NOISE = 1e-6

SEQUENTIAL = CLAIMS["mattered"].name
DIVERGING = f"{CLAIMS['against'].name}-{CLAIMS['for'].name}"


def array(tensor: Any) -> Array:
    """A tensor of any floating type as a float64 array (numpy knows no bfloat16)."""
    return np.asarray(tensor.detach().double().cpu().numpy())


@dataclass(frozen=True)
class Scale:
    """How one map's scores become colours.

    Attributes:
        limit: the score drawn in full colour, max |score|; 0 where every score is 0.
        signed: whether scores have a sign, so that the scale runs from -limit to limit.
        clipped: whether some scores lie beyond the limit; they are drawn like the limit.
    """

    limit: float
    signed: bool
    clipped: bool = False

    @property
    def note(self) -> str | None:
        """What to tell the reader where there is nothing to draw."""
        return ALL_ZERO if self.limit == 0 else None

    @property
    def ends(self) -> tuple[str, str]:
        """What to write at the two ends of a colour bar."""
        high = f"{self.limit:.3g}" if self.limit >= 1e-3 or not self.limit else f"{self.limit:.1e}".replace("e-0", "e-")
        low = f"-{high}" if self.signed else "0"
        return (f"≤{low}" if self.signed else low, f"≥{high}") if self.clipped else (low, high)

    def unit(self, scores: Array) -> Array:
        """Scores divided by ``limit``: 0 to 1, or -1 to 1 where signed; all 0 where the limit is 0."""
        scores = np.asarray(scores, dtype=np.float64)
        if self.limit == 0:
            return np.zeros_like(scores)
        return np.clip(scores / self.limit, -1.0 if self.signed else 0.0, 1.0)


def scale(scores: Array, quantile: float = 1.0, signed: bool = False) -> Scale:
    """The scale of one map of scores (any shape), up to a quantile of |score|; the largest one by default.

    Args:
        signed: whether scores below 0 are possible; where there are some, it is signed anyway.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.size == 0:
        return Scale(0.0, False)
    size = np.abs(scores)
    largest = float(size.max())
    limit = float(np.quantile(size, quantile, method="higher"))
    # a map of which less than that share is not 0 is drawn in full
    limit = limit or largest
    return Scale(limit, signed or bool(scores.min() < -_NOISE * largest), clipped=limit < largest)


def has_sign(e: Explanation) -> bool:
    """Whether scores below 0 are possible, or there are some."""
    return e.diagnostics.get("signed") is True or bool((e.scores < -_NOISE * e.scores.abs().amax()).any())


def scale_of(e: Explanation, sample: int = 0) -> Scale:
    """The scale of the map of one sample; of a text up to the largest |score| of a word, special tokens left out."""
    scores, signed = array(e.scores[sample]), e.diagnostics.get("signed") is True
    made = scale(scores, 1.0 if e.level == "token" else QUANTILE, signed)
    if e.level != "token":
        return made
    places = [own for _, _, own in shown_groups(e.features, len(scores), sample)]
    return Scale(scale(np.array(unit_scores(scores, places))).limit, made.signed)


def largest(e: Explanation) -> str:
    """The largest |score| of one sample, which may be more than the limit of its scale, in two digits."""
    return f"{float(e.scores[0].abs().max()):.2g}"


def paint(unit: Array, signed: bool, cmap: str | None = None) -> Array:
    """Colours, ``[..., 3]`` in 0..1, of scores that :meth:`Scale.unit` brought to 0..1 or (signed) -1..1.

    Args:
        cmap: a matplotlib colour map such as "viridis" or the papers' "jet"; by default :data:`SEQUENTIAL`, from paper
            white to one hue, or :data:`DIVERGING` for signed scores. Both are safe for the colour-blind.
    """
    position = (np.asarray(unit, dtype=np.float64) + 1) / 2 if signed else np.asarray(unit, dtype=np.float64)
    table = lookup(cmap or own_map(signed))
    return np.asarray(table[np.rint(position * (len(table) - 1)).astype(int)])


def own_map(signed: bool) -> str:
    """The colour map that is taken where none is named."""
    return DIVERGING if signed else SEQUENTIAL


@cache
def lookup(cmap: str) -> Array:
    """The 256 colours ``[256, 3]`` of a colour map, in 0..1."""
    if cmap == DIVERGING:
        return np.concatenate([_on_paper("against", np.linspace(1, 0, 128)), _on_paper("for", np.linspace(0, 1, 128))])
    if cmap == SEQUENTIAL:
        return _on_paper("mattered", np.linspace(0, 1, 256))
    import matplotlib

    if cmap not in matplotlib.colormaps:
        raise InputError(f"unknown colour map {cmap!r}: use {SEQUENTIAL!r}, {DIVERGING!r}, 'viridis', 'jet' ...")
    return np.asarray(matplotlib.colormaps[cmap](np.linspace(0, 1, 256)))[:, :3]


def alpha(unit: Array) -> Array:
    """How opaque the colour of a score is: its size, -1 to 1, to the power of 0.7."""
    return np.asarray(np.abs(unit) ** 0.7)


def _on_paper(claim: str, unit: Array) -> Array:
    """The deep colour of a claim, ``[N, 3]`` in 0..1, on paper white: of scores from 0 to 1."""
    amount = alpha(unit)[:, None]
    return np.asarray(1 - amount + amount * (np.array(CLAIMS[claim].deep) / 255))


def ink(score: float, signed: bool) -> Bytes:
    """The colour of a score: a score without a sign has the hue that claims less."""
    return MATTERED if not signed else POSITIVE if score >= 0 else NEGATIVE


def ground(unit: float, signed: bool = True) -> Bytes:
    """What lies behind a word of this score (-1 to 1), as bytes: paper white for 0, light enough for black letters.

    ``signed`` is that of the map's scale.
    """
    return _bytes(mix(ink(unit, signed), np.array(min(1.0, abs(unit)) * 0.85)))


def ramp(scale: Scale, steps: int, cmap: str | None = None, *, words: bool = False) -> list[Bytes]:
    """The colours of a colour bar, from its low end to its high one: those behind words, or those of maps."""
    units = np.linspace(-1 if scale.signed else 0, 1, steps)
    return (
        [ground(float(u), scale.signed) for u in units]
        if words
        else [_bytes(c) for c in paint(units, scale.signed, cmap)]
    )


def legend(signed: bool, what: str = "it") -> str:
    """What the colours say, in words."""
    if not signed:
        return f"{CLAIMS['mattered'].name}: mattered (no sign)"
    return f"{CLAIMS['for'].name}: for {what}, {CLAIMS['against'].name}: against it"


def code(rgb: Bytes) -> str:
    """Three bytes as ``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _bytes(colour: Array) -> Bytes:
    red, green, blue = np.rint(colour * 255).astype(int).tolist()
    return red, green, blue


def mix(colour: Bytes, amount: Array) -> Array:
    """Colours in 0..1 between paper white (0) and a colour (1), in equal perceptual steps (straight lines in OKLab)."""
    ends = _to_oklab(np.array([PAPER, colour]) / 255)
    return _from_oklab(ends[0] + np.asarray(amount)[..., None] * (ends[1] - ends[0]))


# OKLab (B. Ottosson, 2020): linear sRGB -> cone response -> cube root -> lightness and two colour axes.
_CONES = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])  # fmt: skip
_LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])  # fmt: skip


def _to_oklab(srgb: Array) -> Array:
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return np.asarray(np.cbrt(linear @ _CONES.T) @ _LAB.T)


def _from_oklab(lab: Array) -> Array:
    linear = np.clip((lab @ np.linalg.inv(_LAB).T) ** 3 @ np.linalg.inv(_CONES).T, 0, 1)
    return np.asarray(np.clip(np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055), 0, 1))
