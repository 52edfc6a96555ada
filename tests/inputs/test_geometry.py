"""Where the model's input lies on the original picture: measured, and checked against what real processors do to a marked one."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from torch import Tensor

import whyformer
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.inputs.prepare import prepare
from whyformer.show import overlay


def processor(family: str, **options: Any) -> Any:
    """A Hugging Face processor of a family, on Pillow."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.image_processing_pil_{family.lower()}")
    return getattr(module, f"{family}ImageProcessorPil")(**options)


def on_torchvision(family: str, **options: Any) -> Any:
    """The same on torchvision, whose centre crop rounds differently."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.image_processing_{family.lower()}")
    made = getattr(module, f"{family}ImageProcessor")(**options)
    assert made.backend == "torchvision"
    return made


SQUARE = {"height": 96, "width": 96}
PROCESSORS = {
    "squash": lambda: processor("ViT", size=SQUARE),
    "squash to 2:1": lambda: processor("ViT", size={"height": 64, "width": 128}),
    "short side and crop": lambda: processor("CLIP", size={"shortest_edge": 96}, crop_size=SQUARE),
    "short side and smaller crop": lambda: processor("Bit", size={"shortest_edge": 120}, crop_size={"height": 97, "width": 96}),
    "squash and crop": lambda: processor("DeiT", size={"height": 110, "width": 110}, crop_size=SQUARE, do_center_crop=True),
    "crop alone": lambda: processor("DeiT", do_resize=False, crop_size=SQUARE, do_center_crop=True),
    "crop_pct": lambda: processor("ConvNext", size={"shortest_edge": 96}, crop_pct=0.875),
    "crop_pct, squashed": lambda: processor("ConvNext", size={"shortest_edge": 384}),
    "poolformer": lambda: processor("PoolFormer", size={"shortest_edge": 96}, crop_size=SQUARE, crop_pct=0.9),
    "levit": lambda: processor("Levit", size={"shortest_edge": 96}, crop_size=SQUARE),
    "crop, then resize": lambda: processor("Perceiver", size=SQUARE, crop_size={"height": 110, "width": 110}),
    "longest edge and padding": lambda: processor("ViT", size={"shortest_edge": 96, "longest_edge": 128}, do_pad=True, pad_size={"height": 128, "width": 128}),
    "within a box and padding": lambda: processor("ViT", size={"max_height": 96, "max_width": 96}, do_pad=True, pad_size=SQUARE),
    "torchvision, short side and crop": lambda: on_torchvision("CLIP", size={"shortest_edge": 120}, crop_size={"height": 97, "width": 96}),
    "torchvision, crop with padding": lambda: on_torchvision("DeiT", do_resize=False, crop_size={"height": 131, "width": 130}, do_center_crop=True),
    "torchvision, squash": lambda: on_torchvision("ViT", size=SQUARE),
}  # fmt: skip
SIZES = [(96, 96), (120, 300), (300, 120), (400, 100), (97, 389), (31, 57), (640, 480), (700, 211)]


def marked(size: tuple[int, int], spot: tuple[float, float], radius: float) -> Image.Image:
    """A mid-grey picture with a white disc around a pixel (row, column)."""
    picture = Image.new("RGB", size[::-1], (90, 90, 90))
    ImageDraw.Draw(picture).ellipse([spot[1] - radius, spot[0] - radius, spot[1] + radius, spot[0] + radius], fill=(255, 255, 255))
    return picture


def textured(size: tuple[int, int]) -> Image.Image:
    """Smooth waves, so that the picture differs everywhere and survives resizing."""
    y, x = np.mgrid[: size[0], : size[1]] / max(size)
    waves = [np.sin(9 * x + 4 * y), np.cos(7 * y - 3 * x), np.sin(11 * x * y + 2)]
    return Image.fromarray(((np.stack(waves, -1) + 1) * 120).astype(np.uint8))


def known(name: str, picture: Image.Image) -> Geometry:
    made = prepare(torch.nn.Linear(1, 1), picture, PROCESSORS[name]())
    assert made.features.geometry is not None
    return made.features.geometry[0]


@pytest.mark.part(times=2)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", SIZES)
def test_every_pixel_of_the_input_is_found_on_the_original(name, size):
    """A smooth field of coordinates goes through the processor: what comes out is where the geometry says it was."""
    made = prepare(torch.nn.Linear(1, 1), textured(size), PROCESSORS[name]())
    assert made.features.geometry is not None and made.image_size is not None
    # red holds the row, green the column: a linear ramp stays linear under any resampling, away from the border
    down, across = np.mgrid[: size[0], : size[1]]
    ramp = np.stack([255 * (down + 0.5) / size[0], 255 * (across + 0.5) / size[1], 0 * down], -1)
    seen = prepare(torch.nn.Linear(1, 1), Image.fromarray(ramp.astype(np.uint8)), PROCESSORS[name]()).features.pictures
    assert seen is not None
    height, width = made.image_size
    left, top, right, bottom = made.features.geometry[0].box
    rows = top + (bottom - top) * (np.arange(height) + 0.5) / height
    columns = left + (right - left) * (np.arange(width) + 0.5) / width
    got = seen[0].numpy().astype(float)
    # resampling bends the ramp at the border of the picture, and at that of the input where it is cropped first
    inside_rows, inside_columns = (
        (at > max(0.06 * side, at[len(at) // 12])) & (at < min(0.94 * side, at[-len(at) // 12])) for at, side in ((rows, size[0]), (columns, size[1]))
    )
    assert inside_rows.any() and inside_columns.any()
    # bytes round by one step of 255, the ramp itself was cut to whole bytes, and the box is measured to a part of a pixel
    tenth = 25.5 / np.array(size)
    assert np.abs(got[inside_rows][:, inside_columns, 0].mean(1) - 255 * rows[inside_rows] / size[0]).max() < 1.6 + tenth[0]
    assert np.abs(got[:, inside_columns][inside_rows][..., 1].mean(0) - 255 * columns[inside_columns] / size[1]).max() < 1.6 + tenth[1]


def peaked(made: Any, patch: int = 8) -> Explanation:
    """A map with a single bright patch: the one in which the model sees the brightest place, the middle one of equals."""
    seen = (made.features.pictures[0].float().mean(-1) - 130).clamp(min=0)  # brighter than the ground, and than padding
    height, width = seen.shape
    rows, columns = height // patch, width // patch
    sums = seen[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch).mean((1, 3))
    scores = torch.zeros(rows * columns)
    row, column = (sums >= 0.99 * sums.max()).nonzero().double().mean(0).round().long().tolist()
    scores[row * columns + column] = 1.0
    return Explanation(
        scores=scores[None], level="patch", method="made", settings={}, target=torch.tensor([0]), logits=torch.zeros(1, 2),
        features=replace(made.features, grid=(rows, columns), image_size=(height, width)),
    )  # fmt: skip


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(PROCESSORS)), height=st.integers(24, 500), width=st.integers(24, 500),
    at=st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)),
)  # fmt: skip
def test_the_peak_of_the_overlay_lies_on_the_marker(name, height, width, at):
    assume(0.15 < height / width < 6)
    size, spot = (height, width), (at[0] * height, at[1] * width)
    picture = marked(size, spot, 0.05 * min(size))
    try:
        geometry = known(name, textured(size))
    except ValueError:  # the processor's own rounding leaves a picture one pixel larger than it pads to
        assume("padding" not in name)
        raise
    left, top, right, bottom = geometry.box
    margin = 0.08 * min(size)
    assume(left + margin < spot[1] < right - margin and top + margin < spot[0] < bottom - margin)
    made = prepare(torch.nn.Linear(1, 1), picture, PROCESSORS[name]())
    assert made.features.geometry == [geometry]
    e = peaked(made)
    placed = e.placed().numpy()
    assert placed.shape == size
    best = np.argwhere(placed >= np.nanmax(placed) - 1e-9).mean(0)
    # one patch of the grid, in original pixels
    reach = ((bottom - top) / e.grid[0], (right - left) / e.grid[1])
    assert abs(best[0] + 0.5 - spot[0]) <= reach[0] + 1
    assert abs(best[1] + 0.5 - spot[1]) <= reach[1] + 1
    drawn = overlay(e).astype(int)
    colourful = (drawn.max(-1) - drawn.min(-1)).astype(float)
    times = drawn.shape[0] / height
    hot = np.argwhere(colourful >= 0.98 * colourful.max()).mean(0) / times
    assert abs(hot[0] - spot[0]) <= reach[0] + 1
    assert abs(hot[1] - spot[1]) <= reach[1] + 1


@pytest.mark.parametrize("size", [(120, 300), (300, 120)])
def test_what_was_cut_off_has_no_score_and_looks_like_none(size):
    made = prepare(torch.nn.Linear(1, 1), textured(size), PROCESSORS["short side and crop"]())
    e = peaked(made)
    placed = e.placed().numpy()
    seen = ~np.isnan(placed)
    square = min(size)
    assert seen.sum() == square * square
    rows, columns = np.argwhere(seen).min(0), np.argwhere(seen).max(0)
    assert rows.tolist() == [(size[0] - square) // 2, (size[1] - square) // 2]
    assert (columns - rows + 1).tolist() == [square, square]
    blank = overlay(e, opacity=0).astype(int)
    zero = overlay(e.with_features(geometry=[Geometry.whole(size)]), opacity=0).astype(int)
    times = blank.shape[0] // size[0]
    unseen = np.kron(~seen, np.ones((times, times), bool))
    # hatched, so it differs from a score of 0 on any ground
    lines = np.abs(blank - zero).max(-1).reshape(size[0] // 12, 12 * times, size[1] // 12, 12 * times).max((1, 3))
    assert (lines[unseen[:: 12 * times, :: 12 * times]] > 12).all()
    assert not np.abs(blank - zero)[~unseen].any()


def test_torchvision_and_timm_transforms():
    from timm.data import create_transform
    from torchvision import transforms

    for size in SIZES:
        for function in (
            transforms.Compose([transforms.Resize(110), transforms.CenterCrop(97), transforms.ToTensor()]),
            transforms.Compose([transforms.Resize((110, 90)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]),
            create_transform((3, 96, 96), crop_pct=0.9), create_transform((3, 96, 96), crop_pct=0.9, crop_mode="squash"),
            create_transform((3, 96, 96), crop_pct=0.9, crop_mode="border"),
        ):  # fmt: skip
            made = prepare(torch.nn.Linear(1, 1), textured(size), function)
            assert made.features.geometry is not None, (size, function)
            left, top, right, bottom = made.features.geometry[0].box
            inside = (max(0, left), max(0, top), min(size[1], right), min(size[0], bottom))
            height, width = made.image_size
            across, down = width / (right - left), height / (bottom - top)
            place = [round((inside[1] - top) * down), round((inside[3] - top) * down), round((inside[0] - left) * across), round((inside[2] - left) * across)]
            wanted = textured(size).resize((place[3] - place[2], place[1] - place[0]), Image.Resampling.BILINEAR, box=inside)
            got = made.features.pictures[0].numpy()[place[0] : place[1], place[2] : place[3]].astype(float)
            # brightness is known only up to a factor where a function normalises
            pair = np.asarray(wanted, float)[..., 0].ravel(), got[..., 0].ravel()
            assert np.corrcoef(*pair)[0, 1] > 0.995, (size, function)


def test_weights_of_torchvision_bring_their_own():
    from torchvision.transforms._presets import ImageClassification

    made = prepare(torch.nn.Linear(1, 1), textured((300, 400)), ImageClassification(crop_size=96, resize_size=120))
    assert made.features.geometry == [Geometry((300, 400), (80.0, 30.0, 320.0, 270.0))]


def squashed(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.resize((96, 64)))).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("change", [
    lambda pixels: pixels, lambda pixels: -3 * pixels + 1, lambda pixels: pixels[[2, 0, 1]], lambda pixels: pixels.mean(0, keepdim=True),
    lambda pixels: pixels * torch.tensor([1.0, 0, -5])[:, None, None],
])  # fmt: skip
def test_a_function_of_ones_own_is_measured_too(change):
    """Whatever it does to colours."""
    made = prepare(torch.nn.Linear(1, 1), textured((100, 200)), lambda picture: change(squashed(picture)))
    assert made.features.geometry == [Geometry.whole((100, 200))]
    cropped = prepare(torch.nn.Linear(1, 1), textured((100, 200)), lambda picture: change(squashed(picture)[:, 10:50, 20:]))
    box = cropped.features.geometry[0].box
    assert box == pytest.approx((200 * 20 / 96, 100 * 10 / 64, 200, 100 * 50 / 64), abs=1e-9)


@pytest.mark.parametrize("function", [
    lambda picture: torch.rand(3, 64, 96), lambda picture: squashed(picture).flip(-1), lambda picture: squashed(picture).flip(-2),
    lambda picture: squashed(picture).mT, lambda picture: squashed(picture)[..., torch.linspace(0, 1, 96).square().mul(95).long()],
    lambda picture: torch.ones(3, 64, 96), lambda picture: squashed(picture.rotate(20)), lambda picture: squashed(picture)[:, torch.randperm(64)],
    lambda picture: squashed(picture) if np.ptp(np.asarray(picture)) > 200 else 1 / 0,
    lambda picture: torch.rand(3, *np.random.default_rng(int(np.asarray(picture).sum())).integers(8, 99, 2)),
])  # fmt: skip
def test_what_is_no_box_has_no_geometry(function):
    """Random, mirrored, turned, warped or shuffled pictures, constants, and functions that fail on a picture of one colour."""
    made = prepare(torch.nn.Linear(1, 1), textured((100, 200)), function)
    assert made.features.geometry is None
    assert made.features.originals is None
    assert made.features.pictures is not None


def test_a_processor_that_does_something_else_than_it_says_gives_no_geometry():
    whole = PROCESSORS["squash"]()

    class Mirrored:
        size, do_resize = SQUARE, True
        image_mean = image_std = [0.5] * 3

        def preprocess(self, images: Any) -> None: ...

        def __call__(self, images: Any, return_tensors: str) -> dict[str, Tensor]:
            return {"pixel_values": whole(images=images, return_tensors="pt")["pixel_values"].flip(-1)}

    assert prepare(torch.nn.Linear(1, 1), textured((100, 200)), Mirrored()).features.geometry is None


BOXES = json.loads((Path(__file__).parent / "boxes.json").read_text())


@pytest.mark.parametrize("name", PROCESSORS)
def test_boxes_are_those_that_follow_from_what_the_processor_says_of_itself(name):
    """boxes.json was written out of each processor's settings and rounding. What is measured equals it to rounding, but for a few to a pixel."""
    off = []
    for size, wanted in BOXES[name].items():
        height, width = map(int, size.split("x"))
        box = known(name, textured((height, width))).box
        off.append(max(abs(a - b) for a, b in zip(box, wanted, strict=True)))
    assert max(off) < 1
    assert sum(error < 1e-5 for error in off) >= (3 if name == "crop, then resize" else 7)


def test_each_size_of_a_batch_is_measured_once():
    fed: list[int] = []

    def processor(picture: Image.Image) -> Tensor:
        fed.append(1)
        return squashed(picture)

    made = prepare(torch.nn.Linear(1, 1), [textured((100, 200))] * 5 + [textured((90, 30))], processor)
    assert [g.size for g in made.features.geometry] == [(100, 200)] * 5 + [(90, 30)]
    assert len(fed) == 6 + 4 * 2


def test_pictures_of_one_colour_have_a_geometry_too():
    for colour in ("white", "black", (40, 80, 10)):
        made = prepare(torch.nn.Linear(1, 1), Image.new("RGB", (60, 90), colour), PROCESSORS["short side and crop"]())
        assert made.features.geometry == [Geometry((90, 60), (0.0, 15.0, 60.0, 75.0))]


def test_tensors_have_no_geometry_and_are_drawn_as_they_are():
    pixels = torch.rand(1, 3, 48, 80)
    made = prepare(torch.nn.Linear(1, 1), pixels)
    assert (made.features.geometry, made.features.originals) == (None, None)


def test_each_picture_of_a_batch_has_its_own():
    pictures = [textured((100, 200)), textured((300, 150))]
    e = whyformer.explain("bundled:digits", pictures, "raw_attention")
    assert [g.size for g in e.geometry] == [(100, 200), (300, 150)]
    assert e.placed(0).shape == (100, 200)
    assert e[1].placed().shape == (300, 150)
    assert not torch.isnan(e[1].placed()).any()
    assert e.originals[0] is pictures[0]


def halves(picture: Image.Image) -> Tensor:
    """Crop to the upper half, and mirror tall pictures."""
    seen = squashed(picture.crop((0, 0, picture.width, picture.height // 2)))
    return seen.flip(-1) if picture.height > picture.width else seen


BATCHES = {
    "a picture of three columns": ("squash", [(300, 3), (100, 200)]),
    "a picture of one row": ("short side and crop", [(120, 300), (1, 60), (300, 120)]),
    "one that is mirrored": (halves, [(100, 200), (200, 100), (97, 389)]),
    "one that is much cropped": ("crop, then resize", [(1500, 117), (911, 119), (120, 120)]),
    "none that can be measured": ("squash", [(300, 3), (2, 50)]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_each_picture_of_a_batch_lies_as_alone(case: str, tmp_path: Path) -> None:
    """A picture whose position is unknown leaves those of the others as they are, also in files."""
    name, sizes = BATCHES[case]
    processor = PROCESSORS[name]() if isinstance(name, str) else name
    pictures = [textured(size) for size in sizes]
    made = prepare(torch.nn.Linear(1, 1), pictures, processor)
    alone = [prepare(torch.nn.Linear(1, 1), picture, processor) for picture in pictures]
    e = peaked(made)
    e = replace(e, scores=e.scores.expand(len(sizes), -1), target=e.target.expand(len(sizes)), logits=e.logits.expand(len(sizes), -1))
    for found in (e, Explanation.load(e.save(tmp_path / "e.safetensors"))):
        for i, single in enumerate(alone):
            assert found[i].geometry == single.features.geometry
            assert [p and p.size for p in found[i].originals or ()] == [p.size for p in single.features.originals or ()]
            own = replace(e[i], features=replace(single.features, grid=e.grid, image_size=e.image_size))
            assert np.array_equal(found.placed(i), own.placed(), equal_nan=True)
            assert np.array_equal(overlay(found[i]), overlay(own))
    facts = json.loads(json.dumps(e.to_dict()))
    assert Explanation.from_dict(facts).geometry == e.geometry
    assert (e.geometry is None) == (case == "none that can be measured")


def test_trust_needs_every_picture_of_a_batch():
    e = whyformer.explain("bundled:digits", [textured((100, 200)), textured((200, 3))], "raw_attention")
    with pytest.raises(whyformer.WhyformerError, match="pass inputs="):
        whyformer.trust(e, "bundled:digits", steps=2, seeds=[0])
    assert len(whyformer.trust(e, "bundled:digits", [textured((100, 200)), textured((200, 3))], steps=2, seeds=[0])) == 2


@pytest.mark.parametrize("others", [{}, {"cells": (0.0, 0.0, 56.0, 48.0)}])
def test_joined_pictures_lie_as_alone(others: dict[str, Any]):
    """Pictures that are explained one by one, with the same box of the map in the input, or with different ones."""
    pictures = [textured((100, 200)), textured((200, 3))]
    alone = [whyformer.explain("bundled:digits", picture, "raw_attention") for picture in pictures]
    alone[1] = alone[1].with_features(**others)
    both = joined(alone)
    for i, single in enumerate(alone):
        assert both.boxes(i)[0] == single.boxes()[0] and both.placed(i).shape == single.placed().shape
        assert overlay(both[i]).shape == overlay(single).shape
    assert (both[1].geometry is None) == (not others)


def test_a_picture_of_a_data_set_lies_as_alone(tmp_path: Path):
    pictures = [textured((100, 200)), textured((200, 3)), textured((90, 30))]
    for out in (None, tmp_path / "out"):
        found = list(whyformer.explain_many("bundled:digits", pictures, "raw_attention", out=out))
        assert [tuple(e.placed().shape) for e in found] == [(100, 200), (112, 112), (90, 30)]


def test_kept_in_files_and_in_json(tmp_path):
    made = prepare(torch.nn.Linear(1, 1), textured((120, 77)), PROCESSORS["short side and crop"]())
    e = peaked(made)
    again = Explanation.load(e.save(tmp_path / "e.safetensors"))
    assert again.geometry == e.geometry
    assert np.array_equal(np.asarray(again.originals[0]), np.asarray(e.originals[0]))
    assert np.array_equal(overlay(again), overlay(e))
    facts = json.loads(json.dumps(e.to_dict()))
    assert [Geometry.from_dict(g) for g in facts["geometry"]] == e.geometry


def test_an_impossible_geometry_is_refused():
    with pytest.raises(whyformer.WhyformerError, match="invalid geometry"):
        Geometry((10, 10), (5.0, 0.0, 5.0, 10.0))
