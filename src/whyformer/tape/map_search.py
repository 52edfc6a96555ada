"""Find the attention maps of a pass and the products that they weight.

    for piece in find_pieces(program, tape, rows): ...

An attention map is the result of a softmax, or of an activation of scores q kᵀ, that weights other values in a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whyformer.tape.program import Program
from whyformer.tape.rearranging import rearranged
from whyformer.tape.rows import Label, Rows, constant_along, slim
from whyformer.tape.tables import COPIES, KINDS, PRODUCTS, name_set
from whyformer.tape.trials import SOFTMAX_KINDS
from whyformer.tape.units import ACTIVATIONS, PRODUCT_KINDS, UNNORMALIZED, Unit, reduced_axes
from whyformer.tape.values import Tape

__all__ = ["LabelledPiece", "Piece", "find_pieces"]

_FILLS = name_set("masked_fill masked_scatter where nan_to_num tril triu fill index_put index_copy")
"""Calls of kind "view" that replace elements."""

_GATES = ("gate", "activated gate")  # kinds of elementwise products
_MAY_KEEP_MAPS = ("add", "weighted sum", "layer", "norm", "quotient")  # kinds whose result may have other rows


@dataclass(frozen=True)
class Piece:
    """The part of an attention map that one value holds: all of it, or the maps of some heads, samples or queries.

    Attributes:
        map: number of the attention map A. All flows to the map arrive at this value.
        scores: number of the input of the softmax or activation.
        product: number of the product A·V.
        query, key, value: numbers of the factors of the scores and of A·V; None if unknown.
        path: numbers of the values from the result of the softmax or activation to the map.
    """

    map: int
    scores: int
    product: int
    query: int | None = None
    key: int | None = None
    value: int | None = None
    path: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class LabelledPiece:
    """A piece with the row numbers of its queries and keys, both in the shape of its map; None if they are unknown."""

    piece: Piece
    queries: Tensor | None = None
    keys: Tensor | None = None
    is_learned: bool = False


def find_pieces(program: Program, tape: Tape, rows: Rows) -> Iterator[LabelledPiece]:
    """Yield the attention maps between roots and output that weight values, in the order of execution.

    Softmaxes over other axes than rows, such as a choice of experts, are no attention maps.
    """
    return _MapSearch(program, tape, rows).pieces()


@dataclass(frozen=True)
class _Map:
    """The attention map that a value holds.

    Attributes:
        unit: the softmax or activation that computes it.
        path: the values from the exit of the unit to the value.
        origin: number of the map before calls that only rearrange it.
    """

    unit: Unit
    path: tuple[int, ...]
    origin: int

    def at(self, value: int, *, same: bool = False) -> _Map:
        """Return the map at a value that is computed from it, with the ``same`` origin or with this value as origin."""
        return _Map(self.unit, (*self.path, value), self.origin if same else value)


@dataclass(frozen=True)
class _Weighted:
    """Values V weighted by a map A: A·V, or A ⊙ V before the sum over the keys."""

    map: _Map
    values: int


class _MapSearch:
    """Follows each attention map A, ``[B, H, Q, K]``, through views, scales and masks to the values V that it weights.

    A unit computes A·V if it is the product of A and V ``[B, H, K, D]``, or the sum over the keys of the elementwise
    product A ⊙ V, ``[B, H, Q, K, D]``.

    Attributes:
        maps: maps a value to the attention map that it holds.
        weighted: maps a value that holds A ⊙ V to A and V.
    """

    def __init__(self, program: Program, tape: Tape, rows: Rows) -> None:
        self.program, self.tape, self.rows = program, tape, rows
        self.maps = dict[int, _Map]()
        for call in (tape.maker[n] for n in program.roots if len(rows.labels.get(n, ())) == 2):  # constant maps
            unit = Unit("softmax", call.name, call.operands[:1], call.results, (call.number,))
            self.maps[unit.exit] = _Map(unit, (unit.exit,), unit.exit)
        self.weighted = dict[int, _Weighted]()

    def pieces(self) -> Iterator[LabelledPiece]:
        """Yield a piece for each map that weights values, at the first product with values."""
        finished = set[int]()
        activations = self.activations()
        for unit in self.program.units:
            if unit.kind in SOFTMAX_KINDS or unit.exit in activations:
                self.maps[unit.exit] = _Map(unit, (unit.exit,), unit.exit)
                continue
            entry = next((e for e in unit.entries if e in self.maps or e in self.weighted), None)
            if entry is None:
                continue
            weighting = self.weighting(unit, entry)
            if weighting is None:
                self.follow(unit, entry)
                continue
            if weighting.map.origin in finished:
                continue
            piece = self.piece(weighting, entry, unit.exit)
            if piece is not None:
                finished.add(weighting.map.origin)
                yield piece

    def activations(self) -> set[int]:
        """Return the exits of the activations that compute attention maps without softmax; none if the model divides by
        the sum of a map later, so that a value is not the map."""
        makers, maps = self.program.makers, set[int]()
        if any(u.kind == UNNORMALIZED for u in self.program.units):
            return maps
        for map_ in (u.entries[0] for u in self.program.units if u.kind == "activated product"):
            while makers[map_].kind not in ACTIVATIONS:
                map_ = makers[map_].entries[0]
            maps.add(map_)
        return maps

    def weighting(self, unit: Unit, entry: int) -> _Weighted | None:
        """Return A and V if a unit computes A·V from an entry that holds A or A ⊙ V; otherwise None."""
        if unit.name == "sum" and entry in self.weighted:
            return self.weighted[entry]
        v = self.factor(unit, entry)
        if v is None or entry not in self.maps:
            return None
        a, shapes = self.maps[entry], self.tape.shapes
        has_one_key = shapes[a.unit.exit][a.unit.axes[0]] == 1
        # with one key, A·V is an elementwise product; its result is larger than A, unlike that of a gate for each head
        multiplies = unit.kind in _GATES and has_one_key and shapes[unit.exit].numel() > shapes[entry].numel()
        is_product = multiplies or unit.kind in PRODUCT_KINDS or a.origin in self.program.roots
        return _Weighted(a, v) if is_product else None

    def factor(self, unit: Unit, entry: int) -> int | None:
        """Return the other factor of a product with an entry that holds a map, which may be a constant if the map is a
        root; None if there is none."""
        others = [e for e in unit.entries if e not in self.maps and e not in self.weighted]
        is_root = entry in self.maps and self.maps[entry].origin in self.program.roots
        if is_root and not others and len(self.rows.labels.get(unit.exit, ())) == 1:
            others = [o for o in self.tape.calls[unit.calls[0]].operands if o != entry]
        return others[0] if others else None

    def follow(self, unit: Unit, entry: int) -> None:
        """Note which exits of a unit hold the map, or the product A ⊙ V, of an entry."""
        weighted = self.weighted.get(entry)
        a, v = (weighted.map, weighted.values) if weighted else (self.maps[entry], self.factor(unit, entry))
        same_size = self.tape.shapes[unit.exit].numel() == self.tape.shapes[entry].numel()
        rearranges = unit.kind == "view" and unit.name not in _FILLS and same_size
        if unit.kind in _GATES and v is not None:
            self.weighted[unit.exit] = _Weighted(a.at(unit.exit, same=True), v)
            if self.is_map(unit.exit, a):  # a gate for each head
                self.maps[unit.exit] = a.at(unit.exit)
            return
        if weighted and rearranges:
            self.weighted.update((r, _Weighted(a.at(r, same=True), weighted.values)) for r in unit.exits)
        if entry in self.maps:
            for r in unit.exits:
                keeps = unit.kind in _MAY_KEEP_MAPS and self.is_map(r, a)
                if keeps or unit.kind in ("view", "scale", "shift"):
                    self.maps[r] = a.at(r, same=rearranges and len(unit.exits) == 1)

    def is_map(self, value: int, a: _Map) -> bool:
        """Return True if a value still has query rows and key rows, as a sum of maps or a mixture of heads has."""
        return len(self.rows.labels.get(value, ())) == len(self.rows.labels.get(a.origin, ())) == 2

    def piece(self, weighting: _Weighted, entry: int, product: int) -> LabelledPiece | None:
        """Return a piece with its rows; None unless exactly one label of the map changes along the axis of keys.

        Args:
            weighting: the map A and the values V.
            entry: number of A, or of A ⊙ V before the sum over the keys.
            product: number of A·V.
        """
        a, labels = weighting.map, self.rows.labels
        scores = a.unit.entries[0]
        piece = Piece(a.origin, scores, product, value=weighting.values, path=a.path[: a.path.index(a.origin) + 1])
        label, at_map = labels.get(a.unit.exit, ()), labels.get(a.origin, ())
        axis = self.key_axis(a, entry, product)
        if axis is None or not label or len(at_map) != len(label):
            return LabelledPiece(piece)
        has_one_key = self.tape.shapes[a.unit.exit][axis] == 1
        sides = [len(label) - 1] if has_one_key else [i for i, t in enumerate(label) if _changes(t, axis)]
        if len(sides) != 1:
            return None
        (side,) = sides  # of the keys, among the labels of the map; the queries are at 1 - side
        by_diagonals = not all(constant_along(t, axis) for i, t in enumerate(label) if i != side)
        if by_diagonals or _repeats(label, side, axis):  # a key that occurs twice has no unique position in a map
            return LabelledPiece(piece)
        keys, factors = at_map[side], self.factors(scores)
        if len(factors) == 2:
            piece = replace(piece, query=factors[1 - side], key=factors[side])
        if len(label) == 2:
            return LabelledPiece(piece, at_map[1 - side], keys)
        if has_one_key:  # a learned query is labelled with the only key too, but is not among the factors
            return LabelledPiece(piece, keys, keys) if len(factors) == 2 else LabelledPiece(piece)
        queries = self.learned_queries(a, entry, product)
        return LabelledPiece(piece, queries, None if queries is None else keys, is_learned=True)

    def key_axis(self, a: _Map, entry: int, product: int) -> int | None:
        """Return the axis of the keys, over which A·V sums, in A as its unit computes it: usually, but not always, the
        axis of its softmax. None if it is unknown."""
        labels, axes = self.rows.labels, self.summed_axes(entry, product)
        sides = [i for i, t in enumerate(labels.get(entry, ())) if any(_changes(t, axis) for axis in axes)]
        label, normalized = labels.get(a.unit.exit, ()), a.unit.axes[0] if a.unit.kind in SOFTMAX_KINDS else None
        if len(label) < 2 or len(sides) != 1:
            return normalized
        keys, queries = label[sides[0]], label[1 - sides[0]]
        candidates = [i - keys.dim() for i in range(keys.dim()) if _changes(keys, i) and constant_along(queries, i)]
        return normalized if normalized in candidates else candidates[0] if len(candidates) == 1 else None

    def summed_axes(self, entry: int, product: int) -> tuple[int, ...]:
        """Return the (negative) axes of A, or of A ⊙ V, over which A·V sums; () if unknown."""
        call = self.tape.maker[product]
        if call.name in PRODUCTS and entry in call.operands[-2:]:
            return (-1 if entry == call.operands[-2] else -2,)
        return reduced_axes(call, self.tape) if call.name == "sum" else ()

    def learned_queries(self, a: _Map, entry: int, product: int) -> Tensor | None:
        """Return the rows of learned queries, which the product A·V creates, in the shape of the map; None if unknown.

        Args:
            a: the map A.
            entry: number of A, or of A ⊙ V before the sum over the keys.
            product: number of A·V.
        """
        axes, index = self.summed_axes(entry, product), self.positions_of(a)
        label = self.rows.labels.get(product)
        if label is None or len(label) != 1 or not axes or index is None:
            return None
        (queries,) = label
        if self.tape.maker[product].name != "sum":
            queries = queries.narrow(axes[0], 0, 1)
        elif queries.dim() < index.dim():
            for axis in axes:
                queries = queries.unsqueeze(axis + index.dim())
        fits = queries.dim() == index.dim()
        if not fits or any(n not in (1, size) for n, size in zip(queries.shape, index.shape, strict=True)):
            return None
        shape = self.tape.shapes[a.origin]
        rows = queries.new_zeros(shape.numel())
        rows[index.flatten()] = queries.expand(index.shape).flatten()
        return rows.view(shape)

    def positions_of(self, a: _Map) -> Tensor | None:
        """Return the position in A of each element of a rearranged A, or of A ⊙ V; None if unknown."""
        shapes = self.tape.shapes
        index = torch.arange(shapes[a.origin].numel()).view(shapes[a.origin])
        for call in (self.tape.maker[n] for n in a.path[a.path.index(a.origin) + 1 :]):
            if KINDS.get(call.name) != "view":  # A ⊙ V
                index = index.expand(shapes[call.results[0]])
            elif len(call.operands) > 1:  # a selection by indices
                return None
            elif call.name not in COPIES:
                (index,) = rearranged(call, [index])
        return index

    def factors(self, scores: int) -> tuple[int, ...]:
        """Return the two factors of scores, in the order of their labels; () if unknown."""
        n, makers = scores, self.program.makers
        while n in makers:
            unit = makers[n]
            if unit.kind in (*PRODUCT_KINDS, "gate"):
                return unit.entries[:2]
            if unit.kind not in (*ACTIVATIONS, "view", "scale", "shift", "add", "weighted sum", "layer"):
                break
            before = next((e for e in unit.entries if len(self.rows.labels.get(e, ())) == 2), unit.entries[0])
            if unit.kind == "layer" and self.tape.shapes[n].numel() < self.tape.shapes[before].numel():
                break  # the product of keys with learned queries
            n = before
        return ()


def _changes(label: Tensor, axis: int) -> bool:
    """Return True if row numbers change along an axis; 0, which is no row, is ignored."""
    if constant_along(label, axis):
        return False
    label = slim(label)
    least = label.masked_fill(label == 0, int(label.max())).amin(axis)
    return bool((label.amax(axis) > least).any())


def _repeats(label: Label, keys: int, axis: int) -> bool:
    """Return True if a row occurs twice along the axis of keys. An attention sink has the number of the query row and
    is ignored."""
    numbers = slim(label[keys])
    if len(label) == 2:
        numbers = numbers.masked_fill(numbers == slim(label[1 - keys]), 0)
    numbers = numbers.sort(axis).values
    return bool(((numbers.diff(dim=axis) == 0) & (numbers.narrow(axis, 1, numbers.shape[axis] - 1) > 0)).any())
