"""Rules that hand forward what each of several sources has of a value: x = Σ_j x_←j + rest (Modarressi et al.: DecompX,
ACL 2023).

    rules = ShareRules(tape, rows, real, at_once=16)
    found = walk_forward(program, {entry: rules.begin(entry, queries)}, [program.output], rules, DROPPED)

What is linear acts on each share. What is not acts through what it did to the whole: a norm by its true deviation, an
activation by its slope from zero, attention by its true map. A bias belongs to no share; it is shared out behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.rules.multipliers import norm_operand, normalise
from whyformer.tape.declared import HIDDEN_LAYER
from whyformer.tape.rows import Rows, RowSamples, constant_along
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import for_each, repeat_unit

__all__ = ["DROPPED", "ShareRules", "Shares"]

DROPPED = frozenset(("softmax", "log softmax", "statistic", "silent"))
"""Kinds of units that are held constant: maps of attention, deviations of norms, and what is flat."""

_AFFINE = frozenset(("view", "shift", "scale", "add", "layer", "weighted sum", HIDDEN_LAYER))
_BILINEAR = frozenset(("product", "gate", "activated gate"))
_SLOPED = frozenset(("activation", "rectifier", "power", "clip"))

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True, eq=False)
class Shares:
    """What each of S sources has of a value.

    Attributes:
        parts: ``[S, ...]``, the share of each, without the rest.
        rest: what no source has; None if that is zero.
        is_late: True if the rest is that of an attention, which is shared out behind the sum that it enters.
        is_alone: True if each row is still one source's.
        weights: ``[S, ...]``, how much of the rest each source gets; None if it is not shared out.
        shared: of a view of a value with a rest, what returns the parts after the rest was shared out there.
    """

    parts: Tensor
    rest: Tensor | None = None
    is_late: bool = False
    is_alone: bool = False
    weights: Tensor | None = None
    shared: Callable[[], Tensor] | None = None

    @property
    def left(self) -> Tensor | None:
        """The rest, if it is not shared out."""
        return self.rest if self.weights is None else None

    def whole(self, chunk: slice = slice(None)) -> Tensor:
        """Return the parts of some sources, with what they get of the rest, ``[S, ...]``."""
        if self.weights is None or self.rest is None:
            return self.parts[chunk]
        return torch.addcmul(self.parts[chunk], self.weights[chunk], self.rest)


def _only_entry(unit: Unit) -> int | None:
    """Return the entry whose shares go through a unit if others are constant: what is divided, or sampled."""
    if unit.kind in ("quotient", "sampling"):
        return unit.entries[0]
    return unit.entries[unit.places.index(0)] if unit.name == "div" and unit.kind in _BILINEAR else None


class ShareRules:
    """The rules, for one pass.

    Args:
        tape: the pass.
        rows: which row each element of a value belongs to.
        real: ``[B, S]`` which sources of each sample are no padding.
        at_once: sources whose shares go through an operation together.

    Raises:
        UnknownOperation: shares cannot be followed through a unit.
    """

    def __init__(self, tape: Tape, rows: Rows, real: Tensor, at_once: int) -> None:
        self.tape, self.rows, self.real, self.at_once = tape, rows, real, at_once
        self.samples = RowSamples(rows)

    def begin(self, value: int, queries: Tensor) -> Shares:
        """Return x_i←j = x_i where row i is row j of its sample, else 0.

        Args:
            value: number of a value that is no map.
            queries: ``[B, S]`` the rows that are sources. What belongs to none of them is the rest.
        """
        x, label = self.tape[value], self.rows.of(value)
        source = torch.full((len(self.rows),), -1)
        source[queries.cpu()] = torch.arange(queries.shape[1])
        index = source[label].to(x.device)
        each = torch.arange(queries.shape[1], device=x.device).reshape(-1, *[1] * x.dim())
        rest = torch.where(index < 0, x, 0)
        return Shares(torch.where(index == each, x, 0), rest if bool(rest.any()) else None, is_alone=True)

    def __call__(self, unit: Unit, given: dict[int, Shares]) -> dict[int, Shares]:
        """Return the shares of a unit's exits, from those of its entries."""
        branches = [i for i, e in enumerate(unit.entries) if e in given]
        alone = _only_entry(unit)
        if alone is not None:
            if alone not in given:
                raise self._lost(unit)
            made = self._affine(unit, {alone: given[alone]})
        elif unit.kind in _BILINEAR:
            made = self._halves(unit, given) if len(branches) > 1 else self._mixed(unit, given)
        elif unit.kind in _AFFINE:
            made = self._affine(unit, given)
        elif unit.kind == "norm" and len(given) == 1 and 0 in branches:
            made = self._normed(unit, given)
        elif unit.kind in _SLOPED and len(given) == 1:
            made = self._sloped(unit, given)
        else:
            raise self._lost(unit)
        return dict(zip(unit.exits, made, strict=True))

    def settled(self, value: int, shares: Shares) -> Shares:
        """Share out the rest by |⟨x_←j, rest⟩| over the features; equally where that is zero for all j."""
        rest = shares.left
        if rest is None:
            return shares
        if shares.shared is not None:
            return Shares(shares.shared(), is_alone=shares.is_alone)
        axes = self._features(value, rest)
        sizes = torch.cat([self._inner(p * rest, axes).abs() for p in shares.parts.split(self.at_once)])
        total = sizes.sum(0)
        equal = self._equal(value, sizes)
        weights = torch.where(total > 0, sizes / torch.where(total > 0, total, 1), equal)
        return replace(shares, weights=weights, is_late=False)

    def total(self, value: int, shares: Shares, flow: Tensor, batch: int) -> Tensor:
        """Return ``[S, B]``, the sum of each share of an output of B samples times what a target takes of it."""
        each = (-1, batch, flow.numel() // batch)
        return self._each(lambda part: (part * flow).reshape(each[1:]).sum(-1), self.settled(value, shares))

    # -- by kind of unit
    def _affine(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """f(x_←j …) − f(0), and f(0) as a rest. A rest is handed on by a view, by a scale, as if it were part of the
        layer before it, and by what is behind an attention."""
        entries = [e for e in dict.fromkeys(unit.entries) if e in given]
        shares = [given[e] for e in entries]
        whole = [partial(self.settled, e, s) for e, s in zip(entries, shares, strict=True)]
        is_view, keeps = unit.kind == "view", unit.kind in ("view", "scale")
        shares = [s if s.is_late or keeps else settle() for s, settle in zip(shares, whole, strict=True)]
        function = lambda *x: repeat_unit(self.tape, unit, dict(zip(entries, x, strict=True)))  # noqa: E731
        if unit.kind == "layer" and self._is_of_rows(unit):
            return self._layer(unit, shares[0])
        made = self._linear(function, entries, shares, at_once=len(shares[0].parts) if is_view else self.at_once)
        if not is_view or all(s.left is None for s in shares) or self._fills(function, entries):
            return made

        def shared(k: int) -> Tensor:
            return self._each(lambda *x: function(*x)[k], *(settle() for settle in whole))

        return [replace(one, shared=partial(shared, k)) for k, one in enumerate(made)]

    def _is_of_rows(self, unit: Unit) -> bool:
        """Return True if a layer is a product of a matrix, each row of which it takes by itself, with weights."""
        call = self.tape.calls[unit.calls[0]]
        place, added = {"mm": (0, []), "addmm": (1, call.operands[:1])}.get(call.name, (-1, []))
        return unit.places == (place,) and not call.kwargs and all(len(self.tape.shapes[o]) == 1 for o in added)

    def _layer(self, unit: Unit, shares: Shares) -> list[Shares]:
        """The same of the rows of all shares, one below the other, which is faster than share by share."""
        call, (entry,) = self.tape.calls[unit.calls[0]], unit.entries
        (origin,) = repeat_unit(self.tape, unit, {entry: torch.zeros_like(self.tape[entry])})
        rest = origin if shares.left is None else repeat_unit(self.tape, unit, {entry: shares.left})[0]
        weight, count = self.tape[call.operands[-1]], len(shares.parts)
        parts = origin.new_empty(count, *origin.shape)
        for i in range(0, count, self.at_once):
            chunk = slice(i, i + self.at_once)
            torch.matmul(shares.whole(chunk), weight, out=parts[chunk])
        return [Shares(parts, rest if bool(rest.any()) else None, shares.is_late, shares.is_alone)]

    def _mixed(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """A x_←j with a map A that is held constant."""
        ((entry, shares),) = given.items()
        if unit.kind != "product":
            return self._affine(unit, given)
        shares = self.settled(entry, shares) if shares.is_alone else shares
        made = self._linear(lambda x: repeat_unit(self.tape, unit, {entry: x}), [entry], [shares])
        return [replace(one, is_late=True, is_alone=False) for one in made]

    def _halves(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """Half of a product of two that carry goes through each."""
        call, found = self.tape.calls[unit.calls[0]], list[list[Shares]]()
        for place, entry in zip(unit.places, unit.entries, strict=True):

            def function(x: Tensor, place: int = place) -> list[Tensor]:
                made = call([x if i == place else self.tape[o] for i, o in enumerate(call.operands)])
                return [made[call.results.index(r)] for r in unit.exits]

            found.append(self._linear(function, [entry], [self.settled(entry, given[entry])]))
        return [Shares(one.parts.add_(other.parts).div_(2), one.rest) for one, other in zip(*found, strict=True)]

    def _normed(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """(x_←j − its mean) ⊙ γ / σ with the σ of the whole; β is the rest."""
        tape, (entry,) = self.tape, given
        shares = self.settled(entry, given[entry])
        if not unit.places:  # written out: what it divides by is a value inside
            held = {n: tape[n] for n in unit.statistics}
            return self._linear(lambda x: repeat_unit(tape, unit, {entry: x, **held}), [entry], [shares])
        gain, shift = norm_operand(tape, unit, "weight"), norm_operand(tape, unit, "bias")

        def function(x: Tensor) -> Tensor:
            made = normalise(tape, unit, x).to(x.dtype)
            return made if gain is None else made * gain

        rest = None if shift is None or not bool(shift.any()) else shift.expand(tape.shapes[unit.exit])
        if shares.left is not None:
            rest = function(shares.left) if rest is None else function(shares.left) + rest
        return [Shares(self._each(function, shares), rest, shares.is_late, shares.is_alone)]

    def _sloped(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """x_←j ⊙ (g(z) − g(0)) / z at the whole z; g(0) is the rest."""
        (entry,) = given
        z, y = self.tape[entry], self.tape[unit.exit]
        (origin,) = repeat_unit(self.tape, unit, {entry: torch.zeros_like(z)})
        if y.shape != z.shape or not bool(origin.isfinite().all()):
            raise self._lost(unit)
        slope = torch.where(z != 0, (y - origin) / torch.where(z != 0, z, 1), 0)
        shares = self.settled(entry, given[entry])
        parts = self._each(lambda part: part * slope, shares)
        return [Shares(parts, origin if bool(origin.any()) else None, is_alone=shares.is_alone)]

    # -- helpers
    def _fills(self, function: Function, entries: Iterable[int]) -> bool:
        """Return True if a function of values gives other numbers than 0 where these are 0."""
        return any(bool(origin.any()) for origin in function(*(torch.zeros_like(self.tape[e]) for e in entries)))

    def _linear(
        self, function: Function, entries: Iterable[int], shares: list[Shares], at_once: int | None = None
    ) -> list[Shares]:
        """The linear part of f on each share; f of what no source has is the rest."""
        zeros = [torch.zeros_like(self.tape[e]) for e in entries]
        origins = rests = function(*zeros)
        if any(s.left is not None for s in shares):
            rests = function(*(z if s.left is None else s.left for s, z in zip(shares, zeros, strict=True)))
        late, alone, made = all(s.is_late for s in shares), all(s.is_alone for s in shares), list[Shares]()
        for k, (origin, rest) in enumerate(zip(origins, rests, strict=True)):
            shift = origin if bool(origin.any()) else None

            def linear(*x: Tensor, k: int = k, shift: Tensor | None = shift) -> Tensor:
                return function(*x)[k] if shift is None else function(*x)[k] - shift

            parts = self._each(linear, *shares, at_once=at_once)
            made.append(Shares(parts, rest if bool(rest.any()) else None, late, alone))
        return made

    def _each(self, function: Callable[..., Tensor], *shares: Shares, at_once: int | None = None) -> Tensor:
        """``[S, ...]`` a function of each share."""
        stacked, places = list[Tensor](), list[int]()
        for one in shares:
            places.append(len(stacked))
            stacked += [one.parts] if one.weights is None else [one.parts, one.weights]

        def of_one(*given: Tensor) -> Tensor:
            parts = []
            for i, one in zip(places, shares, strict=True):
                if one.weights is None or one.rest is None:
                    parts.append(given[i])
                else:
                    parts.append(torch.addcmul(given[i], given[i + 1], one.rest))
            return function(*parts)

        return for_each(of_one, *stacked, at_once=at_once or self.at_once)

    def _features(self, value: int, x: Tensor) -> tuple[int, ...]:
        """The axes of a value's features: the last, or where rows lie along that, the one along which none do."""
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
        """``[S, ...]`` the same weight for every source of a sample that is no padding."""
        label, real = self.rows.labels.get(value, ()), self.real.T.to(sizes)
        if label:
            weights = real[:, self.samples.of(value).to(sizes.device)]
        elif sizes.dim() > 1 and sizes.shape[1] == real.shape[1]:
            weights = real.reshape(*real.shape, *[1] * (sizes.dim() - 2))
        else:
            weights = torch.ones_like(sizes)
        return weights / weights.sum(0)

    def _lost(self, unit: Unit) -> UnknownOperation:
        error = UnknownOperation(f"the shares of its tokens cannot be followed through its operation '{unit.name}'")
        error.call = unit.calls[-1]
        return error
