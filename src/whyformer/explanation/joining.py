"""One result of samples that were explained apart, as a batch of them would give it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.mosaic import spread
from whyformer.explanation.per_sample import of_batch
from whyformer.explanation.result import Explanation


def joined(samples: Sequence[Explanation], padding: str = "", left: bool = False) -> Explanation:
    """One explanation of samples, each of which is one of a batch of 1.

    Texts are padded to the longest, maps spread over a grid as fine as any of theirs (their sums are kept). A sample
    that lacks a picture which another has gets a blank one, with scores of 0.

    Args:
        padding: the token that fills up texts; left: whether it stands in front of them.

    Raises:
        InputError: their maps lie on no picture and are of unlike shapes, or their outputs are of unlike sizes.
    """
    named = _named(samples)
    longest = max(named, key=len)
    order = [*longest, *(n for own in named for n in own if n not in longest)]
    made: dict[str, Explanation] = {}
    for name in dict.fromkeys(order):
        model = next(own[name] for own in named if name in own)
        if model.level == "token":
            made[name] = _texts([own.get(name) for own in named], padding, left)
        else:
            made[name] = _maps([own.get(name) for own in named])
    try:
        facts: dict[str, Any] = {
            n: None if any(getattr(e, n) is None for e in samples) else torch.cat([getattr(e, n) for e in samples])
            for n in ("logits", "target", "classes", "normalizer")
        }
    except RuntimeError as error:
        raise InputError("the model gives these samples outputs of unlike sizes: explain them one at a time") from error
    names = [e.target_names for e in samples]
    facts["target_names"] = None if None in names else [one for own in names for one in own or ()]
    facts["labels"] = {k: v for e in samples for k, v in (e.labels or {}).items()} or None
    whole = {name: replace(e, **facts, input=name, parts={}) for name, e in made.items()}
    main, *others = whole
    return replace(whole[main], parts={name: whole[name] for name in others})


def _named(samples: Sequence[Explanation]) -> list[dict[str, Explanation]]:
    """The inputs of each by name; the only picture of one is the first where another has several.

    A text that others stand beside (``name`` and ``name[k]``) keeps its name.
    """
    counted = [{found[1] for n in e.inputs if (found := re.fullmatch(r"(.*)\[\d+\]", n))} for e in samples]
    several = {n for own, e in zip(counted, samples, strict=True) for n in own if n not in e.inputs}
    return [{f"{n}[0]" if n in several else n: e.part(n) for n in e.inputs} for e in samples]


def _first(parts: Sequence[Explanation | None]) -> Explanation:
    return next(one for one in parts if one is not None)


def _texts(parts: Sequence[Explanation | None], padding: str, left: bool) -> Explanation:
    wide = max(one.scores.shape[1] for one in parts if one is not None)

    def filled(values: Any, filler: Any) -> list[Any]:
        own, more = list(values), [filler] * (wide - len(values))
        return [*more, *own] if left else [*own, *more]

    def all_of(name: str, filler: Any = None) -> Any:
        missing: Any = None if filler is None else [[]]
        found: list[Any] = [missing if one is None else getattr(one.features, name) for one in parts]
        if any(one is None for one in found):
            return None
        return [own[0] if filler is None else filled(own[0], filler) for own in found]

    scores = torch.zeros(len(parts), wide, dtype=_first(parts).scores.dtype)
    starts = []
    for i, one in enumerate(parts):
        count = 0 if one is None else one.scores.shape[1]
        starts.append(wide - count if left else 0)
        if one is not None:
            scores[i, starts[i] : starts[i] + count] = one.scores[0]

    def places(name: str) -> list[list[int]] | None:
        found = [None if one is None else getattr(one.features, name) for one in parts]
        if not any(found):
            return None
        return [[start + i for i in (own or [[]])[0]] for start, own in zip(starts, found, strict=True)]

    features = replace(
        _first(parts).features, tokens=all_of("tokens", padding), offsets=all_of("offsets", (0, 0)),
        texts=all_of("texts"), extent=_extents(parts), unknown=places("unknown"),
        special=places("special"),
        sounds=_waves(parts), durations=all_of("durations"),
    )  # fmt: skip
    return replace(_first(parts), scores=scores, features=features, diagnostics=_diagnostics(parts))


def _extents(parts: Sequence[Explanation | None]) -> list[tuple[int, int]] | None:
    """What the model read of each text; None where nothing was cut off."""
    found = [None if one is None else one.extent for one in parts]
    if not any(found):
        return None
    texts = ["" if one is None else (one.texts or [""])[0] for one in parts]
    return [own[0] if own else (0, len(text)) for own, text in zip(found, texts, strict=True)]


def _waves(parts: Sequence[Explanation | None]) -> Tensor | None:
    """The sounds, padded to the longest; None where one has none."""
    waves = [one.sounds[0] for one in parts if one is not None and one.sounds is not None]
    return pad_sequence(waves, batch_first=True) if len(waves) == len(parts) else None


def _maps(parts: Sequence[Explanation | None]) -> Explanation:
    first, there = _first(parts), [one for one in parts if one is not None]
    shapes = {one.scores.shape[1:] for one in there}
    flat = all(one.frames is None and (one.level == "pixel") == (first.level == "pixel") for one in there)
    flat = flat and all(one.scores.dim() == 3 or one.grid is not None for one in there)
    if not flat and len(shapes) > 1:
        raise InputError(
            "how the maps of these samples lie on their pictures is unknown, and they are of unlike shapes: explain "
            "them one at a time"
        )
    features: Features = first.features
    if flat:
        maps = [None if one is None else one._maps()[0] for one in parts]
        high, wide = (max(m.shape[axis] for m in maps if m is not None) for axis in (0, 1))
        blank = torch.zeros(high, wide, dtype=first.scores.dtype)
        scores = torch.stack([blank if m is None else spread(m, high, wide).to(blank) for m in maps])
        if first.level == "patch":
            scores, features = scores.flatten(1), replace(features, grid=(high, wide))
        elif len(shapes) > 1:
            features = replace(features, image_size=(high, wide))
    else:
        scores = torch.cat([torch.zeros_like(first.scores) if one is None else one.scores for one in parts])
    originals, geometry = None, None
    if all(one.originals is not None and one.geometry is not None for one in there):
        size = features.grid or features.image_size or (1, 1)
        blank_one = Image.new("RGB", size[::-1], (255, 255, 255))
        originals = [blank_one if one is None else (one.originals or [])[0] for one in parts]
        geometry = [Geometry.whole(size) if one is None else (one.geometry or [])[0] for one in parts]
    if len({(one.cells, one.read, one.image_size) for one in there}) > 1:  # one box for all there is not
        lie = [None if one is None else one.boxes()[0] for one in parts]
        features = replace(features, cells=None, read=None)
        geometry = geometry and [g if b is None else replace(g, box=b) for g, b in zip(geometry, lie, strict=True)]
    seen = [one.pictures for one in there]
    known = None not in seen and len({one.shape for one in seen if one is not None}) == 1
    pictures = None
    if known and seen[0] is not None:
        white = torch.full_like(seen[0], 255)
        pictures = torch.cat([white if one is None else one.pictures for one in parts])  # type: ignore[misc]
    features = replace(features, originals=originals, geometry=geometry, pictures=pictures, tokens=None)
    return replace(first, scores=scores, features=features, diagnostics=_diagnostics(parts))


def _diagnostics(parts: Sequence[Explanation | None]) -> dict[str, Any]:
    found = [{} if one is None else dict(one.diagnostics) for one in parts]
    if None in parts:
        is_text = _first(parts).level == "token"
        said = "the target does not depend on this text" if is_text else "this prompt has no such picture"
        for one, own in zip(parts, found, strict=True):
            own.setdefault("input", [[said] if one is None else []])
    return of_batch(found)
