"""What is measured around a method: whether its rows are samples, and which inputs it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS, InputError, WhyformerError
from whyformer.inputs import Inputs, called, stands_beside
from whyformer.methods.task import Scores, Task
from whyformer.models.readout import plain_logits


def check_samples(task: Task, logits: Tensor) -> None:
    """Refuse rows of logits that are not those of the samples, and rows of numbers ``[N, D]`` that are one sample."""
    inputs = task.inputs
    inputs.check_rows(logits)
    if inputs.modality != "tensor" or inputs.tensor.dim() > 2 or inputs.batch == 1:
        return
    alone = task.forward(inputs.select(slice(0, 1)))[0].detach().to(logits)
    if bool(((alone - logits[0]).abs() > 1e-2 * (1 + logits[0].abs())).any()):
        raise InputError(
            f"the rows of {inputs.name} {list(inputs.tensor.shape)} are no samples, for the model says something else "
            "of the first of them alone: one sample [N, D] needs a leading axis of 1"
        )


def check_choices(model: nn.Module, inputs: Inputs) -> None:
    """Refuse ids ``[B, C, N]`` that are no multiple choice: each of the C texts of a sample must have a logit of its
    own, which the others do not change.

    Costs three plain forward passes of one sample, for such ids alone.
    """
    if inputs.choices is None:
        return
    try:
        if _has_own_logits(model, inputs.select(slice(0, 1)), inputs.choices):
            return
    except WhyformerError:  # its output is of another kind
        pass
    except FOREIGN_ERRORS:  # it fails again where that is reported
        return
    batch, count, length = inputs.tensor.shape
    name = inputs.name
    raise InputError(
        f"{name} [{batch}, {count}, {length}] holds {count} texts for each sample, and the model has no logit for each "
        "of them, so this is no multiple choice, whose texts are explained one by one. To explain all as one, give a "
        f"module that takes {name} [{batch}, {count * length}] (and a mask likewise) and hands "
        f"{name}.view(-1, {count}, {length}) on to the model"
    )


def _has_own_logits(model: nn.Module, one: Inputs, count: int) -> bool:
    """Whether of a sample's texts the first changes the first logit only, and the others only the others."""
    ids, turned = one.tensor, one.tensor.flip(2)
    others = turned if bool((turned != ids).any()) else _changed(ids)
    first = torch.arange(count, device=ids.device)[:, None] == 0
    variants = (ids, torch.where(first, others, ids), torch.where(first, ids, others))
    logits, one_moved, others_moved = (plain_logits(model, *one.with_tensor(v).feed)[0] for v in variants)
    if len(logits) != count:
        return False
    return bool(_close(one_moved[1:], logits[1:]).all()) and bool(_close(others_moved[:1], logits[:1]).all())


def _close(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= 1e-3 * (1 + b.abs())


def with_unscored(task: Task, scores: Scores) -> Scores:
    """The scores, with a warning that names the inputs which the prediction depends on and which get none; also
    ``diagnostics["unscored"]``.

    Masks, kinds and positions of tokens are none of these. Costs one plain forward pass for each input without scores,
    which is changed there.
    """
    left = [name for name, changed in _without(task, scores) if _matters(task, changed, scores.logits)]
    if not left:
        return scores
    way = "input_x_gradient gives scores to every input"
    if not set(left) <= task.inputs.others.keys():
        way = "wrap the model so that it takes them as numbers [B, F], vectors [B, N, D] or ids [B, N]"
    said = f"the prediction depends on {', '.join(left)} too, to which {task.method} gives no scores: {way}"
    return replace(scores, diagnostics={**scores.diagnostics, "unscored": left}, warnings=[*scores.warnings, said])


def _without(task: Task, scores: Scores) -> Iterator[tuple[str, Inputs]]:
    """(name, the inputs with that one changed) of each that gets no scores."""
    inputs = task.inputs
    scored = {inputs.scored, *(one.inputs.scored for one in scores.parts.values() if one.inputs is not None)}
    given: list[tuple[int | str, Any]] = [*enumerate(inputs.args), *inputs.kwargs.items()]
    for place, value in given:
        if place in scored or not isinstance(value, Tensor) or value.dtype == torch.bool:
            continue
        name = place if isinstance(place, str) else called(task.model, place)
        if value.dim() and not stands_beside(name):
            other = _changed(value)
            args = tuple(other if i == place else a for i, a in enumerate(inputs.args))
            kwargs = {n: other if n == place else v for n, v in inputs.kwargs.items()}
            yield name, replace(inputs, args=args, kwargs=kwargs)


def _changed(value: Tensor) -> Tensor:
    """Other numbers of the same size; other ids among those that are there."""
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return value + noise * (value.abs().mean() + 1)
    others = value.flatten().roll(1).reshape(value.shape)
    return others if bool((others != value).any()) else torch.where(value > 0, value - 1, value + 1)


def _matters(task: Task, changed: Inputs, logits: Tensor) -> bool:
    """Whether the row that the target is about becomes another."""
    try:
        moved = task.forward(changed)
    except WhyformerError:  # it is used, at least
        return True
    logits = logits.detach().to(moved)
    bound = 64 * torch.finfo(moved.dtype).eps * (1 + logits.abs().max())
    return moved.shape != logits.shape or bool(((moved - logits).abs() > bound).any())
