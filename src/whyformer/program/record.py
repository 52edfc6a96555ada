"""One plain pass of a model, written down as data: its calls by number, and the values that they read and make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whyformer.program.calls import Gradients, here
from whyformer.program.operations import is_in_place, kind_of, operation_name, tensors_in

WHOLE = 4096
"""Elements up to which a value is noted as a whole; of larger ones a few rows along each axis."""
_LOOKUPS = ("embedding", "__getitem__", "index_select")


@dataclass(slots=True)
class Value:
    """A tensor at one moment of the pass.

    Attributes:
        parents: numbers of the values that it was computed from.
        call: number of the call that made it; −1 of inputs, weights and constants.
        carries: whether it depends on an input through operations that have a derivative.
        weight: whether it was computed from parameters of the model alone.
        ids: whether it holds whole numbers that came from an input.
        opaque: whether it was made in an autograd function of what no call has made, or by a call of which nothing is
            known.
        given: whether it holds pixels or the like (three axes or more) that the model was given, only rearranged.
        rows: axis -> some rows of it, that axis whole; empty where it does not carry.
    """

    parents: tuple[int, ...]
    call: int
    shape: tuple[int, ...]
    carries: bool = False
    weight: bool = False
    ids: bool = False
    given: bool = False
    opaque: bool = False
    rows: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """One call: its operation, the values of its tensor operands in order, what it made, and the module it ran in."""

    number: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    module: str = ""


@dataclass
class Program:
    """The record of a pass; ``outputs`` are the values that the model returned, ``inputs`` those that it was given."""

    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: dict[Any, int] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)

    def readers(self) -> dict[int, list[Call]]:
        """Value -> the calls that read it."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            for value in dict.fromkeys(call.operands):
                found.setdefault(value, []).append(call)
        return found

    def maker(self, value: int) -> Call | None:
        """The call that made a value."""
        number = self.values[value].call
        return self.calls[number] if number >= 0 else None


def some_rows(tensor: Tensor) -> dict[int, Tensor]:
    """Axis -> a few rows of the tensor along that axis; of a small tensor, all of it under -1."""
    if tensor.numel() <= WHOLE:
        whole = tensor.detach().clone()
        return dict.fromkeys(range(tensor.dim()), whole) | {-1: whole}
    found = {}
    for axis, size in enumerate(tensor.shape):
        if size < 2:
            continue
        last = tensor.dim() - 1
        nearest = last if axis != last else last - 1  # along which the most rows are taken
        place = tuple(
            slice(None) if i == axis else slice(None, None, -(-n // (3 if i == nearest else 2)))
            for i, n in enumerate(tensor.shape)
        )
        found[axis] = tensor.detach()[place].clone()
    return found


class Recorder(TorchFunctionMode):
    """Writes down every call of the model that is not silent; no tensor and no module is marked. What a user's hook
    computes is followed, but is no call of the model; what an autograd function does in its forward is looked into."""

    def __init__(self, model: nn.Module, *, modules: bool = False) -> None:
        super().__init__()
        self.model, self.aside = model, 0
        self.program, self.gradients = Program(), Gradients()
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._writers: dict[int, int] = {}
        self._free: set[int] = set()  # values that depend on no input, and indices of no input's own
        self._weights = {_place(p) for p in model.parameters()}
        self._constants = {_place(b) for b in model.buffers()}
        self._names = {id(m): name for name, m in model.named_modules()} if modules else {}
        self._running: list[str] = []

    def begin(self, place: Any, tensor: Tensor, *, carries: bool) -> None:
        """An input of the model."""
        number = self._number(tensor, (), -1, carries=carries, ids=not tensor.is_floating_point())
        self.program.values[number].given = carries and tensor.dim() > 2
        self.program.inputs[place] = number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        silent = kind_of(name) == "silent"
        if here.run is not self:
            return func(*args, **kwargs)
        self.gradients.follow(name, args)
        if silent and name not in ("detach", "data", "zeros_like", "ones_like", "empty_like", "_base"):
            return func(*args, **kwargs)
        given = tensors_in((*args, *kwargs.values()))
        before = [self._of(t) for t in given]
        on = torch.is_grad_enabled()
        graph = on or self.gradients.in_function()
        if on:
            torch._C._set_grad_enabled(False)
        try:
            result = func(*args, **kwargs)
        finally:
            if on:
                torch._C._set_grad_enabled(True)
        made = tensors_in((result,))
        if is_in_place(name) or kwargs.get("inplace") is True:
            made += [t for t in given[:1] if not any(t is m for m in made)]
        elif isinstance(kwargs.get("out"), Tensor):
            made += [kwargs["out"]]
        self._write(name, before, made, graph and not silent, silent)
        return result

    def _write(self, name: str, operands: Sequence[int], made: Sequence[Tensor], graph: bool, silent: bool) -> None:
        program = self.program
        silent = silent or self.aside > 0
        number = -1 if silent else len(program.calls)
        parents = tuple(dict.fromkeys(operands))
        values = [program.values[v] for v in parents]
        carries = graph and any(v.carries for v in values)
        ids = any(v.ids for v in values)
        begins = graph and not carries and ids and (name in _LOOKUPS or "one_hot" in name)
        free = all(v in self._free for v in parents)
        weight = free and any(v.weight for v in values)
        unknown = bool(operands) and not silent and kind_of(name) == ""
        opaque = self.gradients.in_function() and (unknown or any(v.opaque for v in values))
        results = tuple(
            self._number(
                t, parents, number, carries=carries or (begins and any(not v.parents for v in values)), weight=weight,
                ids=ids and not t.is_floating_point(), written=is_in_place(name),
            )
            for t in made
        )  # fmt: skip
        if carries and kind_of(name) == "view" and all(v.given for v in values if v.carries):
            for result in results:
                program.values[result].given = True
        self._free.update(results if free else ())
        for result, tensor in zip(results, made, strict=True):
            program.values[result].opaque = opaque and tensor.is_floating_point()
            if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or ids):
                self._free.add(result)  # which weights are picked (of an expert) is no part of them
        if not silent:
            program.calls.append(Call(number, name, tuple(operands), results))

    def _of(self, tensor: Tensor) -> int:
        """The number of a tensor as it is now."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            if known[2] == _version(tensor):
                return known[1]
            writer = self._writers.get(_place(tensor))  # another view of its memory was written to
            parents = (known[1],) if writer is None else (known[1], writer)
            call = -1 if writer is None else self.program.values[writer].call
            carries = any(self.program.values[p].carries for p in parents)
            return self._number(tensor, parents, call, carries=carries)
        weight = _place(tensor) in self._weights
        if weight or not tensor.is_floating_point() or tensor.numel() < 2 or _place(tensor) in self._constants:
            number = self._number(tensor, (), -1, weight=weight)
            self._free.add(number)
            return number
        # nobody saw it being made (an autograd function, a kernel): of what was last made in its shape
        values = self.program.values
        shape = tuple(tensor.shape)
        parent = next((i for i in reversed(range(len(values))) if values[i].carries and values[i].shape == shape), None)
        number = self._number(tensor, () if parent is None else (parent,), -1, carries=parent is not None)
        values[number].opaque = self.gradients.in_function()
        return number

    def carrying(self, values: Any) -> int:
        """The number of the first tensor among arguments or results that carries; −1 where none does."""
        numbers = [self._known[id(t)][1] for t in tensors_in(values) if id(t) in self._known]
        return next((n for n in numbers if self.program.values[n].carries), -1)

    def _number(
        self, tensor: Tensor, parents: tuple[int, ...], call: int, *, carries: bool = False, weight: bool = False,
        ids: bool = False, written: bool = False,
    ) -> int:  # fmt: skip
        number = len(self.program.values)
        carries = carries and (tensor.is_floating_point() or tensor.is_complex())
        rows = some_rows(tensor) if carries and tensor.numel() and not tensor.is_complex() else {}
        self.program.values.append(Value(parents, call, tuple(tensor.shape), carries, weight, ids, rows=rows))
        self._known[id(tensor)] = (weakref.ref(tensor), number, _version(tensor))
        if written:
            self._writers[_place(tensor)] = number
        return number

    def finish(self, output: Any) -> Program:
        """The program, with what the model returned."""
        self.program.outputs = [self._of(t) for t in tensors_in((output,)) if id(t) in self._known]
        return self.program


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> int:
    """Where its memory lies."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # of a class of its own, or not there yet
        return id(tensor)
