"""Modules that write a well-known operation out by hand, and the operation they stand for.

Operations are not semantics: GPT-2's ``gelu_new`` is written with mul, pow, tanh and add, and would get another
explanation than the same function called as ``F.gelu``. An activation is looked for by its class name (so that nothing
has to be imported), a normalisation in any module with an ε; in both cases what the operation gives is compared with
the module's own output in the run. Where they agree the module keeps its value and gets the operation's rule; where
they do not, the module runs again and its operations are seen as they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.engine.isolation import here, inside
from whyformer.engine.mode import Interception
from whyformer.engine.operations import operation
from whyformer.errors import ModelError
from whyformer.rules.core import NATIVE, Composite, Rule, Ruled


@dataclass(frozen=True)
class Norm:
    """y = (x − mean) / √(mean (x − mean)² + ε) · weight + bias over the last axis; without the mean, RMSNorm."""

    centred: bool
    eps: float
    weight: Tensor | None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


_tanh_gelu = functools.partial(functional.gelu, approximate="tanh")


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


_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def _row(composite: Composite, name: str) -> Rule | None:
    """The composite's rule for an operation, None where that is its ordinary adjoint."""
    rule = composite.rule(name, operation(name).kind)
    return None if rule is NATIVE else rule


def suspect(module: nn.Module, composite: Composite) -> bool:
    """Whether the module may stand for an operation that has a rule of its own: worth comparing."""
    name = type(module).__name__
    if name in ACTIVATIONS:
        return _row(composite, "gelu") is not None and getattr(module, "act", None) is not functional.gelu
    # torch's own are seen as the functions that they call, also in a class that inherits from them
    if not _row(composite, "layer_norm") or isinstance(module, _TORCH_NORMS) or any(True for _ in module.children()):
        return False
    own = list(module.parameters())
    return len(own) <= 2 and all(p.dim() <= 2 for p in own) and ("norm" in name.lower() or bool(_epsilons(module)))


def stands_for(module: nn.Module, x: Tensor, output: Any) -> Callable[[Tensor], Tensor] | None:
    """The activation or :class:`Norm` that gives this output of the module for its input, or None."""
    if not isinstance(output, Tensor) or output.shape != x.shape or not x.numel():
        return None
    named = ACTIVATIONS.get(type(module).__name__)
    candidates = _norms(module, x, output) if named is None else [named]
    distances = [(_distance(c(x), output), c) for c in candidates]
    distance, best = min(distances, key=lambda pair: pair[0], default=(1.0, None))
    return best if distance <= _ROUNDING.get(output.dtype, 1e-5) else None


_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two outputs, as a share of the value and of the largest one."""
    size = b.abs()
    return float(((a - b).abs() / (size + size.amax()).clamp(min=torch.finfo(b.dtype).tiny)).amax())


def _epsilons(module: nn.Module) -> list[float]:
    return [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]


def _norms(module: nn.Module, x: Tensor, output: Tensor) -> Iterator[Norm]:
    """Normalisations with the module's own parameters: weight w, 1 + w (Gemma) or none, with and without a bias."""
    own = [p.detach() for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()]
    own = [p for p in own if p.numel() == 1 or x.shape[x.dim() - p.dim() :] == p.shape]
    weights = [None, *own, *(1 + (p if p.dtype == torch.float64 else p.float()) for p in own)]
    epsilons = _epsilons(module) or [1e-6, 1e-5, 1e-12]
    part = (slice(0, 1),) * max(0, min(2, x.dim() - 2))  # a few rows: most candidates fail on them, whatever ε is
    for centred, weight, bias in itertools.product((False, True), weights, [None, *own]):
        if bias is weight and bias is not None:
            continue
        if _distance(Norm(centred, epsilons[0], weight, bias)(x[part]), output[part]) < 0.05:
            yield from (Norm(centred, eps, weight, bias) for eps in epsilons)


@contextlib.contextmanager
def canonized(mode: Interception) -> Iterator[None]:
    """For the length of a run, modules that stand for an operation of the composite run as that operation."""
    handles = []
    try:
        for module in mode.model.modules() if mode.composite.rules else ():
            if suspect(module, mode.composite):
                handles.extend(_canonize(module, mode))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _canonize(module: nn.Module, mode: Interception) -> list[Any]:
    """The module keeps its own forward value (run muted, without graph) and gets the rule of its operation."""
    seen: list[tuple[Tensor, int]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if here.run is mode and mode.muted == 0 and len(given) == 1 and mode.carries(tuple(given), {}):
            mode.muted = id(module)
            seen[:] = [(given[0], given[0]._version)]
            torch._C._set_grad_enabled(False)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if here.run is not mode or mode.muted != id(module):
            return None
        mode.muted = 0
        ((x, version),) = seen
        seen.clear()
        if x._version != version:
            raise ModelError(
                f"the module {type(module).__name__} changes its input in place, so it cannot be run again to be "
                "compared with a known operation; let it return a new tensor"
            )
        with inside(None):
            found = stands_for(module, x.detach(), output)
        torch._C._set_grad_enabled(True)
        if found is None:
            return module.forward(*args, **kwargs)
        rule, info = _row(mode.composite, "gelu"), {}
        if isinstance(found, Norm):
            rule = _row(mode.composite, "layer_norm" if found.centred else "rms_norm")
            info = {"weight": found.weight, "eps": found.eps, "axes": 1, "centred": found.centred}
        if rule is None:
            return module.forward(*args, **kwargs)
        if rule.relevance is not None:  # its closed form of the gradient may be that of another variant
            rule = replace(rule, gradient=None)
        return Ruled.apply(rule, mode.run, _once(output, found), info, x)

    # around the module's own forward alone: what users' hooks do to its output is seen as it is
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, prepend=True),
    ]


def _once(value: Tensor, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``value`` the first time (the module's own result), ``compute`` ever after (its gradient)."""
    state = [value]

    def call(x: Tensor) -> Tensor:
        return state.pop() if state else compute(x)

    return call
