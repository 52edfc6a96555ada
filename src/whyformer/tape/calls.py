"""ATen calls, the entries of a tape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten

__all__ = ["Call", "Slot", "attributes", "every_tensor", "fill", "is_composite", "needed_calls", "slot", "tensors_in"]

# a repeated call may get operands with other strides
_ANY_LAYOUT: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


class Slot:
    """Placeholder for the tensor ``operands[index]`` among the arguments of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"#{self.index}"


_SLOTS = [Slot(i) for i in range(64)]


def slot(index: int) -> Slot:
    """Return the slot of an index, which all calls share."""
    while index >= len(_SLOTS):
        _SLOTS.append(Slot(len(_SLOTS)))
    return _SLOTS[index]


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One ATen call.

    Attributes:
        number: its position on the tape.
        name: the operator without namespace, overload and trailing underscore, such as ``"addmm"``.
        operator: the callable, an ``OpOverload`` or a function of tensors.
        args, kwargs: its arguments, with a :class:`Slot` for each tensor.
        operands: numbers of the input values.
        results: numbers of the output values.
        writes: positions of the operands that the call overwrites; their new values are its first results.
        random: True if the call draws random numbers. Such a call is never repeated.
        kind: kind of a custom operation, see :mod:`whyformer.tape.custom_ops`; "" for other calls.
        hidden_operands: numbers of the values that a custom operation reads without getting them as arguments.
        holds_weights: True if a custom operation is a module with weight matrices.
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
    hidden_operands: tuple[int, ...] = ()
    holds_weights: bool = False

    def __call__(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Repeat the call with other operands, without modifying them; return all results."""
        operator, inputs = self.operator, operands
        if self.writes:
            pure = _out_of_place(operator)
            if pure is not None and len(self.results) == 1:
                operator = pure
            else:
                inputs = [t.clone() if i in self.writes else t for i, t in enumerate(operands)]
        else:
            operator = _ANY_LAYOUT.get(operator, operator)
        output = operator(*fill(self.args, inputs), **{k: fill(a, inputs) for k, a in self.kwargs.items()})
        if inputs is operands:
            return list(tensors_in(output))
        overwritten = [inputs[i] for i in self.writes]
        return [*overwritten, *(t for t in tensors_in(output) if not any(t is w for w in overwritten))]

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the argument ``name`` of the operator's schema, a :class:`Slot` for a tensor."""
        if name in self.kwargs:
            return self.kwargs[name]
        for argument, value in zip(self._schema(), self.args, strict=False):
            if argument.name == name:
                return value
        return next(
            (a.default_value for a in self._schema() if a.name == name and a.default_value is not None), default
        )

    def operand(self, name: str) -> int | None:
        """Return the value number of the tensor argument ``name``; None if it was not passed."""
        slot = self.argument(name)
        return self.operands[slot.index] if isinstance(slot, Slot) else None

    def _schema(self) -> Iterable[Any]:
        schema = getattr(self.operator, "_schema", None)
        return schema.arguments if schema is not None else ()


def fill(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """Replace the slots in an argument by tensors."""
    kind = type(argument)
    if kind is Slot:
        return tensors[argument.index]
    return kind(fill(a, tensors) for a in argument) if kind in (list, tuple) else argument


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


def every_tensor(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors in the inputs or outputs of a model: nested sequences, mappings, and objects such as caches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from every_tensor(list(value.values()), depth)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from every_tensor(v, depth)
    elif depth and not isinstance(value, nn.Module):
        yield from every_tensor(list(attributes(value).values()), depth - 1)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in slots."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [n for slot in slots for n in ([slot] if isinstance(slot, str) else slot) if not n.startswith("__")]
    return {**{n: getattr(value, n) for n in names if hasattr(value, n)}, **getattr(value, "__dict__", {})}


def needed_calls(calls: Sequence[Call], outputs: Iterable[int], ends: Container[int] = ()) -> list[Call]:
    """Return those of the calls that are needed to compute ``outputs`` from ``ends``, in the order of execution."""
    needed, path = set(outputs), list[Call]()
    for call in reversed(calls):
        if any(r in needed and r not in ends for r in call.results):
            needed.update(call.operands)
            path.append(call)
    return path[::-1]


def is_composite(operator: Any) -> bool:
    """Return True if torch decomposes an operator above the dispatch mode, so that its parts are recorded instead."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


# -- out-of-place versions of in-place operators ---------------------------------------------------------------------
def _copy(old: Tensor, new: Tensor, *_: Any) -> Tensor:
    return new.to(old.dtype).expand(old.shape).clone()


_PURE: dict[Any, Any] = {}


def _out_of_place(operator: Any) -> Any:
    """Return ``aten::add`` for ``aten::add_``, if it exists with the same arguments and a derivative. vmap cannot write
    a batched tensor into an unbatched one in place."""
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
    packet = getattr(aten, name[:-1], None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    # by signature, not overload name: pow.Scalar takes a number and a tensor, pow_.Scalar a tensor and a number
    pure = next((o for o in overloads if _signature(o) == _signature(operator)), None)
    keys = ("AutogradCPU", "Autograd", "CompositeImplicitAutograd")
    has_derivative = pure is not None and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(pure.name(), k) for k in keys
    )
    return pure if has_derivative else None


def _signature(operator: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in operator._schema.arguments]
