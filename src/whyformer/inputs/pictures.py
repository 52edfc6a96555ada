"""The one reader of pictures, behind every entrance: from a file or a PIL image to what a processor is given.

Every picture becomes RGB with 8 bits a channel, and what had to be done for that is said in words (:func:`notes`):

- it is turned upright as its EXIF orientation says;
- transparency is laid on white;
- grey of 16 bits is divided by 257 (0 to 65535 becomes 0 to 255), grey of 0 to 1 multiplied by 255; any other grey
  beyond 0 to 255 is stretched from its lowest to its highest value;
- of several frames (GIF, TIFF) the first is read, and of an open PIL image the one it stands at;
- CMYK and other colours are converted.
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
# Not all that Pillow knows: some of its formats start another program (EPS), and none is needed.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif")
_NOTES = "whyformer.notes"


def open_picture(
    source: str | Path | IO[bytes], *, pixels: int | None = None, size: int = MAX_BYTES, upright: bool = True
) -> Image.Image:
    """The picture in a file, as :func:`as_rgb` makes it.

    Args:
        source: a path, or a file opened for reading bytes.
        pixels, size: the most pixels (:data:`MAX_PIXELS` by default) and bytes that are taken.
        upright: False leaves it as it is stored, for data whose masks lie on the stored pixels.

    Raises:
        LoadError: the file is missing, no picture, damaged, or cannot be read.
        InputError: more pixels or bytes than that (checked before anything is decoded).
    """
    if isinstance(source, str | Path):
        source = Path(source)
        check_file(source, size)
    name = str(source) if isinstance(source, Path) else str(getattr(source, "name", "the picture"))
    most = MAX_PIXELS if pixels is None else pixels
    with _readable(name, most):
        Image.init()
        with Image.open(source, formats=[f for f in FORMATS if f in Image.OPEN]) as raw:
            made = as_rgb(raw, name, pixels=most, upright=upright)
            return raw.copy() if made is raw else made  # not bound to the file


def is_picture_name(text: str) -> bool:
    """Whether a text ends like the name of a picture file."""
    return "\n" not in text and text.lower().endswith(SUFFIXES)


def check_file(path: Path, size: int) -> None:
    """Refuse, before it is opened, what is no file that can be read, or has more than ``size`` bytes."""
    try:
        facts = path.stat()
    except FileNotFoundError as error:
        raise LoadError(f"no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(facts.st_mode):  # a pipe or a device would be read without end, or waited for
        raise LoadError(f"{path} is {'a folder' if stat.S_ISDIR(facts.st_mode) else 'a pipe or a device'}, no file")
    if facts.st_size == 0:
        raise LoadError(f"{path} is empty")
    if facts.st_size > size:
        raise InputError(f"{path} has {facts.st_size / 2**20:.0f} MB; files of at most {size // 2**20} MB are read")


@contextmanager
def _readable(name: str, most: int) -> Iterator[None]:
    """Errors of Pillow as ours."""
    try:
        with warnings.catch_warnings():
            # our own limit is the stricter one and has the better message
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # damaged facts beside the pixels, which are not read
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


def _too_large(name: str, what: str, most: int) -> InputError:
    return InputError(f"{name} has {what}; at most {most / 10**6:g} megapixels are taken: scale it down first")


def as_rgb(
    picture: Image.Image, name: str = "the picture", *, pixels: int | None = None, upright: bool = True
) -> Image.Image:
    """The picture upright, opaque, as RGB of 8 bits a channel; the very same where it is so already.

    Raises:
        InputError: it is empty, has too many pixels, or holds values that are not finite.
        LoadError: its file is damaged.
    """
    most = MAX_PIXELS if pixels is None else pixels
    if picture.width * picture.height > most:
        raise _too_large(name, f"{picture.width} x {picture.height} pixels", most)
    if 0 in picture.size:
        raise InputError(f"{name} is empty")
    said = notes(picture)
    with _readable(name, most):
        frames = getattr(picture, "n_frames", 1)
        if frames > 1:
            said.append(f"frame {picture.tell() + 1} of {frames}")
        picture.load()
        made = picture if frames == 1 else picture.copy()
        turn = picture.getexif().get(ExifTags.Base.Orientation, 1)
        if turn in range(2, 9):
            if upright:
                made = ImageOps.exif_transpose(picture)
                said.append(f"turned upright as EXIF orientation {turn} says")
            else:  # and nothing may turn it later
                made = picture.copy()
                made.info.pop("exif", None)
        made = _as_bytes(made, said) if made.mode.startswith(("I", "F")) else _opaque(made, said)
    if made is not picture:
        made.info = {**made.info, _NOTES: said}
    return made


def notes(picture: Image.Image) -> list[str]:
    """What reading did to a picture that :func:`as_rgb` made, in words; empty for any other."""
    said = picture.info.get(_NOTES)
    return list(said) if isinstance(said, list) else []  # a file's own text chunk of that name would be a str


def _as_bytes(picture: Image.Image, said: list[str]) -> Image.Image:
    """Grey of more than 8 bits as RGB; ``convert`` alone would cut everything above 255 off."""
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
        said.append(f"grey scaled from {low:g} to {high:g} to 0 to 255")
    scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return Image.fromarray(scaled.round().astype(np.uint8)).convert("RGB")


def _opaque(picture: Image.Image, said: list[str]) -> Image.Image:
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        if layer.getchannel("A").getextrema()[0] != 255:
            said.append("transparency laid on white")
        ground = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, layer).convert("RGB")
    if picture.mode == "RGB":
        return picture
    if picture.mode not in ("1", "L", "P"):
        said.append(f"{picture.mode} converted to RGB")
    return picture.convert("RGB")


def without_normalisation(pixels: Tensor, processor: Any) -> Tensor | None:
    """uint8 ``[B, H, W, 3]`` as the model saw the picture, for display; None if it is not an RGB picture.

    Of a video ``[B, T, C, H, W]``, ``[B, T, H, W, 3]``.
    """
    if pixels.dim() == 5:
        frames = without_normalisation(pixels.flatten(0, 1), processor)
        return None if frames is None else frames.unflatten(0, pixels.shape[:2])
    if pixels.dim() != 4 or pixels.shape[1] not in (1, 3):
        return None
    shown = pixels.detach().float().cpu()
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if mean is not None and std is not None and getattr(processor, "do_normalize", True):
        column = (1, -1, 1, 1)
        shown = shown * torch.tensor(std).reshape(column) + torch.tensor(mean).reshape(column)
    elif float(shown.min()) < 0 or float(shown.max()) > 1:
        low = shown.amin((1, 2, 3), keepdim=True)
        shown = (shown - low) / (shown.amax((1, 2, 3), keepdim=True) - low).clamp(min=1e-12)
    rgb = shown.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return (rgb * 255).round().clamp(0, 255).to(torch.uint8)


def black_of(processor: Any) -> tuple[float, ...] | None:
    """``[C]`` black in the model's space, −mean/std of the processor's normalisation; None where that is unknown."""
    return _grey(processor, 0.0)


def white_of(processor: Any) -> tuple[float, ...] | None:
    """``[C]`` white in the model's space, (1 − mean)/std of the processor's normalisation; None where unknown."""
    return _grey(processor, 1.0)


def _grey(processor: Any, level: float) -> tuple[float, ...] | None:
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not isinstance(mean, list | tuple) or not isinstance(std, list | tuple):
        return None
    if not getattr(processor, "do_normalize", True):
        return (level,)
    return tuple((level - m) / s for m, s in zip(mean, std, strict=True))
