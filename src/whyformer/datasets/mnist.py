"""MNIST in its original idx files."""

from __future__ import annotations

import gzip
import struct
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.datasets.samples import Picture, require_folder, wrong_layout


def mnist(path: str | Path, split: str = "test") -> list[Picture]:
    """``t10k-images-idx3-ubyte.gz`` and ``t10k-labels-idx1-ubyte.gz`` (split "test"), ``train*-...`` (split
    "train")."""
    expected = "t10k-images-idx3-ubyte(.gz) and t10k-labels-idx1-ubyte(.gz), or train*-..."
    folder = require_folder(path, expected)
    start = "t10k" if split == "test" else split
    images, labels = (sorted(folder.glob(f"{start}*-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1"))
    if len(images) != 1 or len(labels) != 1:
        raise wrong_layout(folder, expected)
    pixels, classes = read_idx(images[0]), read_idx(labels[0])
    if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes):
        raise wrong_layout(folder, "as many labels as pictures", f"{pixels.shape} and {classes.shape}")
    return [
        Picture(f"{split}-{i}", partial(_picture, pixel), int(c))
        for i, (pixel, c) in enumerate(zip(pixels, classes, strict=True))
    ]


def read_idx(file: Path) -> NDArray[np.uint8]:
    """An idx file of unsigned bytes: two zero bytes, type 8, number of axes, their sizes (big endian), then the
    values."""
    data = file.read_bytes()
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise wrong_layout(file, "an idx file", "a broken gzip file") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise wrong_layout(file, "an idx file of bytes (starts 00 00 08)", data[:4].hex(" "))
    axes = data[3]
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * axes)
    if values.size != int(np.prod(shape)):
        raise wrong_layout(file, f"{shape} values", str(values.size))
    return values.reshape(shape)


def _picture(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels).convert("RGB")
