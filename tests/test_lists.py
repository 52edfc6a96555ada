"""Long lists are explained in batches, with the result of each sample explained alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import whyformer
from whyformer import batches
from whyformer.errors import InputError, TooLarge
from whyformer.prepared import Prepared
from whyformer.targets import LogProbability

MANY = 70
PICTURES = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (64, 64, 3), dtype=np.uint8)) for i in range(MANY)]
WORDS = ["a", "warm", "and", "charming", "film", "that", "wastes", "its", "fine", "cast", "on", "dull", "jokes"]
TEXTS = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 8]) for i in range(MANY)]
LIST: dict[str, Any] = {"bundled:digits": PICTURES, "bundled:sst2": TEXTS}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of the calls of ``Prepared.explain``, in order."""
    batches_seen: list[int] = []
    original = Prepared.explain

    def explain(self: Prepared, *args: Any, **kwargs: Any) -> Any:
        batches_seen.append(self.inputs.batch)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Prepared, "explain", explain)
    return batches_seen


def assert_equals_alone(e: whyformer.Explanation, alone: whyformer.Explanation) -> None:
    real = len(alone.tokens[0]) if alone.tokens else None  # the rest is padding
    assert torch.allclose(e.scores[0][:real], alone.scores[0], rtol=1e-5, atol=1e-6 * float(alone.scores.abs().max()))
    assert real is None or not e.scores[0][real:].any()
    assert torch.allclose(e.logits, alone.logits, atol=1e-6)
    assert e.target_names == alone.target_names
    assert e.warnings == alone.warnings
    assert e.texts == alone.texts
    if alone.tokens and e.tokens and e.offsets and alone.offsets:
        assert (e.tokens[0][:real], e.offsets[0][:real]) == (alone.tokens[0], alone.offsets[0])
    else:
        assert e.pictures is not None and alone.pictures is not None and torch.equal(e.pictures, alone.pictures)
        assert (e.originals, e.geometry, e.grid) == (alone.originals, alone.geometry, alone.grid)


@pytest.mark.part
@pytest.mark.parametrize("method", ["auto", "transformer_attribution", "input_x_gradient"])
@pytest.mark.parametrize("model", LIST)
def test_long_list_equals_single_samples(model: str, method: str, sizes: list[int]) -> None:
    targets = [i % 2 for i in range(MANY)]
    e = whyformer.explain(model, LIST[model], method, targets, dtype="float64")
    assert sizes == [32, 32, 6]
    assert (len(e), e.target.tolist()) == (MANY, targets)
    for i in (0, 1, 31, 32, 45, 63, 64, 69):
        alone = whyformer.explain(model, LIST[model][i], method, targets[i], dtype="float64")
        assert_equals_alone(e[i], alone)


def test_tuple_of_texts_is_no_list() -> None:
    """A tuple holds the positional arguments of forward; two texts could also be a pair."""
    model = whyformer.Explainer("bundled:sst2")
    with pytest.raises(InputError, match="as a list"):
        whyformer.explain(model, ("A good film.", "A bad film."), "input_x_gradient")
    assert len(whyformer.explain(model, ["A good film.", "A bad film."], "input_x_gradient")) == 2
    assert len(whyformer.explain(model, {"text": "A good film.", "text_pair": "A bad film."}, "input_x_gradient")) == 1


def test_array_of_texts_equals_a_list(sizes: list[int]) -> None:
    e = whyformer.explain("bundled:sst2", np.array(TEXTS), "input_x_gradient")
    assert sizes == [32, 32, 6]
    assert torch.equal(e.scores, whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient").scores)


def test_array_of_images_equals_a_list(sizes: list[int]) -> None:
    e = whyformer.explain("bundled:digits", np.stack([np.asarray(p) for p in PICTURES[:40]]), "rollout")
    assert sizes == [32, 8]
    assert torch.equal(e.scores, whyformer.explain("bundled:digits", PICTURES[:40], "rollout").scores)


@pytest.mark.parametrize("target", [LogProbability([i % 2 for i in range(MANY)]), f"LogProbability({[i % 2 for i in range(MANY)]})",
                                    torch.arange(MANY) % 2, ["positive" if i % 2 else "negative" for i in range(MANY)]])  # fmt: skip
def test_each_sample_has_its_target(target: Any) -> None:
    e = whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient", target)
    assert e.target.tolist() == [i % 2 for i in range(MANY)]


@pytest.mark.parametrize("count", [MANY - 1, MANY + 1])
def test_wrong_number_of_targets_raises_before_any_batch(count: int, sizes: list[int]) -> None:
    for target in ([0] * count, LogProbability([0] * count), f"Contrast(0, {[1] * count})"):
        with pytest.raises(InputError, match=f"{count} targets for {MANY} samples"):
            whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient", target)
    assert not sizes


def test_unequal_numbers_of_paired_texts_raise(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="70 texts and text_pair has 69"):
        whyformer.explain("bundled:sst2", {"text": TEXTS, "text_pair": TEXTS[1:]}, "input_x_gradient")
    assert not sizes


def test_text_target_of_several_tokens_is_a_span() -> None:
    from prompting import llava

    model, processor = llava()
    words = processor.tokenizer
    prompts = ["what is here", "is the left"] * 20
    e = whyformer.explain(model, prompts, "input_x_gradient", "what is", words)
    assert len(e) == 40
    for i in (0, 1, 38, 39):
        alone = whyformer.explain(model, prompts[i], "input_x_gradient", "what is", words)
        assert e[i].target_names == alone.target_names
        assert torch.allclose(e.logits[i], alone.logits[0], atol=1e-6)


def test_truncation_is_recorded_per_sample() -> None:
    """Only one batch has a text that is too long."""
    texts = [*TEXTS[:40], " ".join(WORDS * 60)]
    e = whyformer.explain("bundled:sst2", texts, "input_x_gradient", truncate=True)
    alone = whyformer.explain("bundled:sst2", texts[-1], "input_x_gradient", truncate=True)
    assert e.extent is not None and alone.extent is not None
    assert e.extent == [*((0, len(text)) for text in texts[:-1]), alone.extent[0]]
    assert e[40].warnings == alone.warnings != e[0].warnings


def test_list_of_text_pairs_equals_single_pairs(sizes: list[int]) -> None:
    pair = {"text": TEXTS, "text_pair": TEXTS[::-1]}
    e = whyformer.explain("bundled:sst2", pair, "input_x_gradient", dtype="float64")
    assert sizes == [32, 32, 6]
    assert_equals_alone(e[33], whyformer.explain("bundled:sst2", {n: [v[33]] for n, v in pair.items()}, "input_x_gradient", dtype="float64"))


def test_list_of_sounds_equals_single_sounds(sizes: list[int]) -> None:
    torch.manual_seed(0)
    config = hf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 4),
        conv_kernel=(10, 8), num_feat_extract_layers=2, num_labels=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        classifier_proj_size=16, feat_extract_norm="layer",
    )  # fmt: skip
    model, extractor = hf.Wav2Vec2ForSequenceClassification(config).eval().double(), hf.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    sounds = [np.random.default_rng(i).standard_normal(400 + 20 * i).astype(np.float32) for i in range(35)]
    e = whyformer.explain(model, sounds, "input_x_gradient", 1, extractor)
    assert sizes == [32, 3]
    assert e.features.durations == [len(sound) / 16_000 for sound in sounds]
    assert e.sounds is not None and e.sounds.shape == (35, 400 + 20 * 34)
    for i in (0, 31, 34):
        alone = whyformer.explain(model, sounds[i], "input_x_gradient", 1, extractor)
        width = alone.scores.shape[1]
        assert torch.allclose(e.scores[i, :width], alone.scores[0], atol=1e-4 * float(alone.scores.abs().max()))
        assert torch.equal(e.sounds[i, : len(sounds[i])], torch.from_numpy(sounds[i]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), TooLarge("takes more than there is"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")])  # fmt: skip
def test_batch_size_is_halved_when_out_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient")
    batches_seen: list[int] = []
    original = Prepared._explain_batch

    def whole(self: Prepared, *args: Any, **kwargs: Any) -> Any:
        batches_seen.append(self.inputs.batch)
        if self.inputs.batch > 10:
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Prepared, "_explain_batch", whole)
    e = whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient")
    assert batches_seen == [32, 16, *[8] * 8, 6]
    assert torch.allclose(e.scores, expected.scores, atol=1e-6)


def test_out_of_memory_on_one_sample_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: Prepared, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Prepared, "_explain_batch", whole)
    with pytest.raises(torch.OutOfMemoryError):
        whyformer.explain("bundled:sst2", TEXTS[:3], "input_x_gradient")


def test_result_larger_than_free_memory_raises_after_first_batch(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    monkeypatch.setattr(batches, "free_memory", lambda place: 10_000)
    with pytest.raises(TooLarge, match="explain_many"):
        whyformer.explain("bundled:digits", PICTURES, "rollout")
    assert sizes == [32]


def test_error_has_a_note_with_the_batch() -> None:
    with pytest.raises(InputError, match="number 8 is empty") as caught:
        whyformer.explain("bundled:sst2", [*TEXTS[:40], " "], "input_x_gradient")
    assert "samples 32 to 40" in caught.value.__notes__[0]


def test_progress_counts_all_batches() -> None:
    calls = []

    def track(work: Any, description: str, total: int | None = None) -> Any:
        calls.append((description, total))
        return work

    whyformer.explain("bundled:sst2", TEXTS, "input_x_gradient", progress=track)
    assert ("explaining", 3) in calls
