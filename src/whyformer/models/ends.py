"""The plain forward pass, and the end function of a model: what stands behind the logits, and what it was applied to.

A model that returns σ(z), softmax(z) or log softmax(z) is explained as the same model without that function: the
number of a class is its z. The function is read off a recorded pass (:mod:`whyformer.tape.ends`), so it does not matter
how it is written, and is never guessed from values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from whyformer.models.output import End, Output
from whyformer.models.structure import class_names
from whyformer.tape.ends import EndFunction
from whyformer.tape.ends import end_function as read_end
from whyformer.tape.recording import record_call
from whyformer.tape.values import Tape

_LOOKED_AT = 4096
_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()  # kind of input -> name, "" for none


def forward(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, samples: Tensor | None = None
) -> Output:
    """What the model returns, without gradients, and its end function.

    The pass is recorded only where the model is known to end in such a function, or what it returned may be the value
    of one: then it is run again, once for a model and kind of input.
    """
    kwargs = kwargs or {}
    known = _KNOWN.get(model, {}).get(_kind(args, kwargs))
    if not known:
        with torch.no_grad():
            plain = Output(model, model(*args, **kwargs), args, kwargs, samples)
        if known == "" or not _may_be_an_end(plain.returned) or not _repeatable(args, kwargs):
            return plain.with_end(_unwatched(plain))
    return _recorded(model, args, kwargs, samples)


def _recorded(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], samples: Tensor | None) -> Output:
    """A recorded pass, from which the end function is known later."""
    tape, raw = record_call(model, args, kwargs)
    made = Output(model, raw, args, kwargs, samples)
    return apart(made, end_in(tape, made), tape.__getitem__)


def end_in(tape: Tape, output: Output) -> EndFunction | None:
    """Return the end function of a recorded pass, which is known for later passes then; None if it has none."""
    returned = output.returned
    found = None if returned is None or not tape.knows(returned) else read_end(tape, tape.number(returned))
    _KNOWN.setdefault(output.model, {})[_kind(output.args, output.kwargs)] = "" if found is None else found.name
    return found


def apart(output: Output, end: EndFunction | None, value: Callable[[int], Tensor]) -> Output:
    """Return the output of a recorded pass with its logits apart from the end function.

    Args:
        output: what the model returned.
        end: the end function, as :func:`end_in` finds it.
        value: number on the tape -> the value.
    """
    returned = output.returned
    if end is None or returned is None:
        return output.with_end(_unwatched(output))
    logits = value(end.logits).reshape(returned.shape)
    return output.with_end(End(end.name, end.axis, output.rows(logits)))


def fed(output: Output, change: Callable[[Tensor], Tensor]) -> Output | None:
    """The output for changed arguments; None where the model does not take them."""
    args = tuple(change(a) if isinstance(a, Tensor) else a for a in output.args)
    kwargs = {n: change(v) if isinstance(v, Tensor) else v for n, v in output.kwargs.items()}
    try:
        return forward(output.model, args, kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def end_function(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The name of the function that the model ends in for this kind of input; "" where it has none, or is unknown."""
    return _KNOWN.get(model, {}).get(_kind(args, kwargs), "")


def known_end_function(model: nn.Module) -> str:
    """The name of the function that the model was seen to end in for any kind of input; "" for none."""
    return next((name for name in _KNOWN.get(model, {}).values() if name), "")


def final_activation(model: nn.Module, end: str, outputs: int) -> str:
    """Return what turns a row of logits into what it says: "softmax", "sigmoid", or "identity" for a number.

    A row of several logits is one of classes: softmax, or sigmoid where they do not exclude one another. One logit is
    a number (a regression), unless a sigmoid stands behind it or the config calls it a class: by
    ``problem_type="multi_label_classification"``, or by names in ``id2label``. With ``problem_type="regression"``
    every output is a number.

    Args:
        end: the function that the model ends in, as :func:`end_function` names it.
        outputs: number of logits of a row.
    """
    if "sigmoid" in end:
        return "sigmoid"
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem == "regression":
        return "identity"
    labels, multi_label = class_names(model)
    if multi_label or (outputs == 1 and labels and len(labels) <= 2 and all(labels.values())):
        return "sigmoid"
    return "identity" if outputs == 1 else "softmax"


def _unwatched(output: Output) -> End | None:
    value = output.returned
    rows = None if value is None else output.rows(value)
    return None if rows is value or rows is None else End("", -1, rows)


def _may_be_an_end(value: Tensor | None) -> bool:
    """Whether the first numbers of an output are all probabilities, or all logarithms of some."""
    if value is None or not value.is_floating_point() or not value.numel() or value.is_meta:
        return False
    some = value.detach().reshape(-1)[:_LOOKED_AT]
    return bool(((some >= 0) & (some <= 1)).all() | (some <= 0).all())


def _repeatable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a pass leaves what it is given as it was: a cache of keys and values, or a list, may be added to."""
    return all(v is None or isinstance(v, Tensor | bool | int | float | str) for v in (*args, *kwargs.values()))


def _kind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What kind of input this is: the names of tensors, and the values of switches."""
    switches = ((n, v) for n, v in kwargs.items() if isinstance(v, bool | str | None))
    return len(args), frozenset(kwargs), frozenset(switches)
