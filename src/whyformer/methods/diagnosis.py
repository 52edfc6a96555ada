"""Checks before and after a method runs: whether rows are samples, which inputs get no scores, and whether the model
draws random numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS, InputError, ModelError, WhyformerError
from whyformer.inputs import Inputs, argument_name, is_auxiliary
from whyformer.methods.gradients.input_gradients import explain_roots, of_roots
from whyformer.methods.task import Scores, Task
from whyformer.models.cache import measured
from whyformer.models.ends import forward
from whyformer.models.output import with_tensors
from whyformer.models.readout import without_excluded
from whyformer.tape.calls import every_tensor
from whyformer.tape.walking import GRADIENT

_ROUNDING = 1e-6
"""A share of the gradient up to this is rounding: with a mask, the gradient at padding is 0."""


def check_samples(task: Task, logits: Tensor) -> None:
    """Raise if rows of logits cannot be assigned to samples, or if the rows of an input ``[N, D]`` are one sample."""
    inputs = task.inputs
    inputs.check_rows(logits)
    if inputs.modality != "tensor" or inputs.tensor.dim() > 2 or inputs.batch == 1:
        return
    first = task.forward(inputs.select(slice(0, 1)))[0].detach().to(logits)
    if bool(((first - logits[0]).abs() > 1e-2 * (1 + logits[0].abs())).any()):
        raise InputError(
            f"the rows of {inputs.name} {list(inputs.tensor.shape)} are not samples, because the model's output for "
            "the first row alone differs: add a leading axis of 1 to a single sample [N, D]"
        )


def check_choices(model: nn.Module, inputs: Inputs) -> None:
    """Raise unless ids ``[B, C, N]`` are multiple choice: each of the C texts has a logit, which depends on this text
    alone.

    For such ids, this costs three plain forward passes of one sample.
    """
    if inputs.choices is None:
        return
    try:
        heads = _heads_of_texts(model, inputs.select(slice(0, 1)), inputs.choices)
    except FOREIGN_ERRORS:  # the model fails again later, where the error is reported
        return
    if "" in heads:
        return
    batch, count, length = inputs.tensor.shape
    name = inputs.name
    if heads:
        raise InputError(
            f"the model's {heads[0]} [{batch}, {count}] has a logit for each of the {count} texts per sample of "
            f"{name}, and its output holds other tensors: wrap the model in a module that returns {heads[0]} only"
        )
    raise InputError(
        f"{name} [{batch}, {count}, {length}] holds {count} texts per sample, and the model does not return one logit "
        "for each, as for multiple choice. To explain the texts as one, wrap the model in a module that takes "
        f"{name} [{batch}, {count * length}] (and the mask likewise) and passes {name}.view(-1, {count}, {length}) to "
        "the model"
    )


def _heads_of_texts(model: nn.Module, sample: Inputs, count: int) -> list[str]:
    """Return the names of outputs that have a logit for each text of a sample, "" for the model's logits: the first
    text affects the first logit only, and the other texts only the others."""
    ids, reversed_ids = sample.tensor, sample.tensor.flip(2)
    others = reversed_ids if bool((reversed_ids != ids).any()) else _changed(ids)
    first = torch.arange(count, device=ids.device)[:, None] == 0
    variants = (ids, torch.where(first, others, ids), torch.where(first, ids, others))

    def rows(ids: Tensor) -> dict[str, Tensor]:
        output = forward(model, *sample.with_tensor(ids).feed)
        heads = output.named if output.logits is None else {**output.named, "": output.logits}
        return {name: tensor[0] for name, tensor in heads.items() if tensor.shape == (1, count)}

    heads, first_changed, others_changed = map(rows, variants)
    return [
        name
        for name, logits in heads.items()
        if bool(_close(first_changed[name], logits)[1:].all() & _close(others_changed[name], logits)[:1].all())
    ]


def _close(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= 1e-3 * (1 + b.abs())


def with_unscored(task: Task, scores: Scores) -> Scores:
    """Add warnings, and ``diagnostics["unscored"]``, that name inputs which affect the prediction and get no scores,
    and padding, which scores 0, if the target has a gradient there.

    Masks, types, positions and boxes of tokens are exempt. Costs one plain forward pass for each input without scores,
    with that input changed; and one backward walk if an input is padded, only the first time if it finds no gradient.
    """
    unscored = [name for name, changed in _changed_inputs(task, scores) if _affects(task, changed, scores.logits)]
    shares, warnings = _padding_shares(task), list[str]()
    if unscored:
        way = "input_x_gradient scores every input"
        if not set(unscored) <= task.inputs.others.keys():
            way = "wrap the model so that it takes them as numbers [B, F], vectors [B, N, D] or ids [B, N]"
            if not all(isinstance(task.inputs.kwargs.get(name, task.inputs.tensor), Tensor) for name in unscored):
                way = "pass what they were computed from, such as the whole text instead of a cache"
        names = ", ".join(unscored)
        warnings.append(f"the prediction also depends on {names}, which {task.method} does not score: {way}")
    for name, share in shares.items():
        warnings.append(
            f"the prediction for padded samples also depends on the padding of {name}, which has scores of 0 and "
            f"{share:.1%} of the gradient: pass each sample alone, without padding"
        )
    unscored += [f"padding of {name}" for name in shares]
    diagnostics = {**scores.diagnostics, **({"unscored": unscored} if unscored else {})}
    return replace(scores, diagnostics=diagnostics, warnings=[*scores.warnings, *warnings])


def _padding_shares(task: Task) -> dict[str, float]:
    """Return the share of Σ |∂target/∂x| at the padding of each input, without shares that are only rounding."""
    masks = {name: mask for name, side in task.scored_inputs.items() if (mask := side.row_mask) is not None}
    known, key = measured(task.model) if task.last else {}, ("gradient at padding", *masks)
    if all(bool(mask.all()) for mask in masks.values()) or known.get(key) is False:
        return {}
    try:
        recorded, flows = explain_roots(task, GRADIENT)
        sizes = of_roots(task, recorded.logits, flows, "l1")
    except (WhyformerError, *FOREIGN_ERRORS):  # a model without a gradient, or that cannot be recorded
        return {}
    parts = {(sizes.inputs or task.inputs).name: sizes, **sizes.parts}
    total, shares = sum(float(part.values.sum()) for part in parts.values()), dict[str, float]()
    for name, mask in masks.items():
        size = parts[name].values if name in parts else None
        if size is not None and mask.shape == size.shape:
            share = float((size * ~mask.to(size.device)).sum()) / max(total, 1e-300)
            shares |= {name: share} if share > _ROUNDING else {}
    known[key] = bool(shares)
    return shares


def _changed_inputs(task: Task, scores: Scores) -> Iterator[tuple[str, Inputs]]:
    """Yield (name, inputs with that one changed) for each input without scores."""
    inputs = task.inputs
    scored = {inputs.scored, *(part.inputs.scored for part in scores.parts.values() if part.inputs is not None)}
    arguments: list[tuple[int | str, Any]] = [*enumerate(inputs.args), *inputs.kwargs.items()]
    rows = {side.tensor.shape[:2] for side in inputs.sides.values() if side.modality != "image"}
    for place, value in arguments:
        if place in scored or not any(map(_has_numbers, every_tensor(value))):
            continue
        name = place if isinstance(place, str) else argument_name(task.model, place)
        if not _describes(name, value, rows):
            other = with_tensors(value, lambda t: _changed(t) if _has_numbers(t) else t, deep=True)
            args = tuple(other if i == place else a for i, a in enumerate(inputs.args))
            kwargs = {n: other if n == place else v for n, v in inputs.kwargs.items()}
            yield name, replace(inputs, args=args, kwargs=kwargs)


def _describes(name: str, value: Any, rows: set[torch.Size]) -> bool:
    """Return whether an argument describes rows ``[B, N]`` or pixels of other inputs, such as a mask or the box of each
    token. Boxes and points that belong to no tokens are prompts (SAM), and a type of a whole sample is a feature."""
    shape = getattr(value, "shape", ())
    if shape[:2] in rows or shape[1:2] in {row[1:] for row in rows}:  # [B, N] or [1, N]
        return is_auxiliary(name) or getattr(value, "dtype", None) == torch.bool
    return is_auxiliary(name) and not re.search("box|point|type|segment|timestep", name)


def random_states(model: nn.Module) -> list[Tensor]:
    """Return the states of torch's random generators of the CPU and of the model's GPUs."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]


def with_randomness(task: Task, scores: Scores, before: list[Tensor]) -> Scores:
    """Add a warning, and ``diagnostics["random"]``, if the model's output depends on random numbers: the largest
    difference between two passes on the same inputs, relative to the largest logit.

    This is measured, with two plain forward passes, if a pass drew random numbers.

    Args:
        task: the model and its inputs.
        scores: the scores of a method.
        before: the result of :func:`random_states` before the method ran.

    Raises:
        ModelError: the output depends on random numbers, and the model is in training mode.
    """
    model = task.model
    if all(map(torch.equal, before, random_states(model))):
        return scores
    first, second = task.forward(), task.forward()
    first, second = map(without_excluded, (first, second))
    moved = float((first - second).abs().max() / first.abs().max().clamp(min=torch.finfo(first.dtype).tiny))
    if moved <= 64 * torch.finfo(first.dtype).eps:  # such as a random order of patches
        return scores
    if any(module.training for module in model.modules()):
        raise ModelError("the model is in training mode and draws random numbers, so scores vary: call model.eval()")
    warning = (
        f"the model draws random numbers: its logits differ by {moved:.0%} between two passes on this input, and the "
        "scores are those of one pass. Dropout of torch.nn.functional needs training=self.training"
    )
    return replace(scores, diagnostics={**scores.diagnostics, "random": moved}, warnings=[*scores.warnings, warning])


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.dim() > 0


def _changed(value: Tensor) -> Tensor:
    """Return other numbers of the same magnitude, a permutation of the ids, or the opposite truth values."""
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return value + noise * (value.abs().mean() + 1)
    others = value.flatten().roll(1).reshape(value.shape)
    return others if bool((others != value).any()) else torch.where(value > 0, value - 1, value + 1)


def _affects(task: Task, changed: Inputs, logits: Tensor) -> bool:
    """Return whether changed inputs change the row of logits that the target reads."""
    try:
        moved = task.forward(changed)
    except WhyformerError:  # the model fails, so it reads the input
        return True
    logits = logits.detach().to(moved)
    bound = 64 * torch.finfo(moved.dtype).eps * (1 + without_excluded(logits).abs().max())
    return moved.shape != logits.shape or bool(((moved - logits).abs() > bound).any())
