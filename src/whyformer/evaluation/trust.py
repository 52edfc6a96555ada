"""May it be believed? An explanation's deletion curve beside those of random maps, and what its run says against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from whyformer.baselines import TOKENS
from whyformer.errors import InputError
from whyformer.evaluation.case import Case, read_case
from whyformer.evaluation.metrics.faithfulness import equal_steps, mean_curve_area, removal_masks
from whyformer.explaining import open_model
from whyformer.explanation.doubts import of_input, of_map
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.options import Keywords, shows_options
from whyformer.targets import Target

STEPS = 10
"""Steps of a deletion curve: 0, 10 ... 100 % taken out."""
LOWEST = 0.1
"""Of the class's probability before anything is taken out: from less, every curve falls alike."""
SEEDS = (0, 1, 2)
"""Of the random maps that a curve is compared with."""


@dataclass(frozen=True, eq=False)
class Trust:
    """How far an explanation may be believed. Axis letters: B samples, D random maps, F fractions.

    Attributes:
        method: that made the scores.
        followed: ``[B]`` the class whose probability is followed: the explained one, or else the predicted one.
        fractions: ``[F]`` share of the features (pixels, content tokens) taken out, the highest scores first.
        curves: ``[B, F]`` probability of the class, or the model's number; areas: ``[B]`` under them, lower is better.
        random: ``[D, B, F]`` the same for random scores on the same cells; chance: ``[D, B]`` the areas.
            A constant map gives no order: its curve is NaN.
        warnings: for each sample, sentences about its map from the run's diagnostics and the scores.
        baseline: what stood in for a feature; seeds: of the random maps.
        kind: what the random curves depend on; forwards: plain forward passes (of one sample) that it took.
        numeric: whether a number is followed (a regression, a span) and no probability.
        rising: ``[B]`` whether a curve is the better the faster it rises: of a map without signs for a number that lies
            below what is left when all is taken out.
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
        """Whether the scores give an order, and there is something to fall: a class starts at a probability of at least
        :data:`LOWEST`, a number changes when features are taken out."""
        if not np.isfinite(self.areas[sample]):
            return False
        return self._moves(sample) if self.numeric else bool(self.curves[sample, 0] >= LOWEST)

    def _moves(self, sample: int) -> bool:
        """Whether the number changes by more than rounding."""
        all_curves = np.stack([self.curves[sample], *self.random[:, sample]])
        size = np.nanmax(np.abs(all_curves))
        return bool(np.nanmax(all_curves) - np.nanmin(all_curves) > 1e-6 * size)

    def better(self, sample: int = 0) -> bool | None:
        """True: the curve falls faster than each random one (rises, where :attr:`rising`); False: no faster than they
        do on average; None: between, or not measurable."""
        if not self.measurable(sample):
            return None
        sign = -1 if self.rising and self.rising[sample] else 1
        area, chance = sign * float(self.areas[sample]), sign * self.chance[:, sample]
        return True if area < chance.min() else False if area >= chance.mean() else None

    def verdict(self, sample: int = 0) -> str:
        """The comparison in one sentence."""
        if not np.isfinite(self.areas[sample]):
            return "Not measurable here: all scores are equal, so they give no order."
        if self.numeric and not self.measurable(sample):
            return "Not measurable here: the number stays the same whatever is taken out."
        if not self.measurable(sample):
            return (
                f"Not measurable here: the class starts at a probability of {self.curves[sample, 0]:.1%}, and a fall "
                f"is measured from {LOWEST:.0%} on."
            )
        form = ".4g" if self.numeric else ".3f"
        figures = f"area {self.areas[sample]:{form}}, random {self.chance[:, sample].mean():{form}}"
        if self.better(sample):
            return f"Better than each random map ({figures})."
        if self.better(sample) is None:
            return f"Better than random maps on average, not than each ({figures}): weak evidence."
        return f"Not better than random ({figures}): do not trust this map here."

    def figures(self, sample: int = 0) -> dict[str, Any]:
        """What views show of one sample, in plain values: its curve, and the lowest, mean and highest random one."""
        random = self.random[:, sample]
        return {
            "followed": self.followed[sample], "fractions": list(self.fractions), "curve": _plain(self.curves[sample]),
            "lowest": _plain(random.min(0)), "mean": _plain(random.mean(0)), "highest": _plain(random.max(0)),
            "verdict": self.verdict(sample), "warnings": list(self.warnings[sample]), "numeric": self.numeric,
        }  # fmt: skip

    def noted_in(self, explanation: Explanation) -> Explanation:
        """The explanation with these figures in ``diagnostics["trust"]``, so that whatever shows it shows them too."""
        figures = [self.figures(i) for i in range(len(explanation))]
        return replace(explanation, diagnostics={**explanation.diagnostics, "trust": figures})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN is None."""
        return {
            "method": self.method, "followed": list(self.followed), "fractions": list(self.fractions),
            "curves": _plain(self.curves), "areas": _plain(self.areas), "random": _plain(self.random),
            "chance": _plain(self.chance), "verdicts": [self.verdict(i) for i in range(len(self))],
            "warnings": [list(w) for w in self.warnings], "baseline": self.baseline, "seeds": list(self.seeds),
            "numeric": self.numeric,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = []
        for sample, warnings in enumerate(self.warnings):
            head = f"{self.method}: " if len(self) == 1 else f"{self.method}, sample {sample}: "
            lines += [head + self.verdict(sample), *(f"  {warning}" for warning in warnings)]
        return "\n".join(lines)


def _plain(values: NDArray[np.float64]) -> Any:
    found = values.astype(object)
    found[np.isnan(values)] = None
    return found.tolist()


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
    """Compare an explanation with chance: does what the model says fall faster than for random maps?

    That is the probability of the class; of a model for regression, and of targets that are values themselves, the
    number. (A map whose scores have no sign says what matters, not in which direction: where such a number rises when
    everything is taken out, a good map makes it rise faster.)

    The features with the highest scores are taken out, in ``steps`` equal steps, and the model is asked again (the
    curve of the metric "deletion"); the same is done for random maps of the same kind: uniform scores on the same
    cells. Costs (steps + 1) · (1 + number of seeds) + 1 plain forward passes a sample.

    Args:
        explanation: what ``whyformer.explain`` returned.
        model, processor, **options: as for :func:`whyformer.explain`.
        inputs: the explained ones; by default the explanation's own sentences or pictures, where it has them.
        baseline: what stands in for a feature. Pictures: "zero" (the processor's mean colour; default), "black",
            "mean", "blur" or "noise". Text: the tokenizer's "mask", "unk" or "pad" (default the first it has), else
            "delete".
        steps, seeds: of the curves and of the random maps.
        batch_size: perturbed samples in one forward pass.
        target: needed only where an explanation does not hold its own: a user's function of the model's raw output.
        known: results for other explanations of the very same inputs: random curves of the same kind are taken over
            from the first that has them instead of being measured again.

    Raises:
        InputError: no inputs are given or kept, scores that do not fit them, or a baseline that this input lacks.
    """
    fractions = equal_steps(steps)
    if not len(seeds):
        raise InputError("trust compares with random maps: give at least one seed")
    given = inputs if inputs is not None else explanation.texts or explanation.originals
    if given is None:
        raise InputError("this explanation does not hold what it explains: pass the inputs too, inputs=...")
    if inputs is None:
        options["truncate"] = True  # as it was when it was explained
    ready = open_model(model, processor, **options).prepare(given)
    if ready.inputs.batch != len(explanation):
        raise InputError(f"the explanation is of {len(explanation)} samples, and the inputs are {ready.inputs.batch}")
    chosen = baseline or _default(ready.inputs)
    case = read_case(ready, explanation, target, batch_size)
    kind = (explanation.level, tuple(explanation.scores.shape), explanation.grid, tuple(explanation.target.tolist()),
            tuple(case.resolver.written() or ()), chosen, steps, tuple(seeds))  # fmt: skip
    earlier = next((t for t in known if t.kind == kind), None)
    curves = np.full((1 + len(seeds), len(explanation), len(fractions)), np.nan)
    for i, one in enumerate(explanation):
        taken = earlier is not None and bool(np.isfinite(earlier.random[:, i]).all())
        maps = {} if case.constant(i) else {0: case.features(i)}
        maps |= {} if taken else {1 + d: _drawn(one, case, i, seed) for d, seed in enumerate(seeds)}
        if maps:
            masks = np.concatenate([removal_masks(scores, fractions) for scores in maps.values()])
            curves[list(maps), i] = case.follow(i, masks, chosen).reshape(len(maps), -1)
        if earlier is not None and taken:
            curves[1:, i] = earlier.random[:, i]
    areas = mean_curve_area(curves)
    sizes = [None if case.image else case.features(i).size for i in range(len(case))]
    warned = tuple(tuple(warnings(one, size)) for one, size in zip(explanation, sizes, strict=True))
    numeric = case.activation == "identity"
    unsigned = numeric and explanation.diagnostics.get("signed") is False
    return Trust(
        explanation.method, tuple(case.target.tolist()), fractions, curves[0], areas[0], curves[1:], areas[1:],
        warned, chosen, tuple(seeds), kind, len(case) + case.forwards, numeric,
        tuple(unsigned and bool(own[-1] > own[0]) for own in curves[0]),
    )  # fmt: skip


def _default(inputs: Inputs) -> str:
    if inputs.modality == "image":
        return "zero"
    return next((name for name in TOKENS if name in dict(inputs.fill_ids)), "delete")


def _drawn(explanation: Explanation, case: Case, sample: int, seed: int) -> NDArray[np.float64]:
    """``[n]`` random scores of the features, on the explanation's own cells."""
    draws = torch.Generator().manual_seed(seed)
    if not case.image:
        return torch.rand(case.features(sample).size, generator=draws).double().numpy()
    cells = replace(explanation, scores=torch.rand(explanation.scores.shape, generator=draws))
    return cells.heatmap(case.ready.inputs.image_size)[0].double().numpy().reshape(-1)


def warnings(e: Explanation, words: int | None = None) -> list[str]:
    """Sentences about the map of one sample, from its diagnostics and its scores; ``words``: how many a text has."""
    found = [line for line in e.warnings if line not in of_input(e.features, 0)]
    scores, folded = e.scores[0], e.special[0] if e.special is not None else []
    shown = scores[[i for i in range(len(scores)) if i not in folded]] if folded else scores
    about = of_map(shown, e.diagnostics, 0, float(scores.abs().sum()))
    found = [f"{e.method}: {line}." for line in dict.fromkeys([*found, *about])]
    if e.diagnostics.get("class_specific") is False:
        found.append(
            f"{e.method}: the same map for every class. It shows where the model looks, not what speaks for a class."
        )
    if bool(e.scores.any()) and words is not None and words < 3:
        found.append("With one or two tokens there is little to compare.")
    return found
