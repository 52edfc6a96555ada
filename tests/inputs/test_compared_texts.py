"""Texts that pictures are compared with, padded as in the training of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import whyformer
from processors import tokenizer
from shrinking import tiny
from whyformer.errors import InputError
from whyformer.targets import Probability
from zoo import randomise

TEXTS = ["what is", "what is here on the left"]
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8))
TEXT = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 120, "max_position_embeddings": 12}
SEEN = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def siglip(masked: bool = False) -> tuple[Any, Any]:
    words = tokenizer()
    words.model_input_names, words.model_max_length = ["input_ids", "attention_mask"][: 1 + masked], 12
    model = hf.SiglipModel(hf.SiglipConfig(text_config={**TEXT, **MARKS, "projection_size": 24}, vision_config=SEEN))
    return randomise(model).double(), hf.SiglipProcessor(SiglipImageProcessorPil(size={"height": 32, "width": 32}), words)


def clip() -> tuple[Any, Any]:
    words = tokenizer()
    words.model_max_length = 12
    model = hf.CLIPModel(hf.CLIPConfig(text_config={**TEXT, **MARKS}, vision_config=SEEN, projection_dim=16))
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return randomise(model).double(), hf.CLIPProcessor(pictures, words)


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS, TEXTS[0]])
def test_texts_without_a_mask_are_padded_to_the_maximum(texts: Any) -> None:
    model, processor = siglip()
    fed = processor(text=texts, images=PICTURE, return_tensors="pt", padding="max_length", max_length=12)
    with torch.no_grad():
        logits = model(input_ids=fed["input_ids"], pixel_values=fed["pixel_values"].double()).logits_per_image
    e = whyformer.explain(model, {"text": texts, "images": PICTURE}, "input_x_gradient", 0, processor)
    assert torch.allclose(e.logits.double(), logits, atol=1e-6)
    assert e.part("input_ids").scores.shape[1] == 12


def test_texts_with_a_mask_are_padded_to_the_longest() -> None:
    for model, processor in (siglip(masked=True), clip()):
        e = whyformer.explain(model, {"text": TEXTS, "images": PICTURE}, "input_x_gradient", 0, processor)
        assert e.part("input_ids").scores.shape[1] == 6


@pytest.mark.parametrize(("build", "activation"), [(siglip, "sigmoid"), (clip, "softmax")])
def test_a_bias_of_all_logits_means_a_sigmoid(build: Any, activation: str) -> None:
    model, processor = build()
    inputs = {"text": TEXTS, "images": PICTURE}
    e = whyformer.explain(model, inputs, "input_x_gradient", Probability(1), processor)
    assert e.activation == activation
    logit = whyformer.explain(model, inputs, "input_x_gradient", 1, processor)
    row = logit.logits[0]
    p = row.sigmoid() if activation == "sigmoid" else row.softmax(0)
    assert {index: probability for index, _, _, probability in e.top(0)} == pytest.approx(dict(enumerate(p.tolist())), rel=1e-4)
    if activation == "sigmoid":  # not of the other text
        assert torch.allclose(e.scores, logit.scores * p[1] * (1 - p[1]), rtol=1e-4, atol=1e-9)


def clap() -> tuple[Any, dict[str, torch.Tensor]]:
    sound = {"window_size": 4, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4], "hidden_size": 32, "patch_embeds_hidden_size": 16}
    sizes = {"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2, "projection_dim": 16, "enable_fusion": False}
    text = {**TEXT, "max_position_embeddings": 30, "projection_dim": 16}
    model = randomise(hf.ClapModel(hf.ClapConfig(audio_config={**sound, **sizes}, text_config=text, projection_dim=16)))
    return model, {"input_ids": torch.randint(4, 100, (3, 6)), "input_features": torch.randn(2, 1, 64, 16)}


def xclip() -> tuple[Any, dict[str, torch.Tensor]]:
    model = tiny("XCLIPModel", {}, None)
    return model, {"input_ids": torch.randint(5, 100, (3, 7)), "pixel_values": torch.randn(2, 4, 3, 32, 32)}


@pytest.mark.parametrize(("build", "table"), [(clap, "logits_per_audio"), (xclip, "logits_per_video")])
def test_sounds_and_videos_are_compared_as_pictures_are(build: Any, table: str) -> None:
    model, inputs = build()
    name = next(n for n in inputs if n != "input_ids")
    e = whyformer.explain(model, inputs, "input_x_gradient", [1, 2])
    values = inputs[name].clone().requires_grad_()
    logits = model(**{**inputs, name: values})[table]
    (gradient,) = torch.autograd.grad(logits[0, 1] + logits[1, 2], values)
    assert torch.allclose(e.part(name).scores.flatten(1).sum(1), (values * gradient).flatten(1).sum(1), atol=1e-5)
    assert torch.allclose(e.logits, logits, atol=1e-5)
    assert e.activation == "softmax"
    for i, text in enumerate((1, 2)):
        single = whyformer.explain(model, {**inputs, name: inputs[name][i : i + 1]}, "input_x_gradient", text)
        for part in (name, "input_ids"):
            assert torch.allclose(single.part(part).scores[0], e.part(part).scores[i], atol=1e-5)
    with pytest.raises(InputError, match="index of a text"):
        whyformer.explain(model, inputs, "input_x_gradient")
@pytest.mark.parametrize("pictures", [1, 3])
@pytest.mark.parametrize("build", [siglip, clip])
def test_a_single_text_needs_no_target(build: Any, pictures: int) -> None:
    model, processor = build()
    inputs = {"text": TEXTS[1], "images": [PICTURE.rotate(90 * i) for i in range(pictures)]}
    e = whyformer.explain(model, inputs, "input_x_gradient", None, processor)
    expected = whyformer.explain(model, inputs, "input_x_gradient", 0, processor)
    assert e.logits.shape == (pictures, 1) and e.target_names == expected.target_names
    assert all(torch.equal(e.part(name).scores, expected.part(name).scores) for name in ("pixel_values", "input_ids"))
    with pytest.raises(InputError, match="target"):
        whyformer.explain(model, {**inputs, "text": TEXTS}, "input_x_gradient", None, processor)


@pytest.mark.parametrize(("build", "activation"), [(siglip, "sigmoid"), (clip, "softmax")])
def test_activation_does_not_depend_on_earlier_work(build: Any, activation: str) -> None:
    model, processor = build()
    explainer = whyformer.Explainer(model, processor)
    assert explainer.prepare({"text": TEXTS, "images": PICTURE}).activation(2) == activation
    model, processor = build()
    fed = dict(processor(text=TEXTS, images=PICTURE, return_tensors="pt", padding=True))
    with pytest.raises((InputError, RuntimeError, ValueError)):
        whyformer.explain(model, {**fed, "pixel_values": torch.zeros(1, 3, 24, 40)}, "input_x_gradient", 0)
    assert whyformer.explain(model, fed, "input_x_gradient", 0).activation == activation
