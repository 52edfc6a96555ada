"""Read one row of logits per sample from a model's output, or raise if the output has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError, NeedsTarget
from whyformer.models.ends import forward
from whyformer.models.kinds import (
    is_known_language_model,
    is_known_row_per_token,
    is_language_model,
    is_row_per_token,
)
from whyformer.models.output import Output
from whyformer.models.structure import first_bad_parameter


def plain_logits(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    read: Callable[[Output], Tensor] | None = None,
    samples: Tensor | None = None,
) -> Tensor:
    """Return the logits ``[B, C]`` of a forward pass without gradients, on the model's device; ``read`` defaults to
    :func:`row_of`."""
    output = forward(model, args, kwargs, samples)
    with torch.no_grad():
        return (read or row_of)(output)


def row_of(output: Output) -> Tensor:
    """Return ``[B, C]``: a classifier's logits, or a language model's for the token after the last real one.

    Raises:
        InputError: the output is of another kind; the message names the targets that fit.
        ModelError: there is no tensor in it.
    """
    if not has_row(output):
        if not output.named and output.logits is None:
            read_logits(output.raw)
        raise refusal(output)
    assert output.logits is not None
    mask = output.mask(output.logits.shape[1]) if output.logits.dim() == 3 else None
    return read_logits(output.logits, mask)


def without_excluded(logits: Tensor) -> Tensor:
    """Return logits ``[B, C]`` with 0 for the classes that the model excludes, whose logits are −∞."""
    return logits.masked_fill(logits.isneginf(), 0)


def refuse_infinite(model: nn.Module, logits: Tensor) -> None:
    """Raise if logits are not finite. Some classes may be excluded by a logit of −∞.

    Raises:
        ModelError: they are not; the message names a possible cause.
    """
    if bool(torch.isfinite(without_excluded(logits)).all()) and not bool(logits.isneginf().all(-1).any()):
        return
    bad = first_bad_parameter(model)
    cause = f"its parameter '{bad}' holds NaN or infinity"
    if bad is None:
        cause = "its activations overflow or its input is extreme"
    raise ModelError(
        f"the model's logits are not finite: {cause}. Check the weights, or use float32"
    )


def any_tensor(output: Output) -> Tensor:
    """Return any tensor of the output, for passes whose output does not matter."""
    tensor = next(iter(output.named.values()), torch.zeros(1, 1))
    return tensor if tensor.dim() else tensor[None]


def has_row(output: Output) -> bool:
    """Return whether the output is one row of logits per sample, or those of a language model."""
    logits = output.logits
    if logits is None or logits.dim() not in (1, 2, 3) or output.of_queries:
        return False
    if logits.dim() == 3:  # a model may compute the row of the last token alone, [B, 1, V]
        return is_language_model(output) or logits.shape[1] == 1
    return logits.dim() == 1 or not is_row_per_token(output, logits)


def read_logits(output: Any, mask: Tensor | None = None) -> Tensor:
    """Return the logits ``[B, C]`` of an output that has a row of them.

    A language model's ``[B, N, V]`` is read at the last position, or at the last real one by the padding mask
    ``[B, N]``.
    """
    logits = Output(nn.Identity(), output).logits
    if logits is None:
        raise ModelError(
            f"the model returned {type(output).__name__} without logits: pass a function of the output that returns "
            "one number per sample as the target, or wrap the model so that forward returns a tensor [batch, classes]"
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
            f"the model returned logits of shape {list(logits.shape)}: wrap it so that forward returns [batch, "
            "classes] (or [batch, tokens, vocabulary])"
        )
    return logits


def refusal(output: Output, why: str = "") -> NeedsTarget:
    """Return the error for an output without a row of logits; it lists the targets that fit.

    Args:
        output: the output.
        why: what is wrong with it, if not the missing row.
    """
    named = output.named
    tensors = [f"{n or 'a tensor'} {list(t.shape)}" for n, t in named.items()]
    shapes = ", ".join(tensors or [f"a {type(output.raw).__name__}"])
    ways = [*_targets_that_fit(output)]
    if has_row(output):  # functions get the row
        ways += ["target=0 (the index of a class)"] if not output.compared else []
        ways.append("a function of the logits that returns one number per sample: target=lambda logits: logits[:, 0]")
        ways += ["for another of these tensors, wrap the model so that forward returns it alone"] * (len(named) > 1)
    else:
        name, tensor = next(iter(named.items()), ("", torch.zeros(1)))
        of_name = f"[{name if name.isdigit() else repr(name)}]" if name else ""
        read = f".{name}" if hasattr(output.raw, name) else of_name
        index = f"[:, {', '.join('0' * (tensor.dim() - 1))}]" if tensor.dim() > 1 else ""
        example = f"target=lambda output: output{read}{index}"
        ways.append(f"a function of the output that returns one number per sample: {example}")
    return NeedsTarget(
        f"the model's output ({shapes}) {why or 'is not one row of logits per sample'}, so a target must select a "
        f"number: {'; '.join(ways)} (from whyformer import targets)"
    )


def _targets_that_fit(output: Output) -> Iterator[str]:
    """Yield examples of :mod:`whyformer.targets` with indices that this output has."""
    named = output.named
    kinds = {"logits": output.logits, **named}
    logits = next((t for n, t in kinds.items() if t is not None and t.dim() > 1 and "logits" in n), None)
    if "start_logits" in named and "end_logits" in named:
        yield _span(output, named["start_logits"])
    if output.compared:
        counts = named[output.compared].shape
        yield from ["targets.Similarity() (of each picture and its text)"] * (counts[0] == counts[1])
        yield "target=0 (the index of a text)"
    if logits is not None and output.of_queries:
        yield f"targets.Query(0, {min(3, logits.shape[-1] - 1)})"
    elif logits is not None and logits.dim() == 3 and "start_logits" not in named and output.dense is None:
        yield f"targets.Token({min(5, _last(output, logits))}, {min(17, logits.shape[-1] - 1)})"
        if is_known_language_model(output.model) and output.tokens and output.tokens[1].shape[1] == logits.shape[1]:
            yield _span(output, logits)
    elif logits is not None and logits.dim() == 2 and is_known_row_per_token(output.model):
        yield f"targets.Token({min(5, _last(output, logits))}, 0)"
    if output.dense is not None:
        _, count, height, width = output.dense.shape
        place = f"{min(4, height - 1)}, {min(9, width - 1)}"
        yield f"targets.Pixel({place}, {min(2, count - 1)})" if count > 1 else f"targets.Pixel({place})"


def _span(output: Output, logits: Tensor) -> str:
    last = _last(output, logits)
    return f"targets.Span({min(3, last)}, {min(7, last)})"


def _last(output: Output, logits: Tensor) -> int:
    """Return the last position that exists in all samples."""
    return int(output.real(logits.shape[1]).sum(1).min()) - 1
