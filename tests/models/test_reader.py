"""bundled:reader is a standard LLaVA model that reads held-out digits, and its maps are on the digit of each word."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, ViTForImageClassification

import whyformer
from whyformer.datasets.reading import LEAST_DISTANCE, middles, reading_scenes
from whyformer.datasets.scenes import Scene
from whyformer.models.loading import load

QUESTIONS = {
    "read from left to right :": lambda digits: digits, "read from right to left :": lambda digits: digits[::-1],
    "What is on the left?": lambda digits: digits[:1], "what is on the right ?": lambda digits: digits[-1:],
}  # fmt: skip


@cache
def reader_path() -> str:
    from whyformer.models.loading import _place

    return _place("bundled:reader")


@cache
def scenes() -> list[Scene]:
    pytest.importorskip("sklearn")
    return list(reading_scenes(48, seed=31))


def test_reader_is_a_standard_llava_with_the_tower_of_digits() -> None:
    model = AutoModelForImageTextToText.from_pretrained(reader_path())
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    tower = ViTForImageClassification.from_pretrained(Path(reader_path()).parent / "digits").vit.state_dict()
    reader_tower = model.model.vision_tower.state_dict()
    assert all(torch.equal(reader_tower[name], value) for name, value in tower.items())
    tokenizer = AutoTokenizer.from_pretrained(reader_path())
    words = tokenizer.convert_ids_to_tokens(tokenizer("<image> What is left?")["input_ids"])
    assert words == ["<s>", "<image>", "what", "is", "left", "?"]
    assert type(AutoProcessor.from_pretrained(reader_path(), backend="pil")).__name__ == "LlavaProcessor"


def test_digits_of_reading_scenes_are_in_order() -> None:
    for i, scene in enumerate(scenes()):
        assert len(scene.digits) == len(set(scene.digits)) == 2 + i % 3
        assert (middles(scene)[1:] - middles(scene)[:-1] >= LEAST_DISTANCE).all()
    repeated = list(reading_scenes(3, seed=31))
    assert [s.digits for s in repeated] == [s.digits for s in scenes()[:3]]


@torch.inference_mode()
def test_accuracy_of_reader_on_held_out_scenes() -> None:
    loaded = load("bundled:reader")
    assert loaded.modality == "both"
    model: Any = loaded.model
    for question, answer in QUESTIONS.items():
        inputs = loaded.processor(
            images=[s.image for s in scenes()], text=[f"<image> {question}"] * len(scenes()), return_tensors="pt"
        )
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        predicted = [text.split() for text in loaded.processor.batch_decode(generated, skip_special_tokens=True)]
        correct = [words == [str(d) for d in answer(s.digits)] for words, s in zip(predicted, scenes(), strict=True)]
        assert sum(correct) / len(correct) >= 0.75, question  # 80 % and more on 600 scenes


def test_map_of_each_word_is_on_its_digit() -> None:
    hits = []
    for scene in scenes()[:12]:
        answer = " ".join(map(str, scene.digits))
        g = whyformer.explain_generation(
            "bundled:reader", "read from left to right :", answer, method="gae", images=scene.image
        )
        assert g.text.split() == answer.split()
        for t, mask in enumerate(scene.masks):
            row, column = divmod(int(g[t].part("pixel_values").placed().argmax()), 112)
            hits.append(bool(mask[max(0, row - 4) : row + 5, max(0, column - 4) : column + 5].any()))
    assert sum(hits) / len(hits) >= 0.85


def test_map_depends_on_the_question() -> None:
    scene = next(s for s in scenes() if len(s.digits) == 2)
    for place_, question in enumerate(("what is on the left ?", "what is on the right ?")):
        g = whyformer.explain_generation("bundled:reader", question, images=scene.image, max_new_tokens=1)
        scores = g[0].part("pixel_values").heatmap()[0].clamp(min=0)
        relevant, irrelevant = (float(scores[torch.from_numpy(scene.masks[k])].sum()) for k in (place_, 1 - place_))
        assert relevant > 3 * irrelevant
