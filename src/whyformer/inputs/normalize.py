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
from whyformer.inputs.prompts import image_token
from whyformer.inputs.sounds import Sound, as_sound, feature_extractor_of, is_sound_name


def normalized(inputs: Any, processor: Any) -> Any:
    """Wrap a single sample in a list, open files, and convert arrays to pictures, texts or tensors.

    A list holds samples, a tuple forward's positional arguments. In a list, a tuple of two texts is a pair, and a tuple
    of a text and pictures is a prompt.

    Raises:
        InputError: a tuple holds no tensor, such as a tuple of texts; or a list holds texts with pictures that the
            model compares.
    """
    inputs = as_sound(_gathered(_as_list(inputs), processor), processor)
    if isinstance(inputs, np.ndarray | Tensor):
        inputs = _as_tensor(inputs) if raw_picture(inputs) is None else [inputs]
    if isinstance(inputs, str | Path | Image.Image | Sound) or hasattr(inputs, "read"):
        inputs = [inputs]
    if not isinstance(inputs, list | tuple):
        return inputs
    items = [_opened(i, processor) for i in inputs]
    if isinstance(inputs, list):
        return items
    if not any(isinstance(i, Tensor) for i in items):
        raise InputError(
            "a tuple holds the positional arguments of the model's forward, and none of these is a tensor: pass "
            'samples as a list, and a pair of texts as {"text": ..., "text_pair": ...}'
        )
    return tuple(items)


def _as_list(inputs: Any) -> Any:
    """Convert an array of texts, and arrays and tensors of pictures, to lists; return anything else unchanged."""
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UO":
        return inputs.tolist()
    several = isinstance(inputs, np.ndarray | Tensor) and inputs.ndim == 4 and len(inputs) > 0
    return list(inputs) if several and raw_picture(inputs[0]) is not None else inputs


def _gathered(inputs: Any, processor: Any) -> Any:
    """Return a list of pairs of texts, or of texts with pictures, as one mapping of lists, or that of its only sample;
    return anything else unchanged."""
    samples = [_named(sample, processor) for sample in inputs] if isinstance(inputs, list) else []
    if not samples or not samples[0] or any(set(sample) != set(samples[0]) for sample in samples):
        return inputs
    if len(samples) == 1:
        return samples[0]
    if "images" in samples[0] and image_token(processor) is None:
        raise InputError(
            "this processor has no placeholder for a picture in a text, so each picture is compared with all texts: "
            'pass {"text": [...], "images": [...]}, or one text with its picture at a time'
        )
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _named(sample: Any, processor: Any) -> dict[str, Any]:
    """Return a pair of texts, or a text with its pictures, by the names of its parts; empty for any other sample."""
    if isinstance(sample, Mapping):
        named = isinstance(sample.get("text"), str) and set(sample) in ({"text", "text_pair"}, {"text", "images"})
        return dict(sample) if named else {}
    if not isinstance(sample, tuple) or len(sample) != 2:
        return {}
    texts = [part for part in sample if isinstance(part, str) and not _is_file_name(part, processor)]
    pictures = [part for part in sample if _are_pictures(part) and part not in texts]
    if len(texts) == 2:
        return dict(zip(("text", "text_pair"), texts, strict=True))
    return {"text": texts[0], "images": pictures[0]} if texts and pictures else {}


def _are_pictures(part: Any) -> bool:
    """Return whether a part of a sample is a picture, a name of a picture file, or a list of these."""
    if isinstance(part, list):
        return bool(part) and all(map(_are_pictures, part))
    return isinstance(part, Image.Image) or (isinstance(part, str | Path) and is_picture_name(str(part)))


def count_of(inputs: Any, processor: Any = None) -> int | None:
    """Return the number of samples in a list of files, pictures, sounds, texts or pairs of texts; None for tensors and
    for prompts with pictures."""
    inputs = _gathered(_as_list(inputs), processor)
    if isinstance(inputs, Mapping):
        paired = set(inputs) == {"text", "text_pair"} and all(isinstance(v, list | tuple) for v in inputs.values())
        return len(inputs["text"]) if paired and len(inputs["text"]) == len(inputs["text_pair"]) else None
    return len(inputs) if isinstance(inputs, list) and wants_processor(inputs[:1], processor) else None


def some_of(inputs: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` (exclusive) of inputs that :func:`count_of` can count."""
    return {n: v[start:stop] for n, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[start:stop]


def wants_processor(inputs: Any, processor: Any = None) -> bool:
    """Return whether the inputs need a processor, because they are not tensors yet."""
    inputs = _gathered(_as_list(inputs), processor)
    if isinstance(inputs, Mapping) and "text" in inputs:
        return not isinstance(inputs["text"], Tensor)
    first = as_sound(inputs[0] if isinstance(inputs, list) and inputs else inputs, processor)
    is_file_or_text = isinstance(first, str | Path | Image.Image | Sound) or hasattr(first, "read")
    return is_file_or_text or raw_picture(first) is not None


def _opened(item: Any, processor: Any) -> Any:
    """Read a file's picture, sound or text and convert arrays, also in a mapping; return anything else unchanged."""
    item = as_sound(item, processor)
    if isinstance(item, Mapping):
        return {name: _as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in item.items()}
    if hasattr(item, "read"):
        return open_picture(item)
    is_path = isinstance(item, Path) or (isinstance(item, str) and not _reads_text_only(processor))
    if is_path and str(item).strip() and os.path.isdir(item):
        raise InputError(f"{item} is a folder: pass the files in it, such as sorted(Path({str(item)!r}).glob('*.png'))")
    if isinstance(item, Path) or (isinstance(item, str) and _is_file_name(item, processor)):
        return read_file(Path(item))
    if not isinstance(item, np.ndarray | Tensor):
        return item
    raw = raw_picture(item)
    return _as_tensor(item) if raw is None else Image.fromarray(raw)


def refuse_file_names(inputs: Any, processor: Any) -> None:
    """Raise if a text is the name of a picture, a sound or a folder that exists, for a model that reads text.

    This is not called for texts of clients of a server, who must not learn which files exist.

    Raises:
        InputError: an input is such a name. A single word is a text, also if there is a folder of that name.
    """
    for item in inputs if isinstance(inputs, list) else [inputs]:
        if not isinstance(item, str) or _is_file_name(item, processor):
            continue
        kind = "a picture" if is_picture_name(item) else "a sound" if is_sound_name(item) else "a folder"
        is_folder = os.sep in item and _reads_text_only(processor) and os.path.isdir(item)
        if is_folder if kind == "a folder" else os.path.isfile(item):
            other = "a list of texts" if kind == "a folder" else f"a model that reads {kind}"
            raise InputError(
                f"{item} is {kind}, and this model does not read it: pass {other}, or, to explain the name itself as a "
                f"text, add a space to it ({item + ' '!r})"
            )


def _is_file_name(text: str, processor: Any) -> bool:
    """Return whether a text has the suffix of a file of the kind that the processor reads."""
    if is_sound_name(text):
        return feature_extractor_of(processor) is not None
    return is_picture_name(text) and not _reads_text_only(processor)


def _reads_text_only(processor: Any) -> bool:
    """Return whether a processor is a tokenizer."""
    return hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor")


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
