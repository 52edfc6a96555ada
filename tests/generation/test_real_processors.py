"""Image prompts through the original processors of transformers: maps are on the original image despite crops and padding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image

import whyformer
from processors import BUILT
from prompting import outside, square
from whyformer.targets import LogProbability, Token

# emitted by numpy when a processor converts a tensor to an array
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
WIDE, TALL, EVEN = (40, 100), (100, 36), (64, 64)
BOX = (10, 30, 26, 46)
# (height, width) of an image -> shapes of its pixel map and of its patch grid
SHAPES: dict[str, dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]] = {
    "paligemma": {WIDE: ((32, 32), (4, 4)), TALL: ((32, 32), (4, 4)), EVEN: ((32, 32), (4, 4))},
    "gemma3": {WIDE: ((32, 100), (2, 6)), TALL: ((100, 32), (6, 2)), EVEN: ((32, 32), (2, 2))},
    "internvl": {WIDE: ((32, 96), (2, 6)), TALL: ((96, 32), (6, 2)), EVEN: ((64, 64), (4, 4))},
    "llava_next": {WIDE: ((32, 96), (4, 12)), TALL: ((96, 32), (12, 4)), EVEN: ((64, 64), (8, 8))},
}


@cache
def built(name: str) -> tuple[Any, Any]:
    return BUILT[name]()


def box_of(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) right of the centre, near the top."""
    height, width = size
    return width // 2, height // 8, width // 2 + width // 4, height // 8 + height // 4


@pytest.mark.parametrize("size", [WIDE, TALL])
@pytest.mark.parametrize("name", BUILT)
def test_scores_are_on_the_square_of_the_original_image(name: str, size: tuple[int, int]) -> None:
    """Gradient × input is nearly 0 where the image is black; its sum equals that over the pixels of the model input."""
    model, processor = built(name)
    picture = square(size, box_of(size))
    g = whyformer.explain_generation(model, "what is here", images=picture, method="input_x_gradient", processor=processor, max_new_tokens=2)
    inputs = {n: t for n, t in processor(images=[[picture]], text=[processor.image_token + "what is here"], return_tensors="pt").items() if n != "labels"}
    assert g.ids[: g.start] == inputs["input_ids"][0].tolist()
    pixels = inputs["pixel_values"].double().requires_grad_()
    logits = model(**{**inputs, "pixel_values": pixels}).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[g.ids[g.start]], pixels)
    by_hand = pixels.detach() * gradient
    part = g[0].part("pixel_values")
    assert tuple(part.scores.shape[1:]) == SHAPES[name][size][0]
    assert part.originals[0].size == size[::-1]
    assert abs(float(part.scores.sum() - by_hand.sum())) < 1e-6 * float(by_hand.abs().sum())
    assert outside(part, box_of(size), 2 + max(size) / 32) < 0.01  # the margin of resampling
    assert part.placed().shape == size


@pytest.mark.parametrize("size", [WIDE, TALL])
@pytest.mark.parametrize("name", BUILT)
def test_centroid_of_the_map_is_in_the_square(name: str, size: tuple[int, int]) -> None:
    model, processor = built(name)
    height, width = size
    rows, columns = (torch.arange(n, dtype=torch.float64) + 0.5 for n in size)
    for box in (box_of(size), (width // 8, height // 2, width // 8 + width // 4, height // 2 + height // 4)):
        prompt = {"text": "what is here", "images": square(size, box)}
        e = whyformer.explain(model, prompt, "input_x_gradient", Token(-1, LogProbability(7)), processor)
        weights = e.part("pixel_values").placed().abs().nan_to_num().double()
        centroid = float((weights.sum(1) * rows).sum() / weights.sum()), float((weights.sum(0) * columns).sum() / weights.sum())
        assert box[1] < centroid[0] < box[3] and box[0] < centroid[1] < box[2]
        placeholders = torch.tensor([t == f"<{'IMG_CONTEXT' if name == 'internvl' else 'image_soft_token' if name == 'gemma3' else 'image'}>" for t in e.part("input_ids").tokens[0]])
        assert int(placeholders.sum()) >= 4 and not bool(e.part("input_ids").scores[0][placeholders].any())


@pytest.mark.parametrize("name", BUILT)
def test_two_images_are_two_parts(name: str) -> None:
    model, processor = built(name)
    pictures = [Image.new("RGB", WIDE[::-1]), square(EVEN, BOX)]
    text = f"what is {processor.image_token} and {processor.image_token} here"
    options: dict[str, Any] = {"images": pictures, "processor": processor, "max_new_tokens": 1}
    e = whyformer.explain_generation(model, text, method="input_x_gradient", **options)[0]
    assert e.inputs == ("input_ids", "pixel_values[0]", "pixel_values[1]")
    first, second = (e.part(f"pixel_values[{k}]") for k in (0, 1))
    assert [tuple(p.scores.shape[1:]) for p in (first, second)] == [SHAPES[name][s][0] for s in (WIDE, EVEN)]
    assert float(first.scores.abs().max()) < 1e-3 * float(second.scores.abs().max())
    assert outside(second, BOX, 4.0) < 0.01
    both = whyformer.explain_generation(model, text, method="rollout", **options)[0]
    for k, size in enumerate((WIDE, EVEN)):
        part = both.part(f"pixel_values[{k}]")
        assert (part.level, part.grid) == ("patch", SHAPES[name][size][1])
        assert part.originals[0].size == size[::-1] and float(part.scores.min()) >= 0 and float(part.scores.sum()) > 0


@pytest.mark.parametrize("name", BUILT)
def test_batch_of_prompts_equals_single_prompts(name: str) -> None:
    model, processor = built(name)
    texts, target = ["what is here", "what is on the left"], Token(-1, LogProbability(7))
    pictures = [square(WIDE, box_of(WIDE)), square(WIDE, BOX)]
    e = whyformer.explain(model, {"text": texts, "images": pictures}, "input_x_gradient", target, processor).part("pixel_values")
    for i, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        alone = whyformer.explain(model, {"text": text, "images": picture}, "input_x_gradient", target, processor).part("pixel_values")
        assert torch.allclose(e.scores[i], alone.scores[0], atol=1e-6 * float(alone.scores.abs().max()))
        assert e.geometry[i] == alone.geometry[0]
    check_images_of_unequal_shapes(name, target)


def check_images_of_unequal_shapes(name: str, target: Any) -> None:
    """Each map of a batch is on its own image, on a common grid that is as fine as the finest one."""
    model, processor = built(name)
    texts, pictures = ["what is here", "what is on the left", "what is"], [square(s, box_of(s)) for s in (WIDE, TALL, EVEN)]
    e = whyformer.explain(model, {"text": texts, "images": pictures}, "input_x_gradient", target, processor).part("pixel_values")
    shapes = [SHAPES[name][s][0] for s in (WIDE, TALL, EVEN)]
    assert tuple(e.scores.shape) == (3, *(max(s[axis] for s in shapes) for axis in (0, 1)))
    for i, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        alone = whyformer.explain(model, {"text": text, "images": picture}, "input_x_gradient", target, processor).part("pixel_values")
        assert e[i].originals[0].size == picture.size and e.geometry[i] == alone.geometry[0]
        assert outside(e[i], box_of(picture.size[::-1]), 2 + max(picture.size) / 32) < 0.01
        coarse = e.scores[i]
        for axis, cells in enumerate(alone.scores.shape[1:]):
            parts = coarse.shape[axis] // cells  # a whole number except with padded tiles, whose sums are compared below
            coarse = coarse.unflatten(axis, (cells, parts)).sum(axis + 1) if cells * parts == coarse.shape[axis] else coarse
        if coarse.shape == alone.scores.shape[1:]:
            assert torch.allclose(coarse, alone.scores[0], atol=1e-6 * float(alone.scores.abs().max()))
        assert abs(float(e.scores[i].sum() - alone.scores.sum())) < 1e-6 * float(alone.scores.abs().sum())


def test_attention_map_of_tiles_leaves_out_padding() -> None:
    """The tokens of LLaVA-NeXT are the whole image (4 × 4), then the tiles row by row with a newline token after each row, without
    padded columns; the first image has one tile fewer than the second, replaced by zeros."""
    model, processor = built("llava_next")
    sizes, text = (WIDE, EVEN), f"what is {processor.image_token} and {processor.image_token} here"
    prompt = {"text": text, "images": [square(WIDE, box_of(WIDE)), square(EVEN, BOX)]}
    e = whyformer.explain(model, prompt, "raw_attention", Token(-1, 7), processor)
    inputs = processor(images=[prompt["images"]], text=[text], return_tensors="pt")
    assert tuple(inputs["pixel_values"].shape[:2]) == (2, 5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(**{**inputs, "pixel_values": inputs["pixel_values"].double()}, output_attentions=True).attentions[-1][0, :, -1].mean(0)
    model.set_attn_implementation("sdpa")
    rows = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0]
    start = 0
    for k, (height, width, padded) in enumerate(((4, 10, 1), (8, 8, 0))):
        whole = attention[rows[start : start + 16]].reshape(4, 4)
        lines = attention[rows[start + 16 : start + 16 + height * (width + 1)]].reshape(height, width + 1)[:, :-1]
        start += 16 + height * (width + 1)
        expected = torch.zeros(height, width + 2 * padded)
        expected[:, padded : padded + width] = lines
        part = e.part(f"pixel_values[{k}]")
        actual = part._maps()[0]
        # the attention to the whole image is spread over the same cells
        rest = (actual - expected / float(attention.sum())).unflatten(0, (4, -1)).sum(1)
        assert part.originals[0].size == sizes[k][::-1]
        assert torch.allclose(rest.sum(1), whole.sum(1).to(rest), atol=1e-6)
        assert torch.allclose(actual.sum(), (whole.sum() + lines.sum()).to(actual), atol=1e-6)
        if k:
            assert torch.allclose(rest.unflatten(1, (4, -1)).sum(-1), whole.to(rest), atol=1e-6)
    assert start == len(rows)


def test_random_processor_has_a_map_without_geometry() -> None:
    """A random output has no geometry on the original image."""
    model, processor = BUILT["paligemma"]()
    plain, drawn = processor.image_processor.__class__.preprocess, torch.Generator().manual_seed(0)

    class Noisy(processor.image_processor.__class__):  # type: ignore[name-defined,misc]
        def preprocess(self, images: Any, *args: Any, **kwargs: Any) -> Any:
            batch = plain(self, images, *args, **kwargs)
            batch["pixel_values"] = batch["pixel_values"] + torch.rand(batch["pixel_values"].shape, generator=drawn)
            return batch

    processor.image_processor.__class__ = Noisy
    part = whyformer.explain(model, {"text": "what is", "images": square(EVEN, BOX)}, "saliency", Token(-1, 7), processor).part("pixel_values")
    assert part.geometry is None and part.scores.shape == (1, 32, 32)
