"""Find the attentions of a pass.

    rows = find_rows(tape, find_sources(tape, inputs))
    program = read_program(tape, rows.roots.values(), output)
    attentions = find_attentions(program, tape, rows)

An attention is a softmax, or an activation of scores q kᵀ, whose result, the attention map, weights other values in a
product. A *row* is a token, patch or pixel. Rows are numbered, and the *label* of a value holds the row number of each
element (:mod:`whyformer.tape.rows`). Names of classes and modules are not used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.tape.program import Program
from whyformer.tape.rows import Label, Rows, constant_along, first_places, occurrences, positions, slim
from whyformer.tape.tables import PRODUCTS, name_set
from whyformer.tape.trials import SOFTMAX_KINDS
from whyformer.tape.units import ACTIVATIONS, PRODUCT_KINDS, UNNORMALIZED, Unit, reduced_axes
from whyformer.tape.values import Tape

__all__ = ["Attention", "Piece", "depths", "find_attentions"]


# -- attentions ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """The part of an attention map that one value holds: all of it, or the maps of some heads, samples or queries.

    Attributes:
        map: number of the attention map A. All flows to the map arrive at this value.
        scores: number of the input of the softmax or activation.
        product: number of the product A·V.
        query, key, value: numbers of the factors of the scores and of A·V; None if unknown.
    """

    map: int
    scores: int
    product: int
    query: int | None = None
    key: int | None = None
    value: int | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention of Q query rows to K key rows.

    Attributes:
        pieces: one, or several if heads, samples or queries are computed separately.
        queries, keys: ``[B, Q]`` and ``[B, K]`` row numbers; None if unknown.
        depth: the largest number of attentions on a path to its product, including this attention.
        is_learned: True if the queries are learned vectors, as in attention pooling.
        heads: number of heads; 0 if unknown.
    """

    pieces: tuple[Piece, ...]
    queries: Tensor | None
    keys: Tensor | None
    depth: int
    is_learned: bool = False
    heads: int = 0
    _places: tuple[_Places, ...] = field(default=(), repr=False)

    @property
    def map(self) -> int:
        """Number of the map of the first piece."""
        return self.pieces[0].map

    @property
    def maps(self) -> tuple[int, ...]:
        """Numbers of the maps of all pieces."""
        return tuple(p.map for p in self.pieces)

    @property
    def scores(self) -> int:
        """Number of the input of the softmax or activation of the first piece."""
        return self.pieces[0].scores

    @property
    def product(self) -> int:
        """Number of the product A·V of the first piece."""
        return self.pieces[0].product

    @property
    def is_self(self) -> bool:
        """True if queries and keys are the same rows."""
        return self.queries is not None and self.queries is self.keys

    def arrange(self, *parts: Tensor | None) -> Tensor:
        """Return tensors laid out like the maps of the pieces (maps, scores, or flows to maps) as ``[B, H, Q, K]``.

        Args:
            parts: one for each piece; None for zeros. Pairs of rows that do not attend to each other, as in windowed
                attention, get zeros.

        Raises:
            ModelError: the rows of the attention are unknown.
        """
        if self.queries is None or self.keys is None:
            raise ModelError(f"the query and key rows of the attention map in value {self.map} are unknown")
        (b, q), k, heads, places = self.queries.shape, self.keys.shape[1], self.heads, self._places
        like = next(p for p in parts if p is not None)
        pairs = zip(parts, places, strict=True)
        flat = [None if t is None else t.permute(p.axes).reshape(len(p.row), -1) for t, p in pairs]
        if flat[0] is not None and len(flat) == 1 and places[0].plain:
            return flat[0].view(b, heads, q, k)
        out = like.new_zeros(b * heads * q + 1, k + 1)  # the last row and column collect padding
        for part, place in zip(flat, places, strict=True):
            row = place.row.to(out.device)
            if part is not None and place.key is None:
                out[row, :k] = part
            elif part is not None and place.key is not None:
                key = place.key.repeat_interleave(len(row) // len(place.key), 0)
                out[row[:, None], key.to(out.device)] = part
        return out[:-1, :-1].view(b, heads, q, k)


@dataclass(frozen=True, eq=False)
class _Places:
    """The positions of the entries of a map in ``[B·H·Q, K]``.

    Attributes:
        axes: axes of the map: L leading ones (samples, heads), then those of queries, then those of keys.
        row: ``[L·Q]``, position of each row of the map.
        key: ``[L, K]``, position of each key, or ``[L·Q, K]`` if a map holds several samples side by side; None if the
            keys are in order.
        plain: True if the rows are in order too.
    """

    axes: tuple[int, ...]
    row: Tensor
    key: Tensor | None
    plain: bool


@dataclass(frozen=True, eq=False)
class _Labelled:
    """A piece with the row numbers of its queries and keys, both in the shape of its map."""

    piece: Piece
    queries: Tensor | None
    keys: Tensor | None
    is_learned: bool = False


def find_attentions(program: Program, tape: Tape, rows: Rows) -> list[Attention]:
    """Return the attentions between roots and output, in the order of execution.

    Softmaxes over other axes than rows, such as a choice of experts, are not attentions.
    """
    key = "attentions", program.roots, program.output
    return list(rows.once(key, lambda: _find_attentions(program, tape, rows)))


def _find_attentions(program: Program, tape: Tape, rows: Rows) -> list[Attention]:
    pieces = list(_MapSearch(program, tape, rows).pieces())
    depth = depths(tape, {p.piece.product for p in pieces})
    groups: dict[Any, list[_Labelled]] = defaultdict(list)
    for p in pieces:
        sides = [rows.linked(int(rows.family[rows.distinct(t)[-1]])) for t in (p.queries, p.keys) if t is not None]
        groups[depth[p.piece.product], *(sides or [-p.piece.map])].append(p)
    streams: dict[tuple[int, ...], Tensor] = {}
    return [_attention(group, key[0], rows, streams) for key, group in groups.items()]


def _attention(group: list[_Labelled], depth: int, rows: Rows, streams: dict[tuple[int, ...], Tensor]) -> Attention:
    unknown = Attention(tuple(p.piece for p in group), None, None, depth, group[0].is_learned)
    if group[0].queries is None:
        return unknown
    queries, keys = (_distinct_rows([getattr(p, side) for p in group], rows, streams) for side in ("queries", "keys"))
    if queries is None or keys is None:
        return unknown
    heads, places = _find_places(group, queries, keys, rows)
    if not _is_full(heads * queries.numel(), places):
        return unknown
    return replace(unknown, queries=queries, keys=keys, heads=heads, _places=places)


def _is_full(count: int, places: Iterable[_Places]) -> bool:
    """Return True if each query of each head has an entry."""
    filled = torch.zeros(count + 1, dtype=torch.bool)
    for p in places:
        filled[p.row] = True
    return bool(filled[:-1].all())


def _distinct_rows(labels: list[Tensor], rows: Rows, streams: dict[tuple[int, ...], Tensor]) -> Tensor | None:
    """Return ``[B, N]``, the distinct rows of some labels in the order of their first occurrence; None if the samples
    have different numbers of rows."""
    numbers = torch.cat([slim(t).flatten() for t in labels])
    distinct, inverse = numbers[numbers > 0].unique(return_inverse=True)
    key = tuple(distinct.tolist())
    if key not in streams:
        distinct = distinct[first_places(inverse, len(distinct)).argsort()]
        samples = rows.sample[distinct]
        counts = samples.bincount()
        if not bool((counts == counts[0]).all()):
            return None
        streams[key] = distinct[samples.argsort(stable=True)].view(len(counts), -1)
    return streams[key]


_FILLS = name_set("masked_fill masked_scatter where nan_to_num tril triu fill index_put index_copy")
"""Calls of kind "view" that replace elements."""

_GATES = ("gate", "activated gate")  # kinds of elementwise products
_MAY_KEEP_MAPS = ("add", "weighted sum", "layer", "norm", "quotient")  # kinds whose result may have other rows


@dataclass(frozen=True)
class _Map:
    """The attention map that a value holds.

    Attributes:
        unit: the softmax or activation that computes it.
        origin: number of the map before calls that only rearrange it.
    """

    unit: Unit
    origin: int


class _MapSearch:
    """Follows each attention map A, ``[B, H, Q, K]``, through views, scales and masks to the values V that it weights.

    A unit computes A·V if it is the product of A and V ``[B, H, K, D]``, or the sum over the keys of the elementwise
    product A ⊙ V, ``[B, H, Q, K, D]``.

    Attributes:
        maps: maps a value to the attention map that it holds.
        weighted: maps a value that holds A ⊙ V to (A, number of V).
    """

    def __init__(self, program: Program, tape: Tape, rows: Rows) -> None:
        self.program, self.tape, self.rows = program, tape, rows
        self.maps = dict[int, _Map]()
        for call in (tape.maker[n] for n in program.roots if len(rows.labels.get(n, ())) == 2):  # constant maps
            unit = Unit("softmax", call.name, call.operands[:1], call.results, (call.number,))
            self.maps[unit.exit] = _Map(unit, unit.exit)
        self.weighted: dict[int, tuple[_Map, int]] = {}

    def pieces(self) -> Iterator[_Labelled]:
        """Yield a piece for each map that weights values, at the first product with values."""
        finished = set[int]()
        activations = self.activations()
        for unit in self.program.units:
            if unit.kind in SOFTMAX_KINDS or unit.exit in activations:
                self.maps[unit.exit] = _Map(unit, unit.exit)
                continue
            entry = next((e for e in unit.entries if e in self.maps or e in self.weighted), None)
            if entry is None:
                continue
            weighting = self.weighting(unit, entry)
            if weighting is None:
                self.follow(unit, entry)
                continue
            a, v = weighting
            piece = self.piece(a, entry, unit.exit, v) if a.origin not in finished else None
            if piece is not None:
                finished.add(a.origin)
                yield piece

    def activations(self) -> set[int]:
        """Return the exits of the activations that compute attention maps without softmax; none if the model divides by
        the sum of a map later, so that a value is not the map."""
        makers, found = self.program.makers, set[int]()
        if any(u.kind == UNNORMALIZED for u in self.program.units):
            return found
        for map_ in (u.entries[0] for u in self.program.units if u.kind == "activated product"):
            while makers[map_].kind not in ACTIVATIONS:
                map_ = makers[map_].entries[0]
            found.add(map_)
        return found

    def weighting(self, unit: Unit, entry: int) -> tuple[_Map, int] | None:
        """Return (A, number of V) if a unit computes A·V from an entry that holds A or A ⊙ V; otherwise None."""
        if unit.name == "sum" and entry in self.weighted:
            return self.weighted[entry]
        v = self.factor(unit, entry)
        if v is None or entry not in self.maps:
            return None
        a, shapes = self.maps[entry], self.tape.shapes
        has_one_key = shapes[a.unit.exit][a.unit.axes[0]] == 1
        # the sum over a single key is the elementwise product, which is larger than A, unlike a gate for each head
        multiplies = unit.kind in _GATES and has_one_key and shapes[unit.exit].numel() > shapes[entry].numel()
        return (a, v) if multiplies or unit.kind in PRODUCT_KINDS or a.origin in self.program.roots else None

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
        a, v = self.weighted[entry] if entry in self.weighted else (self.maps[entry], self.factor(unit, entry))
        same_size = self.tape.shapes[unit.exit].numel() == self.tape.shapes[entry].numel()
        rearranges = unit.kind == "view" and unit.name not in _FILLS and same_size
        if unit.kind in _GATES and v is not None:
            self.weighted[unit.exit] = a, v
            if self.is_map(unit.exit, a):  # a gate for each head
                self.maps[unit.exit] = _Map(a.unit, unit.exit)
            return
        if entry in self.weighted and rearranges:
            self.weighted.update(dict.fromkeys(unit.exits, self.weighted[entry]))
        if entry in self.maps:
            for r in unit.exits:
                keeps = unit.kind in _MAY_KEEP_MAPS and self.is_map(r, a)
                if keeps or unit.kind in ("view", "scale", "shift"):
                    self.maps[r] = _Map(a.unit, a.origin if rearranges and len(unit.exits) == 1 else r)

    def is_map(self, value: int, a: _Map) -> bool:
        """Return True if a value still has query rows and key rows, as a sum of maps or a mixture of heads has."""
        return len(self.rows.labels.get(value, ())) == len(self.rows.labels.get(a.origin, ())) == 2

    def piece(self, a: _Map, entry: int, product: int, v: int) -> _Labelled | None:
        """Return a piece with its rows; None if its map is not of rows.

        Args:
            a: the map A.
            entry: number of A, or of A ⊙ V before the sum over the keys.
            product: number of A·V.
            v: number of V.
        """
        labels, (scores, *_) = self.rows.labels, a.unit.entries
        piece = Piece(a.origin, scores, product, value=v)
        label, at_map = labels.get(a.unit.exit, ()), labels.get(a.origin, ())
        axis = self.key_axis(a, entry, product)
        if axis is None or not label or len(at_map) != len(label):
            return _Labelled(piece, None, None)
        has_one_key = self.tape.shapes[a.unit.exit][axis] == 1
        sides = [len(label) - 1] if has_one_key else [i for i, t in enumerate(label) if _changes(t, axis)]
        if len(sides) != 1:
            return None
        (side,) = sides  # of the keys, among the labels of the map; the queries are at 1 - side
        by_diagonals = not all(constant_along(t, axis) for i, t in enumerate(label) if i != side)
        if by_diagonals or _repeats(label, side, axis):  # a key that occurs twice has no unique position in a map
            return _Labelled(piece, None, None)
        keys, factors = at_map[side], self.factors(scores)
        if len(factors) == 2:
            piece = replace(piece, query=factors[1 - side], key=factors[side])
        if len(label) == 2:
            return _Labelled(piece, at_map[1 - side], keys)
        if has_one_key:  # a learned query gets the number of the only key too, but it is no factor that carries
            return _Labelled(piece, *((keys, keys) if len(factors) == 2 else (None, None)))
        queries = _learned_queries(a.origin, axis, entry, product, self.rows)
        return _Labelled(piece, queries, None if queries is None else keys, True)

    def key_axis(self, a: _Map, entry: int, product: int) -> int | None:
        """Return the axis of A, as its unit computes it, along which the keys lie, those rows over which A·V sums:
        usually, but not always, the axis of its softmax. None if it is unknown."""
        call, labels = self.tape.maker[product], self.rows.labels
        axes = reduced_axes(call, self.tape) if call.name == "sum" else ()
        if call.name in PRODUCTS and entry in call.operands[-2:]:
            axes = (-1 if entry == call.operands[-2] else -2,)
        sides = [i for i, t in enumerate(labels.get(entry, ())) if any(_changes(t, axis) for axis in axes)]
        label, normalized = labels.get(a.unit.exit, ()), a.unit.axes[0] if a.unit.kind in SOFTMAX_KINDS else None
        if len(label) < 2 or len(sides) != 1:
            return normalized
        keys, queries = label[sides[0]], label[1 - sides[0]]
        found = [i - keys.dim() for i in range(keys.dim()) if _changes(keys, i) and constant_along(queries, i)]
        return normalized if normalized in found else found[0] if len(found) == 1 else None

    def factors(self, scores: int) -> tuple[int, ...]:
        """Return the two factors of scores, in the order of their labels; () if unknown."""
        n, makers = scores, self.program.makers
        while n in makers:
            unit = makers[n]
            if unit.kind in (*PRODUCT_KINDS, "gate"):
                return unit.entries[:2]
            if unit.kind not in ("view", "scale", "shift", "add", "clip", "activation", "weighted sum", "layer"):
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
    """Return True if a row occurs twice along the axis of keys. An attention sink has the number of the query row
    and is ignored."""
    numbers = slim(label[keys])
    if len(label) == 2:
        numbers = numbers.masked_fill(numbers == slim(label[1 - keys]), 0)
    numbers = numbers.sort(axis).values
    return bool(((numbers.diff(dim=axis) == 0) & (numbers.narrow(axis, 1, numbers.shape[axis] - 1) > 0)).any())


def _learned_queries(map_: int, axis: int, entry: int, product: int, rows: Rows) -> Tensor | None:
    """Return the rows of learned queries, which the product A·V creates, in the shape of a map; None if unknown.

    Args:
        map_: number of the map.
        axis: its axis of keys.
        entry: number of A, or of A ⊙ V before the sum over the keys.
        product: number of A·V.
        rows: the rows of the pass.
    """
    if not rows.labels.get(product) or not rows.labels.get(entry):
        return None
    at_map, key, query = rows.labels[map_][0], rows.labels[entry][0], rows.labels[product][0].narrow(-1, 0, 1)
    single = [*at_map.shape]
    single[axis] = 1  # all keys belong to one query row
    aligned = query.shape[:-1] == key.shape[:-1]
    if key.numel() != at_map.numel():  # A ⊙ V has the width of V
        key, aligned = key.narrow(-1, 0, 1), [n for n in query.shape if n > 1] == [n for n in single if n > 1]
    if not aligned or key.numel() != at_map.numel() or not torch.equal(key.reshape(at_map.shape), at_map):
        return None  # the map was rearranged before the product
    return query.reshape(single).expand(at_map.shape)


def depths(tape: Tape, products: Container[int]) -> list[int]:
    """Return, for each value, the largest number of ``products`` on a path to it, including the value itself."""
    depth = [0] * len(tape)
    for call in tape.calls:
        current = max((depth[o] for o in call.operands), default=0) + any(r in products for r in call.results)
        for r in call.results:
            depth[r] = current
    return depth


# -- layout of maps --------------------------------------------------------------------------------------------------
def _find_places(group: list[_Labelled], queries: Tensor, keys: Tensor, rows: Rows) -> tuple[int, tuple[_Places, ...]]:
    """Return the number of heads, and the positions of the entries of each map in ``[B, H, Q, K]``. Entries with the
    same query and key belong to different heads, in the order of their occurrence."""
    (b, q), k = queries.shape, keys.shape[1]
    place_of_query, place_of_key = positions(queries, len(rows)), positions(keys, len(rows))
    count = torch.zeros(b * (q + 1) * (k + 1), dtype=torch.long)
    entries = []
    for p in group:
        assert p.queries is not None
        assert p.keys is not None
        axes, query_rows, key_rows = _flattened(p.queries, p.keys)
        sample, column = rows.sample[query_rows], place_of_key[key_rows]
        query = (sample * (q + 1) + place_of_query[query_rows]).flatten()
        pair = query * (k + 1) + column[:, :1].expand(query_rows.shape).flatten()
        real = (place_of_query[query_rows] < q) & (column < k).any(1, keepdim=True)
        head = torch.where(real.flatten(), occurrences(pair) + count[pair], 0)
        count += pair.bincount(minlength=len(count))
        if column.shape[1] > k:  # the keys of several samples side by side
            same = rows.sample[key_rows][:, None] == sample[..., None]
            column = torch.where(same, column[:, None], k).flatten(0, 1)
        entries.append((axes, query, head, column))
    heads = max(int(head.max()) for *_, head, _ in entries) + 1
    places = []
    for axes, query, head, column in entries:
        row = (query // (q + 1) * heads + head) * q + query % (q + 1)
        row = torch.where(query % (q + 1) == q, b * heads * q, row)
        ordered = column.shape[1] == k and bool((column == torch.arange(k)).all())
        plain = ordered and len(row) == b * heads * q and bool((row == torch.arange(len(row))).all())
        places.append(_Places(axes, row, None if ordered else column, plain))
    return heads, tuple(places)


def _flattened(queries: Tensor, keys: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Return (axes of a map, see :class:`_Places`; ``[L, Q]`` rows of its queries; ``[L, K]`` rows of its keys)."""
    dims = range(queries.dim())
    moves = [(not constant_along(queries, a), not constant_along(keys, a)) for a in dims]
    rows, columns = ([a for a in dims if moves[a] == side] for side in ((True, False), (False, True)))
    lead = [a for a in dims if a not in (*rows, *columns)]
    axes, size = (*lead, *rows, *columns), math.prod(queries.shape[a] for a in lead)
    query_rows, key_rows = _narrowed(queries, columns), _narrowed(keys, rows)
    return axes, query_rows.permute(axes).reshape(size, -1), key_rows.permute(axes).reshape(size, -1)


def _narrowed(label: Tensor, axes: Iterable[int]) -> Tensor:
    for axis in axes:
        label = label.narrow(axis, 0, 1)
    return label
