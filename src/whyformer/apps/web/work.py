"""What the page asks of the library. Each answer is kept in the session under exactly what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import whyformer
from whyformer.apps.web.session import Session, Track, View
from whyformer.comparing import Refusal, each
from whyformer.errors import WhyformerError
from whyformer.evaluate.forwards import probabilities
from whyformer.evaluate.trust import Trust
from whyformer.explaining import Ready, begin
from whyformer.explanation.result import Explanation
from whyformer.methods import find
from whyformer.models import Loaded
from whyformer.models.structure import find_blocks, refuse_unfit


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


def ready(session: Session, loaded: Loaded, view: View) -> Ready:
    """The model with this input, prepared once."""

    def make() -> Ready:
        refuse_unfit(loaded.model)
        return begin(loaded.model, view.source.content, loaded.processor, truncate=view.truncate)

    return session.once(view.key("ready"), make)


def predict(session: Session, loaded: Loaded, view: View) -> Prediction:
    """One plain forward pass."""
    prepared = ready(session, loaded, view)
    logits = prepared.logits().double().cpu()
    share = probabilities(logits[0].numpy(), prepared.multi_label)
    order = logits[0].argsort(descending=True, stable=True).tolist()
    return Prediction(tuple(order), tuple(share.tolist()), prepared.labels or {}, len(find_blocks(loaded.model)))


def explain(session: Session, loaded: Loaded, view: View, track: Track) -> Iterator[Explanation | Refusal]:
    """The map of each method for each class, or why there is none, as each becomes ready."""

    def once(key: tuple[str, dict[str, Any], int], make: Callable[[], Explanation]) -> Explanation:
        same, own = view.key("map", *key[:2], "any class"), view.key("map", *key)
        e: Explanation = session.made[same] if same in session.made else session.once(own, make)
        if e.diagnostics.get("class_specific") is False:
            session.made[same] = session.made.pop(own, e)
        return e

    asked = [(find(name), settings) for name, settings in view.methods]
    found = each(ready(session, loaded, view), asked, view.targets, progress=track, once=once)
    yield from track(found, "explaining", len(asked) * len(view.targets))


def judge(
    session: Session, loaded: Loaded, view: View, results: list[Explanation], track: Track
) -> Iterator[tuple[Explanation, Trust | str]]:
    """How far each map may be believed, or why that cannot be measured."""
    inputs, done = ready(session, loaded, view).inputs, list[Trust]()
    for e in track(results, "measuring", len(results)):
        measure = partial(whyformer.trust, e, loaded.model, inputs, loaded.processor, known=done)
        try:
            done.append(session.once(view.key("trust", e.method, e.settings, e.target.tolist()), measure))
        except WhyformerError as error:
            yield e, str(error)
        else:
            yield e, done[-1]


def attention(session: Session, loaded: Loaded, view: View) -> Tensor:
    """``[L, N, N]`` the attention maps of all blocks on the text, averaged over heads: row = who looks."""

    def make() -> Tensor:
        maps = whyformer.attention_maps(loaded.model, view.source.content, loaded.processor, truncate=view.truncate)
        return torch.stack([maps.matrix(block) for block in range(maps.blocks)])

    return session.once(view.key("attention"), make)
