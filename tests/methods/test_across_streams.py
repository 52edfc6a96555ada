"""Methods over the attention of encoder and decoder, written out slowly: what each layer hands on, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from streams import HeadByHead, bart
from zoo import randomise

PARTS = ("input_ids", "decoder_input_ids")


class Layer:
    """One layer of a BART on one sample: what enters each attention, and the maps ``[H, Q, K]``."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.module, self.args, self.kwargs, self.output = module, args, kwargs, output[0]
        self.x = args[0] if args else kwargs["hidden_states"]

    def again(self, projection: nn.Module, token: int) -> Tensor:
        """The layer's output without one token's values."""

        def zero(module: nn.Module, given: Any, values: Tensor) -> Tensor:
            return values.index_fill(1, torch.tensor([token]), 0)

        handle = projection.register_forward_hook(zero)
        try:
            output = self.module(*self.args, **{**self.kwargs, "past_key_values": None})
        finally:
            handle.remove()
        return (output if isinstance(output, Tensor) else output[0])[0]


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, list[Layer], list[Layer], dict[Any, Tensor]]:
    """(output, encoder's layers, decoder's layers, what comes out of each module of a decoder's layer)."""
    found: dict[str, list[Layer]] = {"encoder": [], "decoder": []}
    between: dict[Any, Tensor] = {}
    handles = []
    for side, kept in found.items():
        for layer in getattr(model.model, side).layers:

            def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, kept: list[Layer] = kept) -> None:
                kept.append(Layer(module, args, kwargs, output if isinstance(output, Tensor) else output[0]))

            handles.append(layer.register_forward_hook(leave, with_kwargs=True))
            norm = layer.self_attn_layer_norm
            handles.append(norm.register_forward_hook(lambda m, a, out: between.__setitem__(m, out)))
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return out, found["encoder"], found["decoder"], between


def walk(row: Tensor, decoder: list[tuple[Tensor, Tensor]], encoder: list[Tensor]) -> dict[str, Tensor]:
    """A row of the decoder through [own | cross] maps, the source's rows through theirs."""
    source = torch.zeros(encoder[0].shape[0], dtype=row.dtype)
    for own, cross in reversed(decoder):
        source = source + row @ cross
        row = row @ own
    for own in reversed(encoder):
        source = source @ own
    return {"input_ids": source, "decoder_input_ids": row}


def one_sample() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    model, inputs = bart("eager")
    row = torch.zeros(6, dtype=torch.float64)
    row[5] = 1  # the <eos> row is classified
    return model, {n: v[:1] for n, v in inputs.items()}, row


@torch.no_grad()
def vectors(attention: nn.Module, maps: Tensor, queries: Tensor, keys: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """‖what query i gets from key j‖ ``[Q, K, D]`` and what it keeps ``[Q, D]``, all of them formed."""
    heads = attention.num_heads
    values = attention.v_proj(keys).unflatten(-1, (heads, -1))
    weight = attention.out_proj.weight.unflatten(1, (heads, -1))
    got = torch.einsum("hqk,khd,ohd->qko", maps, values, weight)
    kept = queries
    if norm is not None:
        summed = got.sum(1) + attention.out_proj.bias + queries
        deviation = (summed.var(-1, unbiased=False) + norm.eps).sqrt()
        got = (got - got.mean(-1, keepdim=True)) * norm.weight / deviation[:, None, None]
        kept = (kept - kept.mean(-1, keepdim=True)) * norm.weight / deviation[:, None]
    return got, kept


@pytest.mark.parametrize("scope", ["residual", "norm"])
def test_norms_across(scope: str) -> None:
    model, inputs, row = one_sample()
    out, encoder, decoder, between = run(model, inputs)
    memory = encoder[-1].output

    def own(attention: nn.Module, maps: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
        got, kept = vectors(attention, maps, x, x, norm if scope == "norm" else None)
        both = (got + torch.diag_embed(kept.T, dim1=0, dim2=1)).norm(dim=-1)
        return both / both.sum(-1, keepdim=True)

    lower = [
        own(layer.module.self_attn, maps[0], layer.x[0], layer.module.self_attn_layer_norm)
        for layer, maps in zip(encoder, out.encoder_attentions, strict=True)
    ]
    upper = []
    for layer, maps, across in zip(decoder, out.decoder_attentions, out.cross_attentions, strict=True):
        module = layer.module
        mine = own(module.self_attn, maps[0], layer.x[0], module.self_attn_layer_norm)
        behind = between[module.self_attn_layer_norm][0]
        norm = module.encoder_attn_layer_norm if scope == "norm" else None
        got, kept = vectors(module.encoder_attn, across[0], behind, memory, norm)
        sums = kept.norm(dim=-1) + got.norm(dim=-1).sum(-1)
        upper.append((mine, torch.zeros(6, 6, dtype=torch.float64)))
        upper.append((torch.diag(kept.norm(dim=-1) / sums), got.norm(dim=-1) / sums[:, None]))
    wanted = walk(row, upper, lower)
    e = whyformer.explain(model, inputs, "norm_attention", scope=scope)
    for part in PARTS:
        assert wanted[part].max() > 1e-3
        assert torch.allclose(e.part(part).scores[0], wanted[part], rtol=1e-9)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_values_zeroed_across(distance: str) -> None:
    model, inputs, row = one_sample()
    _, encoder, decoder, _ = run(model, inputs)

    @torch.no_grad()
    def changes(layer: Layer, projection: nn.Module) -> Tensor:
        columns = []
        for token in range(6):
            u, v = layer.again(projection, token), layer.output
            far = 1 - torch.cosine_similarity(u, v, dim=-1) if distance == "cosine" else (u - v).norm(dim=-1)
            columns.append(far)
        return torch.stack(columns, 1)

    lower = [(m := changes(layer, layer.module.self_attn.v_proj)) / m.sum(-1, keepdim=True) for layer in encoder]
    upper = []
    for layer in decoder:
        own, across = changes(layer, layer.module.self_attn.v_proj), changes(layer, layer.module.encoder_attn.v_proj)
        sums = (own.sum(-1) + across.sum(-1))[:, None]
        upper.append((own / sums, across / sums))
    wanted = walk(row, upper, lower)
    e = whyformer.explain(model, inputs, "value_zeroing", distance=distance)
    for part in PARTS:
        assert wanted[part].max() > 1e-3
        assert torch.allclose(e.part(part).scores[0], wanted[part], rtol=1e-6)


def test_gradcam_of_the_last_attentions() -> None:
    model, inputs, _ = one_sample()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    out = model(**inputs, output_attentions=True)
    maps = {"input_ids": out.cross_attentions[-1], "decoder_input_ids": out.decoder_attentions[-1]}
    flows = torch.autograd.grad(out.logits[0, 3], list(maps.values()))
    e = whyformer.explain(model, inputs, "gradcam_attention", 3)
    for (part, one), flow in zip(maps.items(), flows, strict=True):
        heads = flow[0].mean((1, 2))
        wanted = (heads[:, None] * one[0, :, 5]).mean(0).clamp(min=0).detach()
        assert torch.allclose(e.part(part).scores[0], wanted, atol=1e-12)
    assert bool(e.scores.any())


class Scaled(nn.Module):
    """A layer whose attention is scaled on its way to the sum, as by LayerScale; with it folded into the weights."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.folded, self.inner = folded, HeadByHead(False)
        self.scale = nn.Parameter(torch.linspace(0.2, 3, self.inner.out.out_features))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        q, k, v = inner.qkv(inner.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = inner.out
        if self.folded:
            x = x + nn.functional.linear(mixed, out.weight * self.scale[:, None], out.bias * self.scale)
        else:
            x = x + self.scale * out(mixed)
        return x + inner.mlp(inner.second(x)).tanh()


class Stack(nn.Module):
    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 24), nn.Linear(24, 5)
        self.blocks = nn.ModuleList(Scaled(folded) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_a_scale_is_a_part_of_the_projection() -> None:
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    one, other = (randomise(Stack(folded)).double() for folded in (True, False))
    scores = [whyformer.explain(model, ids, "norm_attention").scores for model in (one, other)]
    assert torch.allclose(*scores, rtol=1e-10)
