"""Record one forward pass as a list of ATen calls.

    tape, output = record(model, pixel_values=pixels)

The model runs once, as it is, under ``torch.no_grad()``. Nothing is wrapped, patched or registered on it: a dispatch
mode sees every ATen call below autograd. A call is data: a name, the numbers of the values that it reads and makes,
and a function that repeats it. A value never changes once it has a number: a write in place makes a new value, and
views of the same memory get new numbers through a call named ``overlay``.

Private names of torch are used here and in ``calls.py``, ``memory.py`` and ``state.py`` only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whyformer.tape.calls import Call, Slot, every_tensor, is_composite, slot, tensors_in
from whyformer.tape.declared import LIKES, DeclaredCalls
from whyformer.tape.memory import Geometry, elements, geometry, memory, overlay, restride
from whyformer.tape.modules import ModuleNames
from whyformer.tape.opening import OPENED, open_attention, open_product, open_sum
from whyformer.tape.state import SWITCHES
from whyformer.tape.tables import name_set
from whyformer.tape.values import Tape

aten = torch.ops.aten

__all__ = ["RAW", "Recorder", "record", "record_call"]


# -- which values are held -------------------------------------------------------------------------------------------
# views, and elementwise or rowwise functions: cheap to compute again
_CHEAP = name_set(
    "view _unsafe_view _reshape_alias reshape transpose t permute expand clone unsqueeze squeeze select slice alias "
    "lift_fresh contiguous _to_copy split split_with_sizes chunk unbind cat stack index gather roll flip "
    "constant_pad_nd pixel_shuffle unfold as_strided diagonal repeat index_select im2col overlay narrow copy "
    "slice_scatter select_scatter masked_fill masked_scatter where index_put repeat_interleave tril triu "
    "sub rsub mul div pow neg abs tanh sigmoid erf exp exp2 log log1p expm1 softplus relu silu gelu mish erfc sqrt "
    "rsqrt reciprocal square clamp clamp_min clamp_max maximum minimum hardtanh hardsigmoid hardswish elu "
    "leaky_relu sin cos log_sigmoid_forward threshold _softmax _safe_softmax native_layer_norm _fused_rms_norm "
    "mean var var_mean sum amax ones zeros arange scalar_tensor causal_mask logical_not bitwise_not eq ne lt le gt ge "
    "full full_like zeros_like ones_like"
)
_PRODUCTS = name_set("mm bmm addmm baddbmm matmul")
_LONGEST = 8  # at most so many calls in a row are repeated to compute one value


# -- the recorder ----------------------------------------------------------------------------------------------------
_DETACH = aten.detach.default
# the C++ kernel of an operator that is defined by others; OpOverload.decompose may take one in Python instead
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FUSED_ATTENTION = name_set(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
RAW = name_set("empty empty_like new_empty new_empty_strided empty_strided empty_permuted")
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_BIAS = 1  # axes: what addmm adds with more of them is no bias but another branch


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    name: str
    full_name: str  # with its namespace but that of torch, without an underscore for in place
    mutable: bool
    composite: bool
    random: bool


_FACTS: dict[Any, _Facts] = {}


def _facts(operator: Any) -> _Facts:
    known = _FACTS.get(operator)
    if known is None:
        schema = operator._schema
        composite = is_composite(operator)
        random = torch.Tag.nondeterministic_seeded in operator.tags
        name = schema.name.split("::")[1]
        name, full = name.rstrip("_") or name, schema.name.rstrip("_").removeprefix("aten::")
        known = _FACTS[operator] = _Facts(name, full, schema.is_mutable, composite, random)
    return known


class _Forget:
    """Drop the number of a tensor that died. Holds the table, not the tape: a tape in its own callbacks would be a
    cycle."""

    __slots__ = ("key", "numbers", "stale")

    def __init__(self, numbers: dict[int, int], stale: dict[int, Any], key: int) -> None:
        self.numbers, self.stale, self.key = numbers, stale, key

    def __call__(self, _: Any) -> None:
        self.numbers.pop(self.key, None)
        self.stale.pop(self.key, None)


class Recorder(TorchDispatchMode):
    """Record every ATen call while active.

    Args:
        change: number of a value -> function that replaces the value as it is made. For interventions: the rest of the
            pass runs on what the function returns.
        hold: numbers of the values to hold; None holds those that are costly to compute again.
        declared: operation -> what it is like, see :class:`whyformer.tape.declared.DeclaredCalls`.
        wide: what the model makes in half precision is made in float32, also under an autocast of its own.

    While ``paused``, calls run without being recorded.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        change: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        hold: frozenset[int] | None = None,
        declared: Mapping[Any, str] | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.tape, self.declared = Tape(), DeclaredCalls(weakref.proxy(self), declared or {})
        self.change, self.hold, self.wide = dict(change or {}), hold, wide
        self.paused = False
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._memory: dict[int, dict[int, None]] = {}  # storage -> ids of the tensors that lie in it
        self._unsorted: list[int] = []  # ids not yet in _memory: only a write in place asks for it
        self._stale: dict[int, list[tuple[int, Geometry]]] = {}  # views whose memory was written through another tensor
        self._restore: dict[int, tuple[Tensor, Tensor]] = {}  # given value -> (tensor, what it held before a write)
        self._depth: list[int] = []  # of each value, how many calls are repeated to compute it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models run eagerly during a pass; torch would otherwise wrap each call a second time

    # -- numbers of tensors
    def given(self, tensor: Tensor, *, is_input: bool = False) -> int:
        """Number a tensor that no call made."""
        known = self.tape._numbers.get(id(tensor))
        if known is not None:
            return known
        n = self._new(tensor, True)
        self.tape.given.add(n)
        self.tape._signature = hash((self.tape._signature, n, tuple(self.tape.shapes[n]), is_input))
        if is_input:
            self.tape.inputs.add(n)
        if not tensor.is_inference():
            self.tape.versions[n] = tensor._version
        return n

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor as it is now; one that was never seen is given."""
        n = self.tape._numbers.get(id(tensor))
        if n is None:
            return self.given(tensor)
        return self._refreshed(tensor, n) if self._stale and id(tensor) in self._stale else n

    def _new(self, tensor: Tensor, held: bool, depth: int = 0) -> int:
        n = self.tape._add(torch.Size() if tensor.is_nested else tensor.shape, tensor.dtype, tensor if held else None)
        self._depth.append(0 if held else depth)
        self._name(tensor, n)
        return n

    def _name(self, tensor: Tensor, n: int) -> None:
        """Let ``n`` be the number of a tensor from now on."""
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
            # the wrapper may have died while torch held the tensor
            tensor._fix_weakref()  # type: ignore[attr-defined]
        return tensor

    def _sharing(self, tensor: Tensor) -> list[Tensor]:
        """Living tensors in the memory of a tensor."""
        for key in self._unsorted:
            if (other := self._alive(key)) is not None:
                self._memory.setdefault(memory(other), {})[key] = None
        self._unsorted.clear()
        place = memory(tensor)
        found = [self._alive(key) for key in self._memory.get(place, ())]
        # an id may have passed to another tensor
        return [t for t in found if t is not None and memory(t) == place]

    def _refreshed(self, view: Tensor, old: int) -> int:
        """Number a view anew whose memory was written through another tensor. This is done when it is read, so that
        the tape does not depend on which unused views are alive."""
        writes = self._stale[id(view)]
        n = self._new(view, True)
        function = overlay(geometry(view), [g for _, g in writes], elements(view))
        self.note(
            "overlay", function, tuple(map(slot, range(len(writes) + 1))), {}, (old, *(m for m, _ in writes)), (n,)
        )
        return n

    # -- calls
    def slots_of(self, argument: Any, operands: list[int]) -> Any:
        """Put slots in the place of the tensors of an argument and append their numbers to ``operands``."""
        if isinstance(argument, Tensor):
            operands.append(self.number(argument))
            return slot(len(operands) - 1)
        if type(argument) in (list, tuple) and argument and type(argument[0]) not in (int, float, bool):
            return [self.slots_of(a, operands) for a in argument]
        return argument

    def note(
        self,
        name: str,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Iterable[int],
        results: Iterable[int],
        **more: Any,
    ) -> None:
        call = Call(len(self.tape.calls), name, operator, args, kwargs, tuple(operands), tuple(results), **more)
        self.tape._note(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a subclass says what it is made of; its inner calls arrive here
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if self.wide and kwargs.get("dtype") in _HALF:
            given = args[0].dtype if args and isinstance(args[0], Tensor) else None
            kwargs = {**kwargs, "dtype": torch.float64 if given == torch.float64 else torch.float32}
        facts = _facts(func)
        if facts.composite:  # operators that are made of others arrive whole in inference mode
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func is _DETACH:
            # no call: torch detaches what a factory returns if somebody holds it, so the tape would depend on that
            out = func(*args)
            self._name(out, self.number(args[0]))
            return out
        operands: list[int] = []
        slots = tuple([self.slots_of(a, operands) for a in args])
        named = {k: self.slots_of(a, operands) for k, a in kwargs.items()} if kwargs else {}
        if facts.mutable:
            return self._in_place(func, facts, args, kwargs, slots, named, operands)
        out = func(*args, **kwargs)
        declared = self.declared.of_operator(facts.full_name)
        if declared is not None:
            return self.declared.close(declared, func, slots, named, operands, out)
        first, made = len(self.tape.calls), [out] if isinstance(out, Tensor) else list(tensors_in(out))
        if facts.name in _FUSED_ATTENTION and not _dropout(func, args, kwargs):
            open_attention(self.step, self.tape, _named(func, slots, named), operands, made)
        elif facts.name in ("addmm", "baddbmm") and len(self.tape.shapes[operands[0]]) > _LARGEST_BIAS:
            open_sum(self.step, self.tape, _named(func, slots, named), operands, made[0])
        elif facts.name == "prod" and len(slots) > 1 and self.tape.shapes[operands[0]][slots[1]] == 2:
            open_product(self.step, self.tape, _named(func, slots, named), operands, made[0])
        elif facts.name in OPENED:
            OPENED[facts.name](self.step, self.tape, _named(func, slots, named), operands, made[0])
        else:
            if self.change:
                out = self._changed(out)
                made = [out] if isinstance(out, Tensor) else list(tensors_in(out))
            random = facts.random and facts.name not in _FUSED_ATTENTION
            operator = func if facts.name != "as_strided" else restride(args[0])
            self.note(
                facts.name,
                operator,
                slots,
                named,
                operands,
                self.number_results(facts.name, operands, made, random),
                random=random,
            )
            return out
        return self.altered(first, out)

    def number_results(self, name: str, operands: list[int], made: list[Tensor], random: bool) -> list[int]:
        """Number the results of a call and hold those that are costly."""
        tape, first = self.tape, len(self.tape)
        depth = 1 + max((self._depth[o] for o in operands), default=0)
        changed = bool(self.change) and any(first + i in self.change for i in range(len(made)))
        if changed or random or not operands or name in RAW:
            held = True
        elif self.hold is not None:
            held = any(first + i in self.hold for i in range(len(made)))  # a call is repeated whole
        elif depth > _LONGEST:
            held = True
        elif name in _PRODUCTS:  # unless it is larger than its operands, as the map of an attention is
            held = sum(t.numel() for t in made) <= sum(math.prod(tape.shapes[o]) for o in operands)
        else:
            held = name not in _CHEAP
        return [self._new(t, held, depth) for t in made]

    def _changed(self, out: Any) -> Any:
        """Replace results by what an intervention makes of them."""
        first, made = len(self.tape), list(tensors_in(out))
        if not any(first + i in self.change for i in range(len(made))):
            return out
        change = (self.change.get(first + i) for i in range(len(made)))
        new = [t if f is None else _in_layout_of(t, f(t)) for t, f in zip(made, change, strict=True)]
        return new[0] if isinstance(out, Tensor) else type(out)(new)

    # -- calls that stand for others
    def step(
        self, name: str, function: Any, operands: Sequence[int], made: Any, *constants: Any, dtype: Any = None
    ) -> int:
        """Record a call that was not made on its own, as a part of one that was. ``made`` is the tensor that exists,
        or the shape of one that nobody computed yet."""
        tape = self.tape
        if isinstance(made, Tensor):
            n = self._new(made, True)
        else:
            dtype = dtype or tape.dtypes[operands[0]]
            n = tape._add(torch.Size(made), dtype, None)
            self._depth.append(1 + max((self._depth[o] for o in operands), default=0))
        self.note(name, function, (*map(slot, range(len(operands))), *constants), {}, operands, (n,))
        return n

    def altered(self, first: int, out: Any) -> Any:
        """Replace what one call returned that was recorded as the calls from ``first`` on, if an intervention changes
        the result of one of these."""
        tape, new = self.tape, dict[int, Tensor]()
        for call in tape.calls[first:] if self.change else ():
            if any(o in new for o in call.operands):
                made = call([new[o] if o in new else tape[o] for o in call.operands])
                new.update(zip(call.results, made, strict=True))
            new.update({r: self.change[r](new.get(r, tape[r])) for r in call.results if r in self.change})
        for n, tensor in new.items():
            tape.hold(n, tensor)
        returned = out if isinstance(out, Tensor) else out[0]
        changed = new.get(tape.number(returned))
        if changed is None:
            return out
        self._name(changed, tape.number(returned))
        return changed if isinstance(out, Tensor) else (changed, *out[1:])

    # -- writes in place
    def _in_place(
        self, func: Any, facts: _Facts, args: Any, kwargs: Any, slots: Any, named: dict[str, Any], operands: list[int]
    ) -> Any:
        tape = self.tape
        tensors = [t for a in (*args, *kwargs.values()) for t in tensors_in(a)]
        writes = tuple(_written(func, slots, named))
        groups = [self._sharing(tensors[i]) for i in writes]
        for t in {id(t): t for group in groups for t in group}.values():  # what was recorded stays as it was
            n = tape._numbers[id(t)]
            held = tape._held[n]
            if held is not None and any(held is other for group in groups for other in group):
                tape._held[n] = held.clone()
                if n in tape.given and n not in self._restore:
                    self._restore[n] = (held, tape._held[n])  # type: ignore[assignment]
        operator = restride(tensors[writes[0]]) if facts.name == "as_strided" else func
        out = func(*args, **kwargs)
        if len(tape) in self.change:
            tensors[writes[0]].copy_(self.change[len(tape)](tensors[writes[0]].clone()))
        fresh = [t for t in tensors_in(out) if not any(t is other for other in tensors)]
        results = [self._new(tensors[i], True) for i in writes] + [self._new(t, True) for t in fresh]
        overwritten = writes if operator is func else ()
        name, kind = facts.name, ""
        if (declared := self.declared.of_operator(facts.full_name)) is not None:
            name, kind = declared.name, LIKES.get(declared.like, declared.like)
        self.note(name, operator, slots, named, operands, results, writes=overwritten, random=facts.random, kind=kind)
        for i, n, group in zip(writes, results, groups, strict=False):
            for view in group:
                if not any(view is tensors[j] for j in writes):
                    self._stale.setdefault(id(view), []).append((n, geometry(tensors[i])))
        return out

    def restore(self) -> None:
        """Undo what the pass wrote into tensors that it was given: inputs, buffers, caches. The tape keeps what they
        became."""
        tape = self.tape
        for n, (tensor, before) in self._restore.items():
            tape.written.add(n)
            for t in self._sharing(tensor):  # values that still lie in that memory
                m = tape._numbers[id(t)]
                if tape._held[m] is t:
                    tape._held[m] = t.clone()
            tensor.copy_(before)
            self._name(tensor, n)
        self._restore.clear()


def _in_layout_of(old: Tensor, new: Tensor) -> Tensor:
    """Return a tensor with the strides of the one that it replaces: which calls follow depends on them."""
    if new.shape != old.shape or new.stride() == old.stride():
        return new
    return torch.empty_like(old).copy_(new)


def _written(func: Any, slots: Any, named: Mapping[str, Any]) -> Iterator[int]:
    """Positions among the operands of the arguments that an operator writes into."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = slots[i] if i < len(slots) else named.get(argument.name)
            for slot in given if isinstance(given, list) else [given]:
                if isinstance(slot, Slot):
                    yield slot.index


def _named(func: Any, slots: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    return {a.name: s for a, s in zip(func._schema.arguments, slots, strict=False)} | dict(named)


def _dropout(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(_named(func, args, kwargs).get("dropout_p", 0.0))


def record(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Tape, Any]:
    """Run ``model(*args, **kwargs)`` once and record its ATen calls: :func:`record_call` without options."""
    return record_call(model, args, kwargs)


def _own(value: Any) -> Any:
    """A copy of a cache of keys and values, to which a pass would append; other values themselves."""
    return copy.deepcopy(value) if type(value).__name__.endswith("Cache") else value


def record_call(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    change: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    hold: frozenset[int] | None = None,
    names: bool = False,
    declared: Mapping[Any, str] | None = None,
    wide: bool = False,
) -> tuple[Tape, Any]:
    """Run a model once and record its ATen calls.

    The model, its buffers, its inputs and torch's switches are left as they were, after an exception too.

    Args:
        model: what is called with ``args`` and ``kwargs``.
        change: number of a value -> function that replaces it as it is made, see :class:`Recorder`.
        hold: numbers of the values to hold, see :class:`Recorder`.
        names: note which module makes each call.
        declared: operation -> what it is like, see :class:`~whyformer.tape.declared.DeclaredCalls`.
        wide: see :class:`Recorder`.

    Returns:
        The tape and what the model returned.
    """
    args, kwargs = tuple(map(_own, args)), {name: _own(value) for name, value in (kwargs or {}).items()}
    recorder = Recorder(change, hold, declared, wide)
    for tensor in every_tensor((args, kwargs)):
        recorder.given(tensor, is_input=True)
    named: Any = ModuleNames(model, recorder) if names else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), SWITCHES:
        try:
            with recorder, recorder.declared.watching(), named:
                output = model(*args, **kwargs)
            for tensor in every_tensor(output):
                recorder.number(tensor)  # its memory may have been written last through another view
        finally:
            recorder.restore()
    return recorder.tape, output
