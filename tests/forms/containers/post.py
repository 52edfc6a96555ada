"""Post-norm blocks, and one block that is called three times."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..base import (
    CLASSES,
    EMBEDDINGS,
    HEADS,
    INNER,
    WIDTH,
    Attention,
    FeedForward,
    heads,
    layer_norm,
    linear,
    merged,
)
from .pieces import (
    NAMES,
    PLAIN,
    Block,
    Reader,
    torch_encoder,
    torch_layer,
)


# -- post-norm ---------------------------------------------------------------------------------------------------------------
class PostBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class AddNorm(nn.Module):
    def __init__(self, norm: nn.Module, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fn(x) + x)


class BertOutput(nn.Module):
    """A dense layer, the sum and the norm, as in BERT."""

    def __init__(self, dense: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.LayerNorm = dense, norm

    def forward(self, hidden: Tensor, entered: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + entered)


class BertLayer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(f"{name}.{p}", WIDTH, WIDTH) for p in "qkv")
        self.attention_output = BertOutput(linear(f"{name}.o", WIDTH, WIDTH), layer_norm(f"{name}.norm1"))
        self.intermediate = linear(f"{name}.up", INNER, WIDTH)
        self.output = BertOutput(linear(f"{name}.down", WIDTH, INNER), layer_norm(f"{name}.norm2"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        mixed = merged((q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v)
        x = self.attention_output(mixed, x)
        return self.output(F.gelu(self.intermediate(x)), x)


class PostReader(Reader):
    """A model without final norm, which calls the modules of ``build_layers`` in order."""

    def __init__(self, kind: str, build_layers: Callable[[], list[nn.Module]], container: Callable[..., nn.Module]) -> None:
        self.build_layers, self.container = build_layers, container
        nn.Module.__init__(self)
        self.embed, self.mean = EMBEDDINGS[kind](), kind == "vectors"
        self.layers = container(build_layers()) if container is nn.ModuleList else container(*build_layers())
        self.norm, self.head = nn.Identity(), linear("head", CLASSES, WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        if self.container is not nn.ModuleList:
            return self.layers(x)
        for layer in self.layers:
            x = layer(x)
        return x


def add_norms() -> list[nn.Module]:
    return [
        AddNorm(layer_norm(f"{name}.norm{i}"), fn) for name in NAMES for i, fn in ((1, Attention(name, PLAIN)), (2, FeedForward(name, PLAIN)))
    ]


class PostFour(PostReader):
    def run_blocks(self, x: Tensor) -> Tensor:
        for attention, norm1, feed, norm2 in self.layers:
            x = norm1(attention(x) + x)
            x = norm2(feed(x) + x)
        return x


def fours() -> list[nn.Module]:
    return [
        nn.ModuleList([Attention(name, PLAIN), layer_norm(f"{name}.norm1"), FeedForward(name, PLAIN), layer_norm(f"{name}.norm2")])
        for name in NAMES
    ]


POST: dict[str, Callable[[str], nn.Module]] = {
    "ModuleList": lambda kind: PostReader(kind, lambda: [PostBlock(name) for name in NAMES], nn.ModuleList),
    "Sequential": lambda kind: PostReader(kind, lambda: [PostBlock(name) for name in NAMES], nn.Sequential),
    "Sequential of Sequentials": lambda kind: PostReader(
        kind, lambda: [nn.Sequential(PostBlock(a), PostBlock(b)) for a, b in (NAMES[:2], NAMES[2:])], nn.Sequential
    ),
    "list of AddNorms": lambda kind: PostReader(kind, add_norms, nn.ModuleList),
    "Sequential of AddNorms": lambda kind: PostReader(kind, add_norms, nn.Sequential),
    "[attention, norm, feed, norm]": lambda kind: PostFour(kind, fours, nn.ModuleList),
    "as in BERT": lambda kind: PostReader(kind, lambda: [BertLayer(name) for name in NAMES], nn.ModuleList),
    "nn.TransformerEncoder": lambda kind: PostReader(kind, lambda: [torch_encoder(post=True)], nn.Sequential),
    "list of nn.TransformerEncoderLayer": lambda kind: PostReader(kind, lambda: [torch_layer(name, True) for name in NAMES], nn.ModuleList),
}


# -- one block, called three times ------------------------------------------------------------------------------------------------
class Repeated(Reader):
    def __init__(self, kind: str, build_blocks: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.embed, self.mean, self.call = EMBEDDINGS[kind](), kind == "vectors", call
        self.blocks = build_blocks()
        self.norm, self.head = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.call(self.blocks, x)


def each(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def three_times(block: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = block(x)
    return x


def tied() -> nn.ModuleList:
    """Three modules with the same parameters."""
    blocks = nn.ModuleList([Block(NAMES[0]) for _ in range(3)])
    shared = dict(blocks[0].named_parameters())
    for block in blocks[1:]:
        for name, parameter in shared.items():
            holder, _, last = name.rpartition(".")
            setattr(block.get_submodule(holder), last, parameter)
    return blocks


SHARED: dict[str, Callable[[str], nn.Module]] = {
    "copies": lambda kind: Repeated(kind, lambda: nn.ModuleList([copy.deepcopy(Block(NAMES[0])) for _ in range(3)]), each),
    "[b, b, b]": lambda kind: Repeated(kind, lambda: nn.ModuleList([Block(NAMES[0])] * 3), each),
    "Sequential(b, b, b)": lambda kind: Repeated(kind, lambda: nn.Sequential(*[Block(NAMES[0])] * 3), lambda blocks, x: blocks(x)),
    "called three times": lambda kind: Repeated(kind, lambda: Block(NAMES[0]), three_times),
    "list of one, called three times": lambda kind: Repeated(
        kind, lambda: nn.ModuleList([Block(NAMES[0])]), lambda blocks, x: three_times(blocks[0], x)
    ),
    "tied parameters": lambda kind: Repeated(kind, tied, each),
    "groups of one block": lambda kind: Repeated(
        kind, lambda: nn.ModuleList([nn.ModuleList([Block(NAMES[0])])]), lambda blocks, x: functools.reduce(lambda y, i: blocks[i // 3][0](y), range(3), x)
    ),
}


