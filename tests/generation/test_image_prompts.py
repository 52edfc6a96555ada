"""explain_generation() with images: the image map of each generated token equals its single explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import whyformer
from prompting import BUILT, llava, square
from whyformer.errors import InputError
from whyformer.targets import LogProbability, Token

BOX = (10, 30, 26, 46)
METHODS = ["attnlrp", "input_x_gradient", "saliency", "rollout", "raw_attention", "gae", "transformer_attribution", "lrp_ah_ln"]


def tensors(processor: Any, text: str, picture: Image.Image) -> dict[str, torch.Tensor]:
    return dict(processor(images=[[picture]], text=[f"<image>{text}"], return_tensors="pt", padding=False))


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [n for n in BUILT if n != "inkling2"])  # its experts support float32 only
def test_step_with_image_equals_explain(name: str, method: str) -> None:
    model, processor = BUILT[name]()
    picture = square((64, 64), BOX)
    g = whyformer.explain_generation(model, "what is", images=picture, method=method, processor=processor, max_new_tokens=3)
    inputs = tensors(processor, "what is", picture)
    assert g.ids[: g.start] == inputs["input_ids"][0].tolist()
    for t in range(len(g)):
        signed = method in ("attnlrp", "input_x_gradient", "lrp_ah_ln")
        assert {e.diagnostics["signed"] for e in (g[t], g[t].part("pixel_values"), g.by("word")[0])} == {signed}
        token = g.ids[g.start + t]
        before = torch.tensor([g.ids[: g.start + t]])
        kinds = {"mm_token_type_ids": (before == 100).long()} if "mm_token_type_ids" in inputs else {}
        step_inputs = {**inputs, "input_ids": before, "attention_mask": torch.ones_like(before), **kinds}
        alone = whyformer.explain(model, step_inputs, method, Token(-1, LogProbability(token)))
        e = g[t]
        assert torch.allclose(e.scores, alone.part("input_ids").scores, rtol=1e-6, atol=1e-9)
        raw, placed = alone.part("pixel_values").scores, e.part("pixel_values").scores
        assert abs(float(raw.sum() - placed.sum())) < 1e-8 + 1e-6 * float(raw.abs().sum())  # merged or reordered
        if name == "llava":
            assert torch.allclose(raw, placed, rtol=1e-6, atol=1e-9)


def test_generated_ids_equal_model_generate() -> None:
    model, processor = llava()
    picture = square((64, 64), BOX)
    g = whyformer.explain_generation(model, "what is", images=picture, processor=processor, max_new_tokens=4)
    generated = model.generate(**tensors(processor, "what is", picture), max_new_tokens=4, do_sample=False)
    assert g.ids == generated[0].tolist()
    assert g[0].inputs == ("input_ids", "pixel_values")
    assert g[0].part("pixel_values").placed().shape == (64, 64)


def test_batch_merging_and_saving_with_images(tmp_path: Path) -> None:
    model, processor = llava()
    pictures = [square((64, 64), BOX), square((48, 96), (60, 4, 80, 20))]
    options: dict[str, Any] = {"continuation": "on the left", "method": "rollout", "processor": processor}
    answers = {**options, "continuation": ["on the left"] * 2}
    both = whyformer.explain_generation(model, ["what is", "what is here"], images=pictures, **answers)
    for g, picture, text in zip(both, pictures, ["what is", "what is here"], strict=True):
        alone = whyformer.explain_generation(model, text, images=picture, **options)
        assert torch.equal(g.matrix, alone.matrix)
        assert torch.equal(g[1].part("pixel_values").scores, alone[1].part("pixel_values").scores)
    g = both[0]
    merged = g.by("sentence")
    total = sum(g[t].part("pixel_values").scores for t in range(len(g)))
    assert torch.allclose(sum(merged[t].part("pixel_values").scores for t in range(len(merged))), total)
    loaded = type(g).load(g.save(tmp_path / "g.safetensors"))
    actual, expected = loaded[2].part("pixel_values"), g[2].part("pixel_values")
    assert torch.equal(actual.scores, expected.scores)
    assert (actual.grid, actual.geometry, actual.originals[0].size) == (expected.grid, expected.geometry, expected.originals[0].size)


def test_given_continuation_and_span_with_image() -> None:
    model, processor = llava()
    options: dict[str, Any] = {"images": square((64, 64), BOX), "method": "input_x_gradient", "processor": processor}
    g = whyformer.explain_generation(model, "what is", "here on", **options)
    assert [p.strip() for p in g.pieces[g.generated]] == ["here", "on"]
    span = whyformer.explain_span(g, 0, 1, model, processor, prompt="what is", images=options["images"])
    span_scores, step_scores = span.part("pixel_values").scores, g.picture_maps["pixel_values"].scores
    assert torch.allclose(span_scores[0], step_scores.sum(0), atol=1e-6)
    with pytest.raises(InputError, match="prompt= and images= again"):
        whyformer.explain_span(g, 0, 1, model, processor)
    with pytest.raises(InputError, match="another prompt"):
        whyformer.explain_span(g, 0, 1, model, processor, prompt="what is the", images=options["images"])


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("what is", [], "no place|is empty|0 are given|list of pictures"),
        (["what", "is"], [square((64, 64), BOX)], "2 prompts need as many pictures"),
        ([{"role": "user", "content": "what"}], square((64, 64), BOX), "no chat template"),
        ("what is <image> <image>", square((64, 64), BOX), "2 placeholders for pictures"),
    ],
)
def test_image_prompt_that_does_not_fit_raises(prompt: Any, images: Any, message: str) -> None:
    model, processor = llava()
    with pytest.raises(InputError, match=message):
        whyformer.explain_generation(model, prompt, images=images, processor=processor)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_auto_of_step_is_auto_of_prompt(name: str) -> None:
    """Whether one or several images are in the prompt, alone or in a batch."""
    model, processor = BUILT[name]()
    one, two = square((64, 64), BOX), [square((64, 64), BOX), square((64, 32), (4, 30, 20, 46))]
    g = whyformer.explain_generation(model, "what is", images=one, processor=processor, max_new_tokens=1)
    e = whyformer.explain(model, {"text": "what is", "images": one}, "auto", LogProbability(g.ids[g.start]), processor)
    several = whyformer.explain(model, {"text": "what <image> is <image>", "images": two}, "auto", 7, processor)
    batch = whyformer.explain(model, {"text": ["what is", "what <image> is <image>"], "images": [[one], two]}, "auto", 7, processor)
    assert {x.diagnostics["auto"]["name"] for x in (g[0], e, several)} == {"attnlrp"}
    assert torch.allclose(g[0].scores, e.part("input_ids").scores, rtol=1e-6, atol=1e-9)
    assert torch.allclose(batch[1].part("pixel_values[1]").scores, several.part("pixel_values[1]").scores, atol=1e-9)


TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image> {% else %}{{ p['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}left{% endif %}"
)
IMAGES = [square((64, 64), (0, 0, 20, 20)), square((64, 64), (30, 30, 60, 60))]


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in zip(("user", "assistant", "user"), contents, strict=True)]


def piece(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} if isinstance(value, str) else {"type": "image"} | ({} if value is None else {"image": value})


def with_template() -> tuple[Any, Any]:
    model, processor = llava()
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    processor.apply_chat_template = processor.tokenizer.apply_chat_template
    return model, processor


@pytest.mark.parametrize("form", ["in messages", "beside messages", "without parts", "one of each"])
def test_conversation_with_pictures_equals_its_text(form: str) -> None:
    model, processor = with_template()
    first, second = IMAGES
    parts = {"in messages": (first, second), "beside messages": (None, None), "one of each": (None, second)}.get(form)
    images = {"in messages": None, "one of each": first}.get(form, IMAGES)
    if parts is None:
        messages, text = chat("what is", "the left", "what is here"), "<image> <image> what is the left what is here left"
    else:
        messages = chat([piece(parts[0]), piece("what is")], "the left", [piece("what"), piece(parts[1]), piece("is here")])
        text = "<image> what is the left what <image> is here left"
    expected = whyformer.explain_generation(model, text, processor=processor, images=IMAGES, max_new_tokens=2, method="input_x_gradient")
    g = whyformer.explain_generation(model, messages, processor=processor, images=images, max_new_tokens=2, method="input_x_gradient")
    assert g.ids == expected.ids and torch.equal(g.matrix, expected.matrix) and g.matrix.any()
    span = whyformer.explain_span(g, 0, len(g) - 1, model, processor, prompt=messages, images=images)
    assert torch.allclose(span.part("input_ids").scores[0, : g.start], g.matrix[:, : g.start].sum(0), atol=1e-6)


@pytest.mark.parametrize(
    ("messages", "images", "message"),
    [
        (chat([piece(None), piece("what")], "is", "here"), None, "1 image part without a picture, and images= has 0"),
        (chat([piece(IMAGES[0]), piece("what")], "is", "here"), IMAGES[:1], "0 image parts without a picture, and images= has 1"),
        (chat([{"type": "video"}, piece(IMAGES[0])], "is", "here"), None, "list of parts"),
        (chat([piece(IMAGES[0]), {"type": "text", "text": 3}], "is", "here"), None, "list of parts"),
        (chat([piece("what"), piece("is")], "is", "here"), None, "join the texts"),
    ],
)
def test_conversation_whose_pictures_do_not_fit_raises(messages: Any, images: Any, message: str) -> None:
    model, processor = with_template()
    with pytest.raises(InputError, match=message):
        whyformer.explain_generation(model, messages, processor=processor, images=images, max_new_tokens=1)
