"""Find the units that consist of several calls: norms, softmaxes, activations and layers.

A region is the part of the tape between an entry and an exit that the entry dominates. Norms and softmaxes are
recognized by repeating the calls of a region on random rows with random weights in float64, never by recorded values,
so that half precision, batches of size 1, rows of zeros and freshly initialized weights make no difference.
Activations are recognized by their calls, which are elementwise; layers by a product with weights and a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.draws import Draws, repeat
from whyformer.tape.recognition import is_norm, is_softmax, rows_along
from whyformer.tape.shapes import axis_size, chosen_by, count, reduced_axes
from whyformer.tape.state import bare
from whyformer.tape.tables import (
    COMPARISONS,
    COPIES,
    CURVED,
    ELEMENTWISE,
    EXPONENTIALS,
    KINDS,
    MIXING,
    REDUCTIONS,
    SOFTMAXES,
    STRAIGHT,
    name_set,
)
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape

__all__ = ["find_regions"]

_MOST_CALLS, _MOST_SEGMENTS, _LEAST_ROWS, _FEW = 40, 14, 12, 6


_ROOTS = name_set("sqrt rsqrt pow std std_mean norm linalg_vector_norm exp reciprocal hypot")
_MASKED = name_set("where masked_fill index_put mul div")
_REPEATABLE = frozenset(KINDS) | ELEMENTWISE | COMPARISONS
_ENDS = (ELEMENTWISE - COPIES - {"dropout"}) | name_set("hypot masked_fill index_put cat stack")
_SPREADING = REDUCTIONS | name_set("_softmax _safe_softmax _log_softmax cumsum")
_STATISTICS = (CURVED | REDUCTIONS | {"hypot"}) - {"mean", "sum"}
_SIZELESS = ELEMENTWISE | COPIES | COMPARISONS | _SPREADING | name_set("unsqueeze masked_fill zeros_like ones_like")
"""Calls whose arguments do not depend on the sizes of the axes along which they do not reduce."""


def find_regions(
    tape: Tape, carry: list[bool], weight: list[bool], live: list[Call], above: dict[int, int], ends: frozenset[int]
) -> list[Unit]:
    """Return the largest units that consist of several calls.

    Args:
        tape: a recorded pass.
        carry: for each value, whether it depends on a root.
        weight: for each value, whether it is computed from weights and constants only.
        live: the calls between the roots and the output.
        above: immediate dominator of each value that carries.
        ends: values that must not lie inside a region.
    """
    regions = _Regions(tape, carry, weight, above, ends)
    for call in live:
        for o in set(call.operands):
            regions.readers.setdefault(o, []).append(call)
    with bare():
        units = list(regions.functions(live))
    return units + list(regions.layers(live))


@dataclass(frozen=True, eq=False, slots=True)
class _Segment:
    """The calls between a value and its immediate dominator, in order."""

    entry: int
    calls: tuple[Call, ...]


@dataclass(eq=False)
class _Regions:
    tape: Tape
    carry: list[bool]
    weight: list[bool]
    above: dict[int, int]
    ends: frozenset[int]
    readers: dict[int, list[Call]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def origins(self) -> tuple[list[bool], list[bool]]:
        """:attr:`follows` and :attr:`fixed`."""
        follows, fixed = list(self.carry), [False] * len(self.carry)
        for call in self.tape.calls:
            # calls that read only the shape of their operand
            shaped = call.name.startswith("new_") or call.name.endswith("_like") or call.name == "causal_mask"
            dependent = not shaped and any(follows[o] for o in call.operands)
            constant = not call.random and (shaped or all(fixed[o] for o in call.operands))
            for r in call.results:
                follows[r], fixed[r] = follows[r] or dependent, constant
        return follows, fixed

    @property
    def follows(self) -> list[bool]:
        """For each value, whether it depends on values that carry; this includes masks computed from them."""
        return self.origins[0]

    @property
    def fixed(self) -> list[bool]:
        """For each value, whether it depends on no leaf, as a causal mask that is computed from constants."""
        return self.origins[1]

    def draws(self, short: frozenset[int] = frozenset()) -> Draws:
        """Return random values for the operands from outside a region; ``short``: axes to draw few elements of."""
        return Draws(self.tape, self.fixed, self.repeats, short)

    # -- segments between a value and its dominators
    def segment(self, end: int) -> _Segment | None:
        """Return the calls between a value and its immediate dominator; None if one of them cannot be part of a region,
        or if a value inside is also read outside."""
        entry, makers, todo = self.above[end], dict[int, Call](), [end]
        while todo:
            v = todo.pop()
            if v == entry or v in makers or not self.carry[v]:
                continue
            call = self.tape.maker.get(v)
            if call is None or len(makers) > _MOST_CALLS or call.number in self.taken or self.is_excluded(call):
                return None
            makers[v] = call
            todo += call.operands
        calls = {c.number: c for c in makers.values()}
        results = (r for c in calls.values() for r in c.results)
        if any(self.carry[r] and r != end and not self.closed(r, calls) for r in results):
            return None
        return _Segment(entry, tuple(calls[n] for n in sorted(calls)))

    def closed(self, v: int, calls: Any) -> bool:
        """Return True if only these calls read value ``v``."""
        return v not in self.ends and all(c.number in calls for c in self.readers.get(v, ()))

    def is_excluded(self, call: Call) -> bool:
        """Return True if a call cannot be part of a norm, a softmax or an activation."""
        if call.random or KINDS.get(call.name) == "norm" or "batch_norm" in call.name or call.name == "embedding":
            return True
        if call.name in ("index", "masked_select") and any(self.tape.dtypes[o] == torch.bool for o in call.operands):
            return True  # the number of selected elements depends on the mask
        if KINDS.get(call.name) != "linear":
            return call.name not in _REPEATABLE
        if all(self.carry[o] for o in call.operands):  # allows the product of a row with itself, not of rows with rows
            return 2 * count(self.tape, call.results[0]) > count(self.tape, call.operands[0])
        return not all(self.carry[o] or self.fixed[o] for o in call.operands) or call.name not in MIXING | {"bmm"}

    def chain(self, end: int) -> Iterator[tuple[_Segment, tuple[Call, ...]]]:
        """Yield the segments above a value, nearest first, each with all calls from its entry to the value."""
        calls: tuple[Call, ...] = ()
        v = end
        for _ in range(_MOST_SEGMENTS):
            segment = self.segment(v) if self.above[v] >= 0 else None
            if segment is None or len(calls) + len(segment.calls) > _MOST_CALLS:
                return
            calls = segment.calls + calls
            yield segment, calls
            v = segment.entry
            if not self.closed(v, {c.number for c in segment.calls}):
                return

    def repeats(self, n: int) -> list[Call]:
        """Return the views that expand a smaller value to value ``n``, in order; empty if no element is repeated."""
        views, size, v = list[Call](), count(self.tape, n), n
        while (call := self.tape.maker.get(v)) and len(call.operands) == 1 and KINDS.get(call.name) == "view":
            views.append(call)
            v = call.operands[0]
        while views and count(self.tape, views[-1].operands[0]) == count(self.tape, views[-1].results[0]):
            views.pop()
        return views[::-1] if views and count(self.tape, views[-1].operands[0]) < size else []

    # -- norms, softmaxes, activations
    def functions(self, live: Sequence[Call]) -> Iterator[Unit]:
        """Yield norms, softmaxes and activations, in reverse order of execution."""
        for call in reversed(live):
            ends = call.name in _ENDS or self.is_shifted_softmax(call)
            if not ends or call.number in self.taken or not self.carry[call.results[0]]:
                continue
            # cat and stack end a region only if several parts carry, unlike a concatenation with an empty cache
            if call.name not in ("cat", "stack") or sum(self.carry[o] for o in call.operands) > 1:
                unit = self.function(call.results[0])
                if unit is not None:
                    self.taken.update(unit.calls)
                    yield unit

    def is_shifted_softmax(self, call: Call) -> bool:
        """Return True for softmax(x − max x), where the maximum only prevents overflow and is no branch."""
        shift = self.tape.maker.get(call.operands[0]) if call.name in SOFTMAXES else None
        if shift is None or shift.name != "sub" or len(shift.operands) != 2:
            return False
        largest = self.tape.maker.get(shift.operands[1])
        return largest is not None and largest.name in ("max", "amax") and largest.operands[0] == shift.operands[0]

    def function(self, end: int) -> Unit | None:
        """Return the largest norm, softmax or activation that ends at a value."""
        tape, best, count_before = self.tape, None, 0
        can_end = self.can_end_activation(tape.maker[end])
        for segment, calls in self.chain(end):
            if tape.shapes[segment.entry] != tape.shapes[end] or not tape.dtypes[segment.entry].is_floating_point:
                continue
            fresh = calls[: len(calls) - count_before]
            count_before = len(calls)
            if all(KINDS.get(c.name) == "view" and not self.can_end_activation(c) for c in fresh):
                continue
            kind, axes = self.norm_or_softmax(segment.entry, end, calls) or ("", ())
            may_activate = not kind and can_end and (best is None or best.kind == "activation")
            if may_activate and self.is_activation(segment.entry, end, fresh, calls):
                kind, axes = "activation", (-1,)
            if kind:
                held = self.statistics(segment.entry, calls) if kind == "norm" else frozenset[int]()
                numbers = tuple(c.number for c in calls)
                best = Unit(kind, kind, (segment.entry,), (end,), numbers, statistics=held, axes=axes)
                if tape.maker[end].name in SOFTMAXES:
                    break  # masks and scales before the softmax are separate units
        return best

    def is_nonlinear(self, call: Call) -> bool:
        """Return True if a call is elementwise and nonlinear, which includes masking by a mask computed from x."""
        if call.name in _MASKED:
            return any(not self.carry[o] and self.follows[o] for o in call.operands)
        return call.name in CURVED

    def is_binary(self, call: Call) -> bool:
        """Return True if a call is elementwise and has several operands that carry."""
        return call.name in ELEMENTWISE and sum(self.carry[o] for o in call.operands) > 1

    def can_end_activation(self, call: Call) -> bool:
        """Return True if an activation may end with this call."""
        return self.is_nonlinear(call) or self.is_binary(call) or call.name in ("cat", "stack")

    def is_activation(self, entry: int, end: int, fresh: Sequence[Call], calls: Sequence[Call]) -> bool:
        """Return True if the calls compute an elementwise function for which all of them, including the first, are
        needed.

        Args:
            entry, end: first and last value.
            fresh: the calls that were added before a smaller region.
            calls: all calls from ``entry`` to ``end``.
        """
        nonlinear = [c for c in calls if self.is_nonlinear(c)]
        if not nonlinear or not any(self.is_nonlinear(c) or self.is_binary(c) for c in fresh) or self.reduced(entry):
            return False
        if len(nonlinear) == 1 and nonlinear[0].name not in _MASKED and not any(map(self.is_binary, calls)):
            return False
        if all(c.name in ELEMENTWISE or c.name == "masked_fill" for c in calls):
            return True
        if not all(c.name in ELEMENTWISE or KINDS.get(c.name) == "view" for c in calls):
            return False
        return self.cached(_Trial(self, entry, end, tuple(calls)), _is_elementwise)

    def reduced(self, v: int) -> bool:
        """Return True if a value is a mean, a sum or a norm, possibly scaled, so that its roots are statistics."""
        while v in self.tape.maker:
            call = self.tape.maker[v]
            carried = [o for o in call.operands if self.carry[o]]
            if call.name in REDUCTIONS:
                return True
            if len(carried) != 1 or not (call.name in STRAIGHT or KINDS.get(call.name) == "view"):
                return False
            v = carried[0]
        return False

    def statistics(self, entry: int, calls: Sequence[Call]) -> frozenset[int]:
        """Return the values inside a norm that are one number for each row and nonlinear in the row."""
        size, statistics = count(self.tape, entry), set[int]()
        for c in calls:
            results = c.results[:1] if c.name in ("std_mean", "var_mean") else c.results
            if c.name in _STATISTICS:
                statistics.update(r for r in results if count(self.tape, r) < size)
        return frozenset(statistics)

    def norm_or_softmax(self, entry: int, end: int, calls: Sequence[Call]) -> tuple[str, tuple[int, ...]] | None:
        """Return (kind, axes) of the norm or softmax that the calls compute; None if they compute neither."""
        names = {c.name for c in calls}
        if len(calls) < 2 or not names & (_ROOTS | EXPONENTIALS):
            return None
        if not any(c.name in _SPREADING or KINDS.get(c.name) in ("linear", "mean") for c in calls):
            return None
        return self.cached(_Trial(self, entry, end, tuple(calls)), _norm_or_softmax)

    def cached(self, trial: _Trial, question: Callable[[_Trial], Any]) -> Any:
        """Return ``question(trial)``, cached by the pattern of the calls; None if that depends on integers."""
        shapes, dtypes = self.tape.shapes, self.tape.dtypes
        for o in trial.outside:
            drawn = self.fixed[o] or dtypes[o].is_floating_point or dtypes[o] == torch.bool or shapes[o].numel() == 1
            if not drawn and not all(c.name in ELEMENTWISE for c in trial.calls if o in c.operands):
                return None
        key = question, trial.pattern()
        self.cache[key] = self.cache[key] if key in self.cache else question(trial)
        return self.cache[key]

    # -- layers
    def layers(self, live: Sequence[Call]) -> Iterator[Unit]:
        """Yield the layers that consist of a product with weights and the addition of a bias."""
        for call in live:
            if call.number not in self.taken and (axis := self.unit_axis(call)) is not None:
                calls = self.biased(call, axis)
                if len(calls) > 1:
                    self.taken.update(c.number for c in calls)
                    entry = next(o for o in call.operands if self.carry[o])
                    yield Unit("layer", "layer", (entry,), calls[-1].results[:1], tuple(c.number for c in calls))

    def unit_axis(self, call: Call) -> int | None:
        """Return the (negative) axis of the output features in the result of a product of a value with weights; None if
        the call is not such a product."""
        shapes = self.tape.shapes
        carried = [i for i, o in enumerate(call.operands) if self.carry[o]]
        others = [o for o in call.operands if not self.carry[o] and self.tape.floating(o)]
        if len(carried) != 1 or len(others) != 1 or not self.weight[others[0]]:
            return None
        x, w = call.operands[carried[0]], others[0]
        if call.name == "_grouped_mm":
            return -1
        if call.name in ("mm", "bmm", "matmul", "mv"):
            return -1 if carried[0] == 0 or len(shapes[x]) < 2 else -2
        if call.name == "convolution":
            return 1 - len(shapes[call.results[0]])
        if call.name == "mul":  # outer product: an axis of the weights that has size 1 in x
            axes = (a for a in range(-len(shapes[w]), 0) if axis_size(shapes[w], a) > 1 == axis_size(shapes[x], a))
            return next(axes, None)
        return None

    def biased(self, product: Call, axis: int) -> list[Call]:
        """Return the product of x and weights, the calls that rearrange or sum it, and the addition of the bias."""
        tape, calls, complete = self.tape, [product], 1 if product.name != "mul" else 0
        while True:
            r = calls[-1].results[0]
            after = self.readers.get(r, ())
            if len(calls[-1].results) > 1 or r in self.ends or len(after) != 1 or after[0].number in self.taken:
                break
            (call,) = after
            others = [o for o in call.operands if o != r]
            if call.name == "add" and len(others) == 1 and self.weight[others[0]] and not call.kwargs and complete:
                return [*calls, call] if self.is_bias(others[0], calls, axis) else calls[:complete]
            sums = call.name == "sum" and not complete and bool(axes := reduced_axes(call, tape)) and axis not in axes
            keeps = KINDS.get(call.name) in ("view", "mul") and count(tape, r) == count(tape, call.results[0])
            if others or not (sums or keeps):
                break
            calls.append(call)
            complete = len(calls) if sums else complete
        return calls[:complete]

    def is_bias(self, n: int, calls: Sequence[Call], axis: int) -> bool:
        """Return True if value ``n``, which is added to the last result, has one number for each output feature.

        Args:
            n: number of the value.
            calls: the product, and the calls that rearrange its result.
            axis: the (negative) axis of the output features in the result of the product.
        """
        weights = (chosen_by(self.tape, o) for o in calls[0].operands if not self.carry[o])
        if calls[0].name == "_grouped_mm" or chosen_by(self.tape, n) in [ids for ids in weights if ids]:
            return True  # weights and biases of experts, selected by the same indices
        shapes = self.tape.shapes
        before, after, bias = (shapes[i] for i in (calls[0].results[0], calls[-1].results[0], n))
        rearranged = any(c.name not in ("view", "_unsafe_view", "_to_copy", "mul", "div") for c in calls[1:])
        if axis != -1 or rearranged or before[-1:] != after[-1:]:
            return self.fits(n, calls, axis)
        if bias[-1:] != after[-1:]:
            return False
        return bias.numel() == bias[-1] or (bool(self.repeats(n)) and self.fits(n, calls, axis))

    def fits(self, n: int, calls: Sequence[Call], axis: int) -> bool:
        """Return True if value ``n`` depends only on the output feature."""
        tape = self.tape
        shape = tape.shapes[calls[0].results[0]]
        numbers = torch.arange(1.0, shape[axis] + 1, dtype=torch.float64)
        units = numbers.view(-1, *[1] * (-axis - 1)).expand(shape)
        with bare():
            for call in calls[1:]:
                (units,) = repeat(call, tape, [units])
            bias = self.draws()[n]
        if torch.broadcast_shapes(bias.shape, units.shape) != units.shape:
            return False
        _, group = units.unique(return_inverse=True)
        bias = bias.expand(units.shape)
        return bool((bias.new_zeros(len(numbers)).index_put_((group,), bias)[group] == bias).all())


# -- calls on random rows --------------------------------------------------------------------------------------------
class _Trial:
    """The calls from an entry to an end as a function, with random operands from outside."""

    def __init__(self, regions: _Regions, entry: int, end: int, calls: tuple[Call, ...]) -> None:
        self.regions, self.tape, self.entry, self.end = regions, regions.tape, entry, end
        self.calls = self.with_masks(calls)
        inner = {entry, *(r for c in self.calls for r in c.results)}
        self.outside = [o for c in self.calls for o in c.operands if o not in inner]
        self.draws = regions.draws(self.short_axes())

    def with_masks(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls together with those that compute masks from values inside."""
        inner = {self.entry, *(r for c in calls for r in c.results)}
        extended, todo = {c.number: c for c in calls}, [o for c in calls for o in c.operands]
        while todo:
            n = todo.pop()
            call = self.tape.maker.get(n)
            masks = self.regions.follows[n] and not self.regions.carry[n]
            if n not in inner and call is not None and masks and call.name in _REPEATABLE:
                inner.update(call.results)
                extended[call.number] = call
                todo += call.operands
        return tuple(extended[n] for n in sorted(extended))

    def short_axes(self) -> frozenset[int]:
        """Return the (negative) axes along which no call reduces or depends on the size: few elements suffice."""
        dims, reduced = len(self.tape.shapes[self.entry]), set[int]()
        views = [[c.name for c in self.regions.repeats(o)] for o in self.outside]
        if not all(c.name in _SIZELESS for c in self.calls) or any(v not in ([], ["expand"]) for v in views):
            return frozenset()
        for c in self.calls:
            if c.name in _SPREADING:
                axes = reduced_axes(c, self.tape)
                if not axes or len(self.tape.shapes[c.operands[0]]) != dims:
                    return frozenset()
                reduced.update(axes)
        return frozenset(range(-dims, 0)) - reduced

    def pattern(self) -> Any:
        """Return a hashable key that is equal for calls that compute the same function on equal shapes."""
        places = {self.entry: 0}
        for c in self.calls:
            for r in c.results:
                places[r] = len(places)
        shapes, regions, dtypes = self.tape.shapes, self.regions, self.tape.dtypes
        for o in self.outside:
            if o not in places:
                views = tuple((c.name, str(c.args), shapes[c.operands[0]]) for c in regions.repeats(o))
                places[o] = ("fixed", o) if regions.fixed[o] else (shapes[o], dtypes[o].is_floating_point, views)  # type: ignore[assignment]
        rows = [(c.name, str(c.args), str(c.kwargs), *(places[o] for o in c.operands)) for c in self.calls]
        return shapes[self.entry], tuple(rows)

    def rows(self) -> Tensor:
        """Return a random value for the entry whose magnitude varies along each axis."""
        shape = self.draws.shape(self.entry)
        x = self.draws.normal(shape) * self.draws.uniform((), 0.5)
        for i, size in enumerate(shape):
            x *= self.draws.uniform((size, *[1] * (len(shape) - i - 1)), 0.5)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        values = {self.entry: x}
        for c in self.calls:
            operands = [values[o] if o in values else self.draws[o] for o in c.operands]
            values.update(zip(c.results, repeat(c, self.tape, operands), strict=True))
        return values[self.end]


def _is_elementwise(trial: _Trial) -> bool:
    """Return True if f(where(m, x, z)) = where(m, f(x), f(z)) for a random mask m."""
    x, z = trial.rows(), trial.rows()
    first = trial.draws.uniform(x.shape, 0) < 0.5
    fx, fz, mixed = trial(x), trial(z), trial(torch.where(first, x, z))
    return fx.shape == x.shape and torch.equal(torch.where(first, fx, fz), mixed)


def _norm_or_softmax(trial: _Trial) -> tuple[str, tuple[int, ...]] | None:
    """Return (kind, axes) of the norm or softmax that a trial computes; None if it computes neither."""
    x, names = trial.rows(), {c.name for c in trial.calls}
    y = trial(x)
    axes = _mixed_axes(trial, x, y) if y.shape == x.shape else ()
    if not axes:
        return None
    drawn = [(x, y, trial(-x))]
    while sum(len(rows_along(x, axes)) for x, _, _ in drawn) < _LEAST_ROWS:
        x = trial.rows()
        drawn.append((x, trial(x), trial(-x)))
    a, plus, minus = (torch.cat([rows_along(t, axes) for t in part])[:64] for part in zip(*drawn, strict=True))
    if names & EXPONENTIALS:
        sink = not names & {"_softmax", "_safe_softmax", "_log_softmax"}
        if is_softmax(a, plus, sink):
            return "softmax", axes
        if is_softmax(a, plus.exp(), False):
            return "log softmax", axes
    return ("norm", axes) if names & _ROOTS and is_norm(a, plus, minus) else None


def _mixed_axes(trial: _Trial, x: Tensor, y: Tensor) -> tuple[int, ...]:
    """Return the (negative) axes along which a change of one element of x changes other elements of y."""
    y = y.nan_to_num(0, 0, 0)
    sizes, moved = y.abs().flatten(), x.clone().flatten()
    # not the largest: if a mask leaves one element of a row, its softmax is 1 for every x
    moved[sizes.masked_fill(sizes > 0.9 * sizes.max(), 0).argmax()] += 0.5
    change = (trial(moved.view(x.shape)).nan_to_num(0, 0, 0) - y).abs()
    places = (change > 1e-9 * change.max()).nonzero()
    if not len(places):
        return ()
    return tuple(a - x.dim() for a, (low, high) in enumerate(zip(*places.aminmax(dim=0), strict=True)) if low < high)
