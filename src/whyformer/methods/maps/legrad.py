"""LeGrad (Bousselham et al., ICCV 2025): gradients of the class score of each block's output with respect to attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.structure import NOT_YET, UNREAD
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName


@method(
    "positive gradient of the class score of each block's output w.r.t. its attention, summed over blocks (LeGrad)",
    family="attention",
    citation="Bousselham et al.: LeGrad, ICCV 2025",
)
def legrad(task: Task, *, start_layer: OptionalBlock = None, composite: CompositeName = "plain") -> Scores:
    """Σ_b mean_h mean_i (∂f_b/∂A_b)⁺_ij over heads and query tokens i without padding, with f_b the target computed by
    the model's head from block b's output, averaged over all tokens without padding.

    One forward pass, and for each block used another one for the head and a backward pass.

    Args:
        start_layer: first block used, from 0; None: the last two blocks, as in the authors' code.
        composite: the rules of the backward passes, see :mod:`whyformer.rules.multipliers`.

    Raises:
        MethodNotApplicable: several sequences, windows, no blocks or no attention.

    Published for the similarity of a picture and a text (CLIP); here f is any target. The mean replaces every row that
    the head reads. Differs from the authors' code: no min–max over the map.
    """
    task.refuse_streams()
    blocks = task.blocks("their output")
    first = task.layer(max(0, blocks - 2) if start_layer is None else start_layer)
    rules, attended = COMPOSITES[composite], task.attended()
    logits, last, positive = attended.logits, attended.stream.last, list[Tensor]()
    copies = task.copies(1, logits)

    def observe(_: int, flow: Tensor) -> None:
        positive.append(task.mean_of_queries(flow.clamp(min=0).mean(1)))

    for index in task.progress(range(first, blocks), "LeGrad", blocks - first):
        leaving = attended.stream.blocks[index].exit
        hidden = attended.features(leaving, attended.recording.tape[leaving])
        share = _share(task, hidden)
        mean = (hidden * share).sum(1, keepdim=True).expand_as(hidden)
        head = attended.with_value(last, attended.laid_out(last, mean))
        seed, gradient = copies.seed(head.logits), list[Tensor]()
        head.walk(seed, [rules], at={last: lambda flow, into=gradient: into.append(flow)})
        if not gradient or gradient[0] is None:
            raise task.refuse(UNREAD, verdict=NOT_YET)
        start = attended.features(last, gradient[0]).sum(1, keepdim=True) * share
        attended.walk(seed, [rules], observe, [index], starts={leaving: attended.laid_out(leaving, start)})
    if not positive:
        raise task.refuse("its last blocks have no recognizable attention")
    return task.of_rows(torch.stack(positive).sum(0), logits)


def _share(task: Task, hidden: Tensor) -> Tensor:
    """Return ``[B, N, 1]`` with equal weights, of sum 1, for all rows except padding."""
    share = task.real_rows(None, hidden.shape[:2])[..., None].to(hidden)
    return share / share.sum(1, keepdim=True)
