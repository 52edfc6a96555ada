"""Norm-based analysis of attention (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from whyformer.methods.maps import streams
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import AttentionVectors, Mixture, Place, SequenceVectors

Scope = Literal["heads", "attention", "residual", "norm"]


@method(
    "norm of what each token really adds: attention × transformed value",
    family="attention",
    citation="Kobayashi et al., EMNLP 2020 and 2021; survey 1.5",
    class_specific=False,
)
def norm_attention(
    task: Task, *, scope: Scope = "norm", block: OptionalBlock = None, aggregation: Choices = None
) -> Scores:
    """‖v_ij‖ of every block, rolled out over the blocks (rows divided by their sums), readout row.

    In cross-attention v_ij is what row i gets from row j of the other stream, v_ii = x_i what it keeps.

    Args:
        scope: what v_ij holds. "heads": each head's ‖α^h_ij f_h(x_j)‖, fused as ``aggregation`` says; "attention":
            Σ_h α^h_ij f_h(x_j) (2020); "residual": plus x_i at i = j; "norm": and through the LayerNorm after the sum
            in post-norm models (2021; pre-norm models have none, there it equals "residual").
        block: one block only instead of the rollout.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`. The default rollout adds the identity where the
            residual is not part of v_ij ("heads", "attention") and does not where it is.
    """
    task.layer(block if block is not None else 0, "block")
    own_residual = scope in ("residual", "norm")
    how = Aggregation(layers="product" if own_residual else "rollout").with_choices(aggregation)
    if block is not None:
        how = replace(how, layers=block)
    if not task.one_sequence:
        return _across(task, scope, how, rolled_out=block is None)
    how = how.within(task.blocks())
    found, maps = vectors_of(task), dict[int, Tensor]()
    for index in filter(how.wants, found.blocks):
        mixture = found.at(index, "norm" if scope == "norm" else "sum")
        mixture = mixture if own_residual else mixture.of_attention
        fused = how.fuse(mixture.by_heads()) if scope == "heads" else mixture.norms()
        maps[index] = fused / fused.sum(-1, keepdim=True) if own_residual and block is None else fused
    values = how.reduce(task.global_maps(maps), found.row, task.inputs.row_mask)
    return Scores(values, found.logits)


def _across(task: Task, scope: Scope, how: Aggregation, *, rolled_out: bool) -> Scores:
    """Streams that look at one another: where rows of q look at rows of k, v_ij is what they get from there and v_ii
    what they keep, x_i; the rows of [‖v_ii‖, ‖v_ij‖] are divided by their sums together."""
    several, kept = streams.begin(task), scope in ("residual", "norm")
    how = several.within(how)
    chosen = several.wanted(how)
    logits, readouts = several.read_rows()
    vectors = AttentionVectors(task, several.passed)
    steps: dict[int, streams.Step] = defaultdict(dict)
    for number in sorted(chosen):
        queries, depth = several.attentions[number].queries, several.attentions[number].depth
        whole = vectors.at(number, "norm" if scope == "norm" else "sum")
        whole = whole if kept else whole.of_attention
        sides = several.passed.looked_at[number]
        parts = {keys: whole if same is None else whole.of_keys(same) for keys, same in sides.items()}
        made = {(queries, keys): _norms(mixture, scope, how, keys == queries) for keys, mixture in parts.items()}
        if whole.residual is not None and queries not in parts:
            made[queries, queries] = torch.diag_embed(whole.own_norms())
        if not made.keys().isdisjoint(steps[depth]):  # with a residual and a projection each
            raise task.refuse("attentions that are heads of one have projections of their own", verdict=NOT_YET)
        steps[depth] |= made
    ordered = several.in_order(
        {d: streams.normalised(step) if kept and rolled_out else step for d, step in steps.items()}
    )
    return several.scores(streams.reduce(task, how, streams.Paths(ordered, readouts), kept=kept), logits)


def _norms(mixture: Mixture, scope: Scope, how: Aggregation, itself: bool) -> Tensor:
    """``[B, Q, K]`` of a mixture; ``itself`` where the keys are the queries, to which the residual belongs."""
    if scope == "heads":
        return how.fuse(mixture.by_heads())
    return (mixture if itself else mixture.of_attention).norms()


def vectors_of(task: Task) -> SequenceVectors:
    """The vectors of all blocks of one forward pass.

    Raises:
        MethodNotApplicable: the model has several sequences, or no attention whose vectors are known.
    """
    return SequenceVectors(task, task.attended())


def states_of(task: Task) -> SequenceVectors:
    """The same of blocks whose attention is added to what entered them.

    Raises:
        MethodNotApplicable: the sum of the vectors is no state of the model (parallel branches).
    """
    found = vectors_of(task)
    for block in found.blocks:
        if not found.is_state(block):
            raise task.refuse(
                f"in block {block}, what its attention puts out is not simply added to what entered the block, so no "
                "state of the model is the sum of these vectors"
            )
    return found


def over_vectors(
    task: Task,
    block: int | None,
    aggregation: Mapping[str, Any] | None,
    place: Place,
    fuse: Callable[[Mixture], Tensor],
) -> Scores:
    """The readout row of the product of the maps ``[B, N, N]`` that ``fuse`` makes of blocks, or of one block's map."""
    task.block(block if block is not None else 0, "block")
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation).within(task.blocks())
    how.without_heads(task.method, "summed as the model sums them")
    found = states_of(task)
    row, wanted = found.row, list(filter(how.wants, found.blocks))
    maps = {index: fuse(found.at(index, place)) for index in task.progress(wanted, task.method, len(wanted))}
    return Scores(how.reduce(task.global_maps(maps), row, task.inputs.row_mask), found.logits)
