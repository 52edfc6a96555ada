"""Pictures among words through the very processors of transformers: maps lie on the original picture, whatever was cut and padded."""

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

# numpy's, of a processor that makes an array of a tensor
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
WIDE, TALL, EVEN = (40, 100), (100, 36), (64, 64)
BOX = (10, 30, 26, 46)
# (height, width) of a picture -> shape of the map of pixels, of the grid of patches
SHAPES: dict[str, dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]] = {
    "paligemma": {WIDE: ((32, 32), (4, 4)), TALL: ((32, 32), (4, 4)), EVEN: ((32, 32), (4, 4))},
    "gemma3": {WIDE: ((32, 100), (2, 6)), TALL: ((100, 32), (6, 2)), EVEN: ((32, 32), (2, 2))},
    "internvl": {WIDE: ((32, 96), (2, 6)), TALL: ((96, 32), (6, 2)), EVEN: ((64, 64), (4, 4))},
    "llava_next": {WIDE: ((32, 96), (4, 12)), TALL: ((96, 32), (12, 4)), EVEN: ((64, 64), (8, 8))},
}


@cache
def built(name: str) -> tuple[Any, Any]:
    return BUILT[name]()


def middle(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) right of the middle, near the top."""
    high, wide = size
    return wide // 2, high // 8, wide // 2 + wide // 4, high // 8 + high // 4


@pytest.mark.parametrize("size", [WIDE, TALL])
@pytest.mark.parametrize("name", BUILT)
def test_a_word_looks_at_the_square_on_the_original_picture(name: str, size: tuple[int, int]) -> None:
    """Gradient × input is nearly 0 where the picture is black; its sum is that of the pixels that the model was fed."""
    model, processor = built(name)
    picture = square(size, middle(size))
    g = whyformer.explain_generation(model, "what is here", images=picture, method="input_x_gradient", processor=processor, max_new_tokens=2)
    fed = {n: t for n, t in processor(images=[[picture]], text=[processor.image_token + "what is here"], return_tensors="pt").items() if n != "labels"}
    assert g.ids[: g.start] == fed["input_ids"][0].tolist()
    pixels = fed["pixel_values"].double().requires_grad_()
    logits = model(**{**fed, "pixel_values": pixels}).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[g.ids[g.start]], pixels)
    by_hand = pixels.detach() * gradient
    part = g[0].part("pixel_values")
    assert tuple(part.scores.shape[1:]) == SHAPES[name][size][0]
    assert part.originals[0].size == size[::-1]
    assert abs(float(part.scores.sum() - by_hand.sum())) < 1e-6 * float(by_hand.abs().sum())
    assert outside(part, middle(size), 2 + max(size) / 32) < 0.01  # what resampling spreads
    assert part.placed().shape == size


@pytest.mark.parametrize("size", [WIDE, TALL])
@pytest.mark.parametrize("name", BUILT)
def test_the_map_moves_with_the_square(name: str, size: tuple[int, int]) -> None:
    model, processor = built(name)
    high, wide = size
    rows, columns = (torch.arange(n, dtype=torch.float64) + 0.5 for n in size)
    for box in (middle(size), (wide // 8, high // 2, wide // 8 + wide // 4, high // 2 + high // 4)):
        given = {"text": "what is here", "images": square(size, box)}
        e = whyformer.explain(model, given, "input_x_gradient", Token(-1, LogProbability(7)), processor)
        weights = e.part("pixel_values").placed().abs().nan_to_num().double()
        middle_of = float((weights.sum(1) * rows).sum() / weights.sum()), float((weights.sum(0) * columns).sum() / weights.sum())
        assert box[1] < middle_of[0] < box[3] and box[0] < middle_of[1] < box[2]
        held = torch.tensor([t == f"<{'IMG_CONTEXT' if name == 'internvl' else 'image_soft_token' if name == 'gemma3' else 'image'}>" for t in e.part("input_ids").tokens[0]])
        assert int(held.sum()) >= 4 and not bool(e.part("input_ids").scores[0][held].any())


@pytest.mark.parametrize("name", BUILT)
def test_two_pictures_are_two_parts(name: str) -> None:
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
def test_a_batch_of_prompts_equals_single_ones(name: str) -> None:
    model, processor = built(name)
    texts, target = ["what is here", "what is on the left"], Token(-1, LogProbability(7))
    pictures = [square(WIDE, middle(WIDE)), square(WIDE, BOX)]
    e = whyformer.explain(model, {"text": texts, "images": pictures}, "input_x_gradient", target, processor).part("pixel_values")
    for i, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        alone = whyformer.explain(model, {"text": text, "images": picture}, "input_x_gradient", target, processor).part("pixel_values")
        assert torch.allclose(e.scores[i], alone.scores[0], atol=1e-6 * float(alone.scores.abs().max()))
        assert e.geometry[i] == alone.geometry[0]
    lie_on_unlike_pictures(name, target)


def lie_on_unlike_pictures(name: str, target: Any) -> None:
    """Each map of a batch on its own picture, as alone, on one grid that is as fine as any of theirs."""
    model, processor = built(name)
    texts, pictures = ["what is here", "what is on the left", "what is"], [square(s, middle(s)) for s in (WIDE, TALL, EVEN)]
    e = whyformer.explain(model, {"text": texts, "images": pictures}, "input_x_gradient", target, processor).part("pixel_values")
    shapes = [SHAPES[name][s][0] for s in (WIDE, TALL, EVEN)]
    assert tuple(e.scores.shape) == (3, *(max(s[axis] for s in shapes) for axis in (0, 1)))
    for i, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        alone = whyformer.explain(model, {"text": text, "images": picture}, "input_x_gradient", target, processor).part("pixel_values")
        assert e[i].originals[0].size == picture.size and e.geometry[i] == alone.geometry[0]
        assert outside(e[i], middle(picture.size[::-1]), 2 + max(picture.size) / 32) < 0.01
        coarse = e.scores[i]
        for axis, cells in enumerate(alone.scores.shape[1:]):
            parts = coarse.shape[axis] // cells  # whole numbers, but for padding of tiles: compared below as sums
            coarse = coarse.unflatten(axis, (cells, parts)).sum(axis + 1) if cells * parts == coarse.shape[axis] else coarse
        if coarse.shape == alone.scores.shape[1:]:
            assert torch.allclose(coarse, alone.scores[0], atol=1e-6 * float(alone.scores.abs().max()))
        assert abs(float(e.scores[i].sum() - alone.scores.sum())) < 1e-6 * float(alone.scores.abs().sum())


def test_rows_of_tiles_without_what_was_padded() -> None:
    """LLaVA-NeXT's words see the whole picture (4 × 4 rows), then the tiles row by row with a new line behind each, without padded
    columns; the first picture has a tile less than the second, and one of zeros in its place."""
    model, processor = built("llava_next")
    sizes, text = (WIDE, EVEN), f"what is {processor.image_token} and {processor.image_token} here"
    given = {"text": text, "images": [square(WIDE, middle(WIDE)), square(EVEN, BOX)]}
    e = whyformer.explain(model, given, "raw_attention", Token(-1, 7), processor)
    fed = processor(images=[given["images"]], text=[text], return_tensors="pt")
    assert tuple(fed["pixel_values"].shape[:2]) == (2, 5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(**{**fed, "pixel_values": fed["pixel_values"].double()}, output_attentions=True).attentions[-1][0, :, -1].mean(0)
    model.set_attn_implementation("sdpa")
    rows = (fed["input_ids"][0] == processor.image_token_id).nonzero()[:, 0]
    start = 0
    for k, (high, wide, padded) in enumerate(((4, 10, 1), (8, 8, 0))):
        whole = seen[rows[start : start + 16]].reshape(4, 4)
        lines = seen[rows[start + 16 : start + 16 + high * (wide + 1)]].reshape(high, wide + 1)[:, :-1]
        start += 16 + high * (wide + 1)
        wanted = torch.zeros(high, wide + 2 * padded)
        wanted[:, padded : padded + wide] = lines
        part = e.part(f"pixel_values[{k}]")
        found = part._maps()[0]
        # what the whole picture's rows have is spread over the same cells
        rest = (found - wanted / float(seen.sum())).unflatten(0, (4, -1)).sum(1)
        assert part.originals[0].size == sizes[k][::-1]
        assert torch.allclose(rest.sum(1), whole.sum(1).to(rest), atol=1e-6)
        assert torch.allclose(found.sum(), (whole.sum() + lines.sum()).to(found), atol=1e-6)
        if k:
            assert torch.allclose(rest.unflatten(1, (4, -1)).sum(-1), whole.to(rest), atol=1e-6)
    assert start == len(rows)


def test_a_processor_that_cannot_be_measured_leaves_the_map_on_what_was_fed() -> None:
    """A picture that comes out otherwise every time has no place to lie on."""
    model, processor = BUILT["paligemma"]()
    plain, drawn = processor.image_processor.__class__.preprocess, torch.Generator().manual_seed(0)

    class Noisy(processor.image_processor.__class__):  # type: ignore[name-defined,misc]
        def preprocess(self, images: Any, *args: Any, **kwargs: Any) -> Any:
            made = plain(self, images, *args, **kwargs)
            made["pixel_values"] = made["pixel_values"] + torch.rand(made["pixel_values"].shape, generator=drawn)
            return made

    processor.image_processor.__class__ = Noisy
    part = whyformer.explain(model, {"text": "what is", "images": square(EVEN, BOX)}, "saliency", Token(-1, 7), processor).part("pixel_values")
    assert part.geometry is None and part.scores.shape == (1, 32, 32)
