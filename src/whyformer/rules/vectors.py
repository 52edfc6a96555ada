"""Rules that hand forward, apart from one another, the values of each head and what enters a block.

Behind attention everything is linear and works row by row, but for the deviations of norms, which are factors of a
row. So the value vectors of each head walk forward as if row i attended to row i of the keys alone, and the map comes
in at the end (Kobayashi et al., 2020 and 2021).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.rules.shares import ShareRules, Shares
from whyformer.tape.declared import HIDDEN_LAYER
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows, slim
from whyformer.tape.structure import Attention, Piece, occurrences
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import repeat_unit

__all__ = ["VectorRules"]

_FOLLOWED = frozenset(("view", "shift", "scale", "add", "layer", "weighted sum", "norm", HIDDEN_LAYER))
_BRANCHES = frozenset(("product", "gate", "activated gate", "quotient"))


class VectorRules(ShareRules):
    """The rules, for one attention. The shares are those of each head, then that of what enters the block.

    What goes through another operation than these is left out, if it comes from the entry of the block alone or stands
    behind the sum.

    Args:
        tape: the pass.
        rows: which row each element of a value belongs to.
        attention: whose vectors are followed.
        behind: number of the sum that the attention is added to.
        first: row i attends to row ``first`` + i of the keys, or to none if there is none: as many keys are followed at
            a time as there are queries.

    Attributes:
        factors: value -> ``[R]``, by which row i of the heads' shares has to be multiplied. None for 1.
    """

    def __init__(self, tape: Tape, rows: Rows, attention: Attention, behind: int, first: int = 0) -> None:
        super().__init__(tape, rows, torch.ones(1, 1, dtype=torch.bool), attention.heads + 1)
        self.attention, self.behind, self.first = attention, behind, first
        self.factors: dict[int, Tensor | None] = dict.fromkeys(p.product for p in attention.pieces)
        self._left_out: set[int] = set()
        self._enters_late = False

    def begin_block(self, entry: int | None) -> dict[int, Shares]:
        """Return the shares with which a walk begins: of the products A·V, and of what enters the block. Where that is
        None, constants enter it; they are what is added to the attention.

        Raises:
            ModelError: which value belongs to which row and head is unknown.
        """
        self._enters_late = entry is None
        start = dict[int, Shares]()
        if entry is not None:
            value = self.tape[entry]
            nothing = value.new_zeros(self.attention.heads, *value.shape)
            start[entry] = Shares(torch.cat([nothing, value[None]]), is_late=True)
        count = torch.zeros(len(self.rows), dtype=torch.long)
        for piece in self.attention.pieces:
            parts = self._by_heads(piece, count)
            start[piece.product] = Shares(torch.cat([parts, torch.zeros_like(parts[:1])]), is_late=True)
        return start

    def is_whole(self, program: Program, value: int) -> bool:
        """Return True if a value does not depend on what was left out on the way to it."""
        reached = set(self._left_out)
        for unit in program.units:
            if not reached.isdisjoint(unit.entries):
                reached.update(unit.exits)
        return value not in reached

    def __call__(self, unit: Unit, given: dict[int, Shares]) -> dict[int, Shares]:
        """Return the shares of a unit's exits, from those of its entries."""
        mixed = [e for e in given if e in self.factors]
        if unit.kind not in _FOLLOWED and (not mixed or unit.exit > self.behind):
            self._left_out.update(unit.exits)
            return {}
        factor = self.factors[mixed[0]] if mixed else None
        one_branch = unit.kind in _BRANCHES and len(given) == 1
        if (unit.kind not in _FOLLOWED and not one_branch) or any(self.factors[e] is not factor for e in mixed):
            raise self._lost(unit)
        if mixed:
            self.factors.update(dict.fromkeys(unit.exits, factor))
        made = super().__call__(unit, given)
        if self._enters_late and unit.exit == self.behind:
            (added,) = repeat_unit(self.tape, unit, {e: torch.zeros_like(self.tape[e]) for e in unit.entries})
            shares = made[unit.exit]
            parts, rest = torch.cat([shares.parts[:-1], added[None]]), shares.rest
            made[unit.exit] = replace(shares, parts=parts, rest=None if rest is None else rest - added)
        return made

    def settled(self, value: int, shares: Shares) -> Shares:
        """Return the shares as they are: no rest is shared out."""
        return shares

    def _normed(self, unit: Unit, given: dict[int, Shares]) -> list[Shares]:
        """(v − mean v) ⊙ γ, and 1/σ as a factor of the row; of what enters the block, which is not mixed, both."""
        (made,) = super()._normed(unit, given)
        if unit.exit not in self.factors:
            return [made]
        inverse = self._inverse(unit)
        label = slim(self.rows.of(unit.exit))
        if any(n != size and size > 1 for n, size in zip(label.shape, inverse.shape, strict=True)):
            raise self._lost(unit)
        by_row = inverse.new_ones(len(self.rows))
        by_row[label.flatten().to(inverse.device)] = inverse.expand(label.shape).flatten()
        factor = self.factors[unit.exit]
        self.factors[unit.exit] = by_row if factor is None else factor * by_row
        heads = made.parts[:-1] / torch.where(inverse > 0, inverse, 1)
        return [replace(made, parts=torch.cat([heads, made.parts[-1:]]))]

    def _inverse(self, unit: Unit) -> Tensor:
        """1/σ of each row but for a factor that all rows share: the size of what a norm makes of the same vector in
        each of them."""
        (entry,) = unit.entries
        x = self.tape[entry]
        axes = self._features(entry, x)
        if len(axes) != 1:
            raise self._lost(unit)
        size = [n if a - x.dim() == axes[0] else 1 for a, n in enumerate(x.shape)]
        fixed = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(x).expand(x.shape)
        (made,) = super()._normed(unit, {entry: Shares(fixed[None])})
        return made.parts[0].norm(dim=axes[0], keepdim=True)

    def _keys_of(self) -> Tensor:
        """``[R]`` the row of the keys that each row of the queries attends to; 0 for none."""
        queries, keys = self.attention.queries, self.attention.keys
        assert queries is not None
        assert keys is not None
        found, own = torch.zeros(len(self.rows), dtype=torch.long), keys[:, self.first : self.first + queries.shape[1]]
        found[queries[:, : own.shape[1]]] = own
        return found

    def _by_heads(self, piece: Piece, count: Tensor) -> Tensor:
        """``[H, ...]`` the value of each head in the layout of A·V, as if each row attended to one key alone.

        Args:
            piece: of the attention.
            count: ``[R]`` heads of each row that other pieces have; those of this piece are added.
        """
        call = self.tape.maker[piece.product]
        known = piece.value in call.operands and call.name in ("mm", "bmm", "matmul", "baddbmm", "addmm")
        labels = [self.rows.labels.get(n, ()) for n in (piece.value, piece.product) if n is not None]
        if piece.value is not None and not labels[0]:  # values that are made of constants: those of the map's keys
            keys, shape = self.rows.labels[piece.map][-1][..., 0, :], self.tape.shapes[piece.value]
            fits = keys.numel() == shape[:-1].numel()
            labels[0] = (keys.reshape(shape[:-1])[..., None].expand(shape),) if fits else ()
        if piece.value is None or not known or any(len(label) != 1 for label in labels):
            raise ModelError("the values that it mixes are not those of its rows")
        width = -2 if piece.value == call.operands[-2] else -1  # the axis of features
        value = self.tape[piece.value].movedim(width, -1)
        given, asked = (label[0].movedim(width, -1)[..., 0].flatten(0, -2) for label in labels)
        if given.shape[0] != asked.shape[0]:
            raise ModelError("its values are those of several heads")
        wanted = self._keys_of()[asked]
        places = torch.full((len(given), len(self.rows)), value.shape[-2])
        places.scatter_(1, given, torch.arange(value.shape[-2]).expand(given.shape))
        found = places.gather(1, wanted).masked_fill(wanted == 0, 0)
        if bool((found == value.shape[-2]).any()):
            raise ModelError("its rows do not attend to themselves")
        index = found[..., None].expand(*found.shape, value.shape[-1]).to(value.device)
        own = value.reshape(len(given), *value.shape[-2:]).gather(1, index)
        own = own * (wanted > 0)[..., None].to(own)
        head = (occurrences(asked.flatten()) + count[asked.flatten()]).reshape(asked.shape)
        count += asked.flatten().bincount(minlength=len(count))
        each = torch.arange(self.attention.heads)[:, None, None]
        parts = own * (head == each)[..., None].to(value)
        shape = self.tape[piece.product].movedim(width, -1).shape
        return parts.reshape(len(each), *shape).movedim(-1, width)
