"""Chefer et al. (CVPR 2021): the deep Taylor rules of Transformer Attribution, and the baseline LRP in their form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whyformer.engine import operations as ops
from whyformer.rules.core import Composite, Rule
from whyformer.rules.relevance import attention, elementary, linear


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
