"""The plain forward pass, and the end function of a model: what stands behind the logits, and what it was applied to.

A model that returns σ(z), softmax(z) or log softmax(z) is explained as the same model without that function: the
number of a class is its z. The function is read off a recorded pass (:mod:`whyformer.tape.ends`), so it does not matter
how it is written, and is never guessed from values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from whyformer.models.output import End, Output
from whyformer.tape.ends import EndFunction
from whyformer.tape.ends import end_function as read_end
from whyformer.tape.recording import record_call
from whyformer.tape.values import Tape

_CALLS, _LOOKED_AT = 24, 4096
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


# -- watching ----------------------------------------------------------------------------------------------------------
class Calls(TorchFunctionMode):
    """The last calls of a pass: what each was given and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[tuple[list[Tensor], list[Tensor]]] = deque(maxlen=_CALLS)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, Tensor)]
        if made:
            given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            self.last.append((given, made))
        return result

    def before(self, value: Tensor) -> list[Tensor]:
        """The tensors as large as ``value`` that it was made of, the earliest first."""
        reached, found = {id(value)}, dict[int, Tensor]()
        for given, made in reversed(self.last):
            if any(id(t) in reached for t in made):
                reached |= {id(t) for t in given}
                found |= {id(t): t for t in reversed(given)}
        alike = [t for t in found.values() if t.is_floating_point() and t.numel() == value.numel() and t is not value]
        return alike[::-1]


@contextmanager
def watching(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Calls]:
    """The calls of a pass of the model, for :func:`end_of`; none where it is known to have no end function."""
    calls = Calls()
    if _KNOWN.get(model, {}).get(_kind(args, kwargs)) == "":
        yield calls
        return
    with calls:
        yield calls


def end_of(output: Output, calls: Calls) -> End | None:
    """The end function of an output as far as its values tell (see :func:`confirmed`), or the axis of samples that one
    sample's output lacks; None where it has neither. That there is none is known for later passes."""
    kind = _kind(output.args, output.kwargs)
    value, known = output.returned, _KNOWN.setdefault(output.model, {})
    if value is None or not value.is_floating_point() or known.get(kind) == "":
        return _unwatched(output)
    names = [known[kind]] if kind in known else list(_ENDS)
    for x in calls.before(value):
        for name in names:
            with torch.no_grad():
                axis = _axis(name, x, value)
            if axis is not None:
                return End(name, axis, output.rows(x if x.shape == value.shape else x.reshape(value.shape)))
    known.setdefault(kind, "")
    return _unwatched(output)


def confirmed(output: Output, end: End | None) -> End | None:
    """The same if a recorded pass has that end function too: probabilities alone may be like those of another."""
    if end is None or not end.name:
        return end
    kind, known = _kind(output.args, output.kwargs), _KNOWN.setdefault(output.model, {})
    if kind not in known:
        if not _repeatable(output.args, output.kwargs):  # the next plain pass is recorded, and tells
            known[kind] = end.name
            return end
        _recorded(output.model, output.args, output.kwargs, output.samples)
    return end if known[kind] == end.name else _unwatched(output)


def _unwatched(output: Output) -> End | None:
    value = output.returned
    rows = None if value is None else output.rows(value)
    return None if rows is value or rows is None else End("", -1, rows)


# -- the functions ----------------------------------------------------------------------------------------------------
_ENDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sigmoid": lambda x, axis: x.sigmoid(),
    "softmax": lambda x, axis: x.softmax(axis),
    "log_softmax": lambda x, axis: x.log_softmax(axis),
    "logsigmoid": lambda x, axis: functional.logsigmoid(x),
}


def _axis(name: str, x: Tensor, value: Tensor) -> int | None:
    """The axis of ``value``, from the end, along which it is that function of ``x``; None where it is not."""
    joint = "softmax" in name
    if not value.numel() or (value.numel() > 1 and bool(value.min() == value.max())):  # says nothing
        return None
    for axis in range(-1, -value.dim() - 1, -1) if joint else (-1,):
        if joint and value.shape[axis] == 1:
            continue
        given = x.reshape(value.shape)
        given = given if given.dtype == torch.float64 else given.float()
        if _close(_ENDS[name](given, axis), value, given, x.dtype):
            return axis
    return None


def _close(made: Tensor, value: Tensor, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether these are equal up to rounding: that of x, and of logarithms that of what they are sums of."""
    eps, value = max(torch.finfo(dtype).eps, torch.finfo(value.dtype).eps), value.to(made.dtype)
    size = made.abs() if bool((made >= 0).all()) else made.abs().clamp(min=1)
    bound = 32 * eps * size * (1 + x.nan_to_num(0, 0, 0).abs().amax()) + torch.finfo(made.dtype).tiny
    return bool(((made == value) | ((made - value).abs() <= bound)).all())


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
