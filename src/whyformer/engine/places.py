"""Where a picture's cells lie among the token rows, measured on one run: which row does each pixel feed?"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.hooks import batch_first
from whyformer.engine.mode import Interception
from whyformer.engine.moments import shares
from whyformer.engine.probes import AttentionCall, Edit, Features, Maps, Reached, Until
from whyformer.engine.run import Feed, Root, record, running
from whyformer.models.facts import Block, facts
from whyformer.models.readout import anything
from whyformer.rules.core import Composite, Pass
from whyformer.tape.places import Places, box_cells

PICTURES = 16  # at most, to find the centres of what feeds each row below overlapping convolutions
MOST_KNOWN = 1024  # measurements kept for one model
_GRADIENT = Composite("gradient", "multiplier", audit=False)


_ENTERING: weakref.WeakKeyDictionary[nn.Module, dict[Any, list[Places | None]]] = weakref.WeakKeyDictionary()
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Any, Places | None]] = weakref.WeakKeyDictionary()


def picture_places(model: nn.Module, feed: Feed, scored: str | int, block: int | None = None) -> Places | None:
    """The places of a picture's cells, measured once for each model and size of picture; None where they have none.

    With a fixed random direction r and token rows hᵢ, g₁ = ∂/∂x Σᵢ⟨hᵢ, r⟩ and g₂ = ∂/∂x Σᵢ i·⟨hᵢ, r⟩: where a pixel
    feeds one row only, g₂/g₁ is that row's number in every channel. Where it is no whole number, pixels feed several
    rows (a stem of overlapping convolutions); then the place of a row is the centre of its squared gradient.

    Costs a forward pass of one picture of noise, up to the attention in question, and two backward passes through that
    part (long inputs and half precision: a few more; where pixels feed several rows: 12 to 48 more, twice as long).

    Args:
        feed: (args, kwargs) of the model's forward, with one picture ``[1, C, H, W]`` or video ``[1, T, C, H, W]``.
        scored: position or name of the picture among them.
        block: measure the rows of that block's features (its first normalisation, where that comes before the
            attention; else its input), nothing being mixed by the attentions before it. By default the rows of the
            first attention that the picture reaches.
    """
    others: dict[Any, Any] = {**dict(enumerate(feed[0])), **feed[1]}
    shape = others.pop(scored).shape
    if not all(v is None or isinstance(v, bool | int | float | str) for v in others.values()):
        return _measure(model, feed, scored, block)  # what else the model takes may decide where pixels go
    known = _KNOWN.setdefault(model, {})
    key = (tuple(shape), scored, block, tuple(others.items()))
    if key not in known:
        known[key] = _measure(model, feed, scored, block)
    return known[key]


def entering_places(
    model: nn.Module, feed: Feed, root: Root, call: int, blocks: list[Block], samples: int, *,
    picture: bool = False, turned: bool = False,
) -> list[Places | None]:  # fmt: skip
    """For each sample the rows that enter a block call and stand for the elements of one input, what attentions mix
    being constant.

    Measured as :func:`picture_places`, once for each model, shapes of its inputs and token ids (which may decide where
    a picture goes).

    Args:
        root: the picture itself, or the look-up of the text: ``rows`` of the result are ``[M]`` then, −1 for elements
            that feed none.
        call, blocks: the block call, and the blocks whose calls are counted.
        samples: how many samples are measured, from the first.
        picture, turned: whether the input is a picture, or vectors ``[B, D, N]`` in columns.
    """
    known, key = _ENTERING.setdefault(model, {}), (said(feed), root.kind, root.place, call, samples, turned)
    if key in known:
        return known[key]
    if len(known) >= MOST_KNOWN:
        known.clear()
    args, kwargs = list(feed[0]), dict(feed[1])
    given: Any = args if isinstance(root.place, int) else kwargs
    if picture or (root.kind == "input" and given[root.place].dim() == 2):  # a sound
        noise = torch.randn(given[root.place].shape, generator=torch.Generator().manual_seed(0))
        given[root.place] = noise.to(given[root.place])
    constant, until = Edit(lambda weights, value, mixed: mixed.detach()), Until(call)
    options: dict[str, Any] = {"roots": {"": root}, "blocks": blocks, "read": anything}
    with contextlib.suppress(Reached):
        record(model, (tuple(args), kwargs), _GRADIENT, constant, until, **options)
    known[key] = [None] * samples
    hidden, begun = until.found[0] if until.found else (torch.zeros(0), {})
    if root.kind == "lookup" and hidden.dim() > 3 and hidden.shape[:2] == begun[""].shape[:2]:
        hidden = hidden.flatten(2)  # several versions of each row
    if hidden.dim() != 3 or not hidden.requires_grad:
        return known[key]
    if len(hidden) >= samples and (len(begun[""]) % len(hidden) == 0 or begun[""].dim() != 3):
        with torch.inference_mode(False), torch.enable_grad():
            merged = root.kind == "input"
            known[key] = [_entering(begun[""], hidden, picture, merged, turned, i) for i in range(samples)]
    return known[key]


def said(feed: Feed) -> tuple[Any, ...]:
    """What decides where inputs go: shapes, and the token ids."""
    others = [(n, v) for n, v in (*enumerate(feed[0]), *feed[1].items()) if isinstance(v, Tensor)]
    return tuple((n, tuple(v.shape), None if v.is_floating_point() else v.cpu().numpy().tobytes()) for n, v in others)


def _entering(leaf: Tensor, hidden: Tensor, picture: bool, merged: bool, turned: bool, sample: int) -> Places | None:
    rows = hidden[sample]
    if picture:
        return _laid_out(leaf, rows, sample=sample, each=len(leaf) // len(hidden), holes=True)
    packed = merged and leaf.dim() > 3
    sound = merged and not packed and len(leaf) == len(hidden)
    numbers = sound and leaf.dim() == 2
    fed = _fed(leaf, rows, -2 if turned else -1, sample, single=numbers)
    if numbers and fed is not None and not _once(fed[fed >= 0]):  # no table, of which each number is a token
        fed = None
    if fed is None:
        moments = shares(leaf, rows, sample, 2 if turned else 1) if sound else None
        return None if moments is None else Places(moments, None, len(rows))
    if (leaf.dim() == 2 and not numbers) or packed:
        fed = fed.reshape(len(hidden), -1)[sample]
    # of patches a tower may have merged several into one row, of words none
    alone = fed[fed >= 0]
    return Places(fed.flatten(), None, len(rows)) if alone.numel() and (merged or _once(alone)) else None


def _once(rows: Tensor) -> bool:
    return rows.numel() > 0 and len(rows.unique()) == rows.numel()


def _laid_out(
    leaf: Tensor, rows: Tensor, layout: tuple[int, ...] = (), sample: int = 0, each: int = 1, holes: bool = False
) -> Places | None:
    """The places of a picture's cells among ``[N, D]`` rows; ``layout`` is that of the rows, where they have one, and
    ``each`` how many pictures a sample has; ``holes``: cells of tiles may feed no row (what was padded), −1."""
    fed = _fed(leaf, rows, sample=sample, each=each)
    fed = fed.flatten(0, -3) if fed is not None and fed.dim() > 3 else fed  # tiles of several pictures
    cells = None if fed is None else box_cells(fed, merged=each > 1, holes=holes)
    if cells is not None:
        grid = tuple(int(n) for n in cells.shape) if cells.dim() in (2, 3) else None
        return Places(cells.flatten(), grid, len(rows))
    if len(layout) == 2:  # [B, rows, columns, D] is laid out as the picture is
        return Places(torch.arange(len(rows)), layout, len(rows))
    return _overlapping(leaf, rows) if fed is None else None


def _measure(model: nn.Module, feed: Feed, scored: str | int, block: int | None) -> Places | None:
    args, kwargs = list(feed[0]), dict(feed[1])
    given: Any = args if isinstance(scored, int) else kwargs
    noise = torch.randn(given[scored].shape, generator=torch.Generator().manual_seed(0)).to(given[scored])
    with torch.inference_mode(False), torch.enable_grad():
        if block is None:
            given[scored] = leaf = noise.requires_grad_()
            value = _first_attention(model, args, kwargs, leaf)
            if value is None or (value.dim() == 4 and len(value) > 1):  # none, or windows
                return None
            rows = value.movedim(-2, 0).flatten(1)
            layout: tuple[int, ...] = ()
        else:
            leaf, features = _features(model, (tuple(args), kwargs), scored, block, noise)
            if features is None:
                return None
            rows = features[0].flatten(0, -2)
            layout = tuple(features.shape[1:-1])
        return _laid_out(leaf, rows, layout)


def _first_attention(model: nn.Module, args: list[Any], kwargs: dict[str, Any], leaf: Tensor) -> Tensor | None:
    """``[B, H, N, d]`` values of the first attention that the leaf reaches; the forward pass ends there."""
    values: list[Tensor] = []

    def watch(call: AttentionCall) -> None:
        if call.index >= 0 and call.value.requires_grad:
            values.append(call.value)
            raise Reached

    mode = Interception(model, _GRADIENT, Pass(batch=1), (Maps(watch),))
    mode.add_root(leaf)
    known = facts(model, (tuple(args), kwargs), any_roots=True)
    mode.facts = known if known.maps else None
    try:
        with running(mode):
            model(*args, **kwargs)
    except Reached:
        pass
    return values[0] if values else None


def _features(
    model: nn.Module, feed: Feed, scored: str | int, block: int, noise: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(the picture, ``[1, ..., D]`` features of the block), what attentions mix being held constant."""
    constant = Edit(lambda weights, value, mixed: mixed.detach())
    recording = record(
        model, feed, _GRADIENT, Features((block,)), constant, root="input", root_input=scored, root_value=noise,
        read=anything,
    )  # fmt: skip
    leaf, *features = recording.roots
    recording.release()
    return leaf, batch_first(features[0], recording.run) if features else None


def _fed(
    picture: Tensor, rows: Tensor, axis: int = -3, sample: int = 0, each: int = 1, single: bool = False
) -> Tensor | None:
    """``[..., H, W]`` the row of ``[N, D]`` that each pixel feeds, −1 for none; None where some pixel feeds several.

    Args:
        axis: of the channels; −1 for the vectors of a text.
        sample: the one whose rows these are; each: how many pictures it has.
        single: whether each number of ``[B, F]`` is an element by itself.
    """

    def flow(seed: Tensor) -> Tensor:
        whole = torch.autograd.grad(rows, picture, seed, retain_graph=True, materialize_grads=True)[0]
        if single:
            whole = whole[..., None]
        elif each > 1:
            whole = whole.unflatten(0, (-1, each))
        elif axis == -1 and picture.dim() > 3:  # packed patches of vectors of several axes
            whole = whole.flatten(1)
        return (whole if whole.dim() == 2 else whole[sample]).movedim(axis, 0)

    return row_of_each(flow, rows)


def row_of_each(flow: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor | None:
    """Return ``[...]``, the number of the row that each pixel feeds, −1 for none; None if one feeds several.

    With a fixed random direction r and g(w) = ∂/∂x Σᵢ wᵢ⟨hᵢ, r⟩: where a pixel feeds one row only, g(i)/g(1) is the
    number of that row in every channel, and g(i²)/g(1) its square.

    Args:
        flow: ``[N, D]``, what flows to the rows -> ``[C, ...]``, what flows to the pixels.
        rows: ``[N, D]``, the rows h.
    """
    half = rows.dtype in (torch.float16, torch.bfloat16)
    base, directions, tolerance = (2, 8, 0.3) if half else (256, 1, 0.1)
    drawn = torch.randn(directions, rows.shape[-1], generator=torch.Generator().manual_seed(1)).to(rows)
    numbers = torch.arange(len(rows), device=rows.device)

    def flows(weights: Tensor) -> Tensor:
        """``[directions · C, ...]``"""
        return torch.cat([flow(weights.to(rows)[:, None] * direction) for direction in drawn]).double()

    plain = flows(torch.ones_like(numbers))
    power = plain.square().sum(0)
    place = torch.zeros_like(power, dtype=torch.long)
    for scale in (base**k for k in range(len(rows).bit_length()) if base**k < len(rows)):
        # digit by digit, so that rounding cannot reach the next row
        digits = numbers // scale % base
        digit, square = (
            (flows(w) * plain).sum(0) / torch.where(power > 0, power, 1) for w in (digits, digits.square())
        )
        mixed = (digit - digit.round()).abs() > tolerance
        mixed |= (square - digit.square()).abs() > tolerance + 1e-5 * digit.square()
        if bool(mixed.any()):
            return None
        place += scale * digit.round().long()
    return place.masked_fill(power == 0, -1).cpu()


def _overlapping(picture: Tensor, rows: Tensor) -> Places | None:
    """The lattice of the centres of what feeds each row, if they lie on one.

    With J_i = ∂hᵢ/∂x and random pictures v, the mean of ⟨J_i(p ⊙ v), J_i v⟩ over that of ‖J_i v‖² is the centre
    Σ_p p‖J_ip‖² / Σ_p ‖J_ip‖² of row i's squared gradients, for all rows at once; p is a pixel's coordinate. J v is
    the gradient of ⟨Jᵀu, v⟩ with respect to u.
    """
    if picture.dim() != 4:
        return None
    u = torch.zeros_like(rows, requires_grad=True)
    (back,) = torch.autograd.grad(rows, picture, u, create_graph=True, materialize_grads=True)

    def pushed(v: Tensor) -> Tensor:
        return torch.autograd.grad(back, u, v, retain_graph=True, materialize_grads=True)[0].double()

    height, width = picture.shape[-2:]
    down = torch.arange(height, device=picture.device).to(picture)[:, None] - height / 2
    across = torch.arange(width, device=picture.device).to(picture) - width / 2
    generator = torch.Generator().manual_seed(1)
    power = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    moments = torch.zeros(len(rows), 2, dtype=torch.float64, device=rows.device)
    for count in range(1, PICTURES + 1):
        v = torch.randn(picture.shape, generator=generator).to(picture)
        plain = pushed(v)
        power += plain.square().sum(1)
        moments += torch.stack([(pushed(axis * v) * plain).sum(1) for axis in (down, across)], 1)
        if count % 4:
            continue
        fed = power.nonzero()[:, 0]
        cells = _lattice((moments[fed] / power[fed, None]).cpu())
        if cells is not None:
            return Places(fed.cpu()[cells].flatten(), (int(cells.shape[0]), int(cells.shape[1])), len(rows))
    return None


def _lattice(centres: Tensor) -> Tensor | None:
    """``[rows, columns]`` which of the points ``[M, 2]`` is each cell; None unless lines lie farther apart than the
    points of a line scatter."""
    for count in (n for n in range(1, len(centres) + 1) if len(centres) % n == 0):
        bands = centres[:, 0].argsort().reshape(count, -1)
        cells = torch.stack([band[centres[band, 1].argsort()] for band in bands])
        scatter, gaps = 0.0, []
        for lines in (centres[cells, 0], centres[cells, 1].T):
            low, high = lines.amin(1), lines.amax(1)
            scatter = max(scatter, float((high - low).max()))
            gaps.extend((low[1:] - high[:-1]).tolist())
        if scatter < min(gaps, default=float("inf")):
            return cells
    return None
