"""What the page asks of the library. Each answer is kept in the session under exactly what it depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import whyformer
from whyformer.apps.web.session import Session, Track, View
from whyformer.errors import InputError, WhyformerError
from whyformer.explanation.result import Explanation
from whyformer.inputs import prepare
from whyformer.methods import find
from whyformer.models import Loaded
from whyformer.models.readout import plain_logits
from whyformer.models.structure import class_count, class_names, find_blocks, refuse_unfit

STEPS = 10
"""Steps of a deletion curve: 0, 10 ... 100 % removed."""
DRAWS = 3
"""Random maps that a curve is compared with."""


@dataclass(frozen=True)
class Prediction:
    """What the model says of an input: classes from the likeliest down."""

    order: tuple[int, ...]
    probabilities: tuple[float, ...]
    labels: dict[int, str]
    blocks: int

    def label(self, index: int) -> str:
        return self.labels.get(index, f"class {index}")

    def top(self, count: int = 5) -> list[tuple[int, str, float]]:
        return [(i, self.label(i), self.probabilities[i]) for i in self.order[:count]]


@dataclass(frozen=True)
class Judged:
    """The deletion curve of one map, beside those of random maps of the same kind.

    Attributes:
        curve: ``[STEPS + 1]`` probability of the class; area: under it, 0 to 1.
        random: ``[DRAWS, STEPS + 1]``; chance: the areas under them.
        refusal: why there is no curve, where there is none.
    """

    explanation: Explanation
    curve: NDArray[np.float64] | None = None
    area: float = float("nan")
    random: NDArray[np.float64] | None = None
    chance: tuple[float, ...] = ()
    refusal: str | None = None


def predict(session: Session, loaded: Loaded, view: View) -> Prediction:
    """One plain forward pass."""

    def make() -> Prediction:
        refuse_unfit(loaded.model)
        args, kwargs = prepare(loaded.model, view.source.content, loaded.processor, truncate=view.truncate).feed
        logits = plain_logits(loaded.model, args, kwargs).double().cpu()
        labels, several = class_names(loaded.model)
        several = several or logits.shape[-1] == 1
        share = (torch.sigmoid(logits) if several else torch.softmax(logits, -1))[0]
        order = logits[0].argsort(descending=True, stable=True).tolist()
        return Prediction(tuple(order), tuple(share.tolist()), labels or {}, len(find_blocks(loaded.model)))

    result: Prediction = session.once(view.key("prediction"), make)
    return result


def check_targets(loaded: Loaded, targets: tuple[int, ...]) -> None:
    count = class_count(loaded.model)
    for index in targets:
        if index < 0 or (count is not None and index >= count):
            raise InputError(f"class {index} is out of range: the model has {count} classes, from 0")


def explain(session: Session, loaded: Loaded, view: View, track: Track) -> Iterator[Explanation | tuple[str, str]]:
    """The map of each method for each class, or (method, why there is none), as each becomes ready."""
    for name, settings in view.methods:
        method = find(name)
        full = method.complete(settings)
        same = view.key("map", name, full, "any class")
        for target in track(view.targets, name):
            own = view.key("map", name, full, target)
            if same in session.made:
                yield _for_class(session.made[same], target)
                continue
            try:
                e: Explanation = session.once(own, lambda: _explain(loaded, view, name, full, target, track))  # noqa: B023
            except WhyformerError as error:
                yield name, str(error)
                break
            if e.diagnostics.get("class_specific") is False:
                session.made[same] = session.made.pop(own)
            yield e


def _explain(loaded: Loaded, view: View, name: str, settings: dict[str, Any], target: int, track: Track) -> Explanation:
    made = whyformer.explain(
        loaded.model, view.source.content, name, target, loaded.processor, truncate=view.truncate, progress=track,
        **settings,
    )  # fmt: skip
    # one copy of the picture for all maps of it
    picture = view.source.content
    return made if made.originals is None or isinstance(picture, str) else replace(made, originals=[picture])


def _for_class(e: Explanation, target: int) -> Explanation:
    """A map that is the same for all classes, under the class asked for: just what ``explain`` would return."""
    return replace(e, target=torch.tensor([target]), target_names=[(e.labels or {}).get(target, str(target))])


def judge(session: Session, loaded: Loaded, view: View, results: list[Explanation], track: Track) -> Iterator[Judged]:
    """The deletion curve of each map and of random maps of its kind (same cells, random scores)."""
    options: dict[str, Any] = {"steps": STEPS, **_substitute(loaded)}

    def measure(e: Explanation) -> tuple[NDArray[np.float64], float]:
        found = whyformer.evaluate(
            loaded.model, view.source.content, e, "deletion", loaded.processor, target=e.target.tolist(),
            truncate=view.truncate, **options,
        )  # fmt: skip
        assert found.curves is not None
        return found.curves[0], found.value

    def chance(e: Explanation) -> list[tuple[NDArray[np.float64], float]]:
        generators = [torch.Generator().manual_seed(seed) for seed in range(DRAWS)]
        return [measure(replace(e, scores=torch.rand(e.scores.shape, generator=g))) for g in track(generators)]

    for e in track(results, "measuring", len(results)):
        target = int(e.target[0])
        try:
            curve, area = session.once(view.key("curve", e.method, e.settings, target), lambda: measure(e))  # noqa: B023
            cells = [e.level, list(e.scores.shape), e.grid]
            drawn = session.once(view.key("chance", cells, target), lambda: chance(e))  # noqa: B023
        except WhyformerError as error:
            yield Judged(e, refusal=str(error))
        else:
            yield Judged(e, curve, area, np.stack([c for c, _ in drawn]), tuple(a for _, a in drawn))


def _substitute(loaded: Loaded) -> dict[str, str]:
    """What stands in for a removed word: [MASK], or what the tokenizer has instead. Pictures: the mean colour."""
    if loaded.modality == "image":
        return {"substrate": "mean"}
    known = [n for n in ("mask", "unk", "pad") if isinstance(getattr(loaded.processor, f"{n}_token_id", None), int)]
    return {"replace": known[0] if known else "delete"}


def attention(session: Session, loaded: Loaded, view: View) -> Tensor:
    """``[L, N, N]`` the attention maps of all blocks on the text, averaged over heads: row = who looks."""

    def make() -> Tensor:
        maps = whyformer.attention_maps(loaded.model, view.source.content, loaded.processor, truncate=view.truncate)
        return torch.stack([maps.matrix(block) for block in range(maps.blocks)])

    result: Tensor = session.once(view.key("attention"), make)
    return result
