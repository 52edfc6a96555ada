"""Occlusion: the drop of the target when a patch or token is removed."""

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
from whyformer.methods.registry import Count, OptionalCount, method, name_or_token
from whyformer.methods.task import Scores, Task

Baseline = Annotated[str | int | None, name_or_token(None, *BASELINES)]


@method(
    "drop of the target when a patch or token is replaced by a baseline",
    family="perturbation",
    signed=True,
    citation="Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, ECCV 2014",
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
) -> Scores:
    """score_i = mean over the windows w that contain feature i of f(x) − f(x with w replaced by the baseline).

    f is the target: a logit by default, a probability with :class:`whyformer.targets.Probability`. This is the
    black-box reference, which needs only forward passes, one per window. For multiple choice, tokens of each text that
    f depends on are replaced.

    Args:
        baseline: pictures: "zero" (0 in model space, the processor's mean colour; default), "black" (0 before
            normalisation; needs the processor), "mean" (each channel's mean over the picture), "blur" (the picture
            blurred with σ = one window), "noise" (uniform between black and white; needs the processor). Text: "mask",
            "unk", "pad" (that token; default: the first that the tokenizer has) or "delete" (the token is deleted and
            the others move up; at least one token must remain; default without a tokenizer if there is an attention
            mask). Without a tokenizer where tokens cannot be deleted (multiple choice, a target at a token's
            position), the default is a token of the model's config. Vectors: "zero", "mean". A number is the id of the
            replacing token.
        window: side of the window in patches, or its length in tokens. Special tokens (without a tokenizer:
            end-of-text tokens) and padding are never replaced.
        stride: patches or tokens from one window to the next, at most ``window``; default ``window``.
        batch_size: forward passes at once.
        patch: side of a patch in pixels; default: the patch size in the model's config, that of the convolution that
            cuts the picture into patches, or 16, doubled until there are at most 2048 patches (Swin's are 4 pixels
            wide).

    Raises:
        InputError: the baseline does not fit the input or is missing in the tokenizer, or stride > window.
    """
    stride = window if stride is None else stride
    if stride > window:
        raise InputError(f"{task.method}: stride={stride} must not exceed window={window}, or features are skipped")
    removals = [
        removal(task, baseline, patch=patch, window=window, choice=choice)
        for choice in _choices(task.inputs)
    ]
    removed, logits = removals[0], task.forward()
    if removed.choice is not None:
        depends = task.depends_on(logits).cpu()
        removals = [replace(r, features=r.features & depends[:, [k]]) for k, r in enumerate(removals)]
    drops = [_drops(task, r, window, stride, logits, batch_size) for r in removals]
    values = torch.stack([values for values, _ in drops], 1).flatten(0, 1)
    diagnostics: dict[str, Any] = {"forwards": sum(count for _, count in drops) + len(logits)}
    diagnostics["baseline"] = removed.baseline
    if removed.cell is not None:
        diagnostics["cell"] = "{}×{} pixels".format(*removed.cell)
    kind = "token" if removed.grid is None else "patch"
    return Scores(values, logits, kind, diagnostics, removed.grid, removed.box)


def _choices(inputs: Inputs) -> list[Tensor | None]:
    """Return one tensor ``[B]`` per text of multiple choice; [None] for other inputs."""
    if inputs.choices is None:
        return [None]
    return [torch.full((inputs.batch,), k) for k in range(inputs.choices)]


def _drops(
    task: Task, removed: Removal, window: int, stride: int, logits: Tensor, batch_size: int
) -> tuple[Tensor, int]:
    """Return (mean drop ``[B, P]`` of the target over the windows that contain each feature, number of windows)."""
    jobs = [(b, w) for b in range(task.inputs.batch) for w in _windows(removed, b, window, stride)]
    target = task.target(logits)
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
    """Yield the features of each window; the last windows are truncated at the border."""
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
    """Return the positions where windows begin, up to the first window that reaches the end."""
    return range(0, max(length - window + stride, 1) if length else 0, stride)
