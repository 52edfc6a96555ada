"""Implementations of padding masks in attention; the model takes ids and an attention mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import (
    CLASSES,
    DEPTH,
    HEAD,
    HEADS,
    WIDTH,
    FeedForward,
    Parts,
    Way,
    Words,
    heads,
    inputs,
    layer_norm,
    linear,
    merged,
)
from .projections import multihead

ROOT = math.sqrt(HEAD)
LENGTHS = (5, 3)


def padded_inputs() -> dict[str, Tensor]:
    """Two texts of five and three tokens, padded on the right."""
    ids = inputs("ids").clone()
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


# -- (q, k, v, attention mask [B, N] of ones and zeros) -> [B, H, N, d] -------------------------------------------------------
def scored(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / ROOT


def additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, low: float) -> Tensor:
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * low
    return (scored(q, k) + extended).softmax(dim=-1) @ v


def pairwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    both = mask.unsqueeze(1) * mask.unsqueeze(2)
    return scored(q, k).masked_fill(both.unsqueeze(1) == 0, -1e9).softmax(-1) @ v


def each_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    n = q.shape[2]
    hidden = mask.eq(0)[:, None].expand(-1, n, -1).repeat_interleave(HEADS, dim=0)
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / ROOT
    return torch.bmm(scores.masked_fill(hidden, float("-inf")).softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(q.shape[0], 1, 1, q.shape[2], dtype=q.dtype).masked_fill(~mask.bool()[:, None, None], -1e9)
    start = bias.expand(-1, HEADS, q.shape[2], -1).reshape(-1, q.shape[2], q.shape[2])
    scores = torch.baddbmm(start, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1 / ROOT)
    return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])


def times_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    e = scored(q, k).exp() * mask[:, None, None]
    return e / e.sum(-1, keepdim=True) @ v


def hidden_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked scores and masked values."""
    return additive(q, k, v * mask[:, None, :, None], mask, -1e9)


MASKED: dict[str, Way] = {
    "masked_fill -inf": lambda q, k, v, m: scored(q, k).masked_fill(m[:, None, None] == 0, float("-inf")).softmax(-1) @ v,
    "masked_fill -1e9": lambda q, k, v, m: scored(q, k).masked_fill(~m.bool()[:, None, None, :], -1e9).softmax(-1) @ v,
    "one minus mask times -1e4": lambda q, k, v, m: additive(q, k, v, m, -10000.0),
    "one minus mask times finfo": lambda q, k, v, m: additive(q, k, v, m, torch.finfo(torch.float32).min),
    "log of the mask": lambda q, k, v, m: (scored(q, k) + m[:, None, None].to(q.dtype).log()).softmax(-1) @ v,
    "where": lambda q, k, v, m: torch.where(m[:, None, None].bool(), scored(q, k), -1e30).softmax(-1) @ v,
    "pairs": pairwise,
    "each head": each_head,
    "baddbmm": by_baddbmm,
    "times mask": times_mask,
    "softmax, mask, renormalised": lambda q, k, v, m: F.normalize(scored(q, k).softmax(-1) * m[:, None, None], p=1, dim=-1) @ v,
    "masked, then times mask": lambda q, k, v, m: (scored(q, k).masked_fill(m[:, None, None] == 0, -1e9).softmax(-1) * m[:, None, None]) @ v,
    "hidden values": hidden_values,
    "sdpa, bool": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bool()[:, None, None]),
    "sdpa, bool, expanded": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.bool()[:, None, None].expand(-1, 1, m.shape[1], -1)),
    "sdpa, floats": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, (1.0 - m[:, None, None].to(q.dtype)) * -1e9),
    "einsum": lambda q, k, v, m: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / ROOT + (m[:, None, None] - 1) * 1e9).softmax(-1), v
    ),
}


class OwnAttention(nn.Module):
    def __init__(self, name: str, way: Way) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(f"{name}.{p}", WIDTH, WIDTH) for p in "qkvo")
        self.way = way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.o(merged(self.way(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), mask)))


class TorchAttention(nn.Module):
    def __init__(self, name: str, way: Way) -> None:
        super().__init__()
        self.attn, self.way = multihead(name), way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.way(self.attn, x, mask)


TORCH_MASKED: dict[str, Way] = {
    "nn.MultiheadAttention, key_padding_mask": lambda a, x, m: a(x, x, x, key_padding_mask=m == 0)[0],
    "nn.MultiheadAttention, no weights": lambda a, x, m: a(x, x, x, key_padding_mask=m == 0, need_weights=False)[0],
    "nn.MultiheadAttention, attn_mask": lambda a, x, m: a(
        x, x, x, attn_mask=(m == 0)[:, None].expand(-1, m.shape[1], -1).repeat_interleave(HEADS, 0), need_weights=False
    )[0],
}


class PaddedModel(nn.Module):
    """Pre-norm blocks over padded tokens, with readout at the first token."""

    def __init__(self, attention: Way) -> None:
        super().__init__()
        self.embeddings = Words()
        self.layer = nn.ModuleList([PaddedBlock(f"block{i}", attention) for i in range(DEPTH)])
        self.norm, self.classifier = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layer:
            x = layer(x, attention_mask)
        return self.classifier(self.norm(x)[:, 0])


class PaddedBlock(nn.Module):
    def __init__(self, name: str, attention: Way) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2")
        self.attention, self.feed = attention(name), FeedForward(name, Parts())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.feed(self.norm2(x))


def padded_model(name: str) -> nn.Module:
    way, module = (MASKED[name], OwnAttention) if name in MASKED else (TORCH_MASKED[name], TorchAttention)
    return PaddedModel(lambda block: module(block, way)).double().eval()
