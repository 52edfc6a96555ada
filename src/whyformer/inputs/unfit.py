"""Why a model failed on what it was given, where that is plain: told instead of the error that the model ended in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whyformer.inputs.feed import channels, parameters
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prompts import places_in


def unfit(model: nn.Module, inputs: Inputs, error: Exception) -> str | None:
    """What does not fit, in a sentence; None where it is not known."""
    found = _wrong_size(model, inputs) or _wrong_places(model, inputs, error) or _no_decoder(model, inputs, error)
    return found or _misnamed(model, inputs.kwargs)


def no_table(inputs: Inputs, error: Exception) -> str | None:
    """Why a model that fails on numbers ``[B, F]`` may do so: they are one sample of another kind."""
    if inputs.modality != "tensor" or inputs.tensor.dim() != 2:
        return None
    count, wide = inputs.tensor.shape
    return (
        f"the model fails on {inputs.name} [{count}, {wide}], read as {count} samples of {wide} numbers "
        f"({' '.join(str(error).split())[:160]}): it takes pixels [B, C, H, W], ids [B, N] or vectors [B, N, D], and "
        "an unbatched sample needs a leading axis of 1"
    )


def _wrong_size(model: nn.Module, inputs: Inputs) -> str | None:
    """Why a model may have failed on pictures: they are not of the channels or the size that it takes."""
    shape, wanted = list(inputs.tensor.shape), channels(model)
    if inputs.modality == "tensor" and wanted is not None and len(shape) == 3:
        return (
            f"the model takes pictures, [B, {wanted}, H, W], and this is {shape}; a picture as an array has "
            "axes [H, W, C] and bytes from 0 to 255 (uint8), or fractions from 0 to 1"
        )
    if inputs.modality == "image" and wanted is not None and shape[-3] != wanted:
        last = ", which seem to come last: permute the axes" if shape[-1] == wanted else ""
        return f"the model takes pictures of {wanted} channels, [B, {wanted}, H, W], and these are {shape}{last}"
    frames = getattr(getattr(model, "config", None), "num_frames", None)
    if inputs.modality == "image" and len(shape) == 5 and isinstance(frames, int) and shape[1] != frames:
        return f"the model fails on a video of {shape[1]} frames; it is made for {frames}"
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


def _wrong_places(model: nn.Module, inputs: Inputs, error: Exception) -> str | None:
    """Why a model may have failed on a picture and a text: the text has not as many places as the picture has rows."""
    ids = next((v for v in inputs.kwargs.values() if isinstance(v, Tensor) and v.dtype == torch.long), None)
    places = 0 if ids is None else places_in(model, ids)
    if not places or "token" not in str(error):
        return None
    if not any(isinstance(v, Tensor) and v.is_floating_point() for v in inputs.kwargs.values()):
        return f"the prompt has {places} places for a picture, and no picture is given"
    said = " ".join(str(error).split())[:160]
    return f"the prompt has {places} places for rows of its pictures, and they have not as many ({said})"


def _no_decoder(model: nn.Module, inputs: Inputs, error: Exception) -> str | None:
    """Why a model may have failed on a text: its decoder was given no tokens."""
    given = any(name.startswith("decoder_input") for name in inputs.kwargs)
    if given or "decoder_input_ids" not in parameters(model) or "inputs_embeds" not in str(error):
        return None
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    return (
        "the model's decoder is given no tokens: give decoder_input_ids [B, N] too (for the beginning of an answer its "
        f"first token alone, {start}), or use explain_generation"
    )


def _misnamed(model: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Why a model may have failed: its forward takes whatever is named, and knows some of these names not."""
    known = parameters(model)
    odd = [name for name in kwargs if name not in known]
    rest = [name for name, p in known.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if not odd or not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return None
    return f"the model fails, and its forward names no {', '.join(odd)}; it takes {', '.join(rest[:12])}"
