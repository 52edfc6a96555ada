"""Several texts of each sample: those of a multiple choice, and those that a picture is compared with.

Each text has a logit of its own, so ∂target/∂logits shows which texts the target depends on. Each of these texts gets
scores, in a part of its own.
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

_SAME, _INDEPENDENT = "the scores of this text are those of '{}'", "the target does not depend on this text"


def each_text(task: Task, scores: Scores) -> Scores:
    """Split scores of several texts of each sample into one part for each text that the target depends on.

    The part ``name`` holds the text with the largest ∂target/∂logit, the part ``name[k]`` text k. In a batch, the
    scores of ``name[k]`` are 0 for a sample whose target does not depend on text k, or whose part ``name`` holds it.
    The notes of that part say so.
    """
    scores = _by_text(task, scores)
    main = (scores.inputs or task.inputs).name
    made: dict[str, Scores] = {}
    for name, one in {main: replace(scores, parts={}), **scores.parts}.items():
        made |= _parts(task, name, one) if _is_by_text(one) else {name: one}
    return replace(made.pop(main), parts=made)


def _is_by_text(one: Scores) -> bool:
    return one.kind == "token" and one.values.dim() == 3


def _by_text(task: Task, scores: Scores) -> Scores:
    """The scores with those of C texts of each sample as ``[B, C, N]``; without parts whose rows are not known to be of
    one sample each.

    Raises:
        MethodNotApplicable: the main scores are of such rows.
    """
    main = (scores.inputs or task.inputs).name
    made: dict[str, Scores] = {}
    for name, one in {main: scores, **scores.parts}.items():
        values = _values_by_text(task, name, one)
        if values is not None:
            made[name] = replace(one, values=values)
        elif name == main:
            raise task.refuse(f"which of the texts of '{name}' the target depends on is unknown", verdict=NOT_YET)
    return replace(made.pop(main), parts=made)


def _values_by_text(task: Task, name: str, one: Scores) -> Tensor | None:
    """The scores of one input, ``[B, C, N]`` of C texts of each sample; None if which rows are whose is unknown."""
    side, values = one.inputs or task.inputs, one.values
    batch, count = task.inputs.batch, one.logits.shape[-1]
    if _is_by_text(one):
        return values
    if side.choices is not None:
        return values.unflatten(0, (batch, count)) if count == side.choices else None
    if name in task.inputs.shared:
        return _of_samples(task, values, one.logits) if len(values) == count else None
    if one.kind == "token" and batch != len(values) == batch * count:
        return values.unflatten(0, (batch, count))
    return values if name == task.inputs.name or len(values) == batch else None


def _of_samples(task: Task, values: Tensor, logits: Tensor) -> Tensor:
    """``[B, C, N]`` from ``[C, N]`` of texts that all samples share, each of which has scores of one sample."""
    depends = task.depends_on(logits)
    return torch.where(depends[..., None].to(values.device), values, 0)


def _parts(task: Task, name: str, one: Scores) -> dict[str, Scores]:
    """Scores ``[B, C, N]`` of texts as one part for each text."""
    side, values, (batch, count) = one.inputs or task.inputs, one.values, one.values.shape[:2]
    first, depends = task.value_index(one.logits).cpu(), task.depends_on(one.logits).cpu()
    samples = torch.arange(batch)
    numbers = torch.arange(count).expand(batch, -1)
    if name not in task.inputs.shared:
        numbers = numbers + count * samples[:, None]
    others = depends.index_put((samples, first), torch.tensor(False))
    own = values[samples.to(values.device), first.to(values.device)]
    facts = replace(side.select_features(numbers[samples, first].tolist()), notes=side.notes)
    found = {name: replace(one, values=own, inputs=facts)}
    for k in others.any(0).nonzero().flatten().tolist():
        mine = others[:, k]
        said = [[] if own else [_SAME.format(name) if depends[b, k] else _INDEPENDENT] for b, own in enumerate(mine)]
        facts = replace(side.select_features(numbers[:, k].tolist()), notes=said)
        own = values[:, k] * mine[:, None].to(values)
        found[f"{name}[{k}]"] = Scores(own, one.logits, one.kind, inputs=facts, absent=~mine)
    return found


# -- texts that several samples share ----------------------------------------------------------------------------------
def in_groups(task: Task, run: Callable[[Task], Scores]) -> Scores:
    """Scores of groups of samples, no two of which depend on one text: in one walk back from the targets of both, what
    arrives at that text would add up.

    Costs one plain forward pass where samples share texts. Texts have scores ``[B, C, N]`` if there are several groups.
    """
    if not task.inputs.shared or task.inputs.batch == 1:
        return run(task)
    logits = task.forward()
    groups = _apart(task.depends_on(logits))
    if len(groups) == 1:
        return run(task)
    made = []
    for group in groups:
        some = task.of_samples(group, logits)
        made.append(_by_text(some, run(some)))
    return _together(task, groups, made, logits)


def _apart(depends: Tensor) -> list[list[int]]:
    """Groups of samples, no two of which depend on one text.

    Args:
        depends: ``[B, C]``.
    """
    groups: list[list[int]] = []
    for b, own in enumerate(depends):
        fitting = next((group for group in groups if not bool((depends[group] & own).any())), None)
        if fitting is None:
            groups.append([b])
        else:
            fitting.append(b)
    return groups


def _together(task: Task, groups: Sequence[list[int]], made: Sequence[Scores], logits: Tensor) -> Scores:
    """The scores of all samples in their order."""
    order = torch.tensor([sample for group in groups for sample in group]).argsort()

    def joined(some: Sequence[Scores]) -> Scores:
        values = torch.cat([one.values for one in some])
        name = some[0].inputs.name if some[0].inputs is not None else task.inputs.name
        known = name in (task.inputs.name, *task.inputs.others)
        side = task.inputs.side(name) if known else some[0].inputs
        each = [of_sample(one.diagnostics, i) for one, own in zip(some, groups, strict=True) for i in range(len(own))]
        diagnostics, values = of_batch([each[i] for i in order.tolist()]), values[order.to(values.device)]
        return replace(some[0], values=values, logits=logits, inputs=side, diagnostics=diagnostics, parts={})

    parts = {n: joined([one.parts[n] for one in made]) for n in made[0].parts if all(n in one.parts for one in made)}
    return replace(joined(made), parts=parts)
