"""Norm-based analysis of attention (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import AttentionVectors, Lengths, Mixture, Place

Scope = Literal["heads", "attention", "residual", "norm"]


@method(
    "norm of each token's contribution: attention × transformed value",
    family="attention",
    citation="Kobayashi et al., EMNLP 2020 and 2021",
    class_specific=False,
)
def norm_attention(
    task: Task, *, scope: Scope = "norm", block: OptionalBlock = None, aggregation: Choices = None
) -> Scores:
    """‖v_ij‖ of every block, rolled out over the blocks (rows divided by their sums), readout row.

    In cross-attention, v_ij is the contribution of row j of the other stream to row i, and v_ii = x_i the residual; the
    rows of [‖v_ii‖, ‖v_ij‖] are divided by their joint sums.
    A gate of row i after the attention is held constant like the map, so that f depends on i. Then every few tokens j
    take one pass through the operations after the attention, and "heads" is not available.

    Args:
        scope: terms of v_ij. "heads": each head's ‖α^h_ij f_h(x_j)‖, fused by ``aggregation``; "attention":
            Σ_h α^h_ij f_h(x_j) (2020); "residual": plus x_i at i = j; "norm": also through the LayerNorm after the sum
            in post-norm models (2021; in pre-norm models, which have none, same as "residual").
        block: use the norms of this block, whose rows are not divided by their sums, instead of the rollout.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`. The default rollout adds the identity if the
            residual is not part of v_ij ("heads", "attention"). If it is, any aggregation is of maps whose rows are
            divided by their sums.
    """
    task.layer(block if block is not None else 0, "block")
    has_residual = scope in ("residual", "norm")
    how = Aggregation(layers="product" if has_residual else "rollout").with_choices(aggregation)
    if block is not None:
        how = replace(how, layers=block)
    work = stream_maps.begin(task)
    attention_indices = work.attentions_for(how)
    logits, readouts = work.read_rows()
    vectors = AttentionVectors(task, work.map_pass)
    steps, residuals = defaultdict[int, stream_maps.MapStep](dict), defaultdict[int, stream_maps.MapStep](dict)
    for number in attention_indices:
        queries, depth = work.attentions[number].queries, work.attentions[number].depth
        mixed = _mixture(vectors, number, scope)
        mixed = mixed if has_residual else mixed.of_attention
        sides = work.map_pass.key_streams[number]
        parts = {keys: mixed if same is None else mixed.of_keys(same) for keys, same in sides.items()}
        norms = {(queries, keys): _norms(mixture, scope, how, keys == queries) for keys, mixture in parts.items()}
        if not norms.keys().isdisjoint(steps[depth]):  # each has a residual and a projection
            raise task.refuse("parallel attentions between the same rows have separate projections", verdict=NOT_YET)
        if mixed.residual is not None and queries not in parts:
            residuals[depth][queries, queries] = torch.diag_embed(mixed.residual_norms())
        steps[depth] |= norms
    # if the rows also attend to themselves, as in an attention of two pieces, that map contains the residual
    with_residuals = {depth: {**residuals[depth], **step} for depth, step in steps.items()}
    if has_residual and block is None:
        with_residuals = {depth: stream_maps.normalised(step) for depth, step in with_residuals.items()}
    paths = stream_maps.Paths(work.in_order(with_residuals), readouts)
    return work.scores(stream_maps.reduce(task, how, paths, has_residual=has_residual), logits)


def _mixture(vectors: AttentionVectors, number: int, scope: Scope) -> Mixture | Lengths:
    """Return the mixture of an attention or, if the scope does not need heads, possibly only its lengths."""
    place: Place = "norm" if scope == "norm" else "sum"
    return vectors.at(number, place) if scope == "heads" else vectors.lengths_at(number, place)


def _norms(mixture: Mixture | Lengths, scope: Scope, how: Aggregation, has_residual: bool) -> Tensor:
    """Return the norms ``[B, Q, K]`` of a mixture, with its residual if its rows attend to themselves."""
    if scope == "heads" and isinstance(mixture, Mixture):
        return how.fuse(mixture.by_heads())
    return (mixture if has_residual else mixture.of_attention).norms()


def over_vectors(
    task: Task,
    block: int | None,
    aggregation: Mapping[str, Any] | None,
    place: Place,
    fuse: Callable[[Mixture, Tensor], Tensor],
) -> Scores:
    """Return the readout row of the product of the blocks' maps ``[B, N, N]``, or of one block's map: ``fuse`` of its
    mixture and of ``[B, N]``, True at rows other than padding.

    Raises:
        MethodNotApplicable: several sequences, or the sum of a block's vectors is no state of the model (parallel
            branches).
    """
    task.block(block if block is not None else 0, "block")
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation)
    how.without_heads(task.method, "summed as in the model")
    task.refuse_streams()
    work = stream_maps.begin(task, only=task.structure.tower(task.inputs.name))
    vectors = AttentionVectors(task, work.map_pass)
    for number, named in work.attentions.items():
        if not vectors.is_state(number):
            raise task.refuse(
                f"in block {named.layer}, the residual sum adds more than the block's input and the output of "
                "attention, so no state of the model is the sum of these vectors"
            )
    numbers, (logits, readouts) = work.attentions_for(how), work.read_rows()
    maps = {}
    for n in task.progress(numbers, task.method, len(numbers)):
        mixture = vectors.at(n, place)
        real = task.real_rows(work.attentions[n].queries, mixture.weights.shape[::2])
        maps[n] = fuse(mixture, real.to(mixture.weights.device))
    return work.scores(stream_maps.reduce(task, how, work.paths(maps, readouts), has_residual=True), logits)
