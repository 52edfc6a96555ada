"""Record one forward pass as a list of ATen calls.

    tape, output = record(model, pixel_values=pixels)

The unmodified model runs once under ``torch.no_grad()``, without hooks or wrappers: a ``TorchDispatchMode`` receives
every ATen call below autograd. Each tensor of the pass is a *value* with a number. A call stores its name, the
numbers of its input and output values, and a function that repeats it. Values are immutable: an in-place write
creates a new value, and views of the same memory get new numbers through a call named ``overlay``.

Only this module, ``calls.py``, ``custom_ops.py``, ``memory.py`` and ``state.py`` use private names of torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whyformer.tape.calls import Call, Slot, every_tensor, is_composite, slot, tensors_in
from whyformer.tape.custom_ops import CustomCalls
from whyformer.tape.decomposition import DECOMPOSED, FUSED_ATTENTION
from whyformer.tape.memory import Geometry, geometry, memory, overlay, restride, storage_size
from whyformer.tape.modules import ModuleNames
from whyformer.tape.state import SWITCHES
from whyformer.tape.tables import COMPARISONS, ELEMENTWISE, KINDS, PRODUCTS, REDUCTIONS, SOFTMAXES, name_set
from whyformer.tape.values import Tape

aten = torch.ops.aten

__all__ = ["RAW", "Recorder", "record", "record_call", "without_side_effects"]


# -- which values are stored -----------------------------------------------------------------------------------------
# views, constants, and elementwise or rowwise functions are recomputed; sums, where branches meet, are stored
_CHEAP = (
    frozenset(name for name, kind in KINDS.items() if kind in ("view", "silent"))
    | (ELEMENTWISE | REDUCTIONS | COMPARISONS | SOFTMAXES)
    | name_set("native_layer_norm _fused_rms_norm ones zeros arange")
) - name_set("add lerp addcdiv")
_LONGEST = 8  # maximum number of consecutive calls repeated to recompute a value


@lru_cache(1024, typed=True)
def _form(
    function: Any, operands: tuple[tuple[torch.Size, torch.dtype], ...], *constants: Any
) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of the result of a function, from those of its operands."""
    like = function(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in operands), *constants)
    return like.shape, like.dtype


# -- the recorder ----------------------------------------------------------------------------------------------------
_DETACH = aten.detach.default
# the C++ kernel of a composite operator; OpOverload.decompose may select a Python decomposition instead
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
RAW = name_set("empty empty_like new_empty new_empty_strided empty_strided empty_permuted")
_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class _OperatorInfo:
    """Properties of an operator, from its schema."""

    name: str
    full_name: str  # with the namespace unless it is aten, without the trailing underscore of in-place operators
    mutable: bool
    composite: bool
    random: bool


_INFO: dict[Any, _OperatorInfo] = {}


def _info(operator: Any) -> _OperatorInfo:
    info = _INFO.get(operator)
    if info is None:
        schema = operator._schema
        composite = is_composite(operator)
        random = torch.Tag.nondeterministic_seeded in operator.tags
        name = schema.name.split("::")[1]
        name, full = name.rstrip("_") or name, schema.name.rstrip("_").removeprefix("aten::")
        info = _INFO[operator] = _OperatorInfo(name, full, schema.is_mutable, composite, random)
    return info


class _Forget:
    """Weak-reference callback that drops the number of a dead tensor. It references the tables, not the tape, to
    avoid a reference cycle."""

    __slots__ = ("key", "numbers", "stale")

    def __init__(self, numbers: dict[int, int], stale: dict[int, Any], key: int) -> None:
        self.numbers, self.stale, self.key = numbers, stale, key

    def __call__(self, _: Any) -> None:
        self.numbers.pop(self.key, None)
        self.stale.pop(self.key, None)


class Recorder(TorchDispatchMode):
    """Record every ATen call while active.

    Args:
        change: maps the number of a value to a function that replaces the value as soon as it is computed
            (intervention). The rest of the pass uses the replacement.
        stored: numbers of the values to store; None stores those that are expensive to recompute.
        custom_ops: maps an operation to a similar one, see :class:`whyformer.tape.custom_ops.CustomCalls`.
        wide: run calls that request half precision, such as casts, in float32, also under an autocast in the model.

    While ``paused`` is True, calls run without being recorded.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        change: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        stored: frozenset[int] | None = None,
        custom_ops: Mapping[Any, str] | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.tape, self.custom_ops = Tape(), CustomCalls(weakref.proxy(self), custom_ops or {})
        self.change, self.stored, self.wide = dict(change or {}), stored, wide
        self.paused = False
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._memory: dict[int, dict[int, None]] = {}  # storage -> ids of its tensors
        self._unsorted: list[int] = []  # ids that are not in _memory yet; only in-place writes need them there
        self._stale: dict[int, list[tuple[int, Geometry]]] = {}  # views whose memory was written through another tensor
        self._restore: dict[int, tuple[Tensor, Tensor]] = {}  # leaf value -> (tensor, its content before a write)
        self._depth: list[int] = []  # for each value, the number of calls repeated to recompute it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models run eagerly during a pass; torch would otherwise wrap each call a second time

    # -- numbers of tensors
    def leaf(self, tensor: Tensor, *, is_input: bool = False) -> int:
        """Number a leaf: a tensor that no recorded call computed."""
        number = self.tape._numbers.get(id(tensor))
        if number is not None:
            return number
        n = self._new(tensor, True)
        self.tape.leaves.add(n)
        self.tape._signature = hash((self.tape._signature, n, tuple(self.tape.shapes[n]), is_input))
        if is_input:
            self.tape.inputs.add(n)
        return n

    def number(self, tensor: Tensor) -> int:
        """Return the number of the current content of a tensor. A tensor without a number is a leaf."""
        n = self.tape._numbers.get(id(tensor))
        if n is None:
            return self.leaf(tensor)
        return self._refreshed(tensor, n) if self._stale and id(tensor) in self._stale else n

    def _new(self, tensor: Tensor, store: bool, depth: int = 0) -> int:
        n = self.tape._add(torch.Size() if tensor.is_nested else tensor.shape, tensor.dtype, tensor if store else None)
        self._depth.append(0 if store else depth)
        self._assign(tensor, n)
        return n

    def _assign(self, tensor: Tensor, n: int) -> None:
        """Assign number ``n`` to a tensor."""
        key, tape = id(tensor), self.tape
        if key not in tape._numbers:
            self._refs[key] = weakref.ref(tensor, _Forget(tape._numbers, self._stale, key))
            self._unsorted.append(key)
        elif self._stale:
            self._stale.pop(key, None)
        tape._numbers[key] = n

    def _alive(self, key: int) -> Tensor | None:
        tensor = self._refs[key]() if key in self.tape._numbers else None
        if tensor is not None:
            # the Python wrapper may have been deallocated while C++ code still owned the tensor
            tensor._fix_weakref()  # type: ignore[attr-defined]
        return tensor

    def _sharing(self, tensor: Tensor) -> list[Tensor]:
        """Return the live tensors that share the memory of a tensor."""
        for key in self._unsorted:
            if (other := self._alive(key)) is not None:
                self._memory.setdefault(memory(other), {})[key] = None
        self._unsorted.clear()
        place = memory(tensor)
        tensors = [self._alive(key) for key in self._memory.get(place, ())]
        # the id of a dead tensor may now belong to a tensor in other memory
        return [t for t in tensors if t is not None and memory(t) == place]

    def _refreshed(self, view: Tensor, old: int) -> int:
        """Assign a new number to a view whose memory was written through another tensor. This happens when the view is
        next read, so that the tape does not depend on which unused views are alive."""
        writes = self._stale[id(view)]
        n = self._new(view, True)
        function = overlay(geometry(view), [g for _, g in writes], storage_size(view))
        self.add_call(
            "overlay", function, tuple(map(slot, range(len(writes) + 1))), {}, (old, *(m for m, _ in writes)), (n,)
        )
        return n

    # -- calls
    def slots_of(self, argument: Any, operands: list[int]) -> Any:
        """Replace the tensors in an argument by slots and append their numbers to ``operands``."""
        if isinstance(argument, Tensor):
            operands.append(self.number(argument))
            return slot(len(operands) - 1)
        if type(argument) in (list, tuple) and argument and type(argument[0]) not in (int, float, bool):
            return [self.slots_of(a, operands) for a in argument]
        return argument

    def add_call(
        self,
        name: str,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Iterable[int],
        results: Iterable[int],
        **more: Any,
    ) -> None:
        """Add a call to the tape; ``more`` are the other fields of :class:`~whyformer.tape.calls.Call`."""
        call = Call(len(self.tape.calls), name, operator, args, kwargs, tuple(operands), tuple(results), **more)
        self.tape._add_call(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # let the tensor subclass unwrap itself; its inner calls are recorded
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if self.wide and kwargs.get("dtype") in _HALF:
            source = args[0].dtype if args and isinstance(args[0], Tensor) else None
            kwargs = {**kwargs, "dtype": torch.float64 if source == torch.float64 else torch.float32}
        info = _info(func)
        if info.composite:  # in inference mode, composite operators are dispatched without being decomposed
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func is _DETACH:
            # not recorded: torch detaches the result of a factory only if another reference to it exists
            out = func(*args)
            self._assign(out, self.number(args[0]))
            return out
        operands: list[int] = []
        slots = tuple([self.slots_of(a, operands) for a in args])
        keywords = {k: self.slots_of(a, operands) for k, a in kwargs.items()} if kwargs else {}
        if info.mutable:
            return self._in_place(func, info, args, kwargs, slots, keywords, operands)
        out = func(*args, **kwargs)
        operation = self.custom_ops.of_operator(info.full_name)
        if operation is not None:
            return self.custom_ops.close(operation, func, slots, keywords, operands, out)
        first, results = len(self.tape.calls), [out] if isinstance(out, Tensor) else list(tensors_in(out))
        decompose = DECOMPOSED.get(info.name)
        if decompose is not None:
            arguments = _by_name(func, slots, keywords)
            if decompose(self.add_part, self.tape, arguments, operands, results[0]):
                return self.with_changes(first, out)
        random = info.random and info.name not in FUSED_ATTENTION
        operator = func if info.name != "as_strided" else restride(args[0])
        numbers = self.number_results(info.name, operands, results, random)
        self.add_call(info.name, operator, slots, keywords, operands, numbers, random=random)
        return self.with_changes(first, out)

    def number_results(self, name: str, operands: list[int], results: list[Tensor], random: bool) -> list[int]:
        """Number the results of a call and store those that are expensive to recompute."""
        tape, first = self.tape, len(self.tape)
        depth = 1 + max((self._depth[o] for o in operands), default=0)
        if random or not operands or name in RAW:
            store = True
        elif self.stored is not None:
            store = any(first + i in self.stored for i in range(len(results)))  # one call recomputes all of its results
        elif depth > _LONGEST:
            store = True
        elif name in PRODUCTS:  # stored unless larger than the operands, as attention scores are
            store = sum(t.numel() for t in results) <= sum(math.prod(tape.shapes[o]) for o in operands)
        else:
            store = name not in _CHEAP
        return [self._new(t, store, depth) for t in results]

    # -- fused calls recorded as several calls
    def add_part(
        self, name: str, function: Any, operands: Sequence[int], *constants: Any, result: Tensor | None = None
    ) -> int:
        """Record one part of a fused call as a separate call; return the number of its result. ``result`` is its value;
        None if it is to be computed only when read."""
        tape = self.tape
        if result is not None:
            n = self._new(result, True)
        else:
            forms = tuple((tape.shapes[o], tape.dtypes[o]) for o in operands)
            shape, dtype = _form(function, forms, *(tuple(c) if isinstance(c, list) else c for c in constants))
            n = tape._add(shape, dtype, None)
            self._depth.append(1 + max((self._depth[o] for o in operands), default=0))
        self.add_call(name, function, (*map(slot, range(len(operands))), *constants), {}, operands, (n,))
        return n

    def with_changes(self, first: int, out: Any) -> Any:
        """Apply the interventions to a call of the model that was recorded as the calls from ``first`` on; return its
        output ``out``, with the results that change replaced."""
        tape, new = self.tape, dict[int, Tensor]()
        for call in tape.calls[first:] if self.change else ():
            if any(o in new for o in call.operands):
                results = call([new[o] if o in new else tape[o] for o in call.operands])
                new.update(zip(call.results, results, strict=True))
            for r in (r for r in call.results if r in self.change):
                value = new[r] if r in new else tape[r]
                # cloned, because torch marks the result of a view operator as a view, and can mark a tensor only once
                new[r] = _in_layout_of(value, self.change[r](value).clone())
        if not new:
            return out
        for n, tensor in new.items():
            tape.store(n, tensor)

        def replaced(result: Any) -> Any:
            n = tape.number(result) if isinstance(result, Tensor) and tape.knows(result) else -1
            if n not in new:
                return result
            self._assign(new[n], n)
            return new[n]

        return replaced(out) if isinstance(out, Tensor) else type(out)(map(replaced, out))

    # -- writes in place
    def _in_place(
        self, func: Any, info: _OperatorInfo, args: Any, kwargs: Any, slots: Any, keywords: Any, operands: list[int]
    ) -> Any:
        tape = self.tape
        tensors = [t for a in (*args, *kwargs.values()) for t in tensors_in(a)]
        writes = tuple(_written_operands(func, slots, keywords))
        groups = [self._sharing(tensors[i]) for i in writes]
        for t in {id(t): t for group in groups for t in group}.values():  # recorded values must not change
            n = tape._numbers[id(t)]
            stored = tape._stored[n]
            if stored is not None and any(stored is other for group in groups for other in group):
                tape._stored[n] = stored.clone()
                if isinstance(stored, torch.nn.Parameter):
                    tape.changes_weights = True  # not restored: a model that rescales its weights (RWKV) does so once
                elif n in tape.leaves and n not in self._restore:
                    self._restore[n] = (stored, tape._stored[n])  # type: ignore[assignment]
        operator = restride(tensors[writes[0]]) if info.name == "as_strided" else func
        out = func(*args, **kwargs)
        if len(tape) in self.change:
            tensors[writes[0]].copy_(self.change[len(tape)](tensors[writes[0]].clone()))
        fresh = [t for t in tensors_in(out) if not any(t is other for other in tensors)]
        results = [self._new(tensors[i], True) for i in writes] + [self._new(t, True) for t in fresh]
        overwritten = writes if operator is func else ()
        name, kind = info.name, ""
        if (operation := self.custom_ops.of_operator(info.full_name)) is not None:
            name, kind = operation.name, operation.kind
        more = {"writes": overwritten, "random": info.random, "kind": kind}
        self.add_call(name, operator, slots, keywords, operands, results, **more)
        for i, n, group in zip(writes, results, groups, strict=False):
            for view in group:
                if not any(view is tensors[j] for j in writes):
                    self._stale.setdefault(id(view), []).append((n, geometry(tensors[i])))
        return out

    def restore(self) -> None:
        """Undo the writes of the pass into its leaves (inputs, buffers, caches), except parameters. The tape keeps the
        new values."""
        tape = self.tape
        for n, (tensor, before) in self._restore.items():
            tape.written.add(n)
            for t in self._sharing(tensor):  # values that still use that memory
                m = tape._numbers[id(t)]
                if tape._stored[m] is t:
                    tape._stored[m] = t.clone()
            tensor.copy_(before)
            self._assign(tensor, n)
        self._restore.clear()


def _in_layout_of(old: Tensor, new: Tensor) -> Tensor:
    """Return ``new`` with the strides of ``old``, on which later calls may depend."""
    if new.shape != old.shape or new.stride() == old.stride():
        return new
    return torch.empty_like(old).copy_(new)


def _written_operands(func: Any, slots: Any, keywords: Mapping[str, Any]) -> Iterator[int]:
    """Yield the positions, among the operands, of the arguments that an operator writes into."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = slots[i] if i < len(slots) else keywords.get(argument.name)
            for slot in value if isinstance(value, list) else [value]:
                if isinstance(slot, Slot):
                    yield slot.index


def _by_name(func: Any, slots: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {a.name: s for a, s in zip(func._schema.arguments, slots, strict=False)} | dict(keywords)


def record(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Tape, Any]:
    """Run ``model(*args, **kwargs)`` once and record its ATen calls, see :func:`record_call`."""
    return record_call(model, args, kwargs)


def without_side_effects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with copies of key–value caches, which the call would extend in place."""

    def copied(value: Any) -> Any:
        return copy.deepcopy(value) if type(value).__name__.endswith("Cache") else value

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


def record_call(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    change: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    stored: frozenset[int] | None = None,
    names: bool = False,
    custom_ops: Mapping[Any, str] | None = None,
    wide: bool = False,
) -> tuple[Tape, Any]:
    """Run a model once and record its ATen calls.

    Buffers, inputs and the global settings of torch are restored, also after an exception.

    Args:
        model: the callable to record.
        args, kwargs: its arguments.
        change: maps the number of a value to a function that replaces it, see :class:`Recorder`.
        stored: numbers of the values to store, see :class:`Recorder`.
        names: record which module made each call.
        custom_ops: maps an operation to a similar one, see :class:`~whyformer.tape.custom_ops.CustomCalls`.
        wide: see :class:`Recorder`.

    Returns:
        The tape, and the output of the model.
    """
    args, kwargs = without_side_effects(args, kwargs or {})
    recorder = Recorder(change, stored, custom_ops, wide)
    for tensor in every_tensor((args, kwargs)):
        recorder.leaf(tensor, is_input=True)
    module_names: Any = ModuleNames(model, recorder).watching() if names else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), SWITCHES:
        try:
            with recorder, recorder.custom_ops.watching(), module_names:
                output = model(*args, **kwargs)
            for tensor in every_tensor(output):
                recorder.number(tensor)  # the last write to its memory may have been through another view
        finally:
            recorder.restore()
    return recorder.tape, output
