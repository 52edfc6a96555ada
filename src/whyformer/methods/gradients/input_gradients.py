"""Methods that need only gradients of the input: pixels, or the first block's input for text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from whyformer.baselines import BASELINES
from whyformer.errors import InputError, on_changed_inputs
from whyformer.inputs.removal import removal
from whyformer.methods.registry import Amount, Count, Natural, between, method, name_or_token, summed
from whyformer.methods.roots import RootedPass, Roots
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName
from whyformer.tape.walking import GRADIENT, Composite

Norm = Literal["l2", "l1", "max", "sum"]
# without "delete": the path must start at an input of the same length
Baseline = Annotated[str | int, name_or_token(*(name for name, row in BASELINES.items() if row.fill or row.token))]
Steps = Annotated[int, between(1, 1_000, integer=True)]  # quadrature points are eigenvalues of a steps × steps matrix


Values = dict[str, Tensor]  # name of an input -> tensor


def explain_roots(task: Task, composite: Composite) -> tuple[RootedPass, Values]:
    """Return (recorded pass, flow that arrives at each input): pixels, vectors, or the first block's input for ids."""
    recorded = task.rooted_pass(composite)
    return recorded, recorded.back(task.seed(recorded.logits))[0]


def reduce(modality: str, values: Tensor, norm: str) -> Tensor:
    """Reduce the channels of ``[B, C, H, W]`` (or a video ``[B, T, C, H, W]``), or the width of ``[B, N, ...]``."""
    if modality == "image" and values.dim() == 5 and values.shape[1] == 1:  # a single frame is a picture
        values = values[:, 0]
    elif modality == "tensor" and values.dim() == 2:  # a sound has one number per moment
        values = values[..., None]
    elif modality != "image" and values.dim() > 3:  # several streams per token (hyper-connections)
        values = values.flatten(2)
    axis = -3 if modality == "image" else -1
    if norm == "sum":
        return values.sum(axis)
    if norm == "max":
        return values.abs().amax(axis)
    return values.norm(dim=axis) if norm == "l2" else values.abs().sum(axis)


def of_roots(
    task: Task, logits: Tensor, values: Values, norm: str, diagnostics: dict[str, Any] | None = None
) -> Scores:
    """Turn values at the roots into scores of pixels and tokens by reducing channels or width."""
    by_input = {}
    for name, side in task.sources.items():
        value = task.by_sample(name, values[name])
        if task.has_several_texts(name):
            value = value.flatten(0, 1)
        value = value.transpose(1, 2) if side.transposed else value
        scores = reduce(side.modality, value, norm)
        if side.modality == "text":
            scores = task.at_tokens(name, scores)
        by_input[name] = Scores(scores, logits, "pixel" if side.modality == "image" else "token", {}, inputs=side)
    return task.assemble(by_input, logits, diagnostics or {})


def _total(task: Task, products: Values, logits: Tensor) -> Tensor:
    """Return the sum ``[B]`` over all inputs; a shared text counts for the sample whose target depends on it."""
    total = torch.zeros(task.inputs.batch, dtype=torch.double, device=logits.device)
    for name, product in products.items():
        if name in task.inputs.shared:
            sums = product.flatten(1).sum(1).double().to(logits.device)
            depends = task.depends_on(logits)
            total += depends.double() @ sums if len(sums) == depends.shape[1] else 0
        else:
            total += task.by_sample(name, product).reshape(len(total), -1).sum(-1).double().to(logits.device)
    return total


def multiply(task: Task, recorded: RootedPass, flows: Values, norm: str = "sum") -> Scores:
    """Return R = x ⊙ m, with the conservation figure, which compares its sum with the target's value."""
    values = recorded.root_values
    products = {name: values[name].detach() * flow for name, flow in flows.items()}
    target = task.value(recorded.logits.detach()).double()
    return of_roots(task, recorded.logits, products, norm, conserved(_total(task, products, recorded.logits), target))


def conserved(total: Tensor, target: Tensor) -> dict[str, Any]:
    """Return ``diagnostics["conservation"]``: the target's values ``[B]`` (``start``), the sums of the scores, and
    |sum − value|. The sums need not equal the values if the model has biases."""
    error = (total - target).abs()
    return {"conservation": {"start": target.tolist(), "sum": total.tolist(), "error": error.tolist()}}


@method(
    "size of the gradient of the target with respect to the input",
    family="gradient",
    level="pixel or token",
    signed=summed,
    citation="Simonyan et al. 2014",
    anywhere=True,
    checkpoint=True,
)
def saliency(task: Task, *, norm: Norm = "l2", composite: CompositeName = "plain") -> Scores:
    """‖∂f/∂x‖ over the channels of a pixel or the width of a token's vector (the first block's input).

    Args:
        norm: "l2", "l1" (Σ|·|), "max" (max |·|, Simonyan et al. for pictures) or "sum" (signed Σ; for text in pre-norm
            models with LayerNorm, it is 0 up to rounding).
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    recorded, flows = explain_roots(task, COMPOSITES[composite])
    return of_roots(task, recorded.logits, flows, norm)


@method(
    "input × gradient (the plain first-order attribution)",
    family="gradient",
    level="pixel or token",
    signed=summed,
    citation="Shrikumar et al. 2016; GI of Ali et al., ICML 2022",
    anywhere=True,
    checkpoint=True,
)
def input_x_gradient(task: Task, *, norm: Norm = "sum", composite: CompositeName = "plain") -> Scores:
    """Σ x ⊙ ∂f/∂x over channels or width; for text, x is the first block's input (Ali et al.).

    Args:
        norm: "sum" (signed), "l1", "l2" or "max" of the products.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    return multiply(task, *explain_roots(task, COMPOSITES[composite]), norm)


# -- averages over many copies -----------------------------------------------------------------------------------
def root_values(task: Task) -> tuple[Values, Tensor, Roots]:
    """Return (values of the roots, logits, roots) of a plain pass."""
    recorded = task.rooted_pass(GRADIENT)
    values = {name: task.by_sample(name, leaf.detach()) for name, leaf in recorded.root_values.items()}
    return values, recorded.logits.detach(), recorded.roots


def gradients_at(
    task: Task,
    logits: Tensor,
    points: Callable[[str, int, int], Tensor],
    count: int,
    batch_size: int,
    name: str,
    composite: CompositeName,
) -> Iterator[tuple[int, int, Values]]:
    """Yield (start, stop, gradients ``[B, stop − start, ...]`` of the target by input) at points of the inputs, in
    chunks.

    Args:
        logits: ``[B, C]`` of the unchanged samples, which determine the predicted class.
        points: function (input, start, stop) -> ``[B, stop − start, ...]``.
        count: number of points.
        batch_size: samples × points in one pass.
        name: description for the progress bar.
        composite: the rules of the backward pass.
    """
    width = 1 if task.inputs.shared else max(1, task.at_once(batch_size) // task.inputs.batch)
    starts, roots = range(0, count, width), dict[int, Roots]()
    for start in task.progress(starts, name, len(starts)):
        stop = min(start + width, count)
        copies = task.copies(stop - start, logits)
        values = {source: task.packed(source, points(source, start, stop).flatten(0, 1)) for source in task.sources}
        recorded = copies.rooted_pass(COMPOSITES[composite], values, roots.get(stop - start))
        roots[stop - start] = recorded.roots
        flows, _ = recorded.back(copies.seed(recorded.logits))
        by_sample = {source: copies.by_sample(source, flow) for source, flow in flows.items()}
        yield start, stop, {source: flow.unflatten(0, (-1, stop - start)) for source, flow in by_sample.items()}


@method(
    "gradient averaged over noisy copies of the input",
    family="gradient",
    level="pixel or token",
    signed=summed,
    citation="Smilkov et al. 2017",
    anywhere=True,
    checkpoint=True,
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
    composite: CompositeName = "plain",
) -> Scores:
    """mean_k ∂f/∂x at x + N(0, σ²), σ = noise · (max x − min x) of each sample, or of each of its texts.

    Args:
        samples: number of noisy copies.
        noise: σ as a fraction of the sample's range.
        seed: seed of the noise. All samples get the same noise, drawn for their real tokens in order, so that a
            sample has the same scores alone and in a batch, with padding on either side.
        norm: "l2", "l1" (Σ|·|), "max" (max |·|) or "sum" (signed Σ) over channels or width.
        multiply_by_input: multiply the mean by x.
        squared: average the squared gradients (SmoothGrad²).
        batch_size: copies × samples in one pass; changes only speed and memory.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    x, logits, _ = root_values(task)
    real = {name: _real(task, name, value) for name, value in x.items()}
    axes = {name: 1 + task.has_several_texts(name) for name in x}
    sigma = {name: noise * _range(value, real[name], axes[name]) for name, value in x.items()}
    total = {name: torch.zeros_like(value) for name, value in x.items()}

    def noisy(name: str, start: int, stop: int) -> Tensor:
        # one generator per copy, so that a token's noise does not depend on chunks or padding
        clean, mask = x[name], real[name]
        shape = clean.shape[axes[name] :]
        draws = np.stack([np.random.default_rng([seed, k]).standard_normal(shape) for k in range(start, stop)])
        normal = torch.from_numpy(draws).to(clean)
        if mask is None:
            normal = normal.view(1, stop - start, *[1] * (clean.dim() - normal.dim()), *shape)
        else:
            normal = (normal[:, (mask.cumsum(-1) - 1).clamp(min=0)] * _broadcast(mask, clean)).movedim(0, 1)
        return clean[:, None] + sigma[name][:, None] * normal

    for _, _, flows in gradients_at(task, logits, noisy, samples, batch_size, "smoothgrad", composite):
        for name, flow in flows.items():
            total[name] += (flow.square() if squared else flow).sum(1)
    mean = {name: flow / samples * (x[name] if multiply_by_input else 1) for name, flow in total.items()}
    return of_roots(task, logits, mean, norm)


def _real(task: Task, name: str, x: Tensor) -> Tensor | None:
    """Return ``[B, N]`` True at the rows of an input's root other than padding; None if all are real."""
    mask, elements = task.sources[name].mask, None
    if mask is None or bool(mask.all()):
        return None
    if name not in task.derived and task.sources[name].modality == "text":
        elements = task.structure.elements_of(name)
    if elements is not None and mask.dim() == 2:
        places = elements.to(mask.device).expand(len(mask), -1)
        mask = mask.gather(1, places.clamp(min=0)) | (places < 0)
    mask = task.inputs.by_sample(mask) if task.has_several_texts(name) else mask
    return mask.to(x.device) if mask.shape == x.shape[: mask.dim()] else None


def _broadcast(mask: Tensor, x: Tensor) -> Tensor:
    """Reshape a mask ``[B, N]`` to broadcast against the value of a root."""
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))


def _range(x: Tensor, real: Tensor | None, axes: int) -> Tensor:
    """Return max − min for each index of the first axes (each sample), without padding, in a shape to multiply x."""
    high, low = x, x
    if real is not None:
        padding = ~_broadcast(real, x)
        high, low = x.masked_fill(padding, float("-inf")), x.masked_fill(padding, float("inf"))
    spread = high.flatten(axes).amax(-1) - low.flatten(axes).amin(-1)
    return spread.reshape(*x.shape[:axes], *[1] * (x.dim() - axes))


@method(
    "gradient integrated on the path from a baseline to the input",
    family="gradient",
    level="pixel or token",
    signed=summed,
    citation="Sundararajan et al. 2017",
    anywhere=True,
    checkpoint=True,
)
def integrated_gradients(
    task: Task,
    *,
    steps: Steps = 50,
    baseline: Baseline = "zero",
    norm: Norm = "sum",
    blur: Amount = 10.0,
    batch_size: Count = 8,
    composite: CompositeName = "plain",
) -> Scores:
    """(x − x′) ⊙ ∫₀¹ ∂f(x′ + t(x − x′))/∂x dt by Gauss–Legendre quadrature; Σ = f(x) − f(x′).

    Args:
        steps: quadrature points.
        baseline: x′ of the main input; other inputs have zeros. "zero": zeros in the model's input space (for
            normalised pictures, the mean colour; for text, zero vectors at the first block's input). Pictures:
            "black", "mean" (each channel's mean), "blur", "noise". Text: "pad", "mask", "unk" or a token's id (that
            token everywhere except at special tokens). Vectors: "mean".
        norm: "sum" (signed), "l1", "l2" or "max" over channels or width.
        blur: σ in pixels of "blur".
        batch_size: points × samples in one pass; changes only speed and memory.
        composite: the rules of the backward passes, see :mod:`whyformer.rules.multipliers`; the equation for Σ holds
            for "plain".

    ``diagnostics["completeness"]``, for ``composite="plain"``: Σ scores, f(x) − f(x′), their difference, and from eight
    steps on the difference when using every other point.
    """
    x, logits, roots = root_values(task)
    start = {name: torch.zeros_like(value) for name, value in x.items()}
    start[task.inputs.name] = _baseline(task, x[task.inputs.name], baseline, blur)
    at_baseline = _logits_at(task, start, roots) if composite == "plain" else None
    nodes, weights, fewer = _quadrature(steps)
    total, coarse = ({name: torch.zeros_like(value) for name, value in x.items()} for _ in range(2))

    def spread(values: Any, like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).reshape([1, -1] + [1] * (like.dim() - 1))

    def between(name: str, low: int, high: int) -> Tensor:
        end, begin = x[name], start[name]
        return begin[:, None] + spread(nodes, end)[:, low:high] * (end - begin)[:, None]

    for low, high, flows in gradients_at(task, logits, between, steps, batch_size, "integrated gradients", composite):
        for name, flow in flows.items():
            for integral, by in ((total, weights), (coarse, fewer)):
                integral[name] += (flow * spread(by, flow[:, 0])[:, low:high]).sum(1)
    products = {name: (x[name] - start[name]) * total[name] for name in x}
    if at_baseline is None:  # under other rules, the scores need not sum to f(x) − f(x′)
        return of_roots(task, logits, products, norm)
    total_score = _total(task, products, logits)
    difference = task.value(logits).double() - task.value(at_baseline, like=logits).double()
    figure = {"sum": total_score, "difference": difference, "error": (total_score - difference).abs()}
    if steps >= 8:
        half = _total(task, {name: (x[name] - start[name]) * coarse[name] for name in x}, logits)
        figure["error_of_half"] = (half - difference).abs()
    return of_roots(task, logits, products, norm, {"completeness": {name: v.tolist() for name, v in figure.items()}})


def _logits_at(task: Task, start: Values, roots: Roots) -> Tensor:
    """Return the logits at the baseline."""
    values = {name: task.packed(name, v) for name, v in start.items()}
    try:
        return task.rooted_pass(GRADIENT, values, roots).logits.detach()
    except InputError as error:  # such as from a model that treats pictures of zeros as padding
        rows = (row for row in BASELINES.values() if (row.fill or row.token) and task.inputs.modality in row.kinds)
        raise InputError(
            f"{task.method}, at its baseline: {error}. Choose another baseline "
            f"({', '.join(row.name for row in rows)}), or a method without one, such as input_x_gradient"
        ) from error


def _quadrature(steps: int) -> tuple[Any, Any, Any]:
    """Return (points, weights, weights for every other point only) of Gauss–Legendre quadrature from 0 to 1."""
    from numpy.polynomial.legendre import leggauss, legvander

    nodes, weights = leggauss(steps)
    half = nodes[::2]
    fewer = np.zeros(steps)
    fewer[::2] = np.linalg.solve(legvander(half, len(half) - 1).T, np.eye(len(half))[0])
    return (nodes + 1) / 2, weights / 2, fewer


def _baseline(task: Task, x: Tensor, baseline: str | int, blur: float) -> Tensor:
    """Return the baseline x′ in the shape of x."""
    if baseline == "zero":
        return torch.zeros_like(x)
    removed = removal(task, baseline, blur=(blur, None))
    if task.inputs.modality != "text":
        return removed.filler.clone()
    ids = task.inputs.tensor.masked_fill(removed.features.to(x.device), removed.filler)
    other = replace(task, inputs=task.inputs.with_tensor(ids))
    try:
        return other.rooted_pass(GRADIENT).root_values[task.inputs.name].detach()
    except IndexError as error:  # the id has no vector in a model without a config, whose vocabulary is unknown
        raise on_changed_inputs(error, f"{task.method}, at its baseline: ") from error
