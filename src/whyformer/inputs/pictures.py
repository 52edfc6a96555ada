"""Read a picture from a file the user names, refusing what is missing, unreadable or far too large."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from whyformer.errors import InputError, LoadError

MAX_PIXELS = 64_000_000
MAX_BYTES = 256 * 2**20
# Not all that Pillow knows: some of its formats start another program (EPS), and none is needed.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif")


def open_picture(path: str | Path, *, pixels: int = MAX_PIXELS, size: int = MAX_BYTES) -> Image.Image:
    """The picture as RGB, turned upright as its EXIF orientation says; the first frame of an animation.

    Transparent parts are laid on white.

    Args:
        pixels, size: the most pixels and bytes that are taken.

    Raises:
        LoadError: the file is missing, no picture, damaged, or cannot be read.
        InputError: more pixels or bytes than that (checked before anything is decoded).
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise LoadError(f"{path} is a folder, not a picture")
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise LoadError(f"no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if found == 0:
        raise LoadError(f"{path} is empty")
    if found > size:
        raise InputError(f"{path} has {found / 2**20:.0f} MB; pictures of at most {size // 2**20} MB are read")
    try:
        with warnings.catch_warnings():
            # our own limit, below, is the stricter one and has the better message
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.init()
            with Image.open(path, formats=[f for f in FORMATS if f in Image.OPEN]) as raw:
                if raw.width * raw.height > pixels:
                    raise InputError(_too_large(path, f"{raw.width} x {raw.height} pixels", pixels))
                return _opaque(ImageOps.exif_transpose(raw))
    except Image.DecompressionBombError as error:
        raise InputError(_too_large(path, "far too many pixels (a decompression bomb?)", pixels)) from error
    except UnidentifiedImageError as error:
        raise LoadError(f"{path} is not a picture that can be read") from error
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise LoadError(f"{path} is damaged or cannot be read: {error}") from error


def _too_large(path: Path, what: str, pixels: int) -> str:
    return f"{path} has {what}; at most {pixels // 10**6} megapixels are taken: scale it down first"


def _opaque(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith(("I", "F")):
        # 16-bit and float greyscale: convert() alone would clip everything above 255 to white
        low, high = picture.getextrema()
        span = max(float(high) - float(low), 1e-12)  # type: ignore[arg-type]
        if float(low) < 0 or float(high) > 255:  # type: ignore[arg-type]
            return picture.point(lambda v: v * (255 / span) - float(low) * 255 / span).convert("L").convert("RGB")  # type: ignore[arg-type]
        return picture.convert("L").convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        ground = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, layer).convert("RGB")
    return picture.convert("RGB")


def without_normalisation(pixels: Tensor, processor: Any) -> Tensor | None:
    """uint8 ``[B, H, W, 3]`` as the model saw the picture, for display; None if it is not an RGB picture."""
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
