"""A tiny Transformer of three blocks with exchangeable parts; the weights are equal in all forms."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS, FEATURES, WIDTH, HEADS, INNER, CLASSES, VOCABULARY, DEPTH = 2, 5, 6, 12, 3, 16, 7, 23, 3
HEAD = WIDTH // HEADS
PATCH, ROWS, COLUMNS = 4, 2, 3
PATCHES = ROWS * COLUMNS
EPS = 1e-5

Way = Callable[..., Any]


# -- weights by name ---------------------------------------------------------------------------------------------------
def noise(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def matrix(name: str, out: int, into: int) -> Tensor:
    return noise(name, out, into) * 1.2 / math.sqrt(into)


def gain(name: str, size: int) -> Tensor:
    return 1 + 0.3 * noise(name, size).clamp(-2, 2)


def shift(name: str, size: int) -> Tensor:
    return 0.3 * noise(name, size)


def linear(name: str, out: int, into: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(into, out, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(matrix(f"{name}.weight", out, into))
        if bias:
            layer.bias.copy_(shift(f"{name}.bias", out))
    return layer


def layer_norm(name: str, size: int = WIDTH, eps: float = EPS) -> nn.LayerNorm:
    norm = nn.LayerNorm(size, eps=eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(gain(f"{name}.weight", size))
        norm.bias.copy_(shift(f"{name}.bias", size))
    return norm


# -- inputs ------------------------------------------------------------------------------------------------------------
def inputs(kind: str, batch: int = BATCH) -> Tensor:
    if kind == "ids":
        generator = torch.Generator().manual_seed(5)
        return torch.randint(1, VOCABULARY, (4, TOKENS), generator=generator)[:batch]
    shape = (4, TOKENS, FEATURES) if kind == "vectors" else (4, 3, ROWS * PATCH, COLUMNS * PATCH)
    return noise(f"inputs of {kind}", *shape)[:batch]


# -- functions in modules ------------------------------------------------------------------------------------------------
class Written(nn.Module):
    """A module that calls a function of x, its parameters and constants."""

    def __init__(self, way: Way, *constants: Any, **parameters: Tensor | None) -> None:
        super().__init__()
        self.way, self.constants, self.order = way, constants, list(parameters)
        for name, value in parameters.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value))

    def forward(self, *x: Tensor) -> Any:
        return self.way(*x, *[getattr(self, name) for name in self.order], *self.constants)


def written(label: str, way: Way, *constants: Any, **parameters: Tensor | None) -> nn.Module:
    """The function in a module of a class named ``label``."""
    return type(label, (Written,), {})(way, *constants, **parameters)


# -- exchangeable parts --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parts:
    """Implementations of the parts of the model; None is the module of torch.

    Attributes:
        norm: (x, weight, bias, eps) -> Tensor; softmax: scores -> weights; act: x -> Tensor; linear: (x, weight, bias) -> Tensor.
        product: (q, k, v), each ``[B, H, N, d]`` -> ``[B, H, N, d]``.
        add: (x, branch) -> Tensor; read: tokens -> ``[B, D]``; end: logits -> output of the model.
        layer: (name, out, in) -> a module for a linear layer.
        attention, feed, embed: module factories, the first two by the name of the block.
        labels: prefix of the class names of functions in modules.
        inline: whether a block calls functions in its forward instead of modules.
        post: whether the blocks are post-norm. inputs: "vectors", "ids" or "pixels".
    """

    norm: Way | None = None
    softmax: Way | None = None
    act: Way | None = None
    linear: Way | None = None
    product: Way | None = None
    layer: Callable[[str, int, int], nn.Module] | None = None
    add: Way | None = None
    read: Way | None = None
    end: Way | None = None
    attention: Callable[[str], nn.Module] | None = None
    feed: Callable[[str], nn.Module] | None = None
    embed: Callable[[], nn.Module] | None = None
    labels: str = "Own"
    inline: bool = False
    post: bool = False
    inputs: str = "vectors"

    def norm_module(self, name: str) -> nn.Module:
        if self.norm is None:
            return layer_norm(name)
        return written(f"{self.labels}Norm", self.norm, EPS, weight=gain(f"{name}.weight", WIDTH), bias=shift(f"{name}.bias", WIDTH))

    def linear_module(self, name: str, out: int, into: int) -> nn.Module:
        if self.layer is not None:
            return self.layer(name, out, into)
        if self.linear is None:
            return linear(name, out, into)
        tensors = {"weight": matrix(f"{name}.weight", out, into), "bias": shift(f"{name}.bias", out)}
        return written(f"{self.labels}Projection", self.linear, **tensors)

    def act_module(self) -> nn.Module:
        return nn.GELU() if self.act is None else written(self.labels, self.act)

    def softmax_module(self) -> nn.Module:
        return nn.Softmax(dim=-1) if self.softmax is None else written(f"{self.labels}Weights", self.softmax)


def heads(x: Tensor) -> Tensor:
    """``[B, N, D]`` -> ``[B, H, N, d]``"""
    return x.view(x.shape[0], x.shape[1], HEADS, HEAD).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """``[B, H, N, d]`` -> ``[B, N, D]``"""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], WIDTH)


class Attention(nn.Module):
    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (parts.linear_module(f"{name}.{p}", WIDTH, WIDTH) for p in "qkvo")
        self.weights, self.product = parts.softmax_module(), parts.product

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.product is not None:
            return self.out(merged(self.product(q, k, v)))
        return self.out(merged(self.weights(q @ k.transpose(-2, -1) / math.sqrt(HEAD)) @ v))


class FeedForward(nn.Module):
    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.up, self.act = parts.linear_module(f"{name}.up", INNER, WIDTH), parts.act_module()
        self.down = parts.linear_module(f"{name}.down", WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.norm1, self.norm2 = parts.norm_module(f"{name}.norm1"), parts.norm_module(f"{name}.norm2")
        self.attention = Attention(name, parts) if parts.attention is None else parts.attention(name)
        self.feed = FeedForward(name, parts) if parts.feed is None else parts.feed(name)
        self.add, self.post = parts.add, parts.post

    def joined(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch if self.add is None else self.add(x, branch)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(self.joined(x, self.attention(x)))
            return self.norm2(self.joined(x, self.feed(x)))
        x = self.joined(x, self.attention(self.norm1(x)))
        return self.joined(x, self.feed(self.norm2(x)))


class InlineBlock(nn.Module):
    """A block in one forward: functions of its parameters, and modules for linear layers unless ``parts.linear`` is given."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        for part, out, into in (*((p, WIDTH, WIDTH) for p in "qkvo"), ("up", INNER, WIDTH), ("down", WIDTH, INNER)):
            if parts.linear is None:
                setattr(self, part, linear(f"{name}.{part}", out, into))
            else:
                setattr(self, f"{part}_weight", nn.Parameter(matrix(f"{name}.{part}.weight", out, into)))
                setattr(self, f"{part}_bias", nn.Parameter(shift(f"{name}.{part}.bias", out)))
        for norm in ("norm1", "norm2"):
            setattr(self, f"{norm}_weight", nn.Parameter(gain(f"{name}.{norm}.weight", WIDTH)))
            setattr(self, f"{norm}_bias", nn.Parameter(shift(f"{name}.{norm}.bias", WIDTH)))
        self.attention = None if parts.attention is None else parts.attention(name)
        self.feed = None if parts.feed is None else parts.feed(name)

    def layer(self, part: str, x: Tensor) -> Tensor:
        if self.parts.linear is None:
            return getattr(self, part)(x)
        return self.parts.linear(x, getattr(self, f"{part}_weight"), getattr(self, f"{part}_bias"))

    def normed(self, x: Tensor, number: int) -> Tensor:
        weight, bias = getattr(self, f"norm{number}_weight"), getattr(self, f"norm{number}_bias")
        if self.parts.norm is None:
            return F.layer_norm(x, (WIDTH,), weight, bias, EPS)
        return self.parts.norm(x, weight, bias, EPS)

    def attend(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            return self.attention(x)
        q, k, v = (heads(self.layer(part, x)) for part in "qkv")
        if self.parts.product is not None:
            mixed = self.parts.product(q, k, v)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * HEAD**-0.5
            mixed = torch.matmul(F.softmax(scores, dim=-1) if self.parts.softmax is None else self.parts.softmax(scores), v)
        return self.layer("o", merged(mixed))

    def fed(self, x: Tensor) -> Tensor:
        if self.feed is not None:
            return self.feed(x)
        act = self.parts.act or F.gelu
        return self.layer("down", act(self.layer("up", x)))

    def joined(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch if self.parts.add is None else self.parts.add(x, branch)

    def forward(self, x: Tensor) -> Tensor:
        if self.parts.post:
            x = self.normed(self.joined(x, self.attend(x)), 1)
            return self.normed(self.joined(x, self.fed(x)), 2)
        x = self.joined(x, self.attend(self.normed(x, 1)))
        return self.joined(x, self.fed(self.normed(x, 2)))


# -- embeddings and model-------------------------------------------------------------------------------------------------
class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = linear("vectors", WIDTH, FEATURES)
        self.position = nn.Parameter(shift("position", TOKENS * WIDTH).view(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + self.position


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.table.weight.copy_(noise("words", VOCABULARY, WIDTH))
        self.position = nn.Parameter(shift("position", TOKENS * WIDTH).view(TOKENS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.position[: ids.shape[1]]


def kernel() -> Tensor:
    """``[D, C, P, P]``"""
    return matrix("pixels.weight", WIDTH, 3 * PATCH * PATCH).view(WIDTH, 3, PATCH, PATCH)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH, dtype=torch.float64)
        with torch.no_grad():
            self.proj.weight.copy_(kernel())
            self.proj.bias.copy_(shift("pixels.bias", WIDTH))
        self.cls = nn.Parameter(shift("cls", WIDTH).view(1, 1, WIDTH))
        self.position = nn.Parameter(shift("position of pixels", (1 + PATCHES) * WIDTH).view(1, 1 + PATCHES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {"vectors": Vectors, "ids": Words, "pixels": Pixels}


class Model(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.embed = EMBEDDINGS[parts.inputs]() if parts.embed is None else parts.embed()
        block = InlineBlock if parts.inline else Block
        self.blocks = nn.ModuleList([block(f"block{i}", parts) for i in range(DEPTH)])
        self.norm = nn.Identity() if parts.post else layer_norm("norm")
        self.head = linear("head", CLASSES, WIDTH)
        self.read, self.end, self.mean = parts.read, parts.end, parts.inputs == "vectors"

    def readout(self, x: Tensor) -> Tensor:
        if self.read is not None:
            return self.read(x)
        return x.mean(dim=1) if self.mean else x[:, 0]

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.readout(self.norm(x)))
        return logits if self.end is None else self.end(logits)


def build(parts: Parts) -> nn.Module:
    return Model(parts).double().eval()
