"""Readers of pictures with labels: ImageNet samples, class folders, ImageNet validation with the devkit, MNIST."""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.datasets.samples import (
    Picture,
    layout_errors,
    pictures_in,
    require_file,
    require_folder,
    wrong_layout,
)
from whyformer.errors import import_optional
from whyformer.inputs.pictures import open_picture

SAMPLE, VALIDATION = r"\d{4}_n\d{8}\.(?:jpe?g|png)$", r"ILSVRC2012_val_\d{8}\.jpe?g$"
_MOST_BYTES = 2**30
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


def _all_named(path: str | Path, pattern: str, expected: str) -> list[Path]:
    """Return the pictures of a folder, whose names must all match ``pattern``."""
    folder = require_folder(path, expected)
    files = pictures_in(folder)
    wrong = [f.name for f in files if not re.match(pattern, f.name, re.IGNORECASE)]
    if not files or wrong:
        raise wrong_layout(folder, expected, next(iter(wrong), None))
    return files


@layout_errors
def imagenet_samples(path: str | Path) -> list[Picture]:
    """Read pictures named like ``0282_n02123159.jpg``: class index (0..999), synset."""
    files = _all_named(path, SAMPLE, "pictures named like 0282_n02123159.jpg (class index, synset)")
    return [Picture(f.name, partial(open_picture, f), int(f.name[:4])) for f in files]


@layout_errors
def class_folders(path: str | Path, classes: dict[str, int] | None = None) -> list[Picture]:
    """Read a folder with a folder of pictures for each class.

    Args:
        path: the folder.
        classes: folder name -> class index. By default the names of folders are class indices, or the 1000 synsets,
            whose sorted order is that of the classes in ImageNet. Fewer synset folders need ``classes``.
    """
    expected = "a folder of pictures for each class"
    folder = require_folder(path, expected)
    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    if not names:
        raise wrong_layout(folder, expected)
    if classes is None and all(n.isdecimal() for n in names):
        classes = {n: int(n) for n in names}
    elif classes is None and len(names) == 1000 and all(re.match(r"n\d{8}$", n) for n in names):
        classes = {n: i for i, n in enumerate(names)}
    elif classes is None:
        named = "folders named by class numbers, or all 1000 synsets (or classes={name: index})"
        actual = f"{len(names)} folders whose names do not identify the model's classes"
        raise wrong_layout(folder, named, actual)
    if unknown := [n for n in names if n not in classes]:
        raise wrong_layout(folder, "only folders of known classes", ", ".join(unknown[:5]))
    files = [(name, f) for name in names for f in pictures_in(folder / name)]
    if not files:
        raise wrong_layout(folder, expected, "folders without pictures")
    return [Picture(f"{name}/{f.name}", partial(open_picture, f), classes[name]) for name, f in files]


@layout_errors
def imagenet_validation(path: str | Path, devkit: str | Path | None = None) -> list[Picture]:
    """Read the 50 000 validation pictures, or some of them, with the ground truth of the devkit.

    The devkit numbers classes in another order (ILSVRC2012_ID). Its ``meta.mat`` maps them to synsets, whose sorted
    order is that of the classes.

    Args:
        path: folder of the pictures.
        devkit: folder with ``data/ILSVRC2012_validation_ground_truth.txt`` and ``data/meta.mat``; by default it is
            searched in and beside ``path``.
    """
    expected = "pictures named ILSVRC2012_val_00000001.JPEG, and the devkit with data/" + TRUTH + " and data/" + META
    files = _all_named(path, VALIDATION, expected)
    base = _find_devkit(Path(path), devkit, expected)
    lines = (base / TRUTH).read_text().split()
    index = _class_of_id(require_file(base / META, expected))
    try:
        labels = [index[int(lines[int(f.stem.rpartition("_")[2]) - 1])] for f in files]
    except (IndexError, ValueError, KeyError) as error:
        actual = f"{len(lines)} entries, and {error} fails"
        raise wrong_layout(base / TRUTH, "a class number 1..1000 in each line", actual) from error
    return [Picture(f.name, partial(open_picture, f), label) for f, label in zip(files, labels, strict=True)]


def _find_devkit(folder: Path, devkit: str | Path | None, expected: str) -> Path:
    nearby = [folder, folder.parent, *sorted(folder.parent.glob("ILSVRC2012_devkit*"))]
    roots = nearby if devkit is None else [Path(devkit)]
    for place in (p for root in roots for p in (root / "data", root)):
        if (place / TRUTH).is_file():
            return place
    folders = ", ".join(str(r) for r in roots)
    actual = f"no {TRUTH} in {folders}, and pictures without labels cannot be scored"
    raise wrong_layout(folder, expected, actual)


def _class_of_id(meta: Path) -> dict[int, int]:
    """Return ILSVRC2012_ID -> class index in sorted synsets."""
    scipy_io = import_optional("scipy.io", "reading the devkit's meta.mat", "data")
    rows = scipy_io.loadmat(str(meta), squeeze_me=True)["synsets"]
    synsets = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if int(row["ILSVRC2012_ID"]) <= 1000}
    order = {wnid: i for i, wnid in enumerate(sorted(synsets.values()))}
    return {number: order[wnid] for number, wnid in synsets.items()}


@layout_errors
def mnist(path: str | Path, split: str = "test") -> list[Picture]:
    """Read ``t10k-images-idx3-ubyte.gz`` and ``t10k-labels-idx1-ubyte.gz``, or with split "train" ``train*-...``."""
    expected = "t10k-images-idx3-ubyte(.gz) and t10k-labels-idx1-ubyte(.gz), or train*-..."
    folder = require_folder(path, expected)
    start = "t10k" if split == "test" else split
    images, labels = (sorted(folder.glob(f"{start}*-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1"))
    if len(images) != 1 or len(labels) != 1:
        raise wrong_layout(folder, expected)
    pixels, classes = read_idx(images[0]), read_idx(labels[0])
    if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes):
        raise wrong_layout(folder, "as many labels as pictures", f"{pixels.shape} and {classes.shape}")
    pairs = enumerate(zip(pixels, classes, strict=True))
    return [Picture(f"{split}-{i}", partial(_picture, pixel), int(c)) for i, (pixel, c) in pairs]


def read_idx(file: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes: two zero bytes, type 8, number of axes, their sizes (big endian), then the values."""
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(file) as packed:
                data = packed.read(_MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise wrong_layout(file, "an idx file", "a broken gzip file") from error
    if len(data) > _MOST_BYTES:
        raise wrong_layout(file, f"at most {_MOST_BYTES // 2**20} MB of values", "more")
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise wrong_layout(file, "an idx file of bytes (starts 00 00 08)", data[:4].hex(" "))
    axes = data[3]
    if axes not in (1, 3) or len(data) < 4 + 4 * axes:
        raise wrong_layout(file, "one axis of labels, or three of pictures", f"{axes} axes in {len(data)} bytes")
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * axes)
    if values.size != math.prod(shape):
        raise wrong_layout(file, f"{shape} values", str(values.size))
    return values.reshape(shape)


def _picture(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels).convert("RGB")
