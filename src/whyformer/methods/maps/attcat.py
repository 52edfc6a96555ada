"""AttCAT (Qiang et al., NeurIPS 2022): feature × gradient of each token, weighted by the attention to it."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.methods.registry import Block, method
from whyformer.methods.task import MapWatch, Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName


@method(
    "feature × gradient of every block's input, weighted by the attention that the token receives there",
    family="attention",
    citation="Qiang et al.: AttCAT, NeurIPS 2022",
    signed=True,
)
def attcat(task: Task, *, start_layer: Block = 0, composite: CompositeName = "plain") -> Scores:
    """S_j = Σ_b ᾱ_b(j) Σ_d h_b[j, d] ∂f/∂h_b[j, d], with ᾱ_b(j) = mean_h mean_i A_ij over the query tokens i without
    padding, and h_b the input of block b. Signed. One forward and one backward pass.

    Args:
        start_layer: first block used, from 0.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.

    Raises:
        MethodNotApplicable: several sequences, windows, or no attention.

    The authors' code excludes CLS and SEP; here they are treated like any token.
    """
    task.refuse_streams()
    first = task.layer(start_layer)
    blocks = task.blocks("their input")
    products: dict[int, Tensor] = {}
    received: dict[int, Tensor] = {}

    def entering(block: int, value: Tensor, flow: Tensor) -> None:
        products[block] = (value * flow).sum(-1)

    def observe(index: int, weights: Tensor, _: Tensor) -> None:
        fused = weights.mean(1)
        real = task.real_rows(None, fused.shape[:2]).to(fused)
        received[index] = (fused * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    walked = task.walk(COMPOSITES[composite], MapWatch(range(first, blocks), observe, entering=entering))
    parts = [products[b] * received[b] for b in received if b in products]
    if not parts:
        raise task.refuse("the gradient of the target does not reach its blocks")
    return Scores(torch.stack(parts).sum(0), walked.logits)
