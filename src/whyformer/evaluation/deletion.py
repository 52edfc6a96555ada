"""``token_deletion``: rank the top tokens of a text by the change of the target when each is removed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.evaluation.case import check_explanation, read_target
from whyformer.explaining import prepared
from whyformer.explanation.result import Explanation
from whyformer.inputs.removal import Removal, logits_without, removal, values_of
from whyformer.methods.task import Scores, Task
from whyformer.models.kinds import is_known_language_model
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
    """Rank the ``count`` top tokens of each text by the decrease of the target when each is removed.

    The decrease is d_j = f(x) − f(x without token j). The scores of these tokens are permuted so that the highest score
    goes to the token with the largest d_j; other scores, and the sum of all scores, do not change. For language models
    tokens are deleted; for other models they are replaced as in the method ``occlusion``.

    If one of the top tokens is the token that a language model predicts, the model may have copied it from any of its
    occurrences. The candidates are then the top token, all occurrences of the predicted token, and the other top
    tokens. An occurrence is replaced with the most likely other token (symmetric token replacement, Zhang & Nanda, ICLR
    2024), because deletion has little effect: "Sam lives in. Iris lives in Rome." still names only one city.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`.
        explanation: explanation of these inputs, with a score for each token.
        count: number of removed tokens of each text, 1 to 256; each costs a forward pass.
        target: as for :func:`whyformer.explain`; the explained target by default.

    Returns:
        The explanation with permuted scores. ``diagnostics["token_deletion"]`` has, for each text, the indices of the
        ``"tokens"`` in their new order, the decrease ``"lost"`` without each, the id of the token ``"instead"`` of an
        occurrence of the predicted token (None for other tokens), and the ``"baseline"``.

    Raises:
        InputError: the scores do not belong to single tokens, or no token can be removed.

    References:
        Zhang & Nanda, Towards Best Practices of Activation Patching in Language Models, ICLR 2024.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 256:
        raise InputError(f"count, the number of tokens to remove, must be an integer from 1 to 256, not {count!r}")
    check_explanation(explanation)
    ready = prepared(model, inputs, processor, **options)
    task = ready.task(ready.resolver(read_target(target, explanation)), _NAME)
    values, figures = reranked(task, Scores(explanation.scores, ready.forward(task)), count)
    return replace(explanation, scores=values, diagnostics={**explanation.diagnostics, _NAME: figures})


def reranked(task: Task, scores: Scores, count: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the scores ``[B, N]`` permuted as in :func:`token_deletion`, and its diagnostics of each text.

    Args:
        task: the model, its inputs and the target.
        scores: scores of the tokens, with the logits of the plain forward pass.
        count: number of removed tokens of each text.
    """
    if task.inputs.modality != "text":
        kind = "a picture" if task.inputs.modality == "image" else "not text"
        raise InputError(f"token_deletion is for texts, and this input is {kind}")
    is_language = is_known_language_model(task.model) and not task.counted and task.inputs.tensor.dim() == 2
    removed = _removal(task, "delete" if is_language else None)
    values, features = scores.values, removed.features
    if values.shape != features.shape:
        raise InputError(
            f"token_deletion needs a score for each token, {list(features.shape)}, not scores of {list(values.shape)}"
        )
    predicted = task.value_index(scores.logits).tolist() if is_language else []
    top = [_candidates(task, b, row, features[b], count, predicted) for b, row in enumerate(values.cpu())]
    jobs = [(b, [j]) for b, tokens in enumerate(top) for j in tokens]
    decreases, instead = _decreases(task, removed, jobs, predicted, scores.logits) if jobs else ({}, {})
    permuted, figures = values.clone(), []
    for b, tokens in enumerate(top):
        order = sorted(tokens, key=lambda j, b=b: -decreases[b, j])  # type: ignore[misc]
        permuted[b, order] = values[b, tokens].sort(descending=True).values
        figures.append(
            {"tokens": order, "lost": [decreases[b, j] for j in order], "instead": [instead.get((b, j)) for j in order],
             "baseline": removed.baseline}
        )  # fmt: skip
    return permuted, figures


def _removal(task: Task, baseline: str | None) -> Removal:
    """Return how tokens are removed: deleted from language models, whose padding token often ends a text."""
    try:
        return removal(replace(task, method=_NAME), baseline)
    except InputError as error:
        raise InputError(
            "token_deletion: no replacement for removed tokens is known: pass processor= (the model's tokenizer), "
            "or an attention_mask with the ids, so that tokens can be deleted"
        ) from error


_Jobs = list[tuple[int, list[int]]]


def _decreases(
    task: Task, removed: Removal, jobs: _Jobs, predicted: list[int], logits: Tensor
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], int]]:
    """Return (text, token) -> f(x) − f(x without it), and (text, token) -> id of its replacement, see :func:`_ways`."""
    ways, instead = _ways(task, removed, jobs, predicted, logits)
    target = task.resolve(logits)
    clean, decreases = target(logits), dict[tuple[int, int], float]()
    for way, tokens in ways:
        owners = [b for b, _ in tokens]
        rows = logits_without(replace(task, method=_NAME), way, tokens, _BATCH_SIZE, _NAME)
        changes = clean[owners] - values_of(target, rows, owners, logits)
        decreases |= {(b, j): value for (b, (j,)), value in zip(tokens, changes.tolist(), strict=True)}
    return decreases, instead


def _ways(
    task: Task, removed: Removal, jobs: _Jobs, predicted: list[int], logits: Tensor
) -> tuple[list[tuple[Removal, _Jobs]], dict[tuple[int, int], int]]:
    """Return the ways of removal with their tokens, and (text, token) -> id that replaces a predicted token."""
    ids = task.inputs.tensor
    copied = [job for job in jobs if predicted and int(ids[job[0], job[1][0]]) == predicted[job[0]]]
    others = [job for job in jobs if job not in copied]
    if not copied:
        return [(removed, others)], {}
    index = torch.tensor(predicted, device=logits.device)[:, None]
    runner_up = logits.scatter(1, index, -math.inf).argmax(1)
    swapped = replace(removed, baseline="token", filler=runner_up.to(ids)[:, None].expand_as(ids))
    ways = [(swapped, copied), *([(removed, others)] if others else [])]
    return ways, {(b, j): int(runner_up[b]) for b, (j,) in copied}


def _candidates(task: Task, sample: int, row: Tensor, removable: Tensor, count: int, predicted: list[int]) -> list[int]:
    """Return the tokens of a sample to remove. The last token of a language model's prompt is not among them.

    Args:
        task: the model and its inputs.
        sample: index of the sample.
        row: ``[N]`` scores of its tokens.
        removable: ``[N]`` True at tokens that can be removed.
        count: number of tokens.
        predicted: for language models, the token id of each sample that the target is about.
    """
    order = [j for j in row.argsort(descending=True, stable=True).tolist() if removable[j]]
    if predicted:
        last = int(removable.nonzero().max()) if order and not decodes(task.model) else -1
        order = [j for j in order if j != last]
        occurrences = [j for j in order if int(task.inputs.tensor[sample, j]) == predicted[sample]]
        if set(occurrences) & set(order[:count]):
            order = list(dict.fromkeys([*order[:1], *occurrences, *order]))
    return order[:count]
