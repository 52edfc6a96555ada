"""The plain forward pass, and the end function of a model: the function applied to its logits at the end.

A model that returns σ(z), softmax(z) or log softmax(z) is explained as the same model without that function, so the
logit of a class is its z. The function is read from a recorded pass (:mod:`whyformer.tape.ends`), however it is
written, and never guessed from values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS
from whyformer.models.cache import once
from whyformer.models.output import Output
from whyformer.models.structure import class_names
from whyformer.tape.ends import EndFunction
from whyformer.tape.ends import end_function as read_end
from whyformer.tape.recording import record_call, without_side_effects
from whyformer.tape.values import Tape

_LOOKED_AT = 4096


def forward(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, samples: Tensor | None = None
) -> Output:
    """Return the model's output, without gradients, and its end function.

    The pass is recorded only if the model is known to end in such a function. If the output looks like probabilities
    or log-probabilities, the model is run again to record it, once per model and kind of input.
    """
    kwargs = kwargs or {}
    name = _end_names(model).get(kind_of_input(args, kwargs))
    if not name:
        fed_args, fed_kwargs = without_side_effects(args, kwargs)
        with torch.no_grad():
            plain = Output(model, model(*fed_args, **fed_kwargs), args, kwargs, samples)
        if name == "" or not _may_be_an_end(plain.returned) or not _repeatable(args, kwargs):
            return plain
    tape, raw = record_call(model, args, kwargs)
    output = Output(model, raw, args, kwargs, samples)
    return without_end(output, end_in(tape, output), tape.__getitem__)


def end_in(tape: Tape, output: Output) -> EndFunction | None:
    """Return the end function of a recorded pass, and store it for later passes; None if it has none."""
    returned = output.returned
    end = None if returned is None or not tape.knows(returned) else read_end(tape, tape.number(returned))
    _end_names(output.model)[kind_of_input(output.args, output.kwargs)] = "" if end is None else end.name
    return end


def without_end(output: Output, end: EndFunction | None, value: Callable[[int], Tensor]) -> Output:
    """Return the output of a recorded pass with its logits before the end function.

    Args:
        output: the model's output.
        end: the end function, as returned by :func:`end_in`.
        value: function from a number on the tape to the value.
    """
    returned = output.returned
    if end is None or returned is None:
        return output
    return replace(output, end=end, before_end=end.logits(value).reshape(returned.shape))


def forward_changed(output: Output, change: Callable[[Tensor], Tensor]) -> Output | None:
    """Return the output for changed arguments; None if the model fails on them."""
    args = tuple(change(a) if isinstance(a, Tensor) else a for a in output.args)
    kwargs = {n: change(v) if isinstance(v, Tensor) else v for n, v in output.kwargs.items()}
    try:
        return forward(output.model, args, kwargs)
    except FOREIGN_ERRORS:
        return None


def runs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a plain forward pass succeeds."""
    return forward_changed(Output(model, None, args, kwargs), lambda t: t) is not None


def end_function(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the model's end function for this kind of input; "" if it has none, or if it is unknown."""
    return _end_names(model).get(kind_of_input(args, kwargs), "")


def known_end_function(model: nn.Module) -> str:
    """Return the name of the model's end function for any kind of input so far; "" for none."""
    return next((name for name in _end_names(model).values() if name), "")


def final_activation(model: nn.Module, end: str, outputs: int, comparison: str = "") -> str:
    """Return the activation of a row of logits: "softmax", "sigmoid", or "identity" for regression.

    A row of several logits is over classes: softmax, or sigmoid if they are not mutually exclusive. A single logit is
    a regression output, unless the model ends in a sigmoid or the config describes a class, by
    ``problem_type="multi_label_classification"`` or by names in ``id2label``. With ``problem_type="regression"`` all
    outputs are regression outputs.

    Args:
        model: the model.
        end: name of its end function, as returned by :func:`end_function`.
        outputs: number of logits in a row.
        comparison: the activation of a comparison of pictures with texts, as returned by
            :func:`whyformer.models.kinds.comparison_of`; "" for other rows.
    """
    if "sigmoid" in end or comparison == "sigmoid":
        return "sigmoid"
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem == "regression":
        return "identity"
    labels, multi_label = class_names(model)
    if multi_label or (outputs == 1 and labels and len(labels) <= 2 and all(labels.values())):
        return "sigmoid"
    return "identity" if outputs == 1 else "softmax"


def _may_be_an_end(value: Tensor | None) -> bool:
    """Return whether the first numbers of an output may all be probabilities, or all log-probabilities."""
    if value is None or not value.is_floating_point() or not value.numel() or value.is_meta:
        return False
    some = value.detach().reshape(-1)[:_LOOKED_AT]
    return bool(((some >= 0) & (some <= 1)).all() | (some <= 0).all())


def _repeatable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether no argument can be changed by a pass, unlike a cache of keys and values or a list."""
    return all(v is None or isinstance(v, Tensor | bool | int | float | str) for v in (*args, *kwargs.values()))


def _end_names(model: nn.Module) -> dict[Any, str]:
    """Return the names of the model's end functions found so far, by kind of input; "" for none."""
    return once(model, "end functions", dict[Any, str])


def kind_of_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the kind of input: the names of arguments, and the values of switches."""
    switches = ((n, v) for n, v in kwargs.items() if isinstance(v, bool | str | None))
    return len(args), frozenset(kwargs), frozenset(switches)
