"""Digit scenes for reading tasks: digits in order from left to right, in clearly different columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from whyformer.datasets.scenes import Scene, Split, digit_scenes

LEAST_DISTANCE = 6.0
"""Smallest horizontal distance of the centres of two digits in pixels, for an unambiguous order."""


def middles(scene: Scene) -> np.ndarray:
    """Return the horizontal centre of the ink of each digit in pixels."""
    ink = [np.flatnonzero(mask.any(axis=0)) for mask in scene.masks]
    return np.array([(columns[0] + columns[-1] + 1) / 2 for columns in ink])


def left_to_right(scene: Scene) -> Scene:
    """Return the scene with its digits and masks in reading order."""
    order = np.argsort(middles(scene), kind="stable")
    return replace(scene, digits=tuple(scene.digits[i] for i in order), masks=scene.masks[order])


def reading_scenes(
    count: int,
    *,
    seed: int = 0,
    split: Split = "test",
    min_digits: int = 2,
    max_digits: int = 4,
    clutter: float = 1.0,
    apart: float = LEAST_DISTANCE,
) -> Iterator[Scene]:
    """Generate scenes of distinct digits in reading order, deterministically.

    Scene ``i`` has ``min_digits + i % (max_digits - min_digits + 1)`` digits.

    Args:
        count: number of scenes.
        seed: random seed.
        split: as for :func:`~whyformer.datasets.scenes.digit_scenes`.
        min_digits: smallest number of digits.
        max_digits: largest number of digits.
        clutter: as for :func:`~whyformer.datasets.scenes.digit_scenes`.
        apart: smallest horizontal distance of the centres of digits in pixels.
    """
    amounts = range(min_digits, max_digits + 1)
    endless = 10**9
    scenes = {
        n: digit_scenes(endless, seed=seed, split=split, min_digits=n, max_digits=n, clutter=clutter) for n in amounts
    }
    for number in range(count):
        for scene in scenes[amounts[number % len(amounts)]]:
            ordered = left_to_right(scene)
            if (np.diff(middles(ordered)) >= apart).all():
                yield ordered
                break
