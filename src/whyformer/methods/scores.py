"""The result of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.inputs import Inputs
from whyformer.tape.places import Box

__all__ = ["Scores", "at_elements"]


@dataclass(frozen=True)
class Scores:
    """A method's result.

    Attributes:
        values: ``[B, N]`` one score per input token (kind "token"), ``[B, P]`` one per cell of a picture ("patch"),
            ``[B, H, W]`` ("pixel"). For C texts per sample ``[B · C, N]``, for C texts that all samples share
            ``[C, N]``, until :func:`whyformer.methods.texts.each_text` splits them.
        logits: ``[B, C]`` of the plain forward pass.
        kind: "token", "patch" or "pixel".
        diagnostics: diagnostics of the method.
        grid: (rows, columns) of kind "patch", for a video (time steps, rows, columns); None without a grid.
        cells: (left, top, right, bottom) of the grid in pixels of the model's input; None for all of it.
        read: (left, top, right, bottom) of the pixels that the model reads; None for all of them.
        inputs: the inputs that the scores belong to, if not those of the task (the text side of CLIP).
        absent: ``[B]`` True at samples whose target does not depend on these features; their scores are 0.
        warnings: sentences on limitations of the scores of all samples.
        parts: scores of the model's other inputs, by name.
    """

    values: Tensor
    logits: Tensor
    kind: str = "token"
    diagnostics: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] | None = None
    cells: Box | None = None
    read: Box | None = None
    inputs: Inputs | None = None
    absent: Tensor | None = None
    warnings: list[str] = field(default_factory=list)
    parts: Mapping[str, Scores] = field(default_factory=dict)


def at_elements(values: Tensor, rows: Tensor) -> Tensor:
    """Return the scores ``[B, M]`` of M elements from those of the rows that represent them. The score of a row that
    represents several elements (a frame of a sound) is divided equally among them."""
    rows = rows.to(values.device).expand(len(values), -1)
    several = torch.zeros_like(values).scatter_add(1, rows.clamp(min=0), (rows >= 0).to(values))
    return (values / several.clamp(min=1)).gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
