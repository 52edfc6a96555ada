"""Every attention map of one forward pass: each block, each head, and the token × token matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from whyformer.errors import InputError, MethodNotApplicable
from whyformer.explaining import open_model
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.methods.finishing import Finish
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import MapWatch, Scores
from whyformer.methods.texts import each_text
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.tape.walking import GRADIENT
from whyformer.targets import Target, of_samples

MOST_VALUES = 500_000_000


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the rows of a model lie on its inputs, so that scores of rows become an explanation without the model.

    Attributes:
        shares: for the main input ("") and each part, a layout whose values are the share that an element has of its
            row's score; empty where there is no layout.
        numbers: likewise the row of each element, counted through all samples.
        refusal: why there is no layout.
    """

    finish: Finish
    method: str
    shares: dict[str, Scores]
    numbers: dict[str, Tensor]
    refusal: str = ""

    def explanation(self, values: Tensor, settings: dict[str, Any]) -> Explanation:
        """The explanation of scores ``[B, N]`` of rows."""
        if not self.shares:
            raise MethodNotApplicable(self.refusal)
        placed = self.placed(values)
        parts = {name: replace(part, values=placed[name]) for name, part in self.shares.items()}
        return self.finish(replace(parts.pop(""), parts=parts), self.method, settings)

    def placed(self, values: Tensor) -> dict[str, Tensor]:
        """The scores of the elements of each input."""
        flat = values.flatten()
        return {name: flat[number] * self.shares[name].values.to(flat) for name, number in self.numbers.items()}


@dataclass(frozen=True, eq=False)
class PlacementApart:
    """The rows of samples that make no batch: those of each, and where they stand among those of the longest."""

    each: list[Placement | PlacementApart]
    spans: list[slice]
    padding: str
    left: bool

    def explanation(self, values: Tensor, settings: dict[str, Any]) -> Explanation:
        """As :meth:`Placement.explanation`."""
        made = [own.explanation(values[[i]][:, self.spans[i]], settings) for i, own in enumerate(self.each)]
        return joined(made, self.padding, self.left)


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of a batch.

    Attributes:
        maps: one a block, first to last, each ``[B, H, N, N]``: the row is the token that looks. Prefix tokens (CLS)
            and special ones are included.
        readout: ``[B, N]`` how much each row of the last block feeds the logits: one-hot for CLS, even for a mean.
        tokens: the names of the tokens of each sample, for text.
    """

    maps: list[Tensor]
    readout: Tensor
    tokens: list[list[str]] | None
    _placement: Placement | PlacementApart

    def __repr__(self) -> str:
        shapes = dict.fromkeys(f"{m.shape[1]} heads × {m.shape[2]}×{m.shape[3]} tokens" for m in self.maps)
        lines = [f"AttentionMaps of {len(self.readout)} sample{'s' * (len(self.readout) != 1)}: {self.blocks} blocks"]
        lines += [f"  {shape}" for shape in shapes]
        if self.tokens is not None:
            own = self.tokens[0]
            lines.append(f"  tokens: {' '.join(own[:12])}{' …' if len(own) > 12 else ''}")
        lines.append("  .explanation(block, head)  .matrix(block, head)  .each_block()  .each_head()")
        return "\n".join(lines)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.maps)

    @property
    def heads(self) -> int:
        """Number of heads of the first block."""
        return int(self.maps[0].shape[1])

    def matrix(self, block: int, head: int | str = "mean", sample: int = 0) -> Tensor:
        """``[N, N]`` who looks at whom in one block.

        Args:
            head: a head's number, or "mean", "max" or "min" over them.
        """
        return self._fused(block, head)[sample]

    def explanation(self, block: int, head: int | str = "mean", query: int | None = None) -> Explanation:
        """One row of the map as an explanation, to be drawn like any other.

        Args:
            head: as for :meth:`matrix`.
            query: number of the token that looks (prefix and special tokens are counted); by default the rows that
                feed the logits.
        """
        fused = self._fused(block, head)
        settings: dict[str, Any] = {"block": block % self.blocks, "head": head}
        if query is None:
            looked_at = torch.einsum("bq,bqk->bk", self.readout.to(fused.dtype), fused)
            return self._placement.explanation(looked_at, settings)
        if not -fused.shape[1] <= query < fused.shape[1]:
            raise InputError(f"there is no token {query}: the model sees {fused.shape[1]}, counted from 0")
        return self._placement.explanation(fused[:, query], {**settings, "query": query % fused.shape[1]})

    def each_block(self, head: int | str = "mean") -> list[Explanation]:
        """One explanation a block."""
        return [self.explanation(block, head) for block in range(self.blocks)]

    def each_head(self, block: int | None = None) -> list[Explanation]:
        """One explanation a head of a block; without a block, of all of them, block by block."""
        chosen = range(self.blocks) if block is None else [block]
        return [self.explanation(b, head) for b in chosen for head in range(self.maps[b].shape[1])]

    def _fused(self, block: int, head: int | str) -> Tensor:
        if not -self.blocks <= block < self.blocks:
            raise InputError(f"there is no block {block}: the model has {self.blocks}, counted from 0")
        if isinstance(head, str) and head not in ("mean", "max", "min"):
            raise InputError(f"a head is a number, or 'mean', 'max' or 'min' over them, not {head!r}")
        return Aggregation(heads=head).fuse(self.maps[block])


@shows_options
def attention_maps(
    model: Any,
    inputs: Any,
    processor: Any = None,
    *,
    target: Target = None,
    gradient: bool = False,
    **options: Unpack[Keywords],
) -> AttentionMaps:
    """All attention maps of a prediction, in one forward pass.

    ``maps.explanation(b, h)`` equals ``explain(..., "raw_attention", aggregation={"layers": b, "heads": h})``.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`.
        target: as there; only for ``gradient``.
        gradient: (A ⊙ ∂target/∂A)⁺ instead of A, so that the maps depend on the class (one backward pass more).

    Raises:
        InputError: the maps would hold more than 500 million numbers.
        MethodNotApplicable: the model's attention is not over all tokens (Swin), or over several sequences of them (an
            encoder with a decoder), of which ``raw_attention`` shows one block and head.
    """
    ready = open_model(model, processor, **options).prepare(inputs)
    if not ready.singles:
        return _maps(ready, target, gradient)
    ready.resolver(target)
    each = [_maps(one, of_samples(target, [i]), gradient) for i, one in enumerate(ready.singles)]
    return _padded(each, *ready.padding)


def _padded(each: list[AttentionMaps], padding: str, left: bool) -> AttentionMaps:
    """Those of prompts that make no batch as one, all with as many tokens as the longest; what is added is 0."""
    if any(one.tokens is None or one.blocks != each[0].blocks for one in each):
        raise InputError(
            "these prompts make no batch, and of some the maps are of their one picture, of others of all tokens: take "
            "them one at a time"
        )
    wide, count = max(one.readout.shape[1] for one in each), len(each)
    heads = [maps.shape[1] for maps in each[0].maps]
    _refuse_many(count * sum(heads) * wide**2)
    maps = [each[0].maps[0].new_zeros(count, h, wide, wide) for h in heads]
    readout = each[0].readout.new_zeros(count, wide)
    tokens: list[list[str]] = []
    spans: list[slice] = []
    for i, one in enumerate(each):
        length = one.readout.shape[1]
        span = slice(wide - length, wide) if left else slice(length)
        spans.append(span)
        readout[i, span] = one.readout[0]
        for whole, part in zip(maps, one.maps, strict=True):
            whole[i, :, span, span] = part[0]
        words, more = (one.tokens or [[]])[0], [padding] * (wide - length)
        tokens.append([*more, *words] if left else [*words, *more])

    return AttentionMaps(maps, readout, tokens, PlacementApart([one._placement for one in each], spans, padding, left))


def _refuse_many(total: int) -> None:
    if total > MOST_VALUES:
        raise InputError(
            f"these attention maps hold more than {MOST_VALUES // 10**6} million numbers; explain fewer or shorter "
            "inputs at once, or single blocks with raw_attention and its aggregation setting"
        )


def _maps(ready: Prepared, target: Target, gradient: bool) -> AttentionMaps:
    resolver = ready.resolver(target)
    name = "attention_gradient" if gradient else "attention"
    task = ready.task(resolver, name)
    total = 0

    def counted(maps: Tensor) -> Tensor:
        nonlocal total
        total += maps.numel()
        _refuse_many(total)
        return maps.detach().cpu()

    with task.at_work():
        if not task.one_sequence:
            raise task.refuse(
                "it has maps of several sequences of tokens. explain(..., 'raw_attention', aggregation={'layers': b, "
                "'heads': h}) shows those of block b and head h",
                verdict=NOT_YET,
            )
        if gradient:
            kept: dict[int, Tensor] = {}

            def observe(index: int, weights: Tensor, flow: Tensor) -> None:
                kept[index] = counted((weights * flow).clamp(min=0))

            walked = task.walk(GRADIENT, MapWatch(range(task.blocks()), observe))
            maps = task.global_maps(kept)
        else:
            walked, maps = task.look_at_maps(lambda _, __, maps: counted(maps()))
        row, logits = walked.row, walked.logits.detach()
        alone = ready.inputs.modality == "image" and task.structure.is_plain
        places = task.places(row.shape[-1]) if alone else None

    def laid_out(values: Tensor) -> dict[str, Scores]:
        scores = Scores(values.to(logits.device), logits, diagnostics={"class_specific": gradient}, places=places)
        laid = each_text(task, task.lay_out(scores))
        return {"": replace(laid, parts={}), **laid.parts}

    placement = _placement(ready.finishing(resolver, logits), name, row.shape, laid_out)
    return AttentionMaps(maps, row.detach().cpu(), ready.inputs.features.tokens, placement)


def _placement(
    finish: Finish, method: str, shape: torch.Size, laid_out: Callable[[Tensor], dict[str, Scores]]
) -> Placement:
    """Found by laying out a score of 1 for each row, then the row's number; checked by laying out random scores."""
    ones = torch.ones(shape, dtype=torch.float64)
    counted = torch.arange(ones.numel(), dtype=torch.float64).reshape(shape)
    random = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        shares, numbered, expected = laid_out(ones), laid_out(counted), laid_out(random)
    except MethodNotApplicable as error:
        return Placement(finish, method, {}, {}, str(error))
    shares = {n: replace(p, values=p.values.cpu(), logits=p.logits.cpu(), places=None) for n, p in shares.items()}
    numbers = {n: numbered[n].values.cpu() / p.values.where(p.values != 0, 1) for n, p in shares.items()}
    found = Placement(finish, method, shares, {n: own.round().long() for n, own in numbers.items()})
    if all(torch.allclose(own, expected[n].values.cpu()) for n, own in found.placed(random).items()):
        return found
    return Placement(finish, method, {}, {}, f"{method} is not supported yet on this model: its rows mix on its inputs")
