"""Whether the values of an explanation that was read fit together, so that whatever is shown of it can be shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Box

MOST_PIXELS = 2**28
"""A picture or a map of more is refused: it would fill the memory."""


def check_fit(made: Mapping[str, Any]) -> None:
    """Refuse tensors and features that are not of one number of samples, of features, or of pixels.

    Args:
        made: the arguments of an Explanation.

    Raises:
        InputError: with what does not fit.
    """
    scores, target, logits, features = (made[name] for name in ("scores", "target", "logits", "features"))
    level = made["level"]
    _tensors(scores, target, logits)
    _kept(logits, made.get("classes"), made.get("normalizer"))
    batch = len(scores)
    names = ("tokens", "offsets", "texts", "extent", "unknown", "special", "durations", "geometry", "originals",
             "pictures", "sounds")  # fmt: skip
    listed = {n: getattr(features, n) for n in names}
    for name, value in {**listed, "target_names": made["target_names"]}.items():
        if value is not None and len(value) != batch:
            raise InputError(f"its {name} are {len(value)}, and its scores are of {batch} samples")
    dims = {"token": (2,), "patch": (2,), "pixel": (3, 4)}.get(level)
    if dims is not None and scores.dim() not in dims:
        raise InputError(f"its scores have the shape {tuple(scores.shape)}, which no {level}s have")
    _sizes(features, level, scores)
    if level == "token":
        _text(features, scores.shape[1])
    _seen(features)
    check_said(made.get("diagnostics") or {}, batch)


def check_said(diagnostics: Mapping[str, Any], batch: int) -> None:
    """Refuse diagnostics of which what is shown (warnings, notes, how far the map may be believed) is of another kind.

    Raises:
        InputError: with which.
    """
    found = {name: diagnostics.get(name) for name in ("warnings", "input", "trust")}
    for name, own in found.items():
        if own is not None and not isinstance(own, list | tuple):
            raise InputError(f"its {name} are no list")
    warnings, notes, trust = (found[name] or [] for name in found)
    if warnings and not (len(warnings) == batch and all(map(_texts, warnings))):
        raise InputError("its warnings are no sentences")
    if not all(map(_texts, notes)):
        raise InputError("the notes on its input are no sentences")
    if trust and not (len(trust) == batch and all(map(_believed, trust))):
        raise InputError("the figures of how far it may be believed are of another kind")


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _believed(figures: Any) -> bool:
    """Whether these are what ``Trust.figures`` gives."""
    if not isinstance(figures, Mapping) or not isinstance(figures.get("followed"), int):
        return False
    lines = [figures.get(name) for name in ("curve", "lowest", "mean", "highest")]
    numbers = all(isinstance(own, list) and all(isinstance(n, int | float | None) for n in own) for own in lines)
    whole = numbers and len({len(own) for own in lines if own is not None}) == 1
    return whole and isinstance(figures.get("verdict"), str) and _texts(figures.get("warnings"))


def _tensors(scores: Tensor, target: Tensor, logits: Tensor) -> None:
    for name, tensor in {"scores": scores, "target": target, "logits": logits}.items():
        if tensor.is_sparse or tensor.is_quantized or tensor.is_complex() or tensor.dtype == torch.bool:
            raise InputError(f"its {name} are of another kind: {tensor.dtype}")
    batch = len(scores) if scores.dim() > 1 else 0
    if not batch or logits.dim() != 2 or target.dim() != 1 or not len(logits) == len(target) == batch:
        raise InputError("its scores, logits and target are for different numbers of samples")
    if not scores.is_floating_point() or not logits.is_floating_point() or target.is_floating_point():
        raise InputError("its scores and logits must be fractional numbers, and its target whole ones")
    if not scores[0].numel() or not logits.shape[1]:
        raise InputError("it has no scores, or no logits")


def _kept(logits: Tensor, classes: Tensor | None, normalizer: Tensor | None) -> None:
    """Which classes the logits are of, and what makes log-probabilities of them."""
    if classes is None and normalizer is None:
        return
    if classes is None or normalizer is None:
        raise InputError("it has classes without a normalizer, or a normalizer without classes")
    if classes.dtype != torch.int64 or classes.shape != logits.shape or not bool((classes >= 0).all()):
        raise InputError("its classes are not those of its logits")
    if normalizer.dtype != torch.float64 or normalizer.shape != logits.shape[:1]:
        raise InputError("its normalizer is of another kind")
    if not bool(torch.isfinite(normalizer).all()) or bool((logits.double().logsumexp(-1) > normalizer + 1e-3).any()):
        raise InputError("its normalizer is not that of its logits")


def _sizes(features: Features, level: str, scores: Tensor) -> None:
    """Grids and pictures."""
    for name in ("grid", "image_size"):
        size = getattr(features, name)
        if size is not None and (min(size) < 1 or math.prod(size) > MOST_PIXELS):
            raise InputError(f"its {name} cannot be: {' x '.join(map(str, size))}")
    for name in ("frames", "sampling_rate", "rate"):
        value = getattr(features, name)
        if value is not None and not 0 < value < 2**31:
            raise InputError(f"its {name} cannot be: {value}")
    if any(not 0 <= value < 2**31 for value in features.durations or ()):
        raise InputError(f"its durations cannot be: {features.durations}")
    laid = (features.frames or 1) * math.prod(features.grid or ())
    if level == "patch" and features.grid is not None and laid != scores.shape[1]:
        raise InputError(f"its grid has {laid} patches, and its scores are of {scores.shape[1]}")
    if level == "pixel" and features.frames != (scores.shape[1] if scores.dim() == 4 else None):
        raise InputError(f"its frames are {features.frames}, and its scores have the shape {tuple(scores.shape)}")
    for name in ("cells", "read"):
        box = getattr(features, name)
        if box is not None and not (_is_box(box) and features.image_size is not None):
            raise InputError(f"its {name} cannot be: {box}")
    for known in features.geometry or ():
        if math.prod(known.size) > MOST_PIXELS or not _is_box(known.box):
            raise InputError(f"an impossible geometry: size {known.size}, box {known.box}")


def _is_box(box: Box) -> bool:
    left, top, right, bottom = box
    return left < right and top < bottom and all(math.isfinite(n) and abs(n) < 2**31 for n in box)


def _text(features: Features, count: int) -> None:
    """Tokens and what is said of each."""
    for name, lists in {"tokens": features.tokens, "offsets": features.offsets}.items():
        for own in lists or ():
            if len(own) != count:
                raise InputError(f"its {name} are {len(own)}, and its scores are of {count} tokens")
    texts = features.texts
    for name, places in {"unknown": features.unknown, "special": features.special}.items():
        _within(name, places, lambda own, i: all(0 <= n < count for n in own))
    if texts is not None:
        _within("offsets", features.offsets, lambda own, i: all(0 <= a <= b <= len(texts[i]) for a, b in own))
        _within("extent", features.extent, lambda own, i: 0 <= own[0] <= own[1] <= len(texts[i]))


def _within(name: str, lists: Sequence[Any] | None, good: Callable[[Any, int], bool]) -> None:
    for i, own in enumerate(lists or ()):
        if not good(own, i):
            raise InputError(f"its {name} of sample {i} lie outside of it")


def _seen(features: Features) -> None:
    """Pictures and sounds."""
    pictures, sounds = features.pictures, features.sounds
    if pictures is not None and (
        pictures.dtype != torch.uint8 or pictures.dim() not in (4, 5) or pictures.shape[-1] != 3 or 0 in pictures.shape
    ):
        raise InputError(f"its pictures are of another kind: {pictures.dtype} {tuple(pictures.shape)}")
    size = features.image_size
    if pictures is not None and size is not None and tuple(pictures.shape[-3:-1]) != tuple(size):
        raise InputError(
            f"its pictures have {tuple(pictures.shape[-3:-1])} pixels, and its image_size is {tuple(size)}"
        )
    for picture, known in zip(features.originals or (), features.geometry or (), strict=False):
        if picture.mode != "RGB" or (picture.height, picture.width) != tuple(known.size):
            raise InputError(f"an original of {picture.height} x {picture.width} pixels has a geometry of {known.size}")
    if sounds is not None and (not sounds.is_floating_point() or sounds.dim() != 2 or 0 in sounds.shape):
        raise InputError(f"its sounds are of another kind: {sounds.dtype} {tuple(sounds.shape)}")
