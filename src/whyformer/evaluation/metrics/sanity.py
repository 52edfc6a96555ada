"""Sanity checks: sensitivity of a map to the model's parameters (Adebayo et al. 2018), the class and the input."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from whyformer.errors import InputError
from whyformer.models.structure import find_blocks

ORDERS = ("cascading", "independent")


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Return ranks from 1; equal values share the mean of their ranks."""
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    _, group, sizes = np.unique(flat, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return ((ends - sizes + 1 + ends) / 2)[group]


def spearman(first: ArrayLike, second: ArrayLike, *, absolute: bool = False) -> float:
    """Return the rank correlation of two maps, or of their absolute values; NaN if either map is constant."""
    a, b = (ranks(np.abs(m) if absolute else m) for m in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / scale) if scale > 0 else float("nan")


def ssim(first: ArrayLike, second: ArrayLike, *, window: int = 7) -> float:
    """Return the structural similarity of two min–max-scaled maps ``[H, W]`` (Wang et al. 2004); NaN for constant maps.

    The window is uniform, K = 0.01 and 0.03, variances are unbiased, and the mean is over all windows inside the map.
    """
    a, b = (np.asarray(m, dtype=np.float64) for m in (first, second))
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"SSIM needs two maps [H, W] of the same size, not {a.shape} and {b.shape}")
    window = min(window, *(s - (s + 1) % 2 for s in a.shape))
    if any(m.max() <= m.min() for m in (a, b)):
        return float("nan")
    a, b = ((m - m.min()) / (m.max() - m.min()) for m in (a, b))
    parts = torch.from_numpy(np.stack([a, b, a * a, b * b, a * b]))
    mean_a, mean_b, aa, bb, ab = nn.functional.avg_pool2d(parts, window, stride=1).numpy()
    unbiased = window**2 / (window**2 - 1)
    variances, cov = unbiased * (aa - mean_a**2 + bb - mean_b**2), unbiased * (ab - mean_a * mean_b)
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return float((top / ((mean_a**2 + mean_b**2 + c1) * (variances + c2))).mean())


def relative_change(original: ArrayLike, changed: ArrayLike) -> float:
    """Return ‖E(x + δ) − E(x)‖ / ‖E(x)‖ in the Frobenius norm (Yeh et al. 2019); NaN for a map of zeros."""
    a, b = np.asarray(original, dtype=np.float64), np.asarray(changed, dtype=np.float64)
    norm = np.linalg.norm(a.reshape(-1))
    return float(np.linalg.norm((b - a).reshape(-1)) / norm) if norm > 0 else float("nan")


def max_sensitivity(original: ArrayLike, changed: Sequence[ArrayLike]) -> float:
    """Return the largest relative change over perturbed inputs, δ ∈ U[−r, r]; lower is better."""
    if not len(changed):
        raise ValueError("max_sensitivity needs at least one perturbed map")
    return max(relative_change(original, map_) for map_ in changed)


def stages(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Return (name, parameter names) of the stages that are randomized together, from the output to the input.

    The stages are "head" (all parameters after the blocks), each block from the last to the first, and "embeddings"
    (all parameters before the blocks). The order in which the model lists its parameters decides which parameters come
    before and after the blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise InputError("this model has no known blocks, so there is no order in which to randomize it")
    owner = {id(p): f"block {i}" for i, block in enumerate(blocks) for p in block.parameters()}
    order = ["head", *(f"block {i}" for i in reversed(range(len(blocks)))), "embeddings"]
    by_stage: dict[str, list[str]] = {stage: [] for stage in order}
    outside = "embeddings"
    for name, parameter in model.named_parameters():
        stage = owner.get(id(parameter), outside)
        by_stage[stage].append(name)
        outside = outside if stage == "embeddings" else "head"
    return [(stage, names) for stage, names in by_stage.items() if names]


def randomized_models(model: nn.Module, order: str = "cascading", *, seed: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """Yield (stage, copy of the model with random parameters) for each stage; the model itself does not change.

    Each tensor is drawn from a normal distribution with the mean and standard deviation of its values, so that
    activations keep their scale.

    Args:
        model: the model.
        order: "cascading" randomizes all stages from the output up to this stage, "independent" this stage alone.
        seed: random seed.
    """
    if order not in ORDERS:
        raise InputError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    generator = torch.Generator().manual_seed(seed)
    changed = copy.deepcopy(model)
    for stage, names in stages(model):
        changed = copy.deepcopy(model) if order == "independent" else changed
        parameters = dict(changed.named_parameters())
        with torch.no_grad():
            for name in names:
                old = parameters[name].detach().double().cpu()
                noise = torch.randn(old.shape, generator=generator, dtype=torch.float64)
                spread = old.std(correction=0) if old.numel() > 1 else torch.zeros((), dtype=torch.float64)
                parameters[name].copy_(old.mean() + noise * torch.where(spread > 0, spread, 0.02))
        yield stage, changed
