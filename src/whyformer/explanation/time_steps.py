"""Scores over time: those of a sound by time interval, those of a video side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.errors import InputError, check_count

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_MOST = 50
_STEPS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
BEHIND = "[PAD]"


def over_time(e: Explanation, step: float | None = None) -> Explanation:
    """See :meth:`Explanation.over_time`."""
    if e.rate is None:
        raise InputError("over_time() is for sounds: the rate of these scores is unknown")
    count = e.scores.shape[1]
    durations = e.features.durations or [count / e.rate] * len(e)
    longest = count / e.rate  # including silence that a processor may have appended
    if step is None:
        step = next((s for s in _STEPS if longest / s <= _MOST and s * e.rate >= 1), _STEPS[-1])
    if not (math.isfinite(step) and step * e.rate >= 1):
        raise InputError(f"a step of {step} s is shorter than the time between two scores, {1 / e.rate:.4g} s")
    # the tolerance keeps rounding from adding an interval
    intervals = max(1, math.ceil(longest / step - 1e-9))
    interval = ((torch.arange(count, dtype=torch.float64) + 0.5) / (step * e.rate)).long().clamp(max=intervals - 1)
    scores = e.scores.new_zeros(len(e), intervals).index_add_(1, interval, e.scores)
    digits = next((d for d in range(4) if abs(round(step, d) - step) < 1e-9), 4)
    names = [f"{i * step:.{digits}f} s" for i in range(intervals)]
    tokens = [
        [name if i * step < duration or row[i] else BEHIND for i, name in enumerate(names)]
        for duration, row in zip(durations, scores.tolist(), strict=True)
    ]
    return replace(e, scores=scores, parts={}).with_features(tokens=tokens, rate=1 / step)


def unrolled(e: Explanation, columns: int | None = None) -> Explanation:
    """See :meth:`Explanation.unrolled`."""
    if e.frames is None:
        raise InputError("unrolled() is for videos: these scores have no time steps")
    columns = math.ceil(math.sqrt(2 * e.frames)) if columns is None else columns
    check_count("columns", columns)
    frames = [e.frame(i) for i in range(e.frames)]
    maps = e.heatmap()
    pictures = None
    if all(frame.pictures is not None for frame in frames):
        stacked = torch.stack([frame.pictures for frame in frames if frame.pictures is not None], 1)
        pictures = _side_by_side(stacked, columns)
    scores = _side_by_side(maps[..., None], columns)[..., 0]
    picture = replace(e, scores=scores, level="pixel", parts={})
    size = (int(scores.shape[1]), int(scores.shape[2]))
    dropped = dict.fromkeys(("frames", "grid", "cells", "read", "originals", "geometry"))
    return picture.with_features(**dropped, pictures=pictures, image_size=size)


def _side_by_side(steps: Tensor, columns: int) -> Tensor:
    """Arrange ``[B, T, H, W, C]`` as ``[B, rows · H, columns · W, C]``; the rest of the last row is 0."""
    columns = min(columns, steps.shape[1])
    missing = -steps.shape[1] % columns
    filled = torch.cat((steps, steps.new_zeros(len(steps), missing, *steps.shape[2:])), 1)
    return filled.unflatten(1, (-1, columns)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)
