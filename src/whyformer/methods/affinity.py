"""The setting ``affinity`` of patch-level methods: scores are spread over patches that look alike to the model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import Reached, Until
from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.methods.task import Scores, Task

SAID = "spread over patches that look alike to the last block: sharper on objects, less faithful to the model"


def spread(task: Task, scores: Scores) -> Scores:
    """S′ = W S over the patches of the main picture, W_ij = max(0, cos(h_i, h_j))² with rows divided by their sums and
    h what enters the last block. One more forward pass, as far as that block.

    Raises:
        InputError: the scores are not of patches.
        MethodNotApplicable: which rows of the last block are the picture's cannot be measured.
    """
    if scores.kind != "patch":
        raise InputError(
            f"{task.method}: affinity=True spreads scores over the patches of a picture, and these are one for each "
            f"{'pixel' if scores.kind == 'pixel' else 'token'}; leave it out"
        )
    hidden = cells_of_last_block(task, scores)
    alike = functional.normalize(hidden, dim=-1)
    weights = (alike @ alike.mT).clamp(min=0).square()
    weights = weights / weights.sum(-1, keepdim=True)
    values = torch.einsum("bij,bj->bi", weights, scores.values.to(weights.dtype))
    return replace(scores, values=values, diagnostics={**scores.diagnostics, "affinity": SAID})


def cells_of_last_block(task: Task, scores: Scores) -> Tensor:
    """``[B, P, D]`` what enters the last block in the rows that stand for the picture's cells."""
    attended = task.attended()
    if attended is None:
        hidden, rows = _of_graph(task, scores)
    else:
        number = attended.stream.blocks[-1].entry
        hidden = attended.features(number, attended.whole.tape[number])
        rows = (scores.places or task.places(hidden.shape[1])).rows[None]
    if rows.shape[-1] != scores.values.shape[-1] or int(rows.max()) >= hidden.shape[1] or int(rows.min()) < 0:
        raise task.refuse("its last block has other rows than its first, so affinities of patches are unknown")
    rows = rows.to(hidden.device).expand(len(hidden), -1)
    return hidden.detach().gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))


def _of_graph(task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
    """(``[B, N, D]`` what enters the last block, ``[B, P]`` the row of each cell)."""
    structure, name = task.structure, task.inputs.name
    key = None if structure.plain else next((key for key in structure.firsts if name in key), None)
    if not task.blocks() or (not structure.plain and (key is None or key not in structure.outputs)):
        raise task.refuse("its last block is unknown, so affinities of patches are too")
    last = task.blocks() - 1 if key is None else structure.outputs[key][0]
    until = Until(last)
    with contextlib.suppress(Reached):
        task.record(GRADIENT, until, **({} if key is None else {"blocks": task.all_blocks}))
    hidden = until.found[0][0] if until.found else None
    if hidden is None or hidden.dim() != 3 or len(hidden) != task.inputs.batch:
        raise task.refuse("what enters its last block is no [batch, tokens, width] matrix")
    if key is not None:
        return hidden, task.rows(name, key)[1]
    return hidden, (scores.places or task.places(hidden.shape[1])).rows[None]
