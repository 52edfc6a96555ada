"""A model's output: its tensors by name, and the tokens that they belong to."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.errors import InputError
from whyformer.tape.calls import attributes, every_tensor
from whyformer.tape.ends import EndFunction

_HIDDEN = ("last_hidden_state", "pooler_output", "hidden_states", "image_embeds", "text_embeds", "reconstruction")
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of the model's forward by name; empty if it has no readable signature."""
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return {}


def decodes(model: nn.Module) -> bool:
    """Return whether the model is an encoder-decoder, by its config."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of token ids that a model reads, by its config or that of its texts; None if unknown."""
    config = getattr(model, "config", None)
    size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    return size if isinstance(size, int) else None


@dataclass(frozen=True)
class Output:
    """A model's output with the arguments of its forward.

    Attributes:
        model: the model.
        raw: the return value of its forward.
        args, kwargs: the arguments of its forward.
        samples: ``[B]`` the sample of the explained batch of which each row is a copy; None if row i is sample i.
        end: the function that the model applies to its logits at the end; None without one.
        before_end: its argument, in the shape of its result.
    """

    model: nn.Module
    raw: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: Tensor | None = None
    end: EndFunction | None = None
    before_end: Tensor | None = None

    def as_returned(self) -> Output:
        """Return the output with its logits replaced by those after the end function, computed from those before it."""
        if self.end is None:
            return self
        axis = {"dim": self.end.axis} if "softmax" in self.end.name else {}
        return replace(self, end=None, before_end=getattr(functional, self.end.name)(self.before_end, **axis))

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The tensors of the output by name, or by position; without a loss."""
        raw = self.raw
        if isinstance(raw, Tensor):
            return {"": raw}
        if isinstance(raw, Mapping):
            items: Any = raw.items()
        elif isinstance(raw, list | tuple):
            items = enumerate(raw)
        else:
            items = attributes(raw).items()
        tensors = {str(n): t for n, t in items if isinstance(t, Tensor)}
        return tensors if len(tensors) == 1 else {n: t for n, t in tensors.items() if t.dim() or n == "logits"}

    @property
    def logits(self) -> Tensor | None:
        """The tensor named logits, or the only one that can be logits, with a batch axis; None for several heads or
        none. If the model has an end function, these are the logits before it."""
        value = self.returned if self.before_end is None else self.before_end
        return None if value is None else self.rows(value)

    @cached_property
    def returned(self) -> Tensor | None:
        """The logits as the model returned them, after its end function."""
        for name in filter(None, ("logits", self.compared)):
            if name in self.named:
                return self.named[name]
        if not self.named and hasattr(self.raw, "logits"):  # a property
            return self.raw.logits if isinstance(self.raw.logits, Tensor) else None
        floats = [t for t in self.named.values() if t.is_floating_point()]
        if not floats or any(name in self.named for name in _HIDDEN):
            return None
        if isinstance(self.raw, list | tuple):  # the first tensor, unless another one could be logits too
            return None if any(t.dim() == 2 and len(t) == len(floats[0]) for t in floats[1:]) else floats[0]
        return floats[0] if len(floats) == 1 else None

    @cached_property
    def compared(self) -> str:
        """Name of the similarities ``[B, texts]`` of each picture, video or sound to texts; "" for other outputs."""
        names = (n for n, t in self.named.items() if n.startswith("logits_per_") and t.dim() == 2)
        return next((n for n in names if not n.endswith("_text")), "")

    @property
    def of_queries(self) -> bool:
        """Whether the output belongs to queries, each with a class and a box or a mask (detectors, MaskFormer)."""
        return any(name in self.named for name in ("pred_boxes", "class_queries_logits"))

    @property
    def depth(self) -> Tensor | None:
        """``[B, h, w]`` values of pixels without classes: a depth, or a tensor of this shape; None for others."""
        value = self.raw if isinstance(self.raw, Tensor) else self.named.get("predicted_depth")
        return value if value is not None and value.dim() == 3 else None

    @cached_property
    def dense(self) -> Tensor | None:
        """``[B, C, h, w]`` values of pixels; a depth ``[B, h, w]`` has one class. None for masks of queries, which are
        not classes."""
        if self.of_queries:
            return None
        values = {"logits": self.logits, **{n: t for n, t in self.named.items() if not n.endswith(("embeds", "state"))}}
        dense = next((t for t in values.values() if t is not None and t.dim() == 4 and t.is_floating_point()), None)
        return dense if dense is not None or "" in self.named or self.depth is None else self.depth[:, None]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by the names of the model's forward."""
        named = dict(self.kwargs)
        if self.args:
            with contextlib.suppress(TypeError, ValueError):  # forward has no readable signature
                named |= inspect.signature(self.model.forward).bind_partial(*self.args).arguments
        return named

    @cached_property
    def tokens(self) -> tuple[str, Tensor] | None:
        """(name, ids ``[B, N]`` or vectors ``[B, N, D]``) of the output's tokens, the decoder's if there is one."""
        for name in _TOKENS:
            if isinstance(self.arguments.get(name), Tensor):
                return name, self.arguments[name]
        ids = ((n, t) for n, t in self.arguments.items() if isinstance(t, Tensor) and t.dim() == 2)
        others = ("mask", "type", "position")
        return next(((n, t) for n, t in ids if not t.is_floating_point() and not any(o in n for o in others)), None)

    def rows(self, value: Tensor) -> Tensor:
        """Reshape a tensor ``[C]`` or a scalar to ``[1, C]`` if a single sample was fed; return others unchanged."""
        if value.dim() > 1:
            return value
        is_single = len(self.samples) == 1 if self.samples is not None else self._is_single
        return value.reshape(1, -1) if is_single else value

    @property
    def _is_single(self) -> bool:
        tensors = [v for v in self.arguments.values() if isinstance(v, Tensor) and v.dim() > 1]
        return bool(tensors) and all(len(v) == 1 for v in tensors)

    @cached_property
    def batch(self) -> int:
        """Number of rows."""
        if self.samples is not None:
            return len(self.samples)
        tensors = [*self.named.values(), *(v for v in self.arguments.values() if isinstance(v, Tensor) and v.dim())]
        return len(tensors[0]) if tensors else 1

    def real(self, count: int) -> Tensor:
        """Return ``[B, N]`` True at the real tokens of the output's N tokens."""
        mask = self.mask(count)
        if mask is not None and mask.shape == (self.batch, count):
            return mask.bool().cpu()
        return torch.ones(self.batch, count, dtype=torch.bool)

    def mask(self, count: int) -> Tensor | None:
        """Return the padding mask of the output's N tokens; None without one.

        It is that of the decoder's tokens if they are passed, else of the input's, which a decoder reads shifted by
        one.
        If the output has more tokens than the text, the others come first: those of a picture (GIT), or of a prompt.
        """
        named, tokens = self.arguments, self.tokens
        decoder = any(named.get(f"decoder_{n}") is not None for n in ("input_ids", "inputs_embeds", "attention_mask"))
        mask = named.get("decoder_attention_mask" if decoder else "attention_mask")
        if not isinstance(mask, Tensor):
            return None
        if tokens is None:
            return mask
        mask = without_cached(mask, tokens[1].shape[1])
        if decodes(self.model) or mask.shape != tokens[1].shape[:2] or mask.shape[1] >= count:
            return mask
        return torch.cat([mask.new_ones(len(mask), count - mask.shape[1]), mask], 1)

    def by_row(self, value: int | Sequence[int]) -> Tensor:
        """Return ``[B]``, a position or index for each row, from one for all samples or a list of one per sample."""
        numbers = torch.as_tensor(value)
        if not numbers.dim():
            return numbers.expand(self.batch)
        return numbers if self.samples is None else numbers[self.samples.cpu()]

    def places(self, position: int | Sequence[int], count: int) -> Tensor:
        """Return ``[B]`` the index among ``count`` tokens of a position among each sample's real tokens.

        Raises:
            InputError: a sample has no such token.
        """
        real = self.real(count)
        positions, lengths = self.by_row(position), real.sum(1)
        from_start = torch.where(positions < 0, positions + lengths, positions)
        for i, (at, length) in enumerate(zip(positions.tolist(), lengths.tolist(), strict=True)):
            if not -length <= at < length:
                raise InputError(
                    f"position {at} is outside sample {i}, which has {length} tokens: 0 to {length - 1}, or from -1 "
                    f"(the last) to {-length}"
                )
        return ((real.cumsum(1) == from_start[:, None] + 1) & real).long().argmax(1)


def without_cached(mask: Tensor, count: int) -> Tensor:
    """Return a padding mask ``[B, N]`` of ``count`` tokens, without earlier tokens whose keys and values were
    passed as a cache."""
    return mask[:, mask.shape[1] - count :] if mask.dim() == 2 and mask.shape[1] > count else mask


def with_tensors(raw: Any, replacing: Callable[[Tensor], Tensor], *, deep: bool = False) -> Any:
    """Return the output with the function applied to each tensor, also in dataclasses and in attributes of the output;
    ``deep`` also to those in other objects, such as caches."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replacing(value)
        if isinstance(value, MutableMapping) and is_dataclass(value):  # which may have further keys
            value = copy.copy(value)
            for name in list(value):
                value[name] = replaced(value[name])
            return value
        if isinstance(value, dict):
            return {n: replaced(v) for n, v in value.items()}
        if isinstance(value, list | tuple):
            items = [replaced(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        is_output = value is raw or is_dataclass(value) or hasattr(value, "logits")
        if (is_output or deep) and not isinstance(value, type) and next(every_tensor(value), None) is not None:
            value = copy.copy(value)
            for name, attribute in attributes(value).items():
                object.__setattr__(value, name, replaced(attribute))
        return value

    return replaced(raw)
