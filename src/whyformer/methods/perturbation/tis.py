"""TIS (Englebert et al., ICCVW 2023): class probabilities of samples of the token sequence, without replacements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from whyformer.errors import MissingExtra, WhyformerError
from whyformer.inputs.removal import values_of
from whyformer.methods.attended_passes import AttendedPass
from whyformer.methods.passes import record_pass
from whyformer.methods.perturbation.vit_cx import outcome
from whyformer.methods.registry import Count, Natural, method
from whyformer.methods.task import Scores, Task
from whyformer.tape.tables import KINDS
from whyformer.tape.units import reach
from whyformer.tape.values import Tape

Value = Callable[[Task, Tensor], Tensor]
Ratio = Annotated[float, ("a number between 0 and 1", lambda v: not isinstance(v, bool) and 0 < v < 1)]


@method(
    "mean probability of the token samples that hold each patch; samples from clusters of features (TIS)",
    family="perturbation",
    level="patch",
    modality="image",
    citation="Englebert et al.: Explaining through Transformer Input Sampling, ICCV Workshops 2023",
)
def tis(
    task: Task,
    *,
    masks: Count = 1024,
    tokens_ratio: Ratio = 0.5,
    seed: Natural = 0,
    batch_size: Count = 64,
    output: Literal["probability", "target"] = "probability",
) -> Scores:
    """S_j = Σ_i s_i m_ij / Σ_i m_ij, s_i the class's probability if only the patches of sample i enter the first block.

    All channels of all blocks' outputs, each a vector over the patches, are clustered by k-means; the ``tokens_ratio``
    highest patches of each centroid form a sample. CLS and registers are in every sample; a patch in no sample scores
    0. Costs one full pass, and one pass of shorter sequences per mask.

    Args:
        masks: number of clusters; fewer if there are fewer channels.
        tokens_ratio: fraction of the patches in a sample.
        seed: seed of k-means.
        batch_size: samples that pass through the model at once.
        output: value of s for a class: its "probability" (published) or the "target" itself (a logit, by default).

    Raises:
        MissingExtra: scikit-learn is not installed.
        MethodNotApplicable: blocks with different rows, or blocks that need all rows.

    Differs from the authors' code: seeded; no min–max; a patch in no sample gets 0 instead of 0/0.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise MissingExtra('tis needs scikit-learn: pip install "whyformer[methods]"') from error
    task.refuse_streams()
    attended = task.attended()
    logits, rows, states = _states(attended)
    cells = task.cells(task.inputs.name, attended.name_of(attended.stream)).rows.to(rows.device).expand(len(rows), -1)
    target = outcome(task, logits, output)
    values = torch.zeros(rows.shape[:2], dtype=rows.dtype, device=rows.device)
    counts, shortened = [], _Shortened()
    for b, patches in enumerate(cells):
        features = torch.cat([state[b, patches] for state in states], -1).T.double().cpu().numpy()
        clusters = KMeans(min(masks, len(features)), n_init=1, random_state=seed).fit(features).cluster_centers_
        size = max(1, int(tokens_ratio * len(patches)))
        order = torch.from_numpy(clusters).argsort(dim=1, descending=True, stable=True)[:, :size].to(patches.device)
        selected = torch.zeros(len(order), rows.shape[1], dtype=torch.bool, device=rows.device)
        none = torch.zeros(len(order), len(patches), dtype=torch.bool, device=patches.device)
        selected[:, patches] = none.scatter(1, order, True)

        def value(copies: Task, subset: Tensor, b: int = b) -> Tensor:
            return values_of(target, shortened(copies, subset), [b] * len(subset), logits)

        scores = _scores(task, b, rows[b], selected, patches, batch_size, value).to(values.dtype)
        cover = selected.sum(0)
        values[b] = (scores[:, None] * selected).sum(0) / cover.clamp(min=1)
        counts.append(len(order))
    return task.of_rows(values, logits, {"masks": counts})


def _states(attended: AttendedPass) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (logits, input ``[B, N, D]`` of the first block, outputs of all blocks)."""
    blocks, tape = attended.stream.blocks, attended.recording.tape
    first, *outputs = (attended.features(n, tape[n]) for n in (blocks[0].entry, *(block.exit for block in blocks)))
    return attended.logits, first, outputs


class _Shortened:
    """Runs passes in which only some rows enter the first block."""

    def __init__(self) -> None:
        # number of samples -> (number of the block's input, whether its first axis is the batch, number of rows)
        self._entries: dict[int, tuple[int, bool, int]] = {}

    def __call__(self, copies: Task, subset: Tensor) -> Tensor:
        """Return the logits of copies of a sample if the rows ``[k, n, D]`` enter the first block."""
        if len(subset) not in self._entries:
            self._entries[len(subset)] = self._entry(copies)
        entry, samples_first, count = self._entries[len(subset)]
        change = {entry: lambda _: subset if samples_first else subset.transpose(0, 1)}
        feed, samples = copies.feed(copies.inputs), copies.inputs.samples
        changed = record_pass(copies.model, feed, samples, change, checkpoint=True)
        if subset.shape[1] < count and _reads_more_of_rows(changed.tape, entry, subset.shape[1]):
            raise ValueError("masks or positions are recomputed for the remaining rows")
        return changed.logits(copies.read_logits)

    def _entry(self, copies: Task) -> tuple[int, bool, int]:
        attended = copies.attended()
        entry, rows, queries = attended.stream.blocks[0].entry, attended.layout.rows, attended.stream.rows
        label = rows.of(entry)
        if label.dim() != 3 or not any(torch.equal(label[..., 0], order) for order in (queries, queries.mT)):
            raise ValueError("the first block's input is not [batch, tokens, width]")
        return entry, torch.equal(label[..., 0], queries), queries.shape[1]


def _reads_more_of_rows(tape: Tape, entry: int, rows: int) -> bool:
    """Return True if calls on the rows read constants that were computed for this number of rows, such as a mask or
    positions. The model computed them as if the remaining rows were the first."""
    carry = reach(tape, [entry])
    read = {o for call in tape.calls if any(carry[o] for o in call.operands) for o in call.operands}
    return any(not carry[o] and rows in tape.shapes[o] and not _is_leaf(tape, o) for o in read)


def _is_leaf(tape: Tape, value: int) -> bool:
    """Return True if a value is a parameter, buffer or input, or a view of it."""
    while value in tape.maker and KINDS.get(tape.maker[value].name) == "view":
        value = tape.maker[value].operands[0]
    return value not in tape.maker


def _scores(
    task: Task, sample: int, rows: Tensor, selected: Tensor, patches: Tensor, batch_size: int, value: Value
) -> Tensor:
    """Return the target ``[k]`` of a sample if only chosen rows ``[k, N]`` of all ``[N, D]`` enter the first block."""
    always = torch.ones_like(selected[0])
    always[patches] = False
    single = task.inputs.select(slice(sample, sample + 1))
    values = []
    spans = range(0, len(selected), batch_size)
    for start in task.progress(spans, f"TIS {sample + 1}", len(spans)):
        entering = selected[start : start + batch_size] | always
        subset = torch.stack([rows[mask] for mask in entering])
        repeated = single.tensor.repeat_interleave(len(subset), 0)
        copies = replace(single.with_tensor(repeated), others=task.inputs.others)
        try:
            values.append(value(replace(task, inputs=copies), subset))
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, WhyformerError):
                raise
            raise task.refuse("its blocks need all of their rows") from error
    return torch.cat(values)
