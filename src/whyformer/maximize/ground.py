"""What a picture for a model is: the argument it goes in by, its shape, black and white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.pictures import black_of, white_of


def argument_of(model: nn.Module) -> str | None:
    """Name of the forward argument that takes the picture, None for the first by position; refuses text models."""
    name = getattr(model, "main_input_name", None)
    if name == "input_ids" and not hasattr(getattr(model, "config", None), "vision_config"):
        raise InputError(
            "activation maximisation climbs the gradient to the input, and token ids have none: it is for picture "
            "models. For text, see which tokens drive a class with explain(...)"
        )
    return name if name == "pixel_values" else None


def shape_of(model: nn.Module, start: Any, shape: Any, like: Tensor | None) -> tuple[int, int, int, int]:
    """(1, C, H, W): of the start, of a picture that it should be like, as asked for, or as the model says."""
    if isinstance(start, Tensor):
        shape = start.shape
    elif like is not None:
        shape = like.shape
    sizes = tuple(int(n) for n in (_configured(model) if shape is None else shape))
    sizes = (1,) + ((3, *sizes) if len(sizes) == 2 else sizes[-3:])
    given = start.numel() if isinstance(start, Tensor) else math.prod(sizes)
    if len(sizes) != 4 or min(sizes) < 1 or sizes[1] not in (1, 3) or given != math.prod(sizes):
        raise InputError(f"one picture has the shape (1 or 3 channels, height, width), not {tuple(shape or ())}")
    return sizes


def ends_of(model: nn.Module, processor: Any, channels: int) -> Tensor | None:
    """``[2, C, 1, 1]`` black and white in the model's space, None where neither processor nor model says so."""
    ends: Any = black_of(processor), white_of(processor)
    known = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if ends[0] is None and "mean" in known and "std" in known:
        mean, std = known["mean"], known["std"]
        ends = [-m / s for m, s in zip(mean, std, strict=True)], [(1 - m) / s for m, s in zip(mean, std, strict=True)]
    if ends[0] is None or len(ends[0]) not in (1, channels):
        return None
    return torch.tensor(ends, dtype=torch.float64).expand(2, channels)[..., None, None]


def _configured(model: nn.Module) -> Sequence[int]:
    """(C, H, W) that the model's config (Hugging Face) or default_cfg (timm) names."""
    config = getattr(model, "config", None)
    timm = (getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}).get("input_size")
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = getattr(config, "image_size", None) or getattr(model, "image_size", None) or patches
    if size is None:
        if timm is not None:
            return tuple(timm)
        raise InputError("the model does not say how large its pictures are: give shape=(channels, height, width)")
    pair = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return (getattr(config, "num_channels", None) or (timm[0] if timm else 3), *pair)
