"""Scores of one picture of a prompt, for every step of a generated text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.explanation.result import Explanation


@dataclass(frozen=True, eq=False)
class Pictured:
    """One picture's maps, step by step.

    Attributes:
        first: the explanation of the first step, with the picture, its geometry and grid.
        scores: ``[T, ...]`` those of all steps.
    """

    first: Explanation
    scores: Tensor

    @classmethod
    def of(cls, found: list[Explanation]) -> Pictured:
        """The same picture's explanations, one a step."""
        return cls(found[0], torch.cat([e.scores for e in found]))

    def at(self, step: int, **facts: Any) -> Explanation:
        """One step's; ``facts`` are its target and logits."""
        return replace(self.first, scores=self.scores[step : step + 1], **facts)

    def merged(self, steps: list[tuple[int, int]]) -> Pictured:
        """With the steps from one to before the other added up."""
        return replace(self, scores=torch.stack([self.scores[a:b].sum(0) for a, b in steps]))
