"""Layer-wise relevance propagation: full and partial, with deep Taylor rules."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from whyformer.composites.chefer import LINEAR_RULES, deep_taylor, layerwise
from whyformer.engine.probes import Flows
from whyformer.methods.gradients.input_gradients import of_roots
from whyformer.methods.maps import streams
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.maps.transformer_attribution import conservation
from whyformer.methods.registry import Amount, Block, between, method, one_of
from whyformer.methods.task import Scores, Task
from whyformer.rules.core import Composite

LinearRule = Annotated[str, one_of("shared", *LINEAR_RULES)]
Alpha = Annotated[float, between(1, 1_000)]


def _composite(rule: str, alpha: float, epsilon: float, gamma: float) -> Composite:
    """ "shared" are the rules of Transformer Attribution; the others those of the CVPR 2021 baseline."""
    return deep_taylor(alpha) if rule == "shared" else layerwise(rule, alpha=alpha, epsilon=epsilon, gamma=gamma)


@method(
    "relevance of the logit, propagated to every pixel or token embedding",
    family="propagation",
    level="pixel or token",
    signed=True,
    citation="Bach et al. 2015, as baseline of Chefer et al., CVPR 2021",
    anywhere=True,
    relevance=True,
    checkpoint=True,
)
def lrp(
    task: Task, *, rule: LinearRule = "separate", alpha: Alpha = 1.0, epsilon: Amount = 1e-6, gamma: Amount = 0.25
) -> Scores:
    """R of the model's input: pixels (summed over channels, z^B rule at the patch embedding) or what enters the first
    block (summed over the width). Identity through LayerNorm, activations and softmax; products halved.

    Args:
        rule: rule of linear layers. "separate": the published baseline, whose (+,+) and (−,−) products have their own
            denominators (relevance can double in a layer, see ``diagnostics["conservation"]``); "shared": the rules of
            Transformer Attribution (one denominator, normalised add); "alpha_beta", "epsilon", "gamma": that rule in
            linear layers with the plain add rule.
        alpha: α of "shared" and "alpha_beta" (β = α − 1).
        epsilon: ε of "epsilon", with the sign of the denominator.
        gamma: γ of "gamma".

    Under the plain add rule single values may explode where a residual sum cancels (paper, Eq. 8–9).
    """
    recording = task.begin(_composite(rule, alpha, epsilon, gamma))
    seed = task.seed(recording.logits)
    flows = recording.back(seed)
    return of_roots(task, recording.logits, flows, "sum", conservation(recording, seed, promised=rule == "shared"))


@method(
    "relevance of the last block's attention (the propagation stops there)",
    family="propagation",
    citation="Voita et al. 2019 in the form of the CVPR 2021 baseline",
    relevance=True,
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
    """mean_h (R of A_b)⁺, the readout row; nothing below that block is computed twice.

    Args:
        block: the block; negative numbers count from the last.
        rule, alpha, epsilon, gamma: as for ``lrp``.
    """
    first, composite = task.layer(block, "block"), _composite(rule, alpha, epsilon, gamma)
    chosen = {first: first} if task.structure.plain else streams.wanted(task, Aggregation(layers=[first]))
    maps: dict[int, Tensor] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if recording.run.relevance and index in chosen:
            maps[index] = flow.clamp(min=0).mean(1)

    if not task.structure.plain:
        recording = streams.record(task, Flows(observe, min(chosen, default=0)), composite=composite)
        seed = streams.both_passes(task, recording)
        found = streams.paths(task, recording, maps).mean_of_rows()
        return task.of_sources(found, recording.logits, conservation(recording, seed, promised=rule == "shared"))
    recording = task.record(composite, Flows(observe, first))
    seed, row = task.gradient_pass(recording, keep=True)
    recording.backward(seed, relevance=True)
    (fused,) = task.global_maps(maps, row.shape[-1])
    values = torch.einsum("bq,bqk->bk", row.to(fused.dtype), fused)
    return Scores(values, recording.logits, diagnostics=conservation(recording, seed, promised=rule == "shared"))
