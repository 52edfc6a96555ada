"""DecompX (Modarressi et al., ACL 2023): decompose the logit into a sum over tokens in a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.methods.map_passes import MapPass
from whyformer.methods.registry import Count, method
from whyformer.methods.task import Scores, Task
from whyformer.models.readout import without_excluded
from whyformer.rules.shares import DROPPED, ShareRules
from whyformer.tape.streams import is_passed
from whyformer.tape.walking import walk_forward


@method(
    "share of each token in the logit, propagated forward as a vector through every operation",
    family="attention",
    citation="Modarressi et al.: DecompX, ACL 2023",
    signed=True,
)
def decompx(task: Task, *, batch_size: Count = 16) -> Scores:
    """x_i = Σ_j x_i←j at every position i of every tensor, from x_i←j = 1[i=j] x_i at the input of the first block.
    The scores are the shares in Σ_c l_c ∂f/∂l_c over the logits l, which is the target f if it is a logit or a
    contrast, and sum to it.

    Linear operations act on each share, attention with its true map; a norm as (x_i←j − mean of x_i←j) ⊙ γ / σ_i with
    the true deviation; an activation by its slope from zero, g(z)/z at the full z. A bias b is distributed with weights
    |⟨x_i←j, b⟩| / Σ_j |⟨x_i←j, b⟩| after its layer; that of attention, W_O b_V + b_O, after the residual sum (in the
    first block, b_V belongs to the token of the value). Forward only, at the cost of about N passes; the vectors of a
    block take about ten times N² · D numbers.

    Args:
        batch_size: tokens j whose shares are propagated through an operation at once.

    Raises:
        MethodNotApplicable: an operation without a rule for shares, several sequences, or no blocks.

    Extensions of the paper, whose models have none of these: each branch of a product (a gate) gets half of it; an
    operation that selects by size (max-pooling) selects the same elements of each share; and if no token has a share
    in a row, its bias is distributed equally. For pictures, the shares of CLS and registers have no
    place on the map; they are in ``diagnostics["shares"]``, with the sum and Σ_c l_c ∂f/∂l_c ("target").
    """
    task.blocks("the input of the first")
    map_pass: MapPass = task.attended() if task.structure.attends else task.block_pass()
    try:
        logits, seed, values = _shares(task, map_pass, batch_size)
    except UnknownOperation as error:
        raise task.refuse(str(error)) from error
    expected = (seed * without_excluded(logits)).flatten(1).sum(1)
    rows = values.unflatten(0, (len(expected), -1)) if task.inputs.choices else values  # [B, C, N] of multiple choice
    total, size = rows.flatten(1).sum(1), rows.abs().flatten(1).sum(1)
    if bool(((total - expected).abs() > 8 * torch.finfo(values.dtype).eps ** 0.5 * size).any()):
        raise task.refuse(
            f"its tokens' shares sum to {total[0].item():.4g}, but the target is {expected[0].item():.4g}: "
            "some are lost"
        )
    figure = {"target": expected.tolist(), "sum": total.tolist(), "rows": rows.tolist()}
    name = map_pass.name_of(map_pass.blocks_of(task.inputs.name)[0][0])
    return task.of_sources({name: values}, logits, {"shares": figure})


def _shares(task: Task, map_pass: MapPass, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits, seed, share ``[B, N]`` of each row, or ``[B · C, N]`` for multiple choice) of a recorded pass."""
    recording, rows, (stream, block) = map_pass.recording, map_pass.layout.rows, map_pass.blocks_of(task.inputs.name)[0]
    seed, entry = task.seed(map_pass.logits), block.entry
    starts = recording.starts(task.read_logits, seed)
    if not is_passed(map_pass.program, entry):
        raise task.refuse("the target also depends on values that bypass its first block")
    mask = task.inputs.row_mask
    real = mask if mask is not None and mask.shape == stream.rows.shape else torch.ones(stream.rows.shape).bool()
    rules = ShareRules(recording.tape, rows, real.to(seed.device), batch_size)
    walked = walk_forward(map_pass.program, {entry: rules.begin(entry, stream.rows)}, starts, rules, DROPPED)
    if not walked:
        raise task.refuse("its tokens reach the target only through values that decompx holds constant, such as norms")
    values = torch.stack([rules.total(n, shares, starts[n], task.inputs.rows) for n, shares in walked.items()]).sum(0)
    map_pass.release()
    return map_pass.logits, seed, values.T
