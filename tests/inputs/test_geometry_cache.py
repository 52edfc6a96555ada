"""The geometry of a processor is cached by image size until the processor changes."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import transformers as hf
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from whyformer.inputs.prepare import prepare
from zoo import hf_vit


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    draws = np.random.default_rng(0)
    return [Image.fromarray(draws.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]


def boxes(processor: Any, *sizes: tuple[int, int]) -> list[tuple[float, ...]] | None:
    geometry = prepare(hf_vit()[0], pictures(*sizes), processor).features.geometry
    return None if geometry is None else [g.box for g in geometry]


class CroppingProcessor:
    """A custom processor that counts its calls in ``CallCounter``."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, picture: Image.Image) -> Tensor:
        CallCounter.calls += 1
        cropped = picture.crop((0, 0, self.side, self.side)).resize((32, 32))
        return torch.from_numpy(np.array(cropped)).permute(2, 0, 1) / 255


class CallCounter:
    calls = 0


SIDE = 40


def cropping(side: int) -> Callable[[Image.Image], Tensor]:
    def processor(picture: Image.Image) -> Tensor:
        cropped = picture.crop((0, 0, side, side)).resize((32, 32))
        return torch.from_numpy(np.array(cropped)).permute(2, 0, 1) / 255

    def change(new: int) -> None:
        nonlocal side
        side = new

    processor.change = change  # type: ignore[attr-defined]
    return processor


def by_a_global(picture: Image.Image) -> Tensor:
    return _cropped(picture)


def _cropped(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.crop((0, 0, SIDE, SIDE)).resize((32, 32)))).permute(2, 0, 1) / 255


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda processor: setattr(processor, name, value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "transformers, size of the crop": (lambda: hf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}), _set("size", {"shortest_edge": 64})),
    "transformers, switched off": (lambda: hf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}), _set("do_resize", False)),
    "torchvision": (lambda: tv.Compose([tv.Resize(40), tv.CenterCrop(32), tv.ToTensor()]), lambda p: setattr(p.transforms[0], "size", 64)),
    "torchvision v2": (lambda: v2.Compose([v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]), lambda p: p.transforms.insert(0, v2.Resize(40))),
    "a closure": (lambda: cropping(40), lambda p: p.change(60)),
    "a global number": (lambda: by_a_global, lambda _: globals().__setitem__("SIDE", 60)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_setting_invalidates_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, change = CHANGES[name]
    monkeypatch.setitem(globals(), "SIDE", SIDE)
    processor = build()
    before = boxes(processor, (80, 80))
    assert before is not None and boxes(processor, (80, 80)) == before
    change(processor)
    after = boxes(processor, (80, 80))
    assert after is not None and after != before


def test_measurement_is_reused_for_images_of_equal_size() -> None:
    def calls(processor: Any, *sizes: tuple[int, int]) -> int:
        start = CallCounter.calls
        assert boxes(processor, *sizes) is not None
        return CallCounter.calls - start

    cropping_50 = CroppingProcessor(50)
    assert calls(cropping_50, (80, 80)) > 1
    assert calls(cropping_50, (80, 80)) == 1
    assert calls(cropping_50, (80, 90)) > 1 and calls(cropping_50, (80, 80)) == 1 and calls(cropping_50, (80, 90)) == 1
    assert calls(CroppingProcessor(50), (80, 80)) == 1  # an equal processor shares the measurement
    assert calls(CroppingProcessor(60), (80, 80)) > 1


def test_cache_does_not_keep_the_processor_alive() -> None:
    processor = CroppingProcessor(50)
    assert boxes(processor, (80, 80)) is not None
    reference = weakref.ref(processor)
    del processor
    gc.collect()
    assert reference() is None


def test_geometry_of_padded_batch_depends_on_all_its_sizes() -> None:
    """An image is placed differently next to a larger one."""

    class PaddingProcessor:
        def preprocess(self) -> None: ...

        def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Tensor]:
            side = max(max(p.size) for p in images)
            padded = torch.full((len(images), 3, 32, 32), 0.5)
            for row, p in zip(padded, images, strict=True):
                wide, high = round(32 * p.width / side), round(32 * p.height / side)
                row[:, :high, :wide] = torch.from_numpy(np.array(p.resize((wide, high)))).permute(2, 0, 1) / 255
            return {"pixel_values": padded}

    processor = PaddingProcessor()
    small, both = boxes(processor, (64, 64)), boxes(processor, (64, 64), (128, 128))
    assert small is not None and both is not None
    assert small[0] == pytest.approx((0, 0, 64, 64)) and both[0] == pytest.approx((0, 0, 128, 128), abs=3)
    assert boxes(processor, (64, 64)) == small and boxes(processor, (64, 64), (128, 128)) == both


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_random_crop_has_no_geometry(draw: Callable[[], float]) -> None:
    """A random crop has no geometry, even if it was constant during the first measurement."""
    random.seed(0)
    np.random.seed(0)  # torch's is set for each test
    constant = [True]

    def processor(picture: Image.Image) -> Tensor:
        first = 0 if constant or draw() < 0 else int(30 * draw())
        draw()
        return torch.from_numpy(np.array(picture.crop((first, 0, first + 50, 50)).resize((32, 32)))).permute(2, 0, 1) / 255

    geometry = [boxes(processor, (80, 80)) is None]
    constant.clear()
    geometry += [boxes(processor, (80, 80)) is None for _ in range(3)]
    assert geometry == [False, True, True, True]
