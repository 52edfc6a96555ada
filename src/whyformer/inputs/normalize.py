"""Normalize a user's inputs: open files, and convert arrays to pictures or tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError
from whyformer.inputs.argument import read_file
from whyformer.inputs.pictures import is_picture_name, open_picture
from whyformer.inputs.sounds import Sound, as_sound, feature_extractor_of, is_sound_name, open_sound


def normalized(inputs: Any, processor: Any) -> Any:
    """Wrap a single sample in a list, open files, and convert arrays to pictures, texts or tensors.

    A list holds samples. A tuple with tensors holds forward's positional arguments.
    """
    inputs = as_sound(inputs, processor)
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UO":
        inputs = inputs.tolist()
    if isinstance(inputs, np.ndarray | Tensor):
        pictures = inputs.ndim == 4 and len(inputs) > 0 and raw_picture(inputs[0]) is not None
        inputs = list(inputs) if pictures else [inputs] if raw_picture(inputs) is not None else _as_tensor(inputs)
    if isinstance(inputs, str | Path | Image.Image | Sound) or hasattr(inputs, "read"):
        inputs = [inputs]
    if not isinstance(inputs, list | tuple):
        return inputs
    items = [_opened(i, processor) for i in inputs]
    if isinstance(inputs, tuple) and any(isinstance(i, Tensor) for i in items):
        return tuple(items)
    return [_tensors_of(i) for i in items]


def _tensors_of(sample: Any) -> Any:
    """Convert the arrays of a mapping to tensors; return anything else unchanged."""
    if not isinstance(sample, Mapping):
        return sample
    return {name: _as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in sample.items()}


def count_of(inputs: Any, processor: Any = None) -> int | None:
    """Return the number of samples in a list of files, pictures, sounds, texts or pairs of texts; None for tensors and
    for prompts with pictures."""
    if isinstance(inputs, Mapping):
        paired = set(inputs) == {"text", "text_pair"} and all(isinstance(v, list | tuple) for v in inputs.values())
        return len(inputs["text"]) if paired and len(inputs["text"]) == len(inputs["text_pair"]) else None
    first = inputs[0] if isinstance(inputs, list | tuple | np.ndarray | Tensor) and len(inputs) else None
    if isinstance(inputs, np.ndarray | Tensor):
        return len(inputs) if isinstance(first, str) or (inputs.ndim == 4 and raw_picture(first) is not None) else None
    if first is None or not (wants_processor([first]) or isinstance(as_sound(first, processor), Sound)):
        return None
    return len(inputs)


def some_of(inputs: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` (exclusive) of inputs that :func:`count_of` can count."""
    return {n: v[start:stop] for n, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[start:stop]


def wants_processor(inputs: Any) -> bool:
    """Return whether the inputs need a processor, because they are not tensors yet."""
    if isinstance(inputs, Mapping):
        return "text" in inputs and not isinstance(inputs["text"], Tensor)
    first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
    first = first[0] if isinstance(first, np.ndarray | Tensor) and first.ndim == 4 and len(first) else first
    if isinstance(first, str | Path | Image.Image | Sound) or hasattr(first, "read") or raw_picture(first) is not None:
        return True
    return isinstance(as_sound(first, None), Sound)


def _opened(item: Any, processor: Any) -> Any:
    """Read a file's picture, sound or text and convert arrays; return anything else unchanged."""
    item = as_sound(item, processor)
    reads_sound = isinstance(item, Path) or feature_extractor_of(processor) is not None
    if isinstance(item, str | Path) and is_sound_name(str(item)) and reads_sound:
        return open_sound(item)
    if hasattr(item, "read"):
        return open_picture(item)
    if isinstance(item, str | Path) and str(item).strip() and os.path.isdir(item):
        raise InputError(f"{item} is a folder: pass the files in it, such as sorted(Path({str(item)!r}).glob('*.png'))")
    if isinstance(item, Path):
        return read_file(item)
    if isinstance(item, np.ndarray | Tensor):
        raw = raw_picture(item)
        return _as_tensor(item) if raw is None else Image.fromarray(raw)
    reads_text = hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor")
    return open_picture(item) if isinstance(item, str) and is_picture_name(item) and not reads_text else item


def _as_tensor(item: Any) -> Tensor:
    return item if isinstance(item, Tensor) else torch.from_numpy(np.ascontiguousarray(item))


def raw_picture(item: Any) -> NDArray[np.uint8] | None:
    """Return the bytes ``[H, W]`` or ``[H, W, C]`` of an array or tensor that holds one decoded picture, else None.

    Accepted are bytes ``[H, W]`` and ``[H, W, C]`` with 3 or 4 channels, tensors of bytes ``[C, H, W]`` (torchvision),
    and arrays of fractions from 0 to 1 ``[H, W, C]`` (matplotlib).
    """
    if isinstance(item, Tensor) and item.dtype == torch.uint8 and item.dim() == 3:
        channels_first = item.shape[0] in (1, 3, 4) and item.shape[-1] not in (3, 4)
        return raw_picture((item.permute(1, 2, 0) if channels_first else item).squeeze(-1).cpu().numpy())
    if not isinstance(item, np.ndarray) or item.size == 0:
        return None
    has_channels = item.ndim == 3 and item.shape[-1] in (3, 4)
    if has_channels and item.dtype.kind == "f" and min(item.shape[:2]) > 4 and item.min() >= 0 and item.max() <= 1:
        return np.rint(item * 255).astype(np.uint8)
    return np.ascontiguousarray(item) if item.dtype == np.uint8 and (item.ndim == 2 or has_channels) else None
