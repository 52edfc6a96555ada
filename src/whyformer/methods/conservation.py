"""Measure how much of the relevance that starts at the target arrives at each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.rows import Rows, RowSamples
from whyformer.tape.walking import Step

__all__ = ["Sums"]

_ROUNDING = 1e-5  # a sum up to this fraction of the sum of magnitudes counts as 0


@dataclass(eq=False)
class Sums:
    """Sums of the relevance of each sample, collected during a walk over a tape.

    Attributes:
        rows: the rows of the pass.
        starts: value -> the relevance with which the walk starts there.
        seed: ``[B, C]``, ∂target/∂logits.
        run: index of the walk's run that carries relevance.
        is_checked: False if paths bypass every block, so that the sums at blocks need not equal the start.
        precision: agreement of the explained float32 copy with a model in half precision; None for other models.
        blocks: block -> ΣR ``[B]`` at its input.
        lost: operation -> ``[B]`` relevance that arrived there and was not propagated further.
    """

    rows: Rows
    starts: Mapping[int, Tensor]
    seed: Tensor
    run: int = 0
    is_checked: bool = True
    precision: dict[str, Any] | None = None
    blocks: dict[int, Tensor] = field(default_factory=dict)
    lost: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = RowSamples(self.rows)

    def entering(self, block: int, value: int) -> Callable[..., None]:
        """Return a function to call with the flows that arrive at a block's input."""

        def arrived(*flows: Tensor | None) -> None:
            flow = flows[self.run]
            if flow is not None:
                self.blocks[block] = self._of_samples(value, flow)

        return arrived

    def on_unit(
        self, run: int, step: Step, exit_flows: Mapping[int, Tensor], parts: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Record the relevance that a unit loses; see :func:`whyformer.tape.walking.walk_back`."""
        # a view of one value passes on all relevance; a view that joins it with constants may not
        if run != self.run or (step.rule.back is None and len(step.needs[0][1]) < 2):
            return
        books = [(n, flow, 1) for n, flow in exit_flows.items()] + [(n, flow, -1) for n, flow in parts]
        for n, flow, sign in books:
            if self.rows.labels.get(n):
                sums, kind = self._of_samples(n, flow), step.unit.kind
                sums = sign * (sums.real + sums.imag if sums.is_complex() else sums).double()
                self.lost[kind] = self.lost[kind] + sums if kind in self.lost else sums

    def _of_samples(self, value: int, flow: Tensor) -> Tensor:
        """Return the sum ``[B]`` of each sample, over all of its texts; the mean sum if samples share texts."""
        sums, count = self.samples.sums(value, flow).to(self.seed.device), len(self.seed)
        return sums.reshape(count, -1).sum(-1) if len(sums) % count == 0 else (sums.sum() / count).expand(count)

    def diagnostics(self, *, promised: bool = True) -> dict[str, Any]:
        """Return ``conservation``, and ``precision`` if set: per sample, the relevance at the start and at each block,
        and ``error``, the largest |ΣR_block − ΣR_start| / ``scale``. The scale is |ΣR_start|, or Σ|R_start| for a
        target whose start sums to 0 (a contrast).

        Args:
            promised: whether the rules conserve relevance by definition.
        """
        starts = [s for s in self.starts.values() if s.dim() and len(s) == len(self.seed)] or [self.seed]
        rows = [s.reshape(len(self.seed), -1) for s in starts]
        total, size = (torch.stack([r.sum(-1) for r in part]).sum(0).double() for part in (rows, map(torch.abs, rows)))
        scale = torch.where(total.abs() > _ROUNDING * size, total.abs(), size)
        sums = {b: s.double() for b, s in sorted(self.blocks.items())}
        errors = [((s - total) / scale).abs() for s in sums.values()]
        worst = torch.stack(errors).amax(0) if errors else torch.zeros_like(total)
        figure = {
            "start": total.tolist(),
            "scale": scale.tolist(),
            "blocks": {str(b): s.tolist() for b, s in sums.items()},
            **({"error": worst.tolist()} if self.is_checked else {}),
            "promised": promised and self.is_checked,
            "given_up_by_operation": {name: s.double().tolist() for name, s in self.lost.items()},
        }
        return {"conservation": figure} | ({} if self.precision is None else {"precision": self.precision})
