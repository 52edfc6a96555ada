"""Occlusion: what the target loses when a patch or token is taken out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from whyformer.baselines import BASELINES
from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.inputs.removal import Removal, logits_without, removal, values_of
from whyformer.methods.registry import Count, OptionalCount, OptionalNatural, method, name_or_token
from whyformer.methods.task import Scores, Task

Baseline = Annotated[str | int | None, name_or_token(None, *BASELINES)]


@method(
    "drop of the target when a patch or token is replaced by a baseline",
    family="perturbation",
    signed=True,
    citation="Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, ECCV 2014; survey 2.3",
    anywhere=True,
)
def occlusion(
    task: Task,
    *,
    baseline: Baseline = None,
    window: Count = 1,
    stride: OptionalCount = None,
    batch_size: Count = 16,
    patch: OptionalCount = None,
    fill_id: OptionalNatural = None,
) -> Scores:
    """score_i = mean over the windows w that hold feature i of f(x) − f(x with w replaced by the baseline).

    f is the target: a logit by default, a probability with :class:`whyformer.targets.Probability`. The black-box
    reference: it needs nothing but forward passes, one for each window. In a multiple choice, tokens of each
    text that f depends on are taken out.

    Args:
        baseline: pictures: "zero" (0 in model space, which is the processor's mean colour; default), "black" (0 before
            normalisation; needs the processor), "mean" (each channel's mean over this picture), "blur" (the picture
            blurred with σ = one window), "noise" (uniform between black and white; needs the processor). Text: "mask",
            "unk", "pad" (that token of the tokenizer; default the first it has) or "delete" (the token is taken out
            and the others move up; the default without a tokenizer, where
            there is an attention mask; one token at least must stay). Without a tokenizer where nothing can be deleted
            (a multiple choice, a target read at a token's number) the ids that the model's config knows. Vectors:
            "zero", "mean". A number is the id of the token that stands in.
        window: patches along each side, or tokens, replaced at once. Special tokens (without a tokenizer: those that
            end a text) and padding are never replaced.
        stride: patches or tokens from one window to the next; default ``window``, and never more.
        batch_size: forward passes at once.
        patch: side of a patch in pixels; default what the model's config says (16 if nothing), doubled until there are
            no more than 2048 patches (Swin's are 4 pixels wide).
        fill_id: the same as an id as ``baseline``.

    Raises:
        InputError: a baseline that does not fit the input or that the tokenizer lacks, or stride > window.
    """
    stride = window if stride is None else stride
    if stride > window:
        raise InputError(f"{task.method}: stride={stride} is more than window={window}, which would skip features")
    removals = [
        removal(task, baseline, fill_id=fill_id, patch=patch, window=window, choice=choice)
        for choice in _choices(task.inputs)
    ]
    removed, logits = removals[0], task.forward()
    if removed.choice is not None:
        depends = task.depends_on(logits).cpu()
        removals = [replace(one, features=one.features & depends[:, [k]]) for k, one in enumerate(removals)]
    found = [_drops(task, one, window, stride, logits, batch_size) for one in removals]
    values = torch.stack([values for values, _ in found], 1).flatten(0, 1)
    diagnostics: dict[str, Any] = {"forwards": sum(count for _, count in found) + len(logits)}
    diagnostics["baseline"] = removed.baseline
    if removed.cell is not None:
        diagnostics["cell"] = "{}×{} pixels".format(*removed.cell)
    kind = "token" if removed.grid is None else "patch"
    return Scores(values, logits, kind, diagnostics, removed.grid, removed.box)


def _choices(inputs: Inputs) -> list[Tensor | None]:
    """``[B]`` for each choice of a multiple choice; None for other inputs."""
    if inputs.choices is None:
        return [None]
    return [torch.full((inputs.batch,), k) for k in range(inputs.choices)]


def _drops(
    task: Task, removed: Removal, window: int, stride: int, logits: Tensor, batch_size: int
) -> tuple[Tensor, int]:
    """``[B, P]`` mean drop of the target over the windows that hold each feature, and the number of windows."""
    jobs = [(b, w) for b in range(task.inputs.batch) for w in _windows(removed, b, window, stride)]
    target = task.resolve(logits)
    clean = target(logits)
    total = torch.zeros(removed.features.shape, dtype=clean.dtype)
    count = torch.zeros_like(total)
    if jobs:
        owners = [b for b, _ in jobs]
        rows = logits_without(task, removed, jobs, batch_size, "occlusion")
        drops = (clean[owners] - values_of(target, rows, owners, logits)).cpu()
        for (b, w), drop in zip(jobs, drops, strict=True):
            total[b, list(w)] += drop
            count[b, list(w)] += 1
    return total / count.clamp(min=1), len(jobs)


def _windows(removed: Removal, sample: int, window: int, stride: int) -> Iterator[list[int]]:
    """Features of each window; the last windows are cut at the border."""
    if removed.grid is None:
        positions = removed.features[sample].nonzero()[:, 0].tolist()
        yield from (positions[i : i + window] for i in _starts(len(positions), window, stride))
        return
    rows, columns = removed.grid
    for top in _starts(rows, window, stride):
        for left in _starts(columns, window, stride):
            across = range(left, min(left + window, columns))
            yield [r * columns + c for r in range(top, min(top + window, rows)) for c in across]


def _starts(length: int, window: int, stride: int) -> range:
    """Where windows begin, until one reaches the end."""
    return range(0, max(length - window + stride, 1) if length else 0, stride)
