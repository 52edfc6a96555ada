"""Value Zeroing (Mohebbi et al., EACL 2023): what changes in a block when it may not use one token's values."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.mode import Interception
from whyformer.engine.probes import AttentionCall, BlockCalls, Edit, Maps
from whyformer.engine.run import Recording, running
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import Count, OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.rules.core import Pass

Distance = Literal["cosine", "euclidean", "dot"]


@method(
    "change of each block's output when one token's values are zeroed",
    family="perturbation",
    citation="Mohebbi et al.: Quantifying Context Mixing in Transformers, EACL 2023; survey 2.3",
    class_specific=False,
)
def value_zeroing(
    task: Task,
    *,
    distance: Distance = "cosine",
    block: OptionalBlock = None,
    batch_size: Count = 16,
    aggregation: Choices = None,
) -> Scores:
    """S_b[i, t] = d(h_i^{¬t}, h_i), rows of S_b scaled to sum 1; the scores are the readout row of S_L ⋯ S_1.

    h is the output of block b, h^{¬t} the same block computed again from its own recorded input with the value vector
    of token t set to 0 in all heads (after the bias), the attention as it was. No identity is added: the residual
    connection is inside the block. Costs one forward pass and, in each block for each token that is no padding, what
    follows the product of attention and values (three quarters of a usual block); what comes before is computed once
    for ``batch_size`` tokens. A block that vmap cannot run (it adds to its input in place, say) runs whole for each
    token, one after the other.

    Args:
        distance: d. "cosine" 1 − cos(u, v) (published), "euclidean" ‖u − v‖, "dot" |⟨v, v⟩ − ⟨u, v⟩|.
        block: use the map of this one block instead of the product over all (negative ones count from the last).
        batch_size: rows (tokens × samples) that go through the rest of a block at once.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. There are
            no heads to choose: values are zeroed in all of them.

    Raises:
        MethodNotApplicable: attention in windows or to another sequence, or none at all.
        InputError: ``block`` or ``aggregation`` outside the model.

    The survey's formula exchanges i and t; this is the paper's and its code's order (methods.md §3.6). Differs from the
    code: padding gets exactly 0, and 1 − cos is computed as ½‖u/‖u‖ − v/‖v‖‖², which loses no digits near 0.
    """
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation)
    if how.heads != "mean":
        raise InputError("value_zeroing: values are zeroed in all heads at once, so aggregation has no heads to choose")
    shapes: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> None:
        if call.index >= 0:
            shapes[call.index] = torch.empty(call.shape, device="meta")

    kept = BlockCalls()
    recording, row = task.readout_pass(Maps(watch), kept)
    calls = kept.found
    how = how.within(len(calls))
    task.global_maps(shapes, row.shape[-1])
    if set(recording.mode.attention_blocks) != set(range(len(calls))):
        raise task.refuse("no attention was seen in some of its blocks")
    chosen = [b for b in range(len(calls)) if how.wants(b)]
    real = torch.ones_like(row, dtype=torch.bool)
    if task.inputs.row_mask is not None and task.inputs.row_mask.shape == row.shape:
        real = task.inputs.row_mask
    tokens = [t for t in range(row.shape[-1]) if bool(real[:, t].any())]
    step = max(1, int(batch_size) // task.inputs.batch)
    work = [(b, tokens[i : i + step]) for b in chosen for i in range(0, len(tokens), step)]
    maps = {b: torch.zeros(*row.shape, row.shape[-1], dtype=_wide(calls[b][3]), device=row.device) for b in chosen}
    for b, some in task.progress(work, "value zeroing", len(work)):
        plain = _batch_first(calls[b][3], recording)
        maps[b][..., some] = _distance(_zeroed(recording, b, calls[b], some, task), plain, distance).permute(1, 2, 0)
    for found in maps.values():
        found *= real[:, None] * real[..., None]
        sums = found.sum(-1, keepdim=True)
        found /= torch.where(sums > 0, sums, 1)
    values = how.reduce(list(maps.values()), row, real)
    diagnostics = {"block_passes": len(tokens) * len(chosen)}
    return Scores(values, recording.logits, diagnostics=diagnostics)


def _zeroed(recording: Recording, block: int, call: Any, tokens: list[int], task: Task) -> Tensor:
    """``[k, B, N, D]``: the output of the block with the values of each of the k tokens zeroed.

    One call of the block on its own arguments: what comes before the product of attention and values does not know of
    the token, so vmap computes it once, and all the rest for k tokens.
    """
    module, args, kwargs, plain = call
    edits = 0

    def edit(token: Tensor, weights: Tensor, value: Tensor, mixed: Tensor) -> Tensor:
        nonlocal edits
        edits += 1
        return mixed - weights.index_select(-1, token) * value.index_select(-2, token)

    def given(value: Any) -> Any:
        if hasattr(value, "get_seq_length"):  # a cache: this pass would append to it
            return None
        # the block may change its input in place
        return value.clone() if isinstance(value, Tensor) and value.shape == plain.shape else value

    def without(token: Tensor) -> Tensor:
        run = Pass(batch=task.inputs.batch, sequence_first=recording.run.sequence_first)
        changed = Edit(lambda *attention: edit(token, *attention))
        with torch.no_grad(), running(Interception(task.model, GRADIENT, run, (changed,))):
            output = module(*map(given, args), **{k: given(v) for k, v in kwargs.items()})
        return _batch_first(output if isinstance(output, Tensor) else output[0], recording)

    each = torch.tensor(tokens, device=plain.device).unsqueeze(1)
    try:
        changed = torch.func.vmap(without)(each)
    except (RuntimeError, MethodNotApplicable):
        # vmap cannot run it: it adds to its input in place, asks for the value of a tensor, or a hook explains in it
        changed = torch.stack([without(token) for token in each])
    if not edits:
        raise task.refuse(f"no product of attention and values was seen in its block {block}")
    return changed


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _batch_first(hidden: Tensor, recording: Recording) -> Tensor:
    return hidden.transpose(0, 1) if recording.run.sequence_first else hidden


def _distance(changed: Tensor, plain: Tensor, distance: str) -> Tensor:
    """``[k, B, N]`` between vectors ``[k, B, N, D]`` and ``[B, N, D]``."""
    u, v = changed.to(_wide(changed)), plain.to(_wide(plain))
    if distance == "euclidean":
        return (u - v).norm(dim=-1)
    if distance == "dot":
        return ((v - u) * v).sum(-1).abs()
    return (nn.functional.normalize(u, dim=-1) - nn.functional.normalize(v, dim=-1)).square().sum(-1) / 2
