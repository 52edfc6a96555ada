"""Turn a method's scores into an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.explanation.candidates import likeliest
from whyformer.explanation.mosaic import on_pictures
from whyformer.explanation.result import Explanation
from whyformer.explanation.warnings import of_input, of_map
from whyformer.inputs import Inputs
from whyformer.methods.registry import Method
from whyformer.methods.task import Scores
from whyformer.targets import Resolver

_SOFTMAX_OF_ONE = (
    "the model ends in a softmax over a single output, so it returns the same number for every input: the number "
    "before the softmax is shown and explained (if it is the logit of a class, end the model in a sigmoid instead)"
)


@dataclass(frozen=True, eq=False)
class Finish:
    """Turns laid-out scores into the explanation of a batch. It holds no model, so results may store it.

    Attributes:
        inputs: the explained inputs.
        facts: the fields of an explanation that describe the target and the model's output.
        diagnostics: diagnostics of the target.
        warnings: warnings about the target, for all samples.
    """

    inputs: Inputs
    facts: dict[str, Any]
    diagnostics: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def of_target(self, e: Explanation) -> Explanation:
        """Return an explanation of another target as one of this target; its scores must not depend on the class."""
        parts = {name: self.of_target(part) for name, part in e.parts.items()}
        return replace(e, **self.facts, diagnostics={**e.diagnostics, **self.diagnostics}, parts=parts)

    def __call__(self, scores: Scores, method: str, settings: dict[str, Any]) -> Explanation:
        """Return the explanation of the main input, with those of other inputs as its parts. Padding scores 0."""
        first = (scores.inputs or self.inputs).name
        parts: dict[str, Explanation] = {}
        for name, part in {first: scores, **scores.parts}.items():
            explanation = replace(self._of_input(part, method, settings), input=name)
            side = self.inputs.sides.get(name)
            mosaic = None if side is None else side.mosaic
            laid_out = None if mosaic is None else on_pictures(explanation, mosaic)
            parts |= {name: explanation} if laid_out is None else laid_out
        main, *others = parts
        return replace(parts[main], parts={other: parts[other] for other in others})

    def _of_input(self, scores: Scores, method: str, settings: dict[str, Any]) -> Explanation:
        values, inputs = scores.values.detach().cpu(), scores.inputs or self.inputs
        level, grid, frames, cells = "token", None, None, None
        if scores.kind == "pixel":
            level, frames = "pixel", values.shape[1] if values.dim() == 4 else None
        elif inputs.modality == "image":
            level = "patch"
            if scores.grid is not None:
                *steps, height, width = scores.grid
                grid, frames, cells = (height, width), steps[0] if steps else None, scores.cells
        content, special = list(values), None
        if level == "token":
            values, content, special = _tokens(values, inputs)
        size = inputs.image_size
        cells = None if size is None or cells == (0, 0, size[1], size[0]) else cells
        features = replace(
            inputs.features, image_size=size, grid=grid, frames=frames, cells=cells, read=scores.read, special=special
        )
        diagnostics = {**scores.diagnostics, **self.diagnostics}
        if any(inputs.notes or ()):
            diagnostics["input"] = inputs.notes
        sizes = values.abs().flatten(1).sum(1).tolist()
        absent = [False] * len(values) if scores.absent is None else scores.absent.tolist()
        stated = [*self.warnings, *scores.warnings]
        warnings = [
            [*stated, *([] if absent[i] else of_map(row, diagnostics, i, sizes[i])), *of_input(features, i)]
            for i, row in enumerate(content)
        ]
        if any(warnings):
            diagnostics["warnings"] = warnings
        return Explanation(
            scores=values, level=level, method=method, settings=settings, features=features, diagnostics=diagnostics,
            **self.facts,
        )  # fmt: skip


def finishing(
    inputs: Inputs, model: str, resolver: Resolver, logits: Tensor, end: str = "", also: Sequence[int] = ()
) -> Finish:
    """Return the function that turns scores into explanations of a batch.

    Args:
        inputs: the explained inputs.
        model: the model's name.
        resolver: the target.
        logits: ``[B, C]`` of the batch.
        end: the function that the model applies to its logits; built-in targets use the logits before it.
        also: classes whose logits are stored even if a long row is shortened.
    """
    logits = logits.detach()
    target, names = resolver.describe(logits)
    diagnostics: dict[str, Any] = {}
    if (target_text := resolver.as_text()) is not None:
        diagnostics["target"] = target_text
    if end and not callable(resolver.reading):
        diagnostics["end_function"] = end
    activation = resolver.activation(logits)
    named = [*resolver.named(logits), *(torch.full((len(logits),), index) for index in also)]
    facts: dict[str, Any] = {"classes": None, "normalizer": None, "activation": activation, "model": model}
    facts |= {"target": target, "target_names": names, "labels": resolver.names(logits)}
    facts |= {"logits": logits.cpu()} if activation == "identity" else likeliest(logits, named)
    alone = "softmax" in end and logits.shape[-1] == 1 and "end_function" in diagnostics and not resolver.raw
    return Finish(inputs, facts, diagnostics, (_SOFTMAX_OF_ONE,) if alone else ())


def _tokens(values: Tensor, inputs: Inputs) -> tuple[Tensor, list[Tensor], list[list[int]] | None]:
    """Return (scores with 0 at padding, each sample's scores without padding and special tokens, positions of each
    sample's special tokens or None if unknown)."""
    real = torch.ones_like(values, dtype=torch.bool)
    if inputs.mask is not None and inputs.mask.shape == values.shape:
        real = inputs.mask.cpu()
    values, content, special = values.masked_fill(~real, 0), real, None
    if inputs.special is not None and inputs.special.shape == values.shape:
        special = inputs.special.cpu() & real
        content = real & ~special
    places = None if special is None else [row.nonzero()[:, 0].tolist() for row in special]
    return values, [row[mask] for row, mask in zip(values, content, strict=True)], places


def note_claims(explanation: Explanation, method: Method, settings: dict[str, Any]) -> None:
    """Add the method's :meth:`Method.claims` to ``diagnostics``, without overwriting entries."""
    for part in (explanation, *explanation.parts.values()):
        for name, value in method.claims(settings).items():
            part.diagnostics.setdefault(name, value)
