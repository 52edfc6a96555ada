"""Named composites against stored reference values, and against a toy model that implements the rules with detach."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import whyformer
from whyformer.rules.multipliers import COMPOSITES

NAMES = sorted(COMPOSITES)


def half_gradient(x):
    return x / 2 + (x / 2).detach()



class HalfTemperatureSoftmax(torch.autograd.Function):
    """softmax with the derivative of softmax(x / 2)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x / 2).softmax(-1))
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return torch.diag_embed(p).sub(p[..., :, None] * p[..., None, :]).matmul(g[..., None])[..., 0]


class GatedMlpBlock(nn.Module):
    """Pre-norm attention and a gated MLP; ``rules`` is the composite to implement, None for the plain model."""

    def __init__(self, width, fused):
        super().__init__()
        self.fused, self.rules, self.maps = fused, None, []
        self.norm1, self.norm2 = nn.LayerNorm(width, dtype=torch.float64), nn.LayerNorm(width, dtype=torch.float64)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, nn.Linear(width, width, bias=name in "qk", dtype=torch.float64))

    def norm(self, layer, x):
        if self.rules in (None, "plain", "ah"):
            return layer(x)
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt().detach()
        return centred / deviation * layer.weight + layer.bias

    def attend(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.fused and self.rules is None:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            halves = self.rules in ("attnlrp", "gim")
            scores = q @ k.mT
            scores = (half_gradient(scores) if halves else scores) / math.sqrt(q.shape[-1])
            weights = HalfTemperatureSoftmax.apply(scores) if self.rules == "gim" else scores.softmax(-1)
            if self.rules in ("ah", "ah_ln", "libra", "cp_lrp"):
                weights = weights.detach().requires_grad_()
            elif self.rules is not None and not weights.requires_grad:
                weights.requires_grad_()
            self.maps.append(weights)
            mixed = weights @ v
            mixed = half_gradient(mixed) if halves else mixed
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def activate(self, x):
        y = F.silu(x)
        return y if self.rules not in ("libra", "attnlrp", "cp_lrp") else x * (y / x).detach()

    def forward(self, x):
        x = x + self.attend(self.norm(self.norm1, x))
        h = self.norm(self.norm2, x)
        gate, up = self.activate(self.gate(h)), self.up(h)
        if self.rules == "cp_lrp":
            gate = gate.detach()
        product = gate * up
        return x + self.down(half_gradient(product) if self.rules in ("libra", "attnlrp", "gim") else product)


class ToyModel(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(GatedMlpBlock(8, fused) for _ in range(3))
        self.head = nn.Linear(8, 3, bias=False, dtype=torch.float64)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])

    def reference(self, ids, target, rules):
        """(h_b, ∂/∂h_b of each block, (A, ∇A) of each block) with the rules, by autograd."""
        x = self.embedding(ids).detach().requires_grad_()
        block_inputs, maps = [], []
        for block in self.blocks:
            block.rules, block.maps = rules, []
            block_inputs.append(x)
            x = block(x)
            maps += block.maps
            block.rules = None
        value = self.head(x[:, 0])[:, target].sum()
        result = torch.autograd.grad(value, [*block_inputs, *maps])
        return block_inputs, result[: len(block_inputs)], list(zip(maps, result[len(block_inputs) :], strict=True))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("composite", NAMES)
def test_composite_equals_model_with_its_rules(composite, fused, ids):
    model = ToyModel(fused).eval()
    block_inputs, gradients, maps = model.reference(ids, 2, composite)
    result = whyformer.explain(model, {"input_ids": ids}, "input_x_gradient", target=2, composite=composite).scores
    torch.testing.assert_close(result, (block_inputs[0] * gradients[0]).sum(-1).detach(), rtol=1e-10, atol=1e-12)
    result = whyformer.explain(model, {"input_ids": ids}, "libragrad", target=2, composite=composite).scores
    expected = sum((h * block_gradient).sum(-1) for h, block_gradient in zip(block_inputs, gradients, strict=True)).detach()
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
    rows = torch.zeros(2, 1, 5, dtype=torch.float64)
    rows[:, :, 0] = 1
    for weights, gradient in reversed(maps):
        rows = rows + rows @ (weights * gradient).clamp(min=0).mean(1).detach()
    result = whyformer.explain(model, {"input_ids": ids}, "gae", target=2, composite=composite).scores
    torch.testing.assert_close(result, rows[:, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("method", "composite"), [("attnlrp", "attnlrp"), ("cp_lrp", "cp_lrp"), ("gim", "gim")])
def test_share_sums_over_first_blocks(method, composite, ids):
    model = ToyModel().eval()
    block_inputs, gradients, _ = model.reference(ids, 1, composite)
    products = [(h * gradient).sum(-1).detach() for h, gradient in zip(block_inputs, gradients, strict=True)]
    for share, count in ((0.0, 1), (0.3, 1), (1 / 3 + 1e-16, 1), (0.5, 2), (1.0, 3)):
        result = whyformer.explain(model, {"input_ids": ids}, method, target=1, share=share).scores
        torch.testing.assert_close(result, sum(products[:count]), rtol=1e-10, atol=1e-12)


# -- stored reference values ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["eager", "sdpa"])
def llama(request, shared):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = shared / "golden" / "lxt_llama_tiny"
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = request.param
    model = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(load_file(folder / "state_dict.safetensors"), strict=False)
    # rotary frequencies are computed in float32 when the model is built
    return model, {"input_ids": torch.from_numpy(np.load(folder / "input_ids.npy"))}


def test_attnlrp_equals_reference_values(llama, shared):
    model, inputs = llama
    folder = shared / "golden" / "lxt_llama_tiny"
    expected, targets = np.load(folder / "attnlrp_efficient_f64exact.npy"), np.load(folder / "targets.npy")
    for k in range(targets.shape[1]):
        result = whyformer.explain(model, inputs, "attnlrp", target=targets[:, k].tolist()).scores.numpy()
        assert np.abs(result - expected[:, k]).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("method", "settings"),
    [("libragrad", {}), ("cp_lrp", {}), ("cp_lrp", {"share": 1.0}), ("lrp_ah_ln", {"secant": True})],
)
def test_gated_products_conserve_relevance(llama, method, settings):
    model, inputs = llama
    figure = whyformer.explain(model, inputs, method, **settings).diagnostics["conservation"]
    assert max(figure["error"]) < 1e-5


@pytest.mark.parametrize("method", ["attnlrp", "gim", "lrp_ln", "input_x_gradient"])
def test_method_without_conservation_does_not_warn(llama, method):
    model, inputs = llama
    e = whyformer.explain(model, inputs, method)
    figure = e.diagnostics["conservation"]
    errors = [abs(a - b) for a, b in zip(figure["sum"], figure["start"], strict=True)]
    assert figure["error"] == pytest.approx(errors)  # the absolute error: dividing by a logit near 0 would be meaningless
    assert max(errors) > 0.1 * max(map(abs, figure["start"]))
    assert e.warnings == []


class ShiftedBlock(nn.Module):
    """A block after a shift, which is in place or not."""

    def __init__(self, block, in_place):
        super().__init__()
        self.block, self.in_place = block, in_place

    def forward(self, x):
        return self.block(x.add_(1) if self.in_place else x + 1)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_block_that_changes_its_input_in_place(checkpoint):
    ids, results = torch.tensor([[1, 5, 3]]), []
    for in_place in (False, True):
        model = ToyModel().eval()
        model.blocks = nn.ModuleList(ShiftedBlock(block, in_place) for block in model.blocks)
        results.append(whyformer.explain(model, ids, "libragrad", 1, checkpoint=checkpoint).scores)
    assert torch.allclose(*results, rtol=1e-12, atol=0)
