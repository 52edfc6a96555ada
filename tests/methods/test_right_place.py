"""Where the cells of a map lie on the picture: models that read a part of it, that pad it, and whose stems overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import whyformer
from row_orders import Stem
from whyformer.explaining import open_model
from whyformer.show.painting import overlay
from zoo import randomise

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}


def pixels(*size: int) -> Tensor:
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))


def dinov2() -> nn.Module:
    config = hf.Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=2, image_size=28, patch_size=7)
    return randomise(hf.Dinov2ForImageClassification(config))


def vit() -> nn.Module:
    return randomise(hf.ViTForImageClassification(hf.ViTConfig(**_SIZES, image_size=32, patch_size=8)))


def beit() -> nn.Module:
    return randomise(hf.BeitForImageClassification(hf.BeitConfig(**_SIZES, image_size=32, patch_size=8)))


def swin() -> nn.Module:
    config = hf.SwinConfig(embed_dim=12, depths=[1, 2], num_heads=[2, 2], window_size=4, image_size=32, patch_size=4)
    return randomise(hf.SwinForImageClassification(config))


def segformer() -> nn.Module:
    sizes: dict[str, Any] = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = hf.SegformerConfig(num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], decoder_hidden_size=16, **sizes)
    return randomise(hf.SegformerForImageClassification(config))


def timm_vit(**options: bool) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return randomise(timm.create_model("vit_tiny_patch16_224", **sizes, **options))


def torchvision_vit() -> nn.Module:
    return randomise(torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5))


class Unfolded(nn.Module):
    """Patches cut out by ``unfold`` from within a frame of two pixels that is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 25, 24)
        self.block = nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.unfold(x[:, :, 2:-2, 2:-2], 5, stride=5).transpose(1, 2)
        return self.head(self.block(self.patches(x)).mean(1))


# name -> (builder, the module whose input has a row for each patch, sizes)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], list[tuple[int, int]]]] = {
    "dinov2": (dinov2, lambda m: m.dinov2.encoder.layer[0], [(28, 28), (52, 40), (34, 48)]),
    "vit": (vit, lambda m: m.vit.layers[0], [(32, 32), (45, 38)]),
    "beit": (beit, lambda m: m.beit.layers[0], [(32, 32)]),
    "swin": (swin, lambda m: m.swin.encoder.layers[0], [(32, 32), (42, 33)]),
    "segformer": (segformer, lambda m: m.segformer.stages[0].blocks[0], [(32, 64), (45, 38)]),
    "timm": (lambda: timm_vit(dynamic_img_size=True), lambda m: m.blocks[0], [(32, 32), (40, 24)]),
    "timm pads": (lambda: timm_vit(dynamic_img_size=True, dynamic_img_pad=True), lambda m: m.blocks[0], [(45, 38), (33, 47)]),
    "torchvision": (torchvision_vit, lambda m: m.encoder.layers[0], [(32, 32)]),
    "unfold": (lambda: randomise(Unfolded()), lambda m: m.block, [(44, 31), (29, 36)]),
    "convolutions": (lambda: randomise(Stem([(7, 4, 3), (3, 2, 1)])), lambda m: m.encoder.layers[0], [(48, 64), (43, 50)]),
    "patches in steps": (lambda: randomise(Stem([(2, 2, 0), (4, 4, 0)])), lambda m: m.encoder.layers[0], [(48, 64), (47, 51)]),
}  # fmt: skip
CASES = [(name, size) for name, (_, _, sizes) in MODELS.items() for size in sizes]


def feed(name: str, x: Tensor) -> Any:
    return {"pixel_values": x, "interpolate_pos_encoding": True} if name == "vit" and x.shape[-1] != 32 else x


def run(model: nn.Module, given: Any) -> Tensor:
    made = model(**given) if isinstance(given, dict) else model(given)
    return made if isinstance(made, Tensor) else made.logits


def support(model: nn.Module, module: nn.Module, name: str, x: Tensor, row: int) -> tuple[list[int], list[int]]:
    """The lines and columns of pixels on which a row of what enters a module depends; rows are counted from the last."""
    caught: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: caught.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
    x = x.clone().requires_grad_()
    run(model, feed(name, x))
    hook.remove()
    (found,) = torch.autograd.grad(caught[0].reshape(-1, caught[0].shape[-1])[row].square().sum(), x)
    read = (found != 0).any(1)[0]
    return read.any(1).nonzero().flatten().tolist(), read.any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_cell_lies_about_the_pixels_that_its_row_reads(name: str, size: tuple[int, int]) -> None:
    """All four corners, and cells between: the middle of what a row reads is that of its cell; what the picture ends
    before it reaches out of."""
    builder, block, _ = MODELS[name]
    model, x = builder().eval(), pixels(*size)
    structure = open_model(model).prepare(feed(name, x)).task().structure
    found = structure.passed.elements(structure.main, structure.passed.name_of(structure.streams[0]))
    assert found is not None
    places = found[1]
    assert places.grid is not None and places.box is not None
    (high, wide), (left, top, right, bottom) = places.grid, places.box
    for r in {0, 1, high // 2, high - 1}:
        for c in {0, 1, wide // 2, wide - 1}:
            lines = support(model, block(model), name, x, r * wide + c - high * wide)
            for own, place, count, start, end, pixels_ in zip(lines, (r, c), (high, wide), (top, left), (bottom, right), size, strict=True):
                step = (end - start) / count
                middle = start + (place + 0.5) * step
                if own[0] > 0 and own[-1] < pixels_ - 1:
                    assert (own[0] + own[-1] + 1) / 2 == pytest.approx(middle)
                else:  # some of it may be cut off by the border
                    assert own[0] <= middle <= own[-1] + 1 or not 0 < middle < pixels_
                    reach = max(middle - own[0], own[-1] + 1 - middle)
                    assert max(0, middle - reach) == pytest.approx(own[0]) and min(pixels_, middle + reach) == pytest.approx(own[-1] + 1)


@pytest.mark.part
@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("method", ["input_x_gradient", "gradcam", "occlusion"])
def test_what_the_model_does_not_read_has_no_score(name: str, size: tuple[int, int], method: str) -> None:
    """A line of pixels without a score is one that may be changed without any effect on the logits, and no other is."""
    model, x = MODELS[name][0]().eval(), pixels(*size)
    e = whyformer.explain(model, feed(name, x), method, 0)
    unseen, flat = e.placed().isnan(), e.heatmap()
    assert flat.shape == (1, *size) and bool((flat[0][unseen] == 0).all())
    with torch.no_grad():
        logits = run(model, feed(name, x))
        for axis in (0, 1):
            read = [not bool(unseen.select(axis, line).all()) for line in range(size[axis])]
            for line in {0, 1, 2, 3, size[axis] // 2, *range(size[axis] - 7, size[axis])}:
                changed = x.clone()
                changed.select(axis + 2, line).add_(3)
                assert torch.equal(run(model, feed(name, changed)), logits) != read[line], (axis, line)


@pytest.mark.parametrize("corner", range(4))
def test_a_bright_corner_is_hot_where_it_is(corner: int) -> None:
    """DINOv2 on a picture that its processor enlarges, crops nothing of, and of which it reads all but the last lines."""
    model = dinov2().eval()

    def processor(picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture.resize((80, 104)))).permute(2, 0, 1) / 255

    # 104 × 80 pixels, of which 98 × 77 are read; of the original 196 × 154 of 208 × 160
    down, across = divmod(corner, 2)
    top, left = (14 * 13 if down else 0), (14 * 10 if across else 0)
    picture = Image.new("RGB", (160, 208))
    picture.paste((255, 255, 255), (left, top, left + 14, top + 14))
    e = whyformer.explain(model, picture, "occlusion", 0, processor, patch=7, baseline="zero")
    assert e.geometry is not None and e.read == (0, 0, 77, 98)
    placed = e.placed()
    assert placed.shape == (208, 160)
    assert placed[196:].isnan().all() and placed[:, 154:].isnan().all() and not placed[:196, :154].isnan().any()
    at = int(placed.nan_to_num(0).abs().argmax())
    assert top <= at // 160 < top + 14 and left <= at % 160 < left + 14
    drawn = overlay(e)
    assert len(set(map(tuple, drawn[-4].tolist()))) > 1  # hatched: a black line would have one colour


def test_parts_that_are_not_read_are_kept_in_files(tmp_path: Any) -> None:
    e = whyformer.explain(dinov2().eval(), pixels(52, 40), "gradcam")
    for again in (whyformer.Explanation.load(e.save(tmp_path / "one.safetensors")), whyformer.Explanation.from_dict(e.to_dict())):
        assert (again.cells, again.read) == (e.cells, e.read) == ((0, 0, 35, 49), (0, 0, 35, 49))
        assert torch.equal(again.placed().nan_to_num(7), e.placed().nan_to_num(7))
