"""Transformer Attribution (Chefer, Gur, Wolf, CVPR 2021) and its ablations."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

import torch
from torch import Tensor

from whyformer.composites.chefer import deep_taylor
from whyformer.engine.precision import agreement
from whyformer.engine.probes import Flows
from whyformer.engine.run import Recording
from whyformer.explanation.views import carry
from whyformer.methods.maps import streams
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.registry import Block, OptionalBlock, method
from whyformer.methods.task import Scores, Task

_CITATION = "Chefer, Gur, Wolf: Transformer Interpretability Beyond Attention Visualization, CVPR 2021"


@method(
    "relevance × gradient of every attention map, rolled out over the blocks",
    family="propagation",
    citation=_CITATION + ", Eq. 13–14",
    relevance=True,
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
    logit). One forward, one gradient and one relevance pass, all cut off below ``start_layer``.

    Args:
        start_layer: first block used, counted from 0 at the input. The published perturbation and segmentation
            figures were made with 1.
        normalize_rows: divide the rows of Ā_b by their sums, as the reference code does for BERT but not for ViT.
        weighting: what R_b is multiplied by. "gradient": the method. Two ablations of the paper's Table 3 row
            "w/o ∇A": "attention" as its text says (A ⊙ R), "none" as the reference code does (R alone).
        block: use one block only and no rollout: the readout row of mean_h (∇A_b ⊙ R_b)⁺. −1 is the paper's ablation
            ∇A^(1)R (last block), 1 is what the reference code calls its ∇A^(B−1)R.

    Differs from the reference code: sums are taken per sample (true batches), and no constant is added to
    denominators (``stabilizer_1e-15`` in the golden files).
    """
    first = task.layer(start_layer if block is None else block, "start_layer" if block is None else "block")
    gradients: dict[int, list[Tensor]] = defaultdict(list)
    sums: dict[int, Tensor] = {}
    heads: Counter[int] = Counter()

    def observe(relevance: bool, index: int, weights: Tensor, flow: Tensor) -> None:
        if not relevance:
            if weighting == "gradient":
                gradients[index].append(flow)
            return
        if weighting == "gradient":
            flow = flow * _next_heads(gradients[index], flow.shape[1])
        elif weighting == "attention":
            flow = flow * weights
        found = flow.clamp(min=0).sum(1)
        sums[index] = sums[index].add_(found) if index in sums else found
        heads[index] += flow.shape[1]

    def again() -> None:
        for seen in (gradients, sums, heads):
            seen.clear()

    if not task.structure.plain:
        layers = "rollout" if normalize_rows else "sum_product"
        how = Aggregation(layers=layers if block is None else [first])
        chosen = streams.wanted(task, how, first)
        flows = Flows(lambda i, a, r: observe(recording.run.relevance, i, a, r), min(chosen, default=0))
        recording = streams.record(task, flows, composite=deep_taylor())
        seed = streams.both_passes(task, recording)
        paths = streams.paths(
            task, recording, {number: sums[number] / heads[number] for number in sums if number in chosen}
        )
        return task.of_sources(streams.reduce(task, how, paths), recording.logits, conservation(recording, seed))
    recording, seed, row = task.both_passes(deep_taylor(), first, observe, again)
    listed = task.global_maps({number: sums.pop(number) / heads[number] for number in list(sums)}, row.shape[-1])
    if block is not None:
        values = torch.einsum("bn,bnm->bm", row.to(listed[0].dtype), listed[0])
    else:
        values = carry(row, listed, normalize_rows=normalize_rows)
    return Scores(values, recording.logits, diagnostics=conservation(recording, seed))


def _next_heads(parts: list[Tensor], heads: int) -> Tensor:
    """The next heads of a map that came in parts, which are let go of."""
    taken = [parts.pop(0)]
    while sum(part.shape[1] for part in taken) < heads:
        taken.append(parts.pop(0))
    return taken[0] if len(taken) == 1 else torch.cat(taken, 1)


def conservation(recording: Recording, seed: Tensor, *, promised: bool = True) -> dict[str, object]:
    """How much of the relevance that started arrives at the input of each block (1 = conserved), per sample.

    ``error`` is the largest |ΣR_block / ΣR_start − 1|; for a target whose start sums to 0 (a contrast) differences are
    taken relative to Σ|R_start| instead. ``promised``: whether the rules conserve relevance by their definition.
    """
    total, scale = (s.double() for s in recording.started)
    scale = torch.where(total.abs() > 1e-12, total.abs(), scale)
    sums = {b: s.double() for b, s in sorted(recording.block_sums.items())}
    errors = [((s - total) / scale).abs() for s in sums.values()]
    worst = torch.stack(errors).amax(0) if errors else torch.zeros_like(total)
    lost = {n: (books[0] - books[1]).tolist() for n, books in recording.run.ledger.items()}
    figure = {
        "start": total.tolist(),
        "blocks": {str(b): s.tolist() for b, s in sums.items()},
        "error": worst.tolist(),
        "promised": promised,
        "given_up_by_operation": lost,
    }
    precision = {} if recording.half is None else {"precision": agreement(*recording.half, recording.logits)}
    return {"conservation": figure, **precision}
