"""The bundled models load like any Hugging Face model and reach the accuracy of their cards."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from whyformer.datasets import Scene, digit_scenes, split_indices

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "src/whyformer/bundled"
SST2 = ROOT.parent / "shared/data/sst2"


@cache
def held_out() -> list[Scene]:
    """Two hundred scenes of held-out digits."""
    pytest.importorskip("sklearn")
    return list(digit_scenes(200, seed=12))


@torch.inference_mode()
def predicted_digits(pictures: list) -> np.ndarray:
    """The digits that the bundled model predicts in each image, as booleans ``[B, 10]``."""
    model = AutoModelForImageClassification.from_pretrained(BUNDLED / "digits").eval()
    processor = AutoImageProcessor.from_pretrained(BUNDLED / "digits", backend="pil")
    parts = [pictures[start : start + 50] for start in range(0, len(pictures), 50)]
    logits = [model(**processor(part, return_tensors="pt")).logits for part in parts]
    return (torch.cat(logits) > 0).numpy()


@pytest.mark.parametrize("name", ["digits", "sst2", "reader"])
def test_folder_is_small_and_safe(name: str) -> None:
    files = [file for file in (BUNDLED / name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 10_000_000
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md", ".jinja"}
    assert (BUNDLED / name / "README.md").is_file()


def test_digits_model_is_a_standard_vit() -> None:
    model = AutoModelForImageClassification.from_pretrained(BUNDLED / "digits")
    assert type(model).__name__ == "ViTForImageClassification"
    assert model.config.problem_type == "multi_label_classification"
    assert model.config.id2label == {number: str(number) for number in range(10)}
    assert (model.config.image_size, model.config.patch_size) == (112, 8)


def test_accuracy_of_digits_model_on_held_out_scenes() -> None:
    predicted = predicted_digits([scene.image for scene in held_out()])
    truth = np.array([[digit in scene.digits for digit in range(10)] for scene in held_out()])
    f1 = 2 * (predicted & truth).sum(axis=0) / (predicted.sum(axis=0) + truth.sum(axis=0))
    assert (2 * (predicted & truth).sum() / (predicted.sum() + truth.sum())) >= 0.95
    assert f1.min() >= 0.88  # about fifty scenes for each digit
    assert (predicted == truth).all(axis=1).mean() >= 0.85


@pytest.mark.parametrize(("name", "digits"), [("digits_37", {3, 7}), ("digits_258", {2, 5, 8})])
def test_digits_model_on_example_images(name: str, digits: set[int]) -> None:
    from PIL import Image

    picture = Image.open(ROOT / f"examples/pictures/{name}.png")
    assert picture.size == (112, 112)
    assert set(np.flatnonzero(predicted_digits([picture])[0]).tolist()) == digits


def test_sst2_model_is_a_standard_bert() -> None:
    model = AutoModelForSequenceClassification.from_pretrained(BUNDLED / "sst2")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "sst2")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert tokenizer.is_fast
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("A Great film!")["input_ids"])
    assert tokens == ["[CLS]", "a", "great", "film", "!", "[SEP]"]


@torch.inference_mode()
@pytest.mark.skipif(not (SST2 / "dev.tsv").is_file(), reason="the SST-2 sentences are not here")
def test_accuracy_of_sst2_model_on_development_sentences() -> None:
    model = AutoModelForSequenceClassification.from_pretrained(BUNDLED / "sst2").eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "sst2")
    with (SST2 / "dev.tsv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) == 872
    correct = 0
    for start in range(0, len(rows), 218):
        part = rows[start : start + 218]
        batch = tokenizer([row["sentence"] for row in part], padding=True, truncation=True, return_tensors="pt")
        labels = torch.tensor([int(row["label"]) for row in part])
        correct += int((model(**batch).logits.argmax(-1) == labels).sum())
    assert correct / len(rows) >= 0.80


def test_splits_share_no_image() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    parts, data = split_indices(), datasets.load_digits()
    assert not set(parts["train"]) & set(parts["test"])
    assert sorted([*parts["train"], *parts["test"]]) == list(range(len(data.target)))
    pixels = [{data.images[i].tobytes() for i in parts[name]} for name in ("train", "test")]
    assert not pixels[0] & pixels[1]
    assert 330 <= len(parts["test"]) <= 390
    assert np.bincount(data.target[parts["test"]]).min() >= 30


def test_scenes_are_deterministic_for_a_seed() -> None:
    first, longer = held_out()[:3], list(digit_scenes(5, seed=12))
    for a, b in zip(first, longer, strict=False):
        assert a.digits == b.digits
        assert a.image.tobytes() == b.image.tobytes()
        assert np.array_equal(a.masks, b.masks)
    assert next(digit_scenes(1, seed=13)).image.tobytes() != first[0].image.tobytes()
    assert next(digit_scenes(1, seed=12, split="train")).image.tobytes() != first[0].image.tobytes()


def test_scenes_have_the_documented_digits_and_masks() -> None:
    for scene in held_out():
        assert scene.image.mode == "RGB"
        assert scene.image.size == (112, 112)
        assert 1 <= len(scene.digits) <= 4
        assert len(set(scene.digits)) == len(scene.digits)
        assert scene.masks.shape == (len(scene.digits), 112, 112)
        assert scene.masks.dtype == bool
        assert scene.masks.sum(axis=0).max() <= 1
    assert {len(scene.digits) for scene in held_out()} == {1, 2, 3, 4}


def test_masks_cover_the_strokes() -> None:
    for scene in held_out():
        brightness = np.asarray(scene.image.convert("L"), dtype=float)
        for mask in scene.masks:
            rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
            assert 20 <= rows[-1] - rows[0] + 1 <= 60
            area = np.zeros_like(mask)
            area[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
            around = area & ~scene.masks.any(axis=0)
            assert brightness[mask].mean() > brightness[around].mean() + 25


@pytest.mark.parametrize(
    "wrong",
    [{"split": "dev"}, {"min_digits": 0}, {"min_digits": 3, "max_digits": 2}, {"max_digits": 9}, {"clutter": -1.0}],
)
def test_scenes_with_invalid_arguments_raise(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"must|need"):
        next(digit_scenes(1, **wrong))


def test_scenes_without_scikit_learn_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from whyformer.datasets import scenes

    scenes._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"whyformer\[data\]"):
        split_indices()
