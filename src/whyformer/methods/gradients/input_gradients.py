"""Methods that need only gradients of the input: pixels, or what enters the first block for text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.run import Recording
from whyformer.inputs import Inputs
from whyformer.inputs.removal import removal
from whyformer.methods.registry import Amount, Count, Natural, method
from whyformer.methods.task import Scores, Task
from whyformer.rules.core import Composite

Norm = Literal["l2", "l1", "max", "sum"]
Baseline = Literal["zero", "black", "mean", "blur", "pad", "mask", "unk"]


def explain_root(task: Task, composite: Composite, *, relevance: bool = False) -> tuple[Recording, list[Tensor]]:
    """(recording, what arrives at the input): pixels, vectors, or for token ids what enters the first block."""
    recording = task.record(composite, **_root(task.inputs))
    return recording, recording.backward(task.seed(recording.logits), relevance=relevance)


def _root(inputs: Inputs) -> dict[str, Any]:
    if inputs.modality == "text":
        return {"root": "embedding"}
    return {"root": "input", "root_input": inputs.scored}


def reduce(inputs: Inputs, values: Tensor, norm: str) -> tuple[Tensor, str]:
    """Over channels ``[B, C, H, W]`` -> pixels, or over the width ``[B, N, D]`` -> tokens; (scores, kind)."""
    if inputs.modality == "image" and values.dim() == 5:  # frames of a video count as channels
        values = values.flatten(1, 2)
    axis, kind = (1, "pixel") if inputs.modality == "image" else (-1, "token")
    if norm == "sum":
        return values.sum(axis), kind
    if norm == "max":
        return values.abs().amax(axis), kind
    return (values.norm(dim=axis) if norm == "l2" else values.abs().sum(axis)), kind


def multiply(task: Task, recording: Recording, flow: Tensor, norm: str = "sum") -> Scores:
    """R = x ⊙ m, and how its sum compares with the target's value (its conservation figure)."""
    product = recording.roots[0].detach() * flow
    values, kind = reduce(task.inputs, product, norm)
    target = task.value(recording.logits.detach()).double()
    total = reduce(task.inputs, product, "sum")[0].flatten(1).sum(-1).double()
    error = (total - target).abs() / target.abs().clamp(min=1e-12)
    figure = {"start": target.tolist(), "sum": total.tolist(), "error": error.tolist()}
    return Scores(values, recording.logits, kind, {"conservation": figure})


@method(
    "size of the gradient of the target with respect to the input",
    family="gradient",
    level="pixel or token",
    citation="Simonyan et al. 2014; survey 2.1",
    anywhere=True,
)
def saliency(task: Task, *, norm: Norm = "l2") -> Scores:
    """‖∂f/∂x‖ over the channels of a pixel or the width of a token embedding (what enters the first block).

    Args:
        norm: "l2", "l1" (Σ|·|), "max" (max |·|, Simonyan et al. for pictures) or "sum" (signed Σ).
    """
    recording, (flow,) = explain_root(task, GRADIENT)
    values, kind = reduce(task.inputs, flow, norm)
    return Scores(values, recording.logits, kind)


@method(
    "input × gradient (the plain first-order attribution)",
    family="gradient",
    level="pixel or token",
    citation="Shrikumar et al. 2016; GI of Ali et al., ICML 2022",
    anywhere=True,
)
def input_x_gradient(task: Task, *, norm: Norm = "sum") -> Scores:
    """Σ x ⊙ ∂f/∂x over channels or width; for text x is what enters the first block (Ali et al.).

    Args:
        norm: "sum" (signed), "l1", "l2" or "max" of the products.
    """
    recording, (flow,) = explain_root(task, GRADIENT)
    return multiply(task, recording, flow, norm)


# -- averages over many copies -----------------------------------------------------------------------------------
def own_input(task: Task) -> tuple[Tensor, Tensor]:
    """(the root's value, logits): one plain pass."""
    recording = task.record(GRADIENT, **_root(task.inputs))
    return recording.roots[0].detach(), recording.logits.detach()


def gradients_at(
    task: Task, logits: Tensor, points: Callable[[int, int], Tensor], count: int, batch_size: int, name: str
) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, gradients ``[B, stop − start, ...]`` of the target at these points), chunk by chunk.

    Args:
        logits: ``[B, C]`` of the unchanged samples; they decide which class is meant.
        points: (start, stop) -> ``[B, stop − start, ...]``.
        batch_size: samples × points in one pass.
    """
    width = max(1, batch_size // task.inputs.batch)
    spans = [(i, min(i + width, count)) for i in range(0, count, width)]
    for start, stop in task.progress(spans, name, len(spans)):
        copies = task.copies(stop - start, logits)
        recording = copies.record(GRADIENT, root_value=points(start, stop).flatten(0, 1), **_root(copies.inputs))
        (flow,) = recording.backward(copies.seed(recording.logits))
        yield start, stop, flow.unflatten(0, (task.inputs.batch, stop - start))


@method(
    "gradient averaged over noisy copies of the input",
    family="gradient",
    level="pixel or token",
    citation="Smilkov et al. 2017; survey 2.1",
    anywhere=True,
)
def smoothgrad(
    task: Task,
    *,
    samples: Count = 25,
    noise: Amount = 0.15,
    seed: Natural = 0,
    norm: Norm = "l2",
    multiply_by_input: bool = False,
    squared: bool = False,
    batch_size: Count = 8,
) -> Scores:
    """mean_k ∂f/∂x at x + N(0, σ²), σ = noise · (max x − min x) of each sample.

    Args:
        samples: number of noisy copies.
        noise: σ as a share of the sample's range.
        seed: the same noise for every sample of a batch, so that a batch equals single runs.
        squared: average the squared gradients (SmoothGrad²).
        batch_size: copies × samples in one pass; changes only speed and memory.
    """
    x, logits = own_input(task)
    sigma = noise * _range(task.inputs, x)
    total = torch.zeros_like(x)

    def noisy(start: int, stop: int) -> Tensor:
        # a generator for each copy, so that neither chunks nor padding change a token's noise
        drawn = np.stack([np.random.default_rng([seed, k]).standard_normal(x.shape[1:]) for k in range(start, stop)])
        return x[:, None] + sigma[:, None] * torch.from_numpy(drawn).to(x)[None]

    for _, _, flow in gradients_at(task, logits, noisy, samples, batch_size, "smoothgrad"):
        total += (flow.square() if squared else flow).sum(1)
    mean = total / samples
    values, kind = reduce(task.inputs, x * mean if multiply_by_input else mean, norm)
    return Scores(values, logits, kind)


def _range(inputs: Inputs, x: Tensor) -> Tensor:
    """max − min of each sample, padding left out, shaped to multiply x."""
    high, low = x, x
    if inputs.mask is not None and inputs.mask.shape == x.shape[:2]:
        padding = ~inputs.mask[..., None]
        high, low = x.masked_fill(padding, float("-inf")), x.masked_fill(padding, float("inf"))
    spread = high.flatten(1).amax(1) - low.flatten(1).amin(1)
    return spread.reshape([-1] + [1] * (x.dim() - 1))


@method(
    "gradient integrated on the path from a baseline to the input",
    family="gradient",
    level="pixel or token",
    citation="Sundararajan et al. 2017; survey 2.1",
    anywhere=True,
)
def integrated_gradients(
    task: Task,
    *,
    steps: Count = 50,
    baseline: Baseline = "zero",
    norm: Norm = "sum",
    blur: Amount = 10.0,
    batch_size: Count = 8,
) -> Scores:
    """(x − x′) ⊙ ∫₀¹ ∂f(x′ + t(x − x′))/∂x dt by Gauss–Legendre quadrature; Σ = f(x) − f(x′).

    Args:
        steps: quadrature points.
        baseline: x′. "zero": zeros in the model's input space (for pictures normalised with their mean: the mean
            colour; for text: zero vectors into the first block). Pictures: "black", "mean" (each channel's mean),
            "blur". Text: "pad", "mask", "unk" (that token everywhere but at special tokens). Vectors: "mean".
        blur: σ in pixels of "blur".
        batch_size: points × samples in one pass; changes only speed and memory.

    ``diagnostics["completeness"]``: Σ scores, f(x) − f(x′) and their difference.
    """
    from numpy.polynomial.legendre import leggauss

    x, logits = own_input(task)
    start = _baseline(task, x, baseline, blur)
    nodes, weights = leggauss(steps)
    t, share = (
        torch.tensor(v / 2, dtype=x.dtype, device=x.device).reshape([1, -1] + [1] * (x.dim() - 1))
        for v in (nodes + 1, weights)
    )
    total = torch.zeros_like(x)

    def between(low: int, high: int) -> Tensor:
        return start[:, None] + t[:, low:high] * (x - start)[:, None]

    for low, high, flow in gradients_at(task, logits, between, steps, batch_size, "integrated gradients"):
        total += (flow * share[:, low:high]).sum(1)
    product = (x - start) * total
    values, kind = reduce(task.inputs, product, norm)
    below = task.record(GRADIENT, root_value=start, **_root(task.inputs)).logits.detach()
    found = product.flatten(1).sum(-1).double()
    wanted = task.value(logits).double() - task.value(below, like=logits).double()
    figure = {"sum": found.tolist(), "difference": wanted.tolist(), "error": (found - wanted).abs().tolist()}
    return Scores(values, logits, kind, {"completeness": figure})


def _baseline(task: Task, x: Tensor, baseline: str, blur: float) -> Tensor:
    """x′ of the given kind, of x's shape."""
    if baseline == "zero":
        return torch.zeros_like(x)
    removed = removal(task, baseline, blur=(blur, None))
    if task.inputs.modality != "text":
        return removed.filler.clone()
    ids = task.inputs.tensor.masked_fill(removed.features.to(x.device), removed.filler)
    recording = replace(task, inputs=task.inputs.with_tensor(ids)).record(GRADIENT, root="embedding")
    return recording.roots[0].detach()
