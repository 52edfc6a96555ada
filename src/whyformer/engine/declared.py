"""Operations, autograd functions and modules that users gave a rule (:func:`whyformer.rules.register`), in a run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whyformer.engine import audit, unseen
from whyformer.engine.isolation import here, inside
from whyformer.engine.operations import KINDS, operation_name
from whyformer.engine.readings import carries, tensors
from whyformer.errors import InputError, ModelError, UnknownOperation, unknown
from whyformer.models.walking import modules
from whyformer.rules.core import NATIVE, Call, Composite, Rule, Ruled
from whyformer.rules.registered import Declared, declarations
from whyformer.rules.relevance.elementary import identity
from whyformer.tape.norms import nearest_norm

if TYPE_CHECKING:
    from whyformer.engine.mode import Interception

_KINDS = set(KINDS.values()) - {"", "silent", "attention"}
_NORMS = ("layer_norm", "rms_norm")
_LINEAR = ("linear", "matrix product")
_SIGNS = {"add": (1, 1), "sub": (1, -1)}
_IDENTITY = {
    "relevance": Rule("identity", identity, books=False),
    "multiplier": Rule("identity", gradient=identity, books=False),
}


@dataclass(frozen=True)
class Declarations:
    """Those that hold in a run, by what they are of."""

    operations: dict[str, Declared] = field(default_factory=dict)
    functions: dict[type, Declared] = field(default_factory=dict)
    modules: dict[type, Declared] = field(default_factory=dict)

    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.operations or self.functions or self.modules)

    def of_module(self, module: nn.Module) -> Declared | None:
        return next((self.modules[c] for c in type(module).__mro__ if c in self.modules), None)


def gather() -> Declarations:
    """What is declared here and now, checked.

    Raises:
        InputError: a key that is no operation, a ``like`` that does not exist.
    """
    made = Declarations()
    for key, declaration in declarations().items():
        if declaration.like and declaration.like not in {*KINDS, *_KINDS, "adjoint", "identity"}:
            raise unknown(
                f"{key!r} is declared to be like", declaration.like, {*KINDS, *_KINDS, "adjoint", "identity"},
                'Say an operation ("gelu", "linear" ...), a kind ("activation", "view" ...), "identity" or "adjoint"',
            )  # fmt: skip
        if isinstance(key, type) and issubclass(key, torch.autograd.Function):
            made.functions[key] = declaration
        elif isinstance(key, type) and issubclass(key, nn.Module):
            made.modules[key] = declaration
        elif isinstance(key, str):
            made.operations[key] = declaration
        elif callable(key) and not isinstance(key, type):
            made.operations[operation_name(getattr(key, "_opoverload", key))] = declaration
        else:
            raise InputError(f"{key!r} is no name of an operation, torch function, autograd function or module class")
    return made


def rule_for(declared: Declared, composite: Composite, branches: int) -> Rule | None:
    """The composite's rule for what is declared; None where it has none."""
    if declared.rule is not None:
        if composite.carrier == "relevance":
            return None if declared.rule.relevance is None else replace(declared.rule, gradient=None)
        return declared.rule if declared.rule.gradient is not None or declared.rule.hold else None
    if declared.like == "identity":
        return _IDENTITY[composite.carrier]
    if declared.like == "adjoint":
        return NATIVE if composite.carrier == "multiplier" else None
    kind = _kind(declared)
    if declared.like in _SIGNS and branches == 2:
        return composite.rule("add", kind)
    if kind in _LINEAR and composite.rule("weighted sum", kind) is not None and not _by_name(declared, composite):
        return composite.rule("weighted sum" if branches == 1 else "product", kind)
    rule = composite.rule(declared.like, kind)
    if rule is not None and rule is not NATIVE and rule.relevance is not None:
        rule = replace(rule, gradient=None)  # its closed form of the gradient may be that of another function
    return rule


def _kind(declared: Declared) -> str:
    """Of operations; what is not the name of one is a kind."""
    return KINDS.get(declared.like, declared.like)


def _by_name(declared: Declared, composite: Composite) -> bool:
    """Whether this operation has a row of its own (``mean``, ``batch_norm`` ...)."""
    return declared.like in composite.rules and declared.like not in _LINEAR


def _is_linear(declared: Declared, composite: Composite, branches: int) -> bool:
    """Whether it is said to be linear in the one tensor that carries, which may be by weights that are not seen."""
    one = branches == 1 and _kind(declared) in _LINEAR
    return one and composite.carrier == "relevance" and not _by_name(declared, composite)


def run_declared(
    mode: Interception, declared: Declared, name: str, function: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any], *, own: Sequence[Tensor] = (), epsilons: Sequence[float] = (),
) -> Any:  # fmt: skip
    """Run a call as it is declared; ``own`` parameters and ``epsilons`` are those that a module's norm may have."""
    operands, compute = _operands(function, args, kwargs)
    rule = rule_for(declared, mode.composite, len(operands))
    if rule is NATIVE or rule is None:
        before = {t.grad_fn for t in operands}
        result = function(*args, **kwargs)
        if rule is None:
            audit.unknown(mode, name, declared.like or "rule", result, operands, before)
        return result
    if _is_linear(declared, mode.composite, len(operands)):
        module = getattr(function, "__self__", None)
        rule = unseen.as_layer(mode, name, rule, (*args, *kwargs.values(), module))
    info = _signs(name, declared, operands, compute)
    if declared.like in _NORMS and mode.composite.carrier == "multiplier":
        constants = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and not carries(v)]
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, float) and 0 < v < 1e-2]
        info = _as_norm(name, operands, compute, [*own, *constants], [*epsilons, *numbers])
    return Ruled.apply(rule, mode.run, compute, info, *rule.held(operands))


def _operands(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], Callable[..., Any]]:
    """(the arguments that carry, a function of them)"""
    places: list[Any] = [i for i, v in enumerate(args) if carries(v)]
    names = [k for k, v in kwargs.items() if carries(v)]

    def compute(*operands: Tensor) -> Any:
        filled, named = list(args), dict(kwargs)
        for place, value in zip(places, operands, strict=False):
            filled[place] = value
        named.update(zip(names, operands[len(places) :], strict=True))
        with inside(None):
            result = function(*filled, **named)
        if not isinstance(result, Tensor):
            raise ModelError(f"what is declared to be like an operation returns a {type(result).__name__}, no tensor")
        return result

    return [*(args[i] for i in places), *(kwargs[k] for k in names)], compute


def _signs(name: str, declared: Declared, operands: Sequence[Tensor], compute: Callable[..., Tensor]) -> dict[str, Any]:
    """What the rules of sums read, checked."""
    if declared.like not in _SIGNS or len(operands) != 2:
        return {}
    signs = _SIGNS[declared.like]
    with torch.no_grad():
        u, v = (o.detach() for o in operands)
        if not torch.allclose(compute(u, v), u + signs[1] * v, rtol=1e-3, atol=1e-6):
            raise ModelError(f"'{name}' is declared to be like {declared.like}, but gives other values")
    return {"signs": signs}


def _as_norm(
    name: str, operands: Sequence[Tensor], compute: Callable[..., Tensor], own: Sequence[Tensor], eps: Sequence[float]
) -> dict[str, Any]:
    with torch.no_grad():
        x = operands[0].detach()
        found = nearest_norm([p.detach() for p in own], eps, x, compute(*(o.detach() for o in operands)))
    if found is None:
        raise ModelError(
            f"'{name}' is declared to be a norm, but gives other values than layer_norm and rms_norm over the last "
            "axis with its parameters: give it a rule of its own, rule=whyformer.rules.core.Rule(...)"
        )
    return {"weight": found.scale, "eps": found.eps, "axes": 1, "centred": found.centred}


# -- modules -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def declared_around(mode: Interception, within: nn.Module | None = None) -> Iterator[None]:
    """For the length of a run (of a part of the model), modules that are declared run as what they are like."""
    handles = []
    try:
        for function in mode.declared.functions:
            remember_inputs(function)
        for module in modules(within or mode.model) if mode.composite.rules and mode.declared.modules else ():
            declared = mode.declared.of_module(module)
            if declared is not None:
                handles.extend(_around(module, mode, declared))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _around(module: nn.Module, mode: Interception, declared: Declared) -> list[Any]:
    """The module runs muted and without a graph; then once more, as it is declared."""
    seen: list[tuple[Tensor, int]] = []

    # torch marks a hook as one that takes kwargs only after it is there: a call in another thread may come between
    def before(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        given = [t for t in (*args, *(v for kwargs in rest for v in kwargs.values())) if isinstance(t, Tensor)]
        if here.run is mode and mode.muted == 0 and mode.carries(tuple(given), {}):
            mode.muted = id(module)
            seen[:] = [(t, t._version) for t in given]
            torch._C._set_grad_enabled(False)

    def after(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if here.run is not mode or mode.muted != id(module):
            return None
        kwargs, _ = rest
        mode.muted = 0
        if any(t._version != version for t, version in seen):
            raise ModelError(
                f"the module {type(module).__name__} changes its input in place, so it cannot be run again to be "
                "compared with a known operation; let it return a new tensor"
            )
        seen.clear()
        torch._C._set_grad_enabled(True)
        mode.muted = id(module)
        epsilons = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
        try:
            with mode.uncounted():
                made = run_declared(
                    mode, declared, type(module).__name__, module.forward, args, kwargs,
                    own=[*module.parameters(), *module.buffers()], epsilons=epsilons,
                )  # fmt: skip
        finally:
            mode.muted = 0
        for tensor in tensors((made,)):  # the mode has not seen it grow, and need not
            tensor._whyformer_seen = True  # type: ignore[attr-defined]
        return made

    # around the module's own forward alone: what users' hooks do to its output is seen as it is
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, prepend=True),
    ]


# -- autograd functions ------------------------------------------------------------------------------------------------
_lock = threading.Lock()


def remember_inputs(function: type) -> None:
    """Let a class of ``torch.autograd.Function`` note what it is given while an explanation runs: its ``apply`` is
    called past every mode, also by names it was given before."""
    with _lock:
        if "_whyformer_remembers" in vars(function):
            return
        function._whyformer_remembers = True  # type: ignore[attr-defined]
        own_context = function.setup_context is not torch.autograd.Function.setup_context  # type: ignore[attr-defined]
        name = "setup_context" if own_context else "forward"
        original = getattr(function, name)

        def noting(ctx: Any, *given: Any, **named: Any) -> Any:
            if here.run is not None and not hasattr(ctx, "_whyformer_inputs"):  # a base class may be called from within
                inputs = (given[0] if given else named["inputs"]) if own_context else given
                ctx._whyformer_inputs = [v.detach() if isinstance(v, Tensor) else v for v in inputs]
            return original(ctx, *given, **named)

        setattr(function, name, staticmethod(noting))


def watch_function(mode: Interception, declared: Declared, node: Any, value: Tensor) -> bool:
    """Let a declared function's node pass on what its rule says; False where the composite has none."""
    function = node._forward_cls
    inputs = getattr(node, "_whyformer_inputs", None)
    places = [] if inputs is None else [i for i, v in enumerate(inputs) if isinstance(v, Tensor)]
    needs = tuple(parent is not None for parent, _ in node.next_functions)
    rule = rule_for(declared, mode.composite, sum(needs))
    if rule is None or rule is NATIVE:
        return rule is NATIVE
    if inputs is None or len(places) != len(needs) or (declared.like in _NORMS and rule.relevance is None):
        return False
    if _is_linear(declared, mode.composite, sum(needs)):
        rule = unseen.as_layer(mode, function.__name__, rule, tuple(inputs))
    settled, operands, result = rule, tuple(inputs[i] for i in places), value.detach()

    def compute(*given: Tensor) -> Any:
        filled = dict(zip(places, given, strict=True))
        return function.apply(*(filled.get(i, v) for i, v in enumerate(inputs)))

    def pass_on(ordinary: tuple[Any, ...], flows: tuple[Any, ...]) -> tuple[Any, ...] | None:
        run = mode.run
        if (mode.composite.carrier == "relevance" and not run.relevance) or flows[0] is None:
            return None
        if len(flows) > 1:
            raise UnknownOperation(f"{function.__name__} returns several tensors; only functions of one get a rule")
        info = _signs(function.__name__, declared, operands, compute)
        call = Call(operands, result, needs, compute, run, info)
        share = settled.relevance if run.relevance else settled.gradient
        parts = ordinary if share is None else share(call, flows[0])
        if run.relevance and settled.books:
            run.record(settled.name, flows[0], parts)
        wanted = [need and i not in settled.hold for i, need in enumerate(needs)]
        return tuple(p if want else None for p, want in zip(parts, wanted, strict=True))

    node.register_hook(pass_on)
    return True
