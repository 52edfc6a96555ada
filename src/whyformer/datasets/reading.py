"""Digit scenes to be read: the digits in order from left to right, no two of them near the same column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from whyformer.datasets.scenes import Scene, Split, digit_scenes

APART = 6.0
"""Fewest pixels across between the middles of two digits: with less, which stands left is a matter of taste."""


def middles(scene: Scene) -> np.ndarray:
    """For each digit the column in the middle of its ink, in pixels."""
    ink = [np.flatnonzero(mask.any(axis=0)) for mask in scene.masks]
    return np.array([(columns[0] + columns[-1] + 1) / 2 for columns in ink])


def left_to_right(scene: Scene) -> Scene:
    """The same scene, its digits and masks in the order in which they are read."""
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
    apart: float = APART,
) -> Iterator[Scene]:
    """Draw scenes of different digits whose middles are so far ``apart`` or more, in reading order.

    The same arguments give the same scenes; number ``i`` has ``min_digits + i % (max_digits - min_digits + 1)`` digits.
    """
    amounts = range(min_digits, max_digits + 1)
    endless = 10**9
    drawn = {
        n: digit_scenes(endless, seed=seed, split=split, min_digits=n, max_digits=n, clutter=clutter) for n in amounts
    }
    for number in range(count):
        for scene in drawn[amounts[number % len(amounts)]]:
            ordered = left_to_right(scene)
            if (np.diff(middles(ordered)) >= apart).all():
                yield ordered
                break
