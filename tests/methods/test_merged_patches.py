"""Language models whose pictures are patches that were merged on the way: rollout by hand from the model's own maps."""

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


@pytest.mark.parametrize("method", ["gae", "grad_sam", "norm_attention", "value_zeroing", "gradcam", "libragrad", "partial_lrp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_samples(family: str, method: str) -> None:
    model, inputs = built(family)
    both = whyformer.explain(model, inputs, method, [70, 81])
    one = whyformer.explain(model, row(inputs, 0, crop=False), method, 70)
    for name in ("pixel_values", "input_ids"):
        scores = both.part(name).scores[0]
        assert torch.allclose(scores, one.part(name).scores[0], rtol=1e-8, atol=1e-10 * float(scores.abs().max()))


def test_attention_of_the_last_block_of_windows_by_hand() -> None:
    model, x = zoo.hf_swin()
    model, x = model.double().eval(), x.double()
    model.set_attn_implementation("eager")
    states: list[Tensor] = []
    handle = model.swin.layernorm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    out = model(x, output_attentions=True)
    handle.remove()
    # the last block's windows of 4 × 4 are moved by 2 on a grid of 8 × 8
    places = torch.arange(64).view(8, 8).roll((-2, -2), (0, 1)).unflatten(0, (2, 4)).unflatten(2, (2, 4)).transpose(1, 2)
    maps, whole = out.attentions[-1].unflatten(0, (len(x), 4)).mean(2), torch.zeros(len(x), 64, 64).double()
    for window, own in enumerate(places.reshape(4, 16)):
        whole[:, own[:, None], own] = maps[:, window]
    (gradient,) = torch.autograd.grad(out.logits.square().sum() / 2, states[0])
    row_read = gradient.norm(dim=-1) / gradient.norm(dim=-1).sum(1, keepdim=True)
    e = whyformer.explain(model, x, "raw_attention", 0)
    assert e.grid == (8, 8)
    assert torch.allclose(e.scores.double(), torch.einsum("bq,bqk->bk", row_read, whole), atol=1e-7)


def test_earlier_resolutions_have_no_map_over_the_last_rows() -> None:
    model, x = zoo.hf_swin()
    with pytest.raises(MethodNotApplicable, match="resolutions"):
        whyformer.explain(model, x, "raw_attention", 0, block=0)
