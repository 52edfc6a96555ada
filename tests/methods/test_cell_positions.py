"""Position of patch scores on the image for models that crop or pad it, and for overlapping stems."""

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
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

import whyformer
from prompting import PLAIN, outside, square, words
from row_orders import Stem
from shrinking import tiny
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


class UnfoldedPatches(nn.Module):
    """Patches from ``unfold`` on the image without a border of two pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 25, 24)
        self.block = nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.unfold(x[:, :, 2:-2, 2:-2], 5, stride=5).transpose(1, 2)
        return self.head(self.block(self.patches(x)).mean(1))


# name -> (builder, module whose input has a row for each patch, image sizes)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], list[tuple[int, int]]]] = {
    "dinov2": (dinov2, lambda m: m.dinov2.encoder.layer[0], [(28, 28), (52, 40), (34, 48)]),
    "vit": (vit, lambda m: m.vit.layers[0], [(32, 32), (45, 38)]),
    "beit": (beit, lambda m: m.beit.layers[0], [(32, 32)]),
    "swin": (swin, lambda m: m.swin.encoder.layers[0], [(32, 32), (42, 33)]),
    "segformer": (segformer, lambda m: m.segformer.stages[0].blocks[0], [(32, 64), (45, 38)]),
    "timm": (lambda: timm_vit(dynamic_img_size=True), lambda m: m.blocks[0], [(32, 32), (40, 24)]),
    "timm pads": (lambda: timm_vit(dynamic_img_size=True, dynamic_img_pad=True), lambda m: m.blocks[0], [(45, 38), (33, 47)]),
    "torchvision": (torchvision_vit, lambda m: m.encoder.layers[0], [(32, 32)]),
    "unfold": (lambda: randomise(UnfoldedPatches()), lambda m: m.block, [(44, 31), (29, 36)]),
    "convolutions": (lambda: randomise(Stem([(7, 4, 3), (3, 2, 1)])), lambda m: m.encoder.layers[0], [(48, 64), (43, 50)]),
    "patches in steps": (lambda: randomise(Stem([(2, 2, 0), (4, 4, 0)])), lambda m: m.encoder.layers[0], [(48, 64), (47, 51)]),
}  # fmt: skip
CASES = [(name, size) for name, (_, _, sizes) in MODELS.items() for size in sizes]


def model_inputs(name: str, x: Tensor) -> Any:
    return {"pixel_values": x, "interpolate_pos_encoding": True} if name == "vit" and x.shape[-1] != 32 else x


def run_model(model: nn.Module, inputs: Any) -> Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, Tensor) else output.logits


def receptive_field(model: nn.Module, module: nn.Module, name: str, x: Tensor, row: int) -> tuple[list[int], list[int]]:
    """Lines and columns of the image on which a row of the module's input depends; ``row`` counts from the end."""
    module_inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: module_inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
    x = x.clone().requires_grad_()
    run_model(model, model_inputs(name, x))
    hook.remove()
    (gradient,) = torch.autograd.grad(module_inputs[0].reshape(-1, module_inputs[0].shape[-1])[row].square().sum(), x)
    is_read = (gradient != 0).any(1)[0]
    return is_read.any(1).nonzero().flatten().tolist(), is_read.any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_cell_is_centered_on_receptive_field_of_its_row(name: str, size: tuple[int, int]) -> None:
    """Corner cells and inner cells: the receptive field of a row has the same center as its cell, or is cropped by the
    border."""
    builder, block, _ = MODELS[name]
    model, x = builder().eval(), pixels(*size)
    structure = open_model(model).prepare(model_inputs(name, x)).task().structure
    elements = structure.map_pass.elements(structure.main, structure.map_pass.name_of(structure.streams[0]))
    assert elements is not None
    layout = elements[1]
    assert layout.grid is not None and layout.box is not None
    (high, wide), (left, top, right, bottom) = layout.grid, layout.box
    for r in {0, 1, high // 2, high - 1}:
        for c in {0, 1, wide // 2, wide - 1}:
            fields = receptive_field(model, block(model), name, x, r * wide + c - high * wide)
            for field, index, count, start, end, length in zip(fields, (r, c), (high, wide), (top, left), (bottom, right), size, strict=True):
                step = (end - start) / count
                center = start + (index + 0.5) * step
                if field[0] > 0 and field[-1] < length - 1:
                    assert (field[0] + field[-1] + 1) / 2 == pytest.approx(center)
                else:  # the border may crop the receptive field
                    assert field[0] <= center <= field[-1] + 1 or not 0 < center < length
                    reach = max(center - field[0], field[-1] + 1 - center)
                    assert max(0, center - reach) == pytest.approx(field[0]) and min(length, center + reach) == pytest.approx(field[-1] + 1)


@pytest.mark.part
@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("method", ["input_x_gradient", "gradcam", "occlusion"])
def test_unread_pixels_have_no_score(name: str, size: tuple[int, int], method: str) -> None:
    """Exactly the lines and columns without scores can change without any effect on the logits."""
    model, x = MODELS[name][0]().eval(), pixels(*size)
    e = whyformer.explain(model, model_inputs(name, x), method, 0)
    unread, heatmap = e.placed().isnan(), e.heatmap()
    assert heatmap.shape == (1, *size) and bool((heatmap[0][unread] == 0).all())
    with torch.no_grad():
        logits = run_model(model, model_inputs(name, x))
        for axis in (0, 1):
            read = [not bool(unread.select(axis, line).all()) for line in range(size[axis])]
            for line in {0, 1, 2, 3, size[axis] // 2, *range(size[axis] - 7, size[axis])}:
                changed = x.clone()
                changed.select(axis + 2, line).add_(3)
                assert torch.equal(run_model(model, model_inputs(name, changed)), logits) != read[line], (axis, line)


@pytest.mark.parametrize("corner", range(4))
def test_bright_corner_has_highest_occlusion_score(corner: int) -> None:
    """DINOv2 with a processor that resizes without cropping, and an image of which the model ignores the last lines."""
    model = dinov2().eval()

    def processor(image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(image.resize((80, 104)))).permute(2, 0, 1) / 255

    # the model reads 98 × 77 of 104 × 80 pixels, or 196 × 154 of 208 × 160 original pixels
    is_bottom, is_right = divmod(corner, 2)
    top, left = (14 * 13 if is_bottom else 0), (14 * 10 if is_right else 0)
    image = Image.new("RGB", (160, 208))
    image.paste((255, 255, 255), (left, top, left + 14, top + 14))
    e = whyformer.explain(model, image, "occlusion", 0, processor, patch=7, baseline="zero")
    assert e.geometry is not None and e.read == (0, 0, 77, 98)
    scores = e.placed()
    assert scores.shape == (208, 160)
    assert scores[196:].isnan().all() and scores[:, 154:].isnan().all() and not scores[:196, :154].isnan().any()
    peak = int(scores.nan_to_num(0).abs().argmax())
    assert top <= peak // 160 < top + 14 and left <= peak % 160 < left + 14
    drawn = overlay(e)
    assert len(set(map(tuple, drawn[-4].tolist()))) > 1  # hatched; a black line would have a single colour


def test_pixels_of_a_flat_picture_are_read() -> None:
    """Rectifiers without bias are 0 on black, and a max-pool selects one of equal values: the gradient is 0, and the pixels are read."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 2))
    x = torch.zeros(1, 3, 8, 8)
    x[..., :2, :2] = 1
    e = whyformer.explain(randomise(stem), x, "input_x_gradient", 0)
    assert e.read is None and not bool(e.placed().isnan().any())


@pytest.mark.parametrize("size", [(64, 64), (40, 100)])
@pytest.mark.parametrize("corner", range(4))
@pytest.mark.parametrize("prompt", [False, True])
def test_patches_of_any_aspect_ratio_are_on_the_picture(size: tuple[int, int], corner: int, prompt: bool) -> None:
    """SigLIP 2 packs the patches of a picture into a row with padding, alone or compared with texts."""
    is_bottom, is_right = divmod(corner, 2)
    top, left = (size[0] - 12) * is_bottom, (size[1] - 12) * is_right
    image = square(size, (left, top, left + 12, top + 12))
    pictures = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40, **PLAIN)
    vision = {"patch_size": 8, "num_patches": 16}
    if prompt:
        model = tiny("Siglip2Model", {"vision_config": vision})
        e = whyformer.explain(model, {"text": ["what is", "here"], "images": image}, "input_x_gradient", 0, compared(pictures))
    else:
        model = tiny("Siglip2ForImageClassification", {"vision_config": vision})
        e = whyformer.explain(model, [image, image.rotate(180)], "input_x_gradient", 0, pictures)[0]
    encoded = pictures(images=[image], return_tensors="pt")
    assert e.part("pixel_values").grid == tuple(encoded["spatial_shapes"][0].tolist())
    part = e.part("pixel_values")
    assert outside(part, (left, top, left + 12, top + 12), 1 + max(size[0] / part.grid[0], size[1] / part.grid[1])) < 0.01
    with torch.no_grad():
        if not prompt:
            torch.testing.assert_close(e.logits, model(**encoded).logits)


def test_packed_patches_are_evaluated() -> None:
    """The most important patch is removed first, also of a picture with padding: 36 of 40 patches."""
    pictures = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40, **PLAIN)
    model = tiny("Siglip2ForImageClassification", {"vision_config": {"patch_size": 8, "num_patches": 16}})
    images = [square((64, 64), (40, 20, 60, 40)), square((40, 100), (40, 20, 60, 40))]
    e = whyformer.explain(model, images[0], "occlusion", 0, pictures)
    found = whyformer.trust(e, model, images[0], pictures, steps=36, seeds=[0])
    encoded = dict(pictures(images=[images[0]], return_tensors="pt"))
    encoded["pixel_values"][0, int(e.scores.argmax())] = 0
    with torch.no_grad():
        assert float(found.curves[0][1]) == pytest.approx(float(model(**encoded).logits.softmax(-1)[0, 0]), rel=1e-4)
    both = whyformer.explain(model, images, "occlusion", 0, pictures)
    with pytest.raises(whyformer.WhyformerError, match="one picture at a time"):
        whyformer.trust(both, model, images, pictures, steps=2, seeds=[0])


@pytest.mark.parametrize("method", ["input_x_gradient", "gae"])
@pytest.mark.parametrize("sizes", [[(64, 64), (40, 100)], [(40, 100), (64, 64), (40, 100), (100, 40)]])
def test_maps_of_a_stream_do_not_depend_on_the_shapes_of_other_pictures(sizes: list[tuple[int, int]], method: str) -> None:
    pictures = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40, **PLAIN)
    model = tiny("Siglip2ForImageClassification", {"vision_config": {"patch_size": 8, "num_patches": 16}})
    images = [square(size, (i, 20, i + 20, 40)) for i, size in enumerate(sizes)]
    results = list(whyformer.explain_many(model, images, method, [0], pictures, batch_size=4))
    for image, e in zip(images, results, strict=True):
        alone = whyformer.explain(model, image, method, 0, pictures)
        assert e.grid == alone.grid and e.geometry == alone.geometry
        torch.testing.assert_close(e.scores, alone.scores, rtol=1e-4, atol=1e-6)


def compared(pictures: Any) -> Any:
    """A processor that compares pictures with texts."""
    written = words()

    def process(images: Any, text: Any, **options: Any) -> dict[str, Any]:
        return {"input_ids": written(text, **options)["input_ids"], **pictures(images=images, return_tensors="pt")}

    class Compared:
        image_processor, tokenizer, __call__ = pictures, written, staticmethod(process)

    return Compared()


def test_read_region_survives_serialization(tmp_path: Any) -> None:
    e = whyformer.explain(dinov2().eval(), pixels(52, 40), "gradcam")
    for restored in (whyformer.Explanation.load(e.save(tmp_path / "one.safetensors")), whyformer.Explanation.from_dict(e.to_dict())):
        assert (restored.cells, restored.read) == (e.cells, e.read) == ((0, 0, 35, 49), (0, 0, 35, 49))
        assert torch.equal(restored.placed().nan_to_num(7), e.placed().nan_to_num(7))
