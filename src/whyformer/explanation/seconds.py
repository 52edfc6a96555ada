"""What has a time: a sound's scores by the second, a video's steps side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_MOST = 50
_STEPS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
BEHIND = "[PAD]"


def over_time(e: Explanation, step: float | None = None) -> Explanation:
    """See :meth:`Explanation.over_time`."""
    if e.rate is None:
        raise InputError("over_time() is for sounds, of which it is known how many scores a second has")
    count = e.scores.shape[1]
    lasts = e.features.durations or [count / e.rate] * len(e)
    longest = count / e.rate  # with the silence that a processor may have put behind it
    if step is None:
        step = next((s for s in _STEPS if longest / s <= _MOST and s * e.rate >= 1), _STEPS[-1])
    if not (math.isfinite(step) and step * e.rate >= 1):
        raise InputError(f"a stretch of {step} s is shorter than the time between two scores, {1 / e.rate:.4g} s")
    # the little that is taken off keeps a sound of exactly ten stretches from having an eleventh
    stretches = max(1, math.ceil(longest / step - 1e-9))
    places = ((torch.arange(count, dtype=torch.float64) + 0.5) / (step * e.rate)).long().clamp(max=stretches - 1)
    scores = e.scores.new_zeros(len(e), stretches).index_add_(1, places, e.scores)
    digits = next((d for d in range(4) if abs(round(step, d) - step) < 1e-9), 4)
    named = [f"{i * step:.{digits}f} s" for i in range(stretches)]
    tokens = [
        [name if i * step < last or own[i] else BEHIND for i, name in enumerate(named)]
        for last, own in zip(lasts, scores.tolist(), strict=True)
    ]
    return replace(e, scores=scores, parts={}).with_features(tokens=tokens, rate=1 / step)


def unrolled(e: Explanation, columns: int | None = None) -> Explanation:
    """See :meth:`Explanation.unrolled`."""
    if e.frames is None:
        raise InputError("unrolled() is for videos, whose scores have steps of time")
    columns = math.ceil(math.sqrt(2 * e.frames)) if columns is None else columns
    if columns < 1:
        raise InputError(f"columns must be at least 1, not {columns}")
    seen = [e.frame(i) for i in range(e.frames)]
    maps = e.heatmap()
    shown = None
    if all(one.pictures is not None for one in seen):
        shown = _side_by_side(torch.stack([one.pictures for one in seen if one.pictures is not None], 1), columns)
    scores = _side_by_side(maps[..., None], columns)[..., 0]
    made = replace(e, scores=scores, level="pixel", parts={})
    size = (int(scores.shape[1]), int(scores.shape[2]))
    gone = dict.fromkeys(("frames", "grid", "cells", "read", "originals", "geometry"))
    return made.with_features(**gone, pictures=shown, image_size=size)


def _side_by_side(steps: Tensor, columns: int) -> Tensor:
    """``[B, T, H, W, C]`` as ``[B, lines · H, columns · W, C]``; what is left of the last line is 0."""
    columns = min(columns, steps.shape[1])
    missing = -steps.shape[1] % columns
    filled = torch.cat((steps, steps.new_zeros(len(steps), missing, *steps.shape[2:])), 1)
    return filled.unflatten(1, (-1, columns)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)
