"""Read pictures from files and PIL images; all entry points use this reader.

Every picture is converted to RGB with 8 bits per channel, and :func:`notes` lists the conversions:

- it is rotated according to its EXIF orientation;
- transparent pixels are composited on white;
- 16-bit grey is divided by 257 (0 to 65535 becomes 0 to 255), grey from 0 to 1 is multiplied by 255, and grey of any
  other range beyond 0 to 255 is scaled from its minimum and maximum;
- of several frames (GIF, TIFF), the first is read; of an open PIL image, the current frame;
- CMYK and other color modes are converted.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from whyformer.errors import InputError, LoadError

MAX_PIXELS = 64_000_000
MAX_BYTES = 256 * 2**20
# a subset of Pillow's formats, because some start another program (EPS)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif")
_NOTES = "whyformer.notes"


def open_picture(
    source: str | Path | IO[bytes], *, pixels: int | None = None, size: int = MAX_BYTES, upright: bool = True
) -> Image.Image:
    """Read the picture in a file and convert it with :func:`as_rgb`.

    Args:
        source: a path, or a binary file object.
        pixels: maximum number of pixels, :data:`MAX_PIXELS` by default.
        size: maximum number of bytes.
        upright: False ignores the EXIF orientation, for data sets whose masks match the stored pixels.

    Raises:
        LoadError: the file is missing, not a picture, damaged, or cannot be read.
        InputError: the picture has too many pixels or bytes (checked before it is decoded).
    """
    if isinstance(source, str | Path):
        source = Path(source)
        check_file(source, size)
    name = str(source) if isinstance(source, Path) else str(getattr(source, "name", "the picture"))
    most = MAX_PIXELS if pixels is None else pixels
    with _readable(name, most):
        Image.init()
        with Image.open(source, formats=[f for f in FORMATS if f in Image.OPEN]) as raw:
            picture = as_rgb(raw, name, pixels=most, upright=upright)
            return raw.copy() if picture is raw else picture  # a copy is not bound to the file


def is_picture_name(text: str) -> bool:
    """Return whether a text has the suffix of a picture file."""
    return "\n" not in text and text.lower().endswith(SUFFIXES)


def check_file(path: Path, size: int) -> None:
    """Raise, before opening it, if a path is not a readable regular file or has more than ``size`` bytes."""
    try:
        facts = path.stat()
    except FileNotFoundError as error:
        raise LoadError(f"no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device could block or never end
        raise LoadError(f"{path} is {'a folder' if stat.S_ISDIR(facts.st_mode) else 'a pipe or a device'}, not a file")
    if facts.st_size == 0:
        raise LoadError(f"{path} is empty")
    if facts.st_size > size:
        raise InputError(f"{path} has {facts.st_size / 2**20:.0f} MB; the limit is {size // 2**20} MB")


@contextmanager
def _readable(name: str, most: int) -> Iterator[None]:
    """Convert errors of Pillow to whyformer's."""
    try:
        with warnings.catch_warnings():
            # MAX_PIXELS is the stricter limit
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # damaged metadata, which is not used
            warnings.simplefilter("ignore", UserWarning)
            yield
    except Image.DecompressionBombError as error:
        raise _too_large(name, "far too many pixels (a decompression bomb?)", most) from error
    except UnidentifiedImageError as error:
        raise LoadError(f"{name} is not a picture that can be read") from error
    except (InputError, LoadError):
        raise
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, MemoryError) as error:
        raise LoadError(f"{name} is damaged or cannot be read: {error}") from error


def _too_large(name: str, size: str, most: int) -> InputError:
    return InputError(f"{name} has {size}; the limit is {most / 10**6:g} megapixels: scale it down first")


def as_rgb(
    picture: Image.Image, name: str = "the picture", *, pixels: int | None = None, upright: bool = True
) -> Image.Image:
    """Convert a picture to upright, opaque RGB with 8 bits per channel; return the same object if it is so already.

    Raises:
        InputError: it is empty, has too many pixels, or holds values that are not finite.
        LoadError: its file is damaged.
    """
    most = MAX_PIXELS if pixels is None else pixels
    if picture.width * picture.height > most:
        raise _too_large(name, f"{picture.width} x {picture.height} pixels", most)
    if 0 in picture.size:
        raise InputError(f"{name} is empty")
    changes = notes(picture)
    with _readable(name, most):
        frames = getattr(picture, "n_frames", 1)
        if frames > 1:
            changes.append(f"frame {picture.tell() + 1} of {frames}")
        picture.load()
        result = picture if frames == 1 else picture.copy()
        turn = picture.getexif().get(ExifTags.Base.Orientation, 1)
        if turn in range(2, 9):
            if upright:
                result = ImageOps.exif_transpose(picture)
                changes.append(f"turned upright by its EXIF orientation {turn}")
            else:  # without its EXIF data, so that no later step rotates it
                result = picture.copy()
                result.info.pop("exif", None)
        result = _as_bytes(result, changes) if result.mode.startswith(("I", "F")) else _opaque(result, changes)
    if result is not picture:
        result.info = {**result.info, _NOTES: changes}
    return result


def notes(picture: Image.Image) -> list[str]:
    """Return the conversions that :func:`as_rgb` applied to a picture; empty for any other picture."""
    changes = picture.info.get(_NOTES)
    return list(changes) if isinstance(changes, list) else []  # a text chunk of that name in a file is a str


def _as_bytes(picture: Image.Image, changes: list[str]) -> Image.Image:
    """Convert grey of more than 8 bits to RGB; ``convert`` alone would clip everything above 255."""
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all():
        raise InputError("the picture holds NaN or infinity")
    low, high = float(values.min()), float(values.max())
    if picture.mode.startswith("I;16") or (picture.mode == "I" and low >= 0 and 255 < high <= 65535):
        low, high = 0.0, 65535.0
    elif picture.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    if high != 255:
        changes.append(f"grey values {low:g} to {high:g} scaled to 0 to 255")
    scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return Image.fromarray(scaled.round().astype(np.uint8)).convert("RGB")


def _opaque(picture: Image.Image, changes: list[str]) -> Image.Image:
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        if layer.getchannel("A").getextrema()[0] != 255:
            changes.append("transparency replaced by white")
        background = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    if picture.mode == "RGB":
        return picture
    if picture.mode not in ("1", "L", "P"):
        changes.append(f"{picture.mode} converted to RGB")
    return picture.convert("RGB")


def without_normalisation(pixels: Tensor, processor: Any) -> Tensor | None:
    """Undo the normalisation of pixels ``[B, C, H, W]`` (or a video ``[B, T, C, H, W]``) for display.

    Returns:
        uint8 ``[B, H, W, 3]`` (or ``[B, T, H, W, 3]``); None unless there are 1 or 3 channels.
    """
    if pixels.dim() == 5:
        frames = without_normalisation(pixels.flatten(0, 1), processor)
        return None if frames is None else frames.unflatten(0, pixels.shape[:2])
    if pixels.dim() != 4 or pixels.shape[1] not in (1, 3):
        return None
    mean, std = normalisation_of(processor) or ([0.0], [1.0])
    values = pixels.detach().float().cpu()
    values = values * torch.tensor(std).reshape(1, -1, 1, 1) + torch.tensor(mean).reshape(1, -1, 1, 1)
    if not any(mean) and (float(values.min()) < 0 or float(values.max()) > 1):
        low = values.amin((1, 2, 3), keepdim=True)
        values = (values - low) / (values.amax((1, 2, 3), keepdim=True) - low).clamp(min=1e-12)
    rgb = values.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return (rgb * 255).round().clamp(0, 255).to(torch.uint8)


def normalisation_of(processor: Any) -> tuple[list[float], list[float]] | None:
    """Return (mean, standard deviation) ``[C]`` by which an image processor normalises, 0 and 1 if it does not; None if
    unknown."""
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not isinstance(mean, list | tuple) or not isinstance(std, list | tuple):
        return None
    normalises = getattr(processor, "do_normalize", True)
    return (list(mean), list(std)) if normalises else ([0.0] * len(mean), [1.0] * len(std))


def black_and_white(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
    """Return black ``[C]``, −mean/std of the processor's normalisation, and white, (1 − mean)/std; (None, None) if
    unknown."""
    normalisation = normalisation_of(processor)
    if normalisation is None:
        return None, None
    black, white = (tuple((level - m) / s for m, s in zip(*normalisation, strict=True)) for level in (0.0, 1.0))
    return black, white
