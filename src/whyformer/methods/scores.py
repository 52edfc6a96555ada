"""What a method returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.inputs import Inputs
from whyformer.tape.places import Box, Places

__all__ = ["Scores", "at_elements"]


@dataclass(frozen=True)
class Scores:
    """A method's result.

    Attributes:
        values: ``[B, N]`` one score for each token row of the model (kind "sequence"; of pictures the registry makes
            "patch" of it), ``[B, N]`` one for each input token ("token"), ``[B, P]`` one for each cell of a picture
            ("patch"), ``[B, H, W]`` ("pixel"). Of C texts of each sample ``[B · C, N]``, of C texts that all samples
            share ``[C, N]``, until :func:`whyformer.methods.texts.each_text` splits them.
        logits: ``[B, C]`` of the plain forward pass.
        grid: (rows, columns) of kind "patch", of a video (steps of time, rows, columns); None where there is none.
        cells: (left, top, right, bottom) of that grid in pixels of the model's input; None for all of it.
        read: likewise, the pixels that the model reads; None for all of them.
        inputs: what the scores belong to, where that is not the task's own inputs (the text side of CLIP).
        parts: scores of the model's other inputs, by name.
        places: where the rows of kind "sequence" lie in the picture, if not as those of the first attention.
        warnings: sentences on what speaks against the scores of all samples.
        absent: ``[B]`` True at samples whose target does not depend on these features; their scores are 0.
    """

    values: Tensor
    logits: Tensor
    kind: str = "sequence"
    diagnostics: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] | None = None
    cells: Box | None = None
    read: Box | None = None
    inputs: Inputs | None = None
    places: Places | None = None
    absent: Tensor | None = None
    warnings: list[str] = field(default_factory=list)
    parts: Mapping[str, Scores] = field(default_factory=dict)


def at_elements(values: Tensor, rows: Tensor) -> Tensor:
    """``[B, M]`` the scores of the rows that stand for M elements; that of a row which stands for several (a frame for
    moments of a sound) is spread over them."""
    rows = rows.to(values.device).expand(len(values), -1)
    several = torch.zeros_like(values).scatter_add(1, rows.clamp(min=0), (rows >= 0).to(values))
    return (values / several.clamp(min=1)).gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
