"""Remove features from an input: replace them by a baseline, and run the model on the results.

The table :data:`whyformer.baselines.BASELINES` lists the baselines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whyformer.baselines import BASELINES, TOKENS, Filling, names_for
from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.inputs.feed import first_convolution
from whyformer.models.output import vocabulary_size

if TYPE_CHECKING:
    from whyformer.methods.task import Task

MAX_CELLS = 2048
Job = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class Removal:
    """Removal of features from an input: replacement by a filler, or deletion.

    Attributes:
        inputs: the input.
        features: ``[B, P]`` True at features that may be removed (no special tokens, no padding).
        baseline: name of the baseline.
        filler: replacement of the features: pixels ``[B, C, H, W]``, vectors ``[B, N, D]`` (or ``[B, D, N]``), or a
            token id.
        grid: (rows, columns) of cells, for pictures.
        cell: (height, width) of a cell in pixels, for pictures.
        choice: ``[B]`` for multiple choice, the text of each sample from which tokens are removed.
    """

    inputs: Inputs
    features: Tensor
    baseline: str
    filler: Any
    grid: tuple[int, int] | None = None
    cell: tuple[int, int] | None = None
    choice: Tensor | None = None

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """(left, top, right, bottom) of the grid in pixels; None for other inputs. The grid extends beyond a picture
        whose sides are not multiples of the cell's."""
        if self.grid is None or self.cell is None:
            return None
        return 0.0, 0.0, float(self.grid[1] * self.cell[1]), float(self.grid[0] * self.cell[0])

    def without(self, jobs: Sequence[Job]) -> Inputs:
        """Return the input with one row per job (sample, features to remove)."""
        samples = torch.tensor([sample for sample, _ in jobs])
        removed = torch.zeros(len(jobs), self.features.shape[1], dtype=torch.bool)
        for i, (_, features) in enumerate(jobs):
            removed[i, torch.as_tensor(features, dtype=torch.long)] = True
        samples, removed = (t.to(self.inputs.tensor.device) for t in (samples, removed))
        copies = self.inputs.select(samples)
        x = copies.tensor
        if self.grid is not None and self.cell is not None:
            area = removed.reshape(-1, *self.grid).repeat_interleave(self.cell[0], 1).repeat_interleave(self.cell[1], 2)
            area = area[:, : x.shape[-2], : x.shape[-1]]
            area = area.reshape(len(jobs), *[1] * (x.dim() - 3), *area.shape[1:])
            return copies.with_tensor(torch.where(area, self.filler[samples], x))
        if self.choice is not None:
            removed = torch.zeros_like(x, dtype=torch.bool).index_put(
                (torch.arange(len(jobs), device=x.device), self.choice.to(x.device)[samples]), removed
            )
        if self.baseline == "delete":
            return self._delete(copies, removed)
        if isinstance(self.filler, Tensor):
            at = removed if x.dim() == 2 else removed[:, None] if copies.axis == 2 else removed[..., None]
            return copies.with_tensor(torch.where(at, self.filler[samples], x))
        return copies.with_tensor(x.masked_fill(removed, self.filler))

    def _delete(self, copies: Inputs, removed: Tensor) -> Inputs:
        """Delete tokens: shift the others, pad on the side that is padded already, and drop columns of padding only.

        Masks, types, boxes and positions of these tokens move with them; other inputs and their masks stay.
        """
        mask = copies.mask if copies.mask is not None else torch.ones_like(removed)
        pads_left = self.inputs.mask is not None and not bool(self.inputs.mask[:, 0].all())
        order = torch.argsort(~removed if pads_left else removed, dim=1, stable=True)
        real = (mask & ~removed).gather(1, order)
        columns = real.any(0).nonzero()[:, 0]
        order, real = order[:, columns], real[:, columns]
        removed = removed.gather(1, order)
        # each token takes the position of the removed one before it
        rank = mask.flip(1).cumsum(1).flip(1)
        last = mask & (rank <= mask.sum(1, keepdim=True) - real.sum(1, keepdim=True))
        places = torch.argsort(~last if pads_left else last, dim=1, stable=True)[:, columns]

        def move(name: str | int, value: Any) -> Any:
            if name == self.inputs.scored:
                return _picked(value, order, 1).masked_fill(removed, self.filler)
            if not isinstance(value, Tensor) or not self.inputs.is_per_token(name, value):
                return value
            if name == self.inputs.masked_by and value.dim() == 2:  # it begins with the tokens of a cache
                return torch.cat([value[:, : value.shape[1] - mask.shape[1]], real.to(value.dtype)], 1)
            if "mask" not in str(name) or value.dim() == 2:
                return _picked(value, places if "position" in str(name) else order, 1)
            for axis in range(1, value.dim()):
                value = _picked(value, order, axis) if value.shape[axis] == mask.shape[1] else value
            nothing = torch.finfo(value.dtype).min if value.is_floating_point() else 0
            return value.masked_fill(removed.view(len(removed), *[1] * (value.dim() - 2), -1), nothing)

        return replace(copies.with_arguments(move), mask=real, special=None)

    def refuse_nothing(self, jobs: Sequence[Job], who: str) -> None:
        """Raise if a job would delete every token of its text; ``who`` begins the message."""
        if self.baseline != "delete":
            return
        width = self.features.shape[1]
        real = [width] * self.inputs.batch if self.inputs.mask is None else self.inputs.mask.sum(1).tolist()
        for sample, features in jobs:
            if len(features) >= real[sample]:
                raise InputError(
                    f"{who}: baseline 'delete' would delete every token of sample {sample}, which has no special "
                    "tokens, and the model cannot read an empty text: replace them by a token instead (mask, unk, pad, "
                    "or its id)"
                )


def removal(
    task: Task,
    baseline: str | int | None = None,
    *,
    patch: int | None = None,
    window: int = 1,
    prefer: Sequence[str] = tuple(TOKENS),
    blur: tuple[float, int | None] | None = None,
    choice: Tensor | None = None,
) -> Removal:
    """Return the removal of features from the task's input; settings as in :func:`occlusion`.

    Args:
        baseline: name of a baseline, or id of the replacing token.
        patch: side of the cells of a picture in pixels; default: the model's patch.
        window: side of occlusion's window in cells; scales the default blur.
        prefer: text baselines by preference; the default is the first that the tokenizer has.
        blur: (σ, radius) in pixels, radius None for 3σ; by default σ is the window's longer side.
        choice: ``[B]`` for multiple choice, a text of each sample; default: the one that the target is about.

    Raises:
        InputError: the baseline is not available for this input or its tokenizer.
    """
    inputs, x = task.inputs, task.inputs.tensor
    if inputs.modality == "text":
        name, token = _text_filler(task, baseline, prefer)
        content = content_of(inputs) & ~_ends(task)
        if inputs.choices is None:
            return Removal(inputs, content & task.plain_tokens(), name, token)
        text_index = task.value_index(task.forward()).cpu() if choice is None else choice
        return Removal(inputs, content[torch.arange(inputs.batch), text_index], name, token, choice=text_index)
    baseline, allowed = "zero" if baseline is None else baseline, names_for(inputs.modality)
    if not isinstance(baseline, str) or baseline not in allowed:
        kind = "a picture" if inputs.modality == "image" else "a sequence of vectors"
        listed = ", ".join(allowed)
        raise InputError(f"{task.method}: baseline {baseline!r} is not for {kind}; its baselines are {listed}")
    if inputs.modality != "image":
        filler = fill(baseline, Filling(x, (inputs.axis,)))
        return Removal(inputs, torch.ones(inputs.extent, dtype=torch.bool), baseline, filler)
    height, width = x.shape[-2:]
    cell = (patch, patch) if patch is not None else patch_size(task.model)
    while patch is None and math.ceil(height / cell[0]) * math.ceil(width / cell[1]) > MAX_CELLS:
        cell = (2 * cell[0], 2 * cell[1])
    grid = (math.ceil(height / cell[0]), math.ceil(width / cell[1]))
    blur = blur or (float(max(cell) * window), None)
    filler = fill(baseline, Filling(x, black=inputs.black, white=inputs.white, blur=blur))
    return Removal(inputs, torch.ones(x.shape[0], grid[0] * grid[1], dtype=torch.bool), baseline, filler, grid, cell)


def _picked(value: Tensor, numbers: Tensor, axis: int) -> Tensor:
    """Select the elements ``numbers`` ``[J, K]`` of each row along an axis of a tensor with J rows, or one for all."""
    shape = [len(numbers), *value.shape[1:]]
    index = numbers.view(len(numbers), *[1] * (axis - 1), -1, *[1] * (value.dim() - axis - 1))
    shape[axis] = numbers.shape[1]
    return value.expand(len(numbers), *value.shape[1:]).gather(axis, index.expand(shape))


def _ends(task: Task) -> Tensor:
    """Return ``[B, N]`` True at end-of-text tokens, for inputs without a tokenizer. They stay, because models may pool
    the text there."""
    ids = task.inputs.tensor.cpu()
    end = getattr(getattr(task.model, "config", None), "eos_token_id", None)
    ends = [end] if isinstance(end, int) else end if isinstance(end, list) else []
    if task.inputs.special is not None or not ends:
        return torch.zeros(1, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(ends))


def content_of(inputs: Inputs) -> Tensor:
    """Return ``[B, N]`` True at tokens that are neither special nor padding."""
    content = torch.ones(inputs.extent, dtype=torch.bool)
    for flags, keep in ((inputs.mask, True), (inputs.special, False)):
        if flags is not None and flags.shape == content.shape:
            content &= (flags if keep else ~flags).cpu()
    return content


def fill(name: str, filling: Filling) -> Tensor:
    """Return the baseline ``[B, C, H, W]`` of a picture or ``[B, N, D]`` of vectors."""
    row = BASELINES.get(name)
    if row is None or row.fill is None:
        names = (other for other, row in BASELINES.items() if row.fill is not None)
        raise InputError(f"the baseline of pictures and vectors must be one of {', '.join(names)}, not {name!r}")
    filler: Any = row.fill(filling)
    if not isinstance(filler, Tensor) or filler.shape != filling.values.shape:
        shape, got = list(filling.values.shape), type(filler).__name__
        got = str(list(filler.shape)) if isinstance(filler, Tensor) else got
        raise InputError(
            f"the baseline {name!r} must return a tensor of the input's shape, {shape}, not {got}: use "
            "expand_as(filling.values)"
        )
    return filler


def _text_filler(task: Task, baseline: str | int | None, prefer: Sequence[str]) -> tuple[str, int]:
    token_ids, method, config = dict(task.inputs.fill_ids), task.method, getattr(task.model, "config", None)
    in_place = task.counted or task.inputs.choices is not None
    if isinstance(baseline, int) and not isinstance(baseline, bool):
        size = vocabulary_size(task.model)
        if baseline < 0 or (size is not None and baseline >= size):
            of_size = "" if size is None else f" of {size}"
            raise InputError(f"{method}: token {baseline} is outside the model's vocabulary{of_size}")
        return f"token {baseline}", baseline
    if baseline is None:
        masked = ["delete"] if task.inputs.masked_by is not None and not in_place else []
        tokens = [name for name in prefer if name in token_ids]
        order = [*masked, *tokens] if task.inputs.special is None else [*tokens, *masked]
        baseline = next(iter(order), None)
    if baseline == "delete":
        if task.inputs.choices is not None:
            raise InputError(f"{method}: baseline 'delete' does not work for multiple choice: choose a token")
        pad = getattr(config, "pad_token_id", None)
        return baseline, token_ids.get("pad", pad if isinstance(pad, int) else 0)
    available = ", ".join(token_ids) or "none"
    if baseline is None:
        raise InputError(
            f"{method}: no token is known that means 'nothing here'. There is no tokenizer with a mask, unknown or "
            "padding token, and tokens cannot be deleted, because there is no attention_mask or the target is at a "
            "token's position: pass a token's id, baseline=..."
        )
    if baseline not in names_for("text"):
        raise InputError(
            f"{method}: baseline {baseline!r} is not for text; its baselines are {', '.join(names_for('text'))}"
        )
    if baseline not in token_ids:
        owner = "config" if task.inputs.special is None else "tokenizer"
        reason = f"the {owner} has no {baseline} token (it has: {available})" if token_ids else "there is no tokenizer"
        raise InputError(f"{method}: {reason}: choose another baseline, or pass the token's id, baseline=...")
    return baseline, token_ids[baseline]


def patch_size(model: nn.Module) -> tuple[int, int]:
    """Return (height, width) of a patch in pixels from the config (Hugging Face), the model (timm, torchvision), or
    the convolution that it begins with, if its windows do not overlap; 16 by default."""
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "vision_config", None), getattr(model, "patch_embed", None), model):
        size = getattr(owner, "patch_size", None)
        if isinstance(size, int) and size > 0:
            return size, size
        if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(s, int) for s in size):
            return size[-2], size[-1]
    first = first_convolution(model)
    if first is not None and first.kernel_size == first.stride != (1, 1):
        return first.kernel_size[0], first.kernel_size[1]
    return 16, 16


def logits_without(task: Task, removed: Removal, jobs: Sequence[Job], batch_size: int, description: str) -> Tensor:
    """Return the logits ``[len(jobs), C]`` of the input without each job's features, ``batch_size`` rows at a time."""
    removed.refuse_nothing(jobs, task.method)
    if removed.baseline == "delete" and task.counted:
        raise InputError(
            f"{task.method}: the target is at a token's position, which baseline 'delete' would change: replace tokens "
            "by another instead (mask, unk, pad, or its id)"
        )
    batch_size, places = task.at_once(batch_size), [list(range(len(jobs)))]
    if removed.baseline == "delete" and task.inputs.masked_by is None:
        # without a mask, padding would be read as text, so only texts of equal length are batched
        by_length = sorted(places[0], key=lambda j: len(jobs[j][1]))
        places = [list(group) for _, group in groupby(by_length, key=lambda j: len(jobs[j][1]))]
    chunks = [some[i : i + batch_size] for some in places for i in range(0, len(some), batch_size)]
    rows = torch.zeros(0)
    for chunk in task.progress(chunks, description, len(chunks)):
        logits = task.forward(removed.without([jobs[j] for j in chunk]))
        rows = logits.new_zeros(len(jobs), logits.shape[1]) if not len(rows) else rows
        rows[chunk] = logits
    return rows


def values_of(target: Callable[[Tensor], Tensor], rows: Tensor, samples: Sequence[int], logits: Tensor) -> Tensor:
    """Return the target ``[M]`` of each row ``[M, C]``, where row i is a changed copy of sample ``samples[i]``.

    A target may hold one class per sample, so each row is put in its sample's place in the unchanged ``logits``
    ``[B, C]``.
    """
    place = torch.tensor(list(samples), device=rows.device)
    turns: dict[int, Iterator[int]] = defaultdict(count)
    turn = torch.tensor([next(turns[sample]) for sample in samples], device=rows.device)
    values = rows.new_zeros(len(rows))
    for k in turn.unique().tolist():
        now = turn == k
        table = logits.clone()
        table[place[now]] = rows[now]
        values[now] = target(table)[place[now]].to(values.dtype)
    return values
