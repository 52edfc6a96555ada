"""Geometry: the box of the original image that the model sees, measured and checked with real processors on marked images."""

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
    """A Pillow image processor of a transformers family."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.image_processing_pil_{family.lower()}")
    return getattr(module, f"{family}ImageProcessorPil")(**options)


def on_torchvision(family: str, **options: Any) -> Any:
    """A torchvision image processor, whose centre crop rounds differently."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.image_processing_{family.lower()}")
    inputs = getattr(module, f"{family}ImageProcessor")(**options)
    assert inputs.backend == "torchvision"
    return inputs


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
    """A mid-grey image with a white disc around a pixel (row, column)."""
    picture = Image.new("RGB", size[::-1], (90, 90, 90))
    ImageDraw.Draw(picture).ellipse([spot[1] - radius, spot[0] - radius, spot[1] + radius, spot[0] + radius], fill=(255, 255, 255))
    return picture


def textured(size: tuple[int, int]) -> Image.Image:
    """Smooth waves, which differ everywhere and survive resizing."""
    y, x = np.mgrid[: size[0], : size[1]] / max(size)
    waves = [np.sin(9 * x + 4 * y), np.cos(7 * y - 3 * x), np.sin(11 * x * y + 2)]
    return Image.fromarray(((np.stack(waves, -1) + 1) * 120).astype(np.uint8))


def measured_geometry(name: str, picture: Image.Image) -> Geometry:
    inputs = prepare(torch.nn.Linear(1, 1), picture, PROCESSORS[name]())
    assert inputs.features.geometry is not None
    return inputs.features.geometry[0]


@pytest.mark.part(times=2)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", SIZES)
def test_geometry_maps_input_pixels_to_the_original(name, size):
    """The colours of an image encode its coordinates; after the processor they agree with the geometry."""
    inputs = prepare(torch.nn.Linear(1, 1), textured(size), PROCESSORS[name]())
    assert inputs.features.geometry is not None and inputs.image_size is not None
    # red is the row, green the column: a linear ramp stays linear under any resampling, away from the border
    down, across = np.mgrid[: size[0], : size[1]]
    ramp = np.stack([255 * (down + 0.5) / size[0], 255 * (across + 0.5) / size[1], 0 * down], -1)
    pictures = prepare(torch.nn.Linear(1, 1), Image.fromarray(ramp.astype(np.uint8)), PROCESSORS[name]()).features.pictures
    assert pictures is not None
    height, width = inputs.image_size
    left, top, right, bottom = inputs.features.geometry[0].box
    rows = top + (bottom - top) * (np.arange(height) + 0.5) / height
    columns = left + (right - left) * (np.arange(width) + 0.5) / width
    actual = pictures[0].numpy().astype(float)
    # resampling bends the ramp at the border of the image, and at that of the input if it is cropped first
    inside_rows, inside_columns = (
        (at > max(0.06 * side, at[len(at) // 12])) & (at < min(0.94 * side, at[-len(at) // 12])) for at, side in ((rows, size[0]), (columns, size[1]))
    )
    assert inside_rows.any() and inside_columns.any()
    # rounding to bytes twice, and the box is measured to a fraction of a pixel
    tenth = 25.5 / np.array(size)
    assert np.abs(actual[inside_rows][:, inside_columns, 0].mean(1) - 255 * rows[inside_rows] / size[0]).max() < 1.6 + tenth[0]
    assert np.abs(actual[:, inside_columns][inside_rows][..., 1].mean(0) - 255 * columns[inside_columns] / size[1]).max() < 1.6 + tenth[1]


def peaked(inputs: Any, patch: int = 8) -> Explanation:
    """An explanation whose only score is at the brightest patch of the model input (the middle one of ties)."""
    brightness = (inputs.features.pictures[0].float().mean(-1) - 130).clamp(min=0)  # brighter than the background and the padding
    height, width = brightness.shape
    rows, columns = height // patch, width // patch
    sums = brightness[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch).mean((1, 3))
    scores = torch.zeros(rows * columns)
    row, column = (sums >= 0.99 * sums.max()).nonzero().double().mean(0).round().long().tolist()
    scores[row * columns + column] = 1.0
    return Explanation(
        scores=scores[None], level="patch", method="made", settings={}, target=torch.tensor([0]), logits=torch.zeros(1, 2),
        features=replace(inputs.features, grid=(rows, columns), image_size=(height, width)),
    )  # fmt: skip


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(PROCESSORS)), height=st.integers(24, 500), width=st.integers(24, 500),
    at=st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)),
)  # fmt: skip
def test_peak_of_the_overlay_is_at_the_marker(name, height, width, at):
    assume(0.15 < height / width < 6)
    size, spot = (height, width), (at[0] * height, at[1] * width)
    picture = marked(size, spot, 0.05 * min(size))
    try:
        geometry = measured_geometry(name, textured(size))
    except ValueError:  # the rounding of the processor leaves an image one pixel larger than the padded size
        assume("padding" not in name)
        raise
    left, top, right, bottom = geometry.box
    margin = 0.08 * min(size)
    assume(left + margin < spot[1] < right - margin and top + margin < spot[0] < bottom - margin)
    inputs = prepare(torch.nn.Linear(1, 1), picture, PROCESSORS[name]())
    assert inputs.features.geometry == [geometry]
    e = peaked(inputs)
    placed = e.placed().numpy()
    assert placed.shape == size
    best = np.argwhere(placed >= np.nanmax(placed) - 1e-9).mean(0)
    # one patch of the grid, in original pixels
    reach = ((bottom - top) / e.grid[0], (right - left) / e.grid[1])
    assert abs(best[0] + 0.5 - spot[0]) <= reach[0] + 1
    assert abs(best[1] + 0.5 - spot[1]) <= reach[1] + 1
    image = overlay(e).astype(int)
    saturation = (image.max(-1) - image.min(-1)).astype(float)
    times = image.shape[0] / height
    hot = np.argwhere(saturation >= 0.98 * saturation.max()).mean(0) / times
    assert abs(hot[0] - spot[0]) <= reach[0] + 1
    assert abs(hot[1] - spot[1]) <= reach[1] + 1


@pytest.mark.parametrize("size", [(120, 300), (300, 120)])
def test_cropped_area_has_no_score_and_is_hatched(size):
    inputs = prepare(torch.nn.Linear(1, 1), textured(size), PROCESSORS["short side and crop"]())
    e = peaked(inputs)
    placed = e.placed().numpy()
    visible = ~np.isnan(placed)
    square = min(size)
    assert visible.sum() == square * square
    rows, columns = np.argwhere(visible).min(0), np.argwhere(visible).max(0)
    assert rows.tolist() == [(size[0] - square) // 2, (size[1] - square) // 2]
    assert (columns - rows + 1).tolist() == [square, square]
    blank = overlay(e, opacity=0).astype(int)
    zero = overlay(e.with_features(geometry=[Geometry.whole(size)]), opacity=0).astype(int)
    times = blank.shape[0] // size[0]
    cropped = np.kron(~visible, np.ones((times, times), bool))
    # hatching differs from a score of 0 on any background
    lines = np.abs(blank - zero).max(-1).reshape(size[0] // 12, 12 * times, size[1] // 12, 12 * times).max((1, 3))
    assert (lines[cropped[:: 12 * times, :: 12 * times]] > 12).all()
    assert not np.abs(blank - zero)[~cropped].any()


def test_geometry_of_torchvision_and_timm_transforms():
    from timm.data import create_transform
    from torchvision import transforms

    for size in SIZES:
        for function in (
            transforms.Compose([transforms.Resize(110), transforms.CenterCrop(97), transforms.ToTensor()]),
            transforms.Compose([transforms.Resize((110, 90)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]),
            create_transform((3, 96, 96), crop_pct=0.9), create_transform((3, 96, 96), crop_pct=0.9, crop_mode="squash"),
            create_transform((3, 96, 96), crop_pct=0.9, crop_mode="border"),
        ):  # fmt: skip
            inputs = prepare(torch.nn.Linear(1, 1), textured(size), function)
            assert inputs.features.geometry is not None, (size, function)
            left, top, right, bottom = inputs.features.geometry[0].box
            inside = (max(0, left), max(0, top), min(size[1], right), min(size[0], bottom))
            height, width = inputs.image_size
            across, down = width / (right - left), height / (bottom - top)
            edges = [round((inside[1] - top) * down), round((inside[3] - top) * down), round((inside[0] - left) * across), round((inside[2] - left) * across)]
            expected = textured(size).resize((edges[3] - edges[2], edges[1] - edges[0]), Image.Resampling.BILINEAR, box=inside)
            actual = inputs.features.pictures[0].numpy()[edges[0] : edges[1], edges[2] : edges[3]].astype(float)
            # brightness is known only up to a factor if a function normalises
            pair = np.asarray(expected, float)[..., 0].ravel(), actual[..., 0].ravel()
            assert np.corrcoef(*pair)[0, 1] > 0.995, (size, function)


def test_geometry_of_torchvision_weights_transform():
    from torchvision.transforms._presets import ImageClassification

    inputs = prepare(torch.nn.Linear(1, 1), textured((300, 400)), ImageClassification(crop_size=96, resize_size=120))
    assert inputs.features.geometry == [Geometry((300, 400), (80.0, 30.0, 320.0, 270.0))]


def squashed(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.resize((96, 64)))).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("change", [
    lambda pixels: pixels, lambda pixels: -3 * pixels + 1, lambda pixels: pixels[[2, 0, 1]], lambda pixels: pixels.mean(0, keepdim=True),
    lambda pixels: pixels * torch.tensor([1.0, 0, -5])[:, None, None],
])  # fmt: skip
def test_geometry_of_custom_function_ignores_colours(change):
    """Resizing and cropping are measured under any change of colours."""
    inputs = prepare(torch.nn.Linear(1, 1), textured((100, 200)), lambda picture: change(squashed(picture)))
    assert inputs.features.geometry == [Geometry.whole((100, 200))]
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
def test_function_that_is_no_crop_has_no_geometry(function):
    """Random, mirrored, rotated, warped or shuffled images, constants, and functions that fail on an image of one colour."""
    inputs = prepare(torch.nn.Linear(1, 1), textured((100, 200)), function)
    assert inputs.features.geometry is None
    assert inputs.features.originals is None
    assert inputs.features.pictures is not None


def test_processor_that_contradicts_its_settings_has_no_geometry():
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
def test_measured_boxes_equal_boxes_from_processor_settings(name):
    """boxes.json was computed from the settings and rounding of each processor; a few boxes differ by less than a pixel."""
    errors = []
    for size, expected in BOXES[name].items():
        height, width = map(int, size.split("x"))
        box = measured_geometry(name, textured((height, width))).box
        errors.append(max(abs(a - b) for a, b in zip(box, expected, strict=True)))
    assert max(errors) < 1
    assert sum(error < 1e-5 for error in errors) >= (3 if name == "crop, then resize" else 7)


def test_geometry_is_measured_once_per_image_size():
    calls: list[int] = []

    def processor(picture: Image.Image) -> Tensor:
        calls.append(1)
        return squashed(picture)

    inputs = prepare(torch.nn.Linear(1, 1), [textured((100, 200))] * 5 + [textured((90, 30))], processor)
    assert [g.size for g in inputs.features.geometry] == [(100, 200)] * 5 + [(90, 30)]
    assert len(calls) == 6 + 4 * 2


def test_geometry_of_uniform_images():
    for colour in ("white", "black", (40, 80, 10)):
        inputs = prepare(torch.nn.Linear(1, 1), Image.new("RGB", (60, 90), colour), PROCESSORS["short side and crop"]())
        assert inputs.features.geometry == [Geometry((90, 60), (0.0, 15.0, 60.0, 75.0))]


def test_margins_cropped_by_their_brightness_have_no_geometry():
    """The processor of Nougat crops bright margins, so test pictures do not show what it does to others."""
    nougat = processor("Nougat", size={"height": 96, "width": 72})
    assert prepare(torch.nn.Linear(1, 1), textured((120, 300)), nougat).features.geometry is None


def test_tensor_input_has_no_geometry():
    pixels = torch.rand(1, 3, 48, 80)
    inputs = prepare(torch.nn.Linear(1, 1), pixels)
    assert (inputs.features.geometry, inputs.features.originals) == (None, None)


def test_batch_has_one_geometry_per_image():
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
def test_geometry_of_each_picture_in_a_batch_equals_that_of_the_picture_alone(case: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("others", [{}, {"cells": (0.0, 0.0, 56.0, 48.0)}, {"cells": (-7.0, -7.0, 49.0, 48.0), "read": (0.0, 0.0, 56.0, 56.0)}])
def test_joined_pictures_lie_as_alone(others: dict[str, Any]):
    """Pictures that are explained one by one, with the same box of the map in the input, or with different ones."""
    pictures = [textured((100, 200)), textured((200, 3))]
    alone = [whyformer.explain("bundled:digits", picture, "raw_attention") for picture in pictures]
    alone[1] = alone[1].with_features(**others)
    both = joined(alone)
    for i, single in enumerate(alone):
        assert both.boxes(i) == single.boxes() and both.placed(i).shape == single.placed().shape
        assert torch.equal(both.placed(i).isnan(), single.placed().isnan())
        assert Explanation.from_dict(json.loads(json.dumps(both.to_dict()))).boxes(i) == single.boxes()
        assert overlay(both[i]).shape == overlay(single).shape
    assert (both[1].geometry is None) == (not others)


def test_a_picture_of_a_data_set_lies_as_alone(tmp_path: Path):
    pictures = [textured((100, 200)), textured((200, 3)), textured((90, 30))]
    for out in (None, tmp_path / "out"):
        found = list(whyformer.explain_many("bundled:digits", pictures, "raw_attention", out=out))
        assert [tuple(e.placed().shape) for e in found] == [(100, 200), (112, 112), (90, 30)]


def test_geometry_is_saved_in_files_and_json(tmp_path):
    inputs = prepare(torch.nn.Linear(1, 1), textured((120, 77)), PROCESSORS["short side and crop"]())
    e = peaked(inputs)
    loaded = Explanation.load(e.save(tmp_path / "e.safetensors"))
    assert loaded.geometry == e.geometry
    assert np.array_equal(np.asarray(loaded.originals[0]), np.asarray(e.originals[0]))
    assert np.array_equal(overlay(loaded), overlay(e))
    facts = json.loads(json.dumps(e.to_dict()))
    assert Explanation.from_dict(facts).geometry == e.geometry


def test_invalid_geometry_raises():
    with pytest.raises(whyformer.WhyformerError, match="invalid geometry"):
        Geometry((10, 10), (5.0, 0.0, 5.0, 10.0))
