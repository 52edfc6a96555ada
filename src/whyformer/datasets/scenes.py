"""Pictures of handwritten digits on a cluttered background, with a mask of the ink of each digit.

The digits are the 1797 images of scikit-learn (``load_digits``). They are split by image, so scenes of the splits
``"test"`` and ``"train"`` share no digit image. The background is independent of the digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from whyformer.errors import import_optional

SIDE = 112
"""Width and height of a scene in pixels."""

SMALLEST, LARGEST = 28, 40
"""Smallest and largest height of a digit in pixels."""

Split = Literal["train", "test"]
TEST_SHARE = 0.2
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, eq=False)
class Scene:
    """A scene.

    Attributes:
        image: the picture.
        digits: the digits in order of placement.
        masks: ``[len(digits), 112, 112]``, True at the ink of each digit.
    """

    image: Image.Image
    digits: tuple[int, ...]
    masks: np.ndarray


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all digit images, scaled to 0..1, and their labels."""
    data = import_optional("sklearn.datasets", "drawing digit scenes", "data").load_digits()
    return (data.images / 16).astype(np.float32), data.target.astype(np.int64)


def split_indices() -> dict[str, np.ndarray]:
    """Return the sorted indices of scikit-learn's digit images in each split."""
    labels = _digits()[1]
    generator = np.random.default_rng(8)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    for digit in range(10):
        images = generator.permutation(np.flatnonzero(labels == digit))
        cut = round(TEST_SHARE * len(images))
        parts["test"].append(images[:cut])
        parts["train"].append(images[cut:])
    return {name: np.sort(np.concatenate(part)) for name, part in parts.items()}


@cache
def _images(split: Split) -> tuple[np.ndarray, ...]:
    """Return the images of a split, an array for each digit."""
    images, labels = _digits()
    indices = split_indices()[split]
    return tuple(images[indices[labels[indices] == digit]] for digit in range(10))


def _sprite(image: np.ndarray, size: float, generator: np.random.Generator, wobble: float) -> np.ndarray:
    """Enlarge a digit image, and return the opacity of its ink (0..1), cropped to the ink."""
    turn, slant = wobble * generator.uniform(-0.14, 0.14, 2)
    wide = 1 + wobble * generator.uniform(-0.1, 0.1)
    thin = 0.42 + wobble * generator.uniform(-0.06, 0.06)
    side = int(size * 1.5)
    # affine map from pixels of the sprite to those of the 12 × 12 source (the image with a margin of 2)
    step = 8 / size
    cos, sin = np.cos(turn) * step, np.sin(turn) * step
    a, b, c, d = cos / wide, (sin + slant * cos) / wide, -sin, cos
    middle = side / 2
    matrix = (a, b, 6 - (a + b) * middle, c, d, 6 - (c + d) * middle)
    source = Image.fromarray(np.pad(image, 2))
    ink = np.asarray(source.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC))
    opacity = np.clip((ink - thin) / 0.3 + 0.5, 0, 1)
    rows, columns = (np.flatnonzero((opacity > 0.5).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return opacity
    return opacity[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _enlarged(pixels: np.ndarray, method: Image.Resampling) -> np.ndarray:
    """Enlarge a small RGB picture (0..1) to the size of a scene."""
    small = Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))
    return np.asarray(small.resize((SIDE, SIDE), method), dtype=np.float32) / 255


def _colour(generator: np.random.Generator, low: float, high: float) -> tuple[int, int, int]:
    """Return a random colour with channels between two bounds (0..1)."""
    red, green, blue = generator.uniform(low * 255, high * 255, 3).astype(int).tolist()
    return red, green, blue


def _shapes(draw: ImageDraw.ImageDraw, side: int, count: int, high: float, generator: np.random.Generator) -> None:
    """Draw filled ellipses, boxes and triangles."""
    for _ in range(count):
        x, y = generator.uniform(-0.1 * side, 1.1 * side, 2)
        w, h = generator.uniform(0.06 * side, 0.3 * side, 2)
        kind, colour = generator.integers(3), _colour(generator, 0.0, high)
        if kind < 2:
            box = (draw.ellipse, draw.rectangle)[kind]
            box((x - w / 2, y - h / 2, x + w / 2, y + h / 2), fill=colour)
        else:
            points = generator.uniform(-0.2 * side, 0.2 * side, (3, 2)) + np.array((x, y))
            draw.polygon([(float(px), float(py)) for px, py in points], fill=colour)


def _background(generator: np.random.Generator, clutter: float) -> np.ndarray:
    """Return a background of a gradient, uneven tone, soft blobs, shapes, strokes and specks, all darker than ink."""
    dark = generator.uniform(0.0, 0.25)
    corners = dark + generator.uniform(0.0, 0.22, (2, 2, 3))
    background = _enlarged(corners, Image.Resampling.BILINEAR)
    if clutter > 0:
        cells = int(generator.integers(4, 12))
        tone = generator.uniform(0.0, 0.16 * clutter, (cells, cells, 1)).repeat(3, axis=2)
        background = background + _enlarged(tone, Image.Resampling.BICUBIC)
    picture = Image.fromarray((background.clip(0, 1) * 255).astype(np.uint8))
    soft = picture.resize((SIDE // 4, SIDE // 4), Image.Resampling.BILINEAR)
    amount = generator.poisson(3 * clutter)
    if amount:
        _shapes(ImageDraw.Draw(soft), SIDE // 4, int(amount), 0.5, generator)
        picture = soft.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    _shapes(draw, SIDE, int(generator.poisson(3 * clutter)), 0.5, generator)
    for _ in range(generator.poisson(4 * clutter)):
        ends = generator.uniform(-10, SIDE + 10, 4).tolist()
        draw.line(ends, fill=_colour(generator, 0.1, 0.6), width=int(generator.integers(1, 4)))
    for _ in range(generator.poisson(4 * clutter)):
        x, y = generator.uniform(0, SIDE, 2)
        size = generator.uniform(0.5, 2.0)
        draw.ellipse((x - size, y - size, x + size, y + size), fill=_colour(generator, 0.4, 1.0))
    return np.asarray(picture, dtype=np.float32) / 255


def _place(
    sprites: list[np.ndarray], generator: np.random.Generator, gap: int = 2
) -> list[tuple[int, int, np.ndarray]] | None:
    """Place sprites without overlap; return (top, left, sprite) of each, or None if they do not fit."""
    occupied = np.zeros((SIDE, SIDE), dtype=bool)
    placed = []
    for sprite in sprites:
        height, width = sprite.shape
        for _ in range(40):
            top = int(generator.integers(1, SIDE - height))
            left = int(generator.integers(1, SIDE - width))
            if not occupied[top : top + height, left : left + width].any():
                break
        else:
            return None
        occupied[max(0, top - gap) : top + height + gap, max(0, left - gap) : left + width + gap] = True
        placed.append((top, left, sprite))
    return placed


def _scene(digits: list[int], split: Split, generator: np.random.Generator, clutter: float, wobble: float) -> Scene:
    """Draw one scene with these digits."""
    images = [_images(split)[digit][generator.integers(len(_images(split)[digit]))] for digit in digits]
    largest = float(LARGEST)
    while True:
        sizes = generator.uniform(SMALLEST, largest, len(digits))
        sprites = [_sprite(image, size, generator, wobble) for image, size in zip(images, sizes, strict=True)]
        if (placed := _place(sprites, generator)) is not None:
            break
        largest = max(SMALLEST + 1.0, 0.93 * largest)
    canvas = _background(generator, clutter)
    masks = np.zeros((len(digits), SIDE, SIDE), dtype=bool)
    for mask, (top, left, sprite) in zip(masks, placed, strict=True):
        area = (slice(top, top + sprite.shape[0]), slice(left, left + sprite.shape[1]))
        tint = generator.uniform(0.65, 1.0, 3).astype(np.float32)
        ink = tint * np.float32(generator.uniform(0.75, 1.0)) / tint.max()
        canvas[area] += sprite[..., None] * (ink - canvas[area])
        mask[area] = sprite > 0.5
    canvas += generator.standard_normal(canvas.shape, dtype=np.float32) * np.float32(0.03 * clutter)
    image = Image.fromarray((canvas.clip(0, 1) * 255).astype(np.uint8))
    return Scene(image, tuple(digits), masks)


def digit_scenes(
    count: int,
    *,
    seed: int = 0,
    split: Split = "test",
    min_digits: int = 1,
    max_digits: int = 4,
    distinct: bool = True,
    clutter: float = 1.0,
    wobble: float = 1.0,
) -> Iterator[Scene]:
    """Generate scenes of handwritten digits, deterministically.

    Args:
        count: number of scenes.
        seed: random seed; scene ``i`` depends on the seed and ``i`` only.
        split: split of the digit images: ``"test"`` (held out from the bundled model's training) or ``"train"``.
        min_digits: smallest number of digits in a scene.
        max_digits: largest number of digits in a scene, at most 8.
        distinct: use different digits in a scene.
        clutter: amount of background clutter; 0 is a plain gradient.
        wobble: amount of random rotation, slant, widening and thickening of digits; 0 is none.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    if not 1 <= min_digits <= max_digits <= 8:
        raise ValueError(f"need 1 <= min_digits <= max_digits <= 8, not {min_digits} and {max_digits}")
    if clutter < 0 or wobble < 0:
        raise ValueError("clutter and wobble must not be negative")
    for number in range(count):
        generator = np.random.default_rng([seed, SPLITS.index(split), number])
        amount = int(generator.integers(min_digits, max_digits + 1))
        digits = generator.choice(10, amount, replace=not distinct).tolist()
        yield _scene(digits, split, generator, clutter, wobble)
