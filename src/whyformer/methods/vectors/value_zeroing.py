"""Value Zeroing (Mohebbi et al., EACL 2023): the change of a block's output without one token's values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from whyformer.methods.map_passes import MapPass
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import Count, OptionalBlock, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.tape.rows import positions, slim
from whyformer.tape.walking import decisions, for_each, replay

Distance = Literal["cosine", "euclidean", "dot"]


@method(
    "change of each block's output when one token's values are zeroed",
    family="perturbation",
    citation="Mohebbi et al.: Quantifying Context Mixing in Transformers, EACL 2023",
    class_specific=False,
)
def value_zeroing(
    task: Task,
    *,
    distance: Distance = "cosine",
    block: OptionalBlock = None,
    batch_size: Count = 16,
    aggregation: Choices = None,
) -> Scores:
    """S_b[i, t] = d(h_i^{¬t}, h_i), rows of S_b scaled to sum 1; the scores are the readout row of S_L ⋯ S_1.

    h is the output of block b, h^{¬t} the output recomputed from the block's recorded input with the value vector of
    token t set to 0 in all heads (after the bias) and unchanged attention. No identity is added: the residual
    connection is inside the block. In a block that also attends to another stream, that stream's values are zeroed as
    well, and the rows [S_own, S_other] are scaled to a joint sum of 1. Costs one forward pass and, in each block for
    each token except padding, the operations after the product of attention and values (about three quarters of a
    block); those before it run once per ``batch_size`` tokens. A block that vmap cannot run (such as one with in-place
    addition to its input) runs as a whole for each token in turn.

    Args:
        distance: d. "cosine" 1 − cos(u, v) (published), "euclidean" ‖u − v‖, "dot" |⟨v, v⟩ − ⟨u, v⟩|.
        block: use the map of this block instead of the product over all (negative indices count from the last).
        batch_size: rows (tokens × samples) that pass through the rest of a block at once.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. Heads
            cannot be chosen: values are zeroed in all of them.

    Raises:
        MethodNotApplicable: attention in windows, in some blocks only, from several sequences in one block, or none.
        InputError: ``block`` or ``aggregation`` outside the model.

    Differs from the authors' code: padding gets exactly 0, and 1 − cos is computed as ½‖u/‖u‖ − v/‖v‖‖², which loses
    no digits near 0.
    """
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation)
    how.without_heads("value_zeroing", "zeroed all at once")
    if block is not None:
        task.layer(block, "block")
    work = stream_maps.begin(task, only=task.structure.tower(task.inputs.name))
    numbers = work.attentions_for(how)
    _refuse_unknown(task, work)
    map_pass, (logits, readouts) = work.map_pass, work.read_rows()
    sides = {}
    for number in numbers:
        named, attention = work.attentions[number], map_pass.attentions[number]
        pairs = zip((named.queries, named.keys), (attention.queries, attention.keys), strict=True)
        queries, keys = (task.real_rows(key, rows.shape) for key, rows in pairs if rows is not None)
        sides[number] = queries, keys
    depth: dict[int, int] = {}  # entry of a block -> the depth of its last attention
    for number in sides:
        entry = map_pass.block_of(number)[1].entry
        depth[entry] = max(depth.get(entry, 0), work.attentions[number].depth)
    steps: dict[int, stream_maps.MapStep] = defaultdict(dict)
    for number, changes in _maps(task, map_pass, sides, distance, int(batch_size)).items():
        steps[depth[map_pass.block_of(number)[1].entry]] |= work.parts(number, changes)
    ordered = work.in_order({d: stream_maps.normalised(step) for d, step in steps.items()})
    paths = stream_maps.Paths(ordered, readouts)
    return work.scores(stream_maps.reduce(task, how, paths, has_residual=True), logits, {"block_passes": _count(sides)})


# -- on a tape -------------------------------------------------------------------------------------------------------
Sides = Mapping[int, tuple[Tensor, Tensor]]
"""Index of each attention -> masks of its queries ``[B, Q]`` and keys ``[B, K]``, True except at padding."""


def _values(map_pass: MapPass, number: int) -> list[int]:
    """Return the numbers of the values that an attention's maps weight."""
    return [piece.value for piece in map_pass.attentions[number].pieces if piece.value is not None]


def _refuse_unknown(task: Task, work: stream_maps.StreamTask) -> None:
    """Raise if the values of an attention are unknown, or if a block has several attentions in sequence, whose separate
    outputs are unknown because paths bypass the states between them."""
    map_pass = work.map_pass
    if any(len(_values(map_pass, n)) < len(map_pass.attentions[n].pieces) for n in work.attentions):
        raise task.refuse("the values of its attention are unknown", verdict=NOT_YET)
    blocks = (map_pass.block_of(n)[1] for n in work.attentions)
    if any(len({a.depth for a in block.attentions if a.is_self}) > 1 for block in blocks):
        raise task.refuse("the state between two attentions of one of its blocks is unknown", verdict=NOT_YET)


def _decides(map_pass: MapPass, number: int) -> bool:
    """Return True if a block takes decisions that depend on its attention, such as the choice of experts, so that it
    cannot be replayed with changed values."""
    last = map_pass.recording.tape.maker[map_pass.block_of(number)[1].exit].number
    return any(call.number <= last for call in decisions(map_pass.recording.tape, _values(map_pass, number)))


def _tokens(keys: Tensor) -> list[int]:
    return [t for t in range(keys.shape[1]) if bool(keys[:, t].any())]


def _count(sides: Sides) -> int:
    return sum(len(_tokens(keys)) for _, keys in sides.values())


def _maps(task: Task, map_pass: MapPass, sides: Sides, distance: Distance, batch_size: int) -> dict[int, Tensor]:
    """Return ``[B, Q, K]`` for each attention: the change of its block's output rows without the value of each key."""
    step = max(1, batch_size // task.inputs.batch)
    keys_of_maps = [(n, tokens) for n, (_, keys) in sides.items() if (tokens := _tokens(keys))]
    work = [(n, tokens[i : i + step]) for n, tokens in keys_of_maps for i in range(0, len(tokens), step)]
    maps: dict[int, Tensor] = {}
    for n, some in task.progress(work, "value zeroing", len(work)):
        stream, block = map_pass.block_of(n)
        plain = map_pass.features_of(stream, block.exit, map_pass.recording.tape[block.exit])
        if n not in maps:
            shape = (*plain.shape[:2], sides[n][1].shape[1])
            maps[n] = torch.zeros(shape, dtype=_wide(plain), device=plain.device)
        changed = _without(map_pass, n, some)
        maps[n][..., some] = _distance(changed, plain, distance).permute(1, 2, 0)
    map_pass.release()
    return {n: changes * sides[n][1][:, None].to(changes.device) for n, changes in maps.items()}


def _without(map_pass: MapPass, number: int, tokens: list[int]) -> Tensor:
    """Return the outputs ``[k, B, N, D]`` of a block with the value of each of k keys of its attention set to zero."""
    tape, rows, keys = map_pass.recording.tape, map_pass.layout.rows, map_pass.attentions[number].keys
    (stream, block), values = map_pass.block_of(number), _values(map_pass, number)
    assert keys is not None
    place, key_index = positions(keys, len(rows)), torch.arange(keys.shape[1])[:, None]
    labels = {n: rows.labels.get(n) for n in values}  # None for values computed from constants
    places = {n: (place[slim(rows.of(n))] if label else key_index).to(tape.device(n)) for n, label in labels.items()}
    if _decides(map_pass, number):
        zeroed = ({n: _zeroing(at == t) for n, at in places.items()} for t in tokens)
        return torch.stack([map_pass.rerun(change, stream, block) for change in zeroed])

    def changed(token: Tensor) -> Tensor:
        new = {n: torch.where(at == token, 0, tape[n]) for n, at in places.items()}
        return replay(tape, new, [block.exit])[0]

    leaving = for_each(changed, torch.tensor(tokens, device=tape.device(block.exit)), at_once=len(tokens))
    return torch.stack([map_pass.features_of(stream, block.exit, output) for output in leaving])


def _zeroing(where: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: torch.where(where, 0, value)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _distance(changed: Tensor, plain: Tensor, distance: str) -> Tensor:
    """Return the distance ``[k, B, N]`` between vectors ``[k, B, N, D]`` and ``[B, N, D]``."""
    u, v = changed.to(_wide(changed)), plain.to(_wide(plain))
    if distance == "euclidean":
        return (u - v).norm(dim=-1)
    if distance == "dot":
        return ((v - u) * v).sum(-1).abs()
    return (nn.functional.normalize(u, dim=-1) - nn.functional.normalize(v, dim=-1)).square().sum(-1) / 2
