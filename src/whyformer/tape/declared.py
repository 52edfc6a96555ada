"""Operations of which a user says what they are like: each counts as one call.

    tape, output = record_call(model, args, declared={Swish: "silu"})

What the forward of a ``torch.autograd.Function`` or a ``torch.nn.Module`` calls inside is recorded too, but nothing
reads it: the tensor that it returns gets a new number, made by a call that runs the whole forward again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError, ModelError
from whyformer.tape.calls import Call, fill, is_composite, slot, tensors_in
from whyformer.tape.norms import nearest_norm
from whyformer.tape.tables import KINDS, name_set

if TYPE_CHECKING:
    from whyformer.tape.recording import Recorder

__all__ = ["HIDDEN_LAYER", "LIKES", "DeclaredCalls", "Forward", "recorded_as"]

aten = torch.ops.aten

# -- what an operation may be like -----------------------------------------------------------------------------------
HIDDEN_LAYER = "hidden layer"
"""Kind of an operation that is linear, whose weights nobody sees."""

_NORM = "norm"
_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "sub": torch.sub}
_KIND_NAMES = name_set(
    "view selection linear mean scale rectifier activation clip softmax power statistic identity adjoint"
)
_BY_OTHERS = {  # operators that torch makes of others
    "view": "flatten unflatten ravel hsplit vsplit hstack vstack dstack concat concatenate tile swapaxes moveaxis",
    "linear": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d einsum tensordot grid_sample",
    "mean": "interpolate fold adaptive_avg_pool1d",
    "activation": "logsigmoid softsign hardswish selu celu",
    "selection": "max_pool1d max_pool2d max_pool3d",
    "scale": "batch_norm",
    "softmax": "softmax",
    "log softmax": "log_softmax",
    _NORM: "layer_norm rms_norm group_norm instance_norm normalisation",
}


def _likes() -> dict[str, str]:
    found = {name: kind for name, kind in KINDS.items() if kind not in ("silent", "moments", "sampling", "solve")}
    found |= {name: kind for kind, names in _BY_OTHERS.items() for name in names.split()}
    found |= {kind: kind for kind in _KIND_NAMES}
    return {name: HIDDEN_LAYER if kind in ("linear", "add") else kind for name, kind in found.items()}


LIKES = _likes()
"""What an operation may be said to be like -> the kind of its call."""


# -- names of operators ----------------------------------------------------------------------------------------------
_BELOW_AUTOGRAD = {
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "special_softmax": "_softmax",
    "special_log_softmax": "_log_softmax",
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "rms_norm": "_fused_rms_norm",
    "prelu": "_prelu_kernel",
    "log_sigmoid": "log_sigmoid_forward",
    "logsigmoid": "log_sigmoid_forward",
}
"""Operators that torch makes of others -> the only call that they make."""


def recorded_as(operation: Any) -> Any:
    """Return under what the calls of an operation are known: the full name of an operator without ``aten::``, or the
    class of an autograd function or a module.

    Args:
        operation: one of these, a function of torch, or an operator of ``torch.library``.

    Raises:
        InputError: it is none of these, or an operator that torch makes of others, which are recorded in its place.
    """
    if isinstance(operation, type) and issubclass(operation, torch.autograd.Function | nn.Module):
        return operation
    operator = getattr(operation, "_opoverload", operation)
    operator = getattr(operator, "overloadpacket", operator)
    name = operator if isinstance(operator, str) else getattr(operator, "_qualified_op_name", None)
    if name is None and callable(operator) and not isinstance(operator, type):
        name = getattr(operator, "__name__", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"{operation!r} is no name of an operation, torch function, autograd function or module class")
    name = name.removeprefix("aten::").rstrip("_")
    name = _BELOW_AUTOGRAD.get(name, name)
    if _is_made_of_others(name):
        raise InputError(
            f"torch makes '{name}' of other operations, which are explained in its place: leave it out, or name the "
            "class of the module or of the autograd function that calls it"
        )
    return name


def _is_made_of_others(name: str) -> bool:
    packet = None if "::" in name else getattr(aten, name, None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads() if "out" not in o]
    return bool(overloads) and all(map(is_composite, overloads))


# -- a pass with declared operations ---------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Forward:
    """A declared operation as a function of the tensors that it was given.

    Attributes:
        function: what is called.
        args, kwargs: its arguments, with slots in the place of tensors.
        holds_weights: True if it is a module with matrices of its own.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    holds_weights: bool = False

    def __call__(self, *tensors: Tensor) -> Tensor:
        made: Tensor = self.function(*fill(self.args, tensors), **{k: fill(a, tensors) for k, a in self.kwargs.items()})
        return made


@dataclass(frozen=True)
class _Operation:
    """A declared operation, as errors name it, and what its norm may consist of."""

    name: str
    like: str
    own: tuple[Tensor, ...] = ()
    epsilons: tuple[float, ...] = ()
    holds_weights: bool = False


@dataclass(eq=False)
class DeclaredCalls:
    """The declared operations of one pass, while it is recorded.

    Attributes:
        recorder: of the pass.
        likes: operation -> what it is like: a name of :data:`LIKES`, or a kind of its own for which composites have a
            rule. Operations are names (``"gelu"``, ``"my_ns::op"``), classes of autograd functions and of modules.
    """

    recorder: Recorder
    likes: Mapping[Any, str]
    thread: int = field(default_factory=threading.get_ident)
    starts: list[tuple[Any, int, int]] = field(default_factory=list)  # (what runs, next call, next value)

    # -- operators
    def of_operator(self, name: str) -> _Operation | None:
        """Return what is said of an operator, by its full name without ``aten::``."""
        like = self.likes.get(name)
        return None if like is None else _Operation(name if "::" in name else f"aten::{name}", like)

    # -- modules and autograd functions
    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the modules and autograd functions that are declared, while a pass runs."""
        classes = [key for key in self.likes if isinstance(key, type)]
        with ExitStack() as stack:
            for function in (c for c in classes if issubclass(c, torch.autograd.Function)):
                stack.enter_context(_WATCHED.calls_of(function, self))
            if any(issubclass(c, nn.Module) for c in classes):
                from torch.nn.modules import module

                for hook in (
                    module.register_module_forward_pre_hook(self._enter),
                    module.register_module_forward_hook(self._leave, with_kwargs=True),
                ):
                    stack.callback(hook.remove)
            yield

    def _class_of(self, module: nn.Module) -> type | None:
        here = threading.get_ident() == self.thread
        return next((c for c in type(module).__mro__ if c in self.likes), None) if here else None

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._class_of(module) is not None:
            self.begin(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        declared = self._class_of(module)
        if declared is None:
            return None
        own = (*module.parameters(), *module.buffers())
        epsilons = tuple(v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2)
        matrices = any(t.dim() > 1 and (isinstance(t, nn.Parameter) or not t.is_floating_point()) for t in own)
        operation = _Operation(_named(type(module)), self.likes[declared], own, epsilons, matrices)
        return self.end(module, operation, module.forward, args, kwargs, output)

    def begin(self, what: Any) -> None:
        """Note where the calls of a forward begin."""
        self.starts.append((what, len(self.recorder.tape.calls), len(self.recorder.tape)))

    def end(self, what: Any, operation: _Operation, function: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Record one call in the place of a forward that has run; return what the forward returns."""
        self.recorder.paused = True
        try:
            return self._end(what, operation, function, args, kwargs, output)
        finally:
            self.recorder.paused = False

    def _end(self, what: Any, operation: _Operation, function: Any, args: Any, kwargs: Any, output: Any) -> Any:
        recorder, tape = self.recorder, self.recorder.tape
        while self.starts[-1][0] is not what:  # an exception passed through it
            self.starts.pop()
        _, first_call, first_value = self.starts.pop()
        inner = tape.calls[first_call:]
        if any(call.operands[i] < first_value for call in inner for i in call.writes):
            raise ModelError(
                f"'{operation.name}' is declared to be like an operation, but changes in place what was there before, "
                "so it cannot be run again to be compared with it; let it return a new tensor"
            )
        operands: list[int] = []
        slots = tuple(recorder.slots_of(a, operands) for a in args)
        named = {k: recorder.slots_of(a, operands) for k, a in kwargs.items()}
        reached = _reached(inner, recorder.number(output), operands) if isinstance(output, Tensor) else []
        if isinstance(output, Tensor) and any(output is t for t in tensors_in((*args, *kwargs.values()))):
            output = output.view_as(output)
        made = {r for call in reached for r in call.results}
        beside = {o for call in reached for o in call.operands} - made - set(operands)
        return self.close(operation, function, slots, named, operands, output, tuple(sorted(beside)))

    def close(
        self,
        operation: _Operation,
        function: Any,
        slots: Any,
        named: Any,
        operands: list[int],
        output: Any,
        beside: tuple[int, ...] = (),
    ) -> Tensor:
        """Record the call of a declared operation that gave an output, and return this."""
        if not isinstance(output, Tensor):
            raise ModelError(
                f"'{operation.name}' is declared to be like an operation, but returns a {type(output).__name__}, no "
                "tensor"
            )
        recorder, tape, first = self.recorder, self.recorder.tape, len(self.recorder.tape.calls)
        numbers = [a for a in (*slots, *named.values()) if isinstance(a, float) and 0 < a < 1e-2]
        floating = [o for o in operands if tape.floating(o)]
        if operation.like in _SUMS and len(floating) == 2:
            self._sum(operation, floating, output)
        elif LIKES.get(operation.like) == _NORM:
            given = [tape[o] for o in floating[1:]]
            self._norm(operation, floating[0], [*operation.own, *given], [*operation.epsilons, *numbers], output)
        else:
            forward = Forward(function, slots, named, operation.holds_weights)
            results = recorder.number_results(operation.name, operands, [output], False)
            kind = LIKES.get(operation.like, operation.like)
            places = tuple(map(slot, range(len(operands))))
            recorder.note(operation.name, forward, places, {}, operands, results, kind=kind, beside=beside)
        made: Tensor = recorder.altered(first, output)
        return made

    def _sum(self, operation: _Operation, branches: Sequence[int], output: Tensor) -> None:
        """Record a sum or a difference as such."""
        made = _SUMS[operation.like](*(self.recorder.tape[b] for b in branches))
        if made.shape != output.shape or not torch.allclose(made, output, rtol=1e-3, atol=1e-6):
            raise ModelError(f"'{operation.name}' is declared to be like {operation.like}, but gives other values")
        self.recorder.step(operation.like, _SUMS[operation.like], branches, output)

    def _norm(
        self, operation: _Operation, x: int, own: Sequence[Tensor], epsilons: Sequence[float], output: Tensor
    ) -> None:
        """Record a norm as the calls that it stands for."""
        recorder, tape = self.recorder, self.recorder.tape
        norm = nearest_norm(own, epsilons, tape[x], output)
        if norm is None:
            raise ModelError(
                f"'{operation.name}' is declared to be a norm, but gives other values than layer_norm and rms_norm "
                "over the last axis with its parameters: give it a rule of its own, "
                "rule=whyformer.rules.core.Rule(...)"
            )
        shape, step = tape.shapes[x], recorder.step
        row = (*shape[:-1], 1)
        if norm.centred:
            x = step("sub", torch.sub, [x, step("mean", torch.mean, [x], row, [-1], True)], shape)
        variance = step("mean", torch.mean, [step("square", torch.square, [x], shape)], row, [-1], True)
        inverse = step("rsqrt", torch.rsqrt, [step("add", torch.add, [variance], row, norm.eps)], row)
        steps: list[tuple[str, Any, int]] = [("mul", torch.mul, inverse)]
        if norm.weight is not None:
            weight = recorder.number(norm.weight)
            if norm.plus_one:
                weight = step("add", torch.add, [weight], tape.shapes[weight], 1)
            steps.append(("mul", torch.mul, weight))
        if norm.bias is not None:
            steps.append(("add", torch.add, recorder.number(norm.bias)))
        for i, (name, function, other) in enumerate(steps):
            x = step(name, function, [x, other], output if i == len(steps) - 1 else shape)


def _named(kind: type) -> str:
    """Return how calls of a class are named, which is no name of an operator."""
    return f"{kind.__module__}.{kind.__name__}" if hasattr(aten, kind.__name__) else kind.__name__


def _reached(calls: Sequence[Call], output: int, ends: Sequence[int]) -> list[Call]:
    """Return those of some calls that make an output, otherwise than through ``ends``."""
    needed, found = {output}, list[Call]()
    for call in reversed(calls):
        if any(r in needed and r not in ends for r in call.results):
            needed.update(call.operands)
            found.append(call)
    return found


# -- autograd functions ----------------------------------------------------------------------------------------------
class _Watched:
    """Autograd functions whose ``forward`` tells the pass that is recorded in its thread what it is given and returns:
    ``apply`` is called past every mode, also by names that it was given before. The last of several passes at once
    restores the class."""

    def __init__(self) -> None:
        self.lock, self.counts, self.before = threading.Lock(), dict[type, int](), dict[type, Any]()
        self.here = threading.local()

    @contextmanager
    def calls_of(self, function: type, declared: DeclaredCalls) -> Iterator[None]:
        passes: dict[type, DeclaredCalls] = self.here.__dict__.setdefault("passes", {})
        with self.lock:
            self.counts[function] = self.counts.get(function, 0) + 1
            if self.counts[function] == 1:
                self._put(function)
        before = passes.get(function)
        passes[function] = declared
        try:
            yield
        finally:
            if before is None:
                del passes[function]
            else:
                passes[function] = before
            with self.lock:
                self.counts[function] -= 1
                if not self.counts[function]:
                    self._restore(function)

    def _put(self, function: Any) -> None:
        original, self.before[function] = function.forward, vars(function).get("forward")
        apart = function.setup_context is not torch.autograd.Function.setup_context

        def forward(*given: Any, **kwargs: Any) -> Any:
            declared = self.here.__dict__.get("passes", {}).get(function)
            if declared is None:
                return original(*given, **kwargs)
            declared.begin(given)
            output = original(*given, **kwargs)
            operation = _Operation(_named(function), declared.likes[function])
            return declared.end(given, operation, function.apply, given if apart else given[1:], kwargs, output)

        function.forward = staticmethod(forward)

    def _restore(self, function: Any) -> None:
        before = self.before.pop(function)
        if before is None:
            del function.forward
        else:
            function.forward = before


_WATCHED = _Watched()
