"""What one recorded forward pass is for, and what its watchers see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.rules.core import Composite
from whyformer.rules.relevance.attention import masked_softmax


@dataclass
class AttentionCall:
    """One attention of the forward pass, as a forward watcher sees it.

    Attributes:
        index: 0-based position among the attentions of the pass.
        block: index of the block it lies in, or None outside all blocks (a pooling head).
        query, key: ``[B, H, N, d]``, None where the model computes its map itself (eager attention).
        value: ``[B, H, K, d]``.
    """

    index: int
    block: int | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    weights: Tensor | None = None

    def map(self, rows: Tensor | None = None) -> Tensor:
        """The attention map A ``[B, H, Q, K]``; ``rows`` ``[B, Q]`` picks and sums query rows -> ``[B, H, K]``."""
        if self.weights is None:
            assert self.query is not None
            assert self.key is not None
            self.weights = masked_softmax((self.query @ self.key.transpose(-2, -1)) * self.scale, self.mask)
        return self.weights if rows is None else torch.einsum("bq,bhqk->bhk", rows.to(self.weights.dtype), self.weights)


@dataclass
class Projection:
    """The output projection W_O of an attention and, in post-norm models, the normalisation after its residual sum.

    Attributes:
        weight: ``[D, H·d]``; bias ``[D]`` or None.
        norm_weight, norm_input, norm_eps: γ, the summed vectors ``[B, N, D]`` and ε; None in pre-norm models.
    """

    index: int
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_input: Tensor | None = None
    norm_eps: float = 0.0


@dataclass
class Plan:
    """What one recorded forward pass is for.

    Attributes:
        composite: the table of rules.
        first: the graph begins at the map of this attention (0-based, among the attentions of the blocks); None if it
            begins at another root.
        watch: called with each :class:`AttentionCall` in the forward pass.
        observe: called in each backward pass with (attention index, A, flow into A), ``[B, H, Q, K]`` each.
        by_heads: ``observe`` may be called several times for one attention of a gradient pass, each time with some
            heads (in order), so that a long input's maps are never all there at once.
        edit_mixture: called with (A, value, A·V) of each attention and returns what to use instead of A·V.
        project: called with the :class:`Projection` of each attention's output.
        features: blocks whose first normalisation (if it comes before the attention; else whose input) is a root.
    """

    composite: Composite
    first: int | None = None
    watch: Callable[[AttentionCall], None] | None = None
    observe: Callable[[int, Tensor, Tensor], None] | None = None
    by_heads: bool = False
    edit_mixture: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    project: Callable[[Projection], None] | None = None
    features: tuple[int, ...] = ()
