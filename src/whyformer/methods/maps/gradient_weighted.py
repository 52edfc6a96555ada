"""Attention maps weighted by their positive gradients, averaged over blocks: Grad-SAM and AG-CAM."""

from __future__ import annotations

from torch import Tensor

from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.maps.rollout import over_gradients
from whyformer.methods.registry import Block, method
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import CompositeName


@method(
    "attention × its positive gradient, averaged over blocks, heads and query tokens",
    family="attention",
    citation="Barkan et al.: Grad-SAM, CIKM 2021",
)
def grad_sam(
    task: Task, *, start_layer: Block = 0, aggregation: Choices = None, composite: CompositeName = "plain"
) -> Scores:
    """mean_b mean_h mean_i A_ij ⊙ (∇A_ij)⁺ over blocks, heads and the query tokens i, without padding.

    Args:
        start_layer: first block used, from 0.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is
            ``{"layers": "mean", "rows": "column_mean"}``.
        composite: the rules with which ∇A is computed, see :mod:`whyformer.rules.multipliers`.
    """
    how = Aggregation(layers="mean", rows="column_mean").with_choices(aggregation)
    return over_gradients(task, start_layer, positively, how, composite)


@method(
    "sigmoid of the attention scores × the positive gradient of attention, averaged over blocks and heads (AG-CAM)",
    family="attention",
    citation="Leem, Seo: Attention Guided CAM, AAAI 2024",
)
def agcam(
    task: Task, *, start_layer: Block = 0, aggregation: Choices = None, composite: CompositeName = "plain"
) -> Scores:
    """mean_b mean_h σ(s_ij) ⊙ (∇A_ij)⁺, the readout row i; A = softmax(s), s = q kᵀ / √d with the mask (σ is 0 there).

    The authors' code sums over blocks and heads by default, which changes only the scale.

    Args:
        start_layer: first block used, from 0.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "mean"}``.
        composite: the rules with which ∇A is computed, see :mod:`whyformer.rules.multipliers`.
    """
    how = Aggregation(layers="mean").with_choices(aggregation)

    def weigh(scores: Tensor, gradient: Tensor) -> Tensor:
        return positively(scores.sigmoid(), gradient)

    return over_gradients(task, start_layer, weigh, how, composite, scores=True)


def positively(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return A ⊙ (∇A)⁺."""
    return weights * gradient.clamp(min=0)
