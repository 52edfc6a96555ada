"""Modules that write a well-known operation out by hand, and the operation they stand for.

Operations are not semantics: GPT-2's ``gelu_new`` is written with mul, pow, tanh and add, and would get another
explanation than the same function called as ``F.gelu``. A row here names the module class (by name, so that nothing
has to be imported) and the operation; for the run the module keeps its own forward value and gets the operation's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Canonical:
    """The operation a module stands for: its name in the rule tables, and a function of (module, input)."""

    operation: str
    compute: Callable[[nn.Module, Tensor], Tensor]
    info: Callable[[nn.Module], dict[str, Any]] = lambda _: {}


def _tanh_gelu(_: nn.Module, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _exact_gelu(_: nn.Module, x: Tensor) -> Tensor:
    return functional.gelu(x)


def _quick_gelu(_: nn.Module, x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    weight, eps = _scale(module)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * weight


def _scale(module: nn.Module) -> tuple[Tensor, float]:
    """Weight and ε of a written-out RMSNorm; Gemma's weight is stored as its difference from 1."""
    weight: Any = module.weight
    eps = next((float(getattr(module, n)) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), 1e-6)
    return (1 + weight.float() if type(module).__name__.startswith("Gemma") else weight), eps


def _rms_info(module: nn.Module) -> dict[str, Any]:
    weight, eps = _scale(module)
    return {"weight": weight.detach(), "eps": eps, "axes": 1}


_TANH = Canonical("gelu", _tanh_gelu)
_EXACT = Canonical("gelu", _exact_gelu)
_QUICK = Canonical("gelu", _quick_gelu)
_RMS = Canonical("rms_norm", _rms_norm, _rms_info)

CANONIZERS: dict[str, Canonical] = {
    "NewGELUActivation": _TANH,
    "FastGELUActivation": _TANH,
    "GELUTanh": _TANH,
    "PytorchGELUTanh": _TANH,
    "AccurateGELUActivation": _TANH,
    "BloomGelu": _TANH,
    "QuickGELUActivation": _QUICK,
    "QuickGELU": _QUICK,
    "T5LayerNorm": _RMS,
}


def canonical(module: nn.Module) -> Canonical | None:
    """The row for a module: by its class name; any class called ``...RMSNorm`` with a weight is an RMSNorm."""
    name = type(module).__name__
    if name in CANONIZERS:
        return CANONIZERS[name]
    if name == "GELUActivation" and not isinstance(getattr(module, "act", None), nn.Module):
        return None if getattr(module, "act", None) is functional.gelu else _EXACT
    if name.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm) and hasattr(module, "weight"):
        return _RMS
    return None
