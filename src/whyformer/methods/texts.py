"""Scores of several texts per sample: those of multiple choice, and those that a picture is compared with.

Each text has one logit, so ∂target/∂logits shows which texts the target depends on. The scores of each of these texts
are stored in a separate part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.explanation.per_sample import of_batch, of_sample
from whyformer.methods.scores import Scores
from whyformer.methods.structure import NOT_YET

if TYPE_CHECKING:
    from whyformer.methods.task import Task

__all__ = ["each_text", "in_groups"]

_SAME, _INDEPENDENT = "the scores of this text are in the part '{}'", "the target does not depend on this text"


def each_text(task: Task, scores: Scores) -> Scores:
    """Split scores of several texts per sample into one part for each text that the target depends on.

    The part ``name`` holds the text with the largest ∂target/∂logit, the part ``name[k]`` text k. In a batch, the
    scores of ``name[k]`` are 0, with a note, for a sample whose target does not depend on text k, or whose part
    ``name`` holds text k.
    """
    scores = _by_text(task, scores)
    main = (scores.inputs or task.inputs).name
    parts: dict[str, Scores] = {}
    for name, part in {main: replace(scores, parts={}), **scores.parts}.items():
        parts |= _parts(task, name, part) if _is_by_text(part) else {name: part}
    return replace(parts.pop(main), parts=parts)


def _is_by_text(part: Scores) -> bool:
    return part.kind == "token" and part.values.dim() == 3


def _by_text(task: Task, scores: Scores) -> Scores:
    """Reshape scores of C texts per sample to ``[B, C, N]``, and drop parts whose rows cannot be assigned to samples.

    Raises:
        MethodNotApplicable: the rows of the main scores cannot be assigned to samples.
    """
    main = (scores.inputs or task.inputs).name
    parts: dict[str, Scores] = {}
    for name, part in {main: scores, **scores.parts}.items():
        values = _values_by_text(task, name, part)
        if values is not None:
            parts[name] = replace(part, values=values)
        elif name == main:
            raise task.refuse(f"it is unknown on which texts of '{name}' the target depends", verdict=NOT_YET)
    return replace(parts.pop(main), parts=parts)


def _values_by_text(task: Task, name: str, part: Scores) -> Tensor | None:
    """Return the scores of one input, ``[B, C, N]`` for C texts per sample; None if rows cannot be assigned to samples.
    """
    side, values = part.inputs or task.inputs, part.values
    batch, count = task.inputs.batch, part.logits.shape[-1]
    if _is_by_text(part):
        return values
    if side.choices is not None:
        return values.unflatten(0, (batch, count)) if count == side.choices else None
    if name in task.inputs.shared:
        return _of_samples(task, values, part.logits) if len(values) == count else None
    if part.kind == "token" and batch != len(values) == batch * count:
        return values.unflatten(0, (batch, count))
    return values if name == task.inputs.name or len(values) == batch else None


def _of_samples(task: Task, values: Tensor, logits: Tensor) -> Tensor:
    """Return ``[B, C, N]`` from scores ``[C, N]`` of texts that samples share, each with the scores of one sample."""
    depends = task.depends_on(logits)
    return torch.where(depends[..., None].to(values.device), values, 0)


def _parts(task: Task, name: str, scores: Scores) -> dict[str, Scores]:
    """Split scores ``[B, C, N]`` into one part per text."""
    side, values, (batch, count) = scores.inputs or task.inputs, scores.values, scores.values.shape[:2]
    first, depends = task.value_index(scores.logits).cpu(), task.depends_on(scores.logits).cpu()
    samples = torch.arange(batch)
    numbers = torch.arange(count).expand(batch, -1)
    if name not in task.inputs.shared:
        numbers = numbers + count * samples[:, None]
    others = depends.index_put((samples, first), torch.tensor(False))
    own_scores = values[samples.to(values.device), first.to(values.device)]
    facts = replace(side.select_features(numbers[samples, first].tolist()), notes=side.notes)
    parts = {name: replace(scores, values=own_scores, inputs=facts)}
    for k in others.any(0).nonzero().flatten().tolist():
        has = others[:, k]
        notes = [[] if h else [_SAME.format(name) if depends[b, k] else _INDEPENDENT] for b, h in enumerate(has)]
        facts = replace(side.select_features(numbers[:, k].tolist()), notes=notes)
        own_scores = values[:, k] * has[:, None].to(values)
        parts[f"{name}[{k}]"] = Scores(own_scores, scores.logits, scores.kind, inputs=facts, absent=~has)
    return parts


# -- texts that several samples share ----------------------------------------------------------------------------------
def in_groups(task: Task, run: Callable[[Task], Scores]) -> Scores:
    """Run a method on groups of samples whose targets depend on different texts. In one backward walk, the flows of two
    samples that depend on the same shared text would be summed there.

    If samples share texts, this costs one plain forward pass. With several groups, texts have scores ``[B, C, N]``.
    """
    if not task.inputs.shared or task.inputs.batch == 1:
        return run(task)
    logits = task.forward()
    groups = _disjoint(task.depends_on(logits))
    if len(groups) == 1:
        return run(task)
    results = []
    for group in groups:
        some = task.of_samples(group, logits)
        results.append(_by_text(some, run(some)))
    return _joined(task, groups, results, logits)


def _disjoint(depends: Tensor) -> list[list[int]]:
    """Group samples so that no two of a group depend on the same text.

    Args:
        depends: ``[B, C]`` whether the target of sample b depends on text c.
    """
    groups: list[list[int]] = []
    for b, row in enumerate(depends):
        fitting = next((group for group in groups if not bool((depends[group] & row).any())), None)
        if fitting is None:
            groups.append([b])
        else:
            fitting.append(b)
    return groups


def _joined(task: Task, groups: Sequence[list[int]], results: Sequence[Scores], logits: Tensor) -> Scores:
    """Join the scores of all groups in the order of the samples."""
    order = torch.tensor([sample for group in groups for sample in group]).argsort()

    def joined(some: Sequence[Scores]) -> Scores:
        values = torch.cat([scores.values for scores in some])
        name = some[0].inputs.name if some[0].inputs is not None else task.inputs.name
        side = task.inputs.sides.get(name, some[0].inputs)
        pairs = zip(some, groups, strict=True)
        by_sample = [of_sample(scores.diagnostics, i) for scores, group in pairs for i in range(len(group))]
        diagnostics, values = of_batch([by_sample[i] for i in order.tolist()]), values[order.to(values.device)]
        return replace(some[0], values=values, logits=logits, inputs=side, diagnostics=diagnostics, parts={})

    names = [n for n in results[0].parts if all(n in scores.parts for scores in results)]
    parts = {n: joined([scores.parts[n] for scores in results]) for n in names}
    return replace(joined(results), parts=parts)
