"""A block, its parts, and the base model with embedding and head."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from ..base import (
    CLASSES,
    EMBEDDINGS,
    EPS,
    HEADS,
    INNER,
    WIDTH,
    Attention,
    FeedForward,
    Parts,
    heads,
    layer_norm,
    linear,
    matrix,
    merged,
    shift,
)
from ..functions.projections import multihead

DEPTH = 4
NAMES = [f"block{i}" for i in range(DEPTH)]
PLAIN = Parts()


# -- the pieces ------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm1, self.attn = layer_norm(f"{name}.norm1"), Attention(name, PLAIN)
        self.norm2, self.mlp = layer_norm(f"{name}.norm2"), FeedForward(name, PLAIN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NormedAttention(nn.Module):
    """Attention with its norm."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.to_out = layer_norm(f"{name}.norm1"), nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64), linear(f"{name}.o", WIDTH, WIDTH)
        self.attend = nn.Softmax(dim=-1)
        with torch.no_grad():
            self.to_qkv.weight.copy_(torch.cat([matrix(f"{name}.{p}.weight", WIDTH, WIDTH) for p in "qkv"]))
            self.to_qkv.bias.copy_(torch.cat([shift(f"{name}.{p}.bias", WIDTH) for p in "qkv"]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        return self.to_out(merged(self.attend(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5) @ v))


def normed_feed(name: str) -> nn.Sequential:
    up, down = linear(f"{name}.up", INNER, WIDTH), linear(f"{name}.down", WIDTH, INNER)
    return nn.Sequential(layer_norm(f"{name}.norm2"), up, nn.GELU(), nn.Dropout(0.0), down, nn.Dropout(0.0))


class PreNorm(nn.Module):
    def __init__(self, norm: nn.Module, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.fn(self.norm(x), **kwargs)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.fn(x, **kwargs) + x


def prenormed(name: str) -> list[nn.Module]:
    return [
        PreNorm(layer_norm(f"{name}.norm1"), Attention(name, PLAIN)),
        PreNorm(layer_norm(f"{name}.norm2"), FeedForward(name, PLAIN)),
    ]


class Reader(nn.Module):
    """A model with embedding and head; subclasses define the blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.mean = EMBEDDINGS[kind](), kind == "vectors"
        self.add_blocks()
        self.norm, self.head = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def add_blocks(self) -> None:
        """Create the modules of the blocks."""
        raise NotImplementedError

    def run_blocks(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.run_blocks(self.embed(x)))
        return self.head(x.mean(1) if self.mean else x[:, 0])




def torch_layer(name: str, post: bool) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, INNER, dropout=0.0, activation="gelu", layer_norm_eps=EPS, batch_first=True, norm_first=not post, dtype=torch.float64
    )
    layer.self_attn, layer.norm1, layer.norm2 = multihead(name), layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2")
    layer.linear1, layer.linear2 = linear(f"{name}.up", INNER, WIDTH), linear(f"{name}.down", WIDTH, INNER)
    return layer


def torch_encoder(post: bool) -> nn.TransformerEncoder:
    encoder = nn.TransformerEncoder(torch_layer(NAMES[0], post), DEPTH, enable_nested_tensor=False)
    encoder.layers = nn.ModuleList([torch_layer(name, post) for name in NAMES])
    return encoder


