"""Run the calls of a region on random rows, and recognize norms, softmaxes and elementwise functions by the results.

    trial = RegionTrial(Origins(tape, carry), entry, end, calls)
    norm_or_softmax(trial)  # ("norm", (-1,))

All values from outside the region, such as weights and masks, are random numbers too, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.tables import COMPARISONS, COPIES, ELEMENTWISE, EXPONENTIALS, KINDS, REDUCTIONS, name_set
from whyformer.tape.units import reduced_axes
from whyformer.tape.values import Tape

__all__ = [
    "DEVIATIONS",
    "REPEATABLE",
    "SHIFTED_SOFTMAX",
    "SOFTMAX_KINDS",
    "SPREADING",
    "Draws",
    "Origins",
    "RegionTrial",
    "is_elementwise",
    "norm_or_softmax",
    "repeat_in_float64",
]

SHIFTED_SOFTMAX = "shifted softmax"
"""The kind of exp(x) b / Σ exp(x) b, the softmax of x + log b, with b computed from weights."""

SOFTMAX_KINDS = ("softmax", SHIFTED_SOFTMAX)
"""The kinds of units whose result is a softmax along an axis."""

_LEAST_ROWS = 12  # number of rows on which a function is tested
_FEW = 6  # number of elements along axes whose size does not affect the function

DEVIATIONS = name_set("sqrt rsqrt pow std std_mean norm linalg_vector_norm exp reciprocal hypot")
"""Calls by which a norm may compute 1/σ."""

REPEATABLE = frozenset(KINDS) | ELEMENTWISE | COMPARISONS
SPREADING = REDUCTIONS | name_set("_softmax _safe_softmax _log_softmax cumsum")
_POSITIVE = name_set("exp exp2 softplus sigmoid square abs")  # restrict the range of their operand
_SIZELESS = ELEMENTWISE | COPIES | COMPARISONS | SPREADING | name_set("unsqueeze masked_fill zeros_like ones_like")
"""Calls whose arguments do not depend on the sizes of the axes along which they do not reduce."""


class Origins:
    """What the values of a pass depend on.

    Attributes:
        tape: the pass.
        carry: for each value, whether it depends on a root through floating-point values.
        follows: for each value, whether it depends on values that carry; this includes masks computed from them.
        fixed: for each value, whether it depends on no leaf, as a causal mask that is computed from constants.
    """

    def __init__(self, tape: Tape, carry: list[bool]) -> None:
        self.tape, self.carry, self.follows, self.fixed = tape, carry, list(carry), [False] * len(carry)
        for call in tape.calls:
            # calls that read only the shape of their operand
            shaped = call.name.startswith("new_") or call.name.endswith("_like") or call.name == "causal_mask"
            dependent = not shaped and any(self.follows[o] for o in call.operands)
            constant = not call.random and (shaped or all(self.fixed[o] for o in call.operands))
            for r in call.results:
                self.follows[r], self.fixed[r] = self.follows[r] or dependent, constant

    def derivation(self, n: int) -> list[Call]:
        """Return the calls, in order, that expand a smaller value to value ``n``, or restrict its range, as exp does;
        empty if the elements of ``n`` are independent and of any size."""
        calls, shapes, v = list[Call](), self.tape.shapes, n
        while (call := self.tape.maker.get(v)) and len(call.operands) == 1 and not self.carry[v]:
            if KINDS.get(call.name) != "view" and call.name not in _POSITIVE:
                break
            calls.append(call)
            v = call.operands[0]
        while calls and calls[-1].name not in _POSITIVE and shapes[v].numel() == shapes[calls[-1].results[0]].numel():
            v = calls.pop().results[0]
        restricted = any(c.name in _POSITIVE for c in calls)
        return calls[::-1] if restricted or shapes[v].numel() < shapes[n].numel() else []


class Draws:
    """Random float64 substitutes for values from outside a region. Values that depend on no leaf, such as a causal
    mask, are constants of the program and are not replaced.

    Args:
        origins: of the pass.
        short: (negative) axes of which few elements are drawn.
    """

    def __init__(self, origins: Origins, short: frozenset[int] = frozenset()) -> None:
        self.origins, self.tape, self.short = origins, origins.tape, short
        self.values: dict[int, Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the substitute for value ``n``."""
        shape = self.tape.shapes[n]
        return tuple(min(size, _FEW) if i - len(shape) in self.short else size for i, size in enumerate(shape))

    def __getitem__(self, n: int) -> Tensor:
        if n not in self.values:
            self.values[n] = self.draw(n)
        return self.values[n]

    def draw(self, n: int) -> Tensor:
        tape, shape = self.tape, self.shape(n)
        if self.origins.fixed[n]:
            return wide(tape[n][tuple(map(slice, shape))])
        calls = self.origins.derivation(n)
        if calls:
            t = self[calls[0].operands[0]]
            for call in calls:
                t = t.expand(shape) if self.short else repeat_in_float64(call, tape, [t])[0]
            return t
        if tape.dtypes[n] == torch.bool:
            return torch.rand(shape, generator=self.random) < 0.5
        if not tape.floating(n):  # a mask of integers, or a scalar
            if tape.shapes[n].numel() == 1:
                return tape[n].cpu()
            return (torch.rand(shape, generator=self.random) < 0.75).to(tape.dtypes[n])
        if math.prod(shape) == 1:  # a scalar, such as the fill value of masked scores: keep its order of magnitude
            return wide(tape[n]) * self.uniform((), 0.5)
        noise = self.normal(shape)
        return noise + noise.sign()

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def uniform(self, shape: Sequence[int], low: float) -> Tensor:
        return low + torch.rand(shape, generator=self.random, dtype=torch.float64)


def repeat_in_float64(call: Call, tape: Tape, operands: list[Tensor]) -> list[Tensor]:
    """Repeat a call in float64, without casts to other floating-point dtypes."""
    if call.name == "_to_copy" and tape.floating(call.results[0]):
        return [operands[0].double()]
    if call.name in ("_softmax", "_log_softmax"):  # the third argument requests float32 results for half precision
        return [call.operator(operands[0], call.args[1], False)]
    dtype = call.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        call = replace(call, kwargs={**call.kwargs, "dtype": torch.float64})
    return [wide(t) for t in call(operands)]


def wide(t: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float64 if it is floating-point."""
    return t.double().cpu() if t.is_floating_point() else t.cpu()


class RegionTrial:
    """The calls from an entry to an end as a function, with random operands from outside."""

    def __init__(self, origins: Origins, entry: int, end: int, calls: tuple[Call, ...]) -> None:
        self.origins, self.tape, self.entry, self.end = origins, origins.tape, entry, end
        self.calls = self.with_masks(calls)
        inner = {entry, *(r for c in self.calls for r in c.results)}
        self.outside = [o for c in self.calls for o in c.operands if o not in inner]
        self.draws = Draws(origins, self.short_axes())

    def with_masks(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls together with those that compute masks from values inside."""
        inner = {self.entry, *(r for c in calls for r in c.results)}
        extended, todo = {c.number: c for c in calls}, [o for c in calls for o in c.operands]
        while todo:
            n = todo.pop()
            call = self.tape.maker.get(n)
            masks = self.origins.follows[n] and not self.origins.carry[n]
            if n not in inner and call is not None and masks and call.name in REPEATABLE:
                inner.update(call.results)
                extended[call.number] = call
                todo += call.operands
        return tuple(extended[n] for n in sorted(extended))

    def short_axes(self) -> frozenset[int]:
        """Return the (negative) axes along which no call reduces or depends on the size: few elements suffice."""
        dims, reduced = len(self.tape.shapes[self.entry]), set[int]()
        views = [[c.name for c in self.origins.derivation(o)] for o in self.outside]
        if not all(c.name in _SIZELESS for c in self.calls) or any(v not in ([], ["expand"]) for v in views):
            return frozenset()
        for c in self.calls:
            if c.name in SPREADING:
                axes = reduced_axes(c, self.tape)
                if not axes or len(self.tape.shapes[c.operands[0]]) != dims:
                    return frozenset()
                reduced.update(axes)
        return frozenset(range(-dims, 0)) - reduced

    def pattern(self) -> Any:
        """Return a hashable key that is equal for calls that compute the same function on equal shapes; None if the
        function depends on integers, which cannot be drawn."""
        shapes, fixed, dtypes = self.tape.shapes, self.origins.fixed, self.tape.dtypes
        for o in self.outside:
            drawn = fixed[o] or dtypes[o].is_floating_point or dtypes[o] == torch.bool or shapes[o].numel() == 1
            if not drawn and not all(c.name in ELEMENTWISE for c in self.calls if o in c.operands):
                return None
        places = {self.entry: 0}
        for c in self.calls:
            for r in c.results:
                places[r] = len(places)
        for o in self.outside:
            if o not in places:
                calls = tuple((c.name, str(c.args), shapes[c.operands[0]]) for c in self.origins.derivation(o))
                places[o] = ("fixed", o) if fixed[o] else (shapes[o], dtypes[o].is_floating_point, calls)  # type: ignore[assignment]
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
            values.update(zip(c.results, repeat_in_float64(c, self.tape, operands), strict=True))
        return values[self.end]


def is_elementwise(trial: RegionTrial) -> bool:
    """Return True if f(where(m, x, z)) = where(m, f(x), f(z)) for a random mask m."""
    x, z = trial.rows(), trial.rows()
    first = trial.draws.uniform(x.shape, 0) < 0.5
    fx, fz, mixed = trial(x), trial(z), trial(torch.where(first, x, z))
    return fx.shape == x.shape and torch.equal(torch.where(first, fx, fz), mixed)


def norm_or_softmax(trial: RegionTrial) -> tuple[str, tuple[int, ...]] | None:
    """Return (kind, axes) of the norm or softmax that a trial computes; None if it computes neither."""
    x, names = trial.rows(), {c.name for c in trial.calls}
    y = trial(x)
    axes = _mixed_axes(trial, x, y) if y.shape == x.shape else ()
    if not axes:
        return None
    drawn = [x]
    while sum(len(rows_along(x, axes)) for x in drawn) < _LEAST_ROWS:
        drawn.append(trial.rows())

    def rows(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([rows_along(t, axes) for t in tensors])[:64]

    a, plus = rows(drawn), rows(map(trial, drawn))
    if names & EXPONENTIALS:
        sink = not names & {"_softmax", "_safe_softmax", "_log_softmax"}
        if is_softmax(a, plus, sink):
            return "softmax", axes
        if is_softmax(a, plus.exp(), False):
            return "log softmax", axes
        ratio = (plus / rows(trial(x / 2) for x in drawn)).nan_to_num(0, 0, 0)
        if is_softmax(a / 2, ratio, sums=False) and is_softmax(plus.log(), plus, sink):
            return SHIFTED_SOFTMAX, axes
    return ("norm", axes) if names & DEVIATIONS and is_norm(a, plus, rows(trial(-x) for x in drawn)) else None


def _mixed_axes(trial: RegionTrial, x: Tensor, y: Tensor) -> tuple[int, ...]:
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


def is_softmax(x: Tensor, y: Tensor, sink: bool = False, sums: bool = True) -> bool:
    """Return True if y = exp(x) / Σ exp(x) for each row, where elements with y = 0 are masked. With ``sink``, the
    denominator may have a further term, the same for all rows; without ``sums``, it is any number."""
    total = y.sum(-1, keepdim=True)
    live = (total.isfinite() & (total > 1e-9))[:, 0]
    x, y, total = x[live], y[live], total[live]
    unmasked = y > 0
    if not len(x) or bool((y < 0).any()) or int(unmasked.sum(-1).max()) < 2:
        return False
    sums_to_one = close(total, torch.ones_like(total), 1e-5)
    has_sink = sink and len(total) > 2 and float(total.max()) < 1 and float(total.std()) > 1e-3
    is_sum = not sums or sums_to_one or has_sink
    return is_sum and close(x.masked_fill(~unmasked, -math.inf).softmax(-1), y / total, 1e-4)


def is_norm(x: Tensor, plus: Tensor, minus: Tensor) -> bool:
    """Return True if f(x) = s c ⊙ w + b for each row, with c = x − mean x or c = x, and s⁻² = k (mean c² + ε) or
    s⁻¹ = k (√(mean c²) + ε), where w and b are the same for all rows.

    Args:
        x: ``[rows, n]``.
        plus, minus: f(x) and f(−x). b is the even part of f.
    """
    bias, odd = (plus + minus) / 2, (plus - minus) / 2
    if not bool(plus.isfinite().all()) or not close(bias - bias[:1], 0 * odd + odd.abs().max(), 1e-6, zero=True):
        return False
    for c in (x - x.mean(-1, keepdim=True), x)[x.shape[-1] < 3 :]:
        weight = odd[:1] / c[:1]
        s = (odd * c).sum(-1, keepdim=True) / (weight * c * c).sum(-1, keepdim=True)
        if bool(s.isfinite().all()) and close(s * c * weight, odd, 1e-3) and bool((s > 0).all()):
            size = c.square().mean(-1, keepdim=True)
            return _proportional(size, s**-2) or _proportional(size.sqrt(), 1 / s)
    return False


def _proportional(a: Tensor, b: Tensor) -> bool:
    """Return True if b = k (a + ε) with k > 0."""
    centred = a - a.mean()
    k = (centred * b).sum() / centred.square().sum()
    return bool((k > 0) & ((b.mean() + k * centred - b).abs() <= 1e-3 * b).all())


def close(a: Tensor, b: Tensor, tolerance: float, zero: bool = False) -> bool:
    """Return True if a = b, or with ``zero`` a = 0, up to ``tolerance`` times the largest |b|."""
    return bool(((a if zero else a - b).abs() <= tolerance * b.abs().max()).all())


def rows_along(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return ``[rows, n]``, with the elements along ``axes`` in each row."""
    last = tuple(range(-len(axes), 0))
    return t.movedim(axes, last).flatten(-len(axes)).reshape(-1, math.prod(t.shape[a] for a in axes))
