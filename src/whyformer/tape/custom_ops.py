"""Record custom operations, which a user registers with a similar operation or a rule. Each counts as one call.

    tape, output = record_call(model, args, custom_ops={Swish: "silu"})

The calls inside the forward of a custom ``torch.autograd.Function`` or ``torch.nn.Module`` are recorded too, but no
later call reads their results: the returned tensor gets a new number, as the result of one call that repeats the
forward.
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
from whyformer.tape.calls import is_composite, needed_calls, tensors_in
from whyformer.tape.modules import module_hooks
from whyformer.tape.norms import nearest_norm
from whyformer.tape.tables import KINDS, name_set

if TYPE_CHECKING:
    from whyformer.tape.recording import Recorder

__all__ = ["LIKES", "OPAQUE_LAYER", "CustomCalls", "recorded_as"]

aten = torch.ops.aten

# -- operations and kinds to choose from -----------------------------------------------------------------------------
OPAQUE_LAYER = "opaque layer"
"""Kind of linear operations whose weights the recorded call does not show."""

_NORM = "norm"
_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "sub": torch.sub}
_KIND_NAMES = name_set(
    "view selection linear mean scale rectifier activation clip softmax power statistic identity adjoint"
)
_COMPOSITES = {  # operators that torch decomposes into others
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
    kinds = {name: kind for name, kind in KINDS.items() if kind not in ("silent", "moments", "sampling", "solve")}
    kinds |= {name: kind for kind, names in _COMPOSITES.items() for name in names.split()}
    kinds |= {kind: kind for kind in _KIND_NAMES}
    return {name: OPAQUE_LAYER if kind in ("linear", "add") else kind for name, kind in kinds.items()}


LIKES = _likes()
"""Maps the values of ``like=`` to the kind of the recorded call."""


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
"""Maps operators that torch decomposes into a single call to the name of that call."""


def recorded_as(operation: Any) -> Any:
    """Return the key by which calls of an operation are recognized: the full name of an operator without ``aten::``, or
    the class of an autograd function or module.

    Args:
        operation: such a key, a torch function, or an operator of ``torch.library``.

    Raises:
        InputError: it is none of these, there is no such operator, or torch decomposes it into others, which are
            recorded instead.
    """
    if isinstance(operation, type) and issubclass(operation, torch.autograd.Function | nn.Module):
        return operation
    operator = getattr(operation, "_opoverload", operation)
    operator = getattr(operator, "overloadpacket", operator)
    name = operator if isinstance(operator, str) else getattr(operator, "_qualified_op_name", None)
    if name is None and _is_of_torch(operator):
        name = getattr(operator, "__name__", None)
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{operation!r} is not an operation: pass the name of an operator, a function of torch, or a class of "
            "torch.autograd.Function or nn.Module. Of other functions, the operations that they call are recorded: "
            "write such a function as a module"
        )
    name = name.removeprefix("aten::").rstrip("_")
    name = _BELOW_AUTOGRAD.get(name, name)
    overloads = _overloads(name)
    if not overloads:
        raise InputError(
            f"torch has no operator '{name}': correct the name, import the module that defines it first, or name the "
            "class of the module or of the autograd function that computes it"
        )
    if all(map(is_composite, overloads)):
        raise InputError(
            f"torch decomposes '{name}' into other operations, which are explained instead: leave it out, or name the "
            "class of the module or of the autograd function that calls it"
        )
    return name


def _is_of_torch(function: Any) -> bool:
    """Return True for a function or method of torch."""
    module = getattr(getattr(function, "__objclass__", function), "__module__", None)
    return callable(function) and not isinstance(function, type) and str(module).partition(".")[0] == "torch"


def _overloads(name: str) -> list[Any]:
    """Return the overloads of an operator without those that write into given tensors; none if it does not exist."""
    space, _, operator = name.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), operator, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads() if "out" not in o]


# -- a pass with custom operations -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Operation:
    """A custom operation.

    Attributes:
        name: name for errors.
        like: the similar operation, or the kind.
        parameters: parameters and buffers of a module, candidates for the weight and bias of a norm.
        epsilons: candidates for the ε of a norm.
        holds_weights: True if it is a module with weight matrices.
    """

    name: str
    like: str
    parameters: tuple[Tensor, ...] = ()
    epsilons: tuple[float, ...] = ()
    holds_weights: bool = False

    @property
    def kind(self) -> str:
        """Kind of its calls."""
        return LIKES.get(self.like, self.like)


@dataclass(eq=False)
class CustomCalls:
    """Records the calls of custom operations in one pass.

    Attributes:
        recorder: the recorder of the pass.
        likes: maps an operation (a name such as ``"gelu"`` or ``"my_ns::op"``, a class of autograd functions or of
            modules) to a key of :data:`LIKES`, or to a kind for which composites have a custom rule.
    """

    recorder: Recorder
    likes: Mapping[Any, str]
    starts: list[tuple[Any, int, int]] = field(default_factory=list)  # (running forward, next call, next value)

    # -- operators
    def of_operator(self, name: str) -> _Operation | None:
        """Return the custom operation with a full name without ``aten::``; None if there is none."""
        like = self.likes.get(name)
        return None if like is None else _Operation(name if "::" in name else f"aten::{name}", like)

    # -- modules and autograd functions
    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that observes the custom modules and autograd functions while a pass runs."""
        classes = [key for key in self.likes if isinstance(key, type)]
        with ExitStack() as stack:
            for function in (c for c in classes if issubclass(c, torch.autograd.Function)):
                stack.enter_context(_FORWARDS.calls_of(function, self))
            if any(issubclass(c, nn.Module) for c in classes):
                stack.enter_context(module_hooks(self._enter, self._leave, with_kwargs=True))
            yield

    def _class_of(self, module: nn.Module) -> type | None:
        return next((c for c in type(module).__mro__ if c in self.likes), None)

    def _enter(self, module: nn.Module) -> None:
        if self._class_of(module) is not None:
            self.begin(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        registered = self._class_of(module)
        if registered is None:
            return None
        parameters = (*module.parameters(), *module.buffers())
        epsilons = tuple(v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2)
        matrices = any(t.dim() > 1 and (isinstance(t, nn.Parameter) or not t.is_floating_point()) for t in parameters)
        operation = _Operation(_class_name(type(module)), self.likes[registered], parameters, epsilons, matrices)
        return self.end(module, operation, module.forward, args, kwargs, output)

    def begin(self, key: Any) -> None:
        """Mark the beginning of a forward, identified by the object ``key``."""
        self.starts.append((key, len(self.recorder.tape.calls), len(self.recorder.tape)))

    def end(self, key: Any, operation: _Operation, function: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Record a forward that has run as one call; return its output, replaced if an intervention changes it."""
        self.recorder.paused = True
        try:
            return self._end(key, operation, function, args, kwargs, output)
        finally:
            self.recorder.paused = False

    def _end(self, key: Any, operation: _Operation, function: Any, args: Any, kwargs: Any, output: Any) -> Any:
        recorder, tape = self.recorder, self.recorder.tape
        while self.starts[-1][0] is not key:  # forwards that an exception ended
            self.starts.pop()
        _, first_call, first_value = self.starts.pop()
        inner = tape.calls[first_call:]
        if any(call.operands[i] < first_value for call in inner for i in call.writes):
            raise ModelError(
                f"'{operation.name}' is registered as one operation, but modifies an existing tensor in place, so "
                "it cannot be repeated: let it return a new tensor"
            )
        operands: list[int] = []
        slots = tuple(recorder.slots_of(a, operands) for a in args)
        named = {k: recorder.slots_of(a, operands) for k, a in kwargs.items()}
        reached = needed_calls(inner, [recorder.number(output)], operands) if isinstance(output, Tensor) else []
        if isinstance(output, Tensor) and any(output is t for t in tensors_in((*args, *kwargs.values()))):
            output = output.view_as(output)
        inner_results = {r for call in reached for r in call.results}
        hidden_operands = {o for call in reached for o in call.operands} - inner_results - set(operands)
        return self.close(operation, function, slots, named, operands, output, tuple(sorted(hidden_operands)))

    def close(
        self,
        operation: _Operation,
        function: Any,
        slots: Any,
        named: Any,
        operands: list[int],
        output: Any,
        hidden_operands: tuple[int, ...] = (),
    ) -> Tensor:
        """Record the call of a custom operation; return its output, replaced if an intervention changes it."""
        if not isinstance(output, Tensor):
            raise ModelError(
                f"'{operation.name}' is registered as one operation, but returns a {type(output).__name__}: let "
                "it return one tensor"
            )
        recorder, tape, first = self.recorder, self.recorder.tape, len(self.recorder.tape.calls)
        numbers = [a for a in (*slots, *named.values()) if isinstance(a, float) and 0 < a < 1e-2]
        floating = [o for o in operands if tape.floating(o)]
        if operation.like in _SUMS and len(floating) == 2:
            self._sum(operation, floating, output)
        elif operation.kind == _NORM:
            parameters = [*operation.parameters, *(tape[o] for o in floating[1:])]
            self._norm(operation, floating[0], parameters, [*operation.epsilons, *numbers], output)
        else:
            results = recorder.number_results(operation.name, operands, [output], False)
            more = {"hidden_operands": hidden_operands, "holds_weights": operation.holds_weights}
            recorder.add_call(operation.name, function, slots, named, operands, results, kind=operation.kind, **more)
        changed: Tensor = recorder.with_changes(first, output)
        return changed

    def _sum(self, operation: _Operation, branches: Sequence[int], output: Tensor) -> None:
        """Record a sum or difference of two tensors, after checking its values."""
        expected = _SUMS[operation.like](*(self.recorder.tape[b] for b in branches))
        if expected.shape != output.shape or not torch.allclose(expected, output, rtol=1e-3, atol=1e-6):
            raise ModelError(f"'{operation.name}' is registered as {operation.like}, but gives other values")
        self.recorder.add_part(operation.like, _SUMS[operation.like], branches, result=output)

    def _norm(
        self, operation: _Operation, x: int, parameters: Sequence[Tensor], epsilons: Sequence[float], output: Tensor
    ) -> None:
        """Record a norm as the calls of which it consists, after finding the norm that gives its values."""
        recorder, tape = self.recorder, self.recorder.tape
        norm = nearest_norm(parameters, epsilons, tape[x], output)
        if norm is None:
            raise ModelError(
                f"'{operation.name}' is registered as a norm, but gives other values than layer_norm and rms_norm "
                "over the last axis with its parameters: register a custom rule, rule=whyformer.rules.Rule(...)"
            )
        step = recorder.add_part
        if norm.centred:
            x = step("sub", torch.sub, [x, step("mean", torch.mean, [x], [-1], True)])
        variance = step("mean", torch.mean, [step("square", torch.square, [x])], [-1], True)
        inverse = step("rsqrt", torch.rsqrt, [step("add", torch.add, [variance], norm.eps)])
        steps: list[tuple[str, Any, int]] = [("mul", torch.mul, inverse)]
        if norm.weight is not None:
            weight = recorder.number(norm.weight)
            steps.append(("mul", torch.mul, step("add", torch.add, [weight], 1) if norm.plus_one else weight))
        if norm.bias is not None:
            steps.append(("add", torch.add, recorder.number(norm.bias)))
        for name, function, other in steps[:-1]:
            x = step(name, function, [x, other])
        name, function, other = steps[-1]
        step(name, function, [x, other], result=output)


def _class_name(kind: type) -> str:
    """Return the name of calls of a class, which must differ from the names of operators."""
    return f"{kind.__module__}.{kind.__name__}" if hasattr(aten, kind.__name__) else kind.__name__


# -- autograd functions ----------------------------------------------------------------------------------------------
class _ReplacedForwards:
    """Classes of autograd functions whose ``forward`` is temporarily replaced, to report its calls to the pass that is
    recorded in the same thread. A dispatch mode does not see ``apply``, and model code may hold references to it. If
    several passes run at once, the last restores the class."""

    def __init__(self) -> None:
        self.lock, self.counts, self.before = threading.Lock(), dict[type, int](), dict[type, Any]()
        self.local = threading.local()

    @contextmanager
    def calls_of(self, function: type, calls: CustomCalls) -> Iterator[None]:
        passes: dict[type, CustomCalls] = self.local.__dict__.setdefault("passes", {})
        with self.lock:
            self.counts[function] = self.counts.get(function, 0) + 1
            if self.counts[function] == 1:
                self._replace(function)
        before = passes.get(function)
        passes[function] = calls
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

    def _replace(self, function: Any) -> None:
        original, self.before[function] = function.forward, vars(function).get("forward")
        without_ctx = function.setup_context is not torch.autograd.Function.setup_context

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls = self.local.__dict__.get("passes", {}).get(function)
            if calls is None:
                return original(*args, **kwargs)
            calls.begin(args)
            output = original(*args, **kwargs)
            operation = _Operation(_class_name(function), calls.likes[function])
            return calls.end(args, operation, function.apply, args if without_ctx else args[1:], kwargs, output)

        function.forward = staticmethod(forward)

    def _restore(self, function: Any) -> None:
        before = self.before.pop(function)
        if before is None:
            del function.forward
        else:
            function.forward = before


_FORWARDS = _ReplacedForwards()
