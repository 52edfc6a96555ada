"""Along which axis of an input the features of its rows lie, read off the first layer that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.feeding import UNMIXED, drawn
from whyformer.tape.program import read_program
from whyformer.tape.rows import constant_along
from whyformer.tape.state import bare
from whyformer.tape.tables import KINDS
from whyformer.tape.units import reach
from whyformer.tape.values import Tape
from whyformer.tape.walking import walk_back

__all__ = ["axis_of_rows", "find_features"]

ROWS = 12  # of which it is measured what they see
_LAYERS = {"linear": 0, "mm": 0, "matmul": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of what a layer reads


def find_features(tape: Tape, n: int) -> int | None:
    """Return the axis of an input that the first convolution or linear layer that reads it sums over, perhaps behind
    views; None if that is unknown, or none or several.

    Args:
        tape: a recorded pass.
        n: number of the input.
    """
    axes = _summed(tape, n)
    return axes[0] if axes is not None and len(axes) == 1 else None


def _summed(tape: Tape, n: int) -> list[int] | None:
    """The axes of an input that the first layer that reads it sums over; None if that is unknown. None of them where a
    linear layer is over another axis than the last and the input is read otherwise too: it mixes rows."""
    shape = tape.shapes[n]
    # floating-point numbers: some views have no kernel for integers
    lines = [torch.arange(size, dtype=torch.float64) for size in shape]
    views = {n: list(torch.meshgrid(lines, indexing="ij"))}  # where each element stands along each axis of the input
    for call in tape.calls:
        operand = next((o for o in call.operands if o in views), None)
        if operand is None:
            continue
        conv, place = "convolution" in call.name, _LAYERS.get(call.name, -1) if len(shape) == 3 else -1
        if conv or place >= 0:
            if call.operands[max(place, 0)] != operand:
                return None
            channels = 1 if conv else -1
            moving = [axis for axis, places in enumerate(views[operand]) if not constant_along(places, channels)]
            return [] if not conv and moving != [len(shape) - 1] and _branches(tape, views) else moving
        result = call.results[0] if call.results else -1
        if result >= 0 and tape.dtypes[result].is_complex:  # a transform of the whole
            break
        if result >= 0 and KINDS.get(call.name) == "view" and len(call.operands) == 1:
            with bare():
                views[result] = [call([places])[0] for places in views[operand]]
        elif result >= 0 and tape.shapes[result] == tape.shapes[operand]:
            views[result] = views[operand]
        elif result >= 0 and tape.floating(result):
            break
    return None


def _branches(tape: Tape, views: dict[int, list[Tensor]]) -> bool:
    """Return True if a value that is turned is read in its own layout too, as by the sum behind a layer over rows."""
    read: dict[int, set[bool]] = {}
    for call in tape.calls:
        turns = KINDS.get(call.name) == "view" and bool(call.results) and call.results[0] in views
        for o in call.operands:
            if o in views and call.results and tape.floating(call.results[0]):
                read.setdefault(o, set()).add(turns)
    return any(len(kinds) > 1 for kinds in read.values())


def axis_of_rows(tape: Tape, n: int) -> int | None:
    """Return 1 or 2, the axis of an input ``[B, N, D]`` or ``[B, D, N]`` along which its rows stand; None if that is
    unknown.

    Along the axis of the rows each of them sees another place, along that of the features all see the same. That is
    read off the first layer, or else measured at some rows of what it returns. Where both axes are kept apart (patches
    of a spectrogram), or neither is (all is flattened first), it is axis 1.

    Args:
        tape: a recorded pass.
        n: number of the input.
    """
    features = _summed(tape, n)
    if features is not None:
        return 3 - features[0] if len(features) == 1 and features[0] > 0 else 1
    layer = _first_layer(tape, n)
    found = None if layer is None else _spread(tape, n, layer)
    if found is None or found[0] >= 0.5:
        return 1
    return 2 if found[1] >= 0.5 and found[0] < 0.25 else None


def _first_layer(tape: Tape, n: int) -> Call | None:
    """The first convolution or linear layer that reads what depends on an input."""
    carry = reach(tape, [n])
    layers = (c for c in tape.calls if "convolution" in c.name or c.name in _LAYERS)
    return next((c for c in layers if any(carry[o] for o in c.operands)), None)


def _spread(tape: Tape, n: int, layer: Call) -> tuple[float, float] | None:
    """How far apart the centres of some of the first sample's rows lie along axes 1 and 2, as a share of what places
    all over the axis have: 0 where all rows see the same. None if there are fewer than two rows."""
    made = layer.results[0]
    program, flows = read_program(tape, [n], made), list[Tensor]()
    for seed in _seeds(tape, made, 1 if "convolution" in layer.name else -1):
        (found,) = walk_back(program, tape, [(UNMIXED, {made: seed})], wanted=[n])
        if bool(found[n][0].any()):  # others are no rows of this sample
            flows.append(found[n][0].double().square())
        if len(flows) == ROWS:
            break
    tape.release()
    if len(flows) < 2:
        return None
    weights = torch.stack(flows)
    return _of_axis(weights.sum(2)), _of_axis(weights.sum(1))


def _seeds(tape: Tape, made: int, channels: int) -> Iterator[Tensor]:
    """The same random flow to each of some rows of what a layer returns, one at a time."""
    flow = drawn(tape, made)
    rows = flow.movedim(channels, -1).flatten(0, -2)
    rows = rows[:1].expand_as(rows)
    for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 8 * ROWS].tolist():
        one = torch.zeros_like(rows)
        one[i] = rows[i]
        yield one.view(flow.movedim(channels, -1).shape).movedim(-1, channels)


def _of_axis(weights: Tensor) -> float:
    """The deviation of the centres of ``[rows, places]``, over that of the places."""
    places = torch.arange(weights.shape[1], dtype=weights.dtype, device=weights.device)
    if len(places) < 2:
        return 0.0
    return float(((weights @ places) / weights.sum(1)).std() / places.std())
