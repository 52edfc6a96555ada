"""Chefer et al. (CVPR 2021): the deep Taylor rules of Transformer Attribution, and the baseline LRP in their form."""

from __future__ import annotations

from collections.abc import Callable

from whyformer.rules.core import NATIVE, Composite, Rule
from whyformer.rules.relevance import attention, elementary, linear


def _table(layer: Rule, add: linear.RelevanceRule) -> dict[str, Rule | None]:
    same = Rule("identity", elementary.identity, books=False)
    weighted = Rule("weighted sum", elementary.z_rule)
    return {
        **dict.fromkeys(("view", "selection"), NATIVE),
        "layer": layer,
        "input layer": Rule("input layer", linear.box, linear.layer_gradient),
        "weighted sum": weighted,
        **dict.fromkeys(("mean", "sum", "cumsum", "interpolate", "fold"), weighted),
        # where something is sampled, and what a system of equations is divided by, are constants
        "grid_sample": Rule("weighted sum", elementary.z_rule_of(0)),
        "linalg_solve_triangular": Rule("weighted sum", elementary.z_rule_of(1)),
        "transform": Rule("weighted sum", elementary.z_rule, books=False),
        **dict.fromkeys([f"{start}avg_pool{n}d" for start in ("", "adaptive_") for n in (1, 2, 3)], weighted),
        "add": Rule("add", add, elementary.add_gradient),
        "shift": Rule("shift", elementary.identity, elementary.add_gradient, books=False),
        "product": Rule("product", elementary.product_halved),
        "normalised": Rule("normalisation in parts", elementary.identity, books=False),
        "gate": Rule("product of two branches", elementary.multiply_halved),
        "attention": Rule(
            "attention", attention.attention_relevance(add), attention.attention_gradient, keep_output=True
        ),
        **dict.fromkeys(("activation", "normalisation", "batch_norm", "softmax", "neg", "mul", "div"), same),
        "gelu": Rule("identity", elementary.identity, elementary.gelu_gradient, books=False),
    }


def deep_taylor(alpha: float = 1.0) -> Composite:
    """Chefer et al. 2021: αβ with a shared denominator, normalised add, halved products, identity elsewhere."""
    rules = _table(linear_rule("alpha_beta", alpha=alpha), elementary.add_normalised)
    return Composite("deep Taylor decomposition (Chefer et al. 2021)", "relevance", rules)


# name -> (rule of α, ε and γ, whether it reads the layer's output)
_LINEAR: dict[str, tuple[Callable[..., linear.RelevanceRule], bool]] = {
    "separate": (lambda alpha, epsilon, gamma: linear.separate, False),
    "alpha_beta": (lambda alpha, epsilon, gamma: linear.alpha_beta(alpha), True),
    "epsilon": (lambda alpha, epsilon, gamma: linear.epsilon(epsilon), True),
    "gamma": (lambda alpha, epsilon, gamma: linear.gamma(gamma), True),
}
LINEAR_RULES = tuple(_LINEAR)


def linear_rule(name: str, *, alpha: float = 1.0, epsilon: float = 1e-6, gamma: float = 0.25) -> Rule:
    """One of ``LINEAR_RULES``, for linear layers and convolutions alike."""
    make, keep = _LINEAR[name]
    return Rule("linear", make(alpha, epsilon, gamma), linear.layer_gradient, keep_output=keep)


def layerwise(
    rule: str = "separate",
    *,
    alpha: float = 1.0,
    epsilon: float = 1e-6,
    gamma: float = 0.25,
    normalise_add: bool = False,
) -> Composite:
    """The CVPR 2021 baseline "LRP": as :func:`deep_taylor` with the linear rule chosen and the plain add rule."""
    add = elementary.add_normalised if normalise_add else elementary.add_plain
    rules = _table(linear_rule(rule, alpha=alpha, epsilon=epsilon, gamma=gamma), add)
    return Composite(f"LRP ({rule})", "relevance", rules)
