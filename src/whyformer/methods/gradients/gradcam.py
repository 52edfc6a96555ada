"""Grad-CAM on the features of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import Features
from whyformer.methods.registry import method
from whyformer.methods.task import Scores, Task


def _block_list(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    )


@method(
    "Grad-CAM on the first normalisation of the last block (or of several blocks)",
    family="gradient",
    citation="Selvaraju et al., ICCV 2017; Gildenblat's choice of layer; survey 2.2",
    anywhere=True,
    checks={"blocks": ("a block number or a list of them", _block_list)},
)
def gradcam(task: Task, *, blocks: int | list[int] = -1) -> Scores:
    """(Σ_k w_k F_k)⁺ with w_k the mean of ∂f/∂F_k over the tokens; prefix tokens are left out of the mean on pictures.

    F is the output of a block's first normalisation where that comes before the attention (pre-norm), else the
    block's input: behind the last attention only the readout rows have a gradient, and the map would be all zeros.

    Args:
        blocks: block number(s); negative ones count from the last. With several, each map is divided by its maximum
            and the maps are averaged.
    """
    numbers = [blocks] if isinstance(blocks, int) else list(blocks)
    chosen = sorted({task.block(b, "blocks") for b in numbers})
    recording = task.record(GRADIENT, Features(tuple(chosen)))
    if not recording.roots:
        raise task.refuse("no block of it was found or entered, so there are no features")
    flows = recording.backward(task.seed(recording.logits))
    maps = [_cam(task, root.detach(), flow) for root, flow in zip(recording.roots, flows, strict=True)]
    shapes = {m[0].shape for m in maps}
    if len(shapes) > 1:
        raise task.refuse(f"its blocks {chosen} have different numbers of tokens; give blocks of one stage")
    grid = maps[0][1]
    if len(maps) == 1:
        return Scores(maps[0][0], recording.logits, "sequence", grid=grid or recording.mode.convolution_grid)
    scaled = [m / m.amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny) for m, _ in maps]
    return Scores(
        torch.stack(scaled).mean(0), recording.logits, "sequence", grid=grid or recording.mode.convolution_grid
    )


def _cam(task: Task, features: Tensor, gradient: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """(``[B, N]`` map, grid where the features are laid out as ``[B, H, W, D]``)."""
    grid = None
    if features.dim() == 4:
        grid = (int(features.shape[1]), int(features.shape[2]))
        features, gradient = features.flatten(1, 2), gradient.flatten(1, 2)
    if features.shape[0] != task.inputs.batch:  # tokens first
        features, gradient = features.transpose(0, 1), gradient.transpose(0, 1)
    real = task.inputs.mask
    if real is not None and real.shape == features.shape[:2]:
        share = real.to(features.dtype)[..., None]
        weights = (gradient * share).sum(1) / share.sum(1)
    else:
        weights = gradient.mean(1)
    return torch.einsum("bnd,bd->bn", features, weights).clamp(min=0), grid
