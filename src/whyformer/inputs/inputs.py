"""What is fed to a model, and what is known about its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.mosaic import Mosaic


@dataclass(frozen=True)
class Inputs:
    """What is fed to the model, and what is known about its features.

    Attributes:
        args, kwargs: the arguments of the model's forward.
        modality: "image", "text" or "tensor" (a sequence of vectors, or a sound).
        scored: position or name of the argument whose features get scores.
        mask: ``[B, N]`` True at real tokens, False at padding; None if nothing is padded.
        special: ``[B, N]`` True at special tokens ([CLS], [SEP], <s> ...), None if unknown.
        features: what the scores will belong to, carried into the result.
        notes: what was done to each sample (a picture that was read, arguments that were left out), in words.
        fill_ids: (name, id) of tokens that may stand for "nothing here"; black, white: ``[C]`` in the model's space,
            None if unknown.
        samples: ``[B]`` which sample each row is a copy of, in perturbed copies; None: row i is sample i.
        shared: names of arguments that are the same for all samples (the texts that each picture is compared with).
        whole: positions and names of arguments without a batch axis: a table, weights, positions ``[1, N]`` of several
            samples.
        name: what the model's forward calls the scored argument.
        turned: whether its vectors ``[B, D, N]`` stand in columns (a spectrogram whose time comes last); None until it
            was measured on the model.
        mosaic: where on which picture its tiles or packed patches lie, where a processor cut pictures into such.
        others: further inputs whose features get scores, by name; without arguments of their own (see :meth:`side`).
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
    whole: frozenset[str | int] = frozenset()
    name: str = ""
    turned: bool | None = None
    mosaic: Mosaic | None = None
    others: Mapping[str, Inputs] = field(default_factory=dict)

    def side(self, name: str) -> Inputs:
        """The same arguments with another of the inputs as the scored one."""
        return self if name == self.name else replace(self.others[name], args=self.args, kwargs=self.kwargs)

    def with_main(self, name: str) -> Inputs:
        """The same inputs with another of them as the main one."""
        names = (self.name, *self.others)
        others = {n: replace(self.side(n), args=(), kwargs={}, others={}) for n in names if n != name}
        return replace(
            self.side(name), others=others, samples=self.samples, shared=self.shared, whole=self.whole, notes=self.notes
        )

    @property
    def tensor(self) -> Tensor:
        """The scored tensor: ``[B, C, H, W]`` pixels, ``[B, N]`` ids, ``[B, N, D]`` vectors or a sound ``[B, N]``."""
        value = self.args[self.scored] if isinstance(self.scored, int) else self.kwargs[self.scored]
        assert isinstance(value, Tensor)
        return value

    @property
    def axis(self) -> int:
        """Along which axis of the tensor its features stand, of those that are no picture."""
        return 2 if self.turned else 1

    @property
    def extent(self) -> tuple[int, ...]:
        """(batch, features), of a multiple choice (batch, choices, features), of what is no picture."""
        shape = self.tensor.shape
        return tuple(shape[:3] if self.choices else (shape[0], shape[self.axis]))

    @property
    def batch(self) -> int:
        return int(self.tensor.shape[0])

    def check_rows(self, logits: Tensor) -> None:
        """Refuse logits of another number of samples: several that are one in the input (whose pictures are packed into
        one row), or an input ``[N, B, ...]`` of a model that takes tokens before samples."""
        if len(logits) == self.batch:
            return
        said = f"the model gives {len(logits)} rows of logits for {self.batch} of {self.name}"
        if self.tensor.dim() > 1 and self.tensor.shape[1] == len(logits):
            raise InputError(
                f"{said}, whose second axis has {len(logits)}: samples come first, so give a module that hands "
                f"{self.name}.transpose(0, 1) on to the model, and {self.name} [B, N, ...]"
            )
        raise InputError(f"{said}, so which belongs to which is unknown: explain the samples one at a time")

    @property
    def choices(self) -> int | None:
        """Number of texts of each sample, for ids ``[B, choices, N]`` (multiple choice); the model reads them one by
        one."""
        tensor = self.tensor
        return int(tensor.shape[1]) if tensor.dim() == 3 and not tensor.is_floating_point() else None

    @property
    def rows(self) -> int:
        """Number of texts or pictures that go through the blocks."""
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
        """The same with another scored tensor; for k copies of each sample the other arguments are repeated too."""
        times = value.shape[0] // self.batch

        def repeated(rows: Tensor) -> Tensor:
            return rows if times == 1 else rows.repeat_interleave(times, 0)

        made = self._of_samples(repeated)
        args = tuple(value if i == self.scored else a for i, a in enumerate(made.args))
        return replace(made, args=args, kwargs={k: value if k == self.scored else v for k, v in made.kwargs.items()})

    def _of_samples(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with other samples: ``change`` takes the rows ``[B, ...]`` of what has a batch axis."""

        def changed(place: str | int, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or place in self.whole or place in self.shared:
                return value
            if len(value) % self.batch:
                return value
            return change(self.by_sample(value)).reshape(-1, *value.shape[1:])

        args = tuple(changed(i, a) for i, a in enumerate(self.args))
        kwargs = {k: changed(k, v) for k, v in self.kwargs.items()}
        mask, special = (None if t is None else change(t) for t in (self.mask, self.special))
        return replace(self, args=args, kwargs=kwargs, mask=mask, special=special, samples=change(self._numbers))

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(self.batch, device=self.tensor.device) if self.samples is None else self.samples

    def by_sample(self, value: Tensor) -> Tensor:
        """``[B, ...]`` of a tensor in which each sample has as many rows as any other (packed patches)."""
        return value.unflatten(0, (self.batch, -1)) if self.is_packed(value) else value

    def is_packed(self, value: Tensor) -> bool:
        """Whether each sample has several rows of a tensor, as many as any other."""
        return len(value) != self.batch and len(value) % self.batch == 0

    def select_features(self, numbers: list[int]) -> Inputs:
        """What is known of the features of some samples, or of some texts, for scores that are in this order.

        Args:
            numbers: of the samples; in a multiple choice of the texts, where text c of sample b is number b · C + c.
        """
        mask, special = (None if t is None else t.flatten(0, -2)[numbers] for t in (self.mask, self.special))
        return replace(self, mask=mask, special=special, features=self.features.of_texts(numbers), notes=None)

    def of_samples(self, numbers: list[int]) -> Inputs:
        """Some of the samples with all inputs, those that all samples share unchanged (what is only for display is left
        out)."""
        others = {n: one if n in self.shared else one.select_features(numbers) for n, one in self.others.items()}
        return replace(self.select(torch.tensor(numbers, device=self.tensor.device)), others=others)

    def select(self, rows: slice | Tensor) -> Inputs:
        """Some of the samples (what is only for display is left out)."""
        made = self._of_samples(lambda value: value[rows])
        return replace(made, features=Features(), notes=None, mosaic=None, others={})
