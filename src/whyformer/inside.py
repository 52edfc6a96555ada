"""Relevance of the attention heads, MLPs and neurons of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.errors import ModelError, check_count
from whyformer.tape.attentions import Attention
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Block
from whyformer.tape.walking import Composite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.recording import Record
    from whyformer.targets import Target

_ACTIVATED = ("activation", "gate", "activated gate", "rectifier")
_PASSING = ("view", "scale", "clip")


@dataclass(frozen=True)
class Neuron:
    """One neuron of an MLP.

    Attributes:
        block: index of its block, from 0.
        module: path of the module that computes it.
        index: its index along the last axis.
        relevance: its relevance, summed over all tokens.
    """

    block: int
    module: str
    index: int
    relevance: float


@dataclass(frozen=True, eq=False)
class Inside:
    """Relevance of the parts of a model, for each sample of a batch; see :meth:`whyformer.Record.inside`.

    Attributes:
        attentions: ``[B, L]``, relevance of each of the L attentions: that of A·V, summed over heads, queries and
            channels.
        heads: ``[B, L, H]``, the part of each head; NaN for heads that an attention does not have, and if its heads
            cannot be distinguished.
        neurons: for each MLP, ``[B, n]``, the relevance of its neurons after the activation, summed over the tokens.
        attention_blocks, mlp_blocks: index of the block of each attention and MLP, from 0.
        modules: for each MLP, path of the module that computes the neurons.
        target_names: name of the target of each sample.
        composite: name of the rules of the walk.
    """

    attentions: Tensor
    heads: Tensor
    neurons: list[Tensor]
    attention_blocks: list[int]
    mlp_blocks: list[int]
    modules: list[str]
    target_names: list[str]
    composite: str

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return 1 + max([*self.attention_blocks, *self.mlp_blocks], default=-1)

    def layers(self, sample: int = 0) -> tuple[Tensor, Tensor]:
        """Return the relevance of the attentions and of the MLPs of each block, ``[blocks]`` each; NaN for a block
        without any."""
        mlps = [neurons[sample].sum() for neurons in self.neurons]
        return self._of_blocks(self.attention_blocks, self.attentions[sample]), self._of_blocks(self.mlp_blocks, mlps)

    def _of_blocks(self, numbers: list[int], values: Iterable[Tensor]) -> Tensor:
        totals = torch.full((self.blocks,), torch.nan, dtype=torch.float64)
        for number, value in zip(numbers, values, strict=True):
            totals[number] = value + totals[number].nan_to_num()
        return totals

    def top_neurons(self, k: int = 10, sample: int = 0) -> list[Neuron]:
        """Return the k neurons of all MLPs with the largest |relevance|, in descending order."""
        check_count("k", k)
        neurons: list[Neuron] = []
        for block, module, values in zip(self.mlp_blocks, self.modules, self.neurons, strict=True):
            relevance = values[sample]
            best = relevance.abs().argsort(descending=True, stable=True)[:k].tolist()
            neurons += [Neuron(block, module, index, float(relevance[index])) for index in best]
        return sorted(neurons, key=lambda neuron: -abs(neuron.relevance))[:k]

    def figure(self, sample: int = 0, k: int = 10) -> Figure:
        """Plot the heads of all blocks, the relevance of each block, and the k neurons with the largest |relevance|."""
        from whyformer.show.inside import figure

        return figure(self, sample, k)

    def __str__(self) -> str:
        first = f"Inside: relevance of {self.target_names[0]} ({self.composite})"
        attention, mlp = self.layers()
        lines = [f"  block {b}: attention {attention[b]:+.3g}, MLP {mlp[b]:+.3g}" for b in range(self.blocks)]
        best = [f"  neuron {n.index} of {n.module}: {n.relevance:+.3g}" for n in self.top_neurons(5)]
        return "\n".join([first, *lines, *best])


def look_inside(record: Record, target: Target, composite: str | Composite, names: list[str]) -> Inside:
    """Compute the relevance of heads, MLPs and neurons, see :meth:`whyformer.Record.inside`."""
    layout = record.layout(target)
    blocks = [block for stream in layout.streams for block in stream.blocks]
    attentions = [(b, a) for b, block in enumerate(blocks) for a in block.attentions]
    mlps = list(_mlps(record, blocks))
    if not attentions and not mlps:
        raise ModelError("no attention and no MLP of a block leads to the target: this pass has no heads or neurons")
    needed = [n for _, a in attentions for n in a.products] + [n for _, n in mlps]
    relevance = {value.number: scores for value, scores in record.relevances(needed, target, composite).items()}
    plain = record.walk_back([*needed, *(m for _, a in attentions for m in a.maps)], target)
    flows = {value.number: flow for value, flow in plain.items()}
    samples = RowSamples(layout.rows)
    tables = [_of_heads(record, a, relevance, flows) for _, a in attentions]
    counts = [max(a.heads, 1) if t is None else t.shape[1] for (_, a), t in zip(attentions, tables, strict=True)]
    most = max(counts, default=0)
    heads = torch.full((len(names), len(tables), most), torch.nan, dtype=torch.float64)
    for i, table in enumerate(tables):
        if table is not None:
            heads[:, i, : table.shape[1]] = table
    totals = torch.zeros(len(names), len(attentions), dtype=torch.float64)
    for i, (_, attention) in enumerate(attentions):
        for n in attention.products:
            totals[:, i] += samples.sums(n, relevance[n]).double().cpu()
    neurons = [_of_samples(relevance[n], samples.of(n, relevance[n]), len(names)) for _, n in mlps]
    modules = [record.value(n).module for _, n in mlps]
    rules = composite if isinstance(composite, str) else "own rules"
    numbers = [b for b, _ in attentions], [b for b, _ in mlps]
    return Inside(totals, heads, neurons, *numbers, modules, names, rules)


def _mlps(record: Record, blocks: list[Block]) -> Iterator[tuple[int, int]]:
    """Yield (block, number) of the values that an activation computes and a linear layer in the same block reads."""
    makers = record.program.makers
    # a block whose entry is learned vectors begins at its attention
    starts = [b.entry if b.entry >= 0 else min(a.map for a in b.attentions) for b in blocks]
    yielded: set[int] = set()
    for unit in record.units:
        if unit.kind != "layer" or unit.name == "convolution":
            continue
        number = unit.entries[0]
        while number in makers and makers[number].kind in _PASSING:
            number = makers[number].entries[0]
        block = next((i for i, b in enumerate(blocks) if starts[i] < number < b.exit), None)
        if number in makers and makers[number].kind in _ACTIVATED and block is not None and number not in yielded:
            yielded.add(number)
            yield block, number


def _of_heads(
    record: Record, attention: Attention, flows: dict[int, Tensor], plain: dict[int, Tensor]
) -> Tensor | None:
    """Return ``[B, H]``, the relevance of the heads; None if the heads cannot be distinguished."""

    def by_query(values: dict[int, Tensor]) -> list[Tensor]:
        """Sums over the channels of A·V, spread evenly over the keys, in the layout of the maps."""
        shapes = [record.tape.shapes[piece.map] for piece in attention.pieces]
        sums = [values[piece.product].sum(-1) for piece in attention.pieces]
        return [(total.reshape(s[:-1])[..., None] / s[-1]).expand(s) for total, s in zip(sums, shapes, strict=True)]

    products, maps = attention.products, attention.maps
    try:
        heads = attention.arrange(*by_query(flows)).sum((-2, -1)).double()
        # with plain gradients, Σ value · gradient over the map of a query and head equals that over its product
        outer = attention.arrange(*by_query({n: record.tape[n] * plain[n] for n in products})).sum(-1)
        inner = attention.arrange(*(record.tape[n] * plain[n] for n in maps)).sum(-1)
    except (ModelError, RuntimeError):
        return None
    close = (outer - inner).abs().max() <= 1e-3 * inner.abs().max() + 1e-12
    return heads if bool(close) else None


def _of_samples(values: Tensor, samples: Tensor, count: int) -> Tensor:
    """Return ``[B, n]``, the sums over the rows of each sample."""
    rows = samples.to(values.device).expand(*values.shape[:-1], 1).flatten()
    sums = values.new_zeros(count, values.shape[-1], dtype=torch.float64)
    return sums.index_add_(0, rows, values.reshape(-1, values.shape[-1]).double()).cpu()
