"""Sounds: read ``.wav`` files and waves, and process them with the model's feature extractor."""

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
    """A mono sound.

    Attributes:
        wave: ``[T]`` float32, −1 to 1.
        rate: samples per second; None if unknown.
    """

    wave: Tensor
    rate: int | None = None

    def __post_init__(self) -> None:
        if self.wave.dim() != 1 or not self.wave.is_floating_point() or not len(self.wave):
            raise InputError(
                f"a sound must be one row of floats [T], not {list(self.wave.shape)} {self.wave.dtype}: average the "
                "channels if there are several"
            )


def is_sound_name(source: str) -> bool:
    """Return whether a file name has the suffix of a sound file that can be read."""
    return source.lower().endswith(".wav")


def open_sound(path: str | Path) -> Sound:
    """Read a ``.wav`` file of 8, 16, 24 or 32 bits, or of 32 or 64-bit floats, and average its channels.

    Raises:
        LoadError: the file is missing or cannot be read.
        InputError: the file is larger than 256 MB or holds no sound.
    """
    check_file(Path(path), LARGEST)
    try:
        kind, channels, rate, width, raw = _read_wav(Path(path).read_bytes())
    except (OSError, ValueError, struct.error) as error:
        reason = "it is damaged" if isinstance(error, struct.error) else error
        raise LoadError(f"cannot read {path}: {reason}; save it as a 16-bit .wav file") from error
    three = (kind, width) == (_WHOLE, 3)
    if not (three or (kind, width) in _TYPES) or channels < 1 or rate < 1:
        facts = f"format {kind}, {width} bytes per sample, {channels} channels, {rate} samples per second"
        raise LoadError(f"cannot read {path}: {facts}; save it as a 16-bit .wav file")
    raw = raw[: len(raw) // (width * channels) * width * channels]  # a truncated file may end within a sample
    if three:  # 24 bits become the upper three bytes of 32
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
        raise InputError(f"{path} contains NaN or infinity: save it again with values from -1 to 1")
    return Sound(values.float(), rate)


def _read_wav(content: bytes) -> tuple[int, int, int, int, bytes]:
    """Parse a RIFF file, skipping chunks other than format and data.

    Returns:
        (format, channels, samples per second, bytes per sample, samples).

    Raises:
        ValueError: it is not a .wav file, or has no samples.
        struct.error: it ends within a header.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("it is not a .wav file")
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
    raise ValueError("it contains no samples")


def feature_extractor_of(processor: Any) -> Any:
    """Return the audio feature extractor that a processor is or has; None if it has none."""
    for extractor in (processor, getattr(processor, "feature_extractor", None)):
        if isinstance(getattr(extractor, "sampling_rate", None), int) and callable(extractor):
            return extractor
    return None


def as_sound(item: Any, processor: Any) -> Any:
    """Convert to a :class:`Sound` a mapping with "array" and "sampling_rate" (the format of ``datasets``) or, with an
    audio processor, one row of floats; return anything else unchanged."""
    if isinstance(item, Mapping) and {"array", "sampling_rate"} <= item.keys():
        return Sound(torch.as_tensor(np.asarray(item["array"], np.float32)), int(item["sampling_rate"]))
    row = isinstance(item, np.ndarray | Tensor) and item.ndim == 1
    if row and feature_extractor_of(processor) is not None and torch.as_tensor(item).is_floating_point():
        return Sound(torch.as_tensor(item).float())
    return item


def encode(sounds: Sequence[Sound], processor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Process sounds with the model's feature extractor.

    Returns:
        (arguments of the model's forward, facts about the sounds for :func:`with_sounds`).

    Raises:
        InputError: there is no feature extractor, or the rate of a sound differs from the model's.
    """
    extractor = feature_extractor_of(processor)
    if extractor is None:
        raise InputError("a sound needs the model's feature extractor: pass processor= (AutoFeatureExtractor)")
    rate = int(extractor.sampling_rate)
    for sound in sounds:
        if sound.rate not in (None, rate):
            raise InputError(
                f"the sound has {sound.rate:,} samples per second and the model takes {rate:,}: resample it first "
                "(torchaudio.functional.resample, librosa.resample, or ffmpeg -ar)"
            )
    waves = [sound.wave.numpy() for sound in sounds]
    options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"}
    try:  # with the extractor's default padding: Whisper's pads to 30 seconds
        encoded = dict(extractor(waves, **options))
    except ValueError:  # of unequal length
        encoded = dict(extractor(waves, **options, padding=True))
    padded = torch.nn.utils.rnn.pad_sequence([sound.wave for sound in sounds], batch_first=True)
    seconds = [len(sound.wave) / rate for sound in sounds]
    time = _time(encoded, extractor, rate)
    return encoded, {"sounds": padded, "sampling_rate": rate, "durations": seconds, "time": time}


def with_sounds(inputs: Inputs, facts: Mapping[str, Any], notes: list[list[str]] | None) -> Inputs:
    """Add facts about the sounds to their prepared tensors."""
    known = dict(facts)
    axis, rate = known.pop("time")
    features = replace(inputs.features, **known, rate=rate)
    return replace(inputs, features=features, notes=notes, turned=axis == 2)


def _time(encoded: Mapping[str, Any], extractor: Any, rate: int) -> tuple[int, float | None]:
    """Return (time axis, steps per second) of an extractor's output; the steps are None if unknown.

    For a wave, they are the wave's. For a spectrogram, they are measured from the places that change with each of two
    clicks one second apart.
    """
    tensor = next(v for v in encoded.values() if isinstance(v, Tensor) and v.is_floating_point())
    if tensor.dim() != 3:
        return 1, float(rate) if tensor.dim() == 2 else None
    noise = torch.randn(2 * rate, generator=torch.Generator().manual_seed(0)).numpy() * 1e-3
    clicks = [noise, noise.copy()]
    for click, at in zip(clicks, (rate // 2, 3 * rate // 2), strict=True):
        click[at] = 1.0
    first, second = (
        next(v for v in extractor(c, sampling_rate=rate, return_tensors="pt").values() if isinstance(v, Tensor))[0]
        for c in clicks
    )
    first, second = first.double(), second.double()
    distances = []
    for axis in (1, 2):  # centers of the places at which the first is larger, and the second is
        power = [(sign * (first - second)).clamp(min=0).square().sum(2 - axis) for sign in (1, -1)]
        places = torch.arange(len(power[0]), dtype=torch.float64)
        early, late = (float((p * places).sum() / p.sum()) for p in power)
        distances.append(late - early)
    axis = 1 if distances[0] > distances[1] else 2
    steps, hop = distances[axis - 1], getattr(extractor, "hop_length", None)
    if not (math.isfinite(steps) and steps > 1):
        return axis, None
    exact = rate / hop if isinstance(hop, int) and hop else float(round(steps))
    return axis, exact if abs(exact - steps) < 0.03 * steps else steps
