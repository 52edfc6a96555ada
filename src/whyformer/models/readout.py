"""The plain forward pass, and what is read off a model's output: one row of logits a sample."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError


def plain_logits(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Tensor:
    """``[B, C]`` logits of a forward pass without gradients, on the model's device; see :func:`read_logits`."""
    kwargs = kwargs or {}
    with torch.no_grad():
        return read_logits(model(*args, **kwargs), output_mask(model, args, kwargs))


def output_mask(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The padding mask of the tokens whose logits come out: an encoder–decoder's own decoder mask, else the input's.

    A mask given by position is found by the signature of the model's forward.
    """
    given = dict(kwargs)
    if len(args) > 1:
        with contextlib.suppress(TypeError, ValueError):  # no signature to be read
            given |= inspect.signature(model.forward).bind_partial(*args).arguments
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    decodes = decodes or any(name in given for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask if isinstance(mask, Tensor) else None


def read_logits(output: Any, mask: Tensor | None = None) -> Tensor:
    """``[B, C]`` logits out of whatever the model returns.

    A language model's ``[B, N, V]`` is read at the last position, or the last real one by the ``[B, N]`` padding mask;
    the image-to-text logits of a two-tower model count as logits.
    """
    logits = output
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        logits = getattr(output, "logits", getattr(output, "logits_per_image", None))
        if logits is None and isinstance(output, Mapping):
            logits = output.get("logits", next((v for v in output.values() if isinstance(v, Tensor)), None))
    elif isinstance(output, list | tuple):
        logits = next((v for v in output if isinstance(v, Tensor)), None)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__} without logits; wrap it so that "
            "forward returns a tensor [batch, classes]"
        )
    if logits.dim() == 1:
        logits = logits[:, None]
    if logits.dim() == 3:  # a language model: the next token after the last real one
        last = torch.full((len(logits),), logits.shape[1] - 1, device=logits.device)
        if mask is not None and mask.shape == logits.shape[:2]:
            places = torch.arange(logits.shape[1], device=logits.device)
            last = (mask * (places + 1)).argmax(-1)
        logits = logits[torch.arange(len(logits), device=logits.device), last]
    if logits.dim() != 2:
        raise ModelError(
            f"the model returned logits of shape {list(logits.shape)}; [batch, classes] (or "
            "[batch, tokens, vocabulary]) is needed"
        )
    return logits
