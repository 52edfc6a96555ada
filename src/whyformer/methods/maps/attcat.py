"""AttCAT (Qiang et al., NeurIPS 2022): feature × gradient of each token, weighted by the attention to it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from whyformer.methods.registry import Block, method
from whyformer.methods.task import Scores, Task
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

    def enter(block: int, value: Tensor, flow: Tensor) -> None:
        products[block] = (value * flow).sum(-1)

    def observe(index: int, weights: Tensor, _: Tensor) -> None:
        received[index] = task.mean_of_queries(weights.mean(1))

    attended = task.attended(start=first)
    entries = {b: block.entry for b, block in enumerate(attended.stream.blocks, attended.first) if b >= first}
    at = {n: attended.arriving(attended.stream, n, partial(enter, b)) for b, n in entries.items()}
    walked = task.walk(attended, COMPOSITES[composite], observe, range(first, blocks), at=at)
    parts = [products[b] * received[b] for b in received]
    if not parts:
        raise task.refuse("the gradient of the target does not reach its blocks")
    return task.of_rows(torch.stack(parts).sum(0), walked.logits)
