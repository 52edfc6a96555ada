"""Whole blocks in different containers, called in different ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base import (
    CLASSES,
    EMBEDDINGS,
    WIDTH,
    layer_norm,
    linear,
)
from .pieces import DEPTH, NAMES, Block, Reader


# -- containers of whole blocks ------------------------------------------------------------------------------------------------
class Listed(Reader):
    def add_blocks(self) -> None:
        self.blocks = nn.ModuleList([Block(name) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sequenced(Reader):
    def add_blocks(self) -> None:
        self.blocks = nn.Sequential(*[Block(name) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Attributes(Reader):
    def add_blocks(self) -> None:
        self.first, self.second, self.third, self.fourth = (Block(name) for name in NAMES)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))


class ListAndLast(Reader):
    def add_blocks(self) -> None:
        self.blocks, self.last = nn.ModuleList([Block(name) for name in NAMES[:-1]]), Block(NAMES[-1])

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class FirstAndList(Reader):
    def add_blocks(self) -> None:
        self.stem, self.blocks = Block(NAMES[0]), nn.ModuleList([Block(name) for name in NAMES[1:]])

    def run_blocks(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class TwoLists(Reader):
    cut = 2

    def add_blocks(self) -> None:
        self.lower = nn.ModuleList([Block(name) for name in NAMES[: self.cut]])
        self.upper = nn.ModuleList([Block(name) for name in NAMES[self.cut :]])

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.lower:
            x = block(x)
        for block in self.upper:
            x = block(x)
        return x


class UnequalLists(TwoLists):
    cut = 1


class Stages(Reader):
    def add_blocks(self) -> None:
        self.stages = nn.Sequential(*[nn.Sequential(Block(a), Block(b)) for a, b in (NAMES[:2], NAMES[2:])])

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.stages(x)


class ListOfStages(Stages):
    def add_blocks(self) -> None:
        self.stages = nn.ModuleList([nn.Sequential(*map(Block, NAMES[:1])), nn.Sequential(*map(Block, NAMES[1:]))])

    def run_blocks(self, x: Tensor) -> Tensor:
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
    def add_blocks(self) -> None:
        self.stage1, self.stage2 = Stage(NAMES[:2]), Stage(NAMES[2:])

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.stage2(self.stage1(x))


class Dictionary(Reader):
    def add_blocks(self) -> None:
        self.blocks = nn.ModuleDict({name: Block(name) for name in NAMES})

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class DictionaryByKey(Dictionary):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleDict({f"layer_{i}": nn.ModuleDict({"block": Block(name)}) for i, name in enumerate(NAMES)})

    def run_blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = self.layers[f"layer_{i}"]["block"](x)
        return x


class PairsOfBlocks(Reader):
    def add_blocks(self) -> None:
        self.pairs = nn.ModuleList([nn.ModuleList([Block(a), Block(b)]) for a, b in (NAMES[:2], NAMES[2:])])

    def run_blocks(self, x: Tensor) -> Tensor:
        for first, second in self.pairs:
            x = second(first(x))
        return x


class PlainList(Reader):
    def add_blocks(self) -> None:
        self.layers = [Block(name) for name in NAMES]
        for i, layer in enumerate(self.layers):
            self.add_module(f"layer{i}", layer)

    def run_blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class NumberedAttributes(Reader):
    def add_blocks(self) -> None:
        for i, name in enumerate(NAMES):
            setattr(self, f"h{i}", Block(name))

    def run_blocks(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = getattr(self, f"h{i}")(x)
        return x


class WithNones(Reader):
    """Lists [None, block, None], as of models with optional norms."""

    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([nn.ModuleList([None, None, None]), Block(name), None]) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        for norms, block, scale in self.layers:
            x = block(x) if all(n is None for n in norms) else x
            x = x if scale is None else scale(x)
        return x


class ListOfNones(Listed):
    """A second list of the same length that contains None only."""

    def add_blocks(self) -> None:
        super().add_blocks()
        self.projections = nn.ModuleList([None] * DEPTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, projection in zip(self.blocks, self.projections, strict=True):
            x = block(x) if projection is None else projection(block(x))
        return x


class WithIdentities(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.Sequential(*[m for name in NAMES for m in (nn.Dropout(0.1), Block(name), nn.Identity())])

    def run_blocks(self, x: Tensor) -> Tensor:
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
    def add_blocks(self) -> None:
        self.chain = Chained(NAMES)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.chain(x)


class BackToFront(Reader):
    def add_blocks(self) -> None:
        self.blocks = nn.ModuleList([Block(name) for name in reversed(NAMES)])

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class ByIndex(Reader):
    order = (2, 0, 3, 1)

    def add_blocks(self) -> None:
        self.blocks = nn.ModuleList([Block(NAMES[self.order.index(i)]) for i in range(DEPTH)])

    def run_blocks(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


class Checkpointed(Listed):
    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TupleBlock(Block):
    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any, Any]:
        return super().forward(hidden_states), past, mask


class Tuples(Reader):
    def add_blocks(self) -> None:
        self.layers = nn.ModuleList([TupleBlock(name) for name in NAMES])

    def run_blocks(self, x: Tensor) -> Tensor:
        states: tuple[Any, ...] = ()
        for layer in self.layers:
            outputs = layer(hidden_states=x, mask=None)
            x, states = outputs[0], (*states, outputs[1])
        return x


class AllStates(Listed):
    """Collects the output of every block."""

    def run_blocks(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states[-1]


class WithNorm(Reader):
    """The final norm as last module of the sequence of blocks."""

    def add_blocks(self) -> None:
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
    """A model inside two wrapper models."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"model": Listed(kind)})

    def forward(self, x: Tensor) -> Tensor:
        return self.module["model"](x)


WHOLE: dict[str, Callable[[str], nn.Module]] = {
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
}
