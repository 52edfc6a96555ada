"""Ali et al. (ICML 2022): gradient × input with attention probabilities and the norms' deviations held constant."""

from __future__ import annotations

from whyformer.rules import multiplier
from whyformer.rules.core import NATIVE, Composite, Rule

_PLAIN = dict.fromkeys(
    (
        "view",
        "selection",
        "linear",
        "matrix product",
        "activation",
        "power",
        "normalisation",
        "statistic",
        "possible statistic",
        "softmax",
        "log_softmax",
        "attention",
    ),
    NATIVE,
)
_HELD = Rule("constant", hold=(0,))
_NORM = Rule("normalisation", gradient=multiplier.detached_norm)
_SECANT = Rule("secant", gradient=multiplier.secant, keep_output=True)

TABLES: dict[str, dict[str, Rule | None]] = {
    # the attention probabilities are constants: what flows, flows through the values
    "AH": {"attention": Rule("attention", hold=(0, 1)), "softmax": _HELD},
    # so is what a norm divides by, also where it is written out
    "LN": {"layer_norm": _NORM, "rms_norm": _NORM, "statistic": _HELD, "possible statistic": None},
    # ReLU needs none: its gradient is g(x)/x
    "secant": dict.fromkeys(("gelu", "silu", "tanh", "sigmoid", "mish", "elu"), _SECANT),
}


def conservative(*tables: str) -> Composite:
    """LRP(AH), LRP(LN), LRP(AH+LN); "secant" also replaces g'(x) by g(x)/x in activations.

    Args:
        tables: names of ``TABLES``; what is in none of them keeps its ordinary adjoint.
    """
    rules: dict[str, Rule | None] = {**_PLAIN}
    for name in tables:
        rules.update(TABLES[name])
    return Composite(f"LRP({'+'.join(tables)})", "multiplier", rules)
