"""Prompts with pictures, combined by the model's processor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS, InputError
from whyformer.explanation.counts import amount
from whyformer.inputs.geometry import picture_features
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.mosaic import measure_mosaic
from whyformer.inputs.pictures import as_rgb, notes, open_picture
from whyformer.models.output import parameters

NAMES = {"text", "images"}
_BESIDE = ("attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids")
_PLACES = ("image_token_id", "video_token_id", "audio_token_id")


def is_prompt(inputs: Any) -> bool:
    """Return whether the inputs are a mapping with "text" and "images" that are not tensors yet."""
    named = isinstance(inputs, Mapping) and set(inputs) == NAMES
    return named and not any(isinstance(v, Tensor) for v in inputs.values())


def image_token(processor: Any) -> str | None:
    """Return the placeholder for a picture in a prompt; None if the processor has none, as of models that compare
    pictures with texts."""
    token = getattr(processor, "image_token", None)
    token = getattr(token, "content", token)
    return token if isinstance(token, str) and token else None


def encode(
    model: nn.Module, text: Any, pictures: Any, processor: Any
) -> tuple[dict[str, Any], list[list[Image.Image]]]:
    """Process prompts and their pictures.

    A text without placeholders for its pictures gets them in front, by the chat template if there is one.

    Args:
        text: a prompt, or a list of one per sample; for a model that compares pictures with texts, the texts.
        pictures: a picture (PIL image or file), a list of several of one prompt, or for several prompts a list of one
            picture or list each.

    Returns:
        (arguments of the model's forward, the pictures of each prompt).

    Raises:
        InputError: the model or the processor takes no pictures, or their number differs from that of the placeholders
            in the text.
    """
    _refuse_without(processor)
    _refuse_blind(model)
    texts, opened, token = _opened(text, pictures, processor)
    images = opened if token is not None else opened[0]
    if not any(opened):
        raise InputError("the list of pictures is empty")
    padding = padding_of(model, processor, len(texts))
    try:
        encoded = dict(processor(images=images, text=texts, return_tensors="pt", **padding))
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the processor fails on this prompt and its pictures: {reason}") from error
    groups = opened if token is not None else [[p] for p in opened[0]]
    return {n: v for n, v in encoded.items() if isinstance(v, Tensor) and n != "labels"}, groups


def _opened(text: Any, pictures: Any, processor: Any) -> tuple[list[str], list[list[Image.Image]], str | None]:
    """Return (texts with placeholders, the pictures of each, the placeholder token)."""
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise InputError("the prompt of a picture must be a text that is not empty, or a list of such texts")
    token = image_token(processor)
    picture_list = pictures if isinstance(pictures, list | tuple) else [pictures]
    nested = len(texts) > 1 and token is not None
    if nested and len(picture_list) != len(texts):
        raise InputError(f"{len(texts)} prompts need {len(texts)} pictures (or lists of them), not {len(picture_list)}")
    groups = [list(g) if isinstance(g, list | tuple) else [g] for g in picture_list] if nested else [list(picture_list)]
    opened = [[_picture(p) for p in group] for group in groups]
    if token is not None:
        texts = [_with_places(t, token, len(group), processor) for t, group in zip(texts, opened, strict=True)]
    return texts, opened, token


def padding_of(model: nn.Module, processor: Any, texts: int) -> dict[str, Any]:
    """Return the arguments of the tokenizer for padding: to the longest text; or to the maximum length for models that
    were trained with it and read the padding (SigLIP). These have a processor that compares pictures with texts, and a
    tokenizer with a maximum length and without an attention mask."""
    tokenizer, config = getattr(processor, "tokenizer", None), getattr(model, "config", None)
    longest = getattr(tokenizer, "model_max_length", None)
    masked = "attention_mask" in getattr(tokenizer, "model_input_names", ["attention_mask"])
    compares = hasattr(processor, "image_processor") and image_token(processor) is None
    if masked or not compares or not isinstance(longest, int) or longest >= 10**9:
        return {"padding": texts > 1}
    positions = getattr(getattr(config, "text_config", config), "max_position_embeddings", longest)
    return {"padding": "max_length", "max_length": min(longest, positions)}


def separate_prompts(inputs: Any, processor: Any) -> list[Any]:
    """Return each prompt with its own pictures, or as a list of its text if it has none; empty if the pictures do not
    belong to single prompts."""
    _refuse_without(processor)
    texts, opened, token = _opened(inputs["text"], inputs["images"], processor)
    if token is None or len(texts) == 1:
        return []
    return [
        {"text": text, "images": pictures} if pictures else [text] for text, pictures in zip(texts, opened, strict=True)
    ]


def shape_of_prompt(model: nn.Module, prompt: Any, processor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for prompts of :func:`separate_prompts` whose tensors can be stacked: the shapes of
    all tensors except token ids and masks, and the numbers of pictures and of placeholders for rows of pictures."""
    if isinstance(prompt, list):
        return ()
    encoded, _ = encode(model, prompt["text"], prompt["images"], processor)
    shapes = {n: tuple(t.shape) for n, t in encoded.items() if "ids" not in n and n not in _BESIDE}
    ids = encoded.get("input_ids")
    return (len(prompt["images"]), 0 if ids is None else places_in(model, ids), *sorted(shapes.items()))


def with_pictures(inputs: Inputs, groups: list[list[Image.Image]], processor: Any) -> Inputs:
    """Add the geometry of each prompt's pictures, and mark their placeholders in the text as special tokens."""
    pictures = [p for group in groups for p in group]
    sides = inputs.sides
    for name, side in sides.items():
        process = None if side.modality == "text" else _process(processor, name, groups, side.tensor)
        if side.modality == "image" and side.tensor.dim() == 4 and len(side.tensor) == len(groups) == len(pictures):
            features = replace(side.features, **({} if process is None else picture_features(process, pictures)))
            sides[name] = replace(side, features=features, notes=[notes(p) for p in pictures])
        elif process is not None and "pixel" in name:
            packed = side.modality == "tensor"
            pieces = partial(_pieces, process, packed)
            sides[name] = replace(side, mosaic=measure_mosaic(pieces, groups, packed=packed))
        if side.modality == "text":
            # the tokenizer's id comes first: Gemma 3's processor has that of the single token that it replaces by many
            owners = (processor.tokenizer, processor)
            candidates = [[getattr(owner, name, None) for owner in owners] for name in _PLACES]
            places = [next((i for i in ids if isinstance(i, int)), -1) for ids in candidates]  # −1 is no token
            is_place = torch.isin(side.tensor, side.tensor.new_tensor(places))
            sides[name] = replace(side, special=is_place if side.special is None else side.special | is_place)
    return inputs.with_sides(sides)


def _process(
    processor: Any, name: str, groups: list[list[Image.Image]], fed: Tensor
) -> Callable[[list[Image.Image]], Tensor] | None:
    """Return a function from the pictures of a prompt to the argument ``name``; None if the processor does not
    reproduce the fed tensor, or accepts no such prompt."""
    token = image_token(processor)

    def process(pictures: list[Image.Image]) -> Tensor:
        text, images = ("a", pictures) if token is None else (token * len(pictures) + "a", [pictures])
        return dict(processor(images=images, text=[text], return_tensors="pt", padding=False))[name]

    with contextlib.suppress(*FOREIGN_ERRORS):
        if _reproduces(process, groups, fed.detach().double().cpu()):
            return process
    return None


def _reproduces(process: Callable[[list[Image.Image]], Tensor], groups: list[list[Image.Image]], fed: Tensor) -> bool:
    """Return whether ``process`` yields the fed tensor, except for tiles that pad the batch."""
    parts = [process(group).double().cpu() for group in groups]
    if sum(map(len, parts)) != len(fed) or any(p.shape[-1] != fed.shape[-1] or p.dim() != fed.dim() for p in parts):
        return False
    close, start = 0.02 * float(fed.abs().max()), 0
    for part in parts:
        expected = fed[start : start + len(part)]
        expected, start = expected[:, : part.shape[1]] if part.dim() == 5 else expected, start + len(part)
        if expected.shape != part.shape or float((expected - part).abs().max()) > close:
            return False
    return True


def _pieces(process: Any, packed: bool, pictures: list[Image.Image]) -> Tensor:
    """Return the tiles ``[T, C, H, W]`` or packed patches ``[P, D]`` of one prompt's pictures."""
    tensor: Tensor = process(pictures)
    if packed:
        return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor.flatten(1)
    return tensor.flatten(0, 1) if tensor.dim() == 5 else tensor


def _picture(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return as_rgb(source)
    if isinstance(source, str) or hasattr(source, "read") or hasattr(source, "__fspath__"):
        return open_picture(source)
    raise InputError(f"a picture of a prompt must be a PIL image or a file, not {type(source).__name__}")


def _with_places(text: str, token: str, pictures: int, processor: Any) -> str:
    """Return the text with a placeholder for each picture."""
    places = text.count(token)
    if places and places != pictures:
        raise InputError(
            f"the prompt has {places} placeholder{'s' * (places > 1)} for pictures ({token}) and {pictures} "
            f"picture{'s' * (pictures > 1)}: pass equally many"
        )
    if places:
        return text
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if template is None:
        return token * pictures + text
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": text}]
    return formatted([{"role": "user", "content": content}], processor)


def formatted(messages: Sequence[Mapping[str, Any]], processor: Any, answer: bool = True) -> str:
    """Apply the chat template of a processor or tokenizer to messages; with ``answer``, up to the beginning of the
    answer.

    Raises:
        InputError: there is no template, or it rejects the messages.
    """
    owner = processor if getattr(processor, "chat_template", None) else getattr(processor, "tokenizer", processor)
    kind = "tokenizer" if owner is processor and not hasattr(processor, "tokenizer") else "processor"
    if not getattr(owner, "chat_template", None):
        raise InputError(f"this {kind} has no chat template, so messages cannot be turned into text: pass a text")
    try:
        return str(owner.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False))
    except Exception as error:  # a template may raise any error
        raise InputError(f"the {kind}'s chat template rejects these messages: {error}") from error


def is_chat(value: Any) -> bool:
    """Return whether a prompt is a conversation: a list of messages."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(m, Mapping) for m in value)


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message, a text or a list of parts, as parts ``{"type": "text", "text": ...}`` and
    ``{"type": "image"}``, the latter perhaps with the picture as ``"image"``.

    Raises:
        InputError: the message is of another form.
    """
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(message.get("role"), str) and isinstance(parts, list | tuple) and parts:
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
        texts = [part["text"] for part, kind in zip(parts, kinds, strict=True) if kind == "text" and "text" in part]
        if len(texts) + kinds.count("image") == len(parts) and all(isinstance(text, str) for text in texts):
            return [dict(part) for part in parts]
    raise InputError(
        "a message has a role, and a content that is a text or a list of parts, {'type': 'text', 'text': ...} or "
        f"{{'type': 'image'}}, not {dict(message)!r:.80}"
    )


def conversation(messages: Any, pictures: Any, processor: Any) -> tuple[str, list[Any]]:
    """Return a conversation as text with a placeholder for each of its pictures, and the pictures.

    Args:
        messages: the messages, see :func:`parts_of`.
        pictures: the pictures of the parts without one, or None. If no part is a picture, they come first in the first
            message of the user.
        processor: the processor, whose chat template is applied.

    Raises:
        InputError: the pictures do not fit the messages, or the template rejects these.
    """
    _refuse_without(processor)
    others = [] if pictures is None else list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    contents = [parts_of(message) for message in messages]
    places = [part for content in contents for part in content if part["type"] == "image"]
    user = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    if others and not places:
        places = [{"type": "image"} for _ in others]
        contents[user] = [*places, *contents[user]]
    missing = sum("image" not in part for part in places)
    if missing != len(others):
        raise InputError(
            f"the messages have {amount(missing, 'image part')} without a picture, and images= has {len(others)}: give "
            "as many, or put each picture in its part, {'type': 'image', 'image': picture}"
        )
    rest = iter(others)
    images = [part.get("image") if "image" in part else next(rest) for part in places]
    templated = [
        {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in content]}
        for message, content in zip(messages, contents, strict=True)
    ]
    text, token = formatted(templated, processor), image_token(processor)
    if token is not None and text.count(token) != len(images):
        raise InputError(f"the chat template does not write one {token} for each picture: pass a text that has them")
    return text, images


def _refuse_without(processor: Any) -> None:
    """Raise unless the processor handles both pictures and text."""
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise InputError(
            "a prompt with a picture needs a processor for both: pass the model's (transformers.AutoProcessor)"
        )


def _refuse_blind(model: nn.Module) -> None:
    """Raise if the model's forward takes no pictures."""
    takes = parameters(model)
    takes_pictures = any(n.startswith(("pixel", "image")) for n in takes)
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values()) and not hasattr(model, "config")
    if takes and not takes_pictures and not anything:
        raise InputError(f"{type(model).__name__} reads no pictures: its forward takes {', '.join(list(takes)[:6])}")


def placeholders(model: nn.Module, ids: Tensor, kinds: Sequence[str] = ("image",)) -> Tensor:
    """Return which ids are placeholders for rows of a picture, or of other kinds of inputs, by the model's config."""
    config = getattr(model, "config", None)
    marks = [getattr(config, f"{kind}_token_{end}", None) for kind in kinds for end in ("id", "index")]
    return torch.isin(ids, ids.new_tensor([mark for mark in marks if isinstance(mark, int)]))


def places_in(model: nn.Module, ids: Tensor) -> int:
    """Return how many of the ids are placeholders for rows of a picture."""
    return int(placeholders(model, ids).sum())
