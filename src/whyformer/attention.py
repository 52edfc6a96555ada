"""All attention maps of one forward pass: one token × token matrix per block and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from whyformer.errors import InputError, MethodNotApplicable, check_type
from whyformer.explaining import prepared
from whyformer.explanation.counts import amount
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.methods.finishing import Finish
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.task import Scores, Task
from whyformer.methods.texts import each_text
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.tape.walking import GRADIENT
from whyformer.targets import Target

MOST_VALUES = 500_000_000


@dataclass(frozen=True, eq=False)
class Placement:
    """Where each row of the attention maps lies on the inputs, to turn scores of rows into explanations.

    Attributes:
        shares: for the main input ("") and each part, the fraction of its row's score that each element gets; empty
            if the rows cannot be laid out on the inputs.
        numbers: for the same inputs, the row of each element, counted through all samples.
        refusal: why the rows cannot be laid out; "" if they can.
    """

    finish: Finish
    method: str
    shares: dict[str, Scores]
    numbers: dict[str, Tensor]
    refusal: str = ""

    def explanation(self, values: Tensor, settings: dict[str, Any]) -> Explanation:
        """Return the explanation of scores ``[B, N]`` of rows."""
        if not self.shares:
            raise MethodNotApplicable(self.refusal)
        placed = self.placed(values)
        parts = {name: replace(part, values=placed[name]) for name, part in self.shares.items()}
        return self.finish(replace(parts.pop(""), parts=parts), self.method, settings)

    def placed(self, values: Tensor) -> dict[str, Tensor]:
        """Return the scores of each input's elements from the scores ``[B, N]`` of rows."""
        flat = values.flatten()
        return {name: flat[number] * self.shares[name].values.to(flat) for name, number in self.numbers.items()}


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention maps of a batch.

    Attributes:
        maps: one tensor ``[B, H, N, N]`` per block, first to last. Rows are queries and columns are keys. Prefix
            tokens (CLS) and special tokens are included. For multiple choice ``[B · C, H, N, N]``, text c of sample b
            at index b · C + c.
        readout: ``[B, N]`` weight of each row of the last block in the logits: one-hot for CLS, uniform for a mean.
        tokens: the tokens of each sample, for text; of each text, for multiple choice.
    """

    maps: list[Tensor]
    readout: Tensor
    tokens: list[list[str]] | None
    _placements: list[tuple[Placement, slice]]  # of the batch, or of each sample with its slice of the rows
    _padding: tuple[str, bool] = ("", False)

    def __repr__(self) -> str:
        shapes = dict.fromkeys(f"{m.shape[1]} heads × {m.shape[2]}×{m.shape[3]} tokens" for m in self.maps)
        sequences = len(self.readout)
        shares = [placement.shares for placement, _ in self._placements]
        samples = sum(len(share[""].values) for share in shares) if all(shares) else sequences
        texts = f" with {sequences // samples} texts each" if sequences > samples else ""
        lines = [f"AttentionMaps of {amount(samples, 'sample')}{texts}: {self.blocks} blocks"]
        lines += [f"  {shape}" for shape in shapes]
        if self.tokens is not None:
            first = self.tokens[0]
            lines.append(f"  tokens: {' '.join(first[:12])}{' …' if len(first) > 12 else ''}")
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
        """Return the attention ``[N, N]`` of one block and sample, queries × keys.

        Args:
            head: index of a head, or "mean", "max" or "min" over all heads.
        """
        return self._fused(block, head)[sample]

    def explanation(self, block: int, head: int | str = "mean", query: int | None = None) -> Explanation:
        """Return one row of a map as an explanation.

        Args:
            head: as for :meth:`matrix`.
            query: index of the query token, prefix and special tokens included; default: the rows that feed the
                logits, weighted by ``readout``.
        """
        fused = self._fused(block, head)
        settings: dict[str, Any] = {"block": block % self.blocks, "head": head}
        if query is None:
            weighted = torch.einsum("bq,bqk->bk", self.readout.to(fused.dtype), fused)
            return self._explanation(weighted, settings)
        if not -fused.shape[1] <= query < fused.shape[1]:
            raise InputError(f"there is no token {query}: the model reads {fused.shape[1]} tokens, counted from 0")
        return self._explanation(fused[:, query], {**settings, "query": query % fused.shape[1]})

    def each_block(self, head: int | str = "mean") -> list[Explanation]:
        """Return one explanation per block."""
        return [self.explanation(block, head) for block in range(self.blocks)]

    def each_head(self, block: int | None = None) -> list[Explanation]:
        """Return one explanation per head of a block; of all blocks, in order, if ``block`` is None."""
        blocks = range(self.blocks) if block is None else [block]
        return [self.explanation(b, head) for b in blocks for head in range(self.maps[b].shape[1])]

    def _explanation(self, values: Tensor, settings: dict[str, Any]) -> Explanation:
        """Return the explanation of scores ``[B, N]`` of rows."""
        if len(self._placements) == 1:
            return self._placements[0][0].explanation(values, settings)
        separate = zip(self._placements, values.split(1), strict=True)
        return joined([p.explanation(row[:, rows], settings) for (p, rows), row in separate], *self._padding)

    def _fused(self, block: int, head: int | str) -> Tensor:
        if not -self.blocks <= block < self.blocks:
            raise InputError(f"there is no block {block}: the model has {self.blocks} blocks, counted from 0")
        if isinstance(head, str) and head not in ("mean", "max", "min"):
            raise InputError(f"head must be an index, 'mean', 'max' or 'min', not {head!r}")
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
    """Return all attention maps of a prediction, from one forward pass.

    ``maps.explanation(b, h)`` equals ``explain(..., "raw_attention", aggregation={"layers": b, "heads": h})``.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`.
        target: as for :func:`whyformer.explain`; used only with ``gradient=True``.
        gradient: return (A ⊙ ∂target/∂A)⁺ instead of A, which depends on the class and takes a backward pass.

    Raises:
        InputError: the maps would hold more than 500 million numbers.
        MethodNotApplicable: attention is not over all tokens (Swin), or is over several sequences of tokens (an
            encoder with a decoder); ``raw_attention`` shows single blocks and heads of these models.
    """
    check_type("gradient", gradient, bool, "True or False")
    ready = prepared(model, inputs, processor, **options)
    if not ready.singles:
        return _maps(ready, target, gradient)
    if any(single.inputs.modality == "image" for single in ready.singles):
        raise InputError(_SEPARATE)
    return _padded([_maps(single, goal, gradient) for single, goal in ready.batches(target)], *ready.padding)


_SEPARATE = (
    "the attention maps of these samples cannot be joined: some are over the patches of a picture. Pass one sample "
    "at a time"
)


def _padded(singles: list[AttentionMaps], padding: str, pad_left: bool) -> AttentionMaps:
    """Join the maps of samples that cannot be batched, padded with zeros to the length of the longest."""
    named = singles[0].tokens is not None
    if any((single.tokens is not None) != named or single.blocks != singles[0].blocks for single in singles):
        raise InputError(_SEPARATE)  # prompts with and without a picture
    wide, count = max(single.readout.shape[1] for single in singles), len(singles)
    heads = [maps.shape[1] for maps in singles[0].maps]
    _refuse_many(count * sum(heads) * wide**2)
    maps = [singles[0].maps[0].new_zeros(count, h, wide, wide) for h in heads]
    readout = singles[0].readout.new_zeros(count, wide)
    tokens: list[list[str]] = []
    spans: list[slice] = []
    for i, single in enumerate(singles):
        length = single.readout.shape[1]
        span = slice(wide - length, wide) if pad_left else slice(length)
        spans.append(span)
        readout[i, span] = single.readout[0]
        for padded, part in zip(maps, single.maps, strict=True):
            padded[i, :, span, span] = part[0]
        words, more = (single.tokens or [[]])[0], [padding] * (wide - length)
        tokens.append([*more, *words] if pad_left else [*words, *more])

    placements = [(single._placements[0][0], span) for single, span in zip(singles, spans, strict=True)]
    return AttentionMaps(maps, readout, tokens if named else None, placements, (padding, pad_left))


def _refuse_many(total: int) -> None:
    if total > MOST_VALUES:
        raise InputError(
            f"these attention maps hold more than {MOST_VALUES // 10**6} million numbers: pass fewer or shorter "
            "inputs, or explain single blocks with raw_attention and its aggregation setting"
        )


def _maps(ready: Prepared, target: Target, gradient: bool) -> AttentionMaps:
    resolver = ready.resolver(target)
    name = "attention_gradient" if gradient else "attention"
    task, maps, row, logits = ready.work(ready.task(resolver, name), lambda task: _observed(task, gradient))

    def laid_out(values: Tensor) -> dict[str, Scores]:
        scores = task.of_rows(values.to(logits.device), logits, {"class_specific": gradient})
        layouts = each_text(task, task.lay_out(scores))
        return {"": replace(layouts, parts={}), **layouts.parts}

    placement = _placement(ready.finishing(resolver, logits), name, row.shape, laid_out)
    tokens: list[Any] | None = ready.inputs.features.tokens
    if tokens is not None and ready.inputs.choices is not None:
        tokens = [text for texts in tokens for text in texts]
    return AttentionMaps(maps, row.detach().cpu(), tokens, [(placement, slice(None))])


def _observed(task: Task, gradient: bool) -> tuple[Task, list[Tensor], Tensor, Tensor]:
    """Return (the task, map of each attention, ``[B, N]`` weight of each row in the target, logits)."""
    task.refuse_streams(
        "explain(..., 'raw_attention', aggregation={'layers': 0, 'heads': 0}) shows head 0 of the first block"
    )
    work = stream_maps.begin(task, only=task.structure.only_rows(task.inputs.name))
    map_pass, numbers, observed = work.map_pass, work.attentions_for(Aggregation()), dict[int, Tensor]()

    def keep(index: int, maps: Tensor) -> None:
        observed[index] = maps.detach().cpu()
        _refuse_many(sum(maps.numel() for maps in observed.values()))

    if gradient:
        on_map = lambda index, weights, flow: keep(index, (weights * flow).clamp(min=0))  # noqa: E731
        readouts = work.walk(GRADIENT, on_map, numbers).readouts
    else:
        _, readouts = work.read_rows()
        for number in numbers:
            keep(number, map_pass.map(number))
            map_pass.release()
    (row,) = readouts.values()
    return task, [observed[number] for number in numbers if number in observed], row, map_pass.logits.detach()


def _placement(
    finish: Finish, method: str, shape: torch.Size, laid_out: Callable[[Tensor], dict[str, Scores]]
) -> Placement:
    """Measure where rows lie on the inputs: lay out ones, then row numbers, and check with random scores."""
    ones = torch.ones(shape, dtype=torch.float64)
    counted = torch.arange(ones.numel(), dtype=torch.float64).reshape(shape)
    random = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        shares, numbered, expected = laid_out(ones), laid_out(counted), laid_out(random)
    except MethodNotApplicable as error:
        return Placement(finish, method, {}, {}, str(error))
    shares = {n: replace(p, values=p.values.cpu(), logits=p.logits.cpu()) for n, p in shares.items()}
    numbers = {n: numbered[n].values.cpu() / p.values.where(p.values != 0, 1) for n, p in shares.items()}
    placement = Placement(finish, method, shares, {n: values.round().long() for n, values in numbers.items()})
    if all(torch.allclose(values, expected[n].values.cpu()) for n, values in placement.placed(random).items()):
        return placement
    reason = f"{method} is not supported yet on this model: several rows of its attention share one input element"
    return Placement(finish, method, {}, {}, reason)
