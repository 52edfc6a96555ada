"""The input picture of a model: its forward argument, its shape, and black and white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.pictures import black_and_white


def argument_of(model: nn.Module) -> str | None:
    """Return the name of the forward argument for the picture, or None for the first argument.

    Raises:
        InputError: the model is a text model.
    """
    name = getattr(model, "main_input_name", None)
    if name == "input_ids" and not hasattr(getattr(model, "config", None), "vision_config"):
        raise InputError(
            "activation maximisation needs a gradient with respect to the input, which token ids do not have: use a "
            "model for pictures. For text, explain(...) shows which tokens support a class"
        )
    return name if name == "pixel_values" else None


def shape_of(model: nn.Module, start: Any, shape: Any, like: Tensor | None) -> tuple[int, int, int, int]:
    """Return (1, C, H, W) of ``start``, of ``like``, of ``shape``, or of the model's config, in this order."""
    if isinstance(start, Tensor):
        shape = start.shape
    elif like is not None:
        shape = like.shape
    sizes = tuple(int(n) for n in (_configured(model) if shape is None else shape))
    sizes = (1,) + ((3, *sizes) if len(sizes) == 2 else sizes[-3:])
    numel = start.numel() if isinstance(start, Tensor) else math.prod(sizes)
    if len(sizes) != 4 or min(sizes) < 1 or sizes[1] not in (1, 3) or numel != math.prod(sizes):
        raise InputError(f"the shape of a picture must be (1 or 3 channels, height, width), not {tuple(shape or ())}")
    return sizes


def ends_of(model: nn.Module, processor: Any, channels: int) -> Tensor | None:
    """Return black and white in the model's space ``[2, C, 1, 1]``; None if the normalization is unknown."""
    ends: Any = black_and_white(processor)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if ends[0] is None and "mean" in config and "std" in config:
        mean, std = config["mean"], config["std"]
        ends = [-m / s for m, s in zip(mean, std, strict=True)], [(1 - m) / s for m, s in zip(mean, std, strict=True)]
    if ends[0] is None or len(ends[0]) not in (1, channels):
        return None
    return torch.tensor(ends, dtype=torch.float64).expand(2, channels)[..., None, None]


def _configured(model: nn.Module) -> Sequence[int]:
    """Return (C, H, W) from the model's config (Hugging Face) or default_cfg (timm)."""
    config = getattr(model, "config", None)
    timm = (getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}).get("input_size")
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = getattr(config, "image_size", None) or getattr(model, "image_size", None) or patches
    if size is None:
        if timm is not None:
            return tuple(timm)
        raise InputError("the size of the model's pictures is unknown: pass shape=(channels, height, width)")
    pair = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return (getattr(config, "num_channels", None) or (timm[0] if timm else 3), *pair)
