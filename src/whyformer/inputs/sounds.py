"""Sounds: a ``.wav`` file, or a wave with its rate, fed through the model's feature extractor."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.pictures import check_file

LARGEST = 256 * 2**20
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {(_WHOLE, 1): "u1", (_WHOLE, 2): "<i2", (_WHOLE, 4): "<i4", (_FLOAT, 4): "<f4", (_FLOAT, 8): "<f8"}


@dataclass(frozen=True, eq=False)
class Sound:
    """``wave`` ``[T]`` float32, −1 to 1; ``rate``: its samples a second, None if that was not said."""

    wave: Tensor
    rate: int | None = None

    def __post_init__(self) -> None:
        if self.wave.dim() != 1 or not self.wave.is_floating_point() or not len(self.wave):
            raise InputError(
                f"a sound is one row of fractions [T], one for each moment; this one is {list(self.wave.shape)} "
                f"{self.wave.dtype}. Of several channels take the mean"
            )


def is_sound_name(source: str) -> bool:
    """Whether a file name ends like that of a sound that can be read."""
    return source.lower().endswith(".wav")


def open_sound(path: str | Path) -> Sound:
    """The sound in a ``.wav`` file of 8, 16, 24 or 32 bits, or of floats of 32 or 64 bits; the mean of its channels.

    Raises:
        LoadError: missing, unreadable or larger than 256 MB. InputError: it holds no sound.
    """
    check_file(Path(path), LARGEST)
    try:
        kind, channels, rate, width, raw = _read_wav(Path(path).read_bytes())
    except (OSError, ValueError, struct.error) as error:
        said = "it is damaged" if isinstance(error, struct.error) else error
        raise LoadError(f"cannot read {path}: {said}; write it as a .wav file of 16 bits") from error
    three = (kind, width) == (_WHOLE, 3)
    if not (three or (kind, width) in _TYPES) or channels < 1 or rate < 1:
        found = f"format {kind}, {width} bytes a sample, {channels} channels, {rate} samples a second"
        raise LoadError(f"cannot read {path}: {found}; write it as a .wav file of 16 bits")
    raw = raw[: len(raw) // (width * channels) * width * channels]  # a file that was cut off ends within a moment
    if three:  # 24 bits: the upper three bytes of 32
        bytes_ = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        numbers = np.pad(bytes_, ((0, 0), (1, 0))).reshape(-1).view("<i4")
    else:
        numbers = np.frombuffer(raw, np.dtype(_TYPES[kind, width])).copy()
    if not len(numbers):
        raise InputError(f"{path} holds no sound")
    values = torch.from_numpy(numbers).double().reshape(-1, channels).mean(1)
    if kind == _WHOLE:
        values = values / 128 - 1 if width == 1 else values / 2.0 ** (31 if three else 8 * width - 1)
    if not bool(values.float().isfinite().all()):
        raise InputError(f"{path} holds NaN or infinity: write it again as fractions from -1 to 1")
    return Sound(values.float(), rate)


def _read_wav(content: bytes) -> tuple[int, int, int, int, bytes]:
    """(format, channels, samples a second, bytes a sample, samples) of a RIFF file; its other chunks are skipped.

    Raises:
        ValueError: it is none. struct.error: it ends within its head.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("it is no .wav file")
    place, head = 12, None
    while place < len(content):
        name, size = struct.unpack_from("<4sI", content, place)
        place += 8
        if name == b"fmt ":
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content, place)
            kind = struct.unpack_from("<H", content, place + 24)[0] if kind == _EXTENSIBLE else kind
            head = kind, channels, rate, (bits + 7) // 8
        elif name == b"data" and head is not None:
            return *head, content[place : place + size]
        place += size + size % 2
    raise ValueError("it holds no samples")


def listener(processor: Any) -> Any:
    """The feature extractor that hears, of a processor; None if it has none."""
    for one in (processor, getattr(processor, "feature_extractor", None)):
        if isinstance(getattr(one, "sampling_rate", None), int) and callable(one):
            return one
    return None


def as_sound(item: Any, processor: Any) -> Any:
    """A :class:`Sound` where one is meant: a mapping with "array" and "sampling_rate" (as data sets have them), or,
    for a processor that hears, one row of fractions; anything else as it is."""
    if isinstance(item, Mapping) and {"array", "sampling_rate"} <= item.keys():
        return Sound(torch.as_tensor(np.asarray(item["array"], np.float32)), int(item["sampling_rate"]))
    row = isinstance(item, np.ndarray | Tensor) and item.ndim == 1
    if row and listener(processor) is not None and torch.as_tensor(item).is_floating_point():
        return Sound(torch.as_tensor(item).float())
    return item


def encode(sounds: Sequence[Sound], processor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of the model's forward, what is known of the sounds and of what is fed: see :func:`heard`).

    Raises:
        InputError: no feature extractor, a sound of another rate than the model hears, or sounds of unequal length
            without a mask.
    """
    ear = listener(processor)
    if ear is None:
        raise InputError("a sound needs the model's feature extractor: give processor= (AutoFeatureExtractor)")
    rate = int(ear.sampling_rate)
    for sound in sounds:
        if sound.rate not in (None, rate):
            raise InputError(
                f"the sound has {sound.rate:,} samples a second and the model hears {rate:,}: resample it first "
                "(torchaudio.functional.resample, librosa.resample, or ffmpeg -ar)"
            )
    waves = [sound.wave.numpy() for sound in sounds]
    options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"}
    try:  # as the extractor pads by itself: Whisper's to half a minute
        given = dict(ear(waves, **options))
    except ValueError:  # of unequal length
        given = dict(ear(waves, **options, padding=True))
        if "attention_mask" not in given:
            raise InputError(
                "these sounds are of unequal length, and the feature extractor gives no mask of the padding, which the "
                "model would hear: explain them one at a time, or set return_attention_mask=True if it was trained so"
            ) from None
    seen = torch.nn.utils.rnn.pad_sequence([sound.wave for sound in sounds], batch_first=True)
    lasts = [len(sound.wave) / rate for sound in sounds]
    return given, {"sounds": seen, "sampling_rate": rate, "durations": lasts, "time": _time(given, ear, rate)}


def heard(made: Inputs, facts: Mapping[str, Any], notes: list[list[str]] | None) -> Inputs:
    """Prepared tensors with what is known of the sounds they were made of."""
    known = dict(facts)
    axis, rate = known.pop("time")
    features = replace(made.features, **known, rate=rate)
    return replace(made, features=features, notes=notes, turned=axis == 2)


def _time(given: Mapping[str, Any], ear: Any, rate: int) -> tuple[int, float | None]:
    """(axis of time, steps a second) of what an extractor makes of a sound.

    A wave has its own; of a spectrogram they are measured: where two clicks, a second apart, change it.
    """
    tensor = next(v for v in given.values() if isinstance(v, Tensor) and v.is_floating_point())
    if tensor.dim() != 3:
        return 1, float(rate) if tensor.dim() == 2 else None
    noise = torch.randn(2 * rate, generator=torch.Generator().manual_seed(0)).numpy() * 1e-3
    clicks = [noise, noise.copy()]
    for click, at in zip(clicks, (rate // 2, 3 * rate // 2), strict=True):
        click[at] = 1.0
    first, second = (
        next(v for v in ear(c, sampling_rate=rate, return_tensors="pt").values() if isinstance(v, Tensor))[0].double()
        for c in clicks
    )
    apart = []
    for axis in (1, 2):  # where the first sounds louder, and where the second does
        power = [(sign * (first - second)).clamp(min=0).square().sum(2 - axis) for sign in (1, -1)]
        places = torch.arange(len(power[0]), dtype=torch.float64)
        early, late = (float((p * places).sum() / p.sum()) for p in power)
        apart.append(late - early)
    axis = 1 if apart[0] > apart[1] else 2
    steps, hop = apart[axis - 1], getattr(ear, "hop_length", None)
    if not (math.isfinite(steps) and steps > 1):
        return axis, None
    told = rate / hop if isinstance(hop, int) and hop else float(round(steps))
    return axis, told if abs(told - steps) < 0.03 * steps else steps  # what is said where it agrees: it is exact
