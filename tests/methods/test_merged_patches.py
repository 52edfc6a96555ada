"""Language models whose pictures are patches that were merged on the way: rollout by hand from the model's own maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import whyformer
from architectures import Architecture, listed
from outcomes import row

FAMILIES = ["gemma3", "internvl", "qwen2_vl", "idefics3"]


def architecture(family: str) -> Architecture:
    return next(a for a in listed() if a.kind == "vision and language" and a.family == family)


def built(family: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    model, inputs = architecture(family).build()
    # with an implementation that returns its maps
    model.set_attn_implementation("eager")
    return model.double().eval(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_by_hand(family: str) -> None:
    model, inputs = built(family)
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    ids = inputs["input_ids"]
    scores = torch.zeros(*ids.shape).double()
    scores[torch.arange(len(ids)), inputs["attention_mask"].sum(1) - 1] = 1  # the last token is read out
    for one in reversed(maps):
        kept = one.mean(1) + torch.eye(ids.shape[1]).double()
        scores = torch.einsum("bq,bqk->bk", scores, kept / kept.sum(-1, keepdim=True))
    is_picture = ids == model.config.image_token_id
    e = whyformer.explain(model, inputs, "rollout", [70, 81])
    assert torch.allclose(e.part("input_ids").scores, scores.masked_fill(is_picture, 0), atol=1e-12)
    picture, wanted = e.part("pixel_values").scores.flatten(), scores[is_picture]
    each = len(picture) // len(wanted)  # packed patches, of which each row is made of several, share its score
    assert torch.allclose(picture, wanted.repeat_interleave(each) / each, atol=1e-12)


@pytest.mark.parametrize("method", ["gae", "norm_attention", "value_zeroing", "gradcam", "libragrad", "partial_lrp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_samples(family: str, method: str) -> None:
    model, inputs = built(family)
    both = whyformer.explain(model, inputs, method, [70, 81])
    one = whyformer.explain(model, row(inputs, 0, crop=False), method, 70)
    for name in ("pixel_values", "input_ids"):
        scores = both.part(name).scores[0]
        assert torch.allclose(scores, one.part(name).scores[0], rtol=1e-8, atol=1e-10 * float(scores.abs().max()))
