"""Attention methods on an encoder-decoder model against slow reference implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from streams import HeadByHead, bart
from zoo import randomise

PARTS = ("input_ids", "decoder_input_ids")


class RecordedLayer:
    """A layer of BART that was run on one sample, with its input and output."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.module, self.args, self.kwargs, self.output = module, args, kwargs, output[0]
        self.x = args[0] if args else kwargs["hidden_states"]

    def output_without_token(self, projection: nn.Module, token: int) -> Tensor:
        """Output of the layer with the values of one token set to 0."""

        def zero(module: nn.Module, args: Any, values: Tensor) -> Tensor:
            return values.index_fill(1, torch.tensor([token]), 0)

        handle = projection.register_forward_hook(zero)
        try:
            output = self.module(*self.args, **{**self.kwargs, "past_key_values": None})
        finally:
            handle.remove()
        return (output if isinstance(output, Tensor) else output[0])[0]


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, list[RecordedLayer], list[RecordedLayer], dict[Any, Tensor]]:
    """Run the model; return (output, encoder layers, decoder layers, output of each self-attention norm)."""
    layers: dict[str, list[RecordedLayer]] = {"encoder": [], "decoder": []}
    norm_outputs: dict[Any, Tensor] = {}
    handles = []
    for side, records in layers.items():
        for layer in getattr(model.model, side).layers:

            def record(module: nn.Module, args: Any, kwargs: Any, output: Any, records: list[RecordedLayer] = records) -> None:
                records.append(RecordedLayer(module, args, kwargs, output if isinstance(output, Tensor) else output[0]))

            handles.append(layer.register_forward_hook(record, with_kwargs=True))
            norm = layer.self_attn_layer_norm
            handles.append(norm.register_forward_hook(lambda m, a, out: norm_outputs.__setitem__(m, out)))
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return out, layers["encoder"], layers["decoder"], norm_outputs


def walk(row: Tensor, decoder: list[tuple[Tensor, Tensor]], encoder: list[Tensor]) -> dict[str, Tensor]:
    """Propagate a row of the decoder through its self- and cross-attention maps, and the source rows through the encoder's."""
    source = torch.zeros(encoder[0].shape[0], dtype=row.dtype)
    for self_map, cross_map in reversed(decoder):
        source = source + row @ cross_map
        row = row @ self_map
    for self_map in reversed(encoder):
        source = source @ self_map
    return {"input_ids": source, "decoder_input_ids": row}


def single_sample() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    model, inputs = bart("eager")
    row = torch.zeros(6, dtype=torch.float64)
    row[5] = 1  # the <eos> row is classified
    return model, {n: v[:1] for n, v in inputs.items()}, row


@torch.no_grad()
def vectors(attention: nn.Module, maps: Tensor, queries: Tensor, keys: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Vectors that query i receives from key j ``[Q, K, D]``, and its residual vectors ``[Q, D]``."""
    heads = attention.num_heads
    values = attention.v_proj(keys).unflatten(-1, (heads, -1))
    weight = attention.out_proj.weight.unflatten(1, (heads, -1))
    received = torch.einsum("hqk,khd,ohd->qko", maps, values, weight)
    residual = queries
    if norm is not None:
        summed = received.sum(1) + attention.out_proj.bias + queries
        deviation = (summed.var(-1, unbiased=False) + norm.eps).sqrt()
        received = (received - received.mean(-1, keepdim=True)) * norm.weight / deviation[:, None, None]
        residual = (residual - residual.mean(-1, keepdim=True)) * norm.weight / deviation[:, None]
    return received, residual


@pytest.mark.parametrize("scope", ["residual", "norm"])
def test_norm_attention_of_encoder_and_decoder(scope: str) -> None:
    model, inputs, row = single_sample()
    out, encoder, decoder, norm_outputs = run(model, inputs)
    memory = encoder[-1].output

    def self_attention_map(attention: nn.Module, maps: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
        received, residual = vectors(attention, maps, x, x, norm if scope == "norm" else None)
        vectors_sum = (received + torch.diag_embed(residual.T, dim1=0, dim2=1)).norm(dim=-1)
        return vectors_sum / vectors_sum.sum(-1, keepdim=True)

    lower = [
        self_attention_map(layer.module.self_attn, maps[0], layer.x[0], layer.module.self_attn_layer_norm)
        for layer, maps in zip(encoder, out.encoder_attentions, strict=True)
    ]
    upper = []
    for layer, maps, across in zip(decoder, out.decoder_attentions, out.cross_attentions, strict=True):
        module = layer.module
        self_map = self_attention_map(module.self_attn, maps[0], layer.x[0], module.self_attn_layer_norm)
        normed = norm_outputs[module.self_attn_layer_norm][0]
        norm = module.encoder_attn_layer_norm if scope == "norm" else None
        received, residual = vectors(module.encoder_attn, across[0], normed, memory, norm)
        sums = residual.norm(dim=-1) + received.norm(dim=-1).sum(-1)
        upper.append((self_map, torch.zeros(6, 6, dtype=torch.float64)))
        upper.append((torch.diag(residual.norm(dim=-1) / sums), received.norm(dim=-1) / sums[:, None]))
    expected = walk(row, upper, lower)
    e = whyformer.explain(model, inputs, "norm_attention", scope=scope)
    for part in PARTS:
        assert expected[part].max() > 1e-3
        assert torch.allclose(e.part(part).scores[0], expected[part], rtol=1e-9)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_value_zeroing_of_encoder_and_decoder(distance: str) -> None:
    model, inputs, row = single_sample()
    _, encoder, decoder, _ = run(model, inputs)

    @torch.no_grad()
    def changes(layer: RecordedLayer, projection: nn.Module) -> Tensor:
        columns = []
        for token in range(6):
            u, v = layer.output_without_token(projection, token), layer.output
            change = 1 - torch.cosine_similarity(u, v, dim=-1) if distance == "cosine" else (u - v).norm(dim=-1)
            columns.append(change)
        return torch.stack(columns, 1)

    lower = [(m := changes(layer, layer.module.self_attn.v_proj)) / m.sum(-1, keepdim=True) for layer in encoder]
    upper = []
    for layer in decoder:
        self_changes, cross_changes = changes(layer, layer.module.self_attn.v_proj), changes(layer, layer.module.encoder_attn.v_proj)
        sums = (self_changes.sum(-1) + cross_changes.sum(-1))[:, None]
        upper.append((self_changes / sums, cross_changes / sums))
    expected = walk(row, upper, lower)
    e = whyformer.explain(model, inputs, "value_zeroing", distance=distance)
    for part in PARTS:
        assert expected[part].max() > 1e-3
        assert torch.allclose(e.part(part).scores[0], expected[part], rtol=1e-6)


def test_gradcam_attention_uses_last_self_and_cross_attention() -> None:
    model, inputs, _ = single_sample()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    out = model(**inputs, output_attentions=True)
    maps = {"input_ids": out.cross_attentions[-1], "decoder_input_ids": out.decoder_attentions[-1]}
    gradients = torch.autograd.grad(out.logits[0, 3], list(maps.values()))
    e = whyformer.explain(model, inputs, "gradcam_attention", 3)
    for (part, attention), gradient in zip(maps.items(), gradients, strict=True):
        heads = gradient[0].mean((1, 2))
        expected = (heads[:, None] * attention[0, :, 5]).mean(0).clamp(min=0).detach()
        assert torch.allclose(e.part(part).scores[0], expected, atol=1e-12)
    assert bool(e.scores.any())


class Scaled(nn.Module):
    """A layer with LayerScale on its attention output, applied separately or folded into the output projection."""

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


class ScaledStack(nn.Module):
    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 24), nn.Linear(24, 5)
        self.blocks = nn.ModuleList(Scaled(folded) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_layer_scale_equals_scaled_projection_in_norm_attention() -> None:
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    folded, unfolded = (randomise(ScaledStack(fold)).double() for fold in (True, False))
    scores = [whyformer.explain(model, ids, "norm_attention").scores for model in (folded, unfolded)]
    assert torch.allclose(*scores, rtol=1e-10)
