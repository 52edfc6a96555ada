"""Sounds: read ``.wav`` files and waves, and process them with the model's feature extractor."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.pictures import check_file

LARGEST = 256 * 2**20
_GAPS = (1.0, 0.5, 0.2, 0.1, 0.05)  # seconds between two clicks that measure the axis of time
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {(_WHOLE, 1): "u1", (_WHOLE, 2): "<i2", (_WHOLE, 4): "<i4", (_FLOAT, 4): "<f4", (_FLOAT, 8): "<f8"}


@dataclass(frozen=True, eq=False)
class Sound:
    """A mono sound.

    Attributes:
        wave: ``[T]`` float32, −1 to 1.
        rate: samples per second; None if unknown.
        channels: number of channels of which ``wave`` is the mean.
    """

    wave: Tensor
    rate: int | None = None
    channels: int = 1

    def __post_init__(self) -> None:
        if self.wave.dim() != 1:
            raise InputError(
                f"a sound must be one row of floats [T], not {list(self.wave.shape)}: average the channels if there "
                "are several"
            )
        if not len(self.wave):
            raise InputError("the sound is empty: it has no samples")
        if not self.wave.is_floating_point():
            bits = 8 * self.wave.element_size()
            raise InputError(
                f"a sound must have floats from -1 to 1, not {str(self.wave.dtype).removeprefix('torch.')}: convert "
                f"whole numbers of {bits} bits by wave.astype('float32') / 2**{bits - 1}"
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
    return Sound(values.float(), rate, channels)


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
    audio processor, one row of numbers; return anything else unchanged. A row may be token ids if the processor has a
    tokenizer."""
    if isinstance(item, Mapping) and {"array", "sampling_rate"} <= item.keys():
        values = item["array"]
        values = np.asarray(values, None if isinstance(values, np.ndarray | Tensor) else np.float32)
        return _of_floats(torch.as_tensor(values), int(item["sampling_rate"]))
    row, extractor = isinstance(item, np.ndarray | Tensor) and item.ndim == 1, feature_extractor_of(processor)
    if row and extractor is not None:
        wave = torch.as_tensor(item)
        if extractor is processor or wave.dtype not in (torch.long, torch.int):
            return _of_floats(wave)
    return item


def _of_floats(wave: Tensor, rate: int | None = None) -> Sound:
    return Sound(wave.float() if wave.is_floating_point() else wave, rate)


def encode(sounds: Sequence[Sound], processor: Any) -> dict[str, Any]:
    """Process sounds with the model's feature extractor; return arguments of the model's forward.

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
        return dict(extractor(waves, **options))
    except ValueError:  # of unequal length
        return dict(extractor(waves, **options, padding=True))


def with_sounds(inputs: Inputs, sounds: Sequence[Sound], processor: Any) -> Inputs:
    """Add facts about the sounds to their encoded tensors, and notes on what was assumed or averaged."""
    extractor = feature_extractor_of(processor)
    sampling_rate = int(extractor.sampling_rate)
    axis, rate = time_axis(inputs.kwargs, extractor, sampling_rate)
    padded = torch.nn.utils.rnn.pad_sequence([sound.wave for sound in sounds], batch_first=True)
    seconds = [len(sound.wave) / sampling_rate for sound in sounds]
    features = replace(inputs.features, sounds=padded, sampling_rate=sampling_rate, durations=seconds, rate=rate)
    notes = [_notes(sound, sampling_rate) for sound in sounds]
    transposed = None if axis is None else axis == 2
    return replace(inputs, features=features, notes=notes if any(notes) else None, transposed=transposed)


def _notes(sound: Sound, rate: int) -> list[str]:
    notes = [] if sound.rate else [f"assumed to have {rate:,} samples per second"]
    return [*notes, f"the mean of its {sound.channels} channels is explained"] if sound.channels > 1 else notes


def time_axis(encoded: Mapping[str, Any], extractor: Any, rate: int) -> tuple[int | None, float | None]:
    """Return (time axis, steps per second) of an extractor's output; None for what is unknown.

    For a wave, these are axis 1 and its sampling rate. For a spectrogram, they are measured with two clicks: along the
    axis of time, the changes by the second click equal those by the first, shifted. Clicks one second apart give the
    most exact result; if an output is too short for these, clicks nearer to each other and to the start are tried.
    """
    tensor = next(v for v in encoded.values() if isinstance(v, Tensor) and v.is_floating_point())
    if tensor.dim() != 3:
        return 1, float(rate) if tensor.dim() == 2 else None
    for gap in _GAPS:
        powers = _clicks(extractor, rate, round(gap * rate))
        shifts = [_shift(*power) for power in powers]
        moved = [axis for axis, (lag, _, _) in enumerate(shifts) if lag]
        if len(moved) != 1 or min(similarity for _, similarity, _ in shifts) < 0.9:
            continue
        late, (lag, similarity, distance) = powers[moved[0]][1], shifts[moved[0]]
        if lag < 2 or late[-1] > 0.01 * late.max():  # it may be cut off
            continue
        steps, hop = distance / gap, getattr(extractor, "hop_length", None)
        exact = rate / hop if isinstance(hop, int) and hop else lag / gap
        # without a hop length, the clicks are whole steps apart if their changes are the same
        if abs(exact - steps) < 0.03 * steps and (isinstance(hop, int) or similarity > 0.999):
            return moved[0] + 1, exact
        return moved[0] + 1, steps if gap == _GAPS[0] else None
    return None, None


def _clicks(extractor: Any, rate: int, gap: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the squared changes of the output by a click and by one ``gap`` samples later, along axes 1 and 2."""
    period = torch.randn(gap, generator=torch.Generator().manual_seed(0)).numpy() * 1e-3
    noise = np.resize(period, 2 * rate)  # repeated, so that both clicks have the same surroundings
    clicks = [noise, noise.copy()]
    for click, at in zip(clicks, (gap // 2, gap // 2 + gap), strict=True):
        click[at] = 1.0
    first, second = (
        next(v for v in extractor(c, sampling_rate=rate, return_tensors="pt").values() if isinstance(v, Tensor))[0]
        for c in clicks
    )
    change = (first.double() - second.double()).numpy()
    early, late = np.square(change.clip(min=0)), np.square(change.clip(max=0))
    return [(early.sum(1 - axis), late.sum(1 - axis)) for axis in (0, 1)]


def _shift(early: NDArray[np.float64], late: NDArray[np.float64]) -> tuple[int, float, float]:
    """Return (steps, similarity of ``late`` to ``early`` shifted by them, distance of their centers).

    The similarity, at most 1, is 0 unless both have about the same sum.
    """
    if not 0.5 * early.sum() < late.sum() < 2 * early.sum():
        return 0, 0.0, 0.0
    places = np.arange(len(early))
    products = np.correlate(late, early, "full")  # for shifts by 1 - len(early) steps and more
    similarity = float(products.max() / np.sqrt(np.square(early).sum() * np.square(late).sum()))
    distance = float((places * late).sum() / late.sum() - (places * early).sum() / early.sum())
    return int(products.argmax()) - len(early) + 1, similarity, distance
