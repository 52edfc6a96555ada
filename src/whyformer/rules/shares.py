"""Rules that propagate a decomposition of values forward: x = Σ_j x_←j + rest, where x_←j is the share of source j
(Modarressi et al.: DecompX, ACL 2023).

    rules = ShareRules(tape, rows, real, at_once=16)
    shares = walk_forward(program, {entry: rules.begin(entry, queries)}, [program.output], rules, DROPPED)

Linear units act on each share. Nonlinear units act as linear ones with factors from the recorded pass: a norm with its
standard deviation, an activation with the slope of its secant through 0, an attention with its map. A bias is not part
of any share: it is the rest, which a later unit distributes over the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.rules.multipliers import norm_operand, normalise
from whyformer.tape.custom_ops import OPAQUE_LAYER
from whyformer.tape.rows import Rows, RowSamples, constant_along
from whyformer.tape.trials import SOFTMAX_KINDS
from whyformer.tape.units import PRODUCT_KINDS, Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import for_each, repeat_unit

__all__ = ["DROPPED", "Distributed", "Pending", "ShareRules", "Shares"]

DROPPED = frozenset((*SOFTMAX_KINDS, "log softmax", "statistic", "silent"))
"""Kinds of units that are held constant: attention maps, deviations of norms, piecewise constant functions."""

_AFFINE = frozenset(("view", "shift", "scale", "add", "layer", "weighted sum", OPAQUE_LAYER))
_BILINEAR = frozenset((*PRODUCT_KINDS, "gate", "activated gate"))
_SLOPED = frozenset(("activation", "rectifier", "power", "clip"))

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True, eq=False)
class Pending:
    """A rest that is not distributed over the sources yet.

    Attributes:
        value: the rest.
        before_view: for a view of a value with a rest, a function that returns the parts of the view with the rest
            distributed before the view; None otherwise.
    """

    value: Tensor
    before_view: Callable[[], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Distributed:
    """A rest that is distributed over the sources: ``weights`` has the fraction ``[S, ...]`` that each source gets."""

    value: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of S sources in a value.

    Attributes:
        parts: ``[S, ...]``, the share of each source, without the rest.
        rest: the part of the value that belongs to no source; None if zero.
        is_late: True between an attention and its sum with the residual branch, after which the rest is distributed.
        is_alone: True if each row still belongs to a single source.
    """

    parts: Tensor
    rest: Pending | Distributed | None = None
    is_late: bool = False
    is_alone: bool = False

    @property
    def pending(self) -> Tensor | None:
        """The rest, if it has not been distributed."""
        return self.rest.value if isinstance(self.rest, Pending) else None

    @property
    def weights(self) -> Tensor | None:
        """``[S, ...]``, fraction of the rest that each source gets, if it has been distributed."""
        return self.rest.weights if isinstance(self.rest, Distributed) else None

    def totals(self, chunk: slice = slice(None)) -> Tensor:
        """Return ``[S, ...]``, the parts of some sources including their fractions of the rest."""
        return self.with_rest(self.parts[chunk], None if self.weights is None else self.weights[chunk])

    def with_rest(self, parts: Tensor, weights: Tensor | None) -> Tensor:
        """Return parts including their fractions ``weights`` of the rest."""
        return parts if weights is None or self.rest is None else torch.addcmul(parts, weights, self.rest.value)


def _pending(rest: Tensor) -> Pending | None:
    """Return a rest that is not distributed; None if it is zero."""
    return Pending(rest) if bool(rest.any()) else None


def _only_entry(unit: Unit) -> int | None:
    """Return the dividend of a quotient or the value that is sampled, the only entry of such a unit that may propagate
    shares; None for other units."""
    if unit.kind in ("quotient", "sampling"):
        return unit.entries[0]
    return unit.entries[unit.places.index(0)] if unit.name == "div" and unit.kind in _BILINEAR else None


class ShareRules:
    """The rule for :func:`~whyformer.tape.walking.walk_forward` over one pass, with :class:`Shares` as data.

    Args:
        tape: the pass.
        rows: the rows of the pass.
        real: ``[B, S]``, False for sources that are padding.
        at_once: number of sources whose shares are computed together.

    Raises:
        UnknownOperation: when called with a unit that cannot propagate shares.
    """

    def __init__(self, tape: Tape, rows: Rows, real: Tensor, at_once: int) -> None:
        self.tape, self.rows, self.real, self.at_once = tape, rows, real, at_once
        self.samples = RowSamples(rows)

    def begin(self, value: int, queries: Tensor) -> Shares:
        """Return the initial shares: x_i←j = x_i if row i is source j of its sample, else 0.

        Args:
            value: number of a value with one row for each element, so not an attention map.
            queries: ``[B, S]``, the rows that are sources. Other rows are the rest.
        """
        x, label = self.tape[value], self.rows.of(value)
        source = torch.full((len(self.rows),), -1)
        source[queries.cpu()] = torch.arange(queries.shape[1])
        index = source[label].to(x.device)
        sources = torch.arange(queries.shape[1], device=x.device).reshape(-1, *[1] * x.dim())
        rest = torch.where(index < 0, x, 0)
        return Shares(torch.where(index == sources, x, 0), _pending(rest), is_alone=True)

    def __call__(self, unit: Unit, entries: dict[int, Shares]) -> dict[int, Shares]:
        """Return the shares of a unit's exits, from those of its entries."""
        branches = [i for i, e in enumerate(unit.entries) if e in entries]
        alone = _only_entry(unit)
        if alone is not None:
            if alone not in entries:
                raise self._untraceable(unit)
            results = self._affine(unit, {alone: entries[alone]})
        elif unit.kind == "activated product" and unit.entries[1] in entries:
            results = self._mixed(unit, {unit.entries[1]: entries[unit.entries[1]]})
        elif unit.kind in _BILINEAR:
            results = self._halves(unit, entries) if len(branches) > 1 else self._mixed(unit, entries)
        elif unit.kind in _AFFINE:
            results = self._affine(unit, entries)
        elif unit.kind == "norm" and len(entries) == 1 and 0 in branches:
            results = self._normed(unit, entries)
        elif unit.kind in _SLOPED and len(entries) == 1:
            results = self._sloped(unit, entries)
        elif unit.kind == "selection":
            results = self._selected(unit, entries)
        else:
            raise self._untraceable(unit)
        return dict(zip(unit.exits, results, strict=True))

    def distribute_rest(self, value: int, shares: Shares) -> Shares:
        """Distribute the rest over the sources in proportion to |⟨x_←j, rest⟩|, with the inner product over the
        features; equally where that is zero for all j, up to rounding."""
        if not isinstance(shares.rest, Pending):
            return shares
        if shares.rest.before_view is not None:
            return Shares(shares.rest.before_view(), is_alone=shares.is_alone)
        rest = shares.rest.value
        axes = self._features(value, rest)
        sizes, bounds = list[Tensor](), list[Tensor]()
        for parts in shares.parts.split(self.at_once):
            products = parts * rest
            sizes.append(self._inner(products, axes).abs())
            bounds.append(self._inner(products.abs(), axes).sum(0))
        magnitudes = torch.cat(sizes)
        total, equal = magnitudes.sum(0), self._equal(value, magnitudes)
        exact = total > 8 * torch.finfo(rest.dtype).eps * torch.stack(bounds).sum(0)
        weights = torch.where(exact, magnitudes / torch.where(exact, total, 1), equal)
        return replace(shares, rest=Distributed(rest, weights), is_late=False)

    def total(self, value: int, shares: Shares, flow: Tensor, batch: int) -> Tensor:
        """Return ``[S, B]``, the inner product of each share of an output of B samples with ``flow``, the gradient of a
        target with respect to the output."""
        complete = self.distribute_rest(value, shares)
        return self._by_source(lambda part: (part * flow).reshape(batch, -1).sum(-1), complete)

    # -- by kind of unit
    def _affine(self, unit: Unit, entry_shares: dict[int, Shares]) -> list[Shares]:
        """Return f(x_←j …) − f(0) with the rest f(0). Views, scales and units after an attention propagate the rests of
        their entries; other units distribute them first."""
        entries = [e for e in dict.fromkeys(unit.entries) if e in entry_shares]
        shares = [entry_shares[e] for e in entries]
        distributors = [partial(self.distribute_rest, e, s) for e, s in zip(entries, shares, strict=True)]
        is_view, keeps_rest = unit.kind == "view", unit.kind in ("view", "scale")
        pairs = zip(shares, distributors, strict=True)
        shares = [s if s.is_late or keeps_rest else distribute() for s, distribute in pairs]
        function = lambda *x: repeat_unit(self.tape, unit, dict(zip(entries, x, strict=True)))  # noqa: E731
        if unit.kind == "layer" and self._is_of_rows(unit):
            return self._layer(unit, shares[0])
        results = self._linear(function, entries, shares, at_once=len(shares[0].parts) if is_view else self.at_once)
        if not is_view or all(s.pending is None for s in shares) or self._fills(function, entries):
            return results

        def before_view(k: int) -> Tensor:
            return self._by_source(lambda *x: function(*x)[k], *(distribute() for distribute in distributors))

        return [
            s if s.pending is None else replace(s, rest=Pending(s.pending, partial(before_view, k)))
            for k, s in enumerate(results)
        ]

    def _is_of_rows(self, unit: Unit) -> bool:
        """Return True if a layer multiplies each row of a matrix with weights (mm, addmm)."""
        call = self.tape.calls[unit.calls[0]]
        place, added = {"mm": (0, []), "addmm": (1, call.operands[:1])}.get(call.name, (-1, []))
        return unit.places == (place,) and not call.kwargs and all(len(self.tape.shapes[o]) == 1 for o in added)

    def _layer(self, unit: Unit, shares: Shares) -> list[Shares]:
        """Return the shares of a layer that multiplies rows with weights. One product for the rows of several shares is
        faster than one for each share."""
        call, (entry,) = self.tape.calls[unit.calls[0]], unit.entries
        (origin,) = repeat_unit(self.tape, unit, {entry: torch.zeros_like(self.tape[entry])})
        rest = origin if shares.pending is None else repeat_unit(self.tape, unit, {entry: shares.pending})[0]
        weight, count = self.tape[call.operands[-1]], len(shares.parts)
        parts = origin.new_empty(count, *origin.shape)
        for i in range(0, count, self.at_once):
            chunk = slice(i, i + self.at_once)
            torch.matmul(shares.totals(chunk), weight, out=parts[chunk])
        return [Shares(parts, _pending(rest), shares.is_late, shares.is_alone)]

    def _mixed(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return A x_←j, for a product with an attention map A that is held constant."""
        ((entry, shares),) = entries.items()
        if unit.kind not in PRODUCT_KINDS:
            return self._affine(unit, entries)
        shares = self.distribute_rest(entry, shares) if shares.is_alone else shares
        results = self._linear(lambda x: repeat_unit(self.tape, unit, {entry: x}), [entry], [shares])
        return [replace(s, is_late=True, is_alone=False) for s in results]

    def _halves(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return the shares of a product x y of two branches: (x_←j y + x y_←j) / 2."""
        call, sides = self.tape.calls[unit.calls[0]], list[list[Shares]]()
        for place, entry in zip(unit.places, unit.entries, strict=True):

            def function(x: Tensor, place: int = place) -> list[Tensor]:
                results = call([x if i == place else self.tape[o] for i, o in enumerate(call.operands)])
                return [results[call.results.index(r)] for r in unit.exits]

            sides.append(self._linear(function, [entry], [self.distribute_rest(entry, entries[entry])]))
        return [Shares(a.parts.add_(b.parts).div_(2), a.rest) for a, b in zip(*sides, strict=True)]

    def _normed(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return (x_←j − mean x_←j) ⊙ γ / σ with the σ of the recorded value; β is the rest."""
        tape, (entry,) = self.tape, entries
        shares = self.distribute_rest(entry, entries[entry])
        if not unit.places:  # a norm of several calls divides by values inside it
            statistics = {n: tape[n] for n in unit.statistics}
            return self._linear(lambda x: repeat_unit(tape, unit, {entry: x, **statistics}), [entry], [shares])
        gain, shift = norm_operand(tape, unit, "weight"), norm_operand(tape, unit, "bias")

        def function(x: Tensor) -> Tensor:
            normalised = normalise(tape, unit, x).to(x.dtype)
            return normalised if gain is None else normalised * gain

        rest = None if shift is None or not bool(shift.any()) else shift.expand(tape.shapes[unit.exit])
        if shares.pending is not None:
            rest = function(shares.pending) if rest is None else function(shares.pending) + rest
        pending = None if rest is None else Pending(rest)
        return [Shares(self._by_source(function, shares), pending, shares.is_late, shares.is_alone)]

    def _selected(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return the elements of x_←j that the unit selects from the recorded value; the choice is held constant."""
        values = tuple(self.tape[e] for e in entries)

        def function(*x: Tensor) -> list[Tensor]:
            repeated = lambda *v: repeat_unit(self.tape, unit, dict(zip(entries, v, strict=True)))  # noqa: E731
            return torch.func.jvp(repeated, values, x)[1]

        shares = [self.distribute_rest(e, s) for e, s in entries.items()]
        return self._linear(function, entries, shares)

    def _sloped(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return x_←j ⊙ (g(z) − g(0)) / z, where z is the recorded value; g(0) is the rest."""
        (entry,) = entries
        z, y = self.tape[entry], self.tape[unit.exit]
        (origin,) = repeat_unit(self.tape, unit, {entry: torch.zeros_like(z)})
        if y.shape != z.shape or not bool(origin.isfinite().all()):
            raise self._untraceable(unit)
        slope = torch.where(z != 0, (y - origin) / torch.where(z != 0, z, 1), 0)
        shares = self.distribute_rest(entry, entries[entry])
        parts = self._by_source(lambda part: part * slope, shares)
        return [Shares(parts, _pending(origin), is_alone=shares.is_alone)]

    # -- helpers
    def _fills(self, function: Function, entries: Iterable[int]) -> bool:
        """Return True if a function of values is not 0 at 0."""
        return any(bool(origin.any()) for origin in function(*(torch.zeros_like(self.tape[e]) for e in entries)))

    def _linear(
        self, function: Function, entries: Iterable[int], shares: list[Shares], at_once: int | None = None
    ) -> list[Shares]:
        """Apply the linear part of f to each share; f of the rests of the operands is the new rest. Where f(0) = −∞, at
        classes that the model excludes, both are 0."""
        zeros = [torch.zeros_like(self.tape[e]) for e in entries]
        origins = rests = function(*zeros)
        if any(s.pending is not None for s in shares):
            rests = function(*(z if s.pending is None else s.pending for s, z in zip(shares, zeros, strict=True)))
        late, alone, results = all(s.is_late for s in shares), all(s.is_alone for s in shares), list[Shares]()
        for k, (origin, rest) in enumerate(zip(origins, rests, strict=True)):
            shift, excluded = origin if bool(origin.any()) else None, origin.isneginf()

            def linear(*x: Tensor, k: int = k, shift: Tensor | None = shift, excluded: Tensor = excluded) -> Tensor:
                return function(*x)[k] if shift is None else (function(*x)[k] - shift).masked_fill(excluded, 0)

            parts, rest = self._by_source(linear, *shares, at_once=at_once), rest.masked_fill(excluded, 0)
            results.append(Shares(parts, _pending(rest), late, alone))
        return results

    def _by_source(self, function: Callable[..., Tensor], *shares: Shares, at_once: int | None = None) -> Tensor:
        """Return ``[S, ...]``, the function applied to the shares of each source."""
        stacked = [t for s in shares for t in (s.parts, s.weights) if t is not None]

        def of_source(*tensors: Tensor) -> Tensor:
            slices = iter(tensors)
            return function(*(s.with_rest(next(slices), None if s.weights is None else next(slices)) for s in shares))

        return for_each(of_source, *stacked, at_once=at_once or self.at_once)

    def _features(self, value: int, x: Tensor) -> tuple[int, ...]:
        """Return the (negative) axis of the features of a value, as a tuple: the last, or if rows lie along it, the
        first axis along which no rows lie; () if there is none."""
        label = self.rows.labels.get(value, ())
        if not x.dim():
            return ()
        if len(label) != 1 or constant_along(label[0], -1):
            return (-1,)
        others = [a - x.dim() for a in range(x.dim()) if x.shape[a] > 1 and constant_along(label[0], a)]
        return tuple(others[:1])

    def _inner(self, products: Tensor, axes: tuple[int, ...]) -> Tensor:
        return products.sum(axes, keepdim=True) if axes else products

    def _equal(self, value: int, sizes: Tensor) -> Tensor:
        """Return ``[S, ...]``, the same weight for every source of a sample, 0 for padding."""
        label, real = self.rows.labels.get(value, ()), self.real.T.to(sizes)
        if label:
            weights = real[:, self.samples.of(value, sizes[0]).to(sizes.device)]
        elif sizes.dim() > 1 and sizes.shape[1] == real.shape[1]:
            weights = real.reshape(*real.shape, *[1] * (sizes.dim() - 2))
        else:
            weights = torch.ones_like(sizes)
        return weights / weights.sum(0)

    def _untraceable(self, unit: Unit) -> UnknownOperation:
        error = UnknownOperation(f"the shares of its tokens cannot be followed through its operation '{unit.name}'")
        error.call = unit.calls[-1]
        return error
