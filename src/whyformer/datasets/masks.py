"""Pictures with a mask of the object: an index of images and masks, gtsegs_ijcv.mat, Oxford pets, digit scenes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.datasets.samples import LayoutError, Picture, require_file, require_folder, wrong_layout
from whyformer.errors import InputError, MissingExtra
from whyformer.inputs.pictures import open_picture


def indexed_masks(path: str | Path) -> list[Picture]:
    """A folder with ``index.json``: a list of {"image", "mask", "imagenet_class" or "label"}; mask 255 = the object."""
    expected = 'index.json, a list of {"image": file, "mask": file, "imagenet_class": number}'
    folder = require_folder(path, expected)
    file = require_file(folder / "index.json", expected)
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{file}: expected {expected}; found text that is not JSON ({error})") from error
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(r, dict) and {"image", "mask"} <= r.keys() for r in rows)
    ):
        keys = sorted(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], dict) else type(rows).__name__
        raise LayoutError(f"{file}: expected {expected}; found {keys}")
    made = []
    for row in rows:
        for name in (row["image"], row["mask"]):
            if not (folder / name).is_file():
                raise LayoutError(f"{file}: expected the files it names; found no {name}")
        label = row.get("imagenet_class", row.get("label"))
        made.append(
            Picture(
                f"{row['image']}|{row['mask']}"
                if Path(row["image"]).stem != Path(row["mask"]).stem
                else str(row["image"]),
                partial(open_picture, folder / row["image"], upright=False),
                None if label is None else int(label),
                partial(_mask_file, folder / row["mask"]),
            )
        )
    return made


def _mask_file(path: Path) -> NDArray[np.bool_]:
    try:
        with Image.open(path) as mask:
            return np.asarray(mask.convert("L")) > 127
    except OSError as error:
        raise InputError(f"{path.name} is not a readable mask: {error}") from error


def imagenet_segmentation(path: str | Path) -> list[Picture]:
    """``gtsegs_ijcv.mat`` (Guillaumin et al. 2014), 4276 pictures with masks; MATLAB 7.3, that is HDF5.

    ``value/img`` holds references to ``[3, W, H]`` uint8 pictures, ``value/gt`` references to groups' ``[W, H]`` masks
    (MATLAB stores columns first). The file has no class of the model, so the predicted class is explained.
    """
    expected = "gtsegs_ijcv.mat in HDF5 (MATLAB 7.3) with value/img and value/gt"
    file = Path(path)
    if file.is_dir():
        file = file / "gtsegs_ijcv.mat"
    file = require_file(file, expected)
    h5py = _h5py()
    try:
        with h5py.File(file, "r") as data:
            count = int(np.prod(data["value/img"].shape))
            if int(np.prod(data["value/gt"].shape)) != count:
                raise LayoutError(
                    f"{file}: expected as many masks as pictures; found {data['value/gt'].shape} and "
                    f"{data['value/img'].shape}"
                )
    except KeyError as error:
        raise LayoutError(f"{file}: expected {expected}; found {_h5_keys(file)}") from error
    except OSError as error:
        raise LayoutError(f"{file}: expected {expected}; found a file that is not HDF5") from error
    return [
        Picture(f"gtsegs:{i}", partial(_gtsegs_image, file, i), None, partial(_gtsegs_mask, file, i))
        for i in range(count)
    ]


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra('reading gtsegs_ijcv.mat needs h5py: pip install "whyformer[data]"') from error
    return h5py


def _h5_keys(file: Path) -> str:
    with _h5py().File(file, "r") as data:
        names: list[str] = []
        data.visit(lambda name: names.append(name) if len(names) < 8 else None)
        return ", ".join(names) or "nothing"


def _gtsegs_image(file: Path, index: int) -> Image.Image:
    with _h5py().File(file, "r") as data:
        pixels = np.asarray(data[data["value/img"][()].reshape(-1)[index]])
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(2, 1, 0)).astype(np.uint8)).convert("RGB")


def _gtsegs_mask(file: Path, index: int) -> NDArray[np.bool_]:
    with _h5py().File(file, "r") as data:
        inner = data[data["value/gt"][()].reshape(-1)[index]]
        if inner.dtype.kind == "O":  # a cell inside the cell: one reference more
            inner = data[inner[()].reshape(-1)[0]]
        return np.asarray(inner).transpose() > 0


def oxford_pets(path: str | Path, *, split: str = "test", classes: dict[str, int] | None = None) -> list[Picture]:
    """Oxford-IIIT Pet: ``images/*.jpg``, ``annotations/trimaps/*.png`` (1 pet, 2 ground, 3 border),
    ``annotations/test.txt``.

    The border counts as ground. Labels are left out unless ``classes`` maps breed names (``Abyssinian``) to the model's
    classes: the model's own classes are rarely these 37.
    """
    expected = f"images/, annotations/trimaps/ and annotations/{split}.txt (or list.txt)"
    folder = require_folder(path, expected)
    for part in (folder / "images", folder / "annotations" / "trimaps"):
        if not part.is_dir():
            raise wrong_layout(folder, expected, f"no {part.relative_to(folder)}/")
    listed = next(
        (f for f in (folder / "annotations" / f"{split}.txt", folder / "annotations" / "list.txt") if f.is_file()), None
    )
    if listed is None:
        raise wrong_layout(folder / "annotations", expected)
    names = [line.split()[0] for line in listed.read_text().splitlines() if line.strip() and not line.startswith("#")]
    made = []
    for name in names:
        image, trimap = folder / "images" / f"{name}.jpg", folder / "annotations" / "trimaps" / f"{name}.png"
        for file in (image, trimap):
            if not file.is_file():
                raise LayoutError(f"{listed}: expected the files it names; found no {file.relative_to(folder)}")
        label = (classes or {}).get(name.rsplit("_", 1)[0])
        made.append(Picture(name, partial(open_picture, image, upright=False), label, partial(_trimap, trimap)))
    return made


def _trimap(path: Path) -> NDArray[np.bool_]:
    with Image.open(path) as trimap:
        return np.asarray(trimap) == 1


def scene_objects(count: int = 100, *, seed: int = 0, min_digits: int = 2, max_digits: int = 4) -> list[Picture]:
    """Digit scenes as one sample a digit: explain that digit, and its mask is the truth (class-specific
    segmentation)."""
    from whyformer.datasets.scenes import digit_scenes

    made = []
    for i, scene in enumerate(digit_scenes(count, seed=seed, min_digits=min_digits, max_digits=max_digits)):
        for digit, mask in zip(scene.digits, scene.masks, strict=True):
            made.append(
                Picture(f"scene{seed}-{i}-digit{digit}", partial(_same, scene.image), int(digit), partial(_same, mask))
            )
    return made


def _same(value: Any) -> Any:
    return value
