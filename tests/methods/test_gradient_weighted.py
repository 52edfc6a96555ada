"""AttCAT, Grad-SAM, LeGrad, AG-CAM and Beyond Intuition: each written out on a BERT that hands its maps out."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.rules.multipliers import CompositeName
from zoo import LENGTHS, bert, build, hf_vit, to

LABELS = torch.tensor([1, 3])
REAL = torch.arange(10) < torch.tensor(LENGTHS)[:, None]
METHODS = ["attcat", "grad_sam", "legrad", "agcam", "beyond_intuition"]


def eager() -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = bert("eager")
    return model.double(), inputs


def passed(model: Any, inputs: dict[str, Tensor], t: float = 1.0) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(hidden states, maps, f of each sample), what enters the first block multiplied by t."""
    handle = model.bert.encoder.layer[0].register_forward_pre_hook(lambda _, args: (args[0] * t, *args[1:]))
    try:
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    finally:
        handle.remove()
    return list(output.hidden_states), list(output.attentions), output.logits.gather(1, LABELS[:, None])[:, 0]


def over_real_queries(maps: Tensor) -> Tensor:
    """``[B, N]`` mean over heads and the query tokens that are no padding of ``[B, H, N, N]``."""
    fused = maps.mean(1) * REAL[..., None]
    return fused.sum(1) / REAL.sum(1, keepdim=True)


def explained(method: str, **settings: Any) -> Tensor:
    model, inputs = build("bert")
    return whyformer.explain(model, inputs, method=method, target=LABELS.tolist(), **settings).scores


def test_attcat() -> None:
    states, maps, value = passed(*eager())
    gradients = torch.autograd.grad(value.sum(), states[:3])
    wanted = sum((h * g).sum(-1) * over_real_queries(a) for h, g, a in zip(states[:3], gradients, maps, strict=True))
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(explained("attcat"), (wanted * REAL).detach())


def test_grad_sam() -> None:
    _, maps, value = passed(*eager())
    gradients = torch.autograd.grad(value.sum(), maps)
    wanted = torch.stack([over_real_queries(a * g.clamp(min=0)) for a, g in zip(maps, gradients, strict=True)]).mean(0)
    torch.testing.assert_close(explained("grad_sam"), (wanted * REAL).detach())


def test_agcam() -> None:
    model, inputs = eager()
    states, maps, value = passed(model, inputs)
    gradients = torch.autograd.grad(value.sum(), maps)
    found = []
    for layer, hidden, gradient in zip(model.bert.encoder.layer, states[:3], gradients, strict=True):
        q, k = (part(hidden).unflatten(-1, (3, -1)).transpose(1, 2) for part in (layer.attention.self.query, layer.attention.self.key))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~REAL[:, None, None], float("-inf"))
        found.append((scores.sigmoid() * gradient.clamp(min=0)).mean(1)[:, 0])
    torch.testing.assert_close(explained("agcam"), torch.stack(found).mean(0).detach())


@pytest.mark.parametrize(("start", "blocks"), [(None, [1, 2]), (0, [0, 1, 2])])
def test_legrad(start: int | None, blocks: list[int]) -> None:
    model, inputs = eager()
    states, maps, _ = passed(model, inputs)
    wanted = torch.zeros(2, 10, dtype=torch.float64)
    for b in blocks:
        if b == 2:  # the last state, which the list of hidden states holds too
            assert len(states) == 4
        mean = (states[b + 1] * REAL[..., None]).sum(1) / REAL.sum(1, keepdim=True)
        verdict = model.classifier(model.bert.pooler.dense(mean).tanh()).gather(1, LABELS[:, None])
        (gradient,) = torch.autograd.grad(verdict.sum(), maps[b], retain_graph=True)
        wanted += over_real_queries(gradient.clamp(min=0))
    torch.testing.assert_close(explained("legrad", start_layer=start), wanted * REAL)


@pytest.mark.parametrize(("variant", "start"), [("token", 1), ("head", 0)])
def test_beyond_intuition(variant: str, start: int) -> None:
    model, inputs = eager()
    states, maps, value = passed(model, inputs)
    gradients = torch.autograd.grad(value.sum(), maps)
    mixed = torch.eye(10, dtype=torch.float64).expand(2, -1, -1)
    for b in range(start, 3):
        layer = model.bert.encoder.layer[b].attention
        if variant == "token":
            handed = layer.self.value(states[b]) @ layer.output.dense.weight.T
            block = maps[b].mean(1) * (handed.norm(dim=-1) / states[b].norm(dim=-1))[:, None]
        else:
            heads = (maps[b].mT @ (gradients[b] * REAL[:, None, None])).abs().mean((-2, -1))
            block = (heads / heads.sum(1, keepdim=True))[..., None, None] * maps[b]
            block = block.sum(1)
        mixed = mixed + block @ mixed
    used = torch.zeros_like(maps[2])
    for t in torch.linspace(0, 1, 4).tolist():
        _, some, value = passed(model, inputs, t)
        used = used + torch.autograd.grad(value.sum(), some[2])[0] / 4
    wanted = (used.clamp(min=0).mean(1) * mixed.abs())[:, 0]
    got = explained("beyond_intuition", variant=variant, steps=4)
    torch.testing.assert_close(got, wanted.detach())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("composite", ["libra", "attnlrp"])
def test_composites_combine_with_either_attention(method: str, composite: str) -> None:
    few = {"steps": 2} if method == "beyond_intuition" else {}
    plain = explained(method, **few)
    results = []
    for attention in ("sdpa", "eager"):
        model, inputs = bert(attention)
        given = {"target": LABELS.tolist(), "composite": composite, **few}
        results.append(whyformer.explain(model.double(), to(inputs, torch.float64), method=method, **given).scores)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(results[0], plain)


@pytest.mark.parametrize("method", METHODS)
def test_every_composite_is_offered(method: str) -> None:
    _, (_, allowed) = "", whyformer.methods.find(method).checks["composite"]
    assert all(allowed(name) for name in get_args(CompositeName))


def test_a_bert_and_a_vit_have_a_map_each() -> None:
    """Of pictures the patches alone, laid out on their grid."""
    model, pixels = hf_vit()
    for method in METHODS:
        found = whyformer.explain(model, pixels, method=method, target=1, **({"steps": 2} if "steps" in whyformer.methods.find(method).settings else {}))
        assert (found.level, found.grid, tuple(found.scores.shape)) == ("patch", (4, 4), (2, 16))
