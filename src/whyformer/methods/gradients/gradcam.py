"""Grad-CAM on the features of blocks."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from whyformer.composites.named import COMPOSITES, CompositeName
from whyformer.engine.hooks import batch_first
from whyformer.engine.probes import Features as BlockFeatures
from whyformer.methods.registry import is_block, method
from whyformer.methods.task import Rules, Scores, Task
from whyformer.tape.places import Places
from whyformer.tape.streams import Stream

BlockList = Annotated[
    int | list[int],
    (
        "a block number or a list of at most 256",
        lambda v: is_block(v) or (isinstance(v, list | tuple) and 0 < len(v) <= 256 and all(map(is_block, v))),
    ),
]

Features = tuple[Tensor, list[Tensor], list[Tensor], Places | None]
"""(logits, features ``[B, N, D]`` of each block, what flows to them, where the rows lie in a picture)."""


@method(
    "Grad-CAM on the first normalisation of the last block (or of several blocks)",
    family="gradient",
    citation="Selvaraju et al., ICCV 2017; Gildenblat's choice of layer; survey 2.2",
    anywhere=True,
)
def gradcam(task: Task, *, blocks: BlockList = -1, composite: CompositeName = "plain") -> Scores:
    """(Σ_k w_k F_k)⁺ with w_k the mean of ∂f/∂F_k over the tokens: of a picture, over those that stand for a part of it
    (CLS and registers left out); of text, over all but padding.

    F is the output of a block's first normalisation where that comes before the attention (pre-norm), else the
    block's input: behind the last attention only the readout rows have a gradient, and the map would be all zeros.

    Args:
        blocks: block number(s); negative ones count from the last. With several, each map is divided by its maximum
            and the maps are averaged.
        composite: the rules of the backward pass, see :mod:`whyformer.composites.named`.
    """
    numbers = [blocks] if isinstance(blocks, int) else list(blocks)
    chosen = sorted({task.block(b, "blocks") for b in numbers})
    logits, rows, flows, places = _on_tape(task, chosen, composite) or _on_graph(task, chosen, composite)
    picture = task.inputs.modality == "image"
    if len({r.shape[:2] for r in rows}) > 1:
        raise task.refuse(f"its blocks {chosen} have different numbers of tokens; give blocks of one stage")
    if len(rows[0]) != task.inputs.rows:
        raise task.refuse(f"its blocks {chosen} see parts of a sample one by one, so their features are no one map")
    real = torch.ones_like(rows[0][..., 0])
    if picture:
        cells = task.cells(rows[0].shape[1], chosen[-1]) if places is None else places.rows[None]
        real = torch.zeros_like(real).scatter(1, cells.to(real.device).expand(len(real), -1), 1)
        if not task.structure.plain and task.structure.alone(task.inputs.name) is not None:
            places = None
        elif places is None:
            places = task.places(rows[0].shape[1], chosen[-1])
    elif task.inputs.row_mask is not None:
        mask, entry = task.inputs.row_mask, task.structure.entries.get(task.inputs.name)
        if mask.shape == real.shape:
            real = mask.to(real)
        elif entry is not None and len(entry[1]) == 1:
            real = task.real_rows(entry[1], real.shape, entry[0]).to(real)
    maps = [_cam(r, f, real) for r, f in zip(rows, flows, strict=True)]
    if len(maps) > 1:
        maps = [m / (m * real).amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny) for m in maps]
    return Scores(torch.stack(maps).mean(0), logits, places=places)


def _on_tape(task: Task, numbers: list[int], composite: CompositeName) -> Features | None:
    """The features of blocks and what flows to them; None if the blocks are not read off a tape."""
    rules = task.tape_rules(Rules.of(COMPOSITES[composite]))
    passed = None if rules is None else task.block_pass()
    if passed is None or rules is None:
        return None
    own = passed.blocks_of(task.inputs.name)
    chosen = [(stream, passed.input_of_attention(stream, block)) for stream, block in (own[n] for n in numbers)]
    if not all(passed.holds(number, stream) for stream, number in chosen):
        return None
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def arrive(stream: Stream, number: int, flow: Tensor | None) -> None:
        value = passed.whole.tape[number]
        flow = torch.zeros_like(value) if flow is None else flow
        found[number] = passed.features_of(stream, number, value), passed.features_of(stream, number, flow)

    at = {number: partial(arrive, stream, number) for stream, number in chosen}
    passed.walk(task.seed(passed.logits), [rules], at=at)
    rows, flows = zip(*(found[number] for _, number in chosen), strict=True)
    places = passed.places(task.inputs.name, chosen[-1][0]) if task.inputs.modality == "image" else None
    return passed.logits, list(rows), list(flows), places


def _on_graph(task: Task, blocks: list[int], composite: CompositeName) -> Features:
    recording = task.record(COMPOSITES[composite], BlockFeatures(tuple(blocks)))
    if not recording.roots:
        raise task.refuse(
            "no block of it was found or entered, so there are no features", verdict="is not supported yet"
        )
    flows = recording.backward(task.seed(recording.logits))
    picture = task.inputs.modality == "image"

    def lined_up(features: Tensor) -> Tensor:
        """``[B, N, D]``: rows and columns of a picture behind one another, of several versions of a token all
        channels."""
        own = batch_first(features, recording.run)
        return own.flatten(1, -2) if picture or own.dim() < 4 else own.flatten(2)

    return recording.logits, [lined_up(r.detach()) for r in recording.roots], [lined_up(f) for f in flows], None


def _cam(rows: Tensor, gradient: Tensor, real: Tensor) -> Tensor:
    """``[B, N]``; ``real`` ``[B, N]`` is 1 at the tokens whose gradients are averaged."""
    weights = (gradient * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return torch.einsum("bnd,bd->bn", rows, weights).clamp(min=0)
