"""The vectors that attention mixes: the contribution of row j to row i, v_ij = Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i.

A :class:`Mixture` holds α, f_h(x_j) and x_i, from which all v_ij can be computed. It comes from a walk with
:class:`~whyformer.rules.vectors.VectorRules`, which requires that f_h is the same for all rows i, up to a factor such
as the deviation of a norm. If it is not, as behind a gate that is computed from row i, only the :class:`Lengths` ‖v_ij‖
are known, from one walk for every few keys with :class:`~whyformer.rules.vectors.KeyRules`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from whyformer.errors import MethodNotApplicable, ModelError, UnknownOperation
from whyformer.methods.map_passes import MapPass
from whyformer.methods.task import Task
from whyformer.rules.vectors import KeyRules, VectorRules, linear_path
from whyformer.tape.walking import walk_forward

__all__ = ["AttentionVectors", "Lengths", "Mixture", "Place"]

Place = Literal["sum", "norm", "output"]
"""Where vectors are taken: at the residual sum of attention, after a norm that follows it, or after the second such
norm, without the MLP."""

_KEYS = 16  # keys whose vectors are computed in one walk


@dataclass(frozen=True)
class Mixture:
    """The vectors that an attention mixes, stored as N · H vectors instead of N².

    Attributes:
        weights: α ``[B, H, N, N]``, multiplied by the norms' factors for row i; ``[B, H, N, M]`` for attention to M
            rows of another stream.
        parts: f_h(x_j) ``[B, H, N, D]``, or ``[B, H, M, D]``.
        residual: x_i ``[B, N, D]``, or None.
        constant: sum of the terms of no row, such as biases, ``[D]`` or ``[B, N, D]``; None for zero.
    """

    weights: Tensor
    parts: Tensor
    residual: Tensor | None = None
    constant: Tensor | None = None

    @property
    def of_attention(self) -> Mixture:
        """The mixture without the residual."""
        return replace(self, residual=None)

    def of_keys(self, same: Tensor) -> Mixture:
        """Return the mixture of some of the keys; ``same`` is ``[B, K, M]``, True where a key is one of these M."""
        same = same.to(self.parts)
        return replace(self, weights=self.weights @ same[:, None], parts=same.mT[:, None] @ self.parts)

    def by_heads(self) -> Tensor:
        """Return ‖α^h_ij f_h(x_j)‖, ``[B, H, N, N]``."""
        return self.weights.abs() * self.parts.norm(dim=-1)[:, :, None]

    def residual_norms(self) -> Tensor:
        """Return ‖x_i‖, ``[B, N]``, for cross-attention, in which no key is the query itself."""
        assert self.residual is not None
        return self.residual.norm(dim=-1)

    def norms(self) -> Tensor:
        """Return ‖v_ij‖, ``[B, N, N]``, by the Gram matrix of the heads at each j: ‖Σ_h α^h f_h‖² = Σ_hh' α^h α^h'
        ⟨f_h, f_h'⟩, so that the N × N vectors are never formed."""
        gram = torch.einsum("bhjd,bgjd->bjhg", self.parts, self.parts)
        square = torch.einsum("bhij,bjhg,bgij->bij", self.weights, gram, self.weights)
        if self.residual is not None:
            diagonal = torch.diagonal(self.weights, dim1=-2, dim2=-1)
            cross = torch.einsum("bhi,bhid,bid->bi", diagonal, self.parts, self.residual)
            square = square + torch.diag_embed(2 * cross + self.residual.square().sum(-1))
        return square.clamp(min=0).sqrt()

    def vectors(self, token: int) -> Tensor:
        """Return v_ij of one row i, ``[B, N, D]``."""
        mixed = torch.einsum("bhj,bhjd->bjd", self.weights[:, :, token], self.parts)
        if self.residual is not None:
            mixed[:, token] += self.residual[:, token]
        return mixed

    def total(self) -> Tensor:
        """Return Σ_j v_ij + the constant, ``[B, N, D]``."""
        summed = torch.einsum("bhij,bhjd->bid", self.weights, self.parts)
        summed = summed if self.residual is None else summed + self.residual
        return summed if self.constant is None else summed + self.constant


@dataclass(frozen=True)
class Lengths:
    """The lengths of the vectors of a mixture in which f_h also depends on the row i, computed key by key.

    Attributes:
        square: ‖α_ij f(x_j)‖² ``[B, N, M]``.
        inner: ⟨α_ij f(x_j), x_i⟩ ``[B, N, M]``.
        residual: ‖x_i‖ ``[B, N]``, or None.
    """

    square: Tensor
    inner: Tensor
    residual: Tensor | None

    @property
    def of_attention(self) -> Lengths:
        """The lengths without the residual."""
        return replace(self, residual=None)

    def of_keys(self, same: Tensor) -> Lengths:
        """Return the lengths of some of the keys, as :meth:`Mixture.of_keys`."""
        same = same.to(self.square)
        return replace(self, square=self.square @ same, inner=self.inner @ same)

    def residual_norms(self) -> Tensor:
        """Return ‖x_i‖, ``[B, N]``."""
        assert self.residual is not None
        return self.residual

    def norms(self) -> Tensor:
        """Return ‖v_ij‖, ``[B, N, M]``."""
        square = self.square
        if self.residual is not None:
            inner = torch.diagonal(self.inner, dim1=-2, dim2=-1)
            square = square + torch.diag_embed(2 * inner + self.residual.square())
        return square.clamp(min=0).sqrt()


class AttentionVectors:
    """The vectors of the attentions of a recorded pass, by index."""

    def __init__(self, task: Task, map_pass: MapPass) -> None:
        self.task, self.map_pass = task, map_pass
        self.others: dict[int, bool] = {}  # attention -> whether another branch is added in the same residual sum

    def is_state(self, number: int) -> bool:
        """Return True if the vectors at the residual sum add up to a state of the model."""
        if number not in self.others:
            self.at(number, "sum")
        return not self.others[number]

    def at(self, number: int, place: Place) -> Mixture:
        """Return the mixture of an attention at a place.

        Raises:
            MethodNotApplicable: its vectors are unknown.
        """
        places = self._known_places(number, place)
        first, values = ("sum" if place == "output" else place), {places[p] for p in ("sum", place)}
        try:
            mixtures = self._mixtures(number, places.get("entry"), places["sum"], values)
            state = self._state(number, places[first])
        except (UnknownOperation, ModelError) as error:
            raise self.task.refuse(f"the vectors of its attention are unknown: {error}") from error
        finally:
            self.map_pass.release()
        if mixtures.keys() != values or not self.task.same_rows(mixtures[places[first]].total(), state):
            raise self.task.refuse(
                "the output of its attention is changed between the projection and the residual sum, in a way that "
                "these vectors do not capture"
            )
        return mixtures[places[place]]

    def lengths_at(self, number: int, place: Place) -> Mixture | Lengths:
        """Return the mixture of an attention at the sum or the norm; its lengths if an operation after the attention
        differs between rows.

        Raises:
            MethodNotApplicable: both are unknown.
        """
        try:
            return self.at(number, place)
        except MethodNotApplicable:
            lengths = self.lengths(number, place)
            if lengths is None:
                raise
            return lengths

    def _known_places(self, number: int, place: Place) -> dict[str, int]:
        """Return :meth:`_places`. Raise an error if they are unknown or lack ``place``."""
        places = self._places(number)
        if places is None:
            raise self.task.refuse("no single residual sum follows its attention", verdict="is not supported yet")
        if place not in places:
            raise self.task.refuse("the sum that follows its attention lies inside of a branch of its block")
        return places

    def _state(self, number: int, value: int) -> Tensor:
        """Return a value ``[B, N, D]`` of the rows of an attention's stream."""
        return self.map_pass.features_of(self.map_pass.block_of(number)[0], value, self.map_pass.recording.tape[value])

    def lengths(self, number: int, place: Place) -> Lengths | None:
        """Return the lengths of an attention at a place, by one walk for every few keys; None if they are unknown."""
        map_pass, attention, places = self.map_pass, self.map_pass.attentions[number], self._known_places(number, place)
        entry = places.get("entry")
        (stream, _), behind, n = map_pass.block_of(number), places["sum"], places[place]
        assert attention.keys is not None
        rows = map_pass.layout.rows
        constant = torch.tensor([not f.source for f in rows.families])[rows.family]
        for queries in (a.queries for a in map_pass.layout.attentions if a.queries is not None):
            constant[queries] = False
        late, square, inner = entry is None and map_pass.adds_rows(behind), list[Tensor](), list[Tensor]()
        rest: Tensor | None = None
        try:
            total = torch.zeros_like(state := self._state(number, n))
            for keys in attention.keys.split(_KEYS, 1):
                rules = KeyRules(map_pass.recording.tape, rows, attention, behind, keys, constant)
                shares = walk_forward(map_pass.program, rules.begin_block(entry, late=late), {n}, rules).get(n)
                if shares is None:
                    return None
                *parts, residual = (map_pass.features_of(stream, n, part) for part in shares.parts)
                square.append(torch.stack([part.square().sum(-1) for part in parts], -1))
                inner.append(torch.stack([(part * residual).sum(-1) for part in parts], -1))
                total += torch.stack(parts).sum(0)
                rest = shares.pending
        except (UnknownOperation, ModelError):
            return None
        finally:
            map_pass.release()
        total = total + residual + (0 if rest is None else map_pass.features_of(stream, n, rest))
        if not self.task.same_rows(total, state):
            return None
        return Lengths(torch.cat(square, -1), torch.cat(inner, -1), residual.norm(dim=-1))

    def _mixtures(self, number: int, entry: int | None, behind: int, values: set[int]) -> dict[int, Mixture]:
        """Return the mixtures at some values, computed for as many keys at a time as there are queries."""
        map_pass, attention = self.map_pass, self.map_pass.attentions[number]
        assert attention.queries is not None
        assert attention.keys is not None
        queries, keys = attention.queries.shape[1], attention.keys.shape[1]
        mixtures: dict[int, Mixture] = {}
        for first in range(0, keys, queries):
            rules = VectorRules(map_pass.recording.tape, map_pass.layout.rows, attention, behind, first)
            late = entry is None and map_pass.adds_rows(behind)
            walked = walk_forward(map_pass.program, rules.begin_block(entry, late=late), values, rules)
            self.others[number] = not rules.is_complete(map_pass.program, behind)
            for n in values & walked.keys():
                more = self._mixture(number, rules, n, walked[n].parts, walked[n].pending)
                parts = [*([mixtures[n].parts] if n in mixtures else []), more.parts[:, :, : keys - first]]
                mixtures[n] = replace(more, parts=torch.cat(parts, 2))
        return mixtures

    def _mixture(self, number: int, rules: VectorRules, n: int, parts: Tensor, rest: Tensor | None) -> Mixture:
        map_pass, (stream, _) = self.map_pass, self.map_pass.block_of(number)
        arranged = torch.stack([map_pass.features_of(stream, n, p) for p in parts], 1)
        weights, factor = map_pass.map(number).to(parts.dtype), rules.factors.get(n)
        if factor is not None:
            weights = weights * factor[stream.rows.to(factor.device)][:, None, :, None]
        constant = None if rest is None else map_pass.features_of(stream, n, rest)
        return Mixture(weights, arranged[:, :-1], arranged[:, -1], constant)

    def _places(self, number: int) -> dict[str, int] | None:
        """Return the numbers of the residual ("entry"; left out if constant or absent) and of the values at which
        vectors are taken ("sum", "norm"; "output" if the sum lies on the path of the block); None if unknown."""
        map_pass, (stream, block) = self.map_pass, self.map_pass.block_of(number)
        makers, path = map_pass.program.makers, map_pass.path(stream, block)
        constant = block.entry < 0 and map_pass.attentions[number].pieces[0].query is None
        line, reached = linear_path(map_pass.program, map_pass.recording.tape, map_pass.attentions[number], block.exit)
        added = [n for n in line if makers[n].kind == "add" and not reached.issuperset(makers[n].entries)]
        if len(added) > 1 and added[-1] not in path:  # which of these sums adds the residual is unknown
            return None
        named = dict[str, int]()
        if added:
            place = path.index(added[-1]) if added[-1] in path else 0
            line = path if place else line
            named["entry"] = path[place - 1] if place else min(set(makers[added[-1]].entries) - reached)
        elif constant:
            kinds = ("view", "layer", "scale", "shift")
            plain = takewhile(lambda n: makers[n].kind in kinds, line[1:])
            holding = (n for n in plain if map_pass.holds(n, stream))
            added = [n for n in line if map_pass.adds_rows(n)][:1] or [*holding][-1:]
            line = path if added and added[0] in path else line
        if not added:
            return None
        behind = line.index(added[-1])
        first = map_pass.behind_norm(line, behind)
        second = map_pass.behind_norm(line, min(first + 1, len(line) - 1)) if first > behind else first
        return {**named, "sum": added[-1], "norm": line[first], **({"output": line[second]} if line is path else {})}
