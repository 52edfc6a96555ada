"""Find the units that consist of several calls: norms, softmaxes, activations, layers and sums of stacks.

A region is the part of the tape between an entry and an exit that the entry dominates. Norms and softmaxes are
recognized by repeating the calls of a region on random rows with random weights in float64, never by recorded values,
so that half precision, batches of size 1, rows of zeros and freshly initialized weights make no difference.
Activations are recognized by their calls, which are elementwise; layers by a product with weights and a bias.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from whyformer.tape.calls import Call
from whyformer.tape.state import bare
from whyformer.tape.tables import (
    COPIES,
    CURVED,
    ELEMENTWISE,
    EXPONENTIALS,
    EXTENSIONS,
    KINDS,
    MIXING,
    REDUCTIONS,
    RESHAPES,
    SOFTMAXES,
    STRAIGHT,
    name_set,
)
from whyformer.tape.trials import (
    DEVIATIONS,
    REPEATABLE,
    SHIFTED_SOFTMAX,
    SPREADING,
    Draws,
    Origins,
    RegionTrial,
    is_elementwise,
    norm_or_softmax,
    repeat_in_float64,
)
from whyformer.tape.units import Unit, reduced_axes, scales
from whyformer.tape.values import Tape

__all__ = ["Regions"]

_Segment = tuple[int, tuple[Call, ...]]
"""A value, and the calls from it to a later value that it dominates."""

_MOST_CALLS, _MOST_SEGMENTS = 40, 14  # largest number of calls of a region, and of dominators that are followed
_MASKED = name_set("where masked_fill index_put mul div")  # nonlinear if the mask or a factor is computed from x
_PAIRWISE = SOFTMAXES | {"logsumexp"}  # calls over two values, one of them a constant, as in a sigmoid or softplus
_ENDS = (ELEMENTWISE - COPIES - {"dropout"}) | name_set("hypot masked_fill index_put cat stack logsumexp")
"""Calls with which a norm, a softmax or an activation may end."""
_STATISTICS = (CURVED | REDUCTIONS | {"hypot"}) - {"mean", "sum"}


class Regions:
    """The search for units that consist of several calls.

    Args:
        tape: a recorded pass.
        carry: for each value, whether it depends on a root.
        weight: for each value, whether it is computed from weights and constants only.
        above: immediate dominator of each value that carries.
        live: the calls between the roots and the output.
        ends: values that must not lie inside a region.

    Attributes:
        readers: maps a value to the live calls that read it.
        taken: numbers of the calls that belong to a unit.
    """

    def __init__(
        self,
        tape: Tape,
        carry: list[bool],
        weight: list[bool],
        above: dict[int, int],
        live: list[Call],
        ends: frozenset[int],
    ) -> None:
        self.tape, self.carry, self.weight, self.above, self.live, self.ends = tape, carry, weight, above, live, ends
        self.origins, self.taken, self.cache = Origins(tape, carry), set[int](), dict[Any, Any]()
        self.readers: dict[int, list[Call]] = defaultdict(list)
        for call in live:
            for o in set(call.operands):
                self.readers[o].append(call)

    def find(self) -> list[Unit]:
        """Return the units that consist of several calls, each as large as possible."""
        with bare():
            units = list(self.functions())
        return [*units, *self.layers(), *self.sums()]

    # -- segments between a value and its dominators
    def segment(self, end: int) -> _Segment | None:
        """Return the immediate dominator of a value and the calls between; None if one of them cannot be part of a
        region, or if a value inside is also read outside."""
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
        return entry, tuple(calls[n] for n in sorted(calls))

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
            return call.name not in REPEATABLE
        if all(self.carry[o] for o in call.operands):  # a row times itself (a sum of squares) is allowed
            shapes = self.tape.shapes
            return 2 * shapes[call.results[0]].numel() > shapes[call.operands[0]].numel()
        constants = all(self.carry[o] or self.origins.fixed[o] for o in call.operands)
        return not (constants or scales(call, self.tape)) or call.name not in MIXING

    def chain(self, end: int) -> Iterator[_Segment]:
        """Yield the dominators of a value, nearest first, each with all calls from it to the value."""
        calls: tuple[Call, ...] = ()
        v = end
        for _ in range(_MOST_SEGMENTS):
            segment = self.segment(v) if self.above[v] >= 0 else None
            if segment is None or len(calls) + len(segment[1]) > _MOST_CALLS:
                return
            v, between = segment
            calls = between + calls
            yield v, calls
            if not self.closed(v, {c.number for c in between}):
                return

    # -- norms, softmaxes, activations
    def functions(self) -> Iterator[Unit]:
        """Yield norms, softmaxes and activations, in reverse order of execution."""
        for call in reversed(self.live):
            ends = call.name in _ENDS or self.is_shifted_softmax(call) or self.is_probability(call)
            ends = ends or self.is_scaled(call)
            if not ends or call.number in self.taken or not self.carry[call.results[0]]:
                continue
            # cat and stack end a region only if several parts carry, unlike a concatenation with an empty cache
            if call.name not in ("cat", "stack") or sum(self.carry[o] for o in call.operands) > 1:
                unit = self.function(call.results[0])
                if unit is not None:
                    self.taken.update(unit.calls)
                    yield unit

    def is_probability(self, call: Call) -> bool:
        """Return True if a call selects some results of a softmax, as for a sigmoid written as a softmax of two."""
        before = self.tape.maker.get(call.operands[0]) if call.name in ("select", "slice", "split", "unbind") else None
        return before is not None and before.name in SOFTMAXES

    def is_scaled(self, end: Call) -> bool:
        """Return True for a product that scales each feature, as by the weight of a norm written as a diagonal matrix,
        possibly with a bias and reshaped."""
        call: Call | None = end
        while call is not None and call.name in RESHAPES | {"add"} and sum(self.carry[o] for o in call.operands) == 1:
            call = self.tape.maker.get(next(o for o in call.operands if self.carry[o]))
        return call is not None and KINDS.get(call.name) == "linear" and scales(call, self.tape)

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
        for entry, calls in self.chain(end):
            if tape.shapes[entry] != tape.shapes[end] or not tape.dtypes[entry].is_floating_point:
                continue
            fresh = calls[: len(calls) - count_before]
            count_before = len(calls)
            if all(KINDS.get(c.name) == "view" and not self.can_end_activation(c) for c in fresh):
                continue
            kind, axes = self.norm_or_softmax(entry, end, calls) or ("", ())
            may_activate = not kind and can_end and (best is None or best.kind == "activation")
            if may_activate and self.is_activation(entry, end, fresh, calls):
                kind, axes = "activation", (-1,)
            if kind == SHIFTED_SOFTMAX and best is not None:
                break  # a bias that is added before a softmax is a separate unit
            if kind:
                statistics = self.statistics(entry, calls) if kind == "norm" else frozenset[int]()
                numbers = tuple(c.number for c in calls)
                best = Unit(kind, kind, (entry,), (end,), numbers, statistics=statistics, axes=axes)
                if tape.maker[end].name in SOFTMAXES:
                    break  # masks and scales before the softmax are separate units
        return best

    def is_nonlinear(self, call: Call) -> bool:
        """Return True if a call is elementwise and nonlinear, which includes masking by a mask computed from x."""
        if call.name in _MASKED:
            return any(not self.carry[o] and self.origins.follows[o] for o in call.operands)
        return call.name in CURVED or call.name in _PAIRWISE

    def is_binary(self, call: Call) -> bool:
        """Return True if a call is elementwise and has several operands that carry."""
        return call.name in ELEMENTWISE and sum(self.carry[o] for o in call.operands) > 1

    def can_end_activation(self, call: Call) -> bool:
        """Return True if an activation may end with this call."""
        ends = call.name in ("cat", "stack") or self.is_probability(call)
        return ends or self.is_nonlinear(call) or self.is_binary(call)

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
        single = len(nonlinear) == 1 and nonlinear[0].name not in _MASKED | _PAIRWISE
        if single and not any(map(self.is_binary, calls)):
            return False
        if all(c.name in ELEMENTWISE or c.name == "masked_fill" for c in calls):
            return True
        if not all(c.name in ELEMENTWISE | _PAIRWISE or KINDS.get(c.name) == "view" for c in calls):
            return False
        if any(c.name in _PAIRWISE for c in calls) and not self.joins_constants(calls):
            return False
        return self.cached(RegionTrial(self.origins, entry, end, tuple(calls)), is_elementwise)

    def joins_constants(self, calls: Sequence[Call]) -> bool:
        """Return True if the calls join a value with constants, unlike an attention sink, which is a parameter."""
        joined = [o for c in calls if c.name in ("cat", "stack") for o in c.operands]
        return bool(joined) and all(self.carry[o] or self.origins.fixed[o] for o in joined)

    def reduced(self, v: int) -> bool:
        """Return True if a value is a mean, a sum or a norm, possibly scaled, so that its square root is a statistic.
        """
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
        shapes, statistics = self.tape.shapes, set[int]()
        for c in calls:
            results = c.results[:1] if c.name in ("std_mean", "var_mean") else c.results
            if c.name in _STATISTICS:
                statistics.update(r for r in results if shapes[r].numel() < shapes[entry].numel())
        return frozenset(statistics)

    def norm_or_softmax(self, entry: int, end: int, calls: Sequence[Call]) -> tuple[str, tuple[int, ...]] | None:
        """Return (kind, axes) of the norm or softmax that the calls compute; None if they compute neither."""
        names = {c.name for c in calls}
        if len(calls) < 2 or not names & (DEVIATIONS | EXPONENTIALS):
            return None
        if not any(c.name in SPREADING or KINDS.get(c.name) in ("linear", "mean") for c in calls):
            return None
        return self.cached(RegionTrial(self.origins, entry, end, tuple(calls)), norm_or_softmax)

    def cached(self, trial: RegionTrial, question: Callable[[RegionTrial], Any]) -> Any:
        """Return ``question(trial)``, cached by the pattern of the calls; None if that depends on integers."""
        pattern = trial.pattern()
        if pattern is None:
            return None
        key = question, pattern
        self.cache[key] = self.cache[key] if key in self.cache else question(trial)
        return self.cache[key]

    # -- layers
    def layers(self) -> Iterator[Unit]:
        """Yield the layers that consist of a product with weights and the addition of a bias."""
        for call in self.live:
            if call.number not in self.taken and (axis := self.unit_axis(call)) is not None:
                calls = [*self.extended(call), *self.biased(call, axis)]
                if len(calls) > 1:
                    self.taken.update(c.number for c in calls)
                    entry = next(o for o in calls[0].operands if self.carry[o])
                    yield Unit("layer", "layer", (entry,), calls[-1].results[:1], tuple(c.number for c in calls))

    def extended(self, product: Call) -> list[Call]:
        """Return the calls that extend x, the factor of a product with weights, by a constant feature, whose weights
        are then a bias; [] if x has no such feature."""
        calls, shapes = list[Call](), self.tape.shapes
        x = next(o for o in product.operands if self.carry[o])
        while (call := self.tape.maker.get(x)) and len(self.readers[x]) == 1 and x not in self.ends:
            calls.append(call)
            if call.number in self.taken:
                break
            if call.name in EXTENSIONS:
                entry = next(o for o in call.operands if self.carry[o])
                axes = [a for a, n in enumerate(shapes[x]) if n != shapes[entry][a]]
                same = all(o == entry or self.is_constant(o) for o in call.operands)
                return calls[::-1] if same and axes == [len(shapes[x]) - 1] else []
            if call.name not in RESHAPES or shapes[x][-1:] != shapes[call.operands[0]][-1:]:
                break
            x = call.operands[0]
        return []

    def is_constant(self, n: int) -> bool:
        """Return True if value ``n`` is one number, which depends on no leaf."""
        return self.origins.fixed[n] and bool((self.tape[n] == self.tape[n].flatten()[:1]).all())

    def unit_axis(self, call: Call) -> int | None:
        """Return the (negative) axis of the output features in the result of a product of a value with weights; None if
        the call is not such a product."""
        shapes = self.tape.shapes
        carried = [i for i, o in enumerate(call.operands) if self.carry[o]]
        others = [o for o in call.operands if not self.carry[o] and self.tape.floating(o)]
        if len(carried) != 1 or len(others) != 1 or not self.weight[others[0]] or scales(call, self.tape):
            return None
        x, w = call.operands[carried[0]], others[0]
        if call.name == "_grouped_mm":
            return -1
        if call.name in ("mm", "bmm", "matmul", "mv"):
            return -1 if carried[0] == 0 or len(shapes[x]) < 2 else -2
        if call.name == "convolution":
            return 1 - len(shapes[call.results[0]])
        if call.name == "mul":  # outer product: an axis of the weights that has size 1 in x
            axes = (a for a in range(-len(shapes[w]), 0) if _size(shapes[w], a) > 1 == _size(shapes[x], a))
            return next(axes, None)
        return None

    def biased(self, product: Call, axis: int) -> list[Call]:
        """Return the calls of a layer from the product of x and weights on, to the addition of its bias if it has one.

        With weights ``[D, E]`` and a bias ``[E]``, these are for example ``mm`` of ``[B·N, D]``, ``view`` as
        ``[B, N, E]``, ``add``; or ``mul`` of ``[N, D, 1]``, ``sum`` over D, ``add``.
        """
        calls = [product]
        layer = calls if product.name != "mul" else []  # the calls that are a layer even if no bias follows
        while (call := self.only_reader(calls[-1])) is not None:
            others = [o for o in call.operands if o not in calls[-1].results]
            if layer and call.name == "add" and not call.kwargs and len(others) == 1 and self.weight[others[0]]:
                return [*calls, call] if self.is_bias(others[0], calls, axis) else layer
            sums = not layer and self.sums_inputs(call, axis)
            if others or not (sums or self.keeps_size(call)):
                break
            calls = [*calls, call]
            layer = calls if sums else layer
        return layer

    def only_reader(self, call: Call) -> Call | None:
        """Return the call that reads the result of a call; None if there are several, or if the two calls cannot belong
        to one unit."""
        after = self.readers.get(call.results[0], ())
        if len(call.results) > 1 or len(after) != 1 or call.results[0] in self.ends or after[0].number in self.taken:
            return None
        return after[0]

    def sums_inputs(self, call: Call, axis: int) -> bool:
        """Return True if a call sums an outer product over other axes than that of the output features."""
        axes = reduced_axes(call, self.tape) if call.name == "sum" else ()
        return bool(axes) and axis not in axes

    def keeps_size(self, call: Call) -> bool:
        """Return True if a call rearranges or scales all elements of its first operand."""
        shapes = self.tape.shapes
        same = shapes[call.operands[0]].numel() == shapes[call.results[0]].numel()
        return same and KINDS.get(call.name) in ("view", "mul")

    def is_bias(self, n: int, calls: Sequence[Call], axis: int) -> bool:
        """Return True if value ``n``, which is added to the last result, has one number for each output feature.

        Args:
            n: number of the value.
            calls: the product, and the calls that rearrange its result.
            axis: the (negative) axis of the output features in the result of the product.
        """
        weights = (_chosen_by(self.tape, o) for o in calls[0].operands if not self.carry[o])
        if calls[0].name == "_grouped_mm" or _chosen_by(self.tape, n) in [ids for ids in weights if ids]:
            return True  # weights and biases of experts, selected by the same indices
        shapes = self.tape.shapes
        before, after, bias = (shapes[i] for i in (calls[0].results[0], calls[-1].results[0], n))
        rearranged = any(c.name not in ("view", "_unsafe_view", "_to_copy", "mul", "div") for c in calls[1:])
        if axis != -1 or rearranged or before[-1:] != after[-1:]:
            return self.fits(n, calls, axis)
        if bias[-1:] != after[-1:]:
            return False
        return bias.numel() == bias[-1] or (bool(self.origins.derivation(n)) and self.fits(n, calls, axis))

    def fits(self, n: int, calls: Sequence[Call], axis: int) -> bool:
        """Return True if value ``n`` depends only on the output feature."""
        tape = self.tape
        shape = tape.shapes[calls[0].results[0]]
        numbers = torch.arange(1.0, shape[axis] + 1, dtype=torch.float64)
        units = numbers.view(-1, *[1] * (-axis - 1)).expand(shape)
        with bare():
            for call in calls[1:]:
                (units,) = repeat_in_float64(call, tape, [units])
            bias = Draws(self.origins)[n]
        if torch.broadcast_shapes(bias.shape, units.shape) != units.shape:
            return False
        _, group = units.unique(return_inverse=True)
        bias = bias.expand(units.shape)
        return bool((bias.new_zeros(len(numbers)).index_put_((group,), bias)[group] == bias).all())

    # -- sums
    def sums(self) -> Iterator[Unit]:
        """Yield the sums of two values that are written as a reduction of their stack, of kind "add", or "shift" if one
        of the two values is constant."""
        for stacked in self.live:
            if stacked.name != "stack" or len(stacked.operands) != 2 or stacked.number in self.taken:
                continue
            calls = [stacked]
            while len(calls) < 3 and not _is_sum(calls, self.tape):
                after = self.only_reader(calls[-1])
                if after is None or len(after.operands) != 1:
                    break
                calls.append(after)
            if _is_sum(calls, self.tape):
                self.taken.update(c.number for c in calls)
                places = tuple(i for i, o in enumerate(stacked.operands) if self.carry[o])
                entries, numbers = tuple(stacked.operands[i] for i in places), tuple(c.number for c in calls)
                kind = "add" if len(places) > 1 else "shift"
                yield Unit(kind, "add", entries, calls[-1].results[:1], numbers, places)


def _size(shape: torch.Size, axis: int) -> int:
    """Return the size of a negative axis; 1 if the shape has fewer axes."""
    return shape[axis] if -axis <= len(shape) else 1


def _chosen_by(tape: Tape, n: int) -> tuple[int, ...]:
    """Return the numbers of the indices that selected a value from a table, possibly before views; () if none did."""
    call = tape.maker.get(n)
    while call is not None and len(call.operands) == 1 and KINDS.get(call.name) == "view":
        call = tape.maker.get(call.operands[0])
    return call.operands[1:] if call is not None and call.name in ("index", "index_select") else ()


def _is_sum(calls: Sequence[Call], tape: Tape) -> bool:
    """Return True if the calls are a stack of two values and its sum or mean over the stacked axis."""
    stacked, *after = calls
    axis = stacked.argument("dim", 0)
    dims = len(tape.shapes[stacked.results[0]])
    axis = axis - dims if axis >= 0 else axis
    if len(after) == 1:
        return after[0].name in ("sum", "mean") and reduced_axes(after[0], tape) == (axis,)
    if len(after) != 2 or after[0].name != "cumsum" or after[1].name != "select":
        return False
    of, last = after[1].argument("dim", 0), after[1].argument("index", 0)
    return reduced_axes(after[0], tape) == (axis,) and of in (axis, axis + dims) and last in (1, -1)
