"""Determine the kind of logits that a model returns, by changing its inputs, once per model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError
from whyformer.models.cache import measured, once
from whyformer.models.ends import forward_changed, kind_of_input, runs
from whyformer.models.output import Output, decodes, parameters
from whyformer.tape.recording import record_call
from whyformer.tape.walking import replay

_LANGUAGE, _ROW_PER_TOKEN = "language model", "row per token"
_ROUNDS = re.compile(r"\bquantized\b|\bbitsandbytes\b")


def is_language_model(output: Output) -> bool:
    """Return whether ``[B, N, V]`` logits are those of a causal language model: over the vocabulary, and independent of
    later tokens.

    This is measured by changing the last token. If that is not possible (a decoder without tokens), and for models
    that read the prompt of a picture bidirectionally, the result is whether the model can generate text.
    """
    return once(output.model, _LANGUAGE, lambda: _language(output))


def is_known_language_model(model: nn.Module) -> bool:
    """Return True if :func:`is_language_model` returned True for an output of this model."""
    return bool(measured(model).get(_LANGUAGE))


def last_row_only(model: nn.Module) -> dict[str, Any]:
    """Return the argument that makes a known language model compute only the logits of the last token; empty if it does
    not take it."""
    if not is_known_language_model(model):
        return {}
    return {"logits_to_keep": 1} if "logits_to_keep" in parameters(model) else {}


def _language(output: Output) -> bool:
    logits, tokens, config = output.logits, output.tokens, getattr(output.model, "config", None)
    assert logits is not None
    if tokens is None or (decodes(output.model) and not tokens[0].startswith("decoder_")):
        return _generates(output)
    ids = tokens[1]
    size = getattr(getattr(config, "get_text_config", lambda: config)(), "vocab_size", None)
    least = size if isinstance(size, int) else 0 if ids.is_floating_point() else int(ids.max()) + 1
    before = logits.shape[1] - ids.shape[1]  # rows of a learned prompt before the text
    if before < 0 or (before and _generates(output)):
        return _generates(output)
    if not _generates(output) and (logits.shape[-1] < least or "MaskedLM" in type(output.raw).__name__):
        return False
    if ids.shape[1] == 1:  # there is no later token: append one
        longer = forward_changed(output, lambda t: torch.cat([t, t], 1) if t.dim() > 1 and t.shape[1] == 1 else t)
        return _generates(output) if longer is None else _language(longer)
    row = int(output.real(ids.shape[1]).sum(1).argmax())
    last = int(output.real(ids.shape[1])[row].nonzero().max())
    changed = ids.clone()
    if ids.is_floating_point():
        changed[row, last] = 1 - changed[row, last]
    else:
        others = ids[ids != ids[row, last]]
        changed[row, last] = others[0] if len(others) else (ids[row, last] + 1) % max(least, 2)
    other = forward_changed(output, lambda t: changed if t is ids else t)
    if other is None or other.logits is None or other.logits.shape != logits.shape:
        return _generates(output)
    moved = (other.logits - logits)[row].detach().abs().amax(-1)
    limit = 0.1 * torch.finfo(logits.dtype).eps ** 0.5 * logits.detach().abs().max()
    if not bool((moved[before + last :] > limit).any()):  # changing this token has no effect
        return _generates(output)
    if not bool((moved[: before + last] > limit).any()):
        return True
    if any(_ROUNDS.search(type(module).__module__) for module in output.model.modules()):  # rounds over tokens
        return _generates(output)
    pictures = any(n.startswith(("pixel", "image")) for n in output.arguments)
    return pictures and _generates(output)


def _generates(output: Output) -> bool:
    generate = getattr(output.model, "can_generate", None)
    kind = type(output.raw).__name__
    named = isinstance(output.raw, list | tuple) or any(k in kind for k in ("CausalLM", "Seq2SeqLM", "Generation"))
    return callable(generate) and bool(generate()) and named


def is_row_per_token(output: Output, logits: Tensor) -> bool:
    """Return whether ``[B, N]`` logits are one per token (a discriminator's), if N tokens are fed."""
    if (
        output.tokens is None
        or output.tokens[1].dim() != 2  # multiple choice
        or output.tokens[1].shape[1] != logits.shape[1]
        or "Classifier" in type(output.raw).__name__
    ):
        return False
    return once(output.model, _ROW_PER_TOKEN, lambda: _row_per_token(output, logits.shape[1]))


def is_known_row_per_token(model: nn.Module) -> bool:
    """Return True if :func:`is_row_per_token` returned True for an output of this model."""
    return bool(measured(model).get(_ROW_PER_TOKEN))


def _row_per_token(output: Output, n: int) -> bool:
    if n == 1:
        return False
    fewer = forward_changed(output, lambda t: t[:, : n - 1] if t.dim() > 1 and t.shape[1] == n else t)
    return fewer is not None and fewer.logits is not None and fewer.logits.shape[1] == n - 1


def comparison_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the activation of a model that compares pictures with texts, so that either can be the classes of the
    other: "softmax", or "sigmoid" if it was trained with one; "" for other models.

    This is measured once per model and kind of input, by a plain forward pass.
    """
    results, key = measured(model), ("comparison", kind_of_input(args, kwargs))
    if key not in results:
        output = forward_changed(Output(model, None, args, kwargs), lambda t: t)
        if output is None:  # the model fails again later, where the error is reported
            return ""
        results[key] = "" if not output.compared else "sigmoid" if _has_common_bias(model, args, kwargs) else "softmax"
    return results[key]


def _has_common_bias(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a parameter is added to all logits (SigLIP), which softmax would cancel, so that the model was
    trained with a sigmoid."""
    tape, raw = record_call(model, args, kwargs)
    compared = Output(model, raw, args, kwargs).compared
    logits, number = raw[compared].detach(), tape.number(raw[compared])
    limit = max(1e-3, 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max()))

    def is_added(parameter: nn.Parameter) -> bool:
        with suppress(ModelError):  # the model decides by its value
            moved = [replay(tape, {tape.number(parameter): parameter.detach() + by}, [number])[0] for by in (-1, 1)]
            return all(bool(((m - logits - by).abs() < limit).all()) for m, by in zip(moved, (-1, 1), strict=True))
        return False

    return any(p.numel() == 1 and tape.knows(p) and is_added(p) for p in model.parameters())


def accepts_batches(model: nn.Module, twice: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]) -> bool:
    """Return True if the model accepts batches of several samples, which it may not if its config has no padding token.

    Args:
        model: the model.
        twice: function that returns the (args, kwargs) of two samples, on which this is measured once.
    """
    if getattr(getattr(model, "config", None), "pad_token_id", 0) is not None:
        return True
    return once(model, "accepts batches", lambda: runs(model, *twice()))
