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
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.tape.map_search import LabelledPiece, Piece, find_pieces
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows, constant_along, first_places, occurrences, positions, slim
from whyformer.tape.values import Tape

__all__ = ["Attention", "depths", "find_attentions"]


# -- attentions ------------------------------------------------------------------------------------------------------
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
    def products(self) -> tuple[int, ...]:
        """Numbers of the products A·V of all pieces."""
        return tuple(p.product for p in self.pieces)

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


def find_attentions(program: Program, tape: Tape, rows: Rows) -> list[Attention]:
    """Return the attentions between roots and output, in the order of execution.

    Softmaxes over other axes than rows, such as a choice of experts, are not attentions.
    """
    key = "attentions", program.roots, program.output
    return list(rows.once(key, lambda: _find_attentions(program, tape, rows)))


def _find_attentions(program: Program, tape: Tape, rows: Rows) -> list[Attention]:
    pieces = list(find_pieces(program, tape, rows))
    depth = depths(tape, {p.piece.product for p in pieces})
    groups: dict[Any, list[LabelledPiece]] = defaultdict(list)
    for p in pieces:
        sides = [rows.linked(int(rows.family[rows.distinct(t)[-1]])) for t in (p.queries, p.keys) if t is not None]
        groups[depth[p.piece.product], *(sides or [-p.piece.map])].append(p)
    streams: dict[tuple[int, ...], Tensor] = {}
    return [_attention(group, key[0], rows, streams) for key, group in groups.items()]


def _attention(group: list[LabelledPiece], depth: int, rows: Rows, streams: dict[tuple[int, ...], Tensor]) -> Attention:
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


def depths(tape: Tape, products: Container[int]) -> list[int]:
    """Return, for each value, the largest number of ``products`` on a path to it, including the value itself."""
    depth = [0] * len(tape)
    for call in tape.calls:
        current = max((depth[o] for o in call.operands), default=0) + any(r in products for r in call.results)
        for r in call.results:
            depth[r] = current
    return depth


# -- layout of maps --------------------------------------------------------------------------------------------------
def _find_places(
    group: list[LabelledPiece], queries: Tensor, keys: Tensor, rows: Rows
) -> tuple[int, tuple[_Places, ...]]:
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
