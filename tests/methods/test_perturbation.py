"""Occlusion and ViT-CX against slow reference implementations, captum, and analytic cases."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from whyformer.errors import InputError, MissingExtra
from whyformer.explanation.views import gaussian_blur
from whyformer.inputs import Inputs
from whyformer.inputs.removal import Removal, patch_size
from whyformer.methods.perturbation import occlusion, vit_cx
from whyformer.targets import Token


class LinearImageModel(nn.Module):
    """A linear image model, for which the drop of each cell is known."""

    def __init__(self, side: int, patch: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(patch_size=patch, num_labels=2)
        self.weight = nn.Parameter(torch.randn(2, 3 * side * side, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


# -- occlusion of images -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("baseline", ["zero", "mean", "blur"])
def test_patch_occlusion_equals_reference_loop(baseline: str) -> None:
    model, x = zoo.build("hf_vit_wide")
    result = whyformer.explain(model, x, "occlusion", target=[1, 3], baseline=baseline, batch_size=5)
    assert result.grid == (3, 5)
    assert result.diagnostics["cell"] == "8×8 pixels"
    clean = zoo.call(model, x)
    for b, target in enumerate([1, 3]):
        baselines = {
            "zero": torch.zeros_like(x),
            "mean": x.mean((2, 3), keepdim=True).expand_as(x),
            "blur": gaussian_blur(x, 8),
        }
        for r in range(3):
            for c in range(5):
                changed = x[b].clone()
                area = slice(8 * r, 8 * r + 8), slice(8 * c, 8 * c + 8)
                changed[:, *area] = baselines[baseline][b][:, *area]
                drop = clean[b, target] - zoo.call(model, changed[None])[0, target]
                assert torch.isclose(result.scores[b, 5 * r + c], drop, atol=1e-9)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_patch_occlusion_equals_captum(window: int, stride: int) -> None:
    from captum.attr import Occlusion

    model, x = zoo.build("timm_vit")
    result = whyformer.explain(model, x, "occlusion", target=2, window=window, stride=stride).scores
    size, step = 8 * window, 8 * stride
    expected = Occlusion(model).attribute(x, (3, size, size), (3, step, step), baselines=0, target=2)
    # captum's result is float32
    assert torch.allclose(result.reshape(2, 4, 4).float(), expected[:, 0, ::8, ::8], atol=1e-5)


def test_occlusion_of_linear_model_equals_sum_per_cell() -> None:
    """f = Σ w x, so the drop of a cell is its part of the sum; border cells are cropped (20 = 8 + 8 + 4)."""
    model, x = LinearImageModel(20, 8).eval(), torch.randn(1, 3, 20, 20, dtype=torch.float64)
    contributions = (x[0].flatten() * model.weight[1]).detach().reshape(3, 20, 20).sum(0)
    cells = torch.stack([contributions[8 * r : 8 * r + 8, 8 * c : 8 * c + 8].sum() for r in range(3) for c in range(3)])
    assert torch.allclose(whyformer.explain(model, x, "occlusion", target=1).scores[0], cells)
    # windows of 2 × 2 at every cell: the center cell is in all four, a corner in one
    result = whyformer.explain(model, x, "occlusion", target=1, window=2, stride=1).scores.reshape(3, 3)
    grid = cells.reshape(3, 3)
    assert torch.isclose(result[0, 0], grid[:2, :2].sum())
    assert torch.isclose(
        result[1, 1], (grid[:2, :2].sum() + grid[:2, 1:].sum() + grid[1:, :2].sum() + grid[1:, 1:].sum()) / 4
    )


def test_tiny_patches_are_merged() -> None:
    model, x = LinearImageModel(64, 1).eval(), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    result = whyformer.explain(model, x, "occlusion", target=0)
    assert result.grid == (32, 32)
    assert whyformer.explain(model, x, "occlusion", target=0, patch=16).grid == (4, 4)


@pytest.mark.parametrize(
    ("name", "size"), [("hf_vit", 8), ("timm_vit", 8), ("torchvision_vit", 8), ("hf_swin", 2), ("timm_swin", 2)]
)
def test_patch_size_is_read_from_model(name: str, size: int) -> None:
    assert patch_size(zoo.build(name)[0]) == (size, size)


@pytest.mark.parametrize(("kernel", "stride", "cell"), [(4, 4, (4, 4)), ((8, 4), (8, 4), (8, 4)), (7, 2, (16, 16)), (1, 1, (16, 16))])
def test_patches_of_own_modules_are_those_of_their_convolution(kernel: Any, stride: Any, cell: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, kernel, stride), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    e = whyformer.explain(model, torch.randn(1, 3, 32, 32), "occlusion", target=1)
    assert e.grid == (32 // cell[0], 32 // cell[1])


def test_occlusion_with_probability_and_contrast_targets() -> None:
    model, x = zoo.build("hf_vit")
    clean = zoo.call(model, x).softmax(-1)
    changed = x.clone()
    changed[:, :, :8, :8] = 0
    drop = (clean - zoo.call(model, changed).softmax(-1))[[0, 1], [4, 2]]
    result = whyformer.explain(model, x, "occlusion", target=whyformer.targets.Probability([4, 2])).scores
    assert torch.allclose(result[:, 0], drop, atol=1e-12)
    contrast = whyformer.explain(model, x, "occlusion", target=whyformer.targets.Contrast([4, 2], [0, 1])).scores
    parts = [whyformer.explain(model, x, "occlusion", target=t).scores for t in ([4, 2], [0, 1])]
    assert torch.allclose(contrast, parts[0] - parts[1], atol=1e-9)


def test_gaussian_blur_preserves_constant_and_has_gaussian_kernel() -> None:
    constant = torch.full((2, 3, 9, 12), 1.7, dtype=torch.float64)
    assert torch.allclose(gaussian_blur(constant, 20.0), constant)
    point = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    point[0, 0, 20, 20] = 1
    blurred = gaussian_blur(point, 2.0)
    assert math.isclose(float(blurred[0, 0, 20, 23] / blurred[0, 0, 20, 20]), math.exp(-9 / 8), rel_tol=1e-12)
    assert torch.equal(gaussian_blur(point, 0.0), point)


# -- occlusion of text ---------------------------------------------------------------------------------------------
def test_token_occlusion_equals_reference_loop() -> None:
    model, inputs = zoo.build("bert")
    result = whyformer.explain(model, inputs, "occlusion", target=3, baseline=7).scores
    clean = zoo.call(model, inputs)[:, 3]
    for b, length in enumerate(zoo.LENGTHS):
        for t in range(length):
            ids = inputs["input_ids"].clone()
            ids[b, t] = 7
            drop = clean[b] - zoo.call(model, {**inputs, "input_ids": ids})[b, 3]
            assert torch.isclose(result[b, t], drop, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder_mean"])
def test_deletion_removes_token_from_input(name: str) -> None:
    """The default without a tokenizer, which would provide a replacement token."""
    model, inputs = zoo.build(name)
    result = whyformer.explain(model, inputs, "occlusion", target=3)
    assert result.diagnostics["baseline"] == "delete"
    clean = zoo.call(model, inputs)[:, 3]
    for b, length in enumerate(zoo.LENGTHS):
        ids = inputs["input_ids"][b, :length]
        for t in range(length):
            remaining = torch.cat([ids[:t], ids[t + 1 :]])[None]
            drop = clean[b] - zoo.call(model, {"input_ids": remaining, "attention_mask": torch.ones_like(remaining)})[0, 3]
            assert torch.isclose(result.scores[b, t], drop, atol=1e-9)


@pytest.mark.parametrize("window", [1, 4])
def test_deletion_without_attention_mask(window: int) -> None:
    """Texts of equal length are batched without padding. The last window is shorter."""
    model, inputs = zoo.build("bert")
    ids = inputs["input_ids"][:, :7]
    result = whyformer.explain(model, {"input_ids": ids}, "occlusion", target=3, baseline="delete", window=window, batch_size=2)
    masked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = whyformer.explain(model, masked, "occlusion", target=3, baseline="delete", window=window)
    assert torch.allclose(result.scores, expected.scores, atol=1e-9)


def test_deleting_every_token_raises() -> None:
    model, inputs = zoo.build("gpt2")
    with pytest.raises(InputError, match="would delete every token of sample 1"):
        whyformer.explain(model, inputs, "occlusion", window=7)
    assert whyformer.explain(model, inputs, "occlusion", window=6).scores.isfinite().all()


def test_black_baseline_uses_mean_and_std_of_processor() -> None:
    from types import SimpleNamespace

    model, x = zoo.build("hf_vit")
    processor = SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.3])
    result = whyformer.explain(model, x, "occlusion", 1, processor, baseline="black")
    changed = x.clone()
    changed[:, :, :8, :8] = torch.tensor([-0.5 / 0.2, -0.4 / 0.25, -0.3 / 0.3], dtype=x.dtype)[:, None, None]
    drop = (zoo.call(model, x) - zoo.call(model, changed))[:, 1]
    assert torch.allclose(result.scores[:, 0], drop, atol=1e-9)


def test_deletion_keeps_left_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 4, 3, 2]])
    inputs = Inputs((), {"input_ids": ids, "attention_mask": (ids > 0).long()}, "text", "input_ids", ids > 0)
    removed = Removal(inputs, ids > 0, "delete", 0)
    remaining = removed.without([(0, [3]), (1, [0, 1])])
    assert remaining.tensor.tolist() == [[0, 5, 7], [4, 3, 2]]
    assert remaining.kwargs["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert remaining.mask is not None
    assert remaining.mask.tolist() == [[False, True, True], [True, True, True]]


def drops_of_deletion(model: nn.Module, kept: Callable[[list[int]], dict[str, Tensor]], count: int, token: int) -> Tensor:
    """Drop of a logit, of the last row if there are several, without each token; ``kept`` returns the inputs with some tokens."""

    def value(numbers: list[int]) -> Tensor:
        with torch.no_grad():
            return model(**kept(numbers)).logits.flatten(0, -2)[-1, token]

    every = list(range(count))
    return torch.stack([value(every) - value([t for t in every if t != gone]) for gone in every])


@pytest.mark.parametrize("length", [5, 6, 7])
def test_deletion_leaves_decoder_tokens(length: int) -> None:
    """Also if there are as many as encoder tokens."""
    model, inputs = zoo.build("t5")
    ids, decoder = inputs["input_ids"][:1, :6], torch.randint(4, 40, (1, length))
    feed = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoder, "decoder_attention_mask": torch.ones_like(decoder)}
    result = whyformer.explain(model, feed, "occlusion", 7, baseline="delete").scores[0]
    expected = drops_of_deletion(model, lambda kept: {"input_ids": ids[:, kept], "decoder_input_ids": decoder}, 6, 7)
    assert torch.allclose(result, expected, atol=1e-9)


@pytest.mark.parametrize("padding", [0, 2])
def test_deletion_keeps_positions_of_left_padded_text(padding: int) -> None:
    model, _ = zoo.build("gpt2_lm")
    ids = torch.randint(4, 40, (1, 5))
    mask = torch.cat([torch.zeros(1, padding), torch.ones(1, 5)], 1).long()
    feed = {"input_ids": nn.functional.pad(ids, (padding, 0)), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    result = whyformer.explain(model, feed, "occlusion", 7, baseline="delete").scores[0, padding:]
    assert torch.allclose(result, drops_of_deletion(model, lambda kept: {"input_ids": ids[:, kept]}, 5, 7), atol=1e-9)


def test_deletion_removes_boxes_of_tokens() -> None:
    from transformers import LayoutLMConfig, LayoutLMForSequenceClassification

    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "max_position_embeddings": 40}
    model = zoo.randomise(LayoutLMForSequenceClassification(LayoutLMConfig(vocab_size=50, num_labels=3, **small))).double()
    ids, box = torch.randint(4, 50, (2, 6)), torch.randint(0, 500, (2, 6, 4)).cumsum(-1).clamp(max=999)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    result = whyformer.explain(model, {"input_ids": ids, "attention_mask": mask, "bbox": box}, "occlusion", 1).scores
    for b, length in enumerate((6, 4)):
        expected = drops_of_deletion(model, lambda kept, b=b: {"input_ids": ids[b : b + 1, kept], "bbox": box[b : b + 1, kept]}, length, 1)
        assert torch.allclose(result[b, :length], expected, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2])
def test_deletion_cuts_mask_of_pairs_of_tokens(rows: int) -> None:
    """A mask ``[1 or B, 1, N, N]`` in which each token looks at those at an even distance, before and after it."""
    model, _ = zoo.build("llama_lm")
    ids, places = torch.randint(4, 40, (2, 5)), torch.arange(5)
    allowed = (places[:, None] - places) % 2 == 0
    mask = torch.zeros(rows, 1, 5, 5, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    feed = {"input_ids": ids, "attention_mask": mask}
    result = whyformer.explain(model, feed, "occlusion", Token(-1, 7), baseline="delete", batch_size=3).scores
    for b in range(2):
        kept_of = lambda kept, b=b: {"input_ids": ids[b : b + 1, kept], "attention_mask": mask[:1, :, kept][..., kept]}  # noqa: E731
        assert torch.allclose(result[b], drops_of_deletion(model, kept_of, 5, 7), atol=1e-9)


def test_baselines_of_bundled_text_model() -> None:
    text = ["a gripping film", "the plot never goes anywhere at all"]
    explanations = {
        b: whyformer.explain("bundled:sst2", text, "occlusion", baseline=b)
        for b in (None, "mask", "unk", "pad", "delete")
    }
    assert torch.equal(explanations[None].scores, explanations["mask"].scores)
    assert explanations[None].diagnostics["baseline"] == "mask"
    assert len({tuple(e.scores.flatten().tolist()) for e in explanations.values()}) == 4
    for e in explanations.values():
        for row, tokens in zip(e.scores, e.tokens or [], strict=True):
            for score, token in zip(row, tokens, strict=True):
                assert (float(score) == 0) == (token in ("[CLS]", "[SEP]", "[PAD]"))
    words = whyformer.explain("bundled:sst2", text[:1], "occlusion", window=3).scores[0]
    assert words[1:4].eq(words[1]).all()


def test_token_windows_exclude_padding_and_special_tokens() -> None:
    features = torch.tensor([[False, True, True, True, True, True, False]])
    removed = Removal(None, features, "mask", 0)  # type: ignore[arg-type]
    assert list(occlusion._windows(removed, 0, 2, 2)) == [[1, 2], [3, 4], [5]]
    assert list(occlusion._windows(removed, 0, 3, 1)) == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert list(occlusion._windows(removed, 0, 9, 4)) == [[1, 2, 3, 4, 5]]


def test_occlusion_of_vector_inputs() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x.sum(1)

    x = torch.randn(2, 4, 3, dtype=torch.float64)
    result = whyformer.explain(Head().eval(), x, "occlusion", target=1)
    assert torch.allclose(result.scores, x[:, :, 1])
    mean = whyformer.explain(Head().eval(), x, "occlusion", target=1, baseline="mean")
    assert torch.allclose(mean.scores, x[:, :, 1] - x[:, :, 1].mean(1, keepdim=True))


# -- errors --------------------------------------------------------------------------------------------------------
def assert_refused(match: str, name: str, inputs: Any = None, **settings: Any) -> None:
    model, default_inputs = zoo.build(name)
    with pytest.raises(InputError, match=match):
        whyformer.explain(model, default_inputs if inputs is None else inputs, "occlusion", **settings)


def test_invalid_baseline_settings_raise() -> None:
    assert_refused("is not for a picture; its baselines are zero, black, mean, blur", "hf_vit", baseline="mask")
    assert_refused("baseline 3 is not for a picture", "hf_vit", baseline=3)
    assert_refused("'blur' is not for text; its baselines are mask, unk, pad, delete", "bert", baseline="blur")
    assert_refused("config has no unk token", "bert", baseline="unk")
    assert_refused("outside the model's vocabulary of 50", "bert", baseline=50)
    assert_refused("stride=3 must not exceed window=2", "hf_vit", window=2, stride=3)
    assert_refused("window must be a whole number", "hf_vit", window=0)
    assert_refused("the model's value of black is unknown", "hf_vit", baseline="black")
    assert_refused("baseline must be one of", "hf_vit", baseline="white")


def test_occlusion_without_tokenizer_and_mask_uses_pad_token_of_model() -> None:
    ids, (model, _) = {"input_ids": torch.tensor([[4, 5, 6]])}, zoo.build("bert")
    result = whyformer.explain(model, ids, "occlusion", target=1)
    with_pad_token = whyformer.explain(model, ids, "occlusion", target=1, baseline=model.config.pad_token_id)
    assert torch.equal(result.scores, with_pad_token.scores)
    model.config.pad_token_id = None
    with pytest.raises(InputError, match=r"no tokenizer .* no attention_mask .* baseline"):
        whyformer.explain(model, ids, "occlusion", target=1)


def test_mask_baseline_without_mask_token_raises() -> None:
    ids = torch.tensor([[4, 5, 6]])
    inputs = Inputs(
        (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "text", "input_ids", fill_ids=(("unk", 1),),
        special=torch.zeros_like(ids, dtype=torch.bool),
    )  # fmt: skip
    model, _ = zoo.build("bert")
    with pytest.raises(InputError, match=r"tokenizer has no mask token \(it has: unk\)"):
        whyformer.explain(model, inputs, "occlusion", baseline="mask")
    assert whyformer.explain(model, inputs, "occlusion").diagnostics["baseline"] == "unk"


# -- ViT-CX --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReferenceVitCx:
    """Result of the reference implementation of ViT-CX (methods.md §4.1), one sample and one mask at a time."""

    saliency: np.ndarray[Any, Any]
    masks: int


def reference_vit_cx(model: nn.Module, x: Tensor, target: int, norm: str, noise: float, threshold: float) -> ReferenceVitCx:
    from sklearn.cluster import AgglomerativeClustering

    def scaled(m: Tensor) -> Tensor:
        return (m - m.min()) / (m.max() - m.min())

    outputs: list[Tensor] = []
    hook = model.get_submodule(norm).register_forward_hook(lambda m, a, o: outputs.append(o))
    clean = zoo.call(model, x[None])[0].softmax(-1)[target]
    hook.remove()
    features = outputs[0][0, 1:].T.reshape(-1, 4, 4)
    maps = [
        scaled(
            torch.nn.functional.interpolate(f[None, None], size=x.shape[-2:], mode="bilinear", align_corners=False)[
                0, 0
            ]
        )
        for f in features
    ]
    similarity = np.array([[float(a.flatten() @ b.flatten() / a.norm() / b.norm()) for b in maps] for a in maps])
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="precomputed", linkage="complete", distance_threshold=threshold
    )
    labels = clustering.fit_predict(np.clip(1 - similarity, 0, None))
    masks = [scaled(sum(m for m, label in zip(maps, labels, strict=True) if label == k)) for k in range(labels.max() + 1)]
    draws = torch.Generator().manual_seed(0)
    total, cover = torch.zeros(x.shape[-2:], dtype=x.dtype), torch.zeros(x.shape[-2:], dtype=x.dtype)
    for mask in masks:
        z = torch.randn(x.shape, generator=draws, dtype=torch.float64) * noise
        kept_part = zoo.call(model, (x * mask + z * (1 - mask))[None])[0].softmax(-1)[target]
        noisy = zoo.call(model, (x + z * (1 - mask))[None])[0].softmax(-1)[target]
        total += (kept_part - noisy + clean) * mask
        cover += mask
    return ReferenceVitCx((total / cover / len(masks)).numpy(), len(masks))


@pytest.mark.parametrize(
    ("name", "norm"), [("hf_vit", "vit.layers.2.layernorm_before"), ("timm_vit", "blocks.2.norm1")]
)
@pytest.mark.parametrize("threshold", [0.1, 0.3])
def test_vit_cx_equals_reference(name: str, norm: str, threshold: float) -> None:
    model, x = zoo.build(name)
    result = whyformer.explain(model, x, "vit_cx", target=[1, 3], distance_threshold=threshold)
    assert result.level == "pixel"
    for b, target in enumerate([1, 3]):
        expected = reference_vit_cx(model, x[b], target, norm, 0.1, threshold)
        assert result.diagnostics["masks"][b] == expected.masks
        assert result.diagnostics["forwards"][b] == 2 * expected.masks + 1
        assert np.abs(result.scores[b].numpy() - expected.saliency).max() <= 1e-9 * np.abs(expected.saliency).max()


def test_vit_cx_is_reproducible_and_independent_of_batch() -> None:
    model, x = zoo.build("hf_vit")
    settings: dict[str, Any] = {"method": "vit_cx", "target": 2}
    first = whyformer.explain(model, x, **settings).scores
    assert torch.equal(first, whyformer.explain(model, x, **settings).scores)
    assert torch.allclose(first, whyformer.explain(model, x.flip(0), **settings).scores.flip(0), atol=1e-12)
    assert torch.allclose(first, whyformer.explain(model, x, batch_size=1, **settings).scores, atol=1e-12)
    assert not torch.allclose(first, whyformer.explain(model, x, seed=1, **settings).scores, atol=1e-6)
    without_noise = [whyformer.explain(model, x, noise=0, seed=s, **settings).scores for s in (0, 1)]
    assert torch.equal(*without_noise)


def test_vit_cx_output_setting() -> None:
    model, x = zoo.build("hf_vit")
    logit = whyformer.explain(model, x, "vit_cx", target=2, output="target").scores
    assert torch.equal(logit, whyformer.explain(model, x, "vit_cx", target=lambda f: f[:, 2]).scores)
    assert torch.equal(
        whyformer.explain(model, x, "vit_cx", target=2).scores,
        whyformer.explain(model, x, "vit_cx", target=whyformer.targets.Probability(2)).scores,
    )


def test_vit_cx_of_constant_features_is_zero() -> None:
    """If the first norm of the last block returns only its bias, there are no masks and all scores are 0."""
    model, x = zoo.build("hf_vit")
    with torch.no_grad():
        model.vit.layers[-1].layernorm_before.weight.zero_()
    result = whyformer.explain(model, x, "vit_cx")
    assert result.scores.eq(0).all()
    assert result.diagnostics["masks"] == [0, 0]
    # constant maps are skipped, the others are used
    with torch.no_grad():
        model.vit.layers[-1].layernorm_before.weight[:3] = 1
    result = whyformer.explain(model, x, "vit_cx")
    assert all(1 <= k <= 3 for k in result.diagnostics["masks"])
    assert result.scores.abs().max() > 0


def test_vit_cx_clusters_equal_maps() -> None:
    from sklearn.cluster import AgglomerativeClustering

    a, b = torch.eye(4)[None].double(), torch.ones(1, 4, 4).double().tril()
    maps = torch.cat([a, b, a, torch.zeros(1, 4, 4).double(), b])
    assert sorted(vit_cx._clusters(maps, 0.1, AgglomerativeClustering)) == [[0, 2], [1, 4]]
    assert vit_cx._clusters(maps[3:4], 0.1, AgglomerativeClustering) == []
    assert vit_cx._clusters(maps[2:4], 0.1, AgglomerativeClustering) == [[0]]


def test_vit_cx_score_of_uncovered_pixel_is_zero() -> None:
    scaled = vit_cx._scaled(torch.tensor([[[2.0, 4.0], [3.0, 2.0]], [[5.0, 5.0], [5.0, 5.0]]]))
    assert scaled.tolist() == [[[0, 1], [0.5, 0]], [[0, 0], [0, 0]]]
    model, x = zoo.build("hf_vit")
    # a threshold that merges all maps: one mask with minimum 0, so no mask covers that pixel
    result = whyformer.explain(model, x, "vit_cx", distance_threshold=2.0)
    assert result.diagnostics["masks"] == [1, 1]
    assert all((row == 0).sum() >= 1 for row in result.scores)


def test_vit_cx_without_scikit_learn_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    model, x = zoo.build("hf_vit")
    with pytest.raises(MissingExtra, match=r'pip install "whyformer\[methods\]"'):
        whyformer.explain(model, x, "vit_cx")
