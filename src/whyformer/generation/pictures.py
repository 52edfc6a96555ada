"""Prompts with pictures: the arguments of the model's forward in addition to the token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import device_of, dtype_of
from whyformer.inputs.prompts import conversation, encode, is_chat
from whyformer.models.readout import any_tensor, plain_logits


@dataclass(frozen=True, eq=False)
class ExtraArguments:
    """Arguments of the model's forward in addition to the token ids of a prompt.

    Attributes:
        fixed: arguments that do not depend on the answer (pixels, grids).
        per_token: arguments with a number for each token of the prompt, such as token types.
        pictures: the pictures of the prompt, in order.
        processor: the processor that encoded the prompt.
        answer_value: the number in ``per_token`` for each token of the answer.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    per_token: dict[str, Tensor] = field(default_factory=dict)
    pictures: list[Image.Image] = field(default_factory=list)
    processor: Any = None
    answer_value: int = 0

    def arguments(self, tokens: int) -> dict[str, Any]:
        """Return the arguments for a number of tokens, answer included."""
        extended = {}
        for name, values in self.per_token.items():
            more = values.new_full((1, tokens - values.shape[1]), self.answer_value)
            extended[name] = torch.cat([values, more], 1)
        return {**self.fixed, **extended}


def to_model(model: nn.Module, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move arguments to the model's device, and floats to its precision."""
    device, dtype = device_of(model), dtype_of(model)
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in arguments.items()}


def with_images(
    model: nn.Module, prompt: Any, images: Any, processor: Any
) -> tuple[list[tuple[list[int], ExtraArguments]], bool]:
    """Return (token ids and extra arguments of each prompt, whether a single prompt was passed).

    Raises:
        InputError: a prompt is not a text, or the number of pictures differs from that of the prompts.
    """
    single = isinstance(prompt, str) or is_chat(prompt)
    prompts = [prompt] if single else prompt
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(p, str) or is_chat(p) for p in prompts):
        raise InputError(
            "a prompt with pictures is a text or a list of messages, or a list of these with as many pictures (or "
            "lists of them)"
        )
    groups = [images] if single else list(images) if isinstance(images, list | tuple) else [images]
    groups = [None] * len(prompts) if images is None else groups
    if len(groups) != len(prompts):
        raise InputError(f"{len(prompts)} prompts need as many pictures (or lists of them), not {len(groups)}")
    pairs = zip(prompts, groups, strict=True)
    read = [conversation(p, group, processor) if is_chat(p) else (p, group) for p, group in pairs]
    return [_encoded(model, text, group, processor) for text, group in read], single


def has_pictures(prompt: Any) -> bool:
    """Return whether a message of a conversation, or of one in a list, has a picture."""
    chats = [prompt] if is_chat(prompt) else prompt if isinstance(prompt, list | tuple) else []
    contents = (message.get("content") for chat in chats if is_chat(chat) for message in chat)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def _encoded(model: nn.Module, text: str, images: Any, processor: Any) -> tuple[list[int], ExtraArguments]:
    encoded, groups = encode(model, text, images, processor)
    ids, encoded = encoded["input_ids"], {n: v for n, v in encoded.items() if n not in ("input_ids", "attention_mask")}
    if len(ids) != 1:
        raise InputError(f"{type(model).__name__} compares texts with pictures and generates no text: use explain()")
    per_token = {n: v for n, v in encoded.items() if v.shape == ids.shape and not v.is_floating_point()}
    fixed = {n: v for n, v in encoded.items() if n not in per_token}
    pictures = [p for group in groups for p in group]
    for answer_value in (0, 1) if per_token else (0,):
        extra = ExtraArguments(fixed, per_token, pictures, processor, answer_value)
        if not per_token or _is_causal(model, ids, extra):
            return ids[0].tolist(), extra
    raise InputError(
        f"the tokens of the prompt attend to the answer in {type(model).__name__}, so a pass over both differs from "
        "the passes of the generation: explain one token with explain(..., target=targets.Token(-1, ...))"
    )


def _is_causal(model: nn.Module, ids: Tensor, extra: ExtraArguments) -> bool:
    """Return True if a token after the prompt does not change the logits of its last row."""

    def last_row(tokens: Tensor) -> Tensor:
        arguments = to_model(model, {"input_ids": tokens, **extra.arguments(tokens.shape[1])})
        return plain_logits(model, (), arguments, lambda output: any_tensor(output)[:, ids.shape[1] - 1])

    before, after = last_row(ids), last_row(torch.cat([ids, ids[:, -1:]], 1))
    return bool(torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max())))
