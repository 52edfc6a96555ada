"""Scores of one picture of a prompt for every step of a generated text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.explanation.result import Explanation


@dataclass(frozen=True, eq=False)
class PictureScores:
    """The maps of one picture for the steps of a generated text.

    Attributes:
        first: the explanation of the first step, with the picture, its geometry and grid.
        scores: ``[T, ...]`` scores of all steps.
    """

    first: Explanation
    scores: Tensor

    @classmethod
    def of(cls, steps: list[Explanation]) -> PictureScores:
        """Join the explanations of one picture, one for each step."""
        return cls(steps[0], torch.cat([e.scores for e in steps]))

    def at(self, step: int, **facts: Any) -> Explanation:
        """Return the explanation of one step; ``facts`` are its target and logits."""
        return replace(self.first, scores=self.scores[step : step + 1], **facts)

    def merged(self, steps: list[tuple[int, int]]) -> PictureScores:
        """Return a copy in which the scores of each half-open range of steps are summed."""
        return replace(self, scores=torch.stack([self.scores[a:b].sum(0) for a, b in steps]))
