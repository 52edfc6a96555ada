"""``trust``: compare the deletion curve of an explanation with those of random maps, and collect its warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from whyformer.baselines import TOKENS
from whyformer.errors import InputError, check_count, check_seed, check_type
from whyformer.evaluation.case import Case, check_explanation, read_case
from whyformer.evaluation.metrics.faithfulness import equal_steps, mean_curve_area, removal_masks
from whyformer.explaining import prepared
from whyformer.explanation.result import Explanation
from whyformer.explanation.storage import plain
from whyformer.explanation.warnings import of_input, of_map
from whyformer.inputs import Inputs
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.targets import Target

STEPS = 10
"""Number of steps of a deletion curve: 0, 10 ... 100 % removed."""
LOWEST = 0.1
"""Lowest initial probability of the class; below it, the curves of all maps fall alike."""
SEEDS = (0, 1, 2)
"""Seeds of the random maps that a curve is compared with."""
Setting = tuple[str | int | None, tuple[float, ...], tuple[int, ...], int]
"""(baseline, fractions, seeds, batch size)."""


@dataclass(frozen=True, eq=False)
class Trust:
    """The comparison of an explanation with random maps. Axis letters: B samples, D random maps, F fractions.

    Attributes:
        method: method of the explanation.
        followed: ``[B]`` class whose probability is measured: the explained class, or the predicted class.
        fractions: ``[F]`` fraction of the features (pixels, content tokens) removed, highest scores first.
        curves: ``[B, F]`` probability of the class, or value of the model's output. The curve of a constant map, which
            has no order, is NaN.
        areas: ``[B]`` area under each curve; lower is better.
        random: ``[D, B, F]`` curves of random scores on the same cells.
        chance: ``[D, B]`` areas under the random curves.
        warnings: sentences about the map of each sample, from the diagnostics and the scores.
        baseline: replacement of removed features.
        seeds: seeds of the random maps.
        kind: values that the random curves depend on.
        forwards: number of samples passed through the model.
        numeric: True if the measured output is a value (a regression, a span) rather than a probability.
        rising: ``[B]`` True if a faster rise is better: the map has no signs, and the value rises when all features are
            removed.
    """

    method: str
    followed: tuple[int, ...]
    fractions: tuple[float, ...]
    curves: NDArray[np.float64]
    areas: NDArray[np.float64]
    random: NDArray[np.float64]
    chance: NDArray[np.float64]
    warnings: tuple[tuple[str, ...], ...]
    baseline: str | int
    seeds: tuple[int, ...]
    kind: tuple[Any, ...]
    forwards: int
    numeric: bool = False
    rising: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.followed)

    def measurable(self, sample: int = 0) -> bool:
        """Return True if the scores have an order and the curve can fall: the probability is initially at least
        :data:`LOWEST`, or the value changes when features are removed."""
        if not np.isfinite(self.areas[sample]):
            return False
        if not self.numeric:
            return bool(self.curves[sample, 0] >= LOWEST)
        all_curves = np.stack([self.curves[sample], *self.random[:, sample]])
        # a change by more than rounding errors
        return bool(np.nanmax(all_curves) - np.nanmin(all_curves) > 1e-6 * np.nanmax(np.abs(all_curves)))

    def better(self, sample: int = 0) -> bool | None:
        """Return True if the curve falls faster than every random curve (or rises, see :attr:`rising`), False if it is
        no faster than their average, None otherwise or if not measurable."""
        if not self.measurable(sample):
            return None
        sign = -1 if self.rising and self.rising[sample] else 1
        area, chance = sign * float(self.areas[sample]), sign * self.chance[:, sample]
        return True if area < chance.min() else False if area >= chance.mean() else None

    def verdict(self, sample: int = 0) -> str:
        """Return the result of the comparison as a sentence."""
        if not np.isfinite(self.areas[sample]):
            return "Not measurable here: all scores are equal, so they have no order."
        if self.numeric and not self.measurable(sample):
            return "Not measurable here: the value does not change when features are removed."
        if not self.measurable(sample):
            return (
                f"Not measurable here: the probability of the class is {self.curves[sample, 0]:.1%}, and a fall can be "
                f"measured from {LOWEST:.0%}."
            )
        form = ".4g" if self.numeric else ".3f"
        figures = f"area {self.areas[sample]:{form}}, random {self.chance[:, sample].mean():{form}}"
        if self.better(sample):
            return f"Better than each random map ({figures})."
        if self.better(sample) is None:
            return f"Better than random maps on average, not than each ({figures}): weak evidence."
        return f"Not better than random ({figures}): do not trust this map here."

    def figures(self, sample: int = 0) -> dict[str, Any]:
        """Return plain values of one sample for display: its curve, and the lowest, mean and highest random curve."""
        random = self.random[:, sample]
        facts = {
            "followed": self.followed[sample], "fractions": self.fractions, "curve": self.curves[sample],
            "lowest": random.min(0), "mean": random.mean(0), "highest": random.max(0),
            "verdict": self.verdict(sample), "warnings": self.warnings[sample], "numeric": self.numeric,
        }  # fmt: skip
        return dict(plain(facts, finite=True))

    def noted_in(self, explanation: Explanation) -> Explanation:
        """Return the explanation with these figures in ``diagnostics["trust"]``, which all views show."""
        figures = [self.figures(i) for i in range(len(explanation))]
        return replace(explanation, diagnostics={**explanation.diagnostics, "trust": figures})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN becomes None."""
        names = (
            "method", "followed", "fractions", "curves", "areas", "random", "chance", "warnings", "baseline", "seeds",
            "numeric",
        )  # fmt: skip
        facts = {name: getattr(self, name) for name in names}
        return dict(plain({**facts, "verdicts": [self.verdict(i) for i in range(len(self))]}, finite=True))

    def __str__(self) -> str:
        lines = []
        for sample, warnings in enumerate(self.warnings):
            head = f"{self.method}: " if len(self) == 1 else f"{self.method}, sample {sample}: "
            lines += [head + self.verdict(sample), *(f"  {warning}" for warning in warnings)]
        return "\n".join(lines)


@shows_options
def trust(
    explanation: Explanation,
    model: Any,
    inputs: Any = None,
    processor: Any = None,
    *,
    baseline: str | int | None = None,
    steps: int = STEPS,
    seeds: Sequence[int] = SEEDS,
    batch_size: int = 32,
    target: Target = None,
    known: Sequence[Trust] = (),
    **options: Unpack[Keywords],
) -> Trust:
    """Compare an explanation with random maps: does the model's output fall faster when its top features are removed?

    The features with the highest scores are removed in ``steps`` equal steps, and the probability of the class is
    measured (the curve of the metric "deletion"). The same is done for random maps: uniform scores on the same cells.
    For regression models, and for targets that are values, the value is measured. Scores without a sign show what
    matters but not in which direction: if a value rises when all features are removed, a good map makes it rise faster.

    The cost is (steps + 1) · (1 + number of seeds) + 1 forward passes for each sample.

    Args:
        explanation: result of ``whyformer.explain``.
        model, processor, **options: as for :func:`whyformer.explain`.
        inputs: the explained inputs; by default the texts or pictures that the explanation holds.
        baseline: replacement of removed features. Pictures: "zero" (the processor's mean colour; default), "black",
            "mean", "blur" or "noise". Vectors: "zero" (default) or "mean". Text: the "mask", "unk" or "pad" of the
            tokenizer, or without one of the model's config (by default the first that it has), otherwise "delete".
        steps: number of steps of a curve.
        seeds: seeds of the random maps.
        batch_size: perturbed samples in one forward pass.
        target: needed only if the explanation does not hold its target: a user's function of the model's raw output.
        known: results for other explanations of the same inputs, whose random curves are reused if they are of the same
            kind.

    Raises:
        InputError: there are no inputs, the scores do not fit them, or the baseline is not available for them.
    """
    check_explanation(explanation)
    check_type("baseline", baseline, str | int | None, "the name of a baseline or the id of a token")
    check_count("batch_size", batch_size)
    _check_lists(seeds, known)
    fractions = equal_steps(steps)
    samples = _samples_of(explanation) if inputs is None else inputs
    if inputs is None:
        options["truncate"] = True  # as in the explanation
    ready = prepared(model, samples, processor, **options)
    if inputs is None and explanation.tokens not in (None, ready.inputs.features.tokens):  # a pair of texts
        raise InputError("this explanation does not hold its inputs as the model read them: pass inputs=...")
    if ready.inputs.batch != len(explanation):
        raise InputError(f"the explanation has {len(explanation)} samples, and there are {ready.inputs.batch} inputs")
    setting = baseline, fractions, tuple(seeds), batch_size
    if not ready.singles:
        return _compare(ready, explanation, target, setting, known)
    pairs = zip(ready.batches(target), ready.separate(explanation), strict=True)
    return _join([_compare(single, e, goal, setting) for (single, goal), e in pairs])


def _check_lists(seeds: Any, known: Any) -> None:
    """Raise unless these are lists of integers, at least one, and of results of :func:`trust`."""
    if not isinstance(seeds, Sequence) or not len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise InputError(f"seeds must be a list of at least one integer, for random maps, not {seeds!r}")
    for seed in seeds:
        check_seed("seeds: each of them", seed)
    if not isinstance(known, Sequence) or not all(isinstance(other, Trust) for other in known):
        raise InputError(f"known must be a list of results of trust, not {known!r:.60}")


def _samples_of(explanation: Explanation) -> Any:
    """Return the texts or pictures that an explanation holds."""
    samples = explanation.texts or explanation.originals or [None]
    if None in samples or explanation.parts:
        raise InputError("this explanation does not hold its inputs: pass inputs=...")
    return samples


def _compare(
    ready: Prepared, explanation: Explanation, target: Target, setting: Setting, known: Sequence[Trust] = ()
) -> Trust:
    """Compare the explanations of a batch with random maps; arguments as for :func:`trust`."""
    baseline, fractions, seeds, batch_size = setting
    filler = _default_baseline(ready.inputs) if baseline is None else baseline
    case = read_case(ready, explanation, target, batch_size)
    kind = (explanation.level, tuple(explanation.scores.shape), explanation.grid, tuple(explanation.target.tolist()),
            tuple(case.resolver.as_text() or ()), filler, fractions, seeds)  # fmt: skip
    earlier = next((t for t in known if t.kind == kind), None)
    curves = np.full((1 + len(seeds), len(explanation), len(fractions)), np.nan)
    for i, sample in enumerate(explanation):
        reuse = earlier is not None and bool(np.isfinite(earlier.random[:, i]).all())
        maps = {} if case.constant(i) else {0: case.features(i)}
        maps |= {} if reuse else {1 + d: _random_scores(sample, case, i, seed) for d, seed in enumerate(seeds)}
        if maps:
            masks = np.concatenate([removal_masks(scores, fractions) for scores in maps.values()])
            curves[list(maps), i] = case.perturbed(i, masks, filler).reshape(len(maps), -1)
        if earlier is not None and reuse:
            curves[1:, i] = earlier.random[:, i]
    areas = mean_curve_area(curves)
    sizes = [None if case.image else case.features(i).size for i in range(len(case))]
    messages = tuple(tuple(warnings(sample, size)) for sample, size in zip(explanation, sizes, strict=True))
    numeric = case.activation == "identity"
    unsigned = numeric and explanation.diagnostics.get("signed") is False
    return Trust(
        explanation.method, tuple(case.target.tolist()), fractions, curves[0], areas[0], curves[1:], areas[1:],
        messages, filler, seeds, kind, len(case) + case.forwards, numeric,
        tuple(unsigned and bool(curve[-1] > curve[0]) for curve in curves[0]),
    )  # fmt: skip


def _join(results: Sequence[Trust]) -> Trust:
    """Join the results of single samples."""
    rows: dict[str, Any] = {n: np.concatenate([getattr(t, n) for t in results]) for n in ("curves", "areas")}
    random: dict[str, Any] = {n: np.concatenate([getattr(t, n) for t in results], 1) for n in ("random", "chance")}
    names = "followed", "warnings", "rising"
    tuples: dict[str, Any] = {n: tuple(v for t in results for v in getattr(t, n)) for n in names}
    kind = tuple(t.kind for t in results)
    return replace(results[0], **rows, **random, **tuples, kind=kind, forwards=sum(t.forwards for t in results))


def _default_baseline(inputs: Inputs) -> str:
    if inputs.modality != "text":
        return "zero"
    return next((name for name in TOKENS if name in dict(inputs.fill_ids)), "delete")


def _random_scores(explanation: Explanation, case: Case, sample: int, seed: int) -> NDArray[np.float64]:
    """Return random scores ``[n]`` of the features, on the cells of the explanation."""
    draws = torch.Generator().manual_seed(seed)
    if not case.image:
        return torch.rand(case.features(sample).size, generator=draws).double().numpy()
    cells = replace(explanation, scores=torch.rand(explanation.scores.shape, generator=draws))
    return cells.heatmap(case.ready.inputs.image_size)[0].double().numpy().reshape(-1)


def warnings(e: Explanation, words: int | None = None) -> list[str]:
    """Return warnings about the map of one sample; ``words`` is the number of tokens of a text."""
    messages = [line for line in e.warnings if line not in of_input(e.features, 0)]
    scores, special = e.scores[0], e.special[0] if e.special is not None else []
    content = scores[[i for i in range(len(scores)) if i not in special]] if special else scores
    warned = of_map(content, e.diagnostics, 0, float(scores.abs().sum()))
    messages = [f"{e.method}: {line}." for line in dict.fromkeys([*messages, *warned])]
    if e.diagnostics.get("class_specific") is False:
        messages.append(
            f"{e.method}: the map is the same for every class. It shows where the model looks, not what supports a "
            "class."
        )
    if bool(e.scores.any()) and words is not None and words < 3:
        messages.append("A text of one or two tokens has little to compare.")
    return messages
