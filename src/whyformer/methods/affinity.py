"""The setting ``affinity`` of patch-level methods: spread scores over patches with similar features."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.methods.task import Scores, Task

NOTE = "spread over patches with similar features in the last block: sharper on objects, less faithful to the model"


def spread(task: Task, scores: Scores) -> Scores:
    """Return S′ = W S over the patches of the main picture, with W_ij = max(0, cos(h_i, h_j))², rows divided by their
    sums, and h the input of the last block. Costs another forward pass up to that block.

    Raises:
        InputError: the scores are not per patch.
        MethodNotApplicable: the rows of the picture in the last block cannot be determined.
    """
    if scores.kind != "patch":
        raise InputError(
            f"{task.method}: affinity=True needs one score per patch of a picture, and these are per "
            f"{'pixel' if scores.kind == 'pixel' else 'token'}: omit it"
        )
    hidden = cells_of_last_block(task, scores)
    unit = functional.normalize(hidden, dim=-1)
    weights = (unit @ unit.mT).clamp(min=0).square()
    weights = weights / weights.sum(-1, keepdim=True)
    values = torch.einsum("bij,bj->bi", weights, scores.values.to(weights.dtype))
    return replace(scores, values=values, diagnostics={**scores.diagnostics, "affinity": NOTE})


def cells_of_last_block(task: Task, scores: Scores) -> Tensor:
    """Return the last block's input ``[B, P, D]`` at the rows that represent the picture's cells."""
    map_pass = task.main_pass()
    stream, block = map_pass.blocks_of(task.inputs.name)[-1]
    if not map_pass.holds(block.entry, stream):
        raise task.refuse("the input of its last block holds other rows than those that attend there")
    hidden = map_pass.features_of(stream, block.entry, map_pass.recording.tape[block.entry])
    rows = task.cells(task.inputs.name, map_pass.name_of(stream)).rows
    if rows.shape[-1] != scores.values.shape[-1]:
        raise task.refuse("its last block has other rows than its first, so the affinities of patches are unknown")
    rows = rows.to(hidden.device).expand(len(hidden), -1)
    return hidden.detach().gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
