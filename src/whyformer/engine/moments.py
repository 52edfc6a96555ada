"""When a sound's rows are: along which axis of an input its rows stand, and which moments each of them hears."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.probes import Edit, FirstLayer, Reached, Until
from whyformer.engine.run import Feed, Root, record
from whyformer.models.facts import Block
from whyformer.models.readout import anything
from whyformer.rules.core import Composite

DRAWN = 16  # random inputs at most, to find the centres of what feeds each row
ROWS = 12  # of which it is measured where they lie
_GRADIENT = Composite("gradient", "multiplier", audit=False)
_AXES: weakref.WeakKeyDictionary[nn.Module, dict[Any, int | None]] = weakref.WeakKeyDictionary()


def centres(leaf: Tensor, rows: Tensor, sample: int, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(power, centre) ``[N]`` of what feeds each of the ``[N, D]`` rows of a sample along an axis of its input; after
    4, 8, 12 and 16 random inputs.

    With J_i = ∂hᵢ/∂x and random v, the mean of ⟨J_i(p ⊙ v), J_i v⟩ over that of ‖J_i v‖² is the centre
    Σ_p p‖J_ip‖² / Σ_p ‖J_ip‖² of row i's squared gradients; p is the coordinate along the axis. J v is the gradient of
    ⟨Jᵀu, v⟩ with respect to u.
    """
    u = torch.zeros_like(rows, requires_grad=True)
    (back,) = torch.autograd.grad(rows, leaf, u, create_graph=True, materialize_grads=True)
    count = leaf.shape[axis]
    places = torch.arange(count, device=leaf.device).to(leaf) - (count - 1) / 2  # small numbers: half precision
    places = places.reshape([-1 if a == axis else 1 for a in range(leaf.dim())])
    power, weighted = (torch.zeros(len(rows), dtype=torch.float64, device=rows.device) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for drawn in range(1, DRAWN + 1):
        v = torch.zeros_like(leaf)
        v[sample] = torch.randn(leaf.shape[1:], generator=generator).to(leaf)
        plain, along = (
            torch.autograd.grad(back, u, one, retain_graph=True, materialize_grads=True)[0].double()
            for one in (v, v * places)
        )
        power += plain.square().sum(1)
        weighted += (along * plain).sum(1)
        if drawn % 4 == 0:
            yield power, weighted / torch.where(power > 0, power, 1) + (count - 1) / 2


def shares(leaf: Tensor, rows: Tensor, sample: int, axis: int = 1) -> Tensor | None:
    """``[T]`` the row that each moment along an axis belongs to, where rows stand for T/N moments each, one after
    another; None where they do not.

    That they do is measured: the centres of the rows' squared gradients have to lie on a line over the middles of these
    shares, about the middle of the sound, to within one row's width. A stem of strided convolutions widens what a row
    sees; what normalises over time, or adds positions by a convolution, draws all centres towards the middle (the slope
    of the line).
    """
    count, width = len(rows), leaf.shape[axis] / len(rows)
    middles = (torch.arange(count, dtype=torch.float64, device=leaf.device) + 0.5) * width
    for _, found in centres(leaf, rows, sample, axis):
        off_middle, about = found - middles.mean(), middles - middles.mean()
        slope = float((off_middle * about).sum() / about.square().sum())
        off = float((off_middle - slope * about).square().mean().sqrt())
        if slope > 0.25 and off < slope * width and abs(float(off_middle.mean())) < width:
            moments = torch.arange(leaf.shape[axis]) + 0.5
            return torch.div(moments, width, rounding_mode="floor").long().clamp(max=count - 1)
    return None


# -- along which axis ------------------------------------------------------------------------------------------------
def axis_of_rows(
    model: nn.Module, feed: Feed, scored: str | int, call: int | None, blocks: list[Block]
) -> int | None:
    """1 or 2: along which axis of an input ``[B, N, D]`` or ``[B, D, N]`` its rows stand; None where that is unknown.

    Along the axis of the rows each of them hears another place, along that of the channels all hear the same: measured
    at a few rows where they enter a block (where that was mixed before, or there is none: behind the first layer).
    Where both axes are kept apart (patches of a spectrogram), or neither is (all is flattened first), it is axis 1.

    Costs, once for each model and shape, a forward pass up to there and 12 backward passes of that part (more where few
    of the rows are the input's).

    Args:
        feed: (args, kwargs) of the model's forward; scored: position or name of the input among them.
        call: the block call that its rows enter, None if none; blocks: those whose calls are counted.
    """
    given: dict[Any, Any] = {**dict(enumerate(feed[0])), **feed[1]}
    shape = tuple(given[scored].shape)
    known, key = _AXES.setdefault(model, {}), (shape, scored, call)
    if key not in known:
        found = None if call is None else _spread(model, feed, scored, Until(call), blocks)
        if found is None or max(found) < 0.25:
            found = _spread(model, feed, scored, FirstLayer(), blocks)
        known[key] = 1 if found is None or found[0] >= 0.5 else 2 if found[1] >= 0.5 and found[0] < 0.25 else None
    return known[key]


def _spread(
    model: nn.Module, feed: Feed, scored: str | int, until: Until | FirstLayer, blocks: list[Block]
) -> tuple[float, float] | None:
    """How far apart the centres of some of the first sample's rows lie along axes 1 and 2, as a share of what places
    all over the axis have: 0 where all rows see the same. None where there are fewer than two rows."""
    constant, begin = Edit(lambda weights, value, mixed: mixed.detach()), Root("input", scored)
    options: dict[str, Any] = {"roots": {"": begin}, "blocks": blocks, "read": anything}
    with contextlib.suppress(Reached):
        record(model, feed, _GRADIENT, constant, until, **options)
    if not until.found or not until.found[0][0].requires_grad:
        return None
    ((hidden, begun),) = until.found
    leaf = begun[""]
    with torch.inference_mode(False), torch.enable_grad():
        rows = hidden[0].flatten(0, -2) if len(hidden) == len(leaf) and hidden.dim() > 2 else hidden.flatten(0, -2)
        along = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(1)).to(rows)
        found: list[Tensor] = []
        for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 8 * ROWS].tolist():
            (flow,) = torch.autograd.grad(rows[i], leaf, along, retain_graph=True, materialize_grads=True)
            found += [flow[0].double().square()] if bool(flow[0].any()) else []  # others are no rows of this input
            if len(found) == ROWS:
                break
    if len(found) < 2:
        return None
    weights = torch.stack(found)
    return _of_axis(weights.sum(2)), _of_axis(weights.sum(1))


def _of_axis(weights: Tensor) -> float:
    """The deviation of the centres of ``[rows, places]``, over that of the places."""
    places = torch.arange(weights.shape[1], dtype=weights.dtype, device=weights.device)
    if len(places) < 2:
        return 0.0
    return float(((weights @ places) / weights.sum(1)).std() / places.std())
