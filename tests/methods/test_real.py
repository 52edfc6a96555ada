"""Transformer Attribution on a real model and real pictures (they lie beside the checkout; without them this skips)."""

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
# picture -> (class on the first side, class on the other, that side, first of the 14 rows or columns of the other side)
PICTURES = {
    "el3": (ELEPHANT, ZEBRA, LEFT, 7),
    "dogcat2": (RETRIEVER, CAT, LEFT, 7),
    "catdog": (MASTIFF, TIGER_CAT, TOP, 8),
    "el4": (ELEPHANT, ZEBRA, TOP, 7),
    "el5": (ELEPHANT, ZEBRA, TOP, 9),
    "dogbird": (LORIKEET, BASSET, LEFT, 7),
}
# correlation between the pixel maps of the two classes: figures of the prototype that the project started from
CORRELATIONS = {"el3": 0.06, "dogcat2": 0.34, "catdog": 0.55}


@cache
def deit(shared: Path) -> Loaded:
    return load(str(shared / "weights" / "deit_tiny_in1k"))


@cache
def explained(shared: Path, name: str, method: str = "transformer_attribution") -> whyformer.Explanation:
    """The picture for both of its classes, in one batch; the processor squashes it to 224 × 224."""
    loaded = deit(shared)
    with Image.open(shared / "data" / "two_objects" / f"{name}.png") as file:
        picture = file.convert("RGB")
    classes = list(PICTURES[name][:2])
    return whyformer.explain(loaded.model, [picture, picture], method=method, target=classes, processor=loaded.processor)


def correlation(maps: Tensor) -> float:
    return float(torch.corrcoef(maps.flatten(1).double())[0, 1])


@pytest.mark.parametrize("name", CORRELATIONS)
def test_maps_of_two_classes_differ(shared: Path, name: str) -> None:
    assert correlation(explained(shared, name).heatmap()) == pytest.approx(CORRELATIONS[name], abs=0.05)


@pytest.mark.parametrize("name", CORRELATIONS)
def test_rollout_gives_both_classes_one_map(shared: Path, name: str) -> None:
    assert correlation(explained(shared, name, "rollout").heatmap()) == pytest.approx(1)


@pytest.mark.parametrize("name", PICTURES)
def test_relevance_lies_on_the_named_object(shared: Path, name: str) -> None:
    """More of it on the first object's side for its class than for the other's."""
    side, border = PICTURES[name][2:]
    result = explained(shared, name)
    maps = result.scores.clamp(min=0).reshape(2, 14, 14)
    part = maps[:, :border] if side == TOP else maps[:, :, :border]
    shares = part.sum((1, 2)) / maps.sum((1, 2))
    assert float(shares[0]) > float(shares[1]) + 0.01


def test_the_model_sees_what_the_article_lists(shared: Path) -> None:
    """catdog.png: bull mastiff first, boxer second, tiger cat third."""
    result = explained(shared, "catdog")
    assert [name for _, name, _, _ in result.top(0, 3)] == ["bull mastiff", "boxer", "tiger cat"]
    assert result.target_names == ["bull mastiff", "tiger cat"]


def test_relevance_is_conserved_through_all_blocks(shared: Path) -> None:
    for name in PICTURES:
        assert max(explained(shared, name).diagnostics["conservation"]["error"]) < 1e-3


@pytest.mark.slow
def test_masking_what_is_relevant_hurts(shared: Path) -> None:
    """50 pictures, 30 % of the pixels replaced by the mean colour: most relevant, at random, least relevant."""
    loaded = deit(shared)
    files = sorted((shared / "data" / "imagenet_samples").glob("*.jpg"))[::10]
    assert len(files) == 50
    generator = torch.Generator().manual_seed(0)
    kept: dict[str, list[Tensor]] = {}
    for start in range(0, 50, 10):
        pictures = []
        for path in files[start : start + 10]:
            with Image.open(path) as file:
                pictures.append(file.convert("RGB"))
        result = whyformer.explain(loaded.model, pictures, "transformer_attribution", processor=loaded.processor)
        pixels: Any = loaded.processor(images=pictures, return_tensors="pt")["pixel_values"]
        relevance = result.heatmap().flatten(1)
        count = int(0.3 * relevance.shape[1])
        # whole patches at random, which hurts less than single pixels: they spoil every patch
        patches = torch.rand(10, 14, 14, generator=generator).repeat_interleave(16, 1).repeat_interleave(16, 2)
        ranked = {"most": relevance, "least": -relevance, "patches": patches.flatten(1), "pixels": torch.rand(relevance.shape, generator=generator)}
        for kind, ranking in ranked.items():
            chosen = ranking.topk(count, 1).indices
            mask = torch.zeros_like(relevance, dtype=torch.bool).scatter_(1, chosen, True).reshape(10, 1, 224, 224)
            with torch.no_grad():
                probabilities = loaded.model(pixels.masked_fill(mask, 0)).logits.softmax(-1)
            kept.setdefault(kind, []).append(probabilities.gather(1, result.target[:, None])[:, 0])
    left = {kind: float(torch.cat(values).mean()) for kind, values in kept.items()}
    assert left["most"] < left["pixels"] < left["patches"] < left["least"], left
    assert left["most"] < 0.25
