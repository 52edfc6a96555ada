"""Maps of attention as the engine's graph shows them, for models that are not walked over on a tape yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.engine.probes import AttentionCall, AttentionScores, BlockFlows, Flows, Maps, Probe
from whyformer.engine.run import Recording
from whyformer.methods.conservation import Balance
from whyformer.methods.sources import readout_row
from whyformer.rules.core import Composite

if TYPE_CHECKING:
    from whyformer.methods.task import Task

NOT_YET = "is not supported yet"
UNSEEN = "no attention was seen in its forward pass"
UNREAD = "the output of its last block is unknown or does not reach the logits"


@dataclass(frozen=True)
class MapWalk:
    """What a method knows besides maps of attention.

    Attributes:
        logits: ``[B, C]`` of the plain forward pass.
        read: ``[B, N]``, how much the target reads each row of the last block's output; None if that was not asked for.
        balance: of relevance, where the rules carry it.
    """

    logits: Tensor
    read: Tensor | None
    balance: Balance | None = None

    @property
    def row(self) -> Tensor:
        """``[B, N]``, how much the target reads each row of the last block's output."""
        assert self.read is not None
        return self.read


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class MapWatch:
    """What a method looks at on the way back from its target.

    Attributes:
        blocks: numbers of the blocks that matter.
        seen: called with a block, its map A and what flows to A, ``[B, H, N, N]`` each; the last block first. None to
            look at no map.
        gradient: call ``seen`` with ∂target/∂A too, as a fourth argument.
        scores: call ``seen`` with what A is the softmax of, in the place of A.
        entering: called with a block, what enters it, and what flows there, ``[B, N, D]`` each.
        by_heads: ``seen`` may be called several times for a block, with some of its heads each.
        again: called where ``seen`` is about to be called for all blocks once more.
    """

    blocks: Collection[int]
    seen: Callable[..., None] | None = None
    gradient: bool = False
    scores: bool = False
    entering: Callable[[int, Tensor, Tensor], None] | None = None
    by_heads: bool = False
    again: Callable[[], None] = _nothing


def walk_graph(task: Task, composite: Composite, watch: MapWatch, values: Mapping[str, Tensor] | None) -> MapWalk:
    """Do :meth:`Task.walk` by the engine."""
    first, shapes = min(watch.blocks, default=0), dict[int, Tensor]()
    seen, scores, asked = watch.seen, watch.scores, AttentionScores()

    def observe(block: int, weights: Tensor, *flows: Tensor) -> None:
        if block not in watch.blocks or seen is None:
            return
        shapes[block] = torch.empty(len(weights), *weights.shape[-2:], device="meta")
        seen(block, shown(task, asked, block, weights) if scores else weights, *flows)

    if composite.carrier == "relevance":
        recording, row = _both_passes(task, composite, first, observe, watch.gradient, watch.again)
        walked = MapWalk(recording.logits, row, Balance.of_recording(recording))
    else:
        probes: list[Probe] = [asked] if scores else []
        if seen is not None:
            probes.append(Flows(observe, first, watch.by_heads and not scores))
        if watch.entering is not None:
            probes.append(BlockFlows(frozenset(watch.blocks), watch.entering))
        options = {"root": "embedding"} if watch.entering is not None else {}
        begin: Callable[..., Recording] = partial(task.begin, values=values) if values else task.record
        recording = begin(composite, *probes, **options)
        if seen is None or values:
            recording.backward(task.seed(recording.logits))
            return MapWalk(recording.logits, None)
        walked = MapWalk(recording.logits, _gradient_pass(task, recording))
    if shapes:
        task.global_maps(shapes, walked.row.shape[-1])
    return walked


def shown(task: Task, asked: AttentionScores, attention: int, weights: Tensor) -> Tensor:
    """What a map is the softmax of, in its shape."""
    if attention not in asked.found:
        raise task.refuse("what its maps were made of by a softmax is not seen", verdict=NOT_YET)
    return asked.found[attention]().reshape(weights.shape).to(weights.device)


def _gradient_pass(task: Task, recording: Recording, *, keep: bool = False) -> Tensor:
    """Readout row ``[B, N]`` of one backward pass of gradients; ``keep`` if another follows."""
    if not recording.attentions:
        raise task.refuse(UNSEEN)
    task.refuse_streams()
    recording.backward(task.seed(recording.logits), keep=keep)
    if recording.readout is None:
        raise task.refuse(UNREAD, verdict=NOT_YET)
    return readout_row(recording.readout)


def _both_passes(
    task: Task,
    composite: Composite,
    first: int,
    seen: Callable[..., None],
    gradient: bool,
    again: Callable[[], None],
) -> tuple[Recording, Tensor]:
    """(recording, readout row) of a pass of gradients and one of relevance: block by block where the model is a chain
    of blocks, so that the maps of one block are there at a time."""
    made: list[Recording] = []
    gradients: dict[int, list[Tensor]] = defaultdict(list)

    def observe(block: int, weights: Tensor, flow: Tensor) -> None:
        if not made[-1].run.relevance:
            gradients[block].append(flow)
        else:
            seen(block, weights, flow, *([_next_heads(gradients[block], flow.shape[1])] if gradient else []))

    flows = Flows(observe, first, by_heads=True)
    made.append(task.record(composite, flows, cut=True))
    swept = made[-1].attentions and made[-1].logits.requires_grad and made[-1].sweep(task.seed(made[-1].logits))
    if swept and made[-1].readout is not None:
        return made[-1], readout_row(made[-1].readout)
    gradients.clear()
    again()
    made.append(task.record(composite, flows))
    row = _gradient_pass(task, made[-1], keep=True)
    made[-1].backward(task.seed(made[-1].logits), relevance=True)
    return made[-1], row


def _next_heads(parts: list[Tensor], heads: int) -> Tensor:
    """The next heads of a map that came in parts, which are let go of."""
    taken = [parts.pop(0)]
    while sum(part.shape[1] for part in taken) < heads:
        taken.append(parts.pop(0))
    return taken[0] if len(taken) == 1 else torch.cat(taken, 1)


def map_graph(
    task: Task, fuse: Callable[[int, int, Callable[[], Tensor]], Tensor | None]
) -> tuple[MapWalk, list[Tensor]]:
    """Do :meth:`Task.map_pass` by the engine."""
    kept: dict[int, Tensor] = {}

    def look(call: AttentionCall) -> None:
        fused = fuse(call.index, call.value.shape[-2], call.map) if call.index >= 0 else None
        if fused is not None:
            kept[call.index] = fused.detach()

    recording, row = task.readout_pass(Maps(look))
    return MapWalk(recording.logits, row), task.global_maps(kept, row.shape[-1])
