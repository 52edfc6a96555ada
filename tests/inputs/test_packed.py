"""Models that pack the images of all samples into one row ``[1, C, p, p · patches]`` are explained one sample at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import whyformer
from shrinking import tiny
from tiny_inputs import noise, words
from tiny_settings import SETTINGS
from whyformer.errors import InputError

MARK, SIDE = 5, 4
CLASSES = {"minicpm_ocr": "MiniCPMOcr", "minicpmv4_6": "MiniCPMV4_6", "minicpmv4_7": "MiniCPMV4_7"}


def built(family: str, samples: int) -> tuple[Any, dict[str, Tensor]]:
    settings = {**copy.deepcopy(SETTINGS[family]), "image_token_id": MARK}
    model = tiny(f"{CLASSES[family]}ForConditionalGeneration", settings).double()
    patch = model.config.vision_config.patch_size
    inputs = {"pixel_values": noise(1, 3, patch, patch * SIDE**2 * samples).double(), "target_sizes": torch.tensor([[SIDE, SIDE]] * samples, dtype=torch.int32)}
    with torch.no_grad():
        rows = len(model.base_model.get_image_features(**inputs).pooler_output[0])
    ids = words(10, (10,) * samples)["input_ids"]
    ids = torch.cat([ids[:, :1], torch.full((samples, rows), MARK), ids[:, 1:]], 1)
    kinds = {"mm_token_type_ids": (ids == MARK).long()} if family == "minicpmv4_7" else {}
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs, **kinds}


@pytest.mark.parametrize("family", CLASSES)
def test_scores_of_single_sample_equal_autograd_and_occlusion(family: str) -> None:
    model, inputs = built(family, 1)
    e = whyformer.explain(model, inputs, "input_x_gradient", 70)
    leaf = inputs["pixel_values"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(**{**inputs, "pixel_values": leaf}).logits[0, -1, 70], leaf)
    expected = (leaf.detach() * gradient).sum(1)
    # parts of the model compute in float32, whose rounding differs between processors
    torch.testing.assert_close(e.part("pixel_values").scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    ids = e.part("input_ids")
    assert ids.scores.shape == inputs["input_ids"].shape
    assert ids.scores[inputs["input_ids"] == MARK].eq(0).all() and ids.scores[inputs["input_ids"] != MARK].ne(0).any()
    patch = model.config.vision_config.patch_size
    e = whyformer.explain(model, inputs, "occlusion", 70, batch_size=1, patch=patch)  # perturbed copies cannot be batched
    occluded = inputs["pixel_values"].clone()
    occluded[..., 2 * patch : 3 * patch] = 0
    with torch.no_grad():
        drop = (model(**inputs).logits - model(**{**inputs, "pixel_values": occluded}).logits)[0, -1, 70]
    torch.testing.assert_close(e.part("pixel_values").scores[0, 2], drop)


@pytest.mark.parametrize("family", ["minicpm_ocr", "minicpmv4_6"])
@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp"])
def test_several_samples_in_one_row_raise(family: str, method: str) -> None:
    model, inputs = built(family, 2)
    with pytest.raises(InputError, match=r"2 rows of logits for a batch of 1 in pixel_values.*one at a time"):
        whyformer.explain(model, inputs, method, 70)
