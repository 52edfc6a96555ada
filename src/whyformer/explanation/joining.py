"""Join the explanations of single samples into the explanation of a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
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


def joined(samples: Sequence[Explanation], padding: str = "", pad_left: bool = False) -> Explanation:
    """Join explanations of one sample each into one explanation.

    Texts are padded to the longest. Maps are distributed over the finest of their grids, which preserves their sums. A
    sample without a picture that another sample has gets a blank picture with scores of 0.

    Args:
        samples: explanations, each with a batch axis of 1.
        padding: the padding token of texts.
        pad_left: pad texts on the left instead of the right.

    Raises:
        InputError: maps of different shapes have no known position on a picture, or the outputs have different sizes.
    """
    named = _named(samples)
    longest = max(named, key=len)
    order = [*longest, *(n for inputs in named for n in inputs if n not in longest)]
    batches: dict[str, Explanation] = {}
    for name in dict.fromkeys(order):
        parts = [inputs.get(name) for inputs in named]
        batches[name] = _texts(parts, padding, pad_left) if _first(parts).level == "token" else _maps(parts)
    try:
        facts: dict[str, Any] = {
            n: None if any(getattr(e, n) is None for e in samples) else torch.cat([getattr(e, n) for e in samples])
            for n in ("logits", "target", "classes", "normalizer")
        }
    except RuntimeError as error:
        raise InputError("the outputs of these samples have different sizes: explain them one at a time") from error
    names = [e.target_names for e in samples]
    facts["target_names"] = None if None in names else [name for target in names for name in target or ()]
    facts["labels"] = {k: v for e in samples for k, v in (e.labels or {}).items()} or None
    merged = {name: replace(e, **facts, input=name, parts={}) for name, e in batches.items()}
    main, *others = merged
    return replace(merged[main], parts={name: merged[name] for name in others})


def without_padding(e: Explanation, real: Tensor) -> Explanation:
    """Return the explanation of one text without its padding.

    Args:
        e: an explanation with a batch axis of 1.
        real: ``[N]`` True at real tokens.
    """
    if bool(real.all()):
        return e
    indices = real.nonzero().flatten().tolist()

    def cut(values: list[Any] | None) -> Any:
        return None if values is None else [[entries[i] for i in indices] for entries in values]

    def moved(places: list[list[int]] | None) -> list[list[int]] | None:
        return None if places is None else [[indices.index(i) for i in row if i in indices] for row in places]

    places = {"unknown": moved(e.unknown), "special": moved(e.special)}
    return replace(e, scores=e.scores[:, real]).with_features(tokens=cut(e.tokens), offsets=cut(e.offsets), **places)


def _named(samples: Sequence[Explanation]) -> list[dict[str, Explanation]]:
    """Return the inputs of each sample by name.

    The only picture ``name`` of a sample is renamed ``name[0]`` if another sample has several pictures. A text
    ``name`` beside inputs ``name[k]`` keeps its name.
    """
    indexed = [{match[1] for n in e.inputs if (match := re.fullmatch(r"(.*)\[\d+\]", n))} for e in samples]
    several = {n for names, e in zip(indexed, samples, strict=True) for n in names if n not in e.inputs}
    return [{f"{n}[0]" if n in several else n: e.part(n) for n in e.inputs} for e in samples]


def _first(parts: Sequence[Explanation | None]) -> Explanation:
    return next(part for part in parts if part is not None)


def _texts(parts: Sequence[Explanation | None], padding: str, pad_left: bool) -> Explanation:
    """Join the scores of texts of different lengths; a sample without this text has scores of 0 only."""
    first, wide = _first(parts), max(part.scores.shape[1] for part in parts if part is not None)
    none = Features(tokens=[[]], offsets=[[]])
    absent = replace(first, scores=first.scores.new_zeros(1, 0), features=none)
    samples = [_padded(absent if part is None else part, wide, padding, pad_left) for part in parts]
    values = {f.name: [getattr(sample.features, f.name) for sample in samples] for f in fields(Features)}
    if any(values["extent"]):  # some texts are truncated
        texts = ["" if sample.texts is None else sample.texts[0] for sample in samples]
        values["extent"] = [extent or [(0, len(text))] for extent, text in zip(values["extent"], texts, strict=True)]
    for name in ("unknown", "special", "skipped"):
        if any(entry is not None for entry in values[name]):
            values[name] = [entry or [[]] for entry in values[name]]
    lists: dict[str, Any] = {
        name: None if None in values[name] else [entry for (entry,) in values[name]]
        for name in ("tokens", "offsets", "texts", "extent", "skipped", "unknown", "special", "durations")
    }
    waves = [sample.sounds[0] for sample in samples if sample.sounds is not None]
    sounds = pad_sequence(waves, batch_first=True) if len(waves) == len(samples) else None
    scores = torch.cat([sample.scores for sample in samples])
    features = replace(first.features, **lists, sounds=sounds)
    return replace(first, scores=scores, features=features, diagnostics=_diagnostics(parts))


def _padded(e: Explanation, wide: int, padding: str, pad_left: bool) -> Explanation:
    """Return the explanation of one text, padded to ``wide`` tokens."""
    more = wide - e.scores.shape[1]

    def filled(entries: list[Any] | None, filler: Any) -> list[Any] | None:
        fill = [filler] * more
        return None if entries is None else [[*fill, *row] if pad_left else [*row, *fill] for row in entries]

    def moved(places: list[list[int]] | None) -> list[list[int]] | None:
        return None if places is None else [[i + more * pad_left for i in row] for row in places]

    scores = torch.nn.functional.pad(e.scores, (more, 0) if pad_left else (0, more))
    lists = {"tokens": filled(e.tokens, padding), "offsets": filled(e.offsets, (0, 0))}
    return replace(e, scores=scores).with_features(**lists, unknown=moved(e.unknown), special=moved(e.special))


def _maps(parts: Sequence[Explanation | None]) -> Explanation:
    """Join maps of pictures; a sample without this picture has a white one with scores of 0."""
    first, present = _first(parts), [part for part in parts if part is not None]
    shapes = {part.scores.shape[1:] for part in present}
    flat = all(part.frames is None and (part.level == "pixel") == (first.level == "pixel") for part in present)
    flat = flat and all(part.scores.dim() == 3 or part.grid is not None for part in present)
    if not flat and len(shapes) > 1:
        raise InputError(
            "the maps of these samples have different shapes and no known position on their pictures: explain the "
            "samples one at a time"
        )
    size = first.grid or first.image_size or (1, 1)
    white = None if first.pictures is None else torch.full_like(first.pictures, 255)
    blank = replace(first, scores=torch.zeros_like(first.scores)).with_features(
        originals=[Image.new("RGB", size[::-1], (255, 255, 255))], geometry=[Geometry.whole(size)], pictures=white
    )
    samples = [blank if part is None else part for part in parts]
    features: Features = first.features
    if flat:
        maps = [sample._maps()[0] for sample in samples]
        high, wide = (max(m.shape[axis] for m in maps) for axis in (0, 1))
        scores = torch.stack([spread(m, high, wide).to(first.scores) for m in maps])
        if first.level == "patch":
            scores, features = scores.flatten(1), replace(features, grid=(high, wide))
        elif len(shapes) > 1:
            features = replace(features, image_size=(high, wide))
    else:
        scores = torch.cat([sample.scores for sample in samples])
    common = len({(part.cells, part.read, part.image_size) for part in present}) == 1
    if not common:
        features = replace(features, cells=None, read=None)
    originals: list[Image.Image | None] | None = None
    geometry: list[Geometry | None] | None = None
    if any(part.originals is not None and part.geometry is not None for part in present):
        places = [_place(sample, common) for sample in samples]
        originals, geometry = [picture for picture, _ in places], [place for _, place in places]
    pictures = [sample.pictures for sample in samples if sample.pictures is not None]
    complete = len(pictures) == len(samples) and len({picture.shape for picture in pictures}) == 1
    joint = torch.cat(pictures) if complete else None
    features = replace(features, originals=originals, geometry=geometry, pictures=joint, tokens=None)
    return replace(first, scores=scores, features=features, diagnostics=_diagnostics(parts))


def _place(part: Explanation, common: bool) -> tuple[Image.Image | None, Geometry | None]:
    """Return the picture of a part and the position of its input, or of its map if not all parts have the same box.

    The position of a map is always known: if that of the input is not, the input takes the place of the picture.
    """
    original, geometry = part.originals and part.originals[0], part.geometry and part.geometry[0]
    if common:
        return original or None, geometry or None
    if not geometry and part.pictures is not None and part.pictures.dim() == 4:
        original = Image.fromarray(part.pictures[0].numpy())
    high, wide = part.image_size or part.grid or part.scores.shape[-2:]
    box, seen = part.boxes()
    place = geometry or Geometry.whole((int(high), int(wide)))
    return original or None, replace(place, box=box, seen=None if seen == box else seen)


def _diagnostics(parts: Sequence[Explanation | None]) -> dict[str, Any]:
    diagnostics = [{} if part is None else dict(part.diagnostics) for part in parts]
    if None in parts:
        is_text = _first(parts).level == "token"
        note = "the target does not depend on this text" if is_text else "this prompt does not have this picture"
        for part, entry in zip(parts, diagnostics, strict=True):
            entry.setdefault("input", [[note] if part is None else []])
    return of_batch(diagnostics)
