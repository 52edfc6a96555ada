"""AttCAT, Grad-SAM, LeGrad, AG-CAM and Beyond Intuition against references on a BERT that returns its attention maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from whyformer.rules.multipliers import CompositeName
from zoo import LENGTHS, bert, build, hf_vit, to

LABELS = torch.tensor([1, 3])
REAL = torch.arange(10) < torch.tensor(LENGTHS)[:, None]
METHODS = ["attcat", "grad_sam", "legrad", "agcam", "beyond_intuition"]


def eager_bert() -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = bert("eager")
    return model.double(), inputs


def forward(model: Any, inputs: dict[str, Tensor], t: float = 1.0) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(hidden states, maps, f of each sample) with the input of the first block multiplied by t."""
    handle = model.bert.encoder.layer[0].register_forward_pre_hook(lambda _, args: (args[0] * t, *args[1:]))
    try:
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    finally:
        handle.remove()
    return list(output.hidden_states), list(output.attentions), output.logits.gather(1, LABELS[:, None])[:, 0]


def over_real_queries(maps: Tensor) -> Tensor:
    """Mean ``[B, N]`` of ``[B, H, N, N]`` over heads and over queries that are not padding."""
    fused = maps.mean(1) * REAL[..., None]
    return fused.sum(1) / REAL.sum(1, keepdim=True)


def explain(method: str, **settings: Any) -> Tensor:
    model, inputs = build("bert")
    return whyformer.explain(model, inputs, method=method, target=LABELS.tolist(), **settings).scores


def test_attcat() -> None:
    states, maps, value = forward(*eager_bert())
    gradients = torch.autograd.grad(value.sum(), states[:3])
    expected = sum((h * g).sum(-1) * over_real_queries(a) for h, g, a in zip(states[:3], gradients, maps, strict=True))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(explain("attcat"), (expected * REAL).detach())


def test_grad_sam() -> None:
    _, maps, value = forward(*eager_bert())
    gradients = torch.autograd.grad(value.sum(), maps)
    expected = torch.stack([over_real_queries(a * g.clamp(min=0)) for a, g in zip(maps, gradients, strict=True)]).mean(0)
    torch.testing.assert_close(explain("grad_sam"), (expected * REAL).detach())


def test_agcam() -> None:
    model, inputs = eager_bert()
    states, maps, value = forward(model, inputs)
    gradients = torch.autograd.grad(value.sum(), maps)
    maps_of_blocks = []
    for layer, hidden, gradient in zip(model.bert.encoder.layer, states[:3], gradients, strict=True):
        q, k = (part(hidden).unflatten(-1, (3, -1)).transpose(1, 2) for part in (layer.attention.self.query, layer.attention.self.key))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~REAL[:, None, None], float("-inf"))
        maps_of_blocks.append((scores.sigmoid() * gradient.clamp(min=0)).mean(1)[:, 0])
    torch.testing.assert_close(explain("agcam"), torch.stack(maps_of_blocks).mean(0).detach())


@pytest.mark.parametrize(("start", "blocks"), [(None, [1, 2]), (0, [0, 1, 2])])
def test_legrad(start: int | None, blocks: list[int]) -> None:
    model, inputs = eager_bert()
    states, maps, _ = forward(model, inputs)
    expected = torch.zeros(2, 10, dtype=torch.float64)
    for b in blocks:
        if b == 2:  # hidden_states includes the final state
            assert len(states) == 4
        mean = (states[b + 1] * REAL[..., None]).sum(1) / REAL.sum(1, keepdim=True)
        logits = model.classifier(model.bert.pooler.dense(mean).tanh()).gather(1, LABELS[:, None])
        (gradient,) = torch.autograd.grad(logits.sum(), maps[b], retain_graph=True)
        expected += over_real_queries(gradient.clamp(min=0))
    torch.testing.assert_close(explain("legrad", start_layer=start), expected * REAL)


@pytest.mark.parametrize(("variant", "start"), [("token", 1), ("head", 0)])
def test_beyond_intuition(variant: str, start: int) -> None:
    model, inputs = eager_bert()
    states, maps, value = forward(model, inputs)
    gradients = torch.autograd.grad(value.sum(), maps)
    rollout = torch.eye(10, dtype=torch.float64).expand(2, -1, -1)
    for b in range(start, 3):
        layer = model.bert.encoder.layer[b].attention
        if variant == "token":
            projected = layer.self.value(states[b]) @ layer.output.dense.weight.T
            block = maps[b].mean(1) * (projected.norm(dim=-1) / states[b].norm(dim=-1))[:, None]
        else:
            heads = (maps[b].mT @ (gradients[b] * REAL[:, None, None])).abs().mean((-2, -1))
            block = (heads / heads.sum(1, keepdim=True))[..., None, None] * maps[b]
            block = block.sum(1)
        rollout = rollout + block @ rollout
    mean_gradient = torch.zeros_like(maps[2])
    for t in torch.linspace(0, 1, 4).tolist():
        _, maps_at_t, value = forward(model, inputs, t)
        mean_gradient = mean_gradient + torch.autograd.grad(value.sum(), maps_at_t[2])[0] / 4
    expected = (mean_gradient.clamp(min=0).mean(1) * rollout.abs())[:, 0]
    scores = explain("beyond_intuition", variant=variant, steps=4)
    torch.testing.assert_close(scores, expected.detach())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("composite", ["libra", "attnlrp"])
def test_composite_gives_same_scores_with_sdpa_and_eager_attention(method: str, composite: str) -> None:
    options = {"steps": 2} if method == "beyond_intuition" else {}
    plain = explain(method, **options)
    results = []
    for attention in ("sdpa", "eager"):
        model, inputs = bert(attention)
        arguments = {"target": LABELS.tolist(), "composite": composite, **options}
        results.append(whyformer.explain(model.double(), to(inputs, torch.float64), method=method, **arguments).scores)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(results[0], plain)


@pytest.mark.parametrize("method", METHODS)
def test_every_composite_is_valid(method: str) -> None:
    _, (_, allowed) = "", whyformer.methods.find(method).checks["composite"]
    assert all(allowed(name) for name in get_args(CompositeName))


def test_image_has_patch_scores_on_grid() -> None:
    """Images have one score per patch, on a grid."""
    model, pixels = hf_vit()
    for method in METHODS:
        explanation = whyformer.explain(model, pixels, method=method, target=1, **({"steps": 2} if "steps" in whyformer.methods.find(method).settings else {}))
        assert (explanation.level, explanation.grid, tuple(explanation.scores.shape)) == ("patch", (4, 4), (2, 16))


class MappedAttention(nn.Module):
    """One attention over vectors; ``finish`` turns the scores ``[B, H, N, N]`` into the map."""

    def __init__(self, finish: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.finish, self.qkv, self.out, self.head = finish, nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 3)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        return q @ k.mT, v

    def read(self, x: Tensor, weights: Tensor, v: Tensor) -> Tensor:
        return self.head((x + self.out((weights @ v).transpose(1, 2).flatten(2)))[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        scores, v = self.parts(x)
        return self.read(x, self.finish(scores), v)


def with_sink(scores: Tensor) -> Tensor:
    return torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]


def mixed_over_heads(scores: Tensor) -> Tensor:
    return torch.einsum("bhij,gh->bgij", scores.softmax(-1), torch.tensor([[1.0, -0.5], [-0.3, 1.0]]).to(scores))


def scaled_without_sink(scores: Tensor) -> Tensor:
    return 1.5 * with_sink(scores)


def transposed_and_scaled(scores: Tensor) -> Tensor:
    return (with_sink(scores.transpose(0, 1)) * 2).transpose(0, 1).contiguous()


@pytest.mark.parametrize("finish", [with_sink, scaled_without_sink, transposed_and_scaled])
def test_agcam_uses_the_scores_of_the_map_without_its_sink(finish: Callable[[Tensor], Tensor]) -> None:
    model, x = MappedAttention(finish).double().eval(), torch.randn(2, 5, 6, dtype=torch.double)
    scores, v = model.parts(x)
    weights = finish(scores).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.read(x, weights, v)[:, 1].sum(), weights)
    expected = (scores.sigmoid() * gradient.clamp(min=0)).mean(1)[:, 0]
    torch.testing.assert_close(whyformer.explain(model, x, "agcam", target=1).scores, expected.detach())


def test_agcam_refuses_maps_without_scores() -> None:
    model, x = MappedAttention(mixed_over_heads).eval(), torch.randn(2, 5, 6)
    with pytest.raises(ModelError, match="grad_sam"):
        whyformer.explain(model, x, "agcam")
    assert whyformer.explain(model, x, "grad_sam").scores.any()


def test_norms_of_heads_with_negative_weights() -> None:
    model, x = MappedAttention(mixed_over_heads).double().eval(), torch.randn(2, 5, 6, dtype=torch.double)
    scores, v = model.parts(x)
    vectors = torch.einsum("bhij,bhjd,ohd->bhijo", mixed_over_heads(scores), v, model.out.weight.unflatten(1, (2, 3)))
    found = whyformer.explain(model, x, "norm_attention", scope="heads", block=0).scores
    torch.testing.assert_close(found, vectors.norm(dim=-1).mean(1)[:, 0].detach())
