"""Modules that write a well-known operation out by hand, and the operation they stand for.

Operations are not semantics: GPT-2's ``gelu_new`` is written with mul, pow, tanh and add, and would get another
explanation than the same function called as ``F.gelu``. An activation is looked for by its class name (so that nothing
has to be imported), a normalisation in any module with an ε; in both cases what the operation gives is compared with
the module's own output in the run. Where they agree the module keeps its value and gets the operation's rule; where
they do not, the module runs again and its operations are seen as they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.engine.declared import remember_inputs, run_declared
from whyformer.engine.isolation import here, inside
from whyformer.engine.mode import Interception
from whyformer.engine.norms import Norm, nearest, nearest_norm
from whyformer.engine.operations import operation
from whyformer.engine.readings import tensors
from whyformer.errors import ModelError
from whyformer.models.walking import modules
from whyformer.rules.core import NATIVE, Composite, Rule, Ruled
from whyformer.rules.registered import Declared

_tanh_gelu = partial(functional.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "NewGELUActivation": _tanh_gelu,
    "FastGELUActivation": _tanh_gelu,
    "GELUTanh": _tanh_gelu,
    "PytorchGELUTanh": _tanh_gelu,
    "AccurateGELUActivation": _tanh_gelu,
    "BloomGelu": _tanh_gelu,
    "QuickGELUActivation": _quick_gelu,
    "QuickGELU": _quick_gelu,
    "GELUActivation": functional.gelu,
}
"""Class name -> the form of GELU that it may stand for."""


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Norm] = weakref.WeakKeyDictionary()
"""Module -> the kind of norm that it was found to be, without its parameters."""
_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def _row(composite: Composite, name: str) -> Rule | None:
    """The composite's rule for an operation, None where that is its ordinary adjoint."""
    rule = composite.rule(name, operation(name).kind)
    return None if rule is NATIVE else rule


def suspect(module: nn.Module, composite: Composite) -> bool:
    """Whether the module may stand for an operation that has a rule of its own: worth comparing."""
    name = type(module).__name__
    if name in ACTIVATIONS:
        return _row(composite, "gelu") is not None and _by_hand(module)
    # torch's own are seen as the functions that they call, also in a class that inherits from them
    if isinstance(module, _TORCH_NORMS) or any(module._modules.values()) or not _row(composite, "layer_norm"):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    return len(own) <= 2 and all(p.dim() <= 2 for p in own) and ("norm" in name.lower() or bool(_epsilons(module)))


def _by_hand(module: nn.Module) -> bool:
    return type(module).__name__ in ACTIVATIONS and getattr(module, "act", None) is not functional.gelu


def stands_for(
    module: nn.Module, x: Tensor, output: Any, used: list[Tensor] | None = None
) -> Callable[[Tensor], Tensor] | None:
    """The activation or :class:`Norm` that gives this output of the module for its input, or None; ``used`` are the
    parameters that it ran with, where they are its own for the length of a pass only."""
    if not isinstance(output, Tensor) or output.shape != x.shape or not x.numel():
        return None
    named = ACTIVATIONS.get(type(module).__name__)
    if named is not None:
        return nearest([named], x, output)
    found = nearest_norm(_own(module) if used is None else used, _epsilons(module), x, output, _KNOWN.get(module))
    if found is not None:
        _KNOWN[module] = replace(found, weight=None, bias=None)
    return found


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _epsilons(module: nn.Module) -> list[float]:
    return [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]


@contextlib.contextmanager
def canonized(mode: Interception, within: nn.Module | None = None) -> Iterator[None]:
    """For the length of a run (of a part of the model), modules that stand for an operation of the composite run as
    that operation."""
    handles = []
    try:
        for function in mode.declared.functions:
            remember_inputs(function)
        for module in modules(within or mode.model) if mode.composite.rules else ():
            declared = mode.declared.of_module(module)
            if declared is not None:
                handles.extend(_around(module, mode, partial(_as_declared, declared)))
            elif _by_hand(module) and mode.composite.rule("gelu", "activation") is NATIVE and mode.composite.audit:
                # its own derivative is right, also where it is hidden in an autograd function (BLOOM)
                handles.extend(_around(module, mode, partial(_as_declared, Declared("gelu"))))
            elif suspect(module, mode.composite):
                handles.extend(_around(module, mode, _canonical))
        yield
    finally:
        for handle in handles:
            handle.remove()


Seen = Callable[[Interception, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


def _around(module: nn.Module, mode: Interception, then: Seen) -> list[Any]:
    """The module runs muted and without a graph; what ``then`` makes of its call is its output."""
    seen: list[tuple[Tensor, int]] = []

    # torch marks a hook as one that takes kwargs only after it is there: a call in another thread may come between
    def before(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        given = [t for t in (*args, *(v for kwargs in rest for v in kwargs.values())) if isinstance(t, Tensor)]
        if here.run is mode and mode.muted == 0 and mode.carries(tuple(given), {}):
            mode.muted = id(module)
            mode.used = [] if any(p.is_meta for p in _own(module)) else None  # weights that are put in for each pass
            seen[:] = [(t, t._version) for t in given]
            torch._C._set_grad_enabled(False)

    def after(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if here.run is not mode or mode.muted != id(module):
            return None
        kwargs, output = rest
        mode.muted = 0
        if any(t._version != version for t, version in seen):
            raise ModelError(
                f"the module {type(module).__name__} changes its input in place, so it cannot be run again to be "
                "compared with a known operation; let it return a new tensor"
            )
        seen.clear()
        torch._C._set_grad_enabled(True)
        return then(mode, module, args, kwargs, output)

    # around the module's own forward alone: what users' hooks do to its output is seen as it is
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, prepend=True),
    ]


def _canonical(
    mode: Interception, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """The module keeps its own forward value and gets the rule of the operation that it stands for."""
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    found = None
    if len(given) == 1:
        if isinstance(output, Tensor) and output.device != given[0].device:  # accelerate moves what it is given
            given = [given[0].to(output.device)]
        with inside(None), torch.no_grad():
            used = None if mode.used is None else list(dict.fromkeys(mode.used))
            found = stands_for(module, given[0].detach(), output, used)
    name = "gelu" if not isinstance(found, Norm) else "layer_norm" if found.centred else "rms_norm"
    rule = None if found is None else _row(mode.composite, name)
    if rule is None or found is None:
        return module.forward(*args, **kwargs)
    if rule.relevance is not None and name == "gelu":  # its closed form of the gradient may be that of another variant
        rule = replace(rule, gradient=None)
    mode.canonical = mode.canonical or isinstance(found, Norm)
    info = found.info() if isinstance(found, Norm) else {}
    made = Ruled.apply(rule, mode.run, _once(output, found), info, *given)
    made._whyformer_activated = name == "gelu"
    return made if mode.watch is None else mode.watch(mode, name, found, tuple(given), {}, made)


def _as_declared(
    declared: Declared, mode: Interception, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
) -> Any:
    mode.muted = id(module)
    try:
        made = run_declared(
            mode, declared, type(module).__name__, module.forward, args, kwargs,
            own=_own(module), epsilons=_epsilons(module),
        )  # fmt: skip
        for tensor in tensors((made,)):  # the mode has not seen it grow, and need not
            tensor._whyformer_seen = True  # type: ignore[attr-defined]
        return made
    finally:
        mode.muted = 0


def _once(value: Tensor, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``value`` the first time (the module's own result), ``compute`` ever after (its gradient)."""
    state = [value]

    def call(x: Tensor) -> Tensor:
        return state.pop() if state else compute(x)

    return call
