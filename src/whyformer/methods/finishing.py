"""From a method's scores to an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.explanation.candidates import Candidates, likeliest
from whyformer.explanation.doubts import of_input, of_map
from whyformer.explanation.mosaic import on_pictures
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.methods.registry import Method
from whyformer.methods.task import Scores
from whyformer.targets import Resolver


@dataclass(frozen=True, eq=False)
class Finish:
    """From laid-out scores to the explanation of a batch. It holds no model, so a result may keep it.

    Attributes:
        inputs: what was explained.
        model: the model's name.
        target: ``[B]`` the class that is explained of each sample; names: what the targets are called.
        outputs: the logits that are kept, of which classes, and what turns them into probabilities.
        labels: class index -> name, where known.
        diagnostics: what there is to say of the target.
    """

    inputs: Inputs
    model: str
    target: Tensor
    names: list[str]
    outputs: Candidates
    activation: str
    labels: dict[int, str] | None
    diagnostics: dict[str, Any]

    def __call__(self, scores: Scores, method: str, settings: dict[str, Any]) -> Explanation:
        """The explanation of these scores: one of the main input, those of other inputs as its parts; padding gets no
        score."""
        first = (scores.inputs or self.inputs).name
        parts: dict[str, Explanation] = {}
        for name, part in {first: scores, **scores.parts}.items():
            made = replace(self._of_input(part, method, settings), input=name)
            mosaic = self.inputs.side(name).mosaic if name in (self.inputs.name, *self.inputs.others) else None
            laid = None if mosaic is None else on_pictures(made, mosaic)
            parts |= {name: made} if laid is None else laid
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
                *steps, high, wide = scores.grid
                grid, frames, cells = (high, wide), steps[0] if steps else None, scores.cells
        shown, special = list(values), None
        if level == "token":
            values, shown, special = _tokens(values, inputs)
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
        warned = [
            [*scores.warnings, *([] if absent[i] else of_map(row, diagnostics, i, sizes[i])), *of_input(features, i)]
            for i, row in enumerate(shown)
        ]
        if any(warned):
            diagnostics["warnings"] = warned
        return Explanation(
            scores=values, level=level, method=method, settings=settings, target=self.target, **vars(self.outputs),
            target_names=self.names, features=features, labels=self.labels, activation=self.activation,
            diagnostics=diagnostics, model=self.model,
        )  # fmt: skip


def finishing(
    inputs: Inputs, model: str, resolver: Resolver, logits: Tensor, end: str = "", also: Sequence[int] = ()
) -> Finish:
    """What makes explanations of a batch from scores, once its logits ``[B, C]`` are known.

    Args:
        end: the function that the model's logits go through at its end, which a target of ours is read before.
        also: classes whose logits are kept in any case, of a row of many.
    """
    logits = logits.detach()
    target, names = resolver.describe(logits)
    diagnostics: dict[str, Any] = {}
    if (written := resolver.written()) is not None:
        diagnostics["target"] = written
    if end and not callable(resolver.reading):
        diagnostics["end_function"] = end
    activation = resolver.activation(logits)
    named = [*resolver.named(logits), *(torch.full((len(logits),), one) for one in also)]
    kept = Candidates(logits.cpu()) if activation == "identity" else likeliest(logits, named)
    return Finish(inputs, model, target, names, kept, activation, resolver.names(logits), diagnostics)


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
