"""``Record.inside``: the relevance of heads, MLPs and neurons is gradient × value there, in the right place."""

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

# what leaves the activation, and what the projection after the heads reads, by model
PLACES = {
    "bert": ("bert.encoder.layer.{}.intermediate", "bert.encoder.layer.{}.attention.output.dense"),
    "hf_vit": ("vit.layers.{}.mlp.activation_fn", "vit.layers.{}.attention.o_proj"),
    "gpt2": ("transformer.h.{}.mlp.act", "transformer.h.{}.attn.c_proj"),
}


def built(name: str) -> tuple[nn.Module, Any]:
    model, inputs = {**ZOO, **WINDOWED, **LANGUAGE}[name]()
    return model.double(), to(inputs, torch.float64)


def by_autograd(model: nn.Module, inputs: Any, path: str, *, entering: bool) -> Tensor:
    """Value × ∂ logits[:, 1] at what enters or leaves a module, ``[B, N, D]``."""
    seen: list[Tensor] = []
    module = dict(model.named_modules())[path]
    handle = module.register_forward_hook(lambda m, args, out: seen.append(args[0] if entering else out))
    try:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    finally:
        handle.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    return (seen[0] * torch.autograd.grad(logits[:, 1].sum(), seen[0])[0]).detach()


@pytest.mark.parametrize("name", PLACES)
def test_heads_and_neurons_are_those_of_autograd(name: str) -> None:
    model, inputs = built(name)
    found = whyformer.record(model, inputs).inside(1, "plain")
    neurons, heads = PLACES[name]
    for block in range(found.blocks):
        wanted = by_autograd(model, inputs, neurons.format(block), entering=False).sum(1)
        assert torch.allclose(found.neurons[block], wanted, atol=1e-12)
        wanted = by_autograd(model, inputs, heads.format(block), entering=True)
        wanted = wanted.unflatten(-1, (found.heads.shape[2], -1)).sum((1, -1))
        assert torch.allclose(found.heads[:, block], wanted, atol=1e-12)
        assert torch.allclose(found.attentions[:, block], wanted.sum(-1), atol=1e-12)


@pytest.mark.parametrize("composite", ["attnlrp", "deep_taylor"])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama", "timm_vit", "hf_swin"])
def test_a_batch_is_its_samples(name: str, composite: str) -> None:
    model, inputs = built(name)
    whole = whyformer.record(model, inputs).inside(1, composite)
    for i in range(2):
        alone = whyformer.record(model, rows(inputs, i)).inside(1, composite)
        assert torch.allclose(whole.heads[i], alone.heads[0], atol=1e-9, equal_nan=True)
        for own, other in zip(whole.neurons, alone.neurons, strict=True):
            assert torch.allclose(own[i], other[0], atol=1e-9)


def test_the_neurons_with_the_largest_relevance_come_first_and_say_where_they_are() -> None:
    model, inputs = built("bert")
    found = whyformer.record(model, inputs).inside(1)
    best = found.top_neurons(7, sample=1)
    every = torch.cat([own[1] for own in found.neurons]).abs().sort(descending=True).values
    assert [abs(one.relevance) for one in best] == every[:7].tolist()
    for one in best:
        assert float(found.neurons[found.mlp_blocks.index(one.block)][1, one.index]) == one.relevance
        assert f"layer.{one.block}." in one.module


def test_encoder_and_decoder_are_both_there() -> None:
    t5 = models.build("sequence to sequence/t5")
    r = whyformer.record(t5.module, t5.inputs[models.BATCH])
    found = r.inside(t5.targets[models.BATCH])
    assert len(found.attention_blocks) == len(r.attentions)
    assert {module.split(".")[0] for module in found.modules} == {"encoder", "decoder"}


@pytest.mark.parametrize("name", ["hf_vit", "sequence to sequence/t5", "image classification/timm cait_xxs24_224"])
def test_all_of_it_is_drawn(name: str) -> None:
    one = models.build(name)
    found = whyformer.record(one.module, one.inputs[models.BATCH]).inside(one.targets[models.BATCH])
    assert len(show.encode(found.figure(sample=1), "png")) > 10_000
    attention, mlp = found.layers(sample=1)
    assert torch.isfinite(attention).all() and torch.isfinite(mlp).all()
    assert float(attention.sum()) == pytest.approx(float(found.attentions[1].sum()))


def test_a_model_without_either_is_refused() -> None:
    mamba = models.build("causal language model/mamba")
    with pytest.raises(ModelError, match="no heads or neurons"):
        whyformer.record(mamba.module, mamba.inputs[models.BATCH]).inside(mamba.targets[models.BATCH])
