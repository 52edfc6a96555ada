"""Rules that propagate the value vectors of each head, and the input of a block, forward as separate shares.

After the attention, every unit is linear and acts row by row, except that the deviation of a norm is a factor of each
row. So the value vectors of each head are propagated as if row i attended only to row i of the keys, and are multiplied
with the attention map at the end (Kobayashi et al., 2020 and 2021).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.rules.shares import Pending, ShareRules, Shares
from whyformer.tape.attentions import Attention
from whyformer.tape.custom_ops import OPAQUE_LAYER
from whyformer.tape.map_search import Piece
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows, occurrences, slim
from whyformer.tape.streams import path_to
from whyformer.tape.tables import PRODUCTS
from whyformer.tape.units import PRODUCT_KINDS, Unit, dominators, reach
from whyformer.tape.values import Tape
from whyformer.tape.walking import repeat_unit

__all__ = ["KeyRules", "VectorRules", "linear_path"]

_FOLLOWED = frozenset(("view", "shift", "scale", "add", "layer", "weighted sum", "norm", OPAQUE_LAYER))
_BRANCHES = frozenset((*PRODUCT_KINDS, "gate", "activated gate", "quotient"))


class VectorRules(ShareRules):
    """The rule for one attention. The sources are the H heads, then the input of the block.

    Units that are neither linear nor norms are left out if only the input of the block reaches them, or if they come
    after the sum ``residual``.

    Args:
        tape: the pass.
        rows: the rows of the pass.
        attention: the attention whose value vectors are propagated.
        residual: number of the sum of the attention and the input of the block.
        first: query row i attends to key row ``first`` + i, or to none if it does not exist. A walk covers as many keys
            as there are queries.

    Attributes:
        factors: maps a value to ``[R]``, the factor of each row of the shares of the heads; None if all are 1.
    """

    def __init__(self, tape: Tape, rows: Rows, attention: Attention, residual: int, first: int = 0) -> None:
        super().__init__(tape, rows, torch.ones(1, 1, dtype=torch.bool), attention.heads + 1)
        self.attention, self.residual, self.first = attention, residual, first
        self.factors: dict[int, Tensor | None] = dict.fromkeys(attention.products)
        self._left_out: set[int] = set()
        self._enters_late = False

    def begin_block(self, entry: int | None, *, late: bool = False) -> dict[int, Shares]:
        """Return the initial shares: those of the products A·V, and of the input of the block.

        Args:
            entry: number of the input of the block. None if it is a constant, or if there is none.
            late: True if the input is a constant, which is then measured at the sum.

        Raises:
            ModelError: it is unknown which value vector belongs to which row and head.
        """
        self._enters_late = late
        start = dict[int, Shares]()
        if entry is not None:
            value = self.tape[entry]
            nothing = value.new_zeros(self.at_once - 1, *value.shape)
            start[entry] = Shares(torch.cat([nothing, value[None]]), is_late=True)
        count = torch.zeros(len(self.rows), dtype=torch.long)
        for piece in self.attention.pieces:
            parts, rest = self._parts(piece, count)
            pending = None if rest is None else Pending(rest)
            start[piece.product] = Shares(torch.cat([parts, torch.zeros_like(parts[:1])]), pending, is_late=True)
        return start

    def is_complete(self, program: Program, value: int) -> bool:
        """Return True if no unit on the paths to a value was left out."""
        reached = set(self._left_out)
        for unit in program.units:
            if not reached.isdisjoint(unit.entries):
                reached.update(unit.exits)
        return value not in reached

    def __call__(self, unit: Unit, entries: dict[int, Shares]) -> dict[int, Shares]:
        """Return the shares of a unit's exits, from those of its entries."""
        mixed = [e for e in entries if e in self.factors]
        if unit.kind not in _FOLLOWED and (not mixed or unit.exit > self.residual):
            self._left_out.update(unit.exits)
            return {}
        factor = self.factors[mixed[0]] if mixed else None
        if unit.kind in _BRANCHES and len(mixed) == 1:  # the other branch is held constant, like a map
            entries = {mixed[0]: entries[mixed[0]]}
        one_branch = unit.kind in _BRANCHES and len(entries) == 1
        if (unit.kind not in _FOLLOWED and not one_branch) or any(self.factors[e] is not factor for e in mixed):
            raise self._untraceable(unit)
        if mixed:
            self.factors.update(dict.fromkeys(unit.exits, factor))
        results = super().__call__(unit, entries)
        if self._enters_late and unit.exit == self.residual:
            (added,) = repeat_unit(self.tape, unit, {e: torch.zeros_like(self.tape[e]) for e in unit.entries})
            shares = results[unit.exit]
            parts, rest = torch.cat([shares.parts[:-1], added[None]]), shares.pending
            pending = None if rest is None else Pending(rest - added)
            results[unit.exit] = replace(shares, parts=parts, rest=pending)
        return results

    def distribute_rest(self, value: int, shares: Shares) -> Shares:
        """Return the shares unchanged: the rest is not distributed."""
        return shares

    def _normed(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return (v − mean v) ⊙ γ for the heads, with 1/σ as a factor of each row; (v − mean v) ⊙ γ / σ for the input
        of the block, which the attention map does not mix."""
        (shares,) = super()._normed(unit, entries)
        if unit.exit not in self.factors:
            return [shares]
        inverse = self._inverse(unit)
        label = slim(self.rows.of(unit.exit))
        if any(n != size and size > 1 for n, size in zip(label.shape, inverse.shape, strict=True)):
            raise self._untraceable(unit)
        by_row = inverse.new_ones(len(self.rows))
        by_row[label.flatten().to(inverse.device)] = inverse.expand(label.shape).flatten()
        factor = self.factors[unit.exit]
        self.factors[unit.exit] = by_row if factor is None else factor * by_row
        heads = shares.parts[:-1] / torch.where(inverse > 0, inverse, 1)
        return [replace(shares, parts=torch.cat([heads, shares.parts[-1:]]))]

    def _inverse(self, unit: Unit) -> Tensor:
        """Return 1/σ of each row, up to a factor that is the same for all rows: the size of the output of the norm for
        the same vector in each row."""
        (entry,) = unit.entries
        x = self.tape[entry]
        axes = self._features(entry, x)
        if len(axes) != 1:
            raise self._untraceable(unit)
        size = [n if a - x.dim() == axes[0] else 1 for a, n in enumerate(x.shape)]
        fixed = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(x).expand(x.shape)
        (shares,) = super()._normed(unit, {entry: Shares(fixed[None])})
        return shares.parts[0].norm(dim=axes[0], keepdim=True)

    def _keys_of(self) -> Tensor:
        """Return ``[R]``, the key row that each query row attends to; 0 for none."""
        queries, keys = self.attention.queries, self.attention.keys
        assert queries is not None
        assert keys is not None
        key_of, chunk = torch.zeros(len(self.rows), dtype=torch.long), keys[:, self.first :][:, : queries.shape[1]]
        key_of[queries[:, : chunk.shape[1]]] = chunk
        return key_of

    def _parts(self, piece: Piece, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (``[H, ...]``, the value vectors of each head in the layout of A·V, as if each row attended to a key;
        the part of no row, None for zero).

        Args:
            piece: a piece of the attention.
            count: ``[R]``, number of heads of each row in earlier pieces; those of this piece are added in place.
        """
        call = self.tape.maker[piece.product]
        is_product = piece.value in call.operands and call.name in PRODUCTS
        labels = [self.rows.labels.get(n, ()) for n in (piece.value, piece.product) if n is not None]
        if piece.value is not None and not labels[0]:  # constant value vectors belong to the keys of the map
            keys, shape = self.rows.labels[piece.map][-1][..., 0, :], self.tape.shapes[piece.value]
            fits = keys.numel() == shape[:-1].numel()
            labels[0] = (keys.reshape(shape[:-1])[..., None].expand(shape),) if fits else ()
        if piece.value is None or not is_product or any(len(label) != 1 for label in labels):
            raise ModelError("the values that it mixes are not those of its rows")
        width = -2 if piece.value == call.operands[-2] else -1  # the axis of features
        value = self.tape[piece.value].movedim(width, -1)
        keys, queries = (label[0].movedim(width, -1)[..., 0].flatten(0, -2) for label in labels)
        if keys.shape[0] != queries.shape[0]:
            raise ModelError("its values are those of several heads")
        attended = self._keys_of()[queries]
        places = torch.full((len(keys), len(self.rows)), value.shape[-2])
        places.scatter_(1, keys, torch.arange(value.shape[-2]).expand(keys.shape))
        position = places.gather(1, attended).masked_fill(attended == 0, 0)
        if bool((position == value.shape[-2]).any()):
            raise ModelError("its rows do not attend to themselves")
        index = position[..., None].expand(*position.shape, value.shape[-1]).to(value.device)
        vectors = value.reshape(len(keys), *value.shape[-2:]).gather(1, index)
        vectors = vectors * (attended > 0)[..., None].to(vectors)
        head = (occurrences(queries.flatten()) + count[queries.flatten()]).reshape(queries.shape)
        count += queries.flatten().bincount(minlength=len(count))
        heads = torch.arange(self.attention.heads)[:, None, None]
        parts = vectors * (head == heads)[..., None].to(value)
        shape = self.tape[piece.product].movedim(width, -1).shape
        return parts.reshape(len(heads), *shape).movedim(-1, width), None


class KeyRules(VectorRules):
    """The rule for the vectors α_ij v_j of some keys j of one attention, at all rows i. The sources are the keys, then
    the input of the block.

    It takes one walk for every few keys, but is exact for operations that differ between rows, such as a gate computed
    from row i, and for operations that mix rows, such as a convolution.

    Args:
        tape, rows, attention, residual: as for :class:`VectorRules`.
        keys: ``[B, K]``, the row numbers of the keys.
        constant: ``[R]``, True for rows that depend on no input, such as padding of the values.
    """

    def __init__(
        self, tape: Tape, rows: Rows, attention: Attention, residual: int, keys: Tensor, constant: Tensor
    ) -> None:
        super().__init__(tape, rows, attention, residual)
        self.keys, self.at_once = keys, keys.shape[1] + 1
        count = keys.shape[1]  # source of other keys; −1 for constant rows, −2 for rows that are no keys
        assert attention.keys is not None
        self.source = torch.where(constant, -1, -2)
        self.source[attention.keys] = count
        self.source[keys] = torch.arange(count)

    def _parts(self, piece: Piece, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (``[K, ...]``, A·V with the values of one key; A·V with the values that belong to no row)."""
        call = self.tape.maker[piece.product]
        label = self.rows.labels.get(-1 if piece.value is None else piece.value, ())
        is_product = piece.value in call.operands and call.name in PRODUCTS
        if piece.value is None or not is_product or len(label) != 1 or bool((self.source[label[0]] == -2).any()):
            raise ModelError("the values that it mixes are not those of its rows")
        value, index = self.tape[piece.value], call.results.index(piece.product)
        key_of = self.source[label[0]].to(value.device)

        def mixed(key: int | None) -> Tensor:
            masked = torch.zeros_like(value) if key is None else torch.where(key_of == key, value, 0)
            return call([masked if o == piece.value else self.tape[o] for o in call.operands])[index]

        origin = mixed(None)
        return torch.stack([mixed(key) - origin for key in range(self.keys.shape[1])]), mixed(-1)

    def _normed(self, unit: Unit, entries: dict[int, Shares]) -> list[Shares]:
        """Return (v − mean v) ⊙ γ / σ."""
        return super(VectorRules, self)._normed(unit, entries)


def linear_path(program: Program, tape: Tape, attention: Attention, end: int) -> tuple[list[int], set[int]]:
    """Return (values through which all paths from an attention's products A·V to a later value pass, up to the first
    unit through which vectors cannot be followed; all values on these paths).

    Args:
        program: the program of the pass.
        tape: the pass.
        attention: the attention.
        end: number of the later value.
    """
    products = set(attention.products)
    reached, needed = set(products), {end}
    units = [u for u in program.units if min(products) < u.exit <= end]
    for unit in reversed(units):
        needed.update(unit.entries if not needed.isdisjoint(unit.exits) else ())
    first = end + 1
    for unit in units:
        branches = reached.intersection(unit.entries)
        if branches and not needed.isdisjoint(unit.exits):
            reached.update(unit.exits)
            if unit.kind not in _FOLLOWED and not (unit.kind in _BRANCHES and len(branches) == 1):
                first = min(first, unit.exit)
    above = dominators(tape, reach(tape, products))
    line = path_to(above, end) if end in reached else []
    return [n for n in line if n in reached and n < first], reached
