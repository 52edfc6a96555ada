"""Sanity checks: how much a map changes with the model's parameters (Adebayo et al. 2018), the class and the input."""

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
    """Ranks from 1, equal values share the mean of their ranks."""
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    _, group, sizes = np.unique(flat, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return ((ends - sizes + 1 + ends) / 2)[group]


def spearman(one: ArrayLike, other: ArrayLike, *, absolute: bool = False) -> float:
    """Rank correlation in −1..1 of two maps (of |scores| with ``absolute``); NaN if either is constant."""
    a, b = (ranks(np.abs(m) if absolute else m) for m in (one, other))
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / scale) if scale > 0 else float("nan")


def ssim(one: ArrayLike, other: ArrayLike, *, window: int = 7) -> float:
    """Structural similarity of two min–max-scaled maps ``[H, W]`` (Wang et al. 2004): uniform window, K = 0.01, 0.03.

    The mean over all windows that lie wholly inside; variances are unbiased. NaN if a map is constant.
    """
    a, b = (np.asarray(m, dtype=np.float64) for m in (one, other))
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"SSIM needs two maps [H, W] of one size, got {a.shape} and {b.shape}")
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
    """‖E(x + δ) − E(x)‖ / ‖E(x)‖, Frobenius norms (Yeh et al. 2019); NaN for a map of zeros."""
    a, b = np.asarray(original, dtype=np.float64), np.asarray(changed, dtype=np.float64)
    norm = np.linalg.norm(a.reshape(-1))
    return float(np.linalg.norm((b - a).reshape(-1)) / norm) if norm > 0 else float("nan")


def max_sensitivity(original: ArrayLike, changed: Sequence[ArrayLike]) -> float:
    """Max-sensitivity: the largest relative change over the disturbed inputs δ ∈ U[−r, r]; lower is better."""
    if not len(changed):
        raise ValueError("no disturbed maps")
    return max(relative_change(original, one) for one in changed)


def class_sensitivity(top: ArrayLike, least: ArrayLike) -> float:
    """Spearman correlation of the maps of the most and the least likely class; 1 = the class does not matter."""
    return spearman(top, least)


def stages(model: nn.Module) -> list[tuple[str, list[str]]]:
    """What is randomised together, from the output to the input: (name, parameter names).

    "head" is everything after the blocks, then each block from the last, then "embeddings": all that comes before.
    Whether a parameter outside the blocks comes before or after them is read off the order in which modules are listed.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise InputError("this model lists no blocks, so there is no order in which to randomise it")
    owner = {id(p): f"block {i}" for i, block in enumerate(blocks) for p in block.parameters()}
    listed = ["head", *(f"block {i}" for i in reversed(range(len(blocks)))), "embeddings"]
    found: dict[str, list[str]] = {stage: [] for stage in listed}
    outside = "embeddings"
    for name, parameter in model.named_parameters():
        stage = owner.get(id(parameter), outside)
        found[stage].append(name)
        outside = outside if stage == "embeddings" else "head"
    return [(stage, names) for stage, names in found.items() if names]


def randomized_models(model: nn.Module, order: str = "cascading", *, seed: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """Copies of the model with random parameters, one a stage: (stage, model). The model itself is left as it is.

    "cascading": all stages up to this one, from the output; "independent": this stage alone. Each tensor is redrawn
    from a normal distribution with the mean and the spread of its own values, so that activations keep their scale.
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
