"""The arguments of a model's forward, and the facts known about their features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.mosaic import Mosaic
from whyformer.inputs.feed import is_auxiliary
from whyformer.models.output import with_tensors


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model's forward, and the facts known about their features.

    Attributes:
        args, kwargs: the arguments of the model's forward.
        modality: "image", "text" or "tensor" (a sequence of vectors, or a sound).
        scored: position or name of the argument whose features get scores.
        mask: ``[B, N]`` True at real tokens, False at padding; None without padding.
        special: ``[B, N]`` True at special tokens ([CLS], [SEP], <s> ...); None if unknown.
        features: description of the scored features, passed on to the result.
        notes: for each sample, notes on its preparation (conversions of a picture, ignored arguments).
        fill_ids: (name, id) of tokens that can replace others as "nothing here".
        black, white: ``[C]`` in the model's space; None if unknown.
        samples: ``[B]`` the sample of which each row is a perturbed copy; None if row i is sample i.
        shared: names of arguments that all samples share (the texts that each picture is compared with).
        unbatched: positions and names of arguments without a batch axis: a table, weights, positions ``[1, N]`` of
            several samples.
        name: name of the scored argument in the model's forward.
        masked_by: position or name of the ``attention_mask`` of the scored features; None if they have none.
        transposed: whether vectors are columns, ``[B, D, N]`` (a spectrogram with time last); None until measured on
            the model.
        mosaic: the picture and place of each tile or packed patch, if a processor cut pictures into such.
        others: further inputs whose features get scores, by name; their args and kwargs are empty (see :attr:`sides`).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modality: str
    scored: str | int
    mask: Tensor | None = None
    special: Tensor | None = None
    features: Features = field(default_factory=Features)
    notes: list[list[str]] | None = None
    fill_ids: tuple[tuple[str, int], ...] = ()
    black: tuple[float, ...] | None = None
    white: tuple[float, ...] | None = None
    samples: Tensor | None = None
    shared: frozenset[str] = frozenset()
    unbatched: frozenset[str | int] = frozenset()
    name: str = ""
    masked_by: str | int | None = None
    transposed: bool | None = None
    mosaic: Mosaic | None = None
    others: Mapping[str, Inputs] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Inputs]:
        """Each input whose features get scores, by name, the main one first, with the arguments of the forward."""
        others = {n: replace(other, args=self.args, kwargs=self.kwargs) for n, other in self.others.items()}
        return {self.name: self, **others}

    def with_sides(self, sides: Mapping[str, Inputs]) -> Inputs:
        """Return inputs with these facts about each scored input. The first becomes the main one."""
        main, *others = (replace(side, args=(), kwargs={}, others={}) for side in sides.values())
        common = {name: getattr(self, name) for name in ("args", "kwargs", "samples", "shared", "unbatched")}
        return replace(main, **common, others={other.name: other for other in others})

    def with_main(self, name: str) -> Inputs:
        """Return the same inputs with another one as the main input."""
        sides = self.sides
        return replace(self.with_sides({name: sides[name], **sides}), notes=self.notes)

    def is_per_token(self, name: str | int, value: Tensor) -> bool:
        """Return whether an argument has numbers for each token of the scored text, such as its mask or boxes. False
        for arguments of another input (``decoder_attention_mask``). A mask may begin with the tokens of a cache."""
        shape, other = self.tensor.shape, {o.partition("_")[0] for o in self.others if o != self.name}
        if value.dim() < 2 or name in {n for o in self.others.values() for n in (o.scored, o.masked_by)}:
            return False
        if isinstance(name, int):
            return value.shape[1] == shape[1] and not value.is_floating_point()
        is_own = name == self.masked_by
        if not is_auxiliary(name) or (not is_own and name.partition("_")[0] in other - {self.name.partition("_")[0]}):
            return False
        is_own_mask = is_own and value.dim() == 2 and value.shape[1] > shape[1]
        return is_own_mask or value.shape[1] == shape[1] or ("mask" in name and value.shape[-1] == shape[1])

    @property
    def tensor(self) -> Tensor:
        """The scored tensor: ``[B, C, H, W]`` pixels, ``[B, N]`` ids, ``[B, N, D]`` vectors or a sound ``[B, N]``."""
        value = self.args[self.scored] if isinstance(self.scored, int) else self.kwargs[self.scored]
        assert isinstance(value, Tensor)
        return value

    @property
    def axis(self) -> int:
        """Axis of the tensor that indexes features, for inputs other than pictures."""
        return 2 if self.transposed else 1

    @property
    def extent(self) -> tuple[int, ...]:
        """(batch, features), or (batch, choices, features) for multiple choice, for inputs other than pictures."""
        shape = self.tensor.shape
        return tuple(shape[:3] if self.choices else (shape[0], shape[self.axis]))

    @property
    def batch(self) -> int:
        return int(self.tensor.shape[0])

    def check_rows(self, logits: Tensor) -> None:
        """Raise if the number of rows of logits differs from the number of samples: pictures of several samples packed
        into one row, or an input ``[N, B, ...]`` of a model whose batch axis comes second."""
        if len(logits) == self.batch:
            return
        reason = f"the model returns {len(logits)} rows of logits for a batch of {self.batch} in {self.name}"
        if self.tensor.dim() > 1 and self.tensor.shape[1] == len(logits):
            raise InputError(
                f"{reason}, whose second axis has length {len(logits)}: the batch axis must come first. Wrap the model "
                f"in a module that passes it {self.name}.transpose(0, 1), and pass {self.name} as [B, N, ...]"
            )
        raise InputError(f"{reason}, so their correspondence is unknown: explain the samples one at a time")

    @property
    def choices(self) -> int | None:
        """Number of texts per sample for ids ``[B, choices, N]`` (multiple choice), which the model reads separately;
        else None."""
        tensor = self.tensor
        return int(tensor.shape[1]) if tensor.dim() == 3 and not tensor.is_floating_point() else None

    @property
    def rows(self) -> int:
        """Number of texts or pictures that pass through the blocks."""
        return self.batch * (self.choices or 1)

    @property
    def row_mask(self) -> Tensor | None:
        """``[rows, N]`` True at real tokens."""
        return self.mask.flatten(0, 1) if self.mask is not None and self.mask.dim() == 3 else self.mask

    @property
    def image_size(self) -> tuple[int, int] | None:
        return (int(self.tensor.shape[-2]), int(self.tensor.shape[-1])) if self.modality == "image" else None

    @property
    def feed(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs

    def with_tensor(self, value: Tensor) -> Inputs:
        """Replace the scored tensor; if it holds k copies of each sample, repeat the other arguments too."""
        times = value.shape[0] // self.batch

        def repeated(rows: Tensor) -> Tensor:
            return rows if times == 1 else rows.repeat_interleave(times, 0)

        more = self._of_samples(repeated)
        changed = more.with_arguments(lambda place, other: value if place == self.scored else other)
        masks = lambda rows: repeated(self.by_sample(rows)).reshape(-1, *rows.shape[1:])  # noqa: E731
        others = {n: side if n in self.shared else side.with_masks(masks) for n, side in self.others.items()}
        return replace(changed, others=others)

    def _of_samples(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply ``change`` to the rows ``[B, ...]`` of every tensor with a batch axis, also in caches and other outputs
        of the model that are among its arguments."""

        def inside(value: Tensor) -> Tensor:
            return change(value) if value.dim() > 1 and len(value) == self.batch else value

        def changed(place: str | int, value: Any) -> Any:
            if place in self.unbatched or place in self.shared:
                return value
            if not isinstance(value, Tensor):
                return with_tensors(value, inside, deep=True)
            if not value.dim() or len(value) % self.batch:
                return value
            return change(self.by_sample(value)).reshape(-1, *value.shape[1:])

        numbers = torch.arange(self.batch, device=self.tensor.device) if self.samples is None else self.samples
        return replace(self.with_masks(change).with_arguments(changed), samples=change(numbers))

    def with_arguments(self, change: Callable[[str | int, Any], Any]) -> Inputs:
        """Replace each argument of the forward by ``change`` of its position or name and its value."""
        args = tuple(change(place, value) for place, value in enumerate(self.args))
        return replace(self, args=args, kwargs={name: change(name, value) for name, value in self.kwargs.items()})

    def with_masks(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply ``change`` to the masks of real and of special tokens."""
        mask, special = (None if t is None else change(t) for t in (self.mask, self.special))
        return replace(self, mask=mask, special=special)

    def by_sample(self, value: Tensor) -> Tensor:
        """Reshape a tensor with equally many rows per sample (packed patches) to ``[B, rows, ...]``."""
        return value.unflatten(0, (self.batch, -1)) if self.is_packed(value) else value

    def is_packed(self, value: Tensor) -> bool:
        """Return whether a tensor has several rows per sample, equally many for each."""
        return len(value) != self.batch and len(value) % self.batch == 0

    def select_features(self, numbers: list[int]) -> Inputs:
        """Select the mask, special tokens and features of some samples or texts, in this order.

        Args:
            numbers: indices of samples; for multiple choice, of texts, where text c of sample b has index b · C + c.
        """
        mask, special = (None if t is None else t.flatten(0, -2)[numbers] for t in (self.mask, self.special))
        return replace(self, mask=mask, special=special, features=self.features.of_texts(numbers), notes=None)

    def of_samples(self, numbers: list[int]) -> Inputs:
        """Select samples from all inputs, except those that all samples share. Drops data for display."""
        others = {n: side if n in self.shared else side.select_features(numbers) for n, side in self.others.items()}
        return replace(self.select(torch.tensor(numbers, device=self.tensor.device)), others=others)

    def select(self, rows: slice | Tensor) -> Inputs:
        """Select samples of the main input. Drops data for display."""
        selected = self._of_samples(lambda value: value[rows])
        return replace(selected, features=Features(), notes=None, mosaic=None, others={})
