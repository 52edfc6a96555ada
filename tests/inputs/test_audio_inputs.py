"""Sounds as files or arrays with a sampling rate, through the feature extractors of transformers."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import whyformer
import whyformer.report
from whyformer import show
from whyformer.errors import InputError, LoadError
from whyformer.inputs.sounds import Sound, encode, open_sound, time_axis
from whyformer.show.layout import prepared

RATE = 16_000


def tone(seconds: float = 1.0, begin: float = 0.5, end: float = 0.75) -> np.ndarray:
    """Faint noise with a tone from ``begin`` to ``end``."""
    moments = np.arange(round(seconds * RATE))
    sound = 0.02 * np.random.default_rng(0).standard_normal(len(moments))
    inside = (moments >= begin * RATE) & (moments < end * RATE)
    return (sound + inside * np.sin(2 * np.pi * 440 * moments / RATE)).astype(np.float32)


def write_wav(path: Path, sound: np.ndarray, width: int = 2, rate: int = RATE, channels: int = 1) -> Path:
    encoders = {1: lambda s: (s * 127 + 128).astype("u1").tobytes(), 2: lambda s: (s * 32767).astype("<i2").tobytes(),
            3: lambda s: b"".join(int(v).to_bytes(3, "little", signed=True) for v in (s * 8388607)),
            4: lambda s: (s * 2147483647).astype("<i4").tobytes()}[width]  # fmt: skip
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(encoders(np.repeat(sound.astype(np.float64) / 2, channels)))
    return path


@pytest.fixture(scope="module")
def speech_model() -> tuple[nn.Module, hf.Wav2Vec2FeatureExtractor]:
    torch.manual_seed(0)
    config = hf.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16, 16), conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 8), num_feat_extract_layers=3, num_labels=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        classifier_proj_size=16, feat_extract_norm="layer",
    )  # fmt: skip
    return hf.Wav2Vec2ForSequenceClassification(config).eval(), hf.Wav2Vec2FeatureExtractor(return_attention_mask=True)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_file_is_read_at_any_width(tmp_path: Path, width: int, channels: int) -> None:
    sound = tone(0.1, 0.02, 0.06)
    actual = open_sound(write_wav(tmp_path / "a.wav", sound, width, 8000, channels))
    assert actual.rate == 8000
    assert np.abs(actual.wave.numpy() - sound / 2).max() < 2.0 ** (3 - 8 * min(width, 2))


@pytest.mark.parametrize("kind", ["<f4", "<f8", "<i2", "u1"])
@pytest.mark.parametrize("extensible", [False, True])
def test_wav_file_with_any_header(tmp_path: Path, kind: str, extensible: bool) -> None:
    """Floats, the extensible header that some programs write, and additional chunks."""
    sound = tone(0.1, 0.02, 0.06) / 2
    scaled = {"<i2": lambda s: s * 32767, "u1": lambda s: s * 127 + 128}.get(kind, lambda s: s)
    stereo = np.repeat(scaled(sound).astype(kind), 2).tobytes()
    width, code = np.dtype(kind).itemsize, 3 if "f" in kind else 1
    head = struct.pack("<HHIIHH", 0xFFFE if extensible else code, 2, 8000, 8000 * 2 * width, 2 * width, 8 * width)
    head += struct.pack("<HHIH14s", 22, 8 * width, 3, code, b"\0" * 14) if extensible else b""
    chunks = [(b"LIST", b"odd"), (b"fmt ", head), (b"fact", b"\0" * 4), (b"data", stereo), (b"junk", b"!")]
    body = b"".join(name + struct.pack("<I", len(chunk)) + chunk + b"\0" * (len(chunk) % 2) for name, chunk in chunks)
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body)
    actual = open_sound(tmp_path / "a.wav")
    assert actual.rate == 8000
    assert np.abs(actual.wave.numpy() - sound).max() < {"u1": 2e-2, "<i2": 1e-4}.get(kind, 1e-7)


def test_float_wav_file_of_scipy_equals_array(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    wavfile = pytest.importorskip("scipy.io.wavfile")
    model, extractor = speech_model
    wavfile.write(tmp_path / "a.wav", RATE, tone())
    actual = whyformer.explain(model, tmp_path / "a.wav", "saliency", 1, processor=extractor)
    expected = whyformer.explain(model, {"array": tone(), "sampling_rate": RATE}, "saliency", 1, processor=extractor)
    assert torch.equal(actual.scores, expected.scores)


def test_compressed_wav_file_raises(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    """The error recommends a 16-bit .wav file, which is read."""
    model, extractor = speech_model
    path = write_wav(tmp_path / "a.wav", tone())
    content = bytearray(path.read_bytes())
    content[20] = 0x55  # MP3
    (tmp_path / "b.wav").write_bytes(content)
    with pytest.raises(LoadError, match="16-bit"):
        whyformer.explain(model, tmp_path / "b.wav", "saliency", 1, processor=extractor)
    assert whyformer.explain(model, path, "saliency", 1, processor=extractor).scores.any()


def test_files_arrays_and_data_set_rows_have_equal_scores(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    path = write_wav(tmp_path / "a.wav", tone(), 4)
    sound = open_sound(path).wave
    expected = whyformer.explain(
        model,
        {"input_values": extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt").input_values},
        "input_x_gradient",
        1,
    )
    for given in (str(path), path, sound, sound.numpy(), {"array": sound.numpy(), "sampling_rate": RATE}, [path]):
        e = whyformer.explain(model, given, "input_x_gradient", 1, processor=extractor)
        assert torch.allclose(e.scores, expected.scores, atol=1e-7)
        assert (e.rate, e.features.sampling_rate, e.features.durations) == (RATE, RATE, [1.0])
    assert e.diagnostics.get("input") is None
    assert whyformer.explain(model, sound, "saliency", 1, processor=extractor).diagnostics["input"] == [
        ["assumed to have 16,000 samples per second"]
    ]
    stereo = write_wav(tmp_path / "stereo.wav", tone(), channels=2)
    (notes,) = whyformer.explain(model, stereo, "saliency", 1, processor=extractor).diagnostics["input"]
    assert len(notes) == 1
    assert "2 channels" in notes[0]


def test_batch_of_unequal_sounds_equals_single_sounds(speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    short, long = tone(0.5, 0.1, 0.2), tone()
    both = whyformer.explain(model, [short, long], "saliency", 1, processor=extractor)
    assert both.features.durations == [0.5, 1.0]
    assert both[0].over_time(0.1).tokens == [["0.0 s", "0.1 s", "0.2 s", "0.3 s", "0.4 s", *["[PAD]"] * 5]]
    assert both.scores[0, 8000:].eq(0).all()
    alone = whyformer.explain(model, long, "saliency", 1, processor=extractor)
    assert torch.allclose(both.scores[1], alone.scores[0], atol=1e-5)


def test_explain_many_sounds(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    files = [write_wav(tmp_path / f"{i}.wav", tone(0.5 + 0.25 * (i == 1)), 4) for i in range(3)]
    stream = whyformer.explain_many(model, files, "saliency", processor=extractor)
    explanations = list(stream)
    assert stream.failures == [] and [e.durations for e in explanations] == [[0.5], [0.75], [0.5]]
    alone = whyformer.explain(model, files[2], "saliency", processor=extractor)
    assert torch.allclose(explanations[2].scores, alone.scores, atol=1e-6)
    maps = whyformer.explain_many(model, files, "saliency", processor=extractor, out=tmp_path / "maps")
    assert [e.rate for e in maps] == [RATE] * 3 and torch.allclose(maps[2].scores, alone.scores, atol=1e-6)


def test_over_time_sums_the_samples_of_an_interval(speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    e = whyformer.explain(model, tone(), "input_x_gradient", 1, processor=extractor)
    binned = e.over_time(0.25)
    assert binned.tokens == [["0.00 s", "0.25 s", "0.50 s", "0.75 s"]]
    assert torch.allclose(binned.scores, e.scores.unflatten(1, (4, -1)).sum(-1), atol=1e-7)
    assert torch.allclose(e.over_time().scores.sum(), e.scores.sum(), atol=1e-6)
    assert len(e.over_time().tokens[0]) == 50
    with pytest.raises(InputError, match="shorter than the time between two scores"):
        e.over_time(1e-6)
    with pytest.raises(InputError, match="for sounds"):
        binned.with_features(rate=None).over_time()


@pytest.mark.parametrize(("extractor", "axis"), [(hf.WhisperFeatureExtractor, 2), (hf.ASTFeatureExtractor, 1)])
@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_time_axis_and_frame_rate_of_spectrogram_are_measured(extractor: type, axis: int) -> None:
    encoded = encode([Sound(torch.from_numpy(tone()), RATE)], extractor())
    assert time_axis(encoded, extractor(), RATE) == (axis, 100.0)


def ast(length: int) -> hf.ASTFeatureExtractor:
    return hf.ASTFeatureExtractor(max_length=length, num_mel_bins=32)


def whisper(length: int) -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=length)


@pytest.mark.parametrize(("extractor", "time"), [
    *((ast(n), (1, 100.0)) for n in (16, 32, 64, 96, 100, 128, 140, 149, 150, 151, 152, 1024)), (ast(6), (None, None)),
    *((whisper(n), (2, 100.0)) for n in (1, 2, 30)), (hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=200), (2, 80.0)),
    (hf.SeamlessM4TFeatureExtractor(), (1, 50.0)), (hf.ClvpFeatureExtractor(), (2, 22050 / 256)), (hf.UnivNetFeatureExtractor(), (1, 93.75)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_time_axis_of_spectrograms_of_any_length(extractor: Any, time: tuple[int | None, float | None]) -> None:
    """A spectrogram that ends before 1.5 s, or hops of any length; what is too short to be measured is unknown."""
    sound = Sound(torch.from_numpy(tone(0.5)), extractor.sampling_rate)
    assert time_axis(encode([sound], extractor), extractor, extractor.sampling_rate) == time


@pytest.mark.parametrize("length", [6, 128])
@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_short_spectrogram_is_explained_along_time(length: int) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}
    config = hf.ASTConfig(**sizes, frequency_stride=4, time_stride=2, max_length=length, num_mel_bins=32, num_labels=3)
    torch.manual_seed(0)
    model, extractor = hf.ASTForAudioClassification(config).eval(), ast(length)
    e = whyformer.explain(model, tone(), "input_x_gradient", 1, processor=extractor)
    leaf = extractor(tone(), sampling_rate=RATE, return_tensors="pt").input_values.requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).logits[0, 1], leaf)
    expected = (leaf.detach() * gradient).sum(2)
    assert e.rate == (100.0 if length == 128 else None)
    assert torch.allclose(e.scores, expected, atol=1e-5 * float(expected.abs().max()))


def test_spectrogram_scores_are_summed_over_bands() -> None:
    """Time is the last axis of Whisper's input, so gradient × input is summed over bands."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_layers": 1,
    }
    model = hf.WhisperForAudioClassification(hf.WhisperConfig(**sizes, decoder_attention_heads=2, num_labels=3)).eval()
    extractor = hf.WhisperFeatureExtractor()
    e = whyformer.explain(model, tone(), "input_x_gradient", 1, processor=extractor)
    leaf = extractor(tone(), sampling_rate=RATE, return_tensors="pt").input_features.requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).logits[0, 1], leaf)
    expected = (leaf.detach() * gradient).sum(1)
    assert e.scores.shape == (1, 3000)
    assert torch.allclose(e.scores, expected, atol=1e-5 * float(expected.abs().max()))
    bare = whyformer.explain(model, {"input_features": leaf.detach()}, "input_x_gradient", 1)
    assert torch.equal(bare.scores, e.scores)
    assert whyformer.explain(model, tone(), "raw_attention", 1, processor=extractor).over_time(0.5).scores.shape == (1, 60)


def test_unusable_sound_raises(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    with pytest.raises(InputError, match="44,100 samples per second and the model takes 16,000: resample it first"):
        whyformer.explain(model, write_wav(tmp_path / "a.wav", tone(), rate=44_100), "saliency", 1, processor=extractor)
    with pytest.raises(InputError, match="needs the model's feature extractor"):
        whyformer.explain(model, {"array": tone(), "sampling_rate": RATE}, "saliency", 1)
    with pytest.raises(InputError, match="one row of floats"):
        whyformer.explain(model, {"array": np.zeros((2, 9)), "sampling_rate": RATE}, "saliency", 1, processor=extractor)
    (tmp_path / "no.wav").write_bytes(b"RIFF, it says")
    with pytest.raises(LoadError, match="cannot read"):
        whyformer.explain(model, tmp_path / "no.wav", "saliency", 1, processor=extractor)
    with pytest.raises(InputError, match="holds no sound"):
        whyformer.explain(model, write_wav(tmp_path / "empty.wav", np.zeros(0)), "saliency", 1, processor=extractor)


@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(("wave", "message"), [
    (np.zeros(0, np.float32), "the sound is empty"), (np.zeros(0, np.int16), "the sound is empty"),
    ((tone() * 2**14).astype(np.int16), r"not int16: convert .* wave.astype\('float32'\) / 2\*\*15"),
    ((tone() * 2**30).astype(np.int32), r"not int32: .* 2\*\*31"), (np.zeros(5, np.float32), "a sound of 0.000313 seconds, which may be too short"),
])  # fmt: skip
def test_unreadable_sound_raises(speech_model: tuple[nn.Module, Any], wave: np.ndarray, message: str, tensor: bool, mapping: bool) -> None:
    model, extractor = speech_model
    given = torch.from_numpy(wave) if tensor else wave
    given = {"array": given, "sampling_rate": RATE} if mapping else given
    for sound in (given, [given]):
        with pytest.raises(InputError, match=message):
            whyformer.explain(model, sound, "saliency", 1, processor=extractor)


def test_converted_integers_equal_the_sound_of_the_file(tmp_path: Path, speech_model: tuple[nn.Module, Any]) -> None:
    model, extractor = speech_model
    path = write_wav(tmp_path / "a.wav", tone())
    whole = np.frombuffer(path.read_bytes()[44:], "<i2")
    e = whyformer.explain(model, whole.astype("float32") / 2**15, "saliency", 1, processor=extractor)
    assert torch.equal(e.scores, whyformer.explain(model, path, "saliency", 1, processor=extractor).scores)


def test_sound_explanation_is_saved_and_drawn(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    model, extractor = speech_model
    explanations = [whyformer.explain(model, tone(), m, 1, processor=extractor) for m in ("saliency", "input_x_gradient")]
    loaded = whyformer.Explanation.load(explanations[0].save(tmp_path / "e.safetensors"))
    assert torch.equal(loaded.sounds, explanations[0].sounds) and loaded.rate == RATE
    assert whyformer.Explanation.from_dict(explanations[0].to_dict()).rate == RATE
    figure = show.figure(explanations)
    strips = [axes.get_images()[0].get_extent() for axes in figure.axes if axes.get_images() and axes.get_xlim()[1] == 1.0]
    assert [0, 1.0, 0, 1] in [list(extent) for extent in strips]
    assert show.encode(figure).startswith(b"\x89PNG")
    assert "0.50 s" in str(explanations[1]) and "0.50 s" in show.page(explanations)
    assert len(show.encode(show.bars(explanations[1], k=3))) > 1000
    whyformer.report.write_report(tmp_path / "e.safetensors", tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "0.50 s" in html and "10000" not in html


def test_speech_model_is_explained_by_path(tmp_path: Path, speech_model: tuple[nn.Module, object]) -> None:
    from typer.testing import CliRunner

    from whyformer.apps.cli import app

    model, extractor = speech_model
    model.save_pretrained(tmp_path / "ears")
    extractor.save_pretrained(tmp_path / "ears")
    path = write_wav(tmp_path / "a.wav", tone())
    e = whyformer.explain(str(tmp_path / "ears"), path, "saliency", 1)
    assert torch.allclose(e.scores, whyformer.explain(model, path, "saliency", 1, processor=extractor).scores, atol=1e-6)
    result = CliRunner().invoke(
        app,
        [
            "explain",
            str(path),
            "--model",
            str(tmp_path / "ears"),
            "--method",
            "saliency",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").glob("a-saliency-*.png"))) == 1
    result = CliRunner().invoke(app, ["explain", str(path)])
    assert result.exit_code == 2 and "no default model for a sound" in result.output


def test_video_frames_are_drawn_on_one_scale() -> None:
    scores = torch.zeros(1, 3 * 4)
    scores[0, 4:8] = torch.tensor([1.0, 0, 0, 0])  # the second step, its first cell
    pictures = torch.zeros(1, 6, 8, 8, 3, dtype=torch.uint8)
    pictures[:, 3] = 200
    e = whyformer.Explanation(scores, "patch", "rollout", {}, torch.tensor([0]), torch.zeros(1, 2))
    e = e.with_features(grid=(2, 2), frames=3, image_size=(8, 8), pictures=pictures)
    flat = prepared(e)
    assert (flat.level, tuple(flat.scores.shape), tuple(flat.pictures.shape)) == ("pixel", (1, 8, 24), (1, 8, 24, 3))
    assert flat.scores[0, 0].argmax() == 8 and flat.scores[0, :, :8].eq(0).all() and flat.scores[0, :, 16:].eq(0).all()
    assert flat.pictures[0, 0, 8:16].eq(200).all() and flat.pictures[0, 0, :8].eq(0).all()
    assert tuple(e.unrolled(2).scores.shape) == (1, 16, 16) and e.unrolled(2).scores[0, 8:, 8:].eq(0).all()
    assert show.encode(show.figure(e)).startswith(b"\x89PNG")
    assert show.overlay(e).shape[1] == 3 * show.overlay(e.frame(0)).shape[1]
    with pytest.raises(InputError, match="for videos"):
        flat.unrolled()
