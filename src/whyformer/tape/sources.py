"""Determine which elements of the inputs of a model form a row: the sources of rows, and the axes of their features."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.feeding import flows_between, random_flow
from whyformer.tape.labelling import label_rows
from whyformer.tape.rows import Source, constant_along
from whyformer.tape.tables import KINDS
from whyformer.tape.units import reach
from whyformer.tape.values import Tape

__all__ = ["axis_of_rows", "find_features", "find_sources"]

_ROWS = 12  # number of rows whose receptive fields are measured
_LAYERS = {"linear": 0, "mm": 0, "matmul": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of the input of a layer
_FEATURES: Recent[int | None] = Recent(64)


def find_sources(
    tape: Tape,
    inputs: Mapping[str, Tensor],
    several: Container[str] = (),
    packed: Mapping[str, int] | None = None,
    transposed: Container[str] = (),
) -> list[Source]:
    """Return sources for the inputs of a model.

    Each element of an integer input is a row. Other inputs have features along the axis over which the first layer or
    convolution that reads them sums, possibly after views (:func:`find_features`). If this axis is unknown, inputs with
    at least four axes (``[B, C, H, W]``, ``[B, T, C, H, W]``) have features along the third from the last, and other
    inputs along the last. A table ``[B, F]`` or a sound ``[B, T]`` has no features: each number is a row, unless the
    input is packed (``[P, D]``).

    Args:
        tape: a recorded pass.
        inputs: the tensors that were passed to the model, by name.
        several: names of inputs ``[B, C, N]`` that hold several texts for each sample.
        packed: maps the name of an input to the number of entries along its first axis that belong to each sample, such
            as pictures or patches.
        transposed: names of inputs ``[B, D, N]`` whose features lie along axis 1.
    """
    sources = []
    for name, tensor in inputs.items():
        n = tape.number(tensor)
        features = None
        if tape.floating(n):
            vectors = tensor.dim() > 2 or name in (packed or ())
            default = -3 if tensor.dim() > 3 else -1 if vectors else None
            measured = 1 if name in transposed else find_features(tape, n)
            features = default if measured is None else measured
        samples = tuple(range(tensor.shape[:2].numel())) if name in several else None
        if packed and name in packed:
            samples = tuple(i // packed[name] for i in range(len(tensor)))
        sources.append(Source(name, n, features, samples))
    return sources


def find_features(tape: Tape, n: int) -> int | None:
    """Return the axis of an input over which the first convolution or linear layer that reads it sums, possibly after
    views; None if it is unknown, or if the layer sums over no axis or several.

    Args:
        tape: a recorded pass.
        n: number of the input.
    """

    def features() -> int | None:
        summed = _summed_axes(tape, n)
        return summed[0] if summed is not None and len(summed) == 1 else None

    return _FEATURES.once((tape.signature, n), features)


def _summed_axes(tape: Tape, n: int) -> list[int] | None:
    """Return the axes of an input over which the first layer that reads it sums; None if unknown. An axis does
    not count if each sum covers only a part of it (patches of a time series). Return an empty list if the layer mixes
    rows: it does not sum over the last axis alone, and other calls read the input without a view."""
    shape, layer = tape.shapes[n], _first_layer(tape, n)
    if layer is None:
        return None
    convolves = "convolution" in layer.name
    operand = layer.operands[0 if convolves else _LAYERS[layer.name]]
    calls = needed_calls(tape.calls[: layer.number], [operand])
    labels = label_rows(tape, [Source("", n)], calls).labels  # each element of the input is a row
    label = labels.get(operand, ())
    if len(label) != 1 or int(label[0].max()) > shape.numel() or not (convolves or len(shape) == 3):
        return None
    channels = 1 if convolves else -1
    places = torch.unravel_index((label[0] - 1).clamp(min=0), shape)
    is_whole = [bool((place.amin(channels) == place.min()).all()) for place in places]
    moving = [a for a, place in enumerate(places) if is_whole[a] and not constant_along(place, channels)]
    return [] if not convolves and moving != [len(shape) - 1] and _is_read_twice(tape, labels) else moving


def _is_read_twice(tape: Tape, values: Container[int]) -> bool:
    """Return True if one of the values is read both by a view and by another call, such as the residual sum around a
    layer over rows."""
    read: dict[int, set[bool]] = {}
    for call in tape.calls:
        turns = KINDS.get(call.name) == "view" and bool(call.results) and call.results[0] in values
        for o in call.operands:
            if o in values and call.results and tape.floating(call.results[0]):
                read.setdefault(o, set()).add(turns)
    return any(len(kinds) > 1 for kinds in read.values())


def axis_of_rows(tape: Tape, n: int) -> int | None:
    """Return the axis of the rows of an input ``[B, N, D]`` or ``[B, D, N]``, 1 or 2; None if unknown.

    The rows of the first layer have different receptive fields along the axis of rows, and the same along the axis of
    features. This is derived from the layer, or else measured at some rows of its output. If the receptive fields
    differ along both axes (patches of a spectrogram), or along none (a flattened input), the result is 1.

    Args:
        tape: a recorded pass.
        n: number of the input.
    """
    summed = _summed_axes(tape, n)
    if summed is not None:
        return 3 - summed[0] if len(summed) == 1 and summed[0] > 0 else 1
    layer = _first_layer(tape, n)
    spread = None if layer is None else _spread(tape, n, layer)
    if spread is None or spread[0] >= 0.5:
        return 1
    return 2 if spread[1] >= 0.5 and spread[0] < 0.25 else None


def _first_layer(tape: Tape, n: int) -> Call | None:
    """Return the first convolution or linear layer that reads a value that depends on an input."""
    carry = reach(tape, [n])
    layers = (c for c in tape.calls if "convolution" in c.name or c.name in _LAYERS)
    return next((c for c in layers if any(carry[o] for o in c.operands)), None)


def _spread(tape: Tape, n: int, layer: Call) -> tuple[float, float] | None:
    """Return the standard deviations, along axes 1 and 2 of the input, of the centres of the receptive fields of some
    rows of the first sample, relative to that of all positions: 0 if all rows have the same receptive field. Return
    None if there are fewer than two rows."""
    result, flows = layer.results[0], list[Tensor]()
    for seed in _seeds(tape, result, 1 if "convolution" in layer.name else -1):
        (flow,) = flows_between(tape, n, [{result: seed}])
        if bool(flow[0].any()):  # rows of other samples have no flow
            flows.append(flow[0].double().square())
        if len(flows) == _ROWS:
            break
    if len(flows) < 2:
        return None
    weights = torch.stack(flows)
    return _relative_spread(weights.sum(2)), _relative_spread(weights.sum(1))


def _seeds(tape: Tape, result: int, channels: int) -> Iterator[Tensor]:
    """Yield flows to the output of a layer, each the same random flow at a single row."""
    flow = random_flow(tape, result)
    rows = flow.movedim(channels, -1).flatten(0, -2)
    rows = rows[:1].expand_as(rows)
    for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 8 * _ROWS].tolist():
        seed = torch.zeros_like(rows)
        seed[i] = rows[i]
        yield seed.view(flow.movedim(channels, -1).shape).movedim(-1, channels)


def _relative_spread(weights: Tensor) -> float:
    """Return the standard deviation of the centres of ``[rows, positions]``, relative to that of the positions."""
    places = torch.arange(weights.shape[1], dtype=weights.dtype, device=weights.device)
    if len(places) < 2:
        return 0.0
    return float(((weights @ places) / weights.sum(1)).std() / places.std())
