"""Attention, feed-forward layers and norms in separate lists, in wrappers, in hooks, or as parameters of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import (
    EPS,
    HEADS,
    INNER,
    WIDTH,
    Attention,
    FeedForward,
    InlineBlock,
    Parts,
    gain,
    heads,
    layer_norm,
    matrix,
    merged,
    shift,
)
from .pieces import DEPTH, NAMES, PLAIN, NormedAttention, Reader, Residual, normed_feed, prenormed, torch_encoder


# -- containers of parts of blocks -------------------------------------------------------------------------------------------------
class AttentionAndFeed(Reader):
    """Pairs of attention and feed-forward layer, each with its norm; the model adds the residuals."""

    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([NormedAttention(name), normed_feed(name)]) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class FourOfEach(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleList()
        for name in NAMES:
            parts = [layer_norm(f"{name}.norm1"), Attention(name, PLAIN), layer_norm(f"{name}.norm2"), FeedForward(name, PLAIN)]
            self.layers.append(nn.ModuleList(parts))

    def run_blocks(self, x: Tensor) -> Tensor:
        for norm1, attn, norm2, ff in self.layers:
            x = x + attn(norm1(x))
            x = x + ff(norm2(x))
        return x


class PreNormPairs(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList(prenormed(name)) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class ResidualPairs(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([Residual(m) for m in prenormed(name)]) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = ff(attn(x))
        return x


class FlatResiduals(Reader):
    def add_blocks(self) -> None:
        self.net = nn.Sequential(*[Residual(m) for name in NAMES for m in prenormed(name)])

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.net(x)


class SequencesOfResiduals(Reader):
    def add_blocks(self) -> None:
        self.net = nn.Sequential(*[nn.Sequential(*[Residual(m) for m in prenormed(name)]) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.net(x)


class FlatSublayers(Reader):
    """A flat list of branches; the model adds the residuals."""

    def add_blocks(self) -> None:
        self.sublayers = nn.ModuleList([m for name in NAMES for m in prenormed(name)])

    def run_blocks(self, x: Tensor) -> Tensor:
        for branch in self.sublayers:
            x = x + branch(x)
        return x


class ParallelLists(Reader):
    def add_blocks(self) -> None:
        self.attentions = nn.ModuleList([Attention(name, PLAIN) for name in NAMES])
        self.feeds = nn.ModuleList([FeedForward(name, PLAIN) for name in NAMES])
        self.norms1 = nn.ModuleList([layer_norm(f"{name}.norm1") for name in NAMES])
        self.norms2 = nn.ModuleList([layer_norm(f"{name}.norm2") for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for attention, feed, norm1, norm2 in zip(self.attentions, self.feeds, self.norms1, self.norms2, strict=True):
            x = x + attention(norm1(x))
            x = x + feed(norm2(x))
        return x


class Sublayers(nn.Module):
    """A block whose residual modules take the branch as a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = Attention(name, PLAIN), FeedForward(name, PLAIN)
        self.sublayer = nn.ModuleList([Sublayer(layer_norm(f"{name}.norm{i}")) for i in (1, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda y: self.self_attn(y))
        return self.sublayer[1](x, self.feed_forward)


class Sublayer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(0.1)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class SublayerBlocks(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([Sublayers(name) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Hooked(Reader):
    """Norms and residuals in hooks."""

    def add_blocks(self) -> None:
        self.layers = nn.ModuleList()
        for name in NAMES:
            for number, module in ((1, Attention(name, PLAIN)), (2, FeedForward(name, PLAIN))):
                norm = layer_norm(f"{name}.norm{number}")
                self.layers.append(nn.ModuleList([Behind(norm, module)]))

    def run_blocks(self, x: Tensor) -> Tensor:
        for (layer,) in self.layers:
            x = layer(x)
        return x


class Behind(nn.Module):
    """A module whose forward hook adds its input."""

    def __init__(self, norm: nn.Module, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = norm, fn
        self.register_forward_hook(lambda module, args, output: output + args[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class InlineBlocks(Reader):
    parts = PLAIN

    def add_blocks(self) -> None:
        self.blocks = nn.ModuleList([InlineBlock(name, self.parts) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InlineParameters(InlineBlocks):
    """Blocks with parameters but without modules."""

    parts = Parts(linear=F.linear)


def tensors(name: str) -> dict[str, Tensor]:
    weights = {}
    for part, out, into in (*((p, WIDTH, WIDTH) for p in "qkvo"), ("up", INNER, WIDTH), ("down", WIDTH, INNER)):
        weights[f"{part}_weight"], weights[f"{part}_bias"] = matrix(f"{name}.{part}.weight", out, into), shift(f"{name}.{part}.bias", out)
    for norm in ("norm1", "norm2"):
        weights[f"{norm}_weight"], weights[f"{norm}_bias"] = gain(f"{name}.{norm}.weight", WIDTH), shift(f"{name}.{norm}.bias", WIDTH)
    return weights


def functional_block(x: Tensor, w: Any) -> Tensor:
    """A block as a function of its input and its tensors."""
    h = F.layer_norm(x, (WIDTH,), w["norm1_weight"], w["norm1_bias"], EPS)
    q, k, v = (heads(F.linear(h, w[f"{p}_weight"], w[f"{p}_bias"])) for p in "qkv")
    mixed = (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
    x = x + F.linear(merged(mixed), w["o_weight"], w["o_bias"])
    h = F.layer_norm(x, (WIDTH,), w["norm2_weight"], w["norm2_bias"], EPS)
    return x + F.linear(F.gelu(F.linear(h, w["up_weight"], w["up_bias"])), w["down_weight"], w["down_bias"])


class ParametersOnly(Reader):
    """Dictionaries of parameters and a function instead of block modules."""

    def add_blocks(self) -> None:
        self.weights = nn.ModuleList([nn.ParameterDict(tensors(name)) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = functional_block(x, w)
        return x


class ParameterLists(Reader):
    """One list of parameters per part, over all blocks."""

    def add_blocks(self) -> None:
        self.parts = list(tensors(NAMES[0]))
        for part in self.parts:
            setattr(self, part, nn.ParameterList([tensors(name)[part] for name in NAMES]))

    def run_blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = functional_block(x, {part: getattr(self, part)[i] for part in self.parts})
        return x


class StackedParameters(Reader):
    """One tensor per part, with an axis of blocks."""

    def add_blocks(self) -> None:
        self.parts = list(tensors(NAMES[0]))
        for part in self.parts:
            self.register_parameter(part, nn.Parameter(torch.stack([tensors(name)[part] for name in NAMES])))

    def run_blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = functional_block(x, {part: getattr(self, part)[i] for part in self.parts})
        return x


class TorchEncoder(Reader):
    def add_blocks(self) -> None:
        self.encoder = torch_encoder(post=False)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.encoder(x)


PARTS: dict[str, Callable[[str], nn.Module]] = {
    "[attention, feed]": AttentionAndFeed,
    "[norm, attention, norm, feed]": FourOfEach,
    "[PreNorm, PreNorm]": PreNormPairs,
    "[Residual, Residual]": ResidualPairs,
    "Residuals in one Sequential": FlatResiduals,
    "Sequentials of Residuals": SequencesOfResiduals,
    "flat list of branches": FlatSublayers,
    "parallel lists": ParallelLists,
    "sublayers with a function": SublayerBlocks,
    "hooks": Hooked,
    "written out in one forward": InlineBlocks,
    "written out, parameters": InlineParameters,
    "ParameterDicts": ParametersOnly,
    "ParameterLists": ParameterLists,
    "stacked parameters": StackedParameters,
    "nn.TransformerEncoder": TorchEncoder,
}


