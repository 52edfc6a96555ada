"""Composites: tables operation -> rule. A propagation method is one of these tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whyformer.engine import operations as ops
from whyformer.rules import multiplier
from whyformer.rules.core import Rule
from whyformer.rules.relevance import attention, elementary, linear

# (function, arguments by position, by name) -> output; multiplier carrier
MultiplierRule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Composite:
    """A table of rules for one carrier.

    Attributes:
        name: what error messages call it.
        carrier: "multiplier" (R = x ⊙ m; empty table = gradient × input) or "relevance".
        rules: operation -> rule; special keys of the relevance carrier: "mul_two" (product of two carrying branches),
            "input_conv" (a convolution that reads the root).
        native: operations whose ordinary adjoint is their rule.
        audit: refuse operations in none of the tables. Off only for the plain gradient, where autograd is the rule.
    """

    name: str
    carrier: str
    rules: dict[str, Any] = field(default_factory=dict)
    native: frozenset[str] = frozenset()
    audit: bool = True


# -- multiplier carrier ------------------------------------------------------------------------------------------
GRADIENT = Composite("gradient", "multiplier", audit=False)


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
    import torch

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


# -- relevance carrier -------------------------------------------------------------------------------------------
def _common(linear_rule: Rule, add_rule: Rule, product: Rule) -> dict[str, Any]:
    same = Rule("identity", elementary.identity, books=False)
    weighted = Rule("weighted sum", elementary.z_rule)
    return {
        **dict.fromkeys(ops.ACTIVATIONS | ops.NORMS | {"softmax", "neg", "div", "batch_norm"}, same),
        **dict.fromkeys(
            (
                "mean",
                "sum",
                "avg_pool1d",
                "avg_pool2d",
                "adaptive_avg_pool1d",
                "adaptive_avg_pool2d",
                "cumsum",
                "einsum",
            ),
            weighted,
        ),
        "gelu": Rule("identity", elementary.identity, elementary.gelu_gradient, books=False),
        "linear": linear_rule,
        "add": add_rule,
        "sub": add_rule,
        "matmul": product,
        "mul": same,
        "mul_two": Rule("product of two branches", elementary.multiply_halved),
    }


def deep_taylor(alpha: float = 1.0) -> Composite:
    """Chefer et al. 2021: αβ with a shared denominator, normalised add, halved products, identity elsewhere."""
    rules = _common(
        Rule("linear", linear.linear_alpha_beta(alpha), linear.linear_gradient, keep_output=True),
        Rule("add", elementary.add_normalised, elementary.add_gradient),
        Rule("product", elementary.product_halved),
    )
    rules["scaled_dot_product_attention"] = Rule(
        "attention", attention.attention_relevance(), attention.attention_gradient, keep_output=True
    )
    rules["conv2d"] = rules["conv1d"] = Rule("convolution", linear.convolution_alpha_beta)
    rules["input_conv"] = Rule("input convolution", linear.convolution_z_box)
    return Composite("deep Taylor decomposition (Chefer et al. 2021)", "relevance", rules, ops.VIEWS)


_LINEAR_RULES: dict[str, Callable[..., Rule]] = {
    "separate": lambda **_: Rule("linear", linear.linear_separate, linear.linear_gradient),
    "alpha_beta": lambda alpha, **_: Rule(
        "linear", linear.linear_alpha_beta(alpha), linear.linear_gradient, keep_output=True
    ),
    "epsilon": lambda epsilon, **_: Rule(
        "linear", linear.linear_epsilon(epsilon), linear.linear_gradient, keep_output=True
    ),
    "gamma": lambda gamma, **_: Rule("linear", linear.linear_gamma(gamma), linear.linear_gradient),
}
LINEAR_RULES = tuple(_LINEAR_RULES)


def layerwise(
    rule: str = "separate",
    *,
    alpha: float = 1.0,
    epsilon: float = 1e-6,
    gamma: float = 0.25,
    normalise_add: bool = False,
) -> Composite:
    """The CVPR 2021 baseline "LRP": as :func:`deep_taylor` with the linear rule chosen and the plain add rule."""
    base = deep_taylor()
    add = elementary.add_normalised if normalise_add else elementary.add_plain
    rules = {
        **base.rules,
        "linear": _LINEAR_RULES[rule](alpha=alpha, epsilon=epsilon, gamma=gamma),
        "add": Rule("add", add, elementary.add_gradient),
        "sub": Rule("add", add, elementary.add_gradient),
        "scaled_dot_product_attention": Rule(
            "attention", attention.attention_relevance(add), attention.attention_gradient, keep_output=True
        ),
    }
    return Composite(f"LRP ({rule})", "relevance", rules, ops.VIEWS)
