"""Arbitration: choose among explanations by measured faithfulness (Mylonas, Mollas, Tsoumakas 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

import whyformer.evaluation.metrics  # noqa: F401 - fills METRICS
from whyformer.comparing import Asked, read_method
from whyformer.errors import InputError
from whyformer.evaluation.holdout import Goal, measure, split
from whyformer.evaluation.registry import METRICS
from whyformer.explaining import open_model
from whyformer.explanation.result import Explanation
from whyformer.inputs.removal import Removal, removal
from whyformer.methods import find
from whyformer.methods.task import Task
from whyformer.methods.together import sharing
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.targets import Logit, Probability, Resolver, Target

Candidate = Asked | Explanation
MODES = ("instance", "class", "dataset", "mean_baseline", "batch", "prime", "label")
PLANS = {n: m.plan(**{"steps": 10} if "steps" in m.settings else {}) for n, m in METRICS.items() if m.plan}
"""Metrics to choose by; curves in ten steps, for the parts hold few features."""
MEAN_BASELINE = ("raw_attention", {"aggregation": {"heads": "mean", "layers": "mean", "rows": "readout"}})


@dataclass(frozen=True, eq=False)
class Arbitration:
    """The outcome of :func:`arbitrate`. Axis letters: M candidates, B samples, K labels (1 but in "prime" and "label").

    Attributes:
        explanations: the chosen explanation of each sample, for its target.
        candidates: a readable name of each candidate.
        winners: ``[B, K]`` which candidate was chosen.
        selection, heldout: ``[M, B, K]`` score of each candidate on the part that chooses and on the part held out.
        choosing, reported: ``[B]`` samples that the choice is made on and that the score is over (all but in "batch").
        score: the reported score: mean of the chosen candidates' held-out scores.
        labels: ``[B, K]`` the classes that the scores are for, the target first; −1 for a custom target.
        by_label: for each sample, class -> chosen explanation.
        cost: forwards spent on perturbed inputs, what they would be without sharing, and the clean ones.
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
        """A row for each candidate: mean score on both parts, and how often it was chosen."""
        means = [self.selection[:, self.choosing].mean((1, 2)), self.heldout[:, self.reported].mean((1, 2))]
        chosen = [int((self.winners == m).sum()) for m in range(len(self.candidates))]
        rows = zip(self.candidates, *(m.tolist() for m in means), chosen, strict=True)
        return [dict(zip(("candidate", "selection", "heldout", "chosen"), row, strict=True)) for row in rows]

    def __str__(self) -> str:
        width = max(len(n) for n in self.candidates)
        better = "higher" if self.higher_is_better else "lower"
        lines = [f"{self.criterion} ({better} is better), mode {self.mode}: {self.score:.4f} on the part held out"]
        lines.append(f"{'candidate':{width}}  selection  held out  chosen")
        for r in self.table():
            lines.append(f"{r['candidate']:{width}}  {r['selection']:9.4f}  {r['heldout']:8.4f}  {r['chosen']:6d}")
        lines.append(f"{self.cost['perturbed']} perturbed forwards; {self.cost['unshared']} without sharing")
        return "\n".join(lines)


@shows_options
def arbitrate(
    model: Any,
    inputs: Any,
    candidates: Sequence[Candidate],
    criterion: str = "rft",
    *,
    mode: str = "instance",
    holdout: float = 0.5,
    seed: int = 0,
    processor: Any = None,
    target: Target = None,
    baseline: str | None = None,
    fill_id: int | None = None,
    patch: int | None = None,
    labels: int = 10,
    batch_size: int = 16,
    progress: bool = False,
    **options: Unpack[Keywords],
) -> Arbitration:
    """Measure candidate explanations by what happens when their features are taken out, and choose.

    Each sample's features (patches, or tokens but special ones) are split at random into a part that chooses and a part
    held out. A criterion looks at one part at a time: only its features are taken out, and only they are ranked. So the
    reported score is not measured on what made the choice. Each perturbed input runs once for all candidates.

    Args:
        model, inputs, processor, target, **options: as in :func:`whyformer.explain`. For a class the criterion watches
            its probability (softmax, or sigmoid where classes do not exclude one another), for a callable its value.
        candidates: method names, (name, settings), mappings {"method": name, setting: value}, or finished explanations
            of the same inputs.
        criterion: a metric of :func:`whyformer.evaluation.metrics` that follows one output: "rft", "deletion" and
            "insertion" (in 10 steps), "comprehensiveness", "sufficiency", "aopc", "log_odds" or "auac".
        mode: "instance" (the best for each sample), "class" (the best on average for each explained class), "dataset"
            (the best on average), "mean_baseline" (no choice: attention averaged over heads and blocks, readout row,
            added to the candidates). As in the paper: "batch" (the best on some of the samples, used for all; scored
            on the other samples), "prime" (each sample's best on average over the classes), "label" (the best for each
            sample and class). The paper's code takes "prime" along the wrong axis; this does not.
            Over all classes of a softmax "prime" refuses maps that are the same for every class: their mean is 0.
        holdout: share of the features (in mode "batch": of the samples) held out. With 0 nothing is: the same features
            choose and score, as in the paper, and the score is too good.
        seed: of the split, which does not depend on a sample's place in the batch (but in mode "batch").
        baseline, fill_id, patch: what stands in for a feature, see method ``occlusion``;
            the default for text is [UNK] (then [MASK], [PAD], deletion), for pictures 0 in model space.
        labels: in "prime" and "label", so many classes a sample at most: the target, then the highest logits.
        batch_size: perturbed forwards at once.

    Raises:
        InputError: an unknown candidate, criterion, mode or setting, or a finished explanation of something else.
    """
    _check(criterion, mode, holdout, labels, batch_size)
    entries = [_entry(c) for c in ([*candidates, MEAN_BASELINE] if mode == "mean_baseline" else candidates)]
    if not entries:
        raise InputError("there are no candidates to choose from")
    ready = open_model(model, processor, **options).prepare(inputs)
    resolver = ready.resolver(target)
    task = ready.task(resolver, "arbitrate", progress)
    removed = removal(task, baseline, fill_id=fill_id, patch=patch, prefer=("unk", "mask", "pad"))
    logits = task.forward()
    METRICS[criterion].check_activation(resolver.activation(logits))
    wanted, goals = _goals(resolver, logits, mode, labels)
    explained = _explained(entries, ready, task, target, wanted, resolver)
    scores = [[_on_features(e, removed) for e in listed] for listed in explained]
    part = 0.0 if mode == "batch" else holdout
    parts = [split(f.nonzero()[:, 0].tolist(), part, seed) for f in removed.features]
    _refuse_cancelling(mode, entries, explained, logits, resolver.activation(logits) != "softmax")
    (selection, heldout), cost = measure(task, removed, PLANS[criterion], scores, goals, parts, logits, batch_size)
    sign = 1 if METRICS[criterion].better == "higher" else -1
    winners, choosing, reported = _choose(sign * selection, wanted, mode, holdout, seed)
    by_label = [
        {int(c): explained[int(winners[b, k])][k][b] for k, c in enumerate(row)} for b, row in enumerate(wanted)
    ]
    return Arbitration(
        [found[int(wanted[b, 0])] for b, found in enumerate(by_label)], _titles(entries), winners, selection, heldout,
        choosing, reported, float(heldout.gather(0, winners[None])[0][reported].mean()), wanted, by_label, criterion,
        mode, sign > 0, {**cost, "clean": ready.inputs.batch},
        {"holdout": holdout, "seed": seed, "baseline": removed.baseline, "labels": wanted.shape[1]},
    )  # fmt: skip


def _check(criterion: str, mode: str, holdout: float, labels: int, batch_size: int) -> None:
    for what, value, known in (("criterion", criterion, sorted(PLANS)), ("mode", mode, MODES)):
        if value not in known:
            raise InputError(f"arbitrate: {what} must be one of {', '.join(known)}, not {value!r}")
    if isinstance(holdout, bool) or not 0 <= holdout < 1:
        raise InputError(f"arbitrate: holdout must be a number from 0 up to (not including) 1, not {holdout!r}")
    for what, count in (("labels", labels), ("batch_size", batch_size)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"arbitrate: {what} must be a whole number of at least 1, not {count!r}")


def _refuse_cancelling(
    mode: str, entries: Sequence[Any], explained: Sequence[list[Explanation]], logits: Tensor, several: bool
) -> None:
    """Over all classes of a softmax the changes sum to 0: what is the same for each of them has no mean to compare."""
    classes = logits.shape[-1]
    if mode != "prime" or several or classes < 2 or len(explained[0]) < classes:
        return
    same = [title for title, made in zip(_titles(entries), explained, strict=True) if all(e is made[0] for e in made)]
    if same:
        raise InputError(
            f"arbitrate: mode 'prime' takes the mean over all {classes} classes, whose probabilities sum to 1, so that "
            f"for a map that is the same for every class it is 0 whatever the map ({', '.join(same)}): give labels= "
            f"of less than {classes}, choose another mode, or leave these candidates out"
        )


# -- candidates ----------------------------------------------------------------------------------------------------
def _entry(candidate: Candidate) -> Explanation | tuple[str, dict[str, Any]]:
    """A finished explanation, or (method, settings) as they were given."""
    if isinstance(candidate, Explanation):
        return candidate
    method, settings = read_method(candidate, "a candidate is a method name, an Explanation")
    return method.name, settings


def _titles(entries: Sequence[Explanation | tuple[str, dict[str, Any]]]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        name, settings = (f"given {entry.method}", {}) if isinstance(entry, Explanation) else entry
        title = name + (f"({', '.join(f'{k}={v}' for k, v in settings.items())})" if settings else "")
        again = sum(t == title or t.startswith(title + " #") for t in found)
        found.append(f"{title} #{again + 1}" if again else title)
    return found


def _goals(resolver: Resolver, logits: Tensor, mode: str, labels: int) -> tuple[Tensor, list[Goal]]:
    """(classes ``[B, K]``, target first; what the criterion watches for each of the K)."""
    activation = resolver.activation(logits)
    goal: Any = Logit if activation == "identity" else partial(Probability, multi_label=activation == "sigmoid")
    index = resolver.indices(logits).cpu()
    if resolver.raw:
        return index[:, None], [Logit(0)]
    if mode not in ("prime", "label"):
        own = resolver.target if callable(resolver.target) else goal(index.tolist())
        return index[:, None], [own]
    if callable(resolver.target):
        raise InputError(f"arbitrate: mode '{mode}' compares classes, so the target must be a class, not a callable")
    first = logits.cpu().scatter(1, index[:, None], float("inf"))
    wanted = first.argsort(dim=1, descending=True, stable=True)[:, :labels]
    return wanted, [goal(column.tolist()) for column in wanted.T]


def _explained(
    entries: Sequence[Any], ready: Prepared, task: Task, target: Target, wanted: Tensor, resolver: Resolver
) -> list[list[Explanation]]:
    """Each candidate's explanation for each of the K classes; one that is the same for all classes is made once.
    Methods share passes, class by class."""
    count = wanted.shape[1]
    targets = [target] if count == 1 else [resolver.about(column.tolist()) for column in wanted.T]
    asked = [entry for entry in entries if not isinstance(entry, Explanation)]
    found: list[list[Explanation]] = [[] for _ in entries]
    work = [(one, entry, made) for one in targets for entry, made in zip(entries, found, strict=True)]
    with sharing([find(method) for method, _ in asked]) as together:
        for one, entry, made in task.progress(work, "explaining", len(work)):
            if isinstance(entry, Explanation):
                made.append(made[0] if made else _finished(entry, ready, wanted, resolver))
            elif made and not made[0].diagnostics.get("class_specific", True):
                made.append(made[0])
            else:
                method, settings = entry
                made.append(together.around(partial(ready.explain, method, one, **settings)))
    return found


def _finished(entry: Explanation, ready: Prepared, wanted: Tensor, resolver: Resolver) -> Explanation:
    """A finished explanation, checked to be of these inputs and classes."""
    name, classes = f"the finished explanation by {entry.method}", wanted[:, 0].tolist()
    if len(entry) != ready.inputs.batch:
        raise InputError(f"{name} is of {len(entry)} samples, and the inputs are {ready.inputs.batch}")
    specific = entry.diagnostics.get("class_specific", True) and not callable(resolver.target)
    if specific and entry.target.tolist() != classes:
        raise InputError(f"{name} is for the classes {entry.target.tolist()}, and the targets are {classes}")
    return entry


def _on_features(explanation: Explanation, removed: Removal) -> Tensor:
    """Scores ``[B, P]`` over the features that are taken out; pixels and other grids are averaged over each cell."""
    scores = explanation.scores.double()
    if removed.cell is not None and explanation.level != "token" and explanation.grid != removed.grid:
        height, width = removed.inputs.tensor.shape[-2:]
        maps = explanation.heatmap((height, width)).double()
        scores = nn.functional.avg_pool2d(maps[:, None], removed.cell, ceil_mode=True).flatten(1)
    if scores.shape != removed.features.shape:
        raise InputError(
            f"the explanation by {explanation.method} has {explanation.level} scores {list(explanation.scores.shape)}, "
            f"and the inputs have {removed.features.shape[1]} features a sample"
        )
    return scores


# -- choosing -----------------------------------------------------------------------------------------------------
def _choose(good: Tensor, labels: Tensor, mode: str, holdout: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(winners ``[B, K]``, samples ``[B]`` that choose and that are reported) from ``[M, B, K]``, higher is better.

    Of equal candidates the first one wins.
    """
    _, batch, count = good.shape
    everyone = torch.ones(batch, dtype=torch.bool)
    choosing, reported = everyone, everyone
    if mode == "batch":
        if batch < 2:
            raise InputError('arbitrate: mode "batch" chooses on some samples for the others, so it needs at least 2')
        parts = split(list(range(batch)), holdout, seed)
        choosing, reported = torch.zeros(2, batch, dtype=torch.bool)
        choosing[parts[0]], reported[parts[1]] = True, True
    if mode == "mean_baseline":
        return torch.full((batch, count), len(good) - 1), choosing, reported
    if mode == "prime":
        good = good.mean(-1, keepdim=True).expand_as(good)
    # each sample's choice is the best in sum over these samples, itself alone by default
    together = {"class": labels[:, :1] == labels[:, 0], "dataset": everyone, "batch": choosing}
    over = together.get(mode, torch.eye(batch, dtype=torch.bool)).expand(batch, batch)
    sums = torch.stack([good[:, some].sum(1) for some in over], 1)
    # numpy promises the first of equals, torch does not
    return torch.as_tensor(sums.numpy().argmax(0)), choosing, reported
