"""The same four blocks, kept and called in other ways."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import (
    CLASSES,
    EMBEDDINGS,
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
    inputs,
    layer_norm,
    linear,
    matrix,
    merged,
    shift,
)
from .form import Form
from .functions.attentions import multihead

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
    """Attention with its norm inside."""

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
    """Between an embedding and a head: what subclasses write."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.mean = EMBEDDINGS[kind](), kind == "vectors"
        self.keep()
        self.norm, self.head = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def keep(self) -> None:
        """Blocks become modules."""
        raise NotImplementedError

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.through(self.embed(x)))
        return self.head(x.mean(1) if self.mean else x[:, 0])


# -- containers of whole blocks ------------------------------------------------------------------------------------------------
class Listed(Reader):
    def keep(self) -> None:
        self.blocks = nn.ModuleList([Block(name) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sequenced(Reader):
    def keep(self) -> None:
        self.blocks = nn.Sequential(*[Block(name) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Attributes(Reader):
    def keep(self) -> None:
        self.first, self.second, self.third, self.fourth = (Block(name) for name in NAMES)

    def through(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))


class ListAndLast(Reader):
    def keep(self) -> None:
        self.blocks, self.last = nn.ModuleList([Block(name) for name in NAMES[:-1]]), Block(NAMES[-1])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class FirstAndList(Reader):
    def keep(self) -> None:
        self.stem, self.blocks = Block(NAMES[0]), nn.ModuleList([Block(name) for name in NAMES[1:]])

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class TwoLists(Reader):
    cut = 2

    def keep(self) -> None:
        self.lower = nn.ModuleList([Block(name) for name in NAMES[: self.cut]])
        self.upper = nn.ModuleList([Block(name) for name in NAMES[self.cut :]])

    def through(self, x: Tensor) -> Tensor:
        for block in self.lower:
            x = block(x)
        for block in self.upper:
            x = block(x)
        return x


class UnequalLists(TwoLists):
    cut = 1


class Stages(Reader):
    def keep(self) -> None:
        self.stages = nn.Sequential(*[nn.Sequential(Block(a), Block(b)) for a, b in (NAMES[:2], NAMES[2:])])

    def through(self, x: Tensor) -> Tensor:
        return self.stages(x)


class ListOfStages(Stages):
    def keep(self) -> None:
        self.stages = nn.ModuleList([nn.Sequential(*map(Block, NAMES[:1])), nn.Sequential(*map(Block, NAMES[1:]))])

    def through(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Stage(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(name) for name in names])

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: block(x), self.blocks, x)


class OwnStages(Reader):
    def keep(self) -> None:
        self.stage1, self.stage2 = Stage(NAMES[:2]), Stage(NAMES[2:])

    def through(self, x: Tensor) -> Tensor:
        return self.stage2(self.stage1(x))


class Dictionary(Reader):
    def keep(self) -> None:
        self.blocks = nn.ModuleDict({name: Block(name) for name in NAMES})

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class DictionaryByKey(Dictionary):
    def keep(self) -> None:
        self.layers = nn.ModuleDict({f"layer_{i}": nn.ModuleDict({"block": Block(name)}) for i, name in enumerate(NAMES)})

    def through(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = self.layers[f"layer_{i}"]["block"](x)
        return x


class PairsOfBlocks(Reader):
    def keep(self) -> None:
        self.pairs = nn.ModuleList([nn.ModuleList([Block(a), Block(b)]) for a, b in (NAMES[:2], NAMES[2:])])

    def through(self, x: Tensor) -> Tensor:
        for first, second in self.pairs:
            x = second(first(x))
        return x


class PlainList(Reader):
    def keep(self) -> None:
        self.layers = [Block(name) for name in NAMES]
        for i, layer in enumerate(self.layers):
            self.add_module(f"layer{i}", layer)

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class NumberedAttributes(Reader):
    def keep(self) -> None:
        for i, name in enumerate(NAMES):
            setattr(self, f"h{i}", Block(name))

    def through(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = getattr(self, f"h{i}")(x)
        return x


class WithNones(Reader):
    """Lists of [nothing, block, nothing], where other settings would put norms."""

    def keep(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([nn.ModuleList([None, None, None]), Block(name), None]) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for norms, block, scale in self.layers:
            x = block(x) if all(n is None for n in norms) else x
            x = x if scale is None else scale(x)
        return x


class ListOfNones(Listed):
    """Beside the blocks a list of the same length that holds nothing."""

    def keep(self) -> None:
        super().keep()
        self.projections = nn.ModuleList([None] * DEPTH)

    def through(self, x: Tensor) -> Tensor:
        for block, projection in zip(self.blocks, self.projections, strict=True):
            x = block(x) if projection is None else projection(block(x))
        return x


class WithIdentities(Reader):
    def keep(self) -> None:
        self.layers = nn.Sequential(*[m for name in NAMES for m in (nn.Dropout(0.1), Block(name), nn.Identity())])

    def through(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Chained(nn.Module):
    """A block that holds the next one."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.block, self.next = Block(names[0]), Chained(names[1:]) if names[1:] else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if self.next is None else self.next(x)


class Nested(Reader):
    def keep(self) -> None:
        self.chain = Chained(NAMES)

    def through(self, x: Tensor) -> Tensor:
        return self.chain(x)


class BackToFront(Reader):
    def keep(self) -> None:
        self.blocks = nn.ModuleList([Block(name) for name in reversed(NAMES)])

    def through(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class ByIndex(Reader):
    order = (2, 0, 3, 1)

    def keep(self) -> None:
        self.blocks = nn.ModuleList([Block(NAMES[self.order.index(i)]) for i in range(DEPTH)])

    def through(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


class Checkpointed(Listed):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TupleBlock(Block):
    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any, Any]:
        return super().forward(hidden_states), past, mask


class Tuples(Reader):
    def keep(self) -> None:
        self.layers = nn.ModuleList([TupleBlock(name) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        kept: tuple[Any, ...] = ()
        for layer in self.layers:
            outputs = layer(hidden_states=x, mask=None)
            x, kept = outputs[0], (*kept, outputs[1])
        return x


class AllStates(Listed):
    """Keeps what every block puts out."""

    def through(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states[-1]


class WithNorm(Reader):
    """The last norm at the end of the same sequence as the blocks."""

    def keep(self) -> None:
        self.encoder = nn.Sequential(*[Block(name) for name in NAMES], layer_norm("norm"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.embed(x))
        return self.head(x.mean(1) if self.mean else x[:, 0])


class Read(nn.Module):
    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) if self.mean else x[:, 0]


def one_sequence(kind: str) -> nn.Module:
    """The whole model as one sequence."""
    parts = [EMBEDDINGS[kind](), *[Block(name) for name in NAMES], layer_norm("norm"), Read(kind == "vectors")]
    return nn.Sequential(*parts, linear("head", CLASSES, WIDTH))


class Wrapped(nn.Module):
    """A model around a model around a model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"model": Listed(kind)})

    def forward(self, x: Tensor) -> Tensor:
        return self.module["model"](x)


# -- containers of parts of blocks -------------------------------------------------------------------------------------------------
class AttentionAndFeed(Reader):
    """Pairs of attention and feed-forward layer, each with its norm inside; the sums stand in the model."""

    def keep(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([NormedAttention(name), normed_feed(name)]) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class FourOfEach(Reader):
    def keep(self) -> None:
        self.layers = nn.ModuleList()
        for name in NAMES:
            parts = [layer_norm(f"{name}.norm1"), Attention(name, PLAIN), layer_norm(f"{name}.norm2"), FeedForward(name, PLAIN)]
            self.layers.append(nn.ModuleList(parts))

    def through(self, x: Tensor) -> Tensor:
        for norm1, attn, norm2, ff in self.layers:
            x = x + attn(norm1(x))
            x = x + ff(norm2(x))
        return x


class PreNormPairs(Reader):
    def keep(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList(prenormed(name)) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class ResidualPairs(Reader):
    def keep(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([Residual(m) for m in prenormed(name)]) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = ff(attn(x))
        return x


class FlatResiduals(Reader):
    def keep(self) -> None:
        self.net = nn.Sequential(*[Residual(m) for name in NAMES for m in prenormed(name)])

    def through(self, x: Tensor) -> Tensor:
        return self.net(x)


class SequencesOfResiduals(Reader):
    def keep(self) -> None:
        self.net = nn.Sequential(*[nn.Sequential(*[Residual(m) for m in prenormed(name)]) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        return self.net(x)


class FlatSublayers(Reader):
    """A flat list of branches; the model adds each."""

    def keep(self) -> None:
        self.sublayers = nn.ModuleList([m for name in NAMES for m in prenormed(name)])

    def through(self, x: Tensor) -> Tensor:
        for branch in self.sublayers:
            x = x + branch(x)
        return x


class ParallelLists(Reader):
    def keep(self) -> None:
        self.attentions = nn.ModuleList([Attention(name, PLAIN) for name in NAMES])
        self.feeds = nn.ModuleList([FeedForward(name, PLAIN) for name in NAMES])
        self.norms1 = nn.ModuleList([layer_norm(f"{name}.norm1") for name in NAMES])
        self.norms2 = nn.ModuleList([layer_norm(f"{name}.norm2") for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for attention, feed, norm1, norm2 in zip(self.attentions, self.feeds, self.norms1, self.norms2, strict=True):
            x = x + attention(norm1(x))
            x = x + feed(norm2(x))
        return x


class Sublayers(nn.Module):
    """A block whose sums are in modules that are handed a function."""

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
    def keep(self) -> None:
        self.layers = nn.ModuleList([Sublayers(name) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Hooked(Reader):
    """Norms and sums in hooks."""

    def keep(self) -> None:
        self.layers = nn.ModuleList()
        for name in NAMES:
            for number, module in ((1, Attention(name, PLAIN)), (2, FeedForward(name, PLAIN))):
                norm = layer_norm(f"{name}.norm{number}")
                self.layers.append(nn.ModuleList([Behind(norm, module)]))

    def through(self, x: Tensor) -> Tensor:
        for (layer,) in self.layers:
            x = layer(x)
        return x


class Behind(nn.Module):
    """A module whose forward hook adds what came in."""

    def __init__(self, norm: nn.Module, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = norm, fn
        self.register_forward_hook(lambda module, args, output: output + args[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class InlineBlocks(Reader):
    parts = PLAIN

    def keep(self) -> None:
        self.blocks = nn.ModuleList([InlineBlock(name, self.parts) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InlineParameters(InlineBlocks):
    """Blocks that hold parameters, and no modules."""

    parts = Parts(linear=F.linear)


def tensors(name: str) -> dict[str, Tensor]:
    found = {}
    for part, out, into in (*((p, WIDTH, WIDTH) for p in "qkvo"), ("up", INNER, WIDTH), ("down", WIDTH, INNER)):
        found[f"{part}_weight"], found[f"{part}_bias"] = matrix(f"{name}.{part}.weight", out, into), shift(f"{name}.{part}.bias", out)
    for norm in ("norm1", "norm2"):
        found[f"{norm}_weight"], found[f"{norm}_bias"] = gain(f"{name}.{norm}.weight", WIDTH), shift(f"{name}.{norm}.bias", WIDTH)
    return found


def functional_block(x: Tensor, w: Any) -> Tensor:
    """A block as a function of its input and its tensors."""
    h = F.layer_norm(x, (WIDTH,), w["norm1_weight"], w["norm1_bias"], EPS)
    q, k, v = (heads(F.linear(h, w[f"{p}_weight"], w[f"{p}_bias"])) for p in "qkv")
    mixed = (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
    x = x + F.linear(merged(mixed), w["o_weight"], w["o_bias"])
    h = F.layer_norm(x, (WIDTH,), w["norm2_weight"], w["norm2_bias"], EPS)
    return x + F.linear(F.gelu(F.linear(h, w["up_weight"], w["up_bias"])), w["down_weight"], w["down_bias"])


class ParametersOnly(Reader):
    """No modules of blocks: dictionaries of parameters, and a function."""

    def keep(self) -> None:
        self.weights = nn.ModuleList([nn.ParameterDict(tensors(name)) for name in NAMES])

    def through(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = functional_block(x, w)
        return x


class ParameterLists(Reader):
    """One list of parameters for each part, over all blocks."""

    def keep(self) -> None:
        self.parts = list(tensors(NAMES[0]))
        for part in self.parts:
            setattr(self, part, nn.ParameterList([tensors(name)[part] for name in NAMES]))

    def through(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = functional_block(x, {part: getattr(self, part)[i] for part in self.parts})
        return x


class StackedParameters(Reader):
    """One tensor for each part, with an axis of blocks."""

    def keep(self) -> None:
        self.parts = list(tensors(NAMES[0]))
        for part in self.parts:
            self.register_parameter(part, nn.Parameter(torch.stack([tensors(name)[part] for name in NAMES])))

    def through(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = functional_block(x, {part: getattr(self, part)[i] for part in self.parts})
        return x


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


class TorchEncoder(Reader):
    def keep(self) -> None:
        self.encoder = torch_encoder(post=False)

    def through(self, x: Tensor) -> Tensor:
        return self.encoder(x)


CONTAINERS: dict[str, Callable[[str], nn.Module]] = {
    "ModuleList": Listed,
    "Sequential": Sequenced,
    "attributes": Attributes,
    "list and an attribute behind": ListAndLast,
    "an attribute before a list": FirstAndList,
    "two lists": TwoLists,
    "two lists, one and three": UnequalLists,
    "Sequential of Sequentials": Stages,
    "list of Sequentials": ListOfStages,
    "modules of stages": OwnStages,
    "ModuleDict": Dictionary,
    "ModuleDicts by key": DictionaryByKey,
    "pairs of blocks": PairsOfBlocks,
    "plain list, add_module": PlainList,
    "numbered attributes": NumberedAttributes,
    "lists with None": WithNones,
    "a list of None beside": ListOfNones,
    "identities between": WithIdentities,
    "each holds the next": Nested,
    "back to front": BackToFront,
    "by index": ByIndex,
    "checkpointed": Checkpointed,
    "tuples": Tuples,
    "all states": AllStates,
    "norm in the same Sequential": WithNorm,
    "one Sequential": one_sequence,
    "wrapped": Wrapped,
    "traced by torch.fx": lambda kind: torch.fx.symbolic_trace(Listed(kind)),
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
    """No norm behind the last block. ``made`` gives the modules that are called one behind the other."""

    def __init__(self, kind: str, made: Callable[[], list[nn.Module]], container: Callable[..., nn.Module]) -> None:
        self.made, self.container = made, container
        nn.Module.__init__(self)
        self.embed, self.mean = EMBEDDINGS[kind](), kind == "vectors"
        self.layers = container(made()) if container is nn.ModuleList else container(*made())
        self.norm, self.head = nn.Identity(), linear("head", CLASSES, WIDTH)

    def through(self, x: Tensor) -> Tensor:
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
    def through(self, x: Tensor) -> Tensor:
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
    def __init__(self, kind: str, kept: Callable[[], nn.Module], called: Callable[[Any, Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.embed, self.mean, self.called = EMBEDDINGS[kind](), kind == "vectors", called
        self.blocks = kept()
        self.norm, self.head = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        return self.called(self.blocks, x)


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
    own = dict(blocks[0].named_parameters())
    for block in blocks[1:]:
        for name, parameter in own.items():
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


def _built(make: Callable[[str], nn.Module], kind: str) -> nn.Module:
    return make(kind).double().eval()


def forms() -> Iterator[Form]:
    for function, ways, norm in (("four blocks", CONTAINERS, "pre-norm"), ("four blocks", POST, "post-norm"), ("a block shared", SHARED, "pre-norm")):
        for kind in ("vectors", "ids", "pixels"):
            for way, make in ways.items():
                yield Form("containers", function, way, f"{norm}, {kind}", partial(_built, make, kind), partial(inputs, kind))
