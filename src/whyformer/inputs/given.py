"""What a user hands over, made into what is prepared: files are read, arrays become pictures or tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from whyformer.errors import InputError
from whyformer.inputs.argument import read_file
from whyformer.inputs.pictures import is_picture_name, open_picture
from whyformer.inputs.sounds import Sound, as_sound, is_sound_name, listener, open_sound


def as_given(inputs: Any, processor: Any) -> Any:
    """Inputs with one alone in a list, files opened, and arrays as pictures (bytes) or tensors (fractions, ids)."""
    inputs = as_sound(inputs, processor)
    if isinstance(inputs, np.ndarray):
        inputs = [inputs] if _is_picture(inputs) else torch.from_numpy(np.ascontiguousarray(inputs))
    if isinstance(inputs, str | Path | Image.Image | Sound) or hasattr(inputs, "read"):
        inputs = [inputs]
    return [_one(i, processor) for i in inputs] if isinstance(inputs, list | tuple) else inputs


def wants_processor(inputs: Any) -> bool:
    """Whether these are no tensors yet."""
    first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
    if isinstance(first, str | Path | Image.Image | Sound) or hasattr(first, "read") or _is_picture(first):
        return True
    return isinstance(as_sound(first, None), Sound)


def _one(item: Any, processor: Any) -> Any:
    """The picture or the text where a file is given; anything else as it is."""
    item = as_sound(item, processor)
    if isinstance(item, str | Path) and is_sound_name(str(item)) and (isinstance(item, Path) or listener(processor)):
        return open_sound(item)
    if hasattr(item, "read"):
        return open_picture(item)
    if isinstance(item, str | Path) and str(item).strip() and os.path.isdir(item):
        raise InputError(f"{item} is a folder: give the files in it, such as sorted(Path({str(item)!r}).glob('*.png'))")
    if isinstance(item, Path):
        return read_file(item)
    if isinstance(item, np.ndarray):
        return Image.fromarray(item) if _is_picture(item) else torch.from_numpy(np.ascontiguousarray(item))
    reads_text = hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor")
    return open_picture(item) if isinstance(item, str) and is_picture_name(item) and not reads_text else item


def _is_picture(item: Any) -> bool:
    """Whether an array holds one picture: bytes ``[H, W]``, or ``[H, W, C]`` with 3 or 4 channels."""
    bytes_ = isinstance(item, np.ndarray) and item.dtype == np.uint8
    return bytes_ and (item.ndim == 2 or (item.ndim == 3 and item.shape[-1] in (3, 4)))
