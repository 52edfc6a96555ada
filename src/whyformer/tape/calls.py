"""Calls: what a tape consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten

__all__ = ["Call", "Slot", "every_tensor", "fill", "is_composite", "slot", "tensors_in"]

# other operands may lie otherwise in memory
_ANY_LAYOUT: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


class Slot:
    """The place of a tensor among the arguments of a call: ``operands[index]``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"#{self.index}"


_SLOTS = [Slot(i) for i in range(64)]


def slot(index: int) -> Slot:
    while index >= len(_SLOTS):
        _SLOTS.append(Slot(len(_SLOTS)))
    return _SLOTS[index]


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One ATen call.

    Attributes:
        number: its position on the tape.
        name: the operator without namespace, overload and trailing underscore, such as ``"addmm"``.
        operator: what was called, an ``OpOverload`` or a function of tensors.
        args, kwargs: its arguments, with a :class:`Slot` in the place of each tensor.
        operands: numbers of the values it reads.
        results: numbers of the values it makes.
        writes: positions of the operands that it overwrites; their new values are its first results.
        random: True if it draws random numbers. Such a call is never repeated.
        kind: of a call of a declared operation, what it is, see :mod:`whyformer.tape.declared`; "" for other calls.
        beside: numbers of the values that a declared operation reads without being given them.
    """

    number: int
    name: str
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[int, ...] = ()
    random: bool = False
    kind: str = ""
    beside: tuple[int, ...] = ()

    def __call__(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Repeat the call on other operands, without writing into them; return all results."""
        operator, given = self.operator, operands
        if self.writes:
            pure = _out_of_place(operator)
            if pure is not None and len(self.results) == 1:
                operator = pure
            else:
                given = [t.clone() if i in self.writes else t for i, t in enumerate(operands)]
        else:
            operator = _ANY_LAYOUT.get(operator, operator)
        made = list(
            tensors_in(operator(*fill(self.args, given), **{k: fill(a, given) for k, a in self.kwargs.items()}))
        )
        if given is operands:
            return made
        written = [given[i] for i in self.writes]
        return [*written, *(t for t in made if not any(t is w for w in written))]

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operator's schema; a :class:`Slot` stands for a tensor."""
        if name in self.kwargs:
            return self.kwargs[name]
        for argument, value in zip(self._schema(), self.args, strict=False):
            if argument.name == name:
                return value
        return next(
            (a.default_value for a in self._schema() if a.name == name and a.default_value is not None), default
        )

    def operand(self, name: str) -> int | None:
        """Return the number of the tensor argument ``name``, or None if it was not passed."""
        slot = self.argument(name)
        return self.operands[slot.index] if isinstance(slot, Slot) else None

    def _schema(self) -> Iterable[Any]:
        schema = getattr(self.operator, "_schema", None)
        return schema.arguments if schema is not None else ()


def fill(argument: Any, given: Sequence[Tensor]) -> Any:
    """Put tensors into the slots of an argument."""
    kind = type(argument)
    if kind is Slot:
        return given[argument.index]
    return kind(fill(a, given) for a in argument) if kind in (list, tuple) else argument


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


def every_tensor(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors of the inputs of a model: nested sequences, mappings and objects such as caches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from every_tensor(list(value.values()), depth)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from every_tensor(v, depth)
    elif depth and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
        yield from every_tensor(list(vars(value).values()), depth - 1)


def is_composite(operator: Any) -> bool:
    """Return True if torch makes an operator of others below autograd, so that these are recorded in its place."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


# -- calls that write in place, repeated without it --------------------------------------------------------------------
def _copy(old: Tensor, new: Tensor, *_: Any) -> Tensor:
    return new.to(old.dtype).expand(old.shape).clone()


_PURE: dict[Any, Any] = {}


def _out_of_place(operator: Any) -> Any:
    """Return ``aten::add`` for ``aten::add_``, if there is one with the same arguments and a derivative; vmap cannot
    write a batched value into one that is not."""
    if operator not in _PURE:
        _PURE[operator] = _find_pure(operator)
    return _PURE[operator]


def _find_pure(operator: Any) -> Any:
    schema = operator._schema
    space, name = schema.name.split("::")
    if space != "aten" or not name.endswith("_"):
        return None
    if name == "copy_":
        return _copy
    if name == "zero_":
        return torch.zeros_like
    pure = getattr(getattr(aten, name[:-1], None), schema.overload_name or "default", None)
    if pure is None or [a.name for a in pure._schema.arguments] != [a.name for a in schema.arguments]:
        return None
    keys = ("AutogradCPU", "Autograd", "CompositeImplicitAutograd")
    return pure if any(torch._C._dispatch_has_kernel_for_dispatch_key(pure.name(), k) for k in keys) else None
