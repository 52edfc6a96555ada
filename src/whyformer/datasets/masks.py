"""Readers of pictures with masks: an index of images and masks, gtsegs_ijcv.mat, Oxford pets, digit scenes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.datasets.samples import Picture, layout_errors, require_file, require_folder, wrong_layout
from whyformer.datasets.scenes import digit_scenes
from whyformer.errors import InputError, import_optional
from whyformer.inputs.pictures import open_picture


@layout_errors
def indexed_masks(path: str | Path) -> list[Picture]:
    """Read a folder with ``index.json``, a list of {"image", "mask", "imagenet_class" or "label"}; 255 = object."""
    expected = 'index.json, a list of {"image": file, "mask": file, "imagenet_class": number}'
    folder = require_folder(path, expected)
    file = require_file(folder / "index.json", expected)
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise wrong_layout(file, expected, f"text that is not JSON ({error})") from error
    pictures = []
    for row in rows if isinstance(rows, list) and rows else [rows]:
        if not isinstance(row, dict) or not {"image", "mask"} <= row.keys():
            raise wrong_layout(file, expected, str(sorted(row)) if isinstance(row, dict) else repr(row))
        image, mask = (require_file(folder / row[key], "the files that index.json names") for key in ("image", "mask"))
        label = row.get("imagenet_class", row.get("label"))
        if label is not None and (not isinstance(label, int) or label < 0):
            raise wrong_layout(file, "integers as classes", repr(label)[:100])
        name = str(row["image"]) if image.stem == mask.stem else f"{row['image']}|{row['mask']}"
        pictures.append(_masked(name, image, None if label is None else int(label), mask))
    return pictures


def _masked(name: str, image: Path, label: int | None, mask: Path, value: int | None = None) -> Picture:
    """Return a picture and its mask of two files; the picture is not rotated, as the mask belongs to stored pixels."""
    return Picture(name, partial(open_picture, image, upright=False), label, partial(_mask_file, mask, value))


def _mask_file(path: Path, value: int | None) -> NDArray[np.bool_]:
    """Read a mask that is True where the file has ``value``, or by default a brightness above 127."""
    try:
        with Image.open(path) as mask:
            return np.asarray(mask.convert("L")) > 127 if value is None else np.asarray(mask) == value
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, Image.DecompressionBombError) as error:
        raise InputError(f"{path.name} is not a readable mask: {error}") from error


@layout_errors
def imagenet_segmentation(path: str | Path) -> list[Picture]:
    """Read ``gtsegs_ijcv.mat`` (Guillaumin et al. 2014), 4276 pictures with masks, in HDF5 (MATLAB 7.3).

    ``value/img`` contains references to ``[3, W, H]`` uint8 pictures, ``value/gt`` references to ``[W, H]`` masks of
    groups (MATLAB stores columns first). The file has no classes of the model, so the predicted class is explained.
    """
    expected = "gtsegs_ijcv.mat in HDF5 (MATLAB 7.3) with value/img and value/gt"
    place = Path(path)
    file = require_file(place / "gtsegs_ijcv.mat" if place.is_dir() else place, expected)
    try:
        with _h5(file) as data:
            if "value/img" not in data or "value/gt" not in data:
                raise wrong_layout(file, expected, ", ".join(list(data)[:8]) or "nothing")
            count, masks = (int(np.prod(data[name].shape)) for name in ("value/img", "value/gt"))
    except OSError as error:
        raise wrong_layout(file, expected, "a file that is not HDF5") from error
    if masks != count:
        raise wrong_layout(file, "as many masks as pictures", f"{masks} and {count}")
    return [
        Picture(f"gtsegs:{i}", partial(_gtsegs_image, file, i), None, partial(_gtsegs_mask, file, i))
        for i in range(count)
    ]


def _h5(file: Path) -> Any:
    return import_optional("h5py", "reading gtsegs_ijcv.mat", "data").File(file, "r")


def _gtsegs_image(file: Path, index: int) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(_cell(file, "value/img", index), dtype=np.uint8)).convert("RGB")


def _gtsegs_mask(file: Path, index: int) -> NDArray[np.bool_]:
    return _cell(file, "value/gt", index) > 0


def _cell(file: Path, name: str, index: int) -> NDArray[Any]:
    """Return the array that a cell refers to, rows first."""
    with _h5(file) as data:
        inner = data[data[name][()].reshape(-1)[index]]
        if inner.dtype.kind == "O":  # a nested cell: follow its reference too
            inner = data[inner[()].reshape(-1)[0]]
        return np.asarray(inner).transpose()


@layout_errors
def oxford_pets(path: str | Path, *, split: str = "test", classes: dict[str, int] | None = None) -> list[Picture]:
    """Read Oxford-IIIT Pet: ``images/*.jpg``, ``annotations/trimaps/*.png`` and ``annotations/test.txt``.

    Trimaps have 1 for the pet, 2 for the background and 3 for the border, which counts as background.

    Args:
        path: the folder.
        split: name of the list of pictures.
        classes: breed (``Abyssinian``) -> class index of the model. By default pictures have no labels, because models
            rarely have these 37 classes.
    """
    expected = f"images/, annotations/trimaps/ and annotations/{split}.txt (or list.txt)"
    folder = require_folder(path, expected)
    notes = folder / "annotations"
    for part in (folder / "images", notes / "trimaps"):
        if not part.is_dir():
            raise wrong_layout(folder, expected, f"no {part.relative_to(folder)}/")
    list_file = next((f for f in (notes / f"{split}.txt", notes / "list.txt") if f.is_file()), None)
    if list_file is None:
        raise wrong_layout(notes, expected)
    expected_files = f"the files that {list_file.name} names"
    pictures = []
    for line in list_file.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name = line.split()[0]
            image = require_file(folder / "images" / f"{name}.jpg", expected_files)
            trimap = require_file(notes / "trimaps" / f"{name}.png", expected_files)
            label = (classes or {}).get(name.rsplit("_", 1)[0])
            pictures.append(_masked(name, image, label, trimap, 1))
    return pictures


def scene_objects(count: int = 100, *, seed: int = 0, min_digits: int = 2, max_digits: int = 4) -> list[Picture]:
    """Return a sample for each digit of digit scenes; its label is the digit, its mask the ink of the digit."""
    scenes = digit_scenes(count, seed=seed, min_digits=min_digits, max_digits=max_digits)
    return [
        Picture(f"scene{seed}-{i}-digit{digit}", scene.image.copy, int(digit), mask.copy)
        for i, scene in enumerate(scenes)
        for digit, mask in zip(scene.digits, scene.masks, strict=True)
    ]
