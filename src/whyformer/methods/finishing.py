"""From a method's scores to the explanation of one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whyformer.explanation.candidates import Candidates, likeliest
from whyformer.explanation.doubts import of_input, of_map
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.methods.registry import Method
from whyformer.methods.task import Scores
from whyformer.targets import Resolver


def finish(
    scores: Scores,
    inputs: Inputs,
    resolver: Resolver,
    method: str,
    settings: dict[str, Any],
    end: str = "",
    also: Sequence[int] = (),
) -> Explanation:
    """The explanation of laid-out scores; padding gets none.

    Args:
        end: the function that the model's logits go through at its end, which a target of ours is read before.
        also: classes whose logits are kept in any case, of a row of many.
    """
    values, logits = scores.values.detach().cpu(), scores.logits.detach()
    level, grid, frames, cells = "token", None, None, None
    if scores.kind == "pixel":
        level, frames = "pixel", values.shape[1] if values.dim() == 4 else None
    elif inputs.modality == "image":
        level = "patch"
        if scores.grid is not None:
            *steps, high, wide = scores.grid
            grid, frames, cells = (high, wide), steps[0] if steps else None, scores.cells
    shown, special = list(values), None
    if level == "token":
        values, shown, special = _tokens(values, inputs)
    index, names = resolver.describe(logits)
    diagnostics = dict(scores.diagnostics)
    if (written := resolver.written()) is not None:
        diagnostics["target"] = written
    if end and not callable(resolver.reading):
        diagnostics["end_function"] = end
    if any(inputs.notes or ()):
        diagnostics["input"] = inputs.notes
    size = inputs.image_size
    cells = None if size is None or cells == (0, 0, size[1], size[0]) else cells
    features = replace(
        inputs.features, image_size=size, grid=grid, frames=frames, cells=cells, read=scores.read, special=special
    )
    sizes = values.abs().flatten(1).sum(1).tolist()
    absent = [False] * len(values) if scores.absent is None else scores.absent.tolist()
    warned = [
        [*scores.warnings, *([] if absent[i] else of_map(row, diagnostics, i, sizes[i])), *of_input(features, i)]
        for i, row in enumerate(shown)
    ]
    if any(warned):
        diagnostics["warnings"] = warned
    activation = resolver.activation(logits)
    named = [*resolver.named(logits), *(torch.full((len(logits),), one) for one in also)]
    kept = Candidates(logits.cpu()) if activation == "identity" else likeliest(logits, named)
    return Explanation(
        scores=values, level=level, method=method, settings=settings, target=index, **vars(kept),
        target_names=names, features=features, labels=resolver.names(logits),
        activation=activation, diagnostics=diagnostics,
    )  # fmt: skip


def _tokens(values: Tensor, inputs: Inputs) -> tuple[Tensor, list[Tensor], list[list[int]] | None]:
    """(the scores with 0 at padding, those of each sample without padding and special tokens, places of the special
    tokens of each, where they are known)."""
    real = torch.ones_like(values, dtype=torch.bool)
    if inputs.mask is not None and inputs.mask.shape == values.shape:
        real = inputs.mask.cpu()
    values, shown, special = values.masked_fill(~real, 0), real, None
    if inputs.special is not None and inputs.special.shape == values.shape:
        special = inputs.special.cpu() & real
        shown = real & ~special
    places = None if special is None else [row.nonzero()[:, 0].tolist() for row in special]
    return values, [own[kept] for own, kept in zip(values, shown, strict=True)], places


def note_claims(explanation: Explanation, chosen: Method, settings: dict[str, Any]) -> None:
    """Note what the method says of its scores (:meth:`Method.claims`) in ``diagnostics``, where they do not say it."""
    for part in (explanation, *explanation.parts.values()):
        for name, value in chosen.claims(settings).items():
            part.diagnostics.setdefault(name, value)
