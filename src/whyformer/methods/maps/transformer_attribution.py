"""Transformer Attribution (Chefer, Gur, Wolf, CVPR 2021) and its ablations."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.registry import Block, OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.rules import propagation

_CITATION = "Chefer, Gur, Wolf: Transformer Interpretability Beyond Attention Visualization, CVPR 2021"


@method(
    "relevance × gradient of every attention map, rolled out over the blocks",
    family="propagation",
    citation=_CITATION + ", Eq. 13–14",
    identity=lambda settings: settings["block"] is None and not settings["normalize_rows"],
)
def transformer_attribution(
    task: Task,
    *,
    start_layer: Block = 0,
    normalize_rows: bool = False,
    weighting: Literal["gradient", "attention", "none"] = "gradient",
    block: OptionalBlock = None,
) -> Scores:
    """Ā_b = I + mean_h (∇A_b ⊙ R_b)⁺, C = Ā_L ⋯ Ā_start; the scores are the readout row of C (Eq. 13–14).

    R_b is the relevance of the attention map under the deep Taylor rules, started from ∂target/∂logits (one-hot for a
    logit). The rule for sums scales relevance to its total, so positive and negative parts of the start (of a contrast,
    a log-probability) are propagated separately, and R_b is their sum. One forward, one gradient and one relevance
    pass (two for such a target); both backward passes stop at ``start_layer``.

    Args:
        start_layer: first block used, counted from 0 at the input. The published perturbation and segmentation
            figures use 1.
        normalize_rows: divide the rows of Ā_b by their sums, as the reference code does for BERT but not for ViT.
        weighting: factor of R_b. "gradient": the method. Two ablations of the paper's Table 3 row "w/o ∇A":
            "attention" as in its text (A ⊙ R), "none" as in the reference code (R alone).
        block: use one block only and no rollout: the readout row of mean_h (∇A_b ⊙ R_b)⁺. −1 is the paper's ablation
            ∇A^(1)R (last block), 1 is the reference code's ∇A^(B−1)R.

    Differs from the reference code: sums are per sample (true batches), and no constant is added to denominators.
    """
    if block is not None:
        task.layer(block, "block")
    maps: dict[int, Tensor] = {}

    def observe(index: int, weights: Tensor, relevance: Tensor, gradient: Tensor | None = None) -> None:
        if gradient is not None:
            relevance = relevance * gradient
        elif weighting == "attention":
            relevance = relevance * weights
        maps[index] = relevance.clamp(min=0).mean(1)

    rules, weighted = propagation.deep_taylor(), weighting == "gradient"
    layers = "rollout" if normalize_rows else "sum_product"
    how = Aggregation(layers=layers if block is None else block)
    work = stream_maps.begin(task, rules, row_alone=True)
    needed = work.attentions_for(how, start_layer if block is None else 0)
    walked = work.walk(rules, observe, needed, gradient=weighted)
    paths = work.paths(maps, walked.readouts)
    return work.scores(stream_maps.reduce(task, how, paths), walked.logits, walked.sums)
