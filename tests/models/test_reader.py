"""bundled:reader is an ordinary LLaVA folder, reads held-out digits, and its maps lie on the digit that each word says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, ViTForImageClassification

import whyformer
from whyformer.datasets.reading import APART, middles, reading_scenes
from whyformer.datasets.scenes import Scene
from whyformer.models.loading import load

ASKED = {
    "read from left to right :": lambda digits: digits, "read from right to left :": lambda digits: digits[::-1],
    "What is on the left?": lambda digits: digits[:1], "what is on the right ?": lambda digits: digits[-1:],
}  # fmt: skip


@cache
def place() -> str:
    from whyformer.models.loading import _place

    return _place("bundled:reader")


@cache
def scenes() -> list[Scene]:
    pytest.importorskip("sklearn")
    return list(reading_scenes(48, seed=31))


def test_an_ordinary_llava_with_the_tower_of_the_digits_model() -> None:
    model = AutoModelForImageTextToText.from_pretrained(place())
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    tower = ViTForImageClassification.from_pretrained(Path(place()).parent / "digits").vit.state_dict()
    own = model.model.vision_tower.state_dict()
    assert all(torch.equal(own[name], value) for name, value in tower.items())
    tokenizer = AutoTokenizer.from_pretrained(place())
    words = tokenizer.convert_ids_to_tokens(tokenizer("<image> What is left?")["input_ids"])
    assert words == ["<s>", "<image>", "what", "is", "left", "?"]
    assert type(AutoProcessor.from_pretrained(place(), backend="pil")).__name__ == "LlavaProcessor"


def test_scenes_in_reading_order() -> None:
    for i, scene in enumerate(scenes()):
        assert len(scene.digits) == len(set(scene.digits)) == 2 + i % 3
        assert (middles(scene)[1:] - middles(scene)[:-1] >= APART).all()
    again = list(reading_scenes(3, seed=31))
    assert [s.digits for s in again] == [s.digits for s in scenes()[:3]]


@torch.inference_mode()
def test_it_reads_held_out_digits() -> None:
    loaded = load("bundled:reader")
    assert loaded.modality == "both"
    model: Any = loaded.model
    for question, answer in ASKED.items():
        given = loaded.processor(
            images=[s.image for s in scenes()], text=[f"<image> {question}"] * len(scenes()), return_tensors="pt"
        )
        told = model.generate(**given, max_new_tokens=6, do_sample=False)[:, given["input_ids"].shape[1] :]
        said = [text.split() for text in loaded.processor.batch_decode(told, skip_special_tokens=True)]
        right = [own == [str(d) for d in answer(s.digits)] for own, s in zip(said, scenes(), strict=True)]
        assert sum(right) / len(right) >= 0.75, question  # 80 % and more on 600 scenes


def test_each_word_points_at_its_digit() -> None:
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


def test_the_question_decides_where_it_looks() -> None:
    scene = next(s for s in scenes() if len(s.digits) == 2)
    for place_, question in enumerate(("what is on the left ?", "what is on the right ?")):
        g = whyformer.explain_generation("bundled:reader", question, images=scene.image, max_new_tokens=1)
        scores = g[0].part("pixel_values").heatmap()[0].clamp(min=0)
        asked, other = (float(scores[torch.from_numpy(scene.masks[k])].sum()) for k in (place_, 1 - place_))
        assert asked > 3 * other
