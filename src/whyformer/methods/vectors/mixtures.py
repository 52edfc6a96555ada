"""The vectors that attention mixes: what row i gets from row j, v_ij = Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from whyformer.errors import ModelError, UnknownOperation
from whyformer.methods.attended import AttendedPass
from whyformer.methods.task import Task
from whyformer.rules.vectors import VectorRules
from whyformer.tape.walking import walk_forward

__all__ = ["Mixture", "Place", "VectorPass", "vectors_on_tape"]

Place = Literal["sum", "norm", "output"]
"""Where vectors are looked at: at the sum behind attention, behind a norm that follows it, or behind the second such
norm, without the MLP."""


@dataclass(frozen=True)
class Mixture:
    """The vectors that one attention mixes. N · H of them stand for N².

    Attributes:
        weights: α ``[B, H, N, N]``, with the deviations of norms, which are factors of row i.
        parts: f_h(x_j) ``[B, H, N, D]``.
        residual: x_i ``[B, N, D]``, or None.
        constant: what belongs to no row, such as biases, ``[D]`` or ``[B, N, D]``; None for nothing.
    """

    weights: Tensor
    parts: Tensor
    residual: Tensor | None = None
    constant: Tensor | None = None

    @property
    def of_attention(self) -> Mixture:
        """The same without the residual."""
        return replace(self, residual=None)

    def by_heads(self) -> Tensor:
        """Return ‖α^h_ij f_h(x_j)‖, ``[B, H, N, N]``."""
        return self.weights * self.parts.norm(dim=-1)[:, :, None]

    def own_norms(self) -> Tensor:
        """Return ‖x_i‖, ``[B, N]``, where no key is the query itself."""
        assert self.residual is not None
        return self.residual.norm(dim=-1)

    def norms(self) -> Tensor:
        """Return ‖v_ij‖, ``[B, N, N]``, by the Gram matrix of the heads at each j: ‖Σ_h α^h f_h‖² = Σ_hh' α^h α^h'
        ⟨f_h, f_h'⟩, so that the N × N vectors are never formed."""
        gram = torch.einsum("bhjd,bgjd->bjhg", self.parts, self.parts)
        square = torch.einsum("bhij,bjhg,bgij->bij", self.weights, gram, self.weights)
        if self.residual is not None:
            own = torch.diagonal(self.weights, dim1=-2, dim2=-1)
            cross = torch.einsum("bhi,bhid,bid->bi", own, self.parts, self.residual)
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


class VectorPass(Protocol):
    """The vectors of all blocks of one pass."""

    @property
    def logits(self) -> Tensor:
        """``[B, C]`` of the plain forward pass."""
        ...

    @property
    def row(self) -> Tensor:
        """``[B, N]``, how much the logits read each row of the last state."""
        ...

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks."""
        ...

    def at(self, block: int, place: Place) -> Mixture:
        """Return the mixture of a block.

        Raises:
            MethodNotApplicable: its vectors are unknown.
        """
        ...

    def is_state(self, block: int) -> bool:
        """Return True if the vectors at the sum add up to a state of the model, so that no other branch is added
        there."""
        ...


def vectors_on_tape(task: Task) -> VectorPass | None:
    """Return the vectors of a recorded pass; None if its one sequence is not read off a tape."""
    attended = task.attended()
    if attended is None:
        return None
    return _TapeVectors(task, attended, task.row_read(attended))


class _TapeVectors:
    def __init__(self, task: Task, attended: AttendedPass, row: Tensor) -> None:
        self.task, self.attended, self._row = task, attended, row
        self.others: dict[int, bool] = {}  # block -> whether another branch is added to the same sum

    @property
    def logits(self) -> Tensor:
        return self.attended.logits

    @property
    def row(self) -> Tensor:
        return self._row

    @property
    def blocks(self) -> list[int]:
        return list(range(len(self.attended.attentions)))

    def is_state(self, block: int) -> bool:
        if block not in self.others:
            self.at(block, "sum")
        return not self.others[block]

    def at(self, block: int, place: Place) -> Mixture:
        attended, tape, attention = self.attended, self.attended.whole.tape, self.attended.attentions[block]
        places = self._places(block)
        if places is None:
            raise self.task.refuse("no sum follows its attention", verdict="is not supported yet")
        rules = VectorRules(tape, attended.layout.rows, attention, places["sum"])
        first, wanted = ("sum" if place == "output" else place), {places[p] for p in ("sum", place)}
        try:
            start = rules.begin_block(attended.stream.blocks[block].entry)
            found = walk_forward(attended.program, start, wanted, rules)
            self.others[block] = not rules.is_whole(attended.program, places["sum"])
            mixtures = {n: self._mixture(block, rules, n, found[n].parts, found[n].rest) for n in wanted if n in found}
            state = attended.features(places[first], tape[places[first]])
        except (UnknownOperation, ModelError) as error:
            raise self.task.refuse(f"the vectors of its attention are unknown: {error}") from error
        finally:
            attended.release()
        if mixtures.keys() != wanted or not self.task.same_rows(mixtures[places[first]].total(), state):
            raise self.task.refuse(
                "what its attention puts out is changed behind its projection before it is added, in a way that these "
                "vectors do not follow"
            )
        return mixtures[places[place]]

    def _mixture(self, block: int, rules: VectorRules, n: int, parts: Tensor, rest: Tensor | None) -> Mixture:
        arranged = torch.stack([self.attended.features(n, p) for p in parts], 1)
        weights, factor = self.attended.map(block).to(parts.dtype), rules.factors.get(n)
        if factor is not None:
            queries = self.attended.stream.rows.to(factor.device)
            weights = weights * factor[queries][:, None, :, None]
        constant = None if rest is None else self.attended.features(n, rest)
        return Mixture(weights, arranged[:, :-1], arranged[:, -1], constant)

    def _places(self, block: int) -> dict[Place, int] | None:
        """The numbers of the values at which a block's vectors are looked at."""
        own = self.attended.stream.blocks[block]
        path = self.attended.path(own.entry, own.exit)
        if len(path) < 2:
            return None
        first = self.attended.behind_norm(path, 1)
        second = self.attended.behind_norm(path, min(first + 1, len(path) - 1)) if first > 1 else first
        return {"sum": path[1], "norm": path[first], "output": path[second]}
