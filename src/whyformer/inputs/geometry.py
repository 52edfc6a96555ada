"""Read off an image processor which part of a picture the model sees, to the pixel, and check that it is so.

The steps are followed with the processor's own rounding: Hugging Face processors of both backends (height and width,
shortest edge, longest edge, largest height and width, ``crop_pct``, centre crop, padding) and compositions of
torchvision or timm transforms. A processor that cannot be read, or that does something else than was read, gives no
geometry, and its pictures are shown as the model saw them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from whyformer.explanation.geometry import Geometry

# the least correlation between what the model saw and that part of the picture
_AGREEMENT = 0.9
_ORDINARY = ("ToTensor", "MaybeToTensor", "PILToTensor", "MaybePILToTensor", "ToImage", "ToPILImage", "ToDtype",
             "ToPureTensor", "ConvertImageDtype", "Normalize", "Grayscale", "RGB", "Identity")  # fmt: skip


@dataclass(frozen=True)
class _View:
    """A picture on its way: its size now, and the box of the original that it covers."""

    size: tuple[int, int]
    box: tuple[float, float, float, float]

    def resized(self, height: int, width: int) -> _View:
        return _View((int(height), int(width)), self.box)

    def cropped(self, top: int, left: int, height: int, width: int) -> _View:
        """The part from (top, left); negative places and sizes beyond the picture are padding."""
        x, y, right, bottom = self.box
        down, across = (bottom - y) / self.size[0], (right - x) / self.size[1]
        x, y = x + left * across, y + top * down
        return _View((int(height), int(width)), (x, y, x + width * across, y + height * down))


class _Unreadable(Exception):  # noqa: N818
    """The processor does something that is not known here."""


def geometry_of(
    processor: Any, pictures: Sequence[Image.Image], shown: np.ndarray[Any, Any] | None
) -> list[Geometry] | None:
    """The geometry of each picture, or None if it is unknown for any.

    Args:
        shown: ``[B, H, W, 3]`` uint8, what the model saw, against which the reading is checked.
    """
    if shown is None:
        return None
    found = []
    views = []
    for picture in pictures:
        start = _View((picture.height, picture.width), Geometry.whole((picture.height, picture.width)).box)
        try:
            views.append(_read(processor, start))
        except (_Unreadable, ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            return None
    if getattr(processor, "do_pad", False):
        views = _padded(processor, views)
    for picture, view, seen in zip(pictures, views, shown, strict=True):
        if view.size != seen.shape[:2] or not (view.box[0] < view.box[2] and view.box[1] < view.box[3]):
            return None
        geometry = Geometry((picture.height, picture.width), view.box)
        if not _agrees(picture, geometry, seen):
            return None
        found.append(geometry)
    return found


def _read(processor: Any, view: _View) -> _View:
    transforms = getattr(getattr(processor, "val_transforms", processor), "transforms", None)
    if isinstance(transforms, Sequence):
        for one in transforms:
            view = _transformed(one, view)
        return view
    if hasattr(processor, "resize_size") and hasattr(processor, "crop_size"):  # the transforms of torchvision's weights
        view = view.resized(*_torchvision_size(view.size, processor.resize_size, None))
        return _centred(view, _pair(processor.crop_size), _torchvision_start)
    if hasattr(processor, "preprocess"):
        return _hugging_face(processor, view)
    raise _Unreadable


# -- Hugging Face -----------------------------------------------------------------------------------------------
def _hugging_face(processor: Any, view: _View) -> _View:
    kind = type(processor).__name__
    size, crop = (dict(getattr(processor, name, None) or {}) for name in ("size", "crop_size"))
    start = _padding_start if getattr(processor, "backend", "pil") == "torchvision" else _floor_start
    crops, resizes = bool(getattr(processor, "do_center_crop", False)), bool(getattr(processor, "do_resize", False))
    if kind.startswith("Perceiver"):  # crops first, to a share of the shorter side
        if crops:
            least = min(view.size)
            wanted = [int(size[side] / crop[side] * least) for side in ("height", "width")]
            view = _centred(view, (wanted[0], wanted[1]), start)
        return view.resized(size["height"], size["width"]) if resizes else view
    if resizes:
        edge = size.get("shortest_edge")
        if kind.startswith("ConvNext") and edge:
            if edge >= 384:
                view = view.resized(edge, edge)
            else:
                view = view.resized(*_by_short_side(view.size, int(edge / processor.crop_pct)))
                view = _centred(view, (edge, edge), start)
        elif kind.startswith("PoolFormer") and getattr(processor, "crop_pct", None):
            view = view.resized(*_pool_former(view.size, size, processor.crop_pct))
        elif kind.startswith("Levit") and edge:
            view = view.resized(*_by_short_side(view.size, int(256 / 224 * edge)))
        else:
            view = view.resized(*_resized(view.size, size))
    return _centred(view, (crop["height"], crop["width"]), start) if crops else view


def _resized(now: tuple[int, int], size: Mapping[str, Any]) -> tuple[int, int]:
    """What the processors' ``resize`` makes of (height, width)."""
    height, width = now
    edge, longest = size.get("shortest_edge"), size.get("longest_edge")
    if edge and longest:
        exact, short, long = None, min(now), max(now)
        if long / short * edge > longest:
            exact = longest * short / long
            edge = round(exact)
        if edge == short:
            return now
        other = exact if exact is not None else edge
        return (int(other * height / width), edge) if width < height else (edge, int(other * width / height))
    if edge:
        return _by_short_side(now, edge)
    if size.get("max_height") and size.get("max_width"):
        least = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * least), int(width * least)
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    raise _Unreadable


def _by_short_side(now: tuple[int, int], edge: int, most: int | None = None) -> tuple[int, int]:
    """The shorter side becomes ``edge``; the longer one keeps the ratio, cut down to a whole number."""
    short, long = min(now), max(now)
    new = (edge, int(edge * long / short))
    if most is not None and new[1] > most:
        new = (int(most * new[0] / new[1]), most)
    return (new[1], new[0]) if now[1] <= now[0] else new


def _pool_former(now: tuple[int, int], size: Mapping[str, Any], share: float) -> tuple[int, int]:
    edge = size.get("shortest_edge") or (size["height"] if size["height"] == size["width"] else None)
    return _by_short_side(now, int(edge / share)) if edge else (int(size["height"] / share), int(size["width"] / share))


def _padded(processor: Any, views: list[_View]) -> list[_View]:
    """Padding below and to the right, to a given size or to that of the largest picture of the batch."""
    wanted = dict(getattr(processor, "pad_size", None) or {})
    height = wanted.get("height") or max(view.size[0] for view in views)
    width = wanted.get("width") or max(view.size[1] for view in views)
    return [view.cropped(0, 0, height, width) for view in views]


# -- torchvision and timm ----------------------------------------------------------------------------------------
def _transformed(one: Any, view: _View) -> _View:
    kind = type(one).__name__
    if kind == "Compose":
        return _read(one, view)
    if kind == "Resize":
        return view.resized(*_torchvision_size(view.size, one.size, getattr(one, "max_size", None)))
    if kind == "ResizeKeepRatio" and not (one.random_scale_prob or one.random_aspect_prob):
        ratios = [now / wanted for now, wanted in zip(view.size, one.size, strict=True)]
        ratio = max(ratios) * one.longest + min(ratios) * (1 - one.longest)
        return view.resized(*(round(now / ratio) for now in view.size))
    if kind in ("CenterCrop", "CenterCropOrPad"):
        return _centred(view, _pair(one.size), _torchvision_start)
    if kind in _ORDINARY:
        return view
    raise _Unreadable


def _torchvision_size(now: tuple[int, int], size: Any, most: int | None) -> tuple[int, int]:
    sides = [size] if isinstance(size, int) else list(size)
    return _by_short_side(now, sides[0], most) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _pair(size: Any) -> tuple[int, int]:
    sides = [size] if isinstance(size, int) else list(size)
    return int(sides[0]), int(sides[-1])


# -- centre crops: how each rounds half a pixel -------------------------------------------------------------------
def _centred(view: _View, size: tuple[int, int], start: Callable[[int, int], int]) -> _View:
    top, left = (start(now, wanted) for now, wanted in zip(view.size, size, strict=True))
    return view.cropped(top, left, int(size[0]), int(size[1]))


def _floor_start(now: int, wanted: int) -> int:
    return (now - wanted) // 2


def _padding_start(now: int, wanted: int) -> int:
    return (now - wanted) // 2 if now >= wanted else -((wanted - now) // 2)


def _torchvision_start(now: int, wanted: int) -> int:
    return round((now - wanted) / 2) if now >= wanted else -((wanted - now) // 2)


# -- the check ----------------------------------------------------------------------------------------------------
def _agrees(picture: Image.Image, geometry: Geometry, seen: np.ndarray[Any, Any]) -> bool:
    """Whether that part of the picture, brought to the same size, looks like what the model saw."""
    height, width = seen.shape[:2]
    left, top, right, bottom = geometry.box
    across, down = width / (right - left), height / (bottom - top)
    # without the padding: whole input pixels that lie on the picture
    x0, x1 = int(np.ceil(max(0.0, -left * across))), int(min(float(width), (picture.width - left) * across) + 1e-6)
    y0, y1 = int(np.ceil(max(0.0, -top * down))), int(min(float(height), (picture.height - top) * down) + 1e-6)
    if x0 >= x1 or y0 >= y1:
        return False
    part = (left + x0 / across, top + y0 / down, left + x1 / across, top + y1 / down)
    inside = (max(0.0, part[0]), max(0.0, part[1]), min(picture.width, part[2]), min(picture.height, part[3]))
    expected = picture.resize((x1 - x0, y1 - y0), Image.Resampling.BICUBIC, box=inside, reducing_gap=3)
    small = (min(48, x1 - x0), min(48, y1 - y0))
    pair = [
        np.asarray(image.convert("L").resize(small, Image.Resampling.BOX), dtype=np.float64)
        for image in (expected, Image.fromarray(np.ascontiguousarray(seen[y0:y1, x0:x1])))
    ]
    first, second = (values - values.mean() for values in pair)
    spread = [float(np.sqrt((values**2).mean())) for values in (first, second)]
    if min(spread) < 1:  # nearly one colour: there is nothing to compare
        return max(spread) < 4
    return float((first * second).mean()) / (spread[0] * spread[1]) >= _AGREEMENT
