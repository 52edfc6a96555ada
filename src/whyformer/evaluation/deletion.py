"""``token_deletion``: the best tokens are deleted one by one; what the target loses decides which stands first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.evaluation.case import read_target
from whyformer.explaining import open_model
from whyformer.explanation.result import Explanation
from whyformer.inputs.removal import Removal, logits_without, removal, values_of
from whyformer.methods.task import Scores, Task
from whyformer.models.kinds import LANGUAGE
from whyformer.models.output import decodes
from whyformer.options import Keywords, shows_options
from whyformer.targets import Target

_BATCH_SIZE = 16
_NAME = "token_deletion"


@shows_options
def token_deletion(
    model: Any,
    inputs: Any,
    explanation: Explanation,
    count: int = 3,
    processor: Any = None,
    *,
    target: Target = None,
    **options: Unpack[Keywords],
) -> Explanation:
    """Order the ``count`` best tokens of each text by what the target loses without each of them.

    d_j = f(x) − f(x without token j). The scores of these tokens are handed out among them so that the highest goes to
    the largest d_j; all other scores, and the sum of all, stay. A language model's tokens are deleted, those of other
    models are replaced as the method ``occlusion`` does.

    Where one of the best tokens is the very token that a language model says next, a word may have been copied from any
    of its places: behind the best token come these, and then the other best ones. Each such place is made to say the
    likeliest other token instead (symmetric token replacement, Zhang & Nanda, ICLR 2024): without the word "Sam lives
    in. Iris lives in Rome." tells of one place only, and deletion hardly matters.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`.
        explanation: of these inputs, with a score for each token.
        count: how many tokens of each text are deleted, 1 to 256: each costs a forward pass.
        target: as for :func:`whyformer.explain`; the explained one by default.

    Returns:
        The explanation with its scores in the new order. ``diagnostics["token_deletion"]``: for each text the
        ``"tokens"`` by number in their new order, what the target has ``"lost"`` without each, the token that stood
        ``"instead"`` of a place of the one that is said (None for the others), and the ``"baseline"``.

    Raises:
        InputError: the scores are not of single tokens, or no token can be deleted.

    References:
        Zhang & Nanda, Towards Best Practices of Activation Patching in Language Models, ICLR 2024.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 256:
        raise InputError(f"count is how many of the best tokens are deleted, a whole number from 1 to 256: {count!r}")
    ready = open_model(model, processor, **options).prepare(inputs)
    task = ready.task(ready.resolver(read_target(target, explanation)), _NAME)
    values, told = reranked(task, Scores(explanation.scores, task.forward()), count)
    return replace(explanation, scores=values, diagnostics={**explanation.diagnostics, _NAME: told})


def reranked(task: Task, scores: Scores, count: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """``[B, N]`` scores in the order of :func:`token_deletion`, and what it says of each text.

    Args:
        scores: with the logits of the plain forward pass.
    """
    if task.inputs.modality != "text":
        kind = "a picture" if task.inputs.modality == "image" else "no text"
        raise InputError(f"token_deletion takes tokens out one at a time, and this input is {kind}")
    speaks = LANGUAGE.get(task.model, False) and not task.counted and task.inputs.tensor.dim() == 2
    removed = _removal(task, "delete" if speaks else None)
    values, features = scores.values, removed.features
    if values.shape != features.shape:
        raise InputError(
            f"token_deletion needs a score for each token, {list(features.shape)}, and these are {list(values.shape)}"
        )
    said = task.value_index(scores.logits).tolist() if speaks else []
    best = [_best(task, b, row, features[b], count, said) for b, row in enumerate(values.cpu())]
    jobs = [(b, [j]) for b, tokens in enumerate(best) for j in tokens]
    lost, instead = _lost(task, removed, jobs, said, scores.logits) if jobs else ({}, {})
    made, told = values.clone(), []
    for b, tokens in enumerate(best):
        order = sorted(tokens, key=lambda j, b=b: -lost[b, j])  # type: ignore[misc]
        made[b, order] = values[b, tokens].sort(descending=True).values
        told.append(
            {"tokens": order, "lost": [lost[b, j] for j in order], "instead": [instead.get((b, j)) for j in order],
             "baseline": removed.baseline}
        )  # fmt: skip
    return made, told


def _removal(task: Task, baseline: str | None) -> Removal:
    """How tokens are taken out: what stands for nothing in a tokenizer often ends a text for a language model."""
    try:
        return removal(replace(task, method=_NAME), baseline)
    except InputError as error:
        raise InputError(
            "token_deletion: no token is known to stand for one that is taken out: give processor= (the model's "
            "tokenizer), or an attention_mask beside the ids, by which it can be deleted"
        ) from error


_Jobs = list[tuple[int, list[int]]]


def _lost(
    task: Task, removed: Removal, jobs: _Jobs, said: list[int], logits: Tensor
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], int]]:
    """(text, token) -> f(x) − f(x without it); and -> what stands there instead, of places of what is said."""
    ways, instead = _ways(task, removed, jobs, said, logits)
    target = task.resolve(logits)
    clean, lost = target(logits), dict[tuple[int, int], float]()
    for way, some in ways:
        owners = [b for b, _ in some]
        rows = logits_without(replace(task, method=_NAME), way, some, _BATCH_SIZE, _NAME)
        gone = clean[owners] - values_of(target, rows, owners, logits)
        lost |= {(b, j): value for (b, (j,)), value in zip(some, gone.tolist(), strict=True)}
    return lost, instead


def _ways(
    task: Task, removed: Removal, jobs: _Jobs, said: list[int], logits: Tensor
) -> tuple[list[tuple[Removal, _Jobs]], dict[tuple[int, int], int]]:
    """Which tokens are taken out how; and (sample, token) -> what stands there instead, of places of what is said."""
    ids = task.inputs.tensor
    copied = [job for job in jobs if said and int(ids[job[0], job[1][0]]) == said[job[0]]]
    rest = [job for job in jobs if job not in copied]
    if not copied:
        return [(removed, rest)], {}
    own = torch.tensor(said, device=logits.device)[:, None]
    other = logits.scatter(1, own, -math.inf).argmax(1)
    swapped = replace(removed, baseline="fill_id", filler=other.to(ids)[:, None].expand_as(ids))
    ways = [(swapped, copied), *([(removed, rest)] if rest else [])]
    return ways, {(b, j): int(other[b]) for b, (j,) in copied}


def _best(task: Task, sample: int, row: Tensor, able: Tensor, count: int, said: list[int]) -> list[int]:
    """The tokens of a sample that are taken out; the one behind which a language model reads is none of them.

    Args:
        said: of a language model, the token of each sample that the target is about.
    """
    order = [j for j in row.argsort(descending=True, stable=True).tolist() if able[j]]
    if said:
        last = int(able.nonzero().max()) if order and not decodes(task.model) else -1
        order = [j for j in order if j != last]
        places = [j for j in order if int(task.inputs.tensor[sample, j]) == said[sample]]
        if set(places) & set(order[:count]):
            order = list(dict.fromkeys([*order[:1], *places, *order]))
    return order[:count]
