"""LeGrad (Bousselham et al., ICCV 2025): how each block's own verdict on the class depends on its attention map."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.structure import NOT_YET, UNREAD
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName


@method(
    "positive gradient of each block's own verdict with respect to its attention, summed over blocks (LeGrad)",
    family="attention",
    citation="Bousselham et al.: LeGrad, ICCV 2025",
)
def legrad(task: Task, *, start_layer: OptionalBlock = None, composite: CompositeName = "plain") -> Scores:
    """Σ_b mean_h mean_i (∂f_b/∂A_b)⁺_ij over heads and query tokens i that are no padding, with f_b what the model's
    own head makes of block b's output, averaged over all tokens that are no padding.

    One forward pass, and for each block used one more for the head and a backward pass.

    Args:
        start_layer: first block used, from 0; None: the last two, as in the authors' code.
        composite: the rules of the backward passes, see :mod:`whyformer.rules.multipliers`.

    Raises:
        MethodNotApplicable: several sequences, windows, no blocks or no attention.

    Published for the similarity of a picture and a text (CLIP); here f is any target. The mean takes the place of every
    row that the head reads. Differs from the authors' code: no min–max over the map.
    """
    task.refuse_streams()
    blocks = task.blocks("what leaves them")
    first = task.layer(max(0, blocks - 2) if start_layer is None else start_layer)
    rules, attended = COMPOSITES[composite], task.attended()
    logits, last, found = attended.logits, attended.stream.last, list[Tensor]()
    copies = task.copies(1, logits)

    def observe(_: int, flow: Tensor) -> None:
        found.append(flow.clamp(min=0).mean(1))

    for index in task.progress(range(first, blocks), "LeGrad", blocks - first):
        leaving = attended.stream.blocks[index].exit
        hidden = attended.features(leaving, attended.whole.tape[leaving])
        share = _share(task, hidden)
        mean = (hidden * share).sum(1, keepdim=True).expand_as(hidden)
        head = attended.with_value(last, attended.laid_out(last, mean))
        seed, gradient = copies.seed(head.logits), list[Tensor]()
        head.walk(seed, [rules], at={last: lambda flow, into=gradient: into.append(flow)})
        if not gradient or gradient[0] is None:
            raise task.refuse(UNREAD, verdict=NOT_YET)
        start = attended.features(last, gradient[0]).sum(1, keepdim=True) * share
        attended.walk(seed, [rules], observe, [index], starts={leaving: attended.laid_out(leaving, start)})
    if not found:
        raise task.refuse("no attention was seen in its last blocks")
    return _scores(task, found, logits)


def _share(task: Task, hidden: Tensor) -> Tensor:
    """``[B, N, 1]`` the same share of every row that is no padding."""
    real = task.inputs.row_mask
    if real is not None and real.shape != hidden.shape[:2]:
        raise task.refuse("the rows of its blocks are not its tokens", verdict="is not supported yet")
    share = torch.ones_like(hidden[..., :1]) if real is None else real[..., None].to(hidden.dtype)
    return share / share.sum(1, keepdim=True)


def _scores(task: Task, positive: list[Tensor], logits: Tensor) -> Scores:
    """The sum over blocks of (∂f/∂A)⁺ ``[B, N, N]``, averaged over queries that are no padding."""
    real = task.inputs.row_mask
    positive = [one if real is None else one * real[..., None] for one in positive]
    count = positive[0].shape[1] if real is None else real.sum(1, keepdim=True)
    return Scores(torch.stack([one.sum(1) / count for one in positive]).sum(0), logits)

