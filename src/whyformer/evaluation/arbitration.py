"""Arbitration: choose among explanations by their measured faithfulness (Mylonas, Mollas, Tsoumakas 2022)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

import whyformer.evaluation.metrics  # noqa: F401 - fills METRICS
from whyformer.comparing import MethodSpec, method_list, read_method
from whyformer.errors import InputError, ModelError, check_count, check_seed, check_type
from whyformer.evaluation.registry import METRICS, Metric, masks_of, score_of
from whyformer.explaining import prepared
from whyformer.explanation.display import format_settings
from whyformer.explanation.result import Explanation
from whyformer.inputs.removal import Removal, logits_without, removal, values_of
from whyformer.methods import find
from whyformer.methods.sharing import sharing
from whyformer.methods.task import Task
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.targets import Logit, Probability, Resolver, Target

Candidate = MethodSpec | Explanation
Goal = Callable[[Tensor], Tensor]
Parts = tuple[list[int], list[int]]
MODES = ("instance", "class", "dataset", "mean_baseline", "batch", "prime", "label")
STEPS = 10
"""Number of steps of a criterion that is a curve, because each part holds few features."""
MEAN_BASELINE = ("raw_attention", {"aggregation": {"heads": "mean", "layers": "mean", "rows": "readout"}})


@dataclass(frozen=True, eq=False)
class Arbitration:
    """The result of :func:`arbitrate`. Axis letters: M candidates, B samples, K labels (1 but in "prime" and "label").

    Attributes:
        explanations: chosen explanation of each sample, for its target.
        candidates: readable name of each candidate.
        winners: ``[B, K]`` index of the chosen candidate.
        selection: ``[M, B, K]`` score of each candidate on the features used for the choice.
        heldout: ``[M, B, K]`` score of each candidate on the held-out features.
        choosing: ``[B]`` True for samples used for the choice (all samples but in mode "batch").
        reported: ``[B]`` True for samples that ``score`` covers (all samples but in mode "batch").
        score: mean of the chosen candidates' held-out scores.
        labels: ``[B, K]`` classes of the scores, the target first; −1 for a custom target.
        by_label: for each sample, class -> chosen explanation.
        criterion: name of the metric.
        mode: mode of the choice.
        higher_is_better: True if higher scores are better.
        cost: number of "perturbed" inputs, "unshared" the number without sharing, and "clean" inputs.
        settings: the other settings of the call.
    """

    explanations: list[Explanation]
    candidates: list[str]
    winners: Tensor
    selection: Tensor
    heldout: Tensor
    choosing: Tensor
    reported: Tensor
    score: float
    labels: Tensor
    by_label: list[dict[int, Explanation]]
    criterion: str
    mode: str
    higher_is_better: bool
    cost: dict[str, int]
    settings: dict[str, Any]

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each candidate: its mean score on both parts, and how often it was chosen."""
        means = [self.selection[:, self.choosing].mean((1, 2)), self.heldout[:, self.reported].mean((1, 2))]
        wins = [int((self.winners == m).sum()) for m in range(len(self.candidates))]
        rows = zip(self.candidates, *(m.tolist() for m in means), wins, strict=True)
        return [dict(zip(("candidate", "selection", "heldout", "chosen"), row, strict=True)) for row in rows]

    def __str__(self) -> str:
        width = max(len(n) for n in self.candidates)
        better = "higher" if self.higher_is_better else "lower"
        lines = [f"{self.criterion} ({better} is better), mode {self.mode}: {self.score:.4f} on held-out features"]
        lines.append(f"{'candidate':{width}}  selection  held out  chosen")
        for r in self.table():
            lines.append(f"{r['candidate']:{width}}  {r['selection']:9.4f}  {r['heldout']:8.4f}  {r['chosen']:6d}")
        lines.append(f"{self.cost['perturbed']} perturbed forwards; {self.cost['unshared']} without sharing")
        return "\n".join(lines)


@shows_options
def arbitrate(
    model: Any,
    inputs: Any,
    candidates: Candidate | Sequence[Candidate],
    criterion: str = "rft",
    *,
    mode: str = "instance",
    holdout: float = 0.5,
    seed: int = 0,
    processor: Any = None,
    target: Target = None,
    baseline: str | int | None = None,
    patch: int | None = None,
    labels: int = 10,
    batch_size: int = 16,
    progress: bool = False,
    **options: Unpack[Keywords],
) -> Arbitration:
    """Choose among candidate explanations by the effect of removing their features.

    The features of each sample (patches, or tokens except special tokens) are split at random into a part for the
    choice and a held-out part. The criterion is computed on each part alone: only its features are ranked and removed.
    So the reported score is not measured on the features that the choice was based on. Each perturbed input runs once
    for all candidates.

    Args:
        model, inputs, processor, target, **options: as in :func:`whyformer.explain`. For a class, the criterion
            measures its probability (softmax, or sigmoid for multi-label models); for a callable, its value.
        candidates: method names, (name, settings) pairs, mappings {"method": name, setting: value}, or finished
            explanations of the same inputs.
        criterion: a metric that measures one output: "rft", "deletion" and "insertion" (in 10 steps),
            "comprehensiveness", "sufficiency", "aopc", "log_odds" or "auac".
        mode: how to choose. "instance": the best candidate for each sample. "class": the best on average for each
            explained class. "dataset": the best on average. "mean_baseline": no choice; attention averaged over heads
            and blocks, readout row, is added to the candidates and used. As in the paper: "batch": the best on some of
            the samples, used for all samples and scored on the others. "prime": the best on average over the classes
            for each sample; the paper's code averages over the wrong axis. "label": the best for each sample and class.
            Over all classes of a softmax, "prime" refuses maps that are the same for every class, whose mean is 0.
        holdout: fraction of the features (in mode "batch": of the samples) held out. With 0, all features are used for
            both the choice and the score, as in the paper, which biases the score.
        seed: seed of the split. Except in mode "batch", the split does not depend on a sample's index in the batch.
        baseline, patch: replacement of removed features, as in the method ``occlusion``. The default is [UNK]
            (then [MASK], [PAD], deletion) for text, and 0 in model space for pictures.
        labels: largest number of classes for each sample in "prime" and "label": the target, then the highest logits.
        batch_size: perturbed inputs in one forward pass.
        progress: show a progress bar.

    Raises:
        InputError: a candidate, criterion, mode or setting is unknown, or a finished explanation does not fit.
    """
    check_type("arbitrate: candidates", candidates, Iterable, "a list of methods and explanations")
    check_type("arbitrate: baseline", baseline, str | int | None, "the name of a baseline or the id of a token")
    check_count("arbitrate: seed", seed, least=0)
    check_seed("arbitrate: seed", seed)
    if patch is not None:
        check_count("arbitrate: patch", patch)
    _check(criterion, mode, holdout, labels, batch_size)
    listed: list[Candidate] = [candidates] if isinstance(candidates, Explanation) else method_list(candidates)
    entries = [_entry(c) for c in ([*listed, MEAN_BASELINE] if mode == "mean_baseline" else listed)]
    if not entries:
        raise InputError("there are no candidates to choose from")
    ready = prepared(model, inputs, processor, **options)
    choice = _Choice(criterion, mode, 0.0 if mode == "batch" else holdout, seed, labels, batch_size, progress)
    batches = ready.batches(target)
    separate = [ready.separate(e) if isinstance(e, Explanation) else [e] * len(batches) for e in entries]
    parts = [
        _scored(batch, maps, goal, choice, baseline, patch)
        for (batch, goal), *maps in zip(batches, *separate, strict=True)
    ]
    selection, heldout = (torch.cat([part.figures[k] for part in parts], 1) for k in (0, 1))
    classes = torch.cat([part.classes for part in parts])
    sign = 1 if METRICS[criterion].better == "higher" else -1
    winners, choosing, reported = _choose(sign * selection, classes, mode, holdout, seed)
    explained = [maps for part in parts for maps in part.by_sample]
    by_label = [
        {int(c): explained[b][int(winners[b, k])][k] for k, c in enumerate(row)} for b, row in enumerate(classes)
    ]
    cost = {n: sum(part.cost[n] for part in parts) for n in parts[0].cost}
    return Arbitration(
        [choices[int(classes[b, 0])] for b, choices in enumerate(by_label)],
        _titles(entries), winners, selection, heldout, choosing, reported,
        float(heldout.gather(0, winners[None])[0][reported].mean()), classes, by_label, criterion,
        mode, sign > 0, {**cost, "clean": len(classes)},
        {"holdout": holdout, "seed": seed, "baseline": parts[0].baseline, "labels": classes.shape[1]},
    )  # fmt: skip


@dataclass(frozen=True)
class _Choice:
    """Settings of :func:`arbitrate`."""

    criterion: str
    mode: str
    holdout: float
    seed: int
    labels: int
    batch_size: int
    progress: bool


@dataclass(frozen=True, eq=False)
class _Scored:
    """Measured candidates of a batch.

    Attributes:
        classes: ``[B, K]`` as in :class:`Arbitration`.
        figures: ``[2, M, B, K]`` scores on the features used for the choice, and on the held-out features.
        by_sample: for each sample, ``[M][K]`` explanations.
        cost: as in :class:`Arbitration`.
        baseline: replacement of removed features.
    """

    classes: Tensor
    figures: Tensor
    by_sample: list[list[list[Explanation]]]
    cost: dict[str, int]
    baseline: Any


def _scored(
    ready: Prepared, entries: Sequence[Any], target: Target, how: _Choice, baseline: str | int | None, patch: int | None
) -> _Scored:
    """Explain a batch by each candidate and measure the criterion."""
    resolver, criterion = ready.resolver(target), METRICS[how.criterion]
    task = ready.task(resolver, "arbitrate", how.progress)
    logits = ready.forward(task)  # first, because it shows which row a function reads, on which the removal depends
    removed = removal(task, baseline, patch=patch, prefer=("unk", "mask", "pad"))
    criterion.check_activation(resolver.activation(logits))
    classes, goals = _goals(resolver, logits, how.mode, how.labels)
    explained = _explained(entries, ready, task, target, classes, resolver)
    scores = [[_on_features(e, removed) for e in maps] for maps in explained]
    parts = [split(f.nonzero()[:, 0].tolist(), how.holdout, how.seed) for f in removed.features]
    _refuse_cancelling(how.mode, entries, explained, logits, resolver.activation(logits) != "softmax")
    figures, cost = measure(task, removed, criterion, scores, goals, parts, logits, how.batch_size)
    by_sample = [[[e[b] for e in maps] for maps in explained] for b in range(len(classes))]
    return _Scored(classes, figures, by_sample, cost, removed.baseline)


def _check(criterion: str, mode: str, holdout: float, labels: int, batch_size: int) -> None:
    criteria = sorted(name for name, metric in METRICS.items() if metric.masks)
    for name, value, valid in (("criterion", criterion, criteria), ("mode", mode, MODES)):
        if not isinstance(value, str) or value not in valid:
            raise InputError(f"arbitrate: {name} must be one of {', '.join(valid)}, not {value!r}")
    if isinstance(holdout, bool) or not isinstance(holdout, int | float) or not 0 <= holdout < 1:
        raise InputError(f"arbitrate: holdout must be at least 0 and less than 1, not {holdout!r}")
    check_count("arbitrate: labels", labels)
    check_count("arbitrate: batch_size", batch_size)


def _refuse_cancelling(
    mode: str, entries: Sequence[Any], explained: Sequence[list[Explanation]], logits: Tensor, multi_label: bool
) -> None:
    """Refuse class-independent maps in mode "prime": over all classes of a softmax, changes sum to 0."""
    classes = logits.shape[-1]
    if mode != "prime" or multi_label or classes < 2 or len(explained[0]) < classes:
        return
    same = [title for title, maps in zip(_titles(entries), explained, strict=True) if all(e is maps[0] for e in maps)]
    if same:
        raise InputError(
            f"arbitrate: mode 'prime' takes the mean over all {classes} classes, whose probabilities sum to 1, so the "
            f"mean of a map that is the same for every class is always 0 ({', '.join(same)}): pass labels= of less "
            f"than {classes}, choose another mode, or leave these candidates out"
        )


# -- measuring --------------------------------------------------------------------------------------------------
def split(features: list[int], holdout: float, seed: int) -> Parts:
    """Split features into (selection, held out), each sorted; both are all features if none can be held out."""
    if not features:
        raise InputError("arbitrate: a sample has no features that can be removed")
    if holdout == 0 or len(features) < 2:
        return features, features
    count = min(max(round(len(features) * holdout), 1), len(features) - 1)
    mixed = [features[i] for i in torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()]
    return sorted(mixed[count:]), sorted(mixed[:count])


def measure(
    task: Task, removed: Removal, metric: Metric, scores: Sequence[Sequence[Tensor]], goals: Sequence[Goal],
    parts: Sequence[Parts], logits: Tensor, batch_size: int,
) -> tuple[Tensor, dict[str, int]]:  # fmt: skip
    """Compute a metric of explanations on both parts of the features; explanations share perturbed inputs.

    Args:
        scores: ``[B, P]`` for each of M explanations and each of K goals.
        goals: functions logits ``[B, C]`` -> measured output ``[B]``.
        parts: parts of each sample, see :func:`split`.
        logits: ``[B, C]`` of the clean inputs.

    Returns:
        The values ``[2, M, B, K]``, and the number of "perturbed" inputs, also without sharing ("unshared").
    """
    settings = {"steps": STEPS} if "steps" in metric.settings else {}
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    requests: dict[tuple[int, int, int, int], tuple[np.ndarray, list[int]]] = {}
    unshared: list[set[int]] = [set() for _ in scores]
    for p, m, b, k in itertools.product(range(2), range(len(scores)), range(len(parts)), range(len(goals))):
        part = np.array(parts[b][p])
        selected = scores[m][k][b][parts[b][p]].cpu().numpy()
        subsets = [tuple(part[mask].tolist()) for mask in masks_of(metric, selected, **settings)]
        # -1 is the row of the clean output, which is known
        needed = [rows.setdefault((b, s), len(rows)) if s else -1 for s in subsets]
        requests[p, m, b, k] = selected, needed
        unshared[m].update(row for row in needed if row >= 0)
    outcomes = logits_without(task, removed, list(rows), batch_size, "removing features")
    if not bool(torch.isfinite(outcomes).all()):
        raise ModelError(f"{task.method}: the logits without some features are not finite: choose another baseline")
    clean = [goal(logits).double().cpu().numpy() for goal in goals]
    outputs = [values_of(goal, outcomes, [b for b, _ in rows], logits).double().cpu().numpy() for goal in goals]
    figures = torch.zeros(2, len(scores), len(parts), len(goals), dtype=torch.float64)
    for (p, m, b, k), (selected, needed) in requests.items():
        observed = np.array([outputs[k][row] if row >= 0 else clean[k][b] for row in needed])
        figures[p, m, b, k] = float(score_of(metric, selected, float(clean[k][b]), observed)[0])
    return figures, {"perturbed": len(rows), "unshared": sum(map(len, unshared))}


# -- candidates ----------------------------------------------------------------------------------------------------
def _entry(candidate: Candidate) -> Explanation | tuple[str, dict[str, Any]]:
    """Return a finished explanation unchanged, or the method and settings of a candidate."""
    if isinstance(candidate, Explanation):
        return candidate
    method, settings = read_method(candidate, "a candidate is a method name, an Explanation")
    return method.name, settings


def _titles(entries: Sequence[Explanation | tuple[str, dict[str, Any]]]) -> list[str]:
    titles: list[str] = []
    for entry in entries:
        name, settings = (f"given {entry.method}", {}) if isinstance(entry, Explanation) else entry
        title = name + (f"({format_settings(settings)})" if settings else "")
        repeats = sum(t == title or t.startswith(title + " #") for t in titles)
        titles.append(f"{title} #{repeats + 1}" if repeats else title)
    return titles


def _goals(resolver: Resolver, logits: Tensor, mode: str, labels: int) -> tuple[Tensor, list[Goal]]:
    """Return the classes ``[B, K]``, target first, and the function that the criterion measures for each of the K."""
    activation = resolver.activation(logits)
    goal: Any = Logit if activation == "identity" else partial(Probability, multi_label=activation == "sigmoid")
    index = resolver.indices(logits).cpu()
    if resolver.raw:
        return index[:, None], [Logit(0)]
    if mode not in ("prime", "label"):
        return index[:, None], [resolver.callable(logits) if callable(resolver.target) else goal(index.tolist())]
    if callable(resolver.target):
        raise InputError(f"arbitrate: mode '{mode}' compares classes, so the target must be a class, not a callable")
    first = logits.cpu().scatter(1, index[:, None], float("inf"))
    classes = first.argsort(dim=1, descending=True, stable=True)[:, :labels]
    return classes, [goal(column.tolist()) for column in classes.T]


def _explained(
    entries: Sequence[Any], ready: Prepared, task: Task, target: Target, classes: Tensor, resolver: Resolver
) -> list[list[Explanation]]:
    """Return the explanations of each candidate for each of the K classes.

    An explanation that is the same for all classes is computed once. Methods share passes for each class.
    """
    count = classes.shape[1]
    targets = [target] if count == 1 else [resolver.about(column.tolist()) for column in classes.T]
    methods = [entry for entry in entries if not isinstance(entry, Explanation)]
    explanations: list[list[Explanation]] = [[] for _ in entries]
    work = [(goal, entry, maps) for goal in targets for entry, maps in zip(entries, explanations, strict=True)]
    with sharing([find(method) for method, _ in methods]) as shared:
        for goal, entry, maps in task.progress(work, "explaining", len(work)):
            if isinstance(entry, Explanation):
                maps.append(maps[0] if maps else _finished(entry, ready, classes, resolver))
            elif maps and not maps[0].diagnostics.get("class_specific", True):
                maps.append(maps[0])
            else:
                method, settings = entry
                maps.append(shared.run(partial(ready.explain, method, goal, **settings)))
    return explanations


def _finished(entry: Explanation, ready: Prepared, classes: Tensor, resolver: Resolver) -> Explanation:
    """Check that a finished explanation is of these inputs and classes."""
    name, targets = f"the finished explanation by {entry.method}", classes[:, 0].tolist()
    if len(entry) != ready.inputs.batch:
        raise InputError(f"{name} has {len(entry)} samples, and there are {ready.inputs.batch} inputs")
    specific = entry.diagnostics.get("class_specific", True) and not callable(resolver.target)
    if specific and entry.target.tolist() != targets:
        raise InputError(f"{name} is for the classes {entry.target.tolist()}, and the targets are {targets}")
    return entry


def _on_features(explanation: Explanation, removed: Removal) -> Tensor:
    """Return scores ``[B, P]`` of the removable features; pixels and other grids are averaged over each cell."""
    scores = explanation.scores.double()
    if removed.cell is not None and explanation.level != "token" and explanation.grid != removed.grid:
        height, width = removed.inputs.tensor.shape[-2:]
        maps = explanation.heatmap((height, width)).double()
        scores = nn.functional.avg_pool2d(maps[:, None], removed.cell, ceil_mode=True).flatten(1)
    if scores.shape != removed.features.shape:
        raise InputError(
            f"the explanation by {explanation.method} has {explanation.level} scores {list(explanation.scores.shape)}, "
            f"and each input has {removed.features.shape[1]} features"
        )
    return scores


# -- choosing -----------------------------------------------------------------------------------------------------
def _choose(good: Tensor, labels: Tensor, mode: str, holdout: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose among scores ``good [M, B, K]``, where higher is better; the first of equal candidates wins.

    Returns:
        The winners ``[B, K]``, and the samples ``[B]`` used for the choice and for the reported score.
    """
    _, batch, count = good.shape
    everyone = torch.ones(batch, dtype=torch.bool)
    choosing, reported = everyone, everyone
    if mode == "batch":
        if batch < 2:
            raise InputError('arbitrate: mode "batch" chooses on some samples for the others, so it needs 2')
        parts = split(list(range(batch)), holdout, seed)
        choosing, reported = torch.zeros(2, batch, dtype=torch.bool)
        choosing[parts[0]], reported[parts[1]] = True, True
    if mode == "mean_baseline":
        return torch.full((batch, count), len(good) - 1), choosing, reported
    if mode == "prime":
        good = good.mean(-1, keepdim=True).expand_as(good)
    # row b: the samples whose scores are summed for the choice of sample b; itself alone by default
    groups = {"class": labels[:, :1] == labels[:, 0], "dataset": everyone, "batch": choosing}
    over = groups.get(mode, torch.eye(batch, dtype=torch.bool)).expand(batch, batch)
    sums = torch.stack([good[:, members].sum(1) for members in over], 1)
    # numpy guarantees the first of equal values, torch does not
    return torch.as_tensor(sums.numpy().argmax(0)), choosing, reported
