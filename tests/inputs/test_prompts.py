"""Prompts with images: each image is a part with scores on the original image, for any processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import whyformer
from prompting import BUILT, MARK, TEXT, llava, outside, qwen2_vl, square
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.show import html


@pytest.mark.parametrize("size", [(64, 64), (48, 96), (120, 50)])
@pytest.mark.parametrize("name", BUILT)
def test_scores_are_on_the_white_square(name: str, size: tuple[int, int]) -> None:
    model, processor = BUILT[name]()
    height, width = size
    box = (width // 2, height // 8, width // 2 + width // 4, height // 8 + height // 4)
    prompt = {"text": "what is here", "images": square(size, box)}
    target = whyformer.targets.Token(-1, 7)
    e = whyformer.explain(model, prompt, "input_x_gradient", target, processor)
    part = e.part("pixel_values")
    assert part.originals is not None
    assert part.originals[0].size == (width, height)
    assert part.level == ("patch" if name in ("qwen2_vl", "inkling2") else "pixel")
    margin = {"llava": max(size) / 8, "idefics3": max(size) / 8, "qwen2_vl": 9.0, "inkling2": 17.0}[name]
    # the processor of inkling2 pads with −1/255, which is not black
    assert outside(part, box, margin) < (0.1 if name == "inkling2" and height % 16 else 0.02)
    placed = part.placed()
    assert placed.shape == size
    y, x = divmod(int(placed.abs().nan_to_num().argmax()), width)
    assert box[0] - margin <= x <= box[2] + margin
    assert box[1] - margin <= y <= box[3] + margin
    ids = e.part("input_ids")
    assert not bool(ids.scores[0][[t == "<image>" for t in ids.tokens[0]]].any())


@pytest.mark.parametrize("name", BUILT)
def test_each_image_of_a_prompt_is_a_part(name: str) -> None:
    model, processor = BUILT[name]()
    box = (10, 30, 26, 46)
    second = square((64, 64), box)
    prompt = {"text": "what is <image> on the left <image> here", "images": [Image.new("RGB", (64, 64)), second]}
    e = whyformer.explain(model, prompt, "input_x_gradient", whyformer.targets.Token(-1, 7), processor)
    assert set(e.inputs) == {"input_ids", "pixel_values[0]", "pixel_values[1]"}
    first, last = (e.part(f"pixel_values[{k}]").scores.abs().max() for k in (0, 1))
    assert first < 1e-4 * last
    assert outside(e.part("pixel_values[1]"), box, 17.0 if name == "inkling2" else 9.0) < 0.02


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", [n for n in BUILT if n != "inkling2"])
def test_image_without_a_box_does_not_affect_others(name: str, first: bool) -> None:
    """No ramp shows which part of an image of one pixel a tile or patch holds."""
    model, processor = BUILT[name]()
    box, dot = (10, 30, 26, 46), Image.new("RGB", (1, 1), (90, 200, 30))
    images = [dot, square((64, 64), box)] if first else [square((64, 64), box), dot]
    text, target = "what is <image> on the left <image> here", whyformer.targets.Token(-1, 7)
    e = whyformer.explain(model, {"text": text, "images": images}, "input_x_gradient", target, processor)
    encoded = processor(images=[images], text=[text], return_tensors="pt", padding=False)
    raw = whyformer.explain(model, {n: v for n, v in encoded.items() if isinstance(v, torch.Tensor)}, "input_x_gradient", target)
    parts = [e.part(f"pixel_values[{k}]") for k in (0, 1)]
    unplaced, placed = parts if first else parts[::-1]
    assert placed.geometry is not None and placed.geometry[0] is not None and placed.originals == [images[first]]
    assert outside(placed, box, 9.0) < 0.02
    assert unplaced.geometry is None and unplaced.originals is None and bool(unplaced.scores.any())
    assert torch.isclose(sum(part.scores.sum() for part in parts), raw.part("pixel_values").scores.sum(), rtol=1e-6)
    assert all(page in html.page(e) for page in ("<html", "<img"))
    assert Explanation.from_dict(e.to_dict()).part("pixel_values[0]").scores.shape == parts[0].scores.shape


def test_image_without_a_box_in_a_batch() -> None:
    model, processor = llava()
    images = [square((64, 64), (10, 30, 26, 46)), Image.new("RGB", (1, 1), (90, 200, 30))]
    prompts, target = {"text": ["what is here", "what is here"], "images": images}, whyformer.targets.Token(-1, 7)
    both = whyformer.explain(model, prompts, "input_x_gradient", target, processor)
    for one, image in zip(both, images, strict=True):
        alone = whyformer.explain(model, {"text": "what is here", "images": image}, "input_x_gradient", target, processor)
        torch.testing.assert_close(one.part("pixel_values").scores, alone.part("pixel_values").scores)
        assert one.part("pixel_values").originals == alone.part("pixel_values").originals


def test_each_position_has_its_own_map() -> None:
    """A position before the image does not depend on it."""
    model, processor = llava()
    prompt = {"text": "what is here <image> on the left", "images": square((64, 64), (10, 30, 26, 46))}
    early = whyformer.explain(model, prompt, "input_x_gradient", whyformer.targets.Token(2, 7), processor)
    assert not bool(early.part("pixel_values").scores.any())
    late = [whyformer.explain(model, prompt, "input_x_gradient", whyformer.targets.Token(p, 7), processor) for p in (-3, -1)]
    maps = [e.part("pixel_values").scores for e in late]
    assert all(bool(m.any()) for m in maps)
    assert not torch.allclose(*maps, atol=1e-6)


def test_merged_patches_share_a_score() -> None:
    """Rollout of Qwen2-VL: four packed patches are one token and form a square of the image."""
    model, processor = qwen2_vl()
    prompt = {"text": "what is here", "images": square((48, 96), (10, 30, 26, 46))}
    part = whyformer.explain(model, prompt, "rollout", whyformer.targets.Token(-1, 7), processor).part("pixel_values")
    maps = part._maps()[0]
    blocks = maps.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 1, 3).flatten(2)
    assert torch.equal(blocks.amax(-1), blocks.amin(-1))
    assert len(blocks[..., 0].unique()) > blocks[..., 0].numel() // 2


def test_image_placeholder_follows_the_chat_template() -> None:
    model, processor = llava()
    chat = "{% for m in messages %}here {% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    processor.chat_template = processor.tokenizer.chat_template = chat
    processor.apply_chat_template = processor.tokenizer.apply_chat_template
    e = whyformer.explain(model, {"text": "what is", "images": square((64, 64), (0, 0, 9, 9))}, "saliency", 7, processor)
    assert e.part("input_ids").tokens[0] == ["here", *["<image>"] * 16, "what", "is"]


PICTURE = Image.fromarray(np.full((64, 64, 3), 200, np.uint8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "what is <image> and <image>", "images": PICTURE}, "2 placeholders for pictures"),
        ({"text": "what is <image>", "images": [PICTURE, PICTURE]}, "1 placeholder for pictures .*2 pictures"),
        ({"text": " ", "images": PICTURE}, "not empty"),
        ({"text": "what is", "images": 3}, "PIL image or a file, not int"),
        ({"text": ["what", "is"], "images": [PICTURE]}, "2 prompts need 2 pictures"),
    ],
)
def test_prompt_that_does_not_fit_its_images_raises(given: dict[str, Any], message: str) -> None:
    model, processor = llava()
    with pytest.raises(InputError, match=message):
        whyformer.explain(model, given, "saliency", 7, processor)


def test_image_for_text_model_raises() -> None:
    text_model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).eval()
    _, processor = llava()
    with pytest.raises(InputError, match="reads no pictures"):
        whyformer.explain(text_model, {"text": "what is", "images": PICTURE}, "saliency", 7, processor)
    with pytest.raises(InputError, match="AutoProcessor"):
        whyformer.explain(text_model, {"text": "what is", "images": PICTURE}, "saliency", 7, SimpleNamespace())


def test_wrong_number_of_image_placeholders_raises() -> None:
    model, processor = llava()
    with pytest.raises(InputError, match="placeholder for a picture"):
        whyformer.explain(model, "what is <image> here", "saliency", 7, processor)
    pixels = torch.rand(1, 3, 32, 32).double()
    for count in (15, 17):
        ids = torch.tensor([[1, *[MARK] * count, 5]])
        with pytest.raises(InputError, match=f"{count} placeholders for rows"):
            whyformer.explain(model, {"input_ids": ids, "pixel_values": pixels}, "saliency", 7)
