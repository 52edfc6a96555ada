"""Ali et al. (ICML 2022): gradient × input with attention probabilities and the norms' deviations held constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whyformer.engine import operations as ops
from whyformer.rules import multiplier
from whyformer.rules.core import Composite, MultiplierRule


def _detach_attention(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """AH: the attention probabilities are constants; what flows, flows through the values."""
    q, k, *rest = args
    return function(q.detach(), k.detach(), *rest, **kwargs)


def _detach_output(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return function(*args, **kwargs).detach()


def _detach_layer_norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    a = ops.bind("input normalized_shape weight bias eps", args, kwargs, weight=None, eps=1e-5)
    return multiplier.detached_norm(
        a["input"], function(*args, **kwargs), a["weight"], a["eps"], len(a["normalized_shape"])
    )


def _detach_rms_norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    a = ops.bind("input normalized_shape weight eps", args, kwargs, weight=None, eps=None)
    x = a["input"]
    eps = torch.finfo(x.dtype).eps if a["eps"] is None else a["eps"]
    axes = len(a.get("normalized_shape") or (1,))
    return multiplier.detached_norm(x, function(*args, **kwargs), a["weight"], eps, axes, centred=False)


def _secant(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return multiplier.secant(lambda x: function(x, *args[1:], **kwargs), args[0])


_AH: dict[str, MultiplierRule] = {"scaled_dot_product_attention": _detach_attention, "softmax": _detach_output}
_LN: dict[str, MultiplierRule] = {
    "layer_norm": _detach_layer_norm,
    "rms_norm": _detach_rms_norm,
    "rsqrt": _detach_output,
    "sqrt": _detach_output,
    "std": _detach_output,
    "var": _detach_output,
}
_SECANT: dict[str, MultiplierRule] = dict.fromkeys(("gelu", "relu", "silu", "tanh", "sigmoid", "mish", "elu"), _secant)
_SMOOTH = ops.ACTIVATIONS | ops.LINEAR | ops.VIEWS | {"pow", "reciprocal", "rdiv", "rsqrt", "sqrt", "square"}
_ATTENTION = frozenset({"softmax", "scaled_dot_product_attention", "log_softmax"})


def conservative(heads: bool = True, norms: bool = True, secant: bool = False) -> Composite:
    """Ali et al. 2022: LRP(AH), LRP(LN), LRP(AH+LN); ``secant=True`` also replaces g'(x) by g(x)/x in activations."""
    parts = [name for name, on in (("AH", heads), ("LN", norms), ("secant", secant)) if on]
    rules = {**(_AH if heads else {}), **(_LN if norms else {}), **(_SECANT if secant else {})}
    native = _SMOOTH | ops.NORMS | _ATTENTION
    return Composite(f"LRP({'+'.join(parts)})", "multiplier", rules, native - rules.keys())
