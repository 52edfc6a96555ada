"""Reasons why a model fails on its inputs, reported instead of the model's own error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whyformer.inputs.feed import channels
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prompts import places_in
from whyformer.models.ends import forward_changed, runs
from whyformer.models.output import Output, parameters, vocabulary_size


def failure_reason(model: nn.Module, inputs: Inputs, error: Exception) -> str | None:
    """Return a sentence on why the inputs do not fit the model; None if unknown. Costs a few plain forward passes."""
    message = " ".join(str(error).split())
    reason = _wrong_size(model, inputs) or _wrong_places(model, inputs, message) or _no_decoder(model, inputs, message)
    reason = reason or _multiple_choice(model, inputs) or _misnamed(model, inputs.kwargs)
    if reason is None and not runs(model, *inputs.feed):
        reason = _outside_a_table(model, inputs, message) or _fails_on_batches(model, inputs, message)
        reason = reason or _unknown_kind(inputs, message)
    return reason


def _outside_a_table(model: nn.Module, inputs: Inputs, message: str) -> str | None:
    """Return why a model without a config may fail on token ids: one has no vector, or the text is longer than the
    table of positions. Costs up to two plain forward passes."""
    ids = inputs.tensor
    if inputs.modality != "text" or ids.is_floating_point() or vocabulary_size(model) is not None:
        return None
    if runs(model, *inputs.with_tensor(torch.zeros_like(ids)).feed):
        return (
            f"the model fails on token ids from {int(ids.min())} to {int(ids.max())}, and not on ids 0 "
            f"({message[:160]}): some may be outside of its vocabulary; use the model's own tokenizer"
        )

    def first(place: str | int, value: Any) -> Any:
        cut = place == inputs.scored or (isinstance(value, Tensor) and inputs.is_per_token(place, value))
        return value[..., :1] if cut else value

    if ids.shape[-1] > 1 and runs(model, *inputs.with_arguments(first).feed):
        return (
            f"the model fails on texts of {ids.shape[-1]} tokens, and not on the first token alone ({message[:160]}): "
            "pass shorter texts"
        )
    return None


def _unknown_kind(inputs: Inputs, message: str) -> str | None:
    """Return why a model may fail on numbers: a sound is too short, or ``[B, F]`` is one sample of another kind."""
    if inputs.features.durations:
        shortest = min(inputs.features.durations)
        return f"the model fails on a sound of {shortest:.3g} seconds, which may be too short for it ({message[:160]})"
    if inputs.modality != "tensor" or inputs.tensor.dim() != 2:
        return None
    count, width = inputs.tensor.shape
    return (
        f"the model fails on {inputs.name} [{count}, {width}], read as {count} samples of {width} numbers "
        f"({message[:160]}): pass pixels [B, C, H, W], ids [B, N] or vectors [B, N, D], and add "
        "a leading axis of 1 to an unbatched sample"
    )


def _wrong_size(model: nn.Module, inputs: Inputs) -> str | None:
    """Return why a model may fail on pictures: their channels or size differ from those that it takes."""
    shape, expected = list(inputs.tensor.shape), channels(model)
    if inputs.modality == "tensor" and expected is not None and len(shape) == 3:
        return (
            f"the model takes pictures, [B, {expected}, H, W], and this is {shape}: pass a picture as an array with "
            "axes [H, W, C] and bytes from 0 to 255 (uint8), or fractions from 0 to 1"
        )
    if inputs.modality == "image" and expected is not None and shape[-3] != expected:
        last = "; the channels seem to come last: permute the axes" if shape[-1] == expected else ""
        return f"the model takes pictures of {expected} channels, [B, {expected}, H, W], and these are {shape}{last}"
    frames = getattr(getattr(model, "config", None), "num_frames", None)
    if inputs.modality == "image" and len(shape) == 5 and isinstance(frames, int) and shape[1] != frames:
        return f"the model fails on a video of {shape[1]} frames; it takes {frames}"
    if inputs.modality == "image" and len(shape) == 4 and isinstance(frames, int):
        return f"the model takes videos, [B, T, C, H, W], and this is {shape}: add a leading axis of 1 to a single one"
    size = getattr(getattr(model, "config", None), "image_size", None)
    size = (size, size) if isinstance(size, int) else size
    if inputs.modality != "image" or inputs.tensor.dim() != 4 or not isinstance(size, list | tuple):
        return None
    actual = tuple(inputs.tensor.shape[-2:])
    if len(size) != 2 or actual == tuple(size):
        return None
    return (
        f"the model fails on pictures of {actual[0]}×{actual[1]}; it takes {size[0]}×{size[1]}: "
        "pass the pictures themselves with processor=, or resize the tensor"
    )


def _wrong_places(model: nn.Module, inputs: Inputs, message: str) -> str | None:
    """Return why a model may fail on a picture and a text: the numbers of placeholders and picture rows differ."""
    ids = next((v for v in inputs.kwargs.values() if isinstance(v, Tensor) and v.dtype == torch.long), None)
    places = 0 if ids is None else places_in(model, ids)
    if not places or "token" not in message:
        return None
    if not any(isinstance(v, Tensor) and v.is_floating_point() for v in inputs.kwargs.values()):
        return f"the prompt has {places} placeholders for rows of a picture and no picture: pass both"
    return f"the prompt has {places} placeholders for rows of its pictures, which have another number ({message[:160]})"


def _no_decoder(model: nn.Module, inputs: Inputs, message: str) -> str | None:
    """Return why a model may fail on a text: its decoder got no tokens."""
    has_tokens = any(name.startswith("decoder_input") for name in inputs.kwargs)
    if has_tokens or "decoder_input_ids" not in parameters(model) or "inputs_embeds" not in message:
        return None
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    return (
        "the model's decoder got no tokens: pass decoder_input_ids [B, N] too (the first token, "
        f"{start}, for the beginning of an answer), or use explain_generation"
    )


def _multiple_choice(model: nn.Module, inputs: Inputs) -> str | None:
    """Return why a model may fail on texts: it takes the choices of each sample along a separate axis.

    Costs a plain forward pass.
    """
    if inputs.modality != "text" or inputs.tensor.dim() != 2:
        return None
    output = forward_changed(Output(model, None, *inputs.feed), lambda value: value[None])
    if output is None or output.logits is None or tuple(output.logits.shape) != (1, inputs.batch):
        return None
    return (
        f"the model reads several texts as the choices of one sample: pass ids [1, {inputs.batch}, N] instead "
        f"of [{inputs.batch}, N], {{n: t[None] for n, t in tokenizer(text, text_pair, padding=True, "
        "return_tensors='pt').items()}"
    )


def _fails_on_batches(model: nn.Module, inputs: Inputs, message: str) -> str | None:
    """Return why a model may fail on a batch: it takes one sample at a time, such as a language model that classifies
    texts and has no padding token to find the last word by. Costs a plain forward pass."""
    if inputs.batch == 1 or inputs.samples is not None or not runs(model, *inputs.of_samples([0]).feed):
        return None
    pad = getattr(getattr(model, "config", None), "pad_token_id", 0)
    way = "pass them as a list, or set model.config.pad_token_id to the id of the tokenizer's padding token"
    return (
        f"the model fails on these {inputs.batch} samples together and not on the first alone ({message[:160]}): "
        f"{way if pad is None else 'explain them one at a time'}"
    )


def _misnamed(model: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Return why a model may fail: its forward takes ``**kwargs``, and some names are not among its parameters."""
    accepted = parameters(model)
    odd = [name for name in kwargs if name not in accepted]
    named = [name for name, p in accepted.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if not odd or not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return None
    return f"the model fails, and its forward has no parameter {', '.join(odd)}; it takes {', '.join(named[:12])}"
