"""``Record.inside``: the relevance of heads, MLPs and neurons is gradient × value at these places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from frozen import models
from whyformer import show
from whyformer.errors import ModelError
from zoo import LANGUAGE, WINDOWED, ZOO, rows, to

# model -> modules whose output is the MLP activation, and whose input is the concatenated heads
PLACES = {
    "bert": ("bert.encoder.layer.{}.intermediate", "bert.encoder.layer.{}.attention.output.dense"),
    "hf_vit": ("vit.layers.{}.mlp.activation_fn", "vit.layers.{}.attention.o_proj"),
    "gpt2": ("transformer.h.{}.mlp.act", "transformer.h.{}.attn.c_proj"),
}


def built(name: str) -> tuple[nn.Module, Any]:
    model, inputs = {**ZOO, **WINDOWED, **LANGUAGE}[name]()
    return model.double(), to(inputs, torch.float64)


def by_autograd(model: nn.Module, inputs: Any, path: str, *, entering: bool) -> Tensor:
    """Value × ∂ logits[:, 1] at the input or output of a module, ``[B, N, D]``."""
    values: list[Tensor] = []
    module = dict(model.named_modules())[path]
    handle = module.register_forward_hook(lambda m, args, out: values.append(args[0] if entering else out))
    try:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    finally:
        handle.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    return (values[0] * torch.autograd.grad(logits[:, 1].sum(), values[0])[0]).detach()


@pytest.mark.parametrize("name", PLACES)
def test_relevance_of_heads_and_neurons_equals_autograd(name: str) -> None:
    model, inputs = built(name)
    inside = whyformer.record(model, inputs).inside(1, "plain")
    neurons, heads = PLACES[name]
    for block in range(inside.blocks):
        expected = by_autograd(model, inputs, neurons.format(block), entering=False).sum(1)
        assert torch.allclose(inside.neurons[block], expected, atol=1e-12)
        expected = by_autograd(model, inputs, heads.format(block), entering=True)
        expected = expected.unflatten(-1, (inside.heads.shape[2], -1)).sum((1, -1))
        assert torch.allclose(inside.heads[:, block], expected, atol=1e-12)
        assert torch.allclose(inside.attentions[:, block], expected.sum(-1), atol=1e-12)


@pytest.mark.parametrize("composite", ["attnlrp", "deep_taylor"])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama", "timm_vit", "hf_swin"])
def test_batch_equals_single_samples(name: str, composite: str) -> None:
    model, inputs = built(name)
    whole = whyformer.record(model, inputs).inside(1, composite)
    for i in range(2):
        alone = whyformer.record(model, rows(inputs, i)).inside(1, composite)
        assert torch.allclose(whole.heads[i], alone.heads[0], atol=1e-9, equal_nan=True)
        for batched, single in zip(whole.neurons, alone.neurons, strict=True):
            assert torch.allclose(batched[i], single[0], atol=1e-9)


def test_top_neurons_are_sorted_and_named() -> None:
    model, inputs = built("bert")
    inside = whyformer.record(model, inputs).inside(1)
    best = inside.top_neurons(7, sample=1)
    every = torch.cat([block[1] for block in inside.neurons]).abs().sort(descending=True).values
    assert [abs(neuron.relevance) for neuron in best] == every[:7].tolist()
    for neuron in best:
        assert float(inside.neurons[inside.mlp_blocks.index(neuron.block)][1, neuron.index]) == neuron.relevance
        assert f"layer.{neuron.block}." in neuron.module


def test_encoder_and_decoder_blocks_are_included() -> None:
    t5 = models.build("sequence to sequence/t5")
    r = whyformer.record(t5.module, t5.inputs[models.BATCH])
    inside = r.inside(t5.targets[models.BATCH])
    assert len(inside.attention_blocks) == len(r.attentions)
    assert {module.split(".")[0] for module in inside.modules} == {"encoder", "decoder"}


@pytest.mark.parametrize("name", ["hf_vit", "sequence to sequence/t5", "image classification/timm cait_xxs24_224"])
def test_figure_and_layer_sums(name: str) -> None:
    built_model = models.build(name)
    inside = whyformer.record(built_model.module, built_model.inputs[models.BATCH]).inside(built_model.targets[models.BATCH])
    assert len(show.encode(inside.figure(sample=1), "png")) > 10_000
    attention, mlp = inside.layers(sample=1)
    assert torch.isfinite(attention).all() and torch.isfinite(mlp).all()
    assert float(attention.sum()) == pytest.approx(float(inside.attentions[1].sum()))


def test_model_without_heads_or_neurons_is_refused() -> None:
    mamba = models.build("causal language model/mamba")
    with pytest.raises(ModelError, match="no heads or neurons"):
        whyformer.record(mamba.module, mamba.inputs[models.BATCH]).inside(mamba.targets[models.BATCH])


class HeadsLast(nn.Module):
    """An attention whose maps ``[B, Q, K, H]`` have the heads last, so that no axis of A·V shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)) for f in (self.q, self.k, self.v))
        maps = torch.einsum("bihd,bjhd->bijh", q, k).softmax(2)
        return self.head((x + torch.einsum("bijh,bjhd->bihd", maps, v).flatten(2))[:, 0])


def test_heads_that_cannot_be_distinguished_are_nan() -> None:
    torch.manual_seed(0)
    inside = whyformer.record(HeadsLast().double().eval(), torch.randn(3, 5, 8).double()).inside(1)
    assert inside.heads.shape == (3, 1, 2)
    assert bool(inside.heads.isnan().all())
    assert bool(inside.attentions.all())
    inside.figure()
