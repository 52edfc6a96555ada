"""Transformer Attribution on a pretrained model and photographs; skipped without the folder of data and weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import whyformer
from whyformer.models.loading import Loaded, load

ELEPHANT, ZEBRA, RETRIEVER, CAT, MASTIFF, TIGER_CAT, LORIKEET, BASSET = 386, 340, 207, 285, 243, 282, 90, 161
TOP, LEFT = "top", "left"
# image -> (class on the first side, class on the second, name of the first side, first of the 14 rows or columns of the second)
IMAGES = {
    "el3": (ELEPHANT, ZEBRA, LEFT, 7),
    "dogcat2": (RETRIEVER, CAT, LEFT, 7),
    "catdog": (MASTIFF, TIGER_CAT, TOP, 8),
    "el4": (ELEPHANT, ZEBRA, TOP, 7),
    "el5": (ELEPHANT, ZEBRA, TOP, 9),
    "dogbird": (LORIKEET, BASSET, LEFT, 7),
}
# correlation between the pixel maps of the two classes, as measured with an earlier implementation
CORRELATIONS = {"el3": 0.06, "dogcat2": 0.34, "catdog": 0.55}


@cache
def deit(shared: Path) -> Loaded:
    return load(str(shared / "weights" / "deit_tiny_in1k"))


@cache
def explain_both_classes(shared: Path, name: str, method: str = "transformer_attribution") -> whyformer.Explanation:
    """Explain both classes of an image in one batch; the processor resizes it to 224 × 224."""
    loaded = deit(shared)
    with Image.open(shared / "data" / "two_objects" / f"{name}.png") as file:
        image = file.convert("RGB")
    classes = list(IMAGES[name][:2])
    return whyformer.explain(loaded.model, [image, image], method=method, target=classes, processor=loaded.processor)


def correlation(maps: Tensor) -> float:
    return float(torch.corrcoef(maps.flatten(1).double())[0, 1])


@pytest.mark.parametrize("name", CORRELATIONS)
def test_heatmaps_of_two_classes_differ(shared: Path, name: str) -> None:
    assert correlation(explain_both_classes(shared, name).heatmap()) == pytest.approx(CORRELATIONS[name], abs=0.05)


@pytest.mark.parametrize("name", CORRELATIONS)
def test_rollout_is_same_for_both_classes(shared: Path, name: str) -> None:
    assert correlation(explain_both_classes(shared, name, "rollout").heatmap()) == pytest.approx(1)


@pytest.mark.parametrize("name", IMAGES)
def test_relevance_is_larger_on_target_object(shared: Path, name: str) -> None:
    """The side of the first object has a larger share of relevance for its class than for the other class."""
    side, border = IMAGES[name][2:]
    result = explain_both_classes(shared, name)
    maps = result.scores.clamp(min=0).reshape(2, 14, 14)
    part = maps[:, :border] if side == TOP else maps[:, :, :border]
    shares = part.sum((1, 2)) / maps.sum((1, 2))
    assert float(shares[0]) > float(shares[1]) + 0.01


def test_top_classes_of_catdog_image(shared: Path) -> None:
    """catdog.png: bull mastiff first, boxer second, tiger cat third."""
    result = explain_both_classes(shared, "catdog")
    assert [name for _, name, _, _ in result.top(0, 3)] == ["bull mastiff", "boxer", "tiger cat"]
    assert result.target_names == ["bull mastiff", "tiger cat"]


def test_relevance_is_conserved_through_all_blocks(shared: Path) -> None:
    for name in IMAGES:
        assert max(explain_both_classes(shared, name).diagnostics["conservation"]["error"]) < 1e-3


@pytest.mark.slow
def test_masking_relevant_pixels_lowers_probability(shared: Path) -> None:
    """25 images with 30 % of pixels replaced by the mean colour: most relevant, random, least relevant."""
    loaded = deit(shared)
    files = sorted((shared / "data" / "imagenet_samples").glob("*.jpg"))[::20]
    assert len(files) == 25
    generator = torch.Generator().manual_seed(0)
    probabilities_by_ranking: dict[str, list[Tensor]] = {}
    for start in range(0, 25, 5):
        images = []
        for path in files[start : start + 5]:
            with Image.open(path) as file:
                images.append(file.convert("RGB"))
        result = whyformer.explain(loaded.model, images, "transformer_attribution", processor=loaded.processor)
        pixels: Any = loaded.processor(images=images, return_tensors="pt")["pixel_values"]
        relevance = result.heatmap().flatten(1)
        count = int(0.3 * relevance.shape[1])
        # random patches lower the probability less than random pixels, which disturb every patch
        patches = torch.rand(5, 14, 14, generator=generator).repeat_interleave(16, 1).repeat_interleave(16, 2)
        ranked = {"most": relevance, "least": -relevance, "patches": patches.flatten(1), "pixels": torch.rand(relevance.shape, generator=generator)}
        for kind, ranking in ranked.items():
            pixel_indices = ranking.topk(count, 1).indices
            mask = torch.zeros_like(relevance, dtype=torch.bool).scatter_(1, pixel_indices, True).reshape(5, 1, 224, 224)
            with torch.no_grad():
                probabilities = loaded.model(pixels.masked_fill(mask, 0)).logits.softmax(-1)
            probabilities_by_ranking.setdefault(kind, []).append(probabilities.gather(1, result.target[:, None])[:, 0])
    mean_probability = {kind: float(torch.cat(values).mean()) for kind, values in probabilities_by_ranking.items()}
    assert mean_probability["most"] < mean_probability["pixels"] < mean_probability["patches"] < mean_probability["least"], mean_probability
    assert mean_probability["most"] < 0.25
