"""Why a method that needs one row for each token may have failed: what a model's blocks hand on, measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.methods.task import Task


def odd_rows(task: Task) -> str | None:
    """The reason, or None where every block hands on one row for each token and attends from these.

    Costs one plain forward pass.
    """
    shapes: list[tuple[int, ...]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
        shapes.append(tuple(given[0].shape) if given else ())

    modules = [block for block in task.all_blocks if isinstance(block, nn.Module)]
    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in modules]
    try:
        with torch.no_grad():
            task.forward()
    finally:
        for handle in handles:
            handle.remove()
    versions = next((shape for shape in shapes if len(shape) > 3), None)
    if versions is not None:
        return (
            f"what enters its blocks, {list(versions)}, is more than one row for each token (several versions of "
            "it, or a map of rows and columns)"
        )
    for attention in task.structure.attentions:
        shape = shapes[attention.block] if attention.block is not None and attention.block < len(shapes) else ()
        if len(shape) == 3 and attention.shape[1] not in shape[:2]:
            return (
                f"a block of it attends from {attention.shape[1]} rows at a time where {list(shape[:2])} enter it, so "
                "which row is whose is unknown"
            )
    return None


def check_samples(logits: Tensor, inputs: Inputs) -> None:
    """Refuse rows of logits of several samples that are one in the input (whose pictures are packed into one row)."""
    if len(logits) != inputs.batch:
        raise InputError(
            f"the model gives {len(logits)} rows of logits for {inputs.batch} of {inputs.name}, so which belongs to "
            "which is unknown: explain the samples one at a time"
        )
