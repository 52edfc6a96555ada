"""``explain``: the one function that most users need."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer import targets
from whyformer.errors import InputError, WhyformerError
from whyformer.explanation import views
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs, prepare
from whyformer.methods import find
from whyformer.methods.task import Scores, Task
from whyformer.models.loading import model_name, opened
from whyformer.models.structure import class_count, class_names

Target = None | int | str | Sequence[int] | Callable[[Tensor], Tensor]
Track = Callable[..., Iterable[Any]]


def explain(
    model: nn.Module | str,
    inputs: Any,
    method: str = "transformer_attribution",
    target: Target = None,
    processor: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    truncate: bool = False,
    progress: bool | Track = False,
    **settings: Any,
) -> Explanation:
    """Explain a prediction: which patches, pixels or tokens made the model say this class.

    Args:
        model: any ``torch.nn.Module`` in eval mode, unmodified; or a name: a hub id, a local folder,
            ``"bundled:digits"``, ``"bundled:sst2"``.
        inputs: a tensor or mapping of tensors as the model's forward takes them (pixels ``[B, C, H, W]``, ids
            ``[B, N]``); or a PIL image, a string, or a list of either, with ``processor``.
        method: a name from :func:`whyformer.methods`.
        target: None (each sample's predicted class), a class index, one index a sample, a class name, or a callable
            from :mod:`whyformer.targets` (logits ``[B, C]`` -> ``[B]``).
        processor: Hugging Face image processor or tokenizer, or a function picture -> tensor; found by itself when
            ``model`` is a name.
        device, dtype: where and in which precision a model given by name is loaded.
        truncate: allow text longer than the model takes to be cut off.
        progress: show a progress bar on long work; or a function (iterable, description, total) -> iterable that
            stands around it, such as another kind of bar (it may raise, to stop the work).
        **settings: the method's settings; see :func:`whyformer.methods`.

    Returns:
        An :class:`~whyformer.Explanation` of the whole batch; a batch of B equals B single runs.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`; each names the cause and the way out.
    """
    chosen = find(method)
    full = chosen.complete(settings)
    name = model if isinstance(model, str) else model_name(model)
    model, processor = opened(model, processor, device=device, dtype=dtype)
    labels, multi_label = class_names(model)
    prepared = prepare(model, inputs, processor, truncate=truncate)
    if chosen.modality != "both" and prepared.modality != chosen.modality:
        raise InputError(
            f"{method} explains {'pictures' if chosen.modality == 'image' else 'text'}, and "
            f"this input is {prepared.modality}"
        )
    resolver = Resolver(target, labels, class_count(model), prepared.batch)
    task = Task(model, prepared, resolver.callable, _progress(progress), method)
    # a user's surrounding no_grad or inference_mode must not change the result
    try:
        with torch.inference_mode(False):
            scores = chosen.function(task, **full)
        explanation = finish(scores, scores.inputs or prepared, resolver, method, full, labels, multi_label)
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = None if isinstance(error, WhyformerError) else wrong_size(model, prepared)
        if reason is None:
            raise
        raise InputError(reason) from error
    finally:
        task.release()
    if not chosen.class_specific:
        explanation.diagnostics.setdefault("class_specific", False)
    return replace(explanation, model=name)


def wrong_size(model: torch.nn.Module, inputs: Inputs) -> str | None:
    """Why a model may have failed on pictures: they are not of the size its configuration names."""
    size = getattr(getattr(model, "config", None), "image_size", None)
    size = (size, size) if isinstance(size, int) else size
    if inputs.modality != "image" or inputs.tensor.dim() != 4 or not isinstance(size, list | tuple):
        return None
    found = tuple(inputs.tensor.shape[-2:])
    if len(size) != 2 or found == tuple(size):
        return None
    return (
        f"the model fails on pictures of {found[0]}×{found[1]}; it is made for {size[0]}×{size[1]}: "
        "pass the pictures themselves with processor=, or resize the tensor"
    )


def finish(
    scores: Scores, inputs: Inputs, resolver: Resolver, method: str, settings: dict[str, Any],
    labels: dict[int, str] | None, multi_label: bool,
) -> Explanation:  # fmt: skip
    """Lay the scores out over what the user gave: patches without prefix tokens, tokens without special ones."""
    values, logits = scores.values.detach(), scores.logits.detach()
    level, grid = "token", None
    if scores.kind == "pixel":
        level = "pixel"
    elif inputs.modality == "image":
        level = "patch"
        found = views.patch_grid(values.shape[-1], scores.grid, None) if scores.kind == "sequence" else (0, scores.grid)
        if found is not None and found[1] is not None:
            prefix, grid = found
            values = values[:, prefix:]
    else:
        hidden = torch.zeros_like(values, dtype=torch.bool)
        if inputs.mask is not None and inputs.mask.shape == values.shape:
            hidden |= ~inputs.mask
        if inputs.special is not None and inputs.special.shape == values.shape:
            hidden |= inputs.special
        values = values.masked_fill(hidden, 0)
    index, names = resolver.describe(logits)
    return Explanation(
        scores=values.cpu(), level=level, method=method, settings=settings, target=index, logits=logits.cpu(),
        target_names=names, grid=None if grid is None else (int(grid[0]), int(grid[1])), tokens=inputs.tokens,
        offsets=inputs.offsets, texts=inputs.texts, labels=labels, multi_label=multi_label,
        image_size=inputs.image_size, pictures=inputs.pictures, originals=inputs.originals,
        geometry=inputs.geometry, diagnostics=dict(scores.diagnostics),
    )  # fmt: skip


class Resolver:
    """From what the user calls the target to a callable and to readable names; checked as early as possible."""

    def __init__(self, target: Target, labels: dict[int, str] | None, classes: int | None, batch: int) -> None:
        if isinstance(target, str):
            target = find_class(target, labels)
        if isinstance(target, Tensor):
            target = target.tolist()
        if isinstance(target, Sequence):
            target = [find_class(t, labels) if isinstance(t, str) else t for t in target]
            if len(target) != batch:
                raise InputError(f"{len(target)} targets for {batch} samples: give one for all, or one a sample")
        for index in [target] if isinstance(target, int) else target if isinstance(target, list) else []:
            if isinstance(index, bool) or not isinstance(index, int):
                raise InputError(f"a class is an index or a name, not {index!r}")
            _check_class(index, classes)
        if not (target is None or isinstance(target, int | list) or callable(target)):
            raise InputError(f"a target is a class index or name, a list of these or a function, not {target!r}")
        self.target, self.labels = target, labels
        self._check_named(classes)

    def _check_named(self, classes: int | None) -> None:
        """The classes that a target of :mod:`whyformer.targets` names."""
        if isinstance(self.target, targets.Logit | targets.Probability | targets.LogProbability | targets.Contrast):
            for named in (self.target.index, getattr(self.target, "other", 0)):
                for index in torch.as_tensor(named).flatten().tolist():
                    _check_class(index, classes)

    def callable(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """The target for samples with these logits."""
        if callable(self.target):
            self._check_named(logits.shape[-1])
            return self.target
        indices = self.indices(logits)
        _check_class(int(indices.max()), logits.shape[-1])
        return targets.Logit(indices.tolist())

    def indices(self, logits: Tensor) -> Tensor:
        if self.target is None:
            return logits.argmax(-1)
        if callable(self.target):
            index = getattr(self.target, "index", -1)
            return torch.as_tensor(index, device=logits.device).expand(logits.shape[0])
        return torch.as_tensor(self.target, device=logits.device).expand(logits.shape[0])

    def describe(self, logits: Tensor) -> tuple[Tensor, list[str]]:
        """(``[B]`` class indices, −1 where a callable names none; readable names)."""
        index = self.indices(logits).cpu().clone()
        names = [(self.labels or {}).get(int(i), str(int(i))) if i >= 0 else "custom target" for i in index]
        other = getattr(self.target, "other", None)
        if callable(self.target) and other is not None:
            rivals = torch.as_tensor(other).expand(len(names)).tolist()
            names = [
                f"{n} rather than {(self.labels or {}).get(int(o), str(int(o)))}"
                for n, o in zip(names, rivals, strict=True)
            ]
        return index, names


def _check_class(index: int, classes: int | None) -> None:
    if index < 0 or (classes is not None and index >= classes):
        known = f"the model has {classes} classes, 0 to {classes - 1}" if classes else "classes count from 0"
        raise InputError(f"class {index} is out of range: {known}")


def find_class(name: str, labels: dict[int, str] | None) -> int:
    """Index of a class by its name, by one of its comma-separated names, or by its number written as text."""
    wanted = name.strip().casefold()
    known = labels or {}
    exact = [i for i, label in known.items() if label.casefold() == wanted]
    parts = [i for i, label in known.items() if wanted in [p.strip().casefold() for p in label.split(",")]]
    for found in (exact, parts):
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(
                f"'{name}' names several classes: {', '.join(f'{i} ({known[i]})' for i in found)}; give the number"
            )
    if wanted.isdigit():
        return int(wanted)
    pool = {p.strip(): i for i, label in known.items() for p in label.split(",")}
    close = difflib.get_close_matches(name, pool, 3)
    inside = [p for p in pool if wanted in p.casefold()][:3]
    hint = f" Did you mean {', '.join(repr(c) for c in dict.fromkeys(close + inside))}?" if close or inside else ""
    raise InputError(
        f"the model has no class '{name}'.{hint}" + ("" if known else " Its config names no classes: give a number.")
    )


def _progress(wanted: bool | Track) -> Track:
    """A function (iterable, description, total) -> iterable: the caller's own, or one that draws a bar if wanted."""
    if not isinstance(wanted, bool):
        return wanted

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterable[Any]:
        if not wanted:
            return work
        from rich.console import Console
        from rich.progress import track as rich_track

        return rich_track(work, description=description, total=total, console=Console(stderr=True))

    return track
