"""Layer-wise relevance propagation: full and partial, with deep Taylor rules."""

from __future__ import annotations

from typing import Annotated, Any, cast

from torch import Tensor

from whyformer.methods.gradients.input_gradients import of_roots
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.registry import Amount, Block, between, method, one_of
from whyformer.methods.task import Scores, Task
from whyformer.rules.propagation import LINEAR_RULES, deep_taylor, layerwise
from whyformer.tape.walking import Composite

LinearRule = Annotated[str, one_of("shared", *LINEAR_RULES)]
Alpha = Annotated[float, between(1, 1_000)]


def _rules(rule: str, alpha: float, epsilon: float, gamma: float) -> Composite:
    """Return the rules of Transformer Attribution for "shared", else those of the CVPR 2021 baseline."""
    if rule == "shared":
        return deep_taylor(alpha)
    return layerwise(cast(Any, rule), alpha=alpha, epsilon=epsilon, gamma=gamma)


@method(
    "relevance of the logit, propagated to every pixel or token embedding",
    family="propagation",
    level="pixel or token",
    signed=True,
    citation="Bach et al. 2015, as baseline of Chefer et al., CVPR 2021",
    anywhere=True,
    checkpoint=True,
)
def lrp(
    task: Task, *, rule: LinearRule = "separate", alpha: Alpha = 1.0, epsilon: Amount = 1e-6, gamma: Amount = 0.25
) -> Scores:
    """R at the model's input: pixels (summed over channels, with the z^B rule at the patch embedding) or the first
    block's input (summed over the width). Identity through LayerNorm, activations and softmax; products halved.

    Args:
        rule: rule of linear layers. "separate": the published baseline, with separate denominators for (+,+) and (−,−)
            products (relevance can double in a layer, see ``diagnostics["conservation"]``); "shared": the rules of
            Transformer Attribution (one denominator, normalised add); "alpha_beta", "epsilon", "gamma": that rule in
            linear layers with the plain add rule.
        alpha: α of "shared" and "alpha_beta" (β = α − 1).
        epsilon: ε of "epsilon", with the sign of the denominator, which includes the bias.
        gamma: γ of "gamma": products z = w x with the sign of their sum count as (1 + γ) z, also in the denominator.

    Under the plain add rule, single values may explode where a residual sum cancels (paper, Eq. 8–9).
    """
    recorded = task.rooted_pass(_rules(rule, alpha, epsilon, gamma))
    flows, sums = recorded.back(task.seed(recorded.logits))
    figures = None if sums is None else sums.diagnostics(promised=rule == "shared")
    return of_roots(task, recorded.logits, flows, "sum", figures)


@method(
    "relevance of the last block's attention (the propagation stops there)",
    family="propagation",
    citation="Voita et al. 2019 in the form of the CVPR 2021 baseline",
)
def partial_lrp(
    task: Task,
    *,
    block: Block = -1,
    rule: LinearRule = "separate",
    alpha: Alpha = 1.0,
    epsilon: Amount = 1e-6,
    gamma: Amount = 0.25,
) -> Scores:
    """mean_h (R of A_b)⁺, the readout row. The backward walk stops at that block.

    Args:
        block: index of the block; negative ones count from the last.
        rule, alpha, epsilon, gamma: as for ``lrp``.
    """
    task.layer(block, "block")
    rules, promised = _rules(rule, alpha, epsilon, gamma), rule == "shared"
    maps: dict[int, Tensor] = {}

    def observe(index: int, _: Tensor, relevance: Tensor) -> None:
        maps[index] = relevance.clamp(min=0).mean(1)

    work = stream_maps.begin(task, rules, row_alone=True)
    walked = work.walk(rules, observe, work.attentions_for(Aggregation(layers=block)))
    rows = work.paths(maps, walked.readouts).mean_of_rows()
    return work.scores(rows, walked.logits, walked.sums, promised=promised)
