"""Grad-CAM on the features of blocks."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from whyformer.methods.map_passes import RowsName
from whyformer.methods.registry import is_block, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName

BlockList = Annotated[
    int | list[int],
    (
        "a block number or a list of at most 256",
        lambda v: is_block(v) or (isinstance(v, list | tuple) and 0 < len(v) <= 256 and all(map(is_block, v))),
    ),
]

Features = tuple[RowsName, Tensor, list[Tensor], list[Tensor]]
"""(name of the rows, logits, features ``[B, N, D]`` of each block, flows to them)."""


@method(
    "Grad-CAM on the first normalisation of the last block (or of several blocks)",
    family="gradient",
    citation="Selvaraju et al., ICCV 2017; Gildenblat's choice of layer",
    anywhere=True,
)
def gradcam(task: Task, *, blocks: BlockList = -1, composite: CompositeName = "plain") -> Scores:
    """(Σ_k w_k F_k)⁺ with w_k the mean of ∂f/∂F_k over the tokens: for pictures, over those of patches (without CLS and
    registers); for text, over all but padding.

    F is the output of a block's first normalisation if it comes before the attention (pre-norm), else the block's
    input. After the last attention, only the readout rows have a gradient, and the map would be all zeros.

    Args:
        blocks: index or indices of blocks; negative ones count from the last. Several maps are divided by their maxima
            and averaged.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    numbers = [blocks] if isinstance(blocks, int) else list(blocks)
    indices = sorted({task.block(b, "blocks") for b in numbers})
    key, logits, rows, flows = _features(task, indices, composite)
    if len({r.shape[:2] for r in rows}) > 1:
        raise task.refuse(f"its blocks {indices} have different numbers of tokens: choose blocks of one stage")
    if len(rows[0]) != task.inputs.rows:
        raise task.refuse(f"its blocks {indices} process parts of a sample separately, so their features form no map")
    if task.inputs.modality == "image":
        cells = task.cells(task.inputs.name, key).rows.to(rows[0].device)
        real = torch.zeros_like(rows[0][..., 0]).scatter(1, cells.expand(len(rows[0]), -1), 1)
    else:
        real = task.real_rows(key, rows[0].shape[:2]).to(rows[0])
    maps = [_cam(r, f, real) for r, f in zip(rows, flows, strict=True)]
    if len(maps) > 1:
        maps = [m / (m * real).amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny) for m in maps]
    return task.of_sources({key: torch.stack(maps).mean(0)}, logits, {})


def _features(task: Task, numbers: list[int], composite: CompositeName) -> Features:
    """Return the features of blocks and the flows to them."""
    map_pass = task.main_pass()
    blocks = map_pass.blocks_of(task.inputs.name)
    inputs = [(stream, map_pass.input_of_attention(stream, block)) for stream, block in (blocks[n] for n in numbers)]
    if not all(map_pass.holds(number, stream) for stream, number in inputs):
        raise task.refuse("the inputs of its blocks hold other rows than those that attend there", verdict=NOT_YET)
    arrived: dict[int, tuple[Tensor, Tensor]] = {}

    def arrive(number: int, features: Tensor, flow: Tensor) -> None:
        arrived[number] = features, flow

    at = {number: map_pass.arriving(stream, number, partial(arrive, number)) for stream, number in inputs}
    map_pass.walk(task.seed(map_pass.logits), [COMPOSITES[composite]], at=at)
    rows, flows = zip(*(arrived[number] for _, number in inputs), strict=True)
    return map_pass.name_of(inputs[-1][0]), map_pass.logits, list(rows), list(flows)


def _cam(rows: Tensor, gradient: Tensor, real: Tensor) -> Tensor:
    """Return the map ``[B, N]``; ``real`` ``[B, N]`` is 1 at the tokens over which gradients are averaged."""
    weights = (gradient * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return torch.einsum("bnd,bd->bn", rows, weights).clamp(min=0)
