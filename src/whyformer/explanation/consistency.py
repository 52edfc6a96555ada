"""Check that the values of a loaded explanation are consistent, so that every view can show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Box

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

MOST_PIXELS = 2**28
"""Most pixels of a picture or map; larger sizes in a file would exhaust the memory."""


def check_fit(e: Explanation) -> None:
    """Check that tensors and features agree in their numbers of samples, features and pixels.

    Raises:
        InputError: a value is inconsistent with another; the message names it.
    """
    _tensors(e.scores, e.target, e.logits)
    _stored_logits(e.logits, e.classes, e.normalizer)
    features, batch = e.features, len(e)
    for name, value in {**vars(features), "target_names": e.target_names}.items():
        if isinstance(value, list | Tensor) and len(value) != batch:
            raise InputError(f"it has {name} for {len(value)} samples, and scores for {batch}")
    dims = {"token": (2,), "patch": (2,), "pixel": (3, 4)}[e.level]
    if e.scores.dim() not in dims:
        raise InputError(f"its scores have the shape {tuple(e.scores.shape)}, which does not fit the level {e.level!r}")
    _sizes(features, e.level, e.scores)
    if e.level == "token":
        _text(features, e.scores.shape[1])
    _media(features)
    check_diagnostics(e.diagnostics, batch)


def check_diagnostics(diagnostics: Mapping[str, Any], batch: int) -> None:
    """Check the types of the diagnostics that are displayed: warnings, notes on the input, and trust.

    Raises:
        InputError: a diagnostic has the wrong type; the message names it.
    """
    displayed = {name: diagnostics.get(name) for name in ("warnings", "input", "trust")}
    for name, entries in displayed.items():
        if entries is not None and not isinstance(entries, list | tuple):
            raise InputError(f"its diagnostics {name!r} must be a list")
    warnings, notes, trust = (entries or [] for entries in displayed.values())
    if warnings and not (len(warnings) == batch and all(map(_is_sentences, warnings))):
        raise InputError("its warnings must be a list of sentences for each sample")
    if not all(map(_is_sentences, notes)):
        raise InputError("the notes on its input must be lists of sentences")
    if trust and not (len(trust) == batch and all(map(_is_trust, trust))):
        raise InputError("its figures of trust are not those of Trust.figures for each sample")


def _is_sentences(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _is_trust(figures: Any) -> bool:
    """Return True for a mapping as ``Trust.figures`` returns it."""
    if not isinstance(figures, Mapping) or not isinstance(figures.get("followed"), int):
        return False
    lines = [figures.get(name) for name in ("curve", "lowest", "mean", "highest")]
    numbers = all(isinstance(line, list) and all(isinstance(n, int | float | None) for n in line) for line in lines)
    equal = numbers and len({len(line) for line in lines if line is not None}) == 1
    return equal and isinstance(figures.get("verdict"), str) and _is_sentences(figures.get("warnings"))


def _tensors(scores: Tensor, target: Tensor, logits: Tensor) -> None:
    for name, tensor in {"scores": scores, "target": target, "logits": logits}.items():
        if tensor.is_sparse or tensor.is_quantized or tensor.is_complex() or tensor.dtype == torch.bool:
            raise InputError(f"its {name} have an unsupported type: {tensor.dtype}")
    batch = len(scores) if scores.dim() > 1 else 0
    if not batch or logits.dim() != 2 or target.dim() != 1 or not len(logits) == len(target) == batch:
        raise InputError("its scores, logits and target are for different numbers of samples")
    if not scores.is_floating_point() or not logits.is_floating_point() or target.is_floating_point():
        raise InputError("its scores and logits must be floating-point numbers, and its target integers")
    if not scores[0].numel() or not logits.shape[1]:
        raise InputError("it has no scores, or no logits")


def _stored_logits(logits: Tensor, classes: Tensor | None, normalizer: Tensor | None) -> None:
    """Check the classes and the normalizer of logits that do not cover all classes."""
    if classes is None and normalizer is None:
        return
    if classes is None or normalizer is None:
        raise InputError("it has classes without a normalizer, or a normalizer without classes")
    if classes.dtype != torch.int64 or classes.shape != logits.shape or not bool((classes >= 0).all()):
        raise InputError("its classes do not fit its logits")
    if normalizer.dtype != torch.float64 or normalizer.shape != logits.shape[:1]:
        raise InputError("its normalizer must be a float64 number for each sample")
    if not bool(torch.isfinite(normalizer).all()) or bool((logits.double().logsumexp(-1) > normalizer + 1e-3).any()):
        raise InputError("its normalizer does not fit its logits")


def _sizes(features: Features, level: str, scores: Tensor) -> None:
    """Check the sizes of grids, pictures, videos and sounds."""
    for name in ("grid", "image_size"):
        size = getattr(features, name)
        if size is not None and (min(size) < 1 or math.prod(size) > MOST_PIXELS):
            raise InputError(f"its {name} is invalid: {' x '.join(map(str, size))}")
    for name in ("frames", "sampling_rate", "rate"):
        value = getattr(features, name)
        if value is not None and not 0 < value < 2**31:
            raise InputError(f"its {name} is invalid: {value}")
    if any(not 0 <= value < 2**31 for value in features.durations or ()):
        raise InputError(f"its durations are invalid: {features.durations}")
    patches = (features.frames or 1) * math.prod(features.grid or ())
    if level == "patch" and features.grid is not None and patches != scores.shape[1]:
        raise InputError(f"its grid has {patches} patches, and it has scores for {scores.shape[1]}")
    if level == "pixel" and features.frames != (scores.shape[1] if scores.dim() == 4 else None):
        raise InputError(f"its frames are {features.frames}, and its scores have the shape {tuple(scores.shape)}")
    for name in ("cells", "read"):
        box = getattr(features, name)
        if box is not None and not (_is_box(box) and features.image_size is not None):
            raise InputError(f"its {name} is an invalid box: {box}")
    for geometry in filter(None, features.geometry or ()):
        if math.prod(geometry.size) > MOST_PIXELS or not all(map(_is_box, filter(None, (geometry.box, geometry.seen)))):
            raise InputError(f"invalid geometry: size {geometry.size}, box {geometry.box}")


def _is_box(box: Box) -> bool:
    left, top, right, bottom = box
    return left < right and top < bottom and all(math.isfinite(n) and abs(n) < 2**31 for n in box)


def _text(features: Features, count: int) -> None:
    """Check tokens, their offsets and their indices."""
    for name, lists in {"tokens": features.tokens, "offsets": features.offsets}.items():
        for entries in lists or ():
            if len(entries) != count:
                raise InputError(f"it has {len(entries)} {name}, and scores for {count} tokens")
    texts = features.texts
    for name, places in {"unknown": features.unknown, "special": features.special}.items():
        _within(name, places, lambda indices, i: all(0 <= n < count for n in indices))
    if texts is not None:
        for name, spans in {"offsets": features.offsets, "skipped": features.skipped}.items():
            _within(name, spans, lambda pairs, i: all(0 <= a <= b <= len(texts[i]) for a, b in pairs))
        _within("extent", features.extent, lambda pair, i: 0 <= pair[0] <= pair[1] <= len(texts[i]))


def _within(name: str, entries: Sequence[Any] | None, inside: Callable[[Any, int], bool]) -> None:
    for i, entry in enumerate(entries or ()):
        if not inside(entry, i):
            raise InputError(f"its {name} of sample {i} are out of range")


def _media(features: Features) -> None:
    """Check pictures and sounds."""
    pictures, sounds = features.pictures, features.sounds
    if pictures is not None and (
        pictures.dtype != torch.uint8 or pictures.dim() not in (4, 5) or pictures.shape[-1] != 3 or 0 in pictures.shape
    ):
        raise InputError(f"its pictures must be uint8 [..., H, W, 3], not {pictures.dtype} {tuple(pictures.shape)}")
    size = features.image_size
    if pictures is not None and size is not None and tuple(pictures.shape[-3:-1]) != tuple(size):
        raise InputError(
            f"its pictures have {tuple(pictures.shape[-3:-1])} pixels, and its image_size is {tuple(size)}"
        )
    for picture, geometry in zip(features.originals or (), features.geometry or (), strict=False):
        if picture is None or geometry is None:
            continue
        if picture.mode != "RGB" or (picture.height, picture.width) != tuple(geometry.size):
            pixels = f"{picture.height} x {picture.width}"
            raise InputError(f"an original of {pixels} pixels does not fit its geometry of {geometry.size}")
    if sounds is not None and (not sounds.is_floating_point() or sounds.dim() != 2 or 0 in sounds.shape):
        raise InputError(f"its sounds must be floating-point [B, T], not {sounds.dtype} {tuple(sounds.shape)}")
