"""A prompt with its pictures, put together by a model's own processor."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS, InputError
from whyformer.inputs.geometry import measure_geometry
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.mosaic import measure_mosaic
from whyformer.inputs.pictures import as_rgb, notes, open_picture

NAMES = {"text", "images"}
_BESIDE = ("attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids")
_PLACES = ("image_token_id", "video_token_id", "audio_token_id")


def is_prompt(inputs: Any) -> bool:
    """Whether these are words and pictures, and no tensors yet: a mapping with "text" and "images"."""
    named = isinstance(inputs, Mapping) and set(inputs) == NAMES
    return named and not any(isinstance(v, Tensor) for v in inputs.values())


def encode(
    model: nn.Module, text: Any, pictures: Any, processor: Any
) -> tuple[dict[str, Any], list[list[Image.Image]]]:
    """(what the model's forward takes, the pictures of each) of prompts and their pictures.

    A text without a place for its pictures gets one in front, as the chat template says where the model has one.

    Args:
        text: a prompt, or one a sample. Of a model that compares pictures with texts, the texts.
        pictures: a picture (PIL image or file), several of one prompt, or for several prompts one or several each.

    Raises:
        InputError: the model or the processor reads no pictures, or they do not fit the places in the text.
    """
    _refuse_without(processor)
    _refuse_blind(model)
    texts, opened, token = _opened(text, pictures, processor)
    given = opened if token is not None else opened[0]
    if not any(opened):
        raise InputError("the list of pictures is empty")
    try:
        made = dict(processor(images=given, text=texts, return_tensors="pt", padding=len(texts) > 1))
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"the processor takes no such prompt and pictures: {said}") from error
    groups = opened if token is not None else [[p] for p in opened[0]]
    return {n: v for n, v in made.items() if isinstance(v, Tensor) and n != "labels"}, groups


def _opened(text: Any, pictures: Any, processor: Any) -> tuple[list[str], list[list[Image.Image]], str | None]:
    """(the texts with places for their pictures, the pictures of each, what such a place is called)."""
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise InputError("a prompt of a picture is a text that is not empty, or a list of such texts")
    token = _word(getattr(processor, "image_token", None))
    listed = pictures if isinstance(pictures, list | tuple) else [pictures]
    nested = len(texts) > 1 and token is not None
    if nested and len(listed) != len(texts):
        raise InputError(f"{len(texts)} prompts need as many pictures (or lists of them), not {len(listed)}")
    groups = [list(g) if isinstance(g, list | tuple) else [g] for g in listed] if nested else [list(listed)]
    opened = [[_picture(p) for p in group] for group in groups]
    if token is not None:
        texts = [_with_places(t, token, len(group), processor) for t, group in zip(texts, opened, strict=True)]
    return texts, opened, token


def unstackable(model: nn.Module, inputs: Any, processor: Any) -> list[Any]:
    """Each prompt by itself where the tensors of these prompts do not stack, else an empty list.

    Tensors stack if those of every prompt have the same shapes, but for the number of tokens, and its text has as many
    places for rows of pictures. A prompt without a picture is returned as its text.
    """
    _refuse_without(processor)
    texts, opened, token = _opened(inputs["text"], inputs["images"], processor)
    if token is None or len(texts) == 1:
        return []
    singles = [
        {"text": text, "images": pictures} if pictures else text for text, pictures in zip(texts, opened, strict=True)
    ]
    return singles if len({_shape(model, one, processor) for one in singles}) > 1 else []


def _shape(model: nn.Module, prompt: Any, processor: Any) -> tuple[Any, ...]:
    """What two prompts must have alike so that their tensors stack."""
    if isinstance(prompt, str):
        return ()
    made, _ = encode(model, prompt["text"], prompt["images"], processor)
    shapes = {n: tuple(t.shape) for n, t in made.items() if "ids" not in n and n not in _BESIDE}
    ids = made.get("input_ids")
    return (len(prompt["images"]), 0 if ids is None else places_in(model, ids), *sorted(shapes.items()))


def with_pictures(made: Inputs, groups: list[list[Image.Image]], processor: Any) -> Inputs:
    """The inputs with what is known of the pictures of each prompt and of the places for them in the text."""
    pictures = [p for group in groups for p in group]
    sides = {name: made.side(name) for name in (made.name, *made.others)}
    for name, side in sides.items():
        process = None if side.modality == "text" else _process(processor, name, groups, side.tensor)
        if side.modality == "image" and side.tensor.dim() == 4 and len(side.tensor) == len(groups) == len(pictures):
            sizes = [(p.height, p.width) for p in pictures]
            geometry = None if process is None else measure_geometry(process, sizes)
            known = replace(side.features, originals=None if geometry is None else pictures, geometry=geometry)
            sides[name] = replace(side, features=known, notes=[notes(p) for p in pictures])
        elif process is not None and "pixel" in name:
            packed = side.modality == "tensor"
            shape = side.tensor.flatten(1).shape if packed else side.tensor.shape
            whole = partial(_pieces, process, 2 if packed else side.tensor.dim())
            sides[name] = replace(side, mosaic=measure_mosaic(whole, groups, shape))
        if side.modality == "text":
            # the tokenizer's first: Gemma 3's processor calls so the one token that it replaces by many
            owners = (processor.tokenizer, processor)
            numbers = [[getattr(owner, name, None) for owner in owners] for name in _PLACES]
            places = [next((i for i in own if isinstance(i, int)), -1) for own in numbers]  # −1 is no token
            held = torch.isin(side.tensor, torch.tensor(places, dtype=side.tensor.dtype, device=side.tensor.device))
            sides[name] = replace(side, special=held if side.special is None else side.special | held)
    main = sides.pop(made.name)
    others = {n: replace(one, args=(), kwargs={}) for n, one in sides.items()}
    return replace(main, args=made.args, kwargs=made.kwargs, others=others)


def _process(
    processor: Any, name: str, groups: list[list[Image.Image]], fed: Tensor
) -> Callable[[list[Image.Image]], Tensor] | None:
    """What makes of pictures what is fed: the image processor by itself, or the whole one, whose settings may be other
    ones (InternVL's cuts into tiles); None where neither does."""
    token = _word(getattr(processor, "image_token", None))

    def whole(pictures: list[Image.Image]) -> Tensor:
        text, given = ("a", pictures) if token is None else (token * len(pictures) + "a", [pictures])
        made: Tensor = dict(processor(images=given, text=[text], return_tensors="pt", padding=False))[name]
        return made

    for process in (partial(_alone, getattr(processor, "image_processor", None), name), whole):
        with contextlib.suppress(*FOREIGN_ERRORS):  # a processor need not take pictures so
            if _makes(process, groups, fed.detach().double().cpu()):
                return process
    return None


def _alone(image_processor: Any, name: str, pictures: list[Image.Image]) -> Tensor:
    made: Tensor = dict(image_processor(images=pictures, return_tensors="pt"))[name]
    return made


def _makes(process: Callable[[list[Image.Image]], Tensor], groups: list[list[Image.Image]], fed: Tensor) -> bool:
    """Whether that is what is fed, but for the tiles by which those of a batch are padded."""
    parts = [process(group).double().cpu() for group in groups]
    if sum(map(len, parts)) != len(fed) or any(p.shape[-1] != fed.shape[-1] or p.dim() != fed.dim() for p in parts):
        return False
    close, start = 0.02 * float(fed.abs().max()), 0
    for part in parts:
        own = fed[start : start + len(part)]
        own, start = own[:, : part.shape[1]] if part.dim() == 5 else own, start + len(part)
        if own.shape != part.shape or float((own - part).abs().max()) > close:
            return False
    return True


def _pieces(process: Any, axes: int, pictures: list[Image.Image]) -> Tensor:
    """The tiles ``[T, C, H, W]`` or packed patches ``[P, D]`` of one prompt's pictures."""
    made: Tensor = process(pictures)
    if axes == 2:
        return made.flatten(1)
    return made.flatten(0, 1) if made.dim() == 5 else made


def _picture(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return as_rgb(source)
    if isinstance(source, str) or hasattr(source, "read") or hasattr(source, "__fspath__"):
        return open_picture(source)
    raise InputError(f"a picture of a prompt is a PIL image or a file, not {type(source).__name__}")


def _word(token: Any) -> str | None:
    token = getattr(token, "content", token)
    return token if isinstance(token, str) and token else None


def _with_places(text: str, token: str, pictures: int, processor: Any) -> str:
    """The text with a place for each picture."""
    places = text.count(token)
    if places and places != pictures:
        raise InputError(
            f"the prompt has {places} place{'s' * (places > 1)} for pictures ({token}), and {pictures} "
            f"{'is' if pictures == 1 else 'are'} given"
        )
    if places:
        return text
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if template is None:
        return token * pictures + text
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": text}]
    chat = [{"role": "user", "content": content}]
    written: str = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return written


def _refuse_without(processor: Any) -> None:
    """No processor of pictures and words."""
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise InputError(
            "a prompt with a picture needs the model's own processor (transformers.AutoProcessor), which reads both"
        )


def _refuse_blind(model: nn.Module) -> None:
    """A picture for a model without eyes."""
    try:
        takes = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return
    known = any(n.startswith(("pixel", "image")) for n in takes)
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values()) and not hasattr(model, "config")
    if not known and not anything:
        raise InputError(f"{type(model).__name__} reads no pictures: its forward takes {', '.join(list(takes)[:6])}")


def places_in(model: nn.Module, ids: Tensor) -> int:
    """How many of these token ids stand for rows of a picture, by the model's configuration."""
    config = getattr(model, "config", None)
    marks = [getattr(config, n, None) for n in ("image_token_id", "image_token_index")]
    return int(sum((ids == mark).sum() for mark in {m for m in marks if isinstance(m, int)}))
