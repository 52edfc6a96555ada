"""Prompts with pictures: what is fed beside the tokens, and how it goes on behind the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import place_of
from whyformer.inputs.prompts import encode
from whyformer.models.readout import anything, plain_logits


@dataclass(frozen=True, eq=False)
class Beside:
    """What the model reads beside the tokens of a prompt.

    Attributes:
        fixed: arguments of its forward that stay as they are (pixels, grids).
        typed: those with a number for each token of the prompt; ``behind`` for each of the answer.
        pictures: the pictures of the prompt, in order.
        processor: what made them.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, Tensor] = field(default_factory=dict)
    pictures: list[Image.Image] = field(default_factory=list)
    processor: Any = None
    behind: int = 0

    def fed(self, tokens: int) -> dict[str, Any]:
        """The arguments for so many tokens, answer included."""
        longer = {}
        for name, given in self.typed.items():
            more = given.new_full((1, tokens - given.shape[1]), self.behind)
            longer[name] = torch.cat([given, more], 1)
        return {**self.fixed, **longer}


def fitted(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arguments on the model's device, fractions of its type."""
    device, dtype = place_of(model), next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in given.items()}


def with_images(
    model: nn.Module, prompt: Any, images: Any, processor: Any
) -> tuple[list[tuple[list[int], Beside]], bool]:
    """(numbers of tokens and what is read beside them, for each prompt; whether one alone was given).

    Raises:
        InputError: the prompts are no texts, or pictures and prompts do not fit together.
    """
    alone = isinstance(prompt, str)
    prompts = [prompt] if alone else prompt
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(one, str) for one in prompts):
        raise InputError(
            "a prompt with pictures is a text, or a list of texts with as many pictures (or lists of them)"
        )
    groups = [images] if alone else list(images) if isinstance(images, list | tuple) else [images]
    if len(groups) != len(prompts):
        raise InputError(f"{len(prompts)} prompts need as many pictures (or lists of them), not {len(groups)}")
    return [_one(model, text, own, processor) for text, own in zip(prompts, groups, strict=True)], alone


def _one(model: nn.Module, text: str, images: Any, processor: Any) -> tuple[list[int], Beside]:
    encoded, groups = encode(model, text, images, processor)
    ids, encoded = encoded["input_ids"], {n: v for n, v in encoded.items() if n not in ("input_ids", "attention_mask")}
    if len(ids) != 1:
        raise InputError(f"{type(model).__name__} compares texts with pictures and writes nothing: use explain()")
    typed = {n: v for n, v in encoded.items() if v.shape == ids.shape and not v.is_floating_point()}
    fixed = {n: v for n, v in encoded.items() if n not in typed}
    pictures = [p for group in groups for p in group]
    for behind in (0, 1) if typed else (0,):
        beside = Beside(fixed, typed, pictures, processor, behind)
        if not typed or _goes_on(model, ids, beside):
            return ids[0].tolist(), beside
    raise InputError(
        f"{type(model).__name__} reads its prompt together with what follows, so one pass over prompt and answer is "
        "not what it computed while it wrote: explain one token with explain(..., target=targets.Token(-1, ...))"
    )


def _goes_on(model: nn.Module, ids: Tensor, beside: Beside) -> bool:
    """Whether tokens behind the prompt leave the logits of its last row as they are."""

    def at_the_end(tokens: Tensor) -> Tensor:
        given = fitted(model, {"input_ids": tokens, **beside.fed(tokens.shape[1])})
        return plain_logits(model, (), given, lambda output: anything(output)[:, ids.shape[1] - 1])

    one, other = at_the_end(ids), at_the_end(torch.cat([ids, ids[:, -1:]], 1))
    return bool(torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max())))
