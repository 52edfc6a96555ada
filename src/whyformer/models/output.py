"""What a model returned: its tensors by name and the tokens they are of."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.errors import InputError

_HIDDEN = ("last_hidden_state", "pooler_output", "hidden_states", "image_embeds", "text_embeds", "reconstruction")
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def decodes(model: nn.Module) -> bool:
    """Whether an encoder reads and a decoder writes, as the model's config says."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


@dataclass(frozen=True)
class End:
    """The function that a model's logits go through at its end.

    Attributes:
        name: "sigmoid", "softmax", "log_softmax" or "logsigmoid"; "" where there is none, and only the axis of samples
            is restored that the model leaves out for one sample.
        axis: the axis along which it normalises, from the end.
        value: what it was applied to, in the shape of what it returned, with an axis of samples.
    """

    name: str
    axis: int
    value: Tensor

    def applied(self) -> Tensor:
        """What the function makes of it: what the model returned."""
        if not self.name:
            return self.value
        return getattr(functional, self.name)(self.value, **({"dim": self.axis} if "softmax" in self.name else {}))


@dataclass(frozen=True)
class Output:
    """What a model returned, and for what.

    Attributes:
        raw: as the model's forward gives it.
        args, kwargs: what was fed.
        samples: ``[B]`` which sample of the batch that is explained each row is a copy of; None if row i is sample i.
        end: the function that the logits went through at the model's end, where there is one.
    """

    model: nn.Module
    raw: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: Tensor | None = None
    end: End | None = None

    def with_end(self, end: End | None) -> Output:
        """The same with this end function."""
        return self if end is None else replace(self, end=end)

    def as_returned(self) -> Output:
        """The same with its end function as a part of what is read."""
        end = self.end
        return self if end is None or not end.name else replace(self, end=End("", end.axis, end.applied()))

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The tensors of the output by name, or by number; a loss is none of them."""
        raw = self.raw
        if isinstance(raw, Tensor):
            return {"": raw}
        if isinstance(raw, Mapping):
            found: Any = raw.items()
        elif isinstance(raw, list | tuple):
            found = enumerate(raw)
        else:
            found = getattr(raw, "__dict__", {}).items()
        tensors = {str(n): t for n, t in found if isinstance(t, Tensor)}
        return tensors if len(tensors) == 1 else {n: t for n, t in tensors.items() if t.dim() or n == "logits"}

    @property
    def logits(self) -> Tensor | None:
        """The tensor that is called logits, or that can be nothing else; None where there are several heads or none.
        Where the model ends in a function of its logits, what that was applied to."""
        return self.returned if self.end is None else self.end.value

    @cached_property
    def returned(self) -> Tensor | None:
        """That tensor as the model returned it."""
        for name in ("logits", "logits_per_image"):
            if name in self.named:
                return self.named[name]
        if not self.named and hasattr(self.raw, "logits"):  # a property
            return self.raw.logits if isinstance(self.raw.logits, Tensor) else None
        found = [t for t in self.named.values() if t.is_floating_point()]
        if not found or any(name in self.named for name in _HIDDEN):
            return None
        if isinstance(self.raw, list | tuple):  # the first, unless another might be meant as well
            return None if any(t.dim() == 2 and len(t) == len(found[0]) for t in found[1:]) else found[0]
        return found[0] if len(found) == 1 else None

    @cached_property
    def dense(self) -> Tensor | None:
        """``[B, C, h, w]`` numbers of pixels; a depth ``[B, h, w]`` is of one class."""
        listed = {"logits": self.logits, **{n: t for n, t in self.named.items() if not n.endswith(("embeds", "state"))}}
        found = next((t for t in listed.values() if t is not None and t.dim() == 4 and t.is_floating_point()), None)
        depth = self.named.get("predicted_depth")
        return found if found is not None or depth is None or depth.dim() != 3 else depth[:, None]

    @cached_property
    def given(self) -> dict[str, Any]:
        """What was fed, by the names of the model's forward."""
        named = dict(self.kwargs)
        if self.args:
            with contextlib.suppress(TypeError, ValueError):  # no signature to be read
                named |= inspect.signature(self.model.forward).bind_partial(*self.args).arguments
        return named

    @cached_property
    def tokens(self) -> tuple[str, Tensor] | None:
        """(name, ids ``[B, N]`` or vectors ``[B, N, D]``) of the tokens whose logits come out: a decoder's own."""
        for name in _TOKENS:
            if isinstance(self.given.get(name), Tensor):
                return name, self.given[name]
        ids = ((n, t) for n, t in self.given.items() if isinstance(t, Tensor) and t.dim() == 2)
        beside = ("mask", "type", "position")
        return next(((n, t) for n, t in ids if not t.is_floating_point() and not any(b in n for b in beside)), None)

    def rows(self, value: Tensor) -> Tensor:
        """``[1, C]`` of a tensor ``[C]`` or a single number, where one sample was fed; else the tensor."""
        if value.dim() > 1:
            return value
        one = len(self.samples) == 1 if self.samples is not None else self._one_fed
        return value.reshape(1, -1) if one else value

    @property
    def _one_fed(self) -> bool:
        fed = [v for v in self.given.values() if isinstance(v, Tensor) and v.dim() > 1]
        return bool(fed) and all(len(v) == 1 for v in fed)

    @cached_property
    def batch(self) -> int:
        """Number of rows."""
        if self.samples is not None:
            return len(self.samples)
        tensors = [*self.named.values(), *(v for v in self.given.values() if isinstance(v, Tensor) and v.dim())]
        return len(tensors[0]) if tensors else 1

    def real(self, count: int) -> Tensor:
        """``[B, N]`` True at the real ones of the N tokens that come out."""
        mask = self.mask(count)
        if mask is not None and mask.shape == (self.batch, count):
            return mask.bool().cpu()
        return torch.ones(self.batch, count, dtype=torch.bool)

    def mask(self, count: int) -> Tensor | None:
        """The padding mask of the N tokens that come out, where there is one.

        More rows than a text has stand before it: those of a picture (GIT), of a prompt.
        """
        mask, tokens, decoder = output_mask(self.model, self.args, self.kwargs), self.tokens, decodes(self.model)
        if mask is None or tokens is None or decoder or mask.shape != tokens[1].shape[:2] or mask.shape[1] >= count:
            return mask
        return torch.cat([mask.new_ones(len(mask), count - mask.shape[1]), mask], 1)

    def own(self, value: int | Sequence[int]) -> Tensor:
        """``[B]`` a number for all samples, or one a sample, for each row."""
        numbers = torch.as_tensor(value)
        if not numbers.dim():
            return numbers.expand(self.batch)
        return numbers if self.samples is None else numbers[self.samples.cpu()]

    def places(self, position: int | Sequence[int], count: int) -> Tensor:
        """``[B]`` the rows of ``count`` tokens at these positions among each sample's real tokens.

        Raises:
            InputError: a sample has no such token.
        """
        real = self.real(count)
        wanted, lengths = self.own(position), real.sum(1)
        from_start = torch.where(wanted < 0, wanted + lengths, wanted)
        for i, (said, length) in enumerate(zip(wanted.tolist(), lengths.tolist(), strict=True)):
            if not -length <= said < length:
                raise InputError(
                    f"position {said} is outside sample {i}, which has {length} tokens: 0 to {length - 1}, or from -1 "
                    f"(the last) to {-length}"
                )
        return ((real.cumsum(1) == from_start[:, None] + 1) & real).long().argmax(1)


def output_mask(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The padding mask of the tokens whose logits come out: that of a decoder's own tokens, else the input's.

    A decoder that is given no tokens reads the input's, moved by one. A mask given by position is found by the
    signature of the model's forward.
    """
    given = Output(model, None, args, kwargs).given
    decodes = any(given.get(f"decoder_{name}") is not None for name in ("input_ids", "inputs_embeds", "attention_mask"))
    mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask if isinstance(mask, Tensor) else None


def with_tensors(raw: Any, replacing: Callable[[Tensor], Tensor]) -> Any:
    """Return the same output with each tensor replaced by what the function returns for it."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replacing(value)
        if isinstance(value, End):
            return replace(value, value=one(value.value))
        if isinstance(value, Mapping) and is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{n: one(v) for n, v in value.items()})
        if isinstance(value, dict):
            return {n: one(v) for n, v in value.items()}
        if isinstance(value, list | tuple):
            listed = [one(v) for v in value]
            return type(value)(*listed) if hasattr(value, "_fields") else type(value)(listed)
        if hasattr(value, "logits") and hasattr(value, "__dict__"):
            value = copy.copy(value)
            value.__dict__.update({n: one(v) for n, v in vars(value).items()})
        return value

    return one(raw)
