"""LeGrad (Bousselham et al., ICCV 2025): how each block's own verdict on the class depends on its attention map."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.composites.named import COMPOSITES, CompositeName
from whyformer.engine.hooks import batch_first, laid_out_as
from whyformer.engine.probes import BlockCalls, Flows
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task


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
        composite: the rules of the backward passes, see :mod:`whyformer.composites.named`.

    Raises:
        MethodNotApplicable: several sequences, windows, no blocks or no attention.

    Published for the similarity of a picture and a text (CLIP); here f is any target. The mean takes the place of every
    row that the head reads. Differs from the authors' code: no min–max over the map.
    """
    task.refuse_streams()
    blocks = task.blocks("what leaves them")
    first = task.layer(max(0, blocks - 2) if start_layer is None else start_layer)
    maps: dict[int, Tensor] = {}
    shapes: dict[int, Tensor] = {}
    own = -1

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        shapes[index] = torch.empty(len(flow), *flow.shape[-2:], device="meta")
        if recording.mode.attention_blocks[index] == own:
            positive = flow.clamp(min=0).mean(1)
            maps[index] = positive if real is None else positive * real[..., None]

    calls = BlockCalls()
    recording = task.record(COMPOSITES[composite], Flows(observe, first), calls)
    outputs = [output for *_, output in calls.found]
    if not recording.attentions or len(outputs) < blocks or any(output.dim() != 3 for output in outputs):
        raise task.refuse("its blocks do not all hand on a [batch, tokens, width] matrix, or none of them attends")
    real = task.inputs.row_mask
    copies = task.copies(1, recording.logits.detach())
    for own in task.progress(range(first, blocks), "LeGrad", blocks - first):
        hidden = recording.run.home(batch_first(outputs[own].detach(), recording.run))
        if real is not None and real.shape != hidden.shape[:2]:
            raise task.refuse("the rows of its blocks are not its tokens", verdict="is not supported yet")
        share = torch.ones_like(hidden[..., :1]) if real is None else real[..., None].to(hidden.dtype)
        share = share / share.sum(1, keepdim=True)
        mean = (hidden * share).sum(1, keepdim=True).expand_as(hidden)
        head = task.record(COMPOSITES[composite], root="output", root_value=mean)
        seed = copies.seed(head.logits)
        (gradient,) = head.backward(seed)
        start = laid_out_as(outputs[own], gradient.sum(1, keepdim=True) * share, recording.run)
        recording.backward(seed, keep=True, at=[(outputs[own], start.to(outputs[own].device))])
    task.global_maps(shapes, hidden.shape[1])
    if not maps:
        raise task.refuse("no attention was seen in its last blocks")
    count = hidden.shape[1] if real is None else real.sum(1, keepdim=True)
    return Scores(torch.stack([one.sum(1) / count for one in maps.values()]).sum(0), recording.logits)
