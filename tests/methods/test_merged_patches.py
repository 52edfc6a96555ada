"""Vision-language models that merge image patches: rollout against a reference from the model's own maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import whyformer
import zoo
from architectures import Architecture, listed
from outcomes import row
from whyformer.errors import MethodNotApplicable

FAMILIES = ["gemma3", "internvl", "qwen2_vl", "idefics3"]


def architecture(family: str) -> Architecture:
    return next(a for a in listed() if a.kind == "vision and language" and a.family == family)


def build_model(family: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    model, inputs = architecture(family).build()
    # this implementation returns attention maps
    model.set_attn_implementation("eager")
    return model.double().eval(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_equals_reference(family: str) -> None:
    model, inputs = build_model(family)
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    ids = inputs["input_ids"]
    scores = torch.zeros(*ids.shape).double()
    scores[torch.arange(len(ids)), inputs["attention_mask"].sum(1) - 1] = 1  # the last token is read out
    for attention in reversed(maps):
        augmented = attention.mean(1) + torch.eye(ids.shape[1]).double()
        scores = torch.einsum("bq,bqk->bk", scores, augmented / augmented.sum(-1, keepdim=True))
    is_image = ids == model.config.image_token_id
    e = whyformer.explain(model, inputs, "rollout", [70, 81])
    assert torch.allclose(e.part("input_ids").scores, scores.masked_fill(is_image, 0), atol=1e-12)
    image_scores, expected = e.part("pixel_values").scores.flatten(), scores[is_image]
    per_row = len(image_scores) // len(expected)  # merged patches share the score of their row
    assert torch.allclose(image_scores, expected.repeat_interleave(per_row) / per_row, atol=1e-12)


@pytest.mark.parametrize("method", ["gae", "grad_sam", "norm_attention", "value_zeroing", "gradcam", "libragrad", "partial_lrp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_equals_single_samples(family: str, method: str) -> None:
    model, inputs = build_model(family)
    batch = whyformer.explain(model, inputs, method, [70, 81])
    single = whyformer.explain(model, row(inputs, 0, crop=False), method, 70)
    for name in ("pixel_values", "input_ids"):
        scores = batch.part(name).scores[0]
        assert torch.allclose(scores, single.part(name).scores[0], rtol=1e-8, atol=1e-10 * float(scores.abs().max()))


def test_raw_attention_of_shifted_windows_equals_reference() -> None:
    model, x = zoo.hf_swin()
    model, x = model.double().eval(), x.double()
    model.set_attn_implementation("eager")
    states: list[Tensor] = []
    handle = model.swin.layernorm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    out = model(x, output_attentions=True)
    handle.remove()
    # the windows of 4 × 4 of the last block are shifted by 2 on a grid of 8 × 8
    window_indices = torch.arange(64).view(8, 8).roll((-2, -2), (0, 1)).unflatten(0, (2, 4)).unflatten(2, (2, 4)).transpose(1, 2)
    maps, full_maps = out.attentions[-1].unflatten(0, (len(x), 4)).mean(2), torch.zeros(len(x), 64, 64).double()
    for window, indices in enumerate(window_indices.reshape(4, 16)):
        full_maps[:, indices[:, None], indices] = maps[:, window]
    (gradient,) = torch.autograd.grad(out.logits.square().sum() / 2, states[0])
    row_read = gradient.norm(dim=-1) / gradient.norm(dim=-1).sum(1, keepdim=True)
    e = whyformer.explain(model, x, "raw_attention", 0)
    assert e.grid == (8, 8)
    assert torch.allclose(e.scores.double(), torch.einsum("bq,bqk->bk", row_read, full_maps), atol=1e-7)


def test_raw_attention_of_earlier_resolution_is_refused() -> None:
    model, x = zoo.hf_swin()
    with pytest.raises(MethodNotApplicable, match="resolutions"):
        whyformer.explain(model, x, "raw_attention", 0, block=0)
